"""Invariants of the operator's decisions over random observations: QUIET, TERMINAL, ONE-CHILD, and attempts that never decrease."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rljob_api.naming import rayjob_name
from rljob_api.v1alpha1.conditions import ConditionType
from rljob_api.v1alpha1.status import RLJobStatus
from rljob_api.vocabulary import Reason
from rljob_operator import events, status, views
from rljob_operator.decide import decide
from rljob_operator.model import Decision
from rljob_operator.policies.situation import is_live
from tests.support.operator_scene import NAME, Scene, at, child, failed_log, scene, time_text

MAX_BYTES = 10_000
PROGRESS = {"attempt": 98, "step": 10**6, "totalSteps": 10**6, "reward": "-" + "9" * 30, "lastUpdateTime": time_text(0)}
MAX_PASSES = 4
"""Passes at one time until nothing is left to do: record, delete, create, and one that finds nothing."""

seconds = st.integers(0, 4000)
numbers = st.integers(1, 4)
noise = st.builds(lambda piece, times: (piece * times)[:6000], st.text(min_size=1, max_size=8), st.integers(0, 2000))
logs = st.one_of(
    noise, st.builds(lambda reason, text: failed_log(reason, text, "actor_train-0"), st.sampled_from(list(Reason)), noise)
).map(views.digest)
messages = noise.map(lambda text: views.clean(text, views.MAX_TEXT))
reasons = st.sampled_from(list(Reason))
rules = st.fixed_dictionaries({"reason": reasons.map(str), "action": st.sampled_from(["Restart", "Fail"])})
optional_seconds = st.none() | st.integers(1, 2000)
# Made once: making a strategy costs more than generating a value, and a scene has a hundred of them.
flags = st.booleans()
moments = seconds.map(at)
optional_moments = st.none() | moments
optional_messages = st.none() | messages
up_to_four = st.integers(0, 4)
up_to_five = st.integers(0, 5)
startup_seconds = st.integers(1, 2000)
backoff_seconds = st.integers(1, 900)
lists_of_rules = st.lists(rules, max_size=2)
earlier_attempts = {last: st.integers(1, last) for last in range(1, 5)}
lists_of_attempts = st.lists(numbers, unique=True, max_size=3)
states = st.sampled_from(("", "Initializing", "Running", "Complete", "Failed", "ValidationFailed", "Suspending", "Suspended"))
job_statuses = st.sampled_from(["", "PENDING", "RUNNING", "STOPPED", "SUCCEEDED", "FAILED"])
failures = st.sampled_from(["", "AppFailed", "SubmissionFailed", "DeadlineExceeded", "New"])
owners = st.sampled_from(["uid-of-job", "uid-of-job", "somebody"])
phases = st.sampled_from(["Pending", "Running", "Succeeded", "Failed"])
ends = st.none() | st.tuples(st.sampled_from(["ray", ""]), st.sampled_from(["Error", "OOMKilled"]), st.integers(-1, 255))
waits = st.none() | st.tuples(st.just("ray"), st.sampled_from(["ErrImagePull", "CrashLoopBackOff"]), messages)


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Any]:
    changes: dict[str, Any] = {
        "suspend": draw(flags),
        "startupDeadlineSeconds": draw(startup_seconds),
        "failurePolicy": {
            "maxRestarts": draw(up_to_four),
            "restartBackoffSeconds": draw(backoff_seconds),
            "rules": draw(lists_of_rules),
        },
    }
    for name in ("activeDeadlineSeconds", "ttlSecondsAfterFinished"):
        value = draw(optional_seconds)
        if value is not None:
            changes[name] = value
    if draw(flags):
        changes["queue"] = {"name": "q"}
    if draw(flags):
        names = [f"group-{'x' * 30}-{i}" for i in range(16)]
        changes["nodeGroups"] = [{"name": name, "nodes": 4096} for name in names]
    return changes


@st.composite
def stored(draw: st.DrawFn) -> dict[str, Any]:
    """Statuses as an operator may have left them, complete or partial."""
    fields: dict[str, Any] = {}
    if draw(flags):
        fields["attempt"] = draw(numbers)
        if draw(flags):
            fields["startTime"] = time_text(draw(seconds))
        if draw(flags):
            reason = str(draw(reasons))
            attempt = draw(earlier_attempts[fields["attempt"]])
            fields["lastFailure"] = {"attempt": attempt, "reason": reason, "message": draw(messages), "time": time_text(draw(seconds))}
    if draw(flags):
        fields["progress"] = PROGRESS
    return fields


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    built = scene().spec(**draw(specs())).stored(**draw(stored()))
    if draw(up_to_five) == 0:
        built.invalid()
    attempts = draw(lists_of_attempts)
    for attempt in attempts:
        built.child(
            attempt,
            draw(states),
            created=at(draw(seconds)),
            deleting=draw(flags),
            suspend=draw(flags),
            job_status=draw(job_statuses),
            reason=draw(failures),
            message=draw(logs),
            owner_uid=draw(owners),
            job_started=draw(optional_moments),
        )
    for index in range(draw(up_to_four)):
        ready = draw(flags)
        built.pod(
            f"pod-{index}",
            draw(numbers),
            head=draw(flags),
            created=at(draw(seconds)),
            deleting=draw(flags),
            phase=draw(phases),
            ready=ready,
            unready_since=None if ready else draw(optional_moments),
            is_node_silent=not ready and draw(flags),
            unschedulable=draw(optional_messages),
            scheduled_at=draw(optional_moments),
            waiting=draw(waits),
            terminated=draw(ends),
            deletion_time=draw(optional_moments),
        )
    if draw(flags):
        built.cluster(f"{NAME}-a1-c", draw(messages))
    return built


def with_status(before: Scene, rendered: dict[str, Any]) -> Scene:
    kept = {"progress": PROGRESS} if "progress" in before.job.status else {}
    before.job = replace(before.job, status=json.loads(json.dumps(rendered)) | kept)
    return before


def act(before: Scene, decision: Decision, now: int, *, gone_at_once: bool) -> Scene:
    """Carry out a decision: an attempt begins now, not before its own deadlines."""
    before.children = [replace(c, suspend=decision.set_suspend.get(c.name, c.suspend)) for c in before.children]
    if gone_at_once:
        before.children = [c for c in before.children if c.name not in decision.delete_children]
    before.children = [replace(c, deleting=c.deleting or c.name in decision.delete_children) for c in before.children]
    if decision.create_attempt is not None:
        before.children.append(child(decision.create_attempt, created=at(now)))
    return before


def has_actions(decision: Decision) -> bool:
    return bool(decision.set_suspend or decision.delete_children or decision.create_attempt or decision.delete_job)


relaxed = settings(max_examples=200, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@relaxed
@given(built=scenes(), now=seconds, gone_at_once=st.booleans())
def test_quiet_terminal_one_child_and_attempts_that_never_decrease(built: Scene, now: int, gone_at_once: bool) -> None:
    for _ in range(MAX_PASSES):
        observed = built.observed()
        decision = decide(observed, at(now))
        rendered = status.render(observed, decision, at(now))
        one_child(built, decision)
        never_decreases(built, decision)
        acceptable(rendered)
        assert json.dumps(status.render(observed, decide(observed, at(now)), at(now))) == json.dumps(rendered)
        emitted = events.events(built.job.status, rendered)
        assert len(emitted) <= len(ConditionType)
        if not has_actions(decision) and not status.changed(built.job.status, rendered):
            assert emitted == ()
            return
        if decision.delete_job:
            return
        built = act(with_status(built, rendered), decision, now, gone_at_once=gone_at_once)
    raise AssertionError(f"still {decision} after {MAX_PASSES} passes at the same time")


@relaxed
@given(built=scenes(), first=seconds, later=st.integers(0, 10_000), after=scenes())
def test_what_has_ended_stays(built: Scene, first: int, later: int, after: Scene) -> None:
    """Once Succeeded is True or False, no observation and no time changes the status, and nothing is made or resumed."""
    observed = built.observed()
    rendered = status.render(observed, decide(observed, at(first)), at(first))
    if rendered["conditions"][4]["status"] == "Unknown":
        return
    after = with_status(after, rendered)
    observed = after.observed()
    decision = decide(observed, at(first + later))
    assert status.render(observed, decision, at(first + later)) == rendered
    assert (decision.create_attempt, decision.set_suspend, decision.failure) == (None, {}, None)


@relaxed
@given(built=scenes(), attempt=st.integers(2, 4), live=st.sets(st.integers(1, 4)), late=st.booleans())
def test_a_due_restart_waits_for_every_live_rayjob(built: Scene, attempt: int, live: set[int], late: bool) -> None:
    """The state in which a second RayJob could be made: a failure is recorded, another attempt is allowed, the backoff may be over."""
    built.spec(suspend=False, failurePolicy={"maxRestarts": 9, "restartBackoffSeconds": 1}).failed(attempt, seconds=0)
    built.spec(activeDeadlineSeconds=10**6)
    built.pods = [replace(p, is_head=False) for p in built.pods]
    built.checked = scene().checked
    built.children = [child(n, "Running" if n in live else "Failed") for n in range(1, attempt + 1)]
    now = 5000 if late else 0
    decision = decide(built.observed(), at(now))
    one_child(built, decision)
    alive = {n for n in live if n <= attempt}
    assert set(decision.delete_children) == {rayjob_name(NAME, n) for n in alive}
    assert decision.create_attempt == (attempt + 1 if late and not alive else None)


def one_child(built: Scene, decision: Decision) -> None:
    if decision.create_attempt is None:
        return
    ours = [c for c in built.children if c.owner_uid == built.job.uid]
    assert [c.name for c in ours if is_live(c)] == []
    assert rayjob_name(NAME, decision.create_attempt) not in [c.name for c in ours]
    assert decision.failure is None
    assert built.job.spec["suspend"] is False
    assert decision.attempt == decision.create_attempt


def never_decreases(built: Scene, decision: Decision) -> None:
    known = [c.attempt for c in built.children if c.owner_uid == built.job.uid]
    highest = max([built.job.status.get("attempt", 0), *known])
    assert (decision.attempt or 0) in (highest, decision.create_attempt)
    assert (decision.attempt or 0) >= highest


def acceptable(rendered: dict[str, Any]) -> None:
    text = json.dumps(rendered | {"progress": PROGRESS}, ensure_ascii=False)
    assert len(text.encode()) <= MAX_BYTES
    RLJobStatus.model_validate_json(text)
    assert [c["type"] for c in rendered["conditions"]] == [str(t) for t in ConditionType]
    assert not any(isinstance(value, float) for value in walk(rendered))


def walk(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in walk(item)]
    return [leaf for item in value for leaf in walk(item)] if isinstance(value, list) else [value]
