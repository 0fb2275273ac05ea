"""Each bench with a peer measures pairs and keeps their ratios; pure parts only, and one tiny offload."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bench.chaos.outcome import FAILED, RECOVERED, Outcome
from bench.offload import peers, switches
from bench.operator import report
from bench.placement.__main__ import compared
from bench.recovery import FULL, rows_of


def test_placement_counts_cases_that_all_runs_accept_and_compares_pair_by_pair() -> None:
    def rows(seconds: float, *, ok: bool = True) -> dict[str, dict[str, Any]]:
        case = {"ok": True, "digest": "d", "difference": None, "seconds": seconds, "placement_s": seconds / 2}
        late = {"timed_out": True} if not ok else case
        return {"first": case, "second": late, "third": case | {"digest": str(seconds), "difference": "named"}}

    found = compared([rows(1.0), rows(2.0), rows(1.0)], [rows(10.0), rows(10.0, ok=False), rows(30.0)])
    assert (found["cases"], found["accepted_by_both"], found["equal_placements"], found["intended_differences"]) == (3, 2, 1, 1)
    assert found["ratios"] == {"whole": [10.0, 5.0, 30.0], "placement alone": [10.0, 5.0, 30.0]}
    assert (found["rljob_plans_per_s"], found["rlinf_placements_per_s"]) == (1.0, 0.2)


def test_offload_takes_turns_and_keeps_each_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (peers, switches):
        monkeypatch.setattr(module, "WIDTH", 8)
    found = peers.to_cpu(torch.device("cpu"), 2, 3)
    assert {way: len(pairs) for way, pairs in found["ratios"].items()} == {"offload": 3, "load": 3}
    assert found["stands_for"] == "clone"
    assert min(found[key] for key in ("rljob_offload_s", "rljob_load_s", "offload_s", "load_s")) > 0


def test_offload_ratios_are_the_other_over_ours() -> None:
    seconds = {
        ("rljob", "offload"): [1.0, 2.0, 4.0], ("rljob", "load"): [1.0, 1.0, 1.0],
        ("to", "offload"): [2.0, 2.0, 2.0], ("to", "load"): [3.0, 4.0, 5.0],
    }  # fmt: skip
    found = peers.beside(seconds)
    assert found["ratios"] == {"offload": [2.0, 1.0, 0.5], "load": [3.0, 4.0, 5.0]}
    assert (found["rljob_offload_s"], found["load_s"]) == (2.0, 4.0)


def test_recovery_compares_faults_of_one_round_and_leaves_out_what_did_not_recover() -> None:
    def met(kind: str, seconds: float | None) -> Outcome:
        return Outcome(layer="processes", kind=kind, result=FAILED if seconds is None else RECOVERED, recovery_s=seconds)

    found = [
        met("engine killed", 10.0),
        met(FULL, 50.0),
        met("engine killed", None),
        met(FULL, 60.0),
        met("engine killed", 20.0),
        met(FULL, 40.0),
    ]
    engine, whole = rows_of(found, 2)
    assert (engine["ratios"], engine["all_s"], engine["times"]) == ([5.0, 2.0], [10.0, 20.0], 2)
    assert (whole["ratios"], whole["times"], whole["largest_s"]) == ([], 3, 60.0)


def test_operator_reports_the_pairs_beside_the_largest_burst() -> None:
    direct = [{"rayjobs": 333, "objects": 1665, "all_objects_s": each, "all_created_s": 2.0} for each in (3.0, 4.0, 5.0)]
    values: dict[str, Any] = {
        "latency": {"p50_ms": 1.0, "p99_ms": 2.0}, "reaction": {"live_jobs": 9, "p50_ms": 1.0, "p99_ms": 2.0},
        "idle": {"jobs": 9, "writes_per_min": 0.0, "cpu_share_of_a_core": 0.0}, "life": {"create": 7.0, "patch": 3.0, "by_kind": {}},
        "restart": {"present": 9, "first_job_s": 1.0, "all_jobs_s": 2.0, "rss_bytes": 1e8, "operator_cpu_s": 1.0, "server_cpu_s": 1.0},
        "bursts": [{"jobs": 333, "all_children_s": 13.0, "jobs_per_s": 25.0}, {"jobs": 1000, "all_children_s": 40.0, "jobs_per_s": 25.0}],
        "direct": direct, "ratios": [0.2, 0.3, 0.4], "rss": [],
    }  # fmt: skip
    answers = {question: measured for question, measured, _ in report.rows(values)}
    assert answers["1000 RLJobs at once -> all RayJobs"] == "40.0 s (25/s)"
    (by_client,) = [measured for question, measured in answers.items() if "created by the client" in question]
    assert "4.0 s (83 jobs/s, 416 objects/s)" in by_client
    assert "0.30 (0.20 to 0.40, 3 pairs)" in by_client
