"""The peers' results as a small table, so that unit tests compare with them where TRL and verl are not installed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.fidelity.batches import KINDS
from bench.fidelity.compare import digest
from bench.fidelity.exchange import Batch, Result
from bench.fidelity.shared import cases

EXPECTED = Path(__file__).with_name("expected.json")
SEED = 0


def expected(
    batches: Mapping[str, Batch], found: Mapping[str, tuple[Mapping[tuple[str, str], Result], Mapping[str, str]]]
) -> dict[str, Any]:
    """Digests of every shared case by peer, case, batch and result; of the batches too, because they come from numpy's generator."""
    return {
        "source": "python -m bench.fidelity --write-expected; digests as in bench/fidelity/compare.py",
        "versions": {peer: versions for peer, (_, versions) in found.items()},
        "batches": {kind: digest(batches[f"{kind} {SEED}"]) for kind in KINDS},
        "peers": {
            peer: {
                case.name: {kind: digest(results[case.name, f"{kind} {SEED}"], case.only) for kind in case.batches}
                for case in cases()
                if peer in case.peers
            }
            for peer, (results, _) in found.items()
        },
    }


def dumped(table: Mapping[str, Any]) -> str:
    """The table as JSON with a line for each case, so that a change shows which cases it is about."""
    peers = [
        f"{json.dumps(peer)}: {{\n" + ",\n".join(f"{json.dumps(case)}: {json.dumps(found)}" for case, found in cases_found.items()) + "\n}"
        for peer, cases_found in table["peers"].items()
    ]
    rest = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in table.items() if key != "peers"]
    return "{\n" + ",\n".join([*rest, '"peers": {\n' + ",\n".join(peers) + "\n}"]) + "\n}\n"
