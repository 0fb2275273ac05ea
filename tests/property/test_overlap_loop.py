"""BOUND, ONCE and NO-HANG on the real scheduler, fleet, gate and buffer, in virtual time, with everything that may go on at once."""

from dataclasses import replace
from math import ceil

from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_runtime.overlap.prompt_order import ResumePoint
from tests.support.overlap_runs import Attempt, Scenario, check_groups, scenarios, trained
from tests.support.virtual_time import run_virtual


@settings(max_examples=120, deadline=None)
@given(scenario=scenarios())
def test_a_run_ends_and_every_prompt_is_trained_once_or_counted(scenario: Scenario) -> None:
    attempt = Attempt(scenario)
    run_virtual(attempt.train(scenario.steps))
    check_groups(attempt)
    prompts = trained(attempt)
    assert len(set(prompts)) == len(prompts) == scenario.batch * scenario.steps
    assert attempt.prompts.handed_out == len(prompts) + attempt.released
    handed_out = attempt.prompts.handed_out
    assert attempt.scheduler.resume_point() == ResumePoint(source_state={"next": handed_out}, first_prompt=handed_out, done=())
    counters = attempt.counters
    assert set(attempt.lost) <= set(scenario.deaths_s)
    assert counters.engines_lost == len(attempt.lost) == len(attempt.scheduler.fleet.lost)
    if scenario.bound >= scenario.lag and not scenario.spare:
        assert counters.groups_cancelled == 0
        assert counters.groups_dropped == 0 or scenario.fails
        assert counters.requests_cancelled == 0 or scenario.redundant
    sent = [request.request_id for engine in attempt.engines for request in engine.seen]
    assert len(set(sent)) == len(sent)


@settings(max_examples=60, deadline=None)
@given(scenario=scenarios(), lag=st.sampled_from([0.5, 1, 1.5, 2]), more=st.integers(0, 1))
def test_a_bound_of_at_least_the_lag_loses_no_straggler(scenario: Scenario, lag: float, more: int) -> None:
    slots = tuple(12 for _ in scenario.slots)
    roomy = replace(scenario, steps=8, lag=lag, max_staleness=ceil(lag) + more, spare=0, redundant=0, fails=False, slots=slots, deaths_s={})
    attempt = Attempt(roomy)
    run_virtual(attempt.train(roomy.steps))
    counters = attempt.counters
    assert (counters.groups_dropped, counters.groups_cancelled, counters.requests_cancelled, counters.tokens_cancelled) == (0, 0, 0, 0)
    assert attempt.prompts.handed_out == roomy.batch * roomy.steps + counters.groups_filtered


@settings(max_examples=60, deadline=None)
@given(scenario=scenarios(), data=st.data())
def test_a_restart_at_any_time_loses_and_repeats_nothing(scenario: Scenario, data: st.DataObject) -> None:
    first = Attempt(scenario)
    run_virtual(first.train(data.draw(st.integers(1, scenario.steps)), linger_s=data.draw(st.floats(0.0, 50.0))))
    checkpoint = data.draw(st.sampled_from(first.checkpoints))
    second = Attempt(scenario, start=checkpoint)
    run_virtual(second.train(scenario.steps))
    check_groups(first)
    check_groups(second)
    prompts = trained(first, before=checkpoint.step) + trained(second)
    assert len(set(prompts)) == len(prompts) == scenario.batch * scenario.steps
    handed_out = second.prompts.handed_out
    not_asked_again = [index for index in checkpoint.point.done if index >= handed_out]
    assert handed_out + len(not_asked_again) == len(prompts) + second.released
