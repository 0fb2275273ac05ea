"""``python -m bench.fidelity``: the same batches through RLJob, TRL and verl; ``bench/results/fidelity.json`` and ``fidelity.md``."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.fidelity import ours, report
from bench.fidelity.batches import KINDS, make
from bench.fidelity.cases import PEERS, Case
from bench.fidelity.compare import TOLERANCE, difference
from bench.fidelity.differences import differences
from bench.fidelity.environment import EnvironmentFailedError, verl_python
from bench.fidelity.exchange import Batch, Result, read_results, write_batches
from bench.fidelity.expected import EXPECTED, dumped, expected
from bench.fidelity.shared import cases
from bench.measure import ChildFailedError, machine, run_child, write_results

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "numpy")
PEER_TIMEOUT_S = 600.0
Results = dict[tuple[str, str], Result]
"""By name of the case and of the batch."""


def main() -> int:
    """Compute, compare, write; returns 1 when a shared variant differs, or one that should differ does not."""
    arguments = _parse()
    console = Console(stderr=True)
    batches = {f"{kind} {seed}": make(kind, seed) for seed in range(arguments.seeds) for kind in KINDS}
    try:
        pythons = {"trl": Path(sys.executable), "verl": arguments.verl_python or verl_python(console.print)}
        with tempfile.TemporaryDirectory() as folder:
            write_batches(Path(folder), batches)
            found = {peer: _ask(peer, pythons[peer], Path(folder), arguments.seeds) for peer in PEERS}
    except (ChildFailedError, EnvironmentFailedError) as error:
        console.print(f"[bold red]failed:[/] {error}", highlight=False)
        return 1
    values = compare(cases(), differences(), batches, {peer: results for peer, (results, _) in found.items()})
    versions = {peer: versions for peer, (_, versions) in found.items()}
    values |= {"machine": machine(PACKAGES), "versions": versions, "seeds": arguments.seeds}
    write_results("fidelity", values, report.markdown(values))
    console.print("written: bench/results/fidelity.json, fidelity.md", highlight=False)
    if arguments.write_expected:
        EXPECTED.write_text(dumped(expected(batches, found)))
        console.print(f"written: {EXPECTED.relative_to(ROOT)}", highlight=False)
    for problem in values["problems"]:
        console.print(f"[bold red]failed:[/] {problem}", highlight=False)
    console.print(values["headline"], highlight=False)
    return 1 if values["problems"] else 0


def _ask(peer: str, python: Path, folder: Path, seeds: int) -> tuple[Results, dict[str, str]]:
    """All results of a peer's process, and its versions."""
    asked = [case for case in (*cases(), *differences()) if peer in case.peers]
    lines = [
        {
            "name": case.name,
            "given": case.given,
            "settings": getattr(case, peer),
            "batches": [f"{kind} {seed}" for seed in range(seeds) for kind in case.batches],
        }
        for case in asked
    ]
    (folder / "cases.json").write_text(json.dumps(lines))
    output, log = folder / f"{peer}.npz", folder / f"{peer}.log"
    run_child(
        [str(python), "-m", f"bench.fidelity.{peer}_peer", str(folder), str(output)],
        log_file=log,
        timeout_s=PEER_TIMEOUT_S,
        env={"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"},
    )
    return read_results(output)


def compare(same: Sequence[Case], different: Sequence[Case], batches: Mapping[str, Batch], peers: Mapping[str, Results]) -> dict[str, Any]:
    """The figures of the report: shared variants, differences, problems, headline."""
    shared, problems = [], []
    for case in same:
        row: dict[str, Any] = {"case": case.name, "batches": case.batches, "peers": {}}
        for peer in case.peers:
            row["peers"][peer], row["results"] = _furthest(case, peers[peer], batches)
            if row["peers"][peer]["value"] > TOLERANCE:
                problems.append(f"{case.name}: differs from {peer} by {row['peers'][peer]}")
        shared.append(row)
    apart = []
    for case in different:
        for peer in case.peers:
            apart.append({"case": case.name, "peer": peer, "why": case.why, **_furthest(case, peers[peer], batches)[0]})
            if apart[-1]["value"] <= TOLERANCE:
                problems.append(f"{case.name}: agrees with {peer}, although the sides should differ; move it to the shared variants")
    found = [(row["case"], peer, value) for row in shared for peer, value in row["peers"].items()]
    agree = sum(value["value"] <= TOLERANCE for _, _, value in found)
    name, peer, largest = max(found, key=lambda entry: entry[2]["value"])
    return {
        "shared": shared,
        "differences": apart,
        "problems": problems,
        "compared": len(found),
        "agree": agree,
        "worst": {"case": name, "peer": peer, **largest},
        "headline": f"{agree} of {len(found)} comparisons with TRL and verl agree within {TOLERANCE:g}, the largest difference is "
        f"{largest['value']:.1e}; {len(apart)} known differences",
    }


def _furthest(case: Case, theirs: Results, batches: Mapping[str, Batch]) -> tuple[dict[str, Any], Sequence[str]]:
    """Where a case differs most, over its batches and seeds; and what was compared."""
    found = []
    for name, batch in batches.items():
        if name.split()[0] in case.batches:
            mine, other = ours.run(case, batch), theirs[case.name, name]
            found.append({"batch": name, **asdict(difference(case, mine, other))})
    return max(found, key=lambda entry: entry["value"]), [result for result in mine if result in other]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.fidelity", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="batches of each kind (default: 3)")
    parser.add_argument("--verl-python", type=Path, help="an interpreter that has verl; by default an environment is made with uv, once")
    parser.add_argument("--write-expected", action="store_true", help="also renew the table that the unit tests compare with")
    arguments = parser.parse_args()
    if arguments.seeds < 1:
        parser.error(f"--seeds is {arguments.seeds}; it must be at least 1")
    if arguments.verl_python is not None and not arguments.verl_python.is_file():
        parser.error(f"--verl-python {arguments.verl_python} is no file; name the interpreter of an environment with verl")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
