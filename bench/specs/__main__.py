"""``python -m bench.specs``: random and mutated specs against a real API server, the planner and the operator; see ``judge.py``."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.measure import machine, write_results
from bench.operator.api import Api, bounded
from bench.specs.judge import Verdict, examine
from bench.specs.mutants import mutants
from e2e.cluster.api_server import temporary_api_server

PACKAGES = ("kopf", "kubernetes", "pydantic", "aiohttp")
NAMESPACE = "specs"
NUM_SHOWN = 20
"""Findings that the result keeps; all are printed."""


async def verdicts_of(api: Api, namespace: str, documents: Iterable[dict[str, Any]]) -> list[tuple[dict[str, Any], Verdict]]:
    """Every manifest with its verdict; what an examination raises is a finding too."""

    async def one(document: dict[str, Any]) -> tuple[dict[str, Any], Verdict]:
        try:
            return document, await examine(api, namespace, document)
        except Exception as error:  # noqa: BLE001 - that nothing raises is what is measured
            return document, Verdict(outcome="crashed", findings=(f"{type(error).__name__}: {error}",))

    return await bounded(partial(one, document) for document in documents)


def main() -> int:
    """Judge, show, write; the exit code is 1 where anything was found."""
    parser = argparse.ArgumentParser(prog="python -m bench.specs", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="manifests (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the manifests (default: %(default)s)")
    arguments = parser.parse_args()
    console = Console()
    with (
        tempfile.TemporaryDirectory(prefix="bench-specs-") as folder,
        temporary_api_server(Path(folder) / "api", crds=True) as kubeconfig,
    ):
        began_s = time.monotonic()
        verdicts = asyncio.run(_run(kubeconfig, arguments.seed, arguments.count))
        took_s = time.monotonic() - began_s
    bad = [(document, finding) for document, verdict in verdicts for finding in verdict.findings]
    for document, finding in bad:
        console.print(f"{finding}\n  {json.dumps(document, ensure_ascii=True)[:3000]}", highlight=False, markup=False, soft_wrap=True)
    outcomes = Counter(verdict.outcome for _, verdict in verdicts)
    values = {
        "headline": f"{len(verdicts):,} specs, {len(bad)} findings",
        "machine": machine(PACKAGES), "seed": arguments.seed, "specs": len(verdicts), "seconds": took_s,
        "outcomes": dict(outcomes), "findings": len(bad), "shown": [finding for _, finding in bad[:NUM_SHOWN]],
    }  # fmt: skip
    write_results("specs", values, _markdown(values))
    console.print(_markdown(values))
    return 1 if bad else 0


async def _run(kubeconfig: Path, seed: int, count: int) -> list[tuple[dict[str, Any], Verdict]]:
    async with Api(kubeconfig) as api:
        await api.namespace(NAMESPACE)
        return await verdicts_of(api, NAMESPACE, mutants(seed, count))


def _markdown(values: dict[str, Any]) -> str:
    rows = "\n".join(f"| {outcome} | {count} |" for outcome, count in sorted(values["outcomes"].items()))
    return f"""# Random and mutated specs

{values["specs"]} manifests, seed {values["seed"]}, in {values["seconds"]:.0f} s. Each is given to a real API server (dry run), to the
planner, to the webhook's review and to the operator's decision; what the operator would create is given to the API server again.

| outcome | specs |
|---|---|
{rows}

Findings (a crash, a child of a bad spec, a child that the API server refuses, a refusal without a path, a disagreement of schema and
models): {values["findings"]}.
"""


if __name__ == "__main__":
    sys.exit(main())
