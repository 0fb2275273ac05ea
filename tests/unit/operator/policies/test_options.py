"""Options are read from any JSON; what is absent has the default of the schema."""

from __future__ import annotations

from rljob_api.v1alpha1.operations import FailureAction
from rljob_operator.policies.options import read
from tests.support.operator_scene import checked, scene


def test_the_defaults_are_the_schemas() -> None:
    found, spec = read({}), checked().job.spec
    assert found.startup_deadline_s == spec.startup_deadline_seconds
    assert found.restart_backoff_s == spec.failure_policy.restart_backoff_seconds
    assert found.max_restarts == spec.failure_policy.max_restarts
    assert (found.active_deadline_s, found.ttl_s, found.suspend, found.is_queued, found.groups) == (None, None, False, False, ())


def test_groups_have_the_planners_ranks() -> None:
    found = read(scene().job.spec)
    plan = checked().plan
    assert [(g.name, g.first_rank, g.rank_range) for g in found.groups] == [("train", 0, "0-1"), ("infer", 2, "2")]
    assert [next(n.rank for n in plan.nodes if n.group == g.name) for g in found.groups] == [g.first_rank for g in found.groups]
    assert found.num_nodes == len(plan.nodes)


def test_an_explicit_zero_is_a_value_and_a_negative_number_is_not() -> None:
    policy = {"maxRestarts": 0, "restartBackoffSeconds": 0}
    zeros = read({"ttlSecondsAfterFinished": 0, "activeDeadlineSeconds": 0, "startupDeadlineSeconds": 0, "failurePolicy": policy})
    assert (zeros.ttl_s, zeros.active_deadline_s, zeros.startup_deadline_s) == (0, 0, 0)
    assert (zeros.max_restarts, zeros.restart_backoff_s) == (0, 0)
    negative = read({"ttlSecondsAfterFinished": -1, "failurePolicy": {"restartBackoffSeconds": -1}})
    assert (negative.ttl_s, negative.restart_backoff_s) == (None, read({}).restart_backoff_s)


def test_malformed_values_are_not_taken() -> None:
    rules = [{"reason": "WorkerLost", "action": "Restart"}, {"reason": "HeadLost", "action": "Panic"}, 3]
    policy = {"maxRestarts": True, "rules": rules}
    found = read({"suspend": "true", "startupDeadlineSeconds": "5", "failurePolicy": policy, "nodeGroups": [7]})
    assert (found.suspend, found.startup_deadline_s, found.max_restarts, found.groups) == (False, 1800, 0, ())
    assert found.rules == (("WorkerLost", FailureAction.RESTART),)
