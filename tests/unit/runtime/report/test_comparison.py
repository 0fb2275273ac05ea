"""Runs side by side: variants, differing fields, and what differences are worth."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_runtime.report.comparison import Run, as_json, compare, flat
from rljob_runtime.report.comparison_page import MAX_LEGEND_CHARACTERS, page
from rljob_runtime.report.metrics import MetricsTable
from rljob_runtime.report.significance import EXACT, difference, holm
from rljob_runtime.report.words_of_comparison import cell_text, difference_text, significance_note

VALUES = st.lists(st.floats(-100, 100), min_size=1, max_size=5)


def run(label: str, reward: float, *, rate: float = 1e-4, seed: int = 0, steps: int = 12, **more: float) -> Run:
    columns = {"reward/mean": (0.0,) * (steps - 10) + (reward,) * 10, "time/step_s": (9.0, *(0.5,) * (steps - 1))}
    columns |= {name.replace("__", "/"): (value,) * steps for name, value in more.items()}
    manifest: dict[str, Any] = {
        "metadata": {"name": label},
        "spec": {
            "seed": seed,
            "training": {"learningRate": rate},
            "components": [{"name": "a", "role": "Trainer"}, {"name": "b", "role": "Rollout"}],
        },
    }
    table = MetricsTable(
        steps=tuple(range(1, steps + 1)),
        versions=tuple(range(1, steps + 1)),
        wall_s=tuple(float(i) for i in range(steps)),
        columns=columns,
    )
    return Run(label=label, manifest=manifest, table=table, status="succeeded")


def test_seeds_of_one_job_are_one_variant_and_differing_fields_name_it() -> None:
    found = compare([run("a0", 0.5), run("b0", 0.8, rate=4e-4), run("a1", 0.7, seed=1), run("b1", 0.9, rate=4e-4, seed=1)])
    assert [(v.label, [r.label for r in v.runs]) for v in found.variants] == [
        ("learningRate 0.0001", ["a0", "a1"]),
        ("learningRate 0.0004", ["b0", "b1"]),
    ]
    assert found.differences == {"spec.training.learningRate": ("0.0001", "0.0004")}
    rows = {measure.name: cells for measure, cells in found.rows}
    assert list(rows) == ["reward", "stepSeconds"], "measures that no run has are left out"
    assert rows["reward"][0].mean == pytest.approx(0.6)
    assert rows["stepSeconds"][0].values == (0.5, 0.5), "the first step is slower than the others"
    assert cell_text(rows["reward"][0]) == "0.6 ± 0.1414"
    d = rows["reward"][1].against_first
    assert d is not None
    assert d.mean == pytest.approx(0.25)
    assert (d.p, d.smallest_p) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert difference_text(rows["reward"][1]).startswith("+0.25 [")
    assert not rows["reward"][1].is_significant
    assert "4 seeds on both sides are the fewest" in significance_note(found)


def test_four_seeds_apart_are_significant_and_single_runs_have_no_interval() -> None:
    runs = [run(f"a{i}", 0.1 + i / 100, seed=i) for i in range(4)] + [run(f"b{i}", 0.9 + i / 100, rate=1.0, seed=i) for i in range(4)]
    (_, cells), *_ = compare(runs).rows
    assert cells[1].p == pytest.approx(2 / 70)
    assert cells[1].is_significant
    assert difference_text(cells[1]).endswith("p 0.029 *")
    (_, alone), *_ = compare([run("a", 0.1), run("b", 0.9, rate=1.0)]).rows
    assert alone[1].against_first is not None
    assert alone[1].against_first.low is None
    one = compare([run("a", 0.1)])
    assert significance_note(one) == "One variant: there is nothing to test."


def test_entries_of_lists_are_found_by_name_and_absent_fields_are_reported() -> None:
    turned = run("t", 0.5)
    turned.manifest["spec"]["components"].reverse()
    assert len(compare([run("a", 0.5), turned]).variants) == 1, "the order of components says nothing"
    more = run("m", 0.5)
    more.manifest["spec"]["storage"] = {"size": "1Gi"}
    found = compare([run("a", 0.5), more])
    assert found.differences == {"spec.storage.size": ("-", '"1Gi"')}
    assert flat({"x": [{"name": "n", "v": [1, 2]}], "e": {}}) == {"x[n].v": "[1, 2]", "e": "{}"}


def test_json_has_everything_and_no_nan() -> None:
    document = as_json(compare([run("a", 0.5), run("b", math.nan, rate=1.0)]))
    text = json.dumps(document, allow_nan=False)
    assert json.loads(text) == document
    assert document["differences"] == {"spec.training.learningRate": [1e-4, 1.0]}
    reward = document["measures"][0]
    assert reward["variants"][0] == {"values": [0.5], "mean": 0.5, "standardDeviation": None}
    assert reward["variants"][1]["mean"] is None


@given(VALUES, VALUES)
def test_the_p_value_is_the_share_of_splits_as_far_apart(a: list[float], b: list[float]) -> None:
    pool, observed = [*a, *b], abs(sum(b) / len(b) - sum(a) / len(a))
    splits = list(combinations(range(len(pool)), len(b)))
    gaps = [abs(sum(pool[i] for i in s) / len(b) - sum(pool[i] for i in range(len(pool)) if i not in s) / len(a)) for s in splits]
    tolerance = 1e-7
    at_least = sum(gap >= observed + tolerance for gap in gaps) / len(gaps)
    at_most = sum(gap >= observed - tolerance for gap in gaps) / len(gaps)
    found = difference(a, b)
    assert at_least - 1e-12 <= found.p <= at_most + 1e-12
    assert found.p >= found.smallest_p - 1e-12
    assert (found.low is None) == (min(len(a), len(b)) == 1)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6))
def test_holm_only_raises_p_values_and_keeps_their_order(values: list[float]) -> None:
    corrected = holm(values)
    assert all(p <= q <= min(1.0, len(values) * p) + 1e-12 for p, q in zip(values, corrected, strict=True))
    order = sorted(range(len(values)), key=values.__getitem__)
    assert [corrected[i] for i in order] == sorted(corrected)


def test_many_runs_are_drawn_instead_of_enumerated() -> None:
    far = difference([i / 100 for i in range(12)], [5 + i / 100 for i in range(12)])
    assert far.p == 1 / (EXACT + 1) == far.smallest_p
    assert difference([1.0] * 12, [1.0] * 12).p == 1.0
    with pytest.raises(ValueError, match="finite values on both sides"):
        difference([], [1.0])


def test_the_folder_that_all_runs_are_in_is_not_repeated() -> None:
    assert [v.label for v in compare([run("/storage/team/a", 0.5)]).variants] == ["a"]
    different = [run(path, 0.5, seed=seed) for seed, path in enumerate(("/storage/team/a", "/storage/team/b"))]
    assert [v.label for v in compare(different).variants] == ["a"]
    assert compare([run("runs/a", 0.5)]).variants[0].label == "runs/a", "short ones stay as they were given"
    assert compare([run("/storage/x/a", 0.5), run("/storage/y/a", 0.5, seed=1)]).variants[0].label == "/storage/x/a"


def test_validations_are_not_averaged_over_steps() -> None:
    one = run("a", 0.5)
    values = (0.2, *(math.nan,) * 10, 0.6)
    table = replace(one.table, columns={**one.table.columns, "validation/mean": values})
    text = page(compare([replace(one, table=table)]))
    assert "validation/mean; the band spans the seeds" in text
    assert '"y":[0.2,0.6]' in text


def test_legends_fit_a_narrow_window_and_tables_have_the_whole_label() -> None:
    labels = [f"/mnt/storage/team/runs/{'x' * 60}/seed-{seed}" for seed in range(2)]
    text = page(compare([run(label, 0.5, rate=rate) for label, rate in zip(labels, (0.1, 0.2), strict=True)]))
    names = set(re.findall(r'"name":"([^"]*)"', text))
    assert len(names) == 2
    assert {len(json.loads(f'"{name}"')) for name in names} <= set(range(MAX_LEGEND_CHARACTERS + 1))
    assert all(label in text for label in labels)
