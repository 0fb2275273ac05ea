"""The lists of results name what was measured, quote its headline, and are those of the files that lie there."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from bench.__main__ import MEASUREMENTS, PAGE, PARTS, index, page
from bench.measure import RESULTS

OPERATOR = {
    "latency": {"p50_ms": 21.4, "p99_ms": 60.6},
    "bursts": [{"jobs": 100, "all_children_s": 1.0}, {"jobs": 1000, "all_children_s": 8.04}],
}
ALONE = {"rljob_placements_per_s": 14000.0, "rlinf_placements_per_s": 4000.0}
PLACEMENT = {
    "recorded": {"cases": 218, "rljob_plans_per_s": 5200.0, "rlinf_plans_per_s": 400.0} | ALONE,
    "random": {"cases": 2000, "rljob_plans_per_s": 5400.0, "rlinf_plans_per_s": 450.0} | ALONE,
    "growth": [{"sides": {"plan": {"points": [{"devices": 100_000, "seconds": 0.203}], "exponent": 1.016}}}],
}
OFFLOAD = {
    "switch": {"offload_gb_per_s": 45.0, "load_gb_per_s": 48.0},
    "limits": {"offload_gb_per_s": 50.0, "load_gb_per_s": 50.0, "duplex_gb_per_s": 80.0},
}
ONE_PAIR = {
    "key": "ii",
    "title": "a heavy tail",
    "runs": [{"side": "TRL", "updates_per_s": 1.0}, {"side": "RLJob", "updates_per_s": 5.837}],
}
LOG_PROBS = {"tokens": 4096, "vocabulary": 16384, "chunk_tokens": 0, "peak_mib": 35.1}
TRL = {
    "workloads": [
        {
            "key": "i",
            "title": "the quickstart",
            "summary": {"ratio": 1.5},
            "runs": [
                {"side": "TRL", "updates_per_s": 2.0},
                {"side": "TRL", "updates_per_s": 2.0},
                {"side": "RLJob", "updates_per_s": 2.0},
                {"side": "RLJob", "updates_per_s": 4.0},
            ],
        }
    ]
}


@pytest.mark.parametrize(
    ("name", "values", "headline"),
    [
        ("operator", OPERATOR, "RLJob to RayJob p50 21 ms, p99 61 ms, 1000 at once in 8.0 s"),
        (
            "placement",
            PLACEMENT,
            "13.0 times RLinf's plans per second on recorded cases (3.5 for the placement alone), "
            "12.0 times RLinf's plans per second on random cases (3.5 for the placement alone), "
            "100,000 devices in 0.20 s, exponent 1.02",
        ),
        ("trl-ii", {"workloads": [ONE_PAIR]}, "5.84 times, one pair of runs"),
        ("trl-i", TRL | {"earlier": [{"workloads": [ONE_PAIR | {"key": "i"}]}]}, "1.50 times in the median of 2 pairs (1.00 to 2.00)"),
        (
            "weightsync-adapters",
            {"turns": {"Merged": [{"sync_s": 0.14}], "Served": [{"sync_s": 0.009}]}},
            "9 ms an update instead of 140 ms",
        ),
        (
            "weightsync-nodes",
            {"rows": [{"way": "dense, one engine there", "mbit": 200, "socket_s": 1.4, "seconds": 1.75}]},
            "80% of a bare socket at 200 Mbit/s",
        ),
        (
            "logprob_memory",
            {"points": [LOG_PROBS | {"method": "full", "peak_mib": 752.0}, LOG_PROBS | {"method": "chunked", "chunk_tokens": 256}]},
            "4,096 tokens, vocabulary of 16,384: 35 MiB in chunks of 256 tokens, 752 MiB with full logits",
        ),
        ("offload-cuda", OFFLOAD, "offload at 90 % of bare copies, load at 96 % of bare copies"),
        ("logprob_memory", [{"chunk": 256}], ""),
        ("logprob_memory", {"machine": {}}, ""),
    ],
)
def test_headlines(tmp_path: Path, name: str, values: object, headline: str):
    (tmp_path / f"{name}.json").write_text(json.dumps(values))
    (line,) = [line for line in index(tmp_path).splitlines() if line.startswith("| [")]
    answers = PARTS.get(name) or next(m.answers for m in MEASUREMENTS if name.startswith(m.name))
    assert line == f"| [{name}]({name}.json): {answers} | {headline} | -, - | - |"


@pytest.mark.parametrize("measurement", MEASUREMENTS, ids=lambda m: m.name)
def test_every_measurement_is_a_module(measurement):
    assert importlib.util.find_spec(f"bench.{measurement.name}")


def test_the_lists_are_those_of_the_files():
    """After a measurement that was started by itself: python -c "from bench.__main__ import write_lists; write_lists()"."""
    assert (RESULTS / "README.md").read_text() == index(RESULTS)
    assert PAGE.read_text() == page(RESULTS)


def test_parts_have_results():
    assert {name for name in PARTS if not (RESULTS / f"{name}.json").exists()} == set()


def test_no_table_of_results_is_missing():
    assert [file.name for file in sorted(RESULTS.glob("*.md")) if file.name != "README.md" and f"({file.name})" not in index(RESULTS)] == []
