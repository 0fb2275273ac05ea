"""The table of peers: from the results as they are, and from figures made for it."""

from pathlib import Path
from typing import Any

import pytest

from bench import peers, peers_chart
from bench.__main__ import MEASUREMENTS
from bench.measure import RESULTS
from bench.pairs import ratios, spread


def test_every_peer_is_in_the_table_with_its_result() -> None:
    found = list(peers.rows(RESULTS))
    assert {row.peer.split(",")[0] for _, _, row in found} >= {
        "TRL", "vLLM alone", "plain PyTorch loop", "RLinf 0.3.0", "safetensors file", "pickled objects through Ray",
        "a full restart from the checkpoint",
    }  # fmt: skip
    assert any(row.peer.startswith("plain KubeRay") for _, _, row in found)
    assert any("clone" in row.peer for _, _, row in found)
    assert all(row.ratios for _, _, row in found)
    assert all((RESULTS / f"{stem}.md").is_file() for stem, _, _ in found)
    assert {stem.split("-")[0] for stem, _, _ in found} <= {measurement.name for measurement in MEASUREMENTS}
    assert len(peers.table(RESULTS, "")) == 2 + len(found)


def test_a_ratio_is_the_median_of_its_pairs() -> None:
    speed = {
        "machine": {},
        "rows": [{"model": "m", "case": "short", "tokens_per_cpu_s": {"RLJob": [2, 6, 9], "TRL": [1, 2, 9], "plain loop": [2, 2, 2]}}],
    }
    beside_trl, beside_loop = peers.READERS["training"]({"speed": speed})
    assert (spread(beside_trl.ratios), spread(beside_loop.ratios)) == ("2.00 (1.00 to 3.00, 3 pairs)", "3.00 (1.00 to 4.50, 3 pairs)")
    workload = {"title": "t", "ratios": [1.5]}
    (row,) = peers.READERS["generation"]({"machine": {}, "workloads": [workload]})
    assert spread(row.ratios) == "1.50, one pair"
    assert list(peers.READERS["training"]({})) == []


def test_the_ratio_to_trl_is_of_the_newest_measurement() -> None:
    def measured(own: float) -> dict[str, object]:
        runs = [{"side": "TRL", "updates_per_s": 1.0}, {"side": "RLJob", "updates_per_s": own}]
        return {"workloads": [{"key": "i", "title": "t", "runs": runs}]}

    (row,) = peers.READERS["trl-i"](measured(2.0) | {"earlier": [measured(8.0)]})
    assert row.ratios == (2.0,)


THREE = [2.0, 1.0, 4.0]
MEASURED: dict[str, dict[str, Any]] = {
    "placement": {name: {"cases": 1000, "ratios": {"whole": THREE, "placement alone": THREE}} for name in ("recorded", "random")},
    "offload": {"to_cpu": {"stands_for": "clone", "ratios": {"offload": THREE, "load": THREE}}},
    "weightsync": {"sizes": [{"mib": 1}, {"mib": 1024, "ratios": {"safetensors": THREE, "objects": THREE}}]},
    "operator": {"direct": [{"rayjobs": 333}], "ratios": THREE},
    "recovery": {"rows": [{"kind": "engine killed", "ratios": THREE}, {"kind": "everything killed", "ratios": []}]},
}


@pytest.mark.parametrize(("stem", "count"), [("placement", 4), ("offload", 2), ("weightsync", 2), ("operator", 1), ("recovery", 1)])
def test_rows_of_measurements_with_pairs(stem: str, count: int) -> None:
    found = list(peers.READERS[stem](MEASURED[stem]))
    assert [spread(row.ratios) for row in found] == ["2.00 (1.00 to 4.00, 3 pairs)"] * count
    assert len({row.label for row in found}) == count


def test_the_picture_has_a_bar_for_each_row_in_the_order_of_the_table() -> None:
    first, second = peers_chart.bars(list(peers.READERS["weightsync"](MEASURED["weightsync"])))
    assert (first.label, first.median, first.low, first.high) == ("safetensors file: weight sync", 2.0, 1.0, 4.0)
    assert second.label == "pickled objects through Ray: weight sync"


def test_no_picture_without_comparisons(tmp_path: Path) -> None:
    (tmp_path / peers_chart.NAME).write_text("of earlier results")
    peers_chart.draw(tmp_path)
    assert not (tmp_path / peers_chart.NAME).exists()


def test_ratios_are_taken_pair_by_pair() -> None:
    assert ratios([1.0, 2.0], [3.0, 3.0]) == [3.0, 1.5]
    with pytest.raises(ValueError, match="zip"):
        ratios([1.0], [])
