"""Whatever JSON the API server gives: views are made of it, and stay small."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rljob_api import termination
from rljob_api.vocabulary import Reason
from rljob_operator import status, views
from rljob_operator.decide import decide
from rljob_operator.model import ChildView, ClusterView, JobView, PodView
from rljob_operator.policies.situation import stored_conditions
from tests.support.operator_scene import at, scene

KEYS = st.sampled_from(
    [
        "metadata", "name", "labels", "ownerReferences", "controller", "uid", "creationTimestamp", "deletionTimestamp", "spec", "suspend",
        "status", "message", "reason", "conditions", "type", "containerStatuses", "initContainerStatuses", "state", "lastState", "waiting",
        "terminated", "exitCode", "finishedAt", "phase", "rayJobInfo", "startTime", "rljob.dev/attempt", "attempt", "lastFailure", "time",
        "nodeGroups", "nodes", "failurePolicy", "rules", "maxRestarts", "queue", "managedBy", "lastTransitionTime",
    ]
)  # fmt: skip
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.just("2026-01-31T12:00:00Z")
JSON = st.recursive(LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=6), max_leaves=30)
OBJECTS = st.dictionaries(KEYS, JSON, max_size=6)


@given(raw=OBJECTS)
def test_no_object_is_too_odd(raw: dict[str, Any]) -> None:
    made = [view(raw) for view in (views.job_view, views.child_view, views.cluster_view, views.pod_view)]
    assert [type(view) for view in made] == [JobView, ChildView, ClusterView, PodView]
    assert all(asdict(view) for view in made)


@given(spec=OBJECTS, current=OBJECTS)
def test_no_spec_or_status_is_too_odd_for_a_decision(spec: dict[str, Any], current: dict[str, Any]) -> None:
    built = scene().invalid()
    raw = {"metadata": {"name": built.job.key.name, "uid": built.job.uid}, "spec": spec, "status": current}
    built.job = views.job_view(raw)
    assert isinstance(built.job, JobView)
    status.render(built.observed(), decide(built.observed(), at(1)), at(1))
    assert len(stored_conditions(current)) == 6


@given(log=st.text(), lines=st.lists(st.text(max_size=300), max_size=80), reason=st.sampled_from(list(Reason)), message=st.text())
def test_a_digest_keeps_the_termination_message_and_is_small(log: str, lines: list[str], reason: Reason, message: str) -> None:
    last = termination.encode(termination.DriverFailure(reason=reason, message=message))
    text = "\n".join([log, *lines, last, "the end"])
    found = termination.decode(views.digest(text))
    assert found is not None
    assert found.reason is reason
    assert found.message == views.clean(message, views.MAX_TERMINATION_MESSAGE)
    assert len(views.digest(text)) < views.MAX_TEXT + views.MAX_LOG + 4 * termination.MAX_MESSAGE
    assert views.digest(text).count(termination.MARKER) == 1
