"""The table of peers: from the results as they are, and from figures made for it."""

from bench import peers
from bench.__main__ import MEASUREMENTS
from bench.measure import RESULTS


def test_every_peer_is_in_the_table_with_its_result() -> None:
    found = list(peers.rows(RESULTS))
    named = " ".join(row.peer for _, _, row in found)
    for peer in ("TRL", "vLLM alone", "RLinf", "safetensors", "pickled", "plain KubeRay", "full restart", "clone"):
        assert peer in named
    assert all((RESULTS / f"{stem}.md").is_file() for stem, _, _ in found)
    assert {stem.split("-")[0] for stem, _, _ in found} <= {measurement.name for measurement in MEASUREMENTS}
    assert len(peers.table(RESULTS, "")) == 2 + len(found)


def test_a_ratio_is_the_median_of_its_pairs() -> None:
    speed = {
        "machine": {},
        "rows": [{"model": "m", "case": "short", "tokens_per_cpu_s": {"RLJob": [2, 6, 9], "TRL": [1, 2, 9], "plain loop": [2, 2, 2]}}],
    }
    beside_trl, beside_loop = peers.READERS["training"]({"speed": speed})
    assert (beside_trl.ratio, beside_loop.ratio) == ("2.00 (1.00 to 3.00, 3 pairs)", "3.00 (1.00 to 4.50, 3 pairs)")
    workload = {"title": "t", "ratios": [1.5]}
    (row,) = peers.READERS["generation"]({"machine": {}, "workloads": [workload]})
    assert row.ratio == "1.50, one pair"
    assert list(peers.READERS["training"]({})) == []


def test_the_ratio_to_trl_is_of_the_newest_measurement() -> None:
    def measured(own: float) -> dict[str, object]:
        runs = [{"side": "TRL", "updates_per_s": 1.0}, {"side": "RLJob", "updates_per_s": own}]
        return {"workloads": [{"key": "i", "title": "t", "runs": runs}]}

    (row,) = peers.READERS["trl-i"](measured(2.0) | {"earlier": [measured(8.0)]})
    assert row.ratio == "2.00, one pair"


def test_the_placement_alone_is_beside_the_whole_plan() -> None:
    cases = {"cases": 2, "rljob_plans_per_s": 12.0, "rlinf_plans_per_s": 1.0, "rljob_placements_per_s": 7.0, "rlinf_placements_per_s": 2.0}
    found = [row.ratio for row in peers.READERS["placement"]({"recorded": cases, "random": cases})]
    assert found == ["12.0", "12.0", "3.5", "3.5"]
