"""The overlap bench: its simulation keeps to bounds worked out by hand, its formulas to small cases, its report to its figures."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from bench.overlap import lengths as lengths_module
from bench.overlap import simulation_report
from bench.overlap.__main__ import parse
from bench.overlap.bounds import expected_staleness, least_step_s, loop_s, promised_step_s, workload
from bench.overlap.lengths import DISTRIBUTIONS, MAX_TOKENS, MEAN_TOKENS
from bench.overlap.real import Side, bound, latency_s, manifest, order, sides, summarize
from bench.overlap.simulation import row, world
from rljob_api.v1alpha1 import RLJob
from rljob_runtime.simulation.lengths import Lengths
from rljob_runtime.simulation.running import simulate
from rljob_runtime.simulation.world import DecodeStep, World

SMALL = World(
    groups_per_step=4,
    samples_per_group=2,
    num_engines=2,
    slots=2,
    max_tokens=MAX_TOKENS,
    decode=DecodeStep(fixed_s=0.5),
    train_s=10.0,
    sync_s=1.0,
    recompute_token_s=0.0,
    reward_s=0.0,
    ratio=0.0,
    mode="InFlight",
    steps=6,
    warmup_steps=2,
)


def table(tokens: int, *, prompts: int = 64, samples: int = 2) -> Lengths:
    return Lengths(name="equal", text="", table=np.full((prompts, samples), tokens, dtype=np.int32))


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions_share_their_mean_and_are_the_same_every_time(name):
    made = lengths_module.make(name, prompts=500, samples=8, seed=3)
    assert abs(made.table.mean() - MEAN_TOKENS) < 1
    assert 1 <= made.table.min() <= made.table.max() <= MAX_TOKENS
    assert (made.table == lengths_module.make(name, prompts=500, samples=8, seed=3).table).all()


def test_ratio_0_takes_generation_training_and_sync_one_after_the_other():
    outcome = simulate(SMALL, table(20))  # 8 responses of 10 s on 4 slots: two rounds
    assert outcome.step_times_s == pytest.approx([20 + 10 + 1] * 4)
    assert set(outcome.staleness) == {0}


def test_ratio_1_hides_training_behind_generation():
    outcome = simulate(replace(SMALL, ratio=1.0), table(20))
    assert outcome.step_times_s == pytest.approx([20 + 1] * 4)  # the engines stand still for the sync alone
    assert outcome.slot_use_share == pytest.approx(20 / 21)


def test_ratio_2_is_bound_by_a_slow_trainer_and_as_stale_as_allowed():
    outcome = simulate(replace(SMALL, ratio=2.0, train_s=40.0, steps=12, warmup_steps=6), table(20))
    assert outcome.step_times_s == pytest.approx([41.0] * 6)
    assert set(outcome.staleness) == {2}
    assert outcome.trainer_idle_share == pytest.approx(0.0)


def test_drain_waits_and_interrupt_pays_for_the_cache():
    lengths = lengths_module.make("log-normal", prompts=200, samples=2, seed=1)
    slow = {
        mode: simulate(replace(SMALL, ratio=1.0, mode=mode, recompute_token_s=0.01, steps=12), lengths).step_s
        for mode in ("Drain", "Interrupt", "InFlight")
    }
    assert slow["Drain"] > slow["Interrupt"] > slow["InFlight"]


def test_tokens_are_counted_under_the_weights_that_drew_them():
    outcome = simulate(replace(SMALL, ratio=1.0, train_s=2.0, groups_per_step=2), table(20))
    assert 0 < outcome.token_staleness_mean < sum(outcome.staleness) / len(outcome.staleness) <= 1


@pytest.mark.parametrize("ratio", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_no_step_is_shorter_than_its_bound_and_no_token_older_than_allowed(name, ratio):
    setting = replace(world(ratio=ratio), groups_per_step=8, num_engines=2, slots=8, steps=26, warmup_steps=8)
    lengths = lengths_module.make(name, prompts=400, samples=8, seed=5)
    found = row(setting, lengths)
    assert found["share_of_bound"] <= 1.03  # a window begins and ends with responses under way
    assert found["staleness_max"] <= np.ceil(ratio)
    assert found["dropped_groups"] == 0
    if ratio == 4:
        assert found["share_of_unlimited"] >= 0.95


def test_groups_are_trained_once():
    outcome = simulate(replace(SMALL, ratio=1.5), lengths_module.make("heavy tail", prompts=100, samples=2, seed=2))
    assert len(set(outcome.trained_groups)) == len(outcome.trained_groups) == 6 * 4


def test_bounds_of_a_case_worked_out_by_hand():
    long = table(20)
    long.table[:, 0] = 100  # 4 of 50 s and 4 of 10 s on 4 slots
    load = workload(SMALL, long)
    assert (load.generate_s, load.longest_s, load.at_least_s, load.group_s) == (60.0, 50.0, 60.0, 50.0)
    assert least_step_s(SMALL, load) == {"one after the other": 71.0}
    assert promised_step_s(SMALL, load) == 121.0
    ahead = replace(SMALL, ratio=1.0)
    assert least_step_s(ahead, workload(ahead, long)) == {"slots": 61.0, "trainer": 11.0, "tail": (50 + 11 + 1) / 2}
    half = replace(SMALL, ratio=0.5)
    assert least_step_s(half, workload(half, long))["own groups"] == 50 + 11
    assert expected_staleness(ahead, load) == pytest.approx(min(1.0, (50 + 11) / 61))
    assert expected_staleness(replace(ahead, train_s=100.0), load) == 1.0
    assert loop_s(ahead) == 11.0


def test_staleness_meets_its_closed_form_where_engines_bind():
    setting = replace(world(ratio=8.0, balance=0.5), groups_per_step=8, num_engines=2, slots=8, steps=36, warmup_steps=6)
    lengths = lengths_module.make("log-normal", prompts=400, samples=8, seed=5)
    found = row(setting, lengths)
    assert found["staleness_mean"] == pytest.approx(found["staleness_expected"], rel=0.15)


def test_least_share_is_of_ratios_from_there_on():
    rows = [{"ratio": r, "share_of_unlimited": s} for r, s in ((1.0, 0.5), (4.0, 0.99), (8.0, 0.97))]
    assert simulation_report.least_share({"ratios": rows}, 4.0) == 0.97


def test_sides_alternate():
    wanted = sides([2.0, 1.0])
    assert [side.name for side in wanted] == ["ratio 0", "ratio 1", "ratio 2", "ratio 2, uncorrected"]
    assert [side.ratio for _, side in order(wanted, 2)] == [0, 1, 2, 2, 2, 2, 1, 0]


def test_rewards_sleep_until_both_phases_weigh_the_same():
    sleep_s = latency_s(generate_s=0.3, reward_s=0.1, loop_s=1.0, samples=256)
    assert sleep_s * 256 / 4 == pytest.approx(0.6)  # four workers
    assert latency_s(generate_s=1.0, reward_s=0.1, loop_s=0.5, samples=256) == 0.0


def test_speed_up_is_of_one_pair_and_the_bound_of_its_phases():
    parts = {"samples_per_s": 1.0, "trainer_idle_share": 0.5, "slots_used_share": 0.5, "staleness_mean": 0.0, "staleness_max": 0.0}
    parts |= {"cores": 1.0, "foreign_load": 0.0, "reward": [0.0, 0.0, 0.0, 1.0], "corrected": True}
    phases = {"generate_s": 0.6, "reward_s": 0.4, "train_s": 0.8, "sync_s": 0.2}
    runs = [
        {"pair": 0, "side": "ratio 0", "ratio": 0.0, "step_s": 2.0, **parts, **phases},
        {"pair": 0, "side": "ratio 1", "ratio": 1.0, "step_s": 1.25, **parts, **phases},
    ]
    alone, ahead = summarize(runs)
    assert (alone["speed_up"], ahead["speed_up"], ahead["bound"], bound(runs[0])) == (1.0, 1.6, 2.0, 2.0)
    assert ahead["engine_idle_share"] == pytest.approx(1 - 0.6 / 1.25)
    assert ahead["reward_last_quarter"] == 1.0


@pytest.mark.parametrize("side", sides([1.0]), ids=lambda side: side.name)
def test_manifests_are_jobs(side: Side, tmp_path):
    job = RLJob.model_validate_json(json.dumps(manifest(side, model=tmp_path, size="small", steps=7, mode="InFlight", sleeps=True)))
    assert job.spec.overlap.async_generation_ratio == side.ratio
    assert [reward.weight for reward in job.spec.rewards] == [1.0, 0.0]


@pytest.mark.parametrize("wrong", [["real", "--steps", "3"], ["real", "--ratios", "-1"], ["simulation", "--steps", "0"]])
def test_senseless_options_are_refused(wrong):
    with pytest.raises(SystemExit):
        parse(wrong)
    assert parse([]).what is None
