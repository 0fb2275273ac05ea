"""What would make steps shorter: formulas by hand, and two real runs, of which the second did what the first one's phases say."""

import json
import math
from collections.abc import Mapping

import pytest
import yaml

from rljob_api.validation import check
from rljob_runtime.report.faster import (
    Change,
    Devices,
    StepTimes,
    advice,
    changes,
    devices_of,
    of_milliseconds,
    to_milliseconds,
    typical,
    words,
)
from rljob_runtime.report.html import render_report
from rljob_runtime.report.metrics import MetricsTable, table_of
from rljob_runtime.report.summary import RunStatus, summarize
from tests.layout.tree import ROOT
from tests.support.report_fakes import INFO
from tests.unit.api.manifests import manifest

TIMES = StepTimes(step_s=10.0, generate_s=6.0, reward_s=0.5, score_s=0.0, train_s=2.0, sync_s=1.0, stall_s=0.25)


def devices(**changed: int | bool) -> Devices:
    return Devices(**{"trainer": 4, "rollout": 4, "per_engine": 1, "trainer_unit": 1, "shared": False} | changed)


def found(times: StepTimes, where: Devices, ratio: float = 0.0) -> Mapping[str, float]:
    return {change.what: pytest.approx(change.step_s) for change in changes(times, where, ratio)}


def test_a_synchronous_job_overlaps_moves_devices_or_shares_them() -> None:
    assert found(TIMES, devices()) == {
        # in turn: 6 * 4/5 + 2 * 4/3 + 0.5 + 1 + rest of 0.5
        "3 devices for training and 5 for generation": 6 * 4 / 5 + 2 * 4 / 3 + 2.0,
        # both on all eight
        "trainer and engines on the same 8 devices, plus the time of switching": 3 + 1 + 2.0,
        # side by side: the larger of 6.5 + 0.25 and 3, and the rest
        "overlap.asyncGenerationRatio 1": 7.25,
        # 6 * 4/6 + 0.75 of generation, 2 * 4/2 + 1 of training
        "overlap.asyncGenerationRatio 1, 2 devices for training and 6 for generation": 5.0 + 0.5,
    }


def test_the_best_comes_first_and_what_saves_little_is_left_out() -> None:
    *comparable, last = changes(TIMES, devices(), 0.0)
    assert [change.step_s for change in comparable] == sorted(change.step_s for change in comparable)
    assert (last.lacks_switching, [change.lacks_switching for change in comparable]) == (True, [False] * 3)
    training = StepTimes(step_s=10.0, generate_s=0.3, reward_s=0.0, score_s=0.0, train_s=9.7, sync_s=0.0, stall_s=0.0)
    assert "overlap.asyncGenerationRatio 1" not in found(training, devices())
    assert changes(training, devices(trainer=1, rollout=1), 1.0) == []


def test_engines_and_trainers_stay_whole() -> None:
    kept = found(TIMES, devices(trainer=4, rollout=4, per_engine=2, trainer_unit=4))
    assert set(kept) == {"trainer and engines on the same 8 devices, plus the time of switching", "overlap.asyncGenerationRatio 1"}


def test_advice_for_shared_devices_is_to_part_them() -> None:
    assert found(TIMES, devices(trainer=8, rollout=8, shared=True)) == {}  # all devices for each phase are hard to beat
    switching = StepTimes(step_s=10.0, generate_s=3.0, reward_s=1.0, score_s=0.0, train_s=0.5, sync_s=0.5, stall_s=0.0, switch_s=4.5)
    assert found(switching, devices(trainer=8, rollout=8, shared=True)) == {
        # 3 * 8/7 + 1 of generation, 0.5 * 8 + 0.5 of training; of the other 5 s switching is saved
        "overlap.asyncGenerationRatio 1, 1 device for training and 7 for generation": 4.5 + 0.5,
    }


def test_a_run_that_generates_ahead_can_gain_what_it_still_waits() -> None:
    assert changes(TIMES, devices(), 1.0) == [
        Change(what="more devices for generation, or overlap.asyncGenerationRatio 2", step_s=pytest.approx(3.5))
    ]


def test_phases_that_share_cores_gain_no_more_than_the_wait_for_rewards_where_each_uses_all_of_them() -> None:
    """As the quickstart on two busy cores: its step of 0.30 s took 0.35 s when it generated ahead. The phases are made for this test."""
    times = StepTimes(step_s=0.30, generate_s=0.16, reward_s=0.01, score_s=0.0, train_s=0.10, sync_s=0.01, stall_s=0.0)
    (ahead,) = [change for change in changes(times, devices(trainer=1, rollout=1, on_cpu=True), 0.0) if "Ratio 1" in change.what]
    assert (ahead.step_s, ahead.contended_s) == (pytest.approx(0.19), pytest.approx(0.29))
    (line,) = words(times, [ahead], on_cpu=True)
    assert line == (
        "overlap.asyncGenerationRatio 1: a step of 0.19 s if cores are left for it, 0.29 s or more if generation and training each use all "
        "cores, now 0.30 s (37% less at best)"
    )
    (apart,) = [change for change in changes(times, devices(trainer=1, rollout=1), 0.0) if "Ratio 1" in change.what]
    assert apart.contended_s is None


def test_a_real_run_with_the_change_was_as_fast_as_the_phases_of_the_one_before_said() -> None:
    """A run of the overlap bench, steps of 0.9 s: trainer and engine have a core each, 40 steps with ratio 0, then with ratio 1."""
    runs = {run["side"]: run for run in json.loads((ROOT / "tests" / "data" / "overlap_recorded.json").read_text())["runs"]}
    before, after = runs["ratio 0"], runs["ratio 1"]
    names = ("step_s", "generate_s", "reward_s", "train_s", "sync_s")
    times = StepTimes(score_s=0.0, stall_s=0.0, **{name: before[name] for name in names})  # InFlight: engines go on during a sync
    promised = {change.what: change.step_s for change in changes(times, devices(trainer=1, rollout=1), 0.0)}
    assert promised["overlap.asyncGenerationRatio 1"] == pytest.approx(after["step_s"], rel=0.05)
    assert before["step_s"] / after["step_s"] > 1.9


def table(num_steps: int) -> MetricsTable:
    metrics = {"time/step_s": 10.0, "time/generate_s": 6.0, "time/train_s": 3.0, "time/sync_s": 1.0}
    first = {name: 10 * value for name, value in metrics.items()}
    return table_of([{"step": n, "version": n, "wall_s": 10.0 * n, **(first if n == 1 else metrics)} for n in range(1, num_steps + 1)])


def test_a_typical_step_leaves_the_first_one_out() -> None:
    assert typical(table(1)) is None
    times = typical(table(4))
    assert times is not None
    assert (times.step_s, times.generate_s, times.rest_s, times.stall_s) == (10.0, 6.0, 0.0, 0.0)


def test_times_are_whole_milliseconds_in_a_status() -> None:
    exact = StepTimes(step_s=10.0, generate_s=6.25, reward_s=0.5, score_s=0.125, train_s=2.0, sync_s=1.0, stall_s=0.25, switch_s=0.375)
    assert of_milliseconds(to_milliseconds(exact)) == exact
    short = StepTimes(step_s=0.0001, generate_s=0.0001, reward_s=0.0, score_s=0.0, train_s=0.0, sync_s=0.0, stall_s=0.0)
    assert to_milliseconds(short).model_dump(exclude_defaults=True) == {"step": 1}


def test_advice_is_of_the_runs_own_spec_and_stands_in_the_report() -> None:
    text = yaml.safe_dump(manifest())
    planned = devices_of(check(text, runnable=False))
    assert planned is not None
    assert planned.total >= 2
    said = advice(text, typical(table(4)))
    assert any("overlap.asyncGenerationRatio 1" in line and "now 10 s" in line for line in said)
    assert advice("kind: RLJob\n", typical(table(4))) == []
    info = type(INFO)(**{**{name: getattr(INFO, name) for name in INFO.__dataclass_fields__}, "spec_yaml": text})
    summary = summarize(
        table(4),
        job_name="math",
        status=RunStatus.SUCCEEDED,
        failure=None,
        total_steps=4,
        total_s=40.0,
        startup_s=0.0,
        seed=1,
        model_commit=None,
        packages={},
    )
    page = render_report(info, summary, table(4), spans=[], samples=[], events=[])
    assert all(f"<li>{line}</li>" in page for line in said)
    assert math.isclose(typical(table(4)).step_s, 10.0)
