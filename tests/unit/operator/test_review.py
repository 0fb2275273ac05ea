"""The webhook's answers: what it refuses, with which words, and what it never stands in the way of."""

import copy
from typing import Any

import pytest
import yaml

from rljob_operator import review
from rljob_operator.policies import admission
from tests.support.invalid_manifests import named
from tests.unit.operator.shell.world import rljob

BAD = yaml.safe_load(named("mapping-beyond").manifest())
GOOD = rljob(storage={"claimName": "runs", "mountPath": "/runs"})


def asked(new: dict[str, Any], old: dict[str, Any] | None = None) -> dict[str, Any]:
    return review.review({"uid": "u1", "operation": "UPDATE" if old else "CREATE", "object": new, "oldObject": old})


def changed(job: dict[str, Any], metadata: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    job = copy.deepcopy(job)
    job["metadata"] |= metadata or {}
    job["spec"] |= spec
    return job


def test_a_good_job_is_allowed():
    assert asked(GOOD) == {"uid": "u1", "allowed": True}


def test_a_job_without_storage_is_allowed_with_a_warning():
    assert asked(rljob()) == {"uid": "u1", "allowed": True, "warnings": [review.NO_STORAGE]}


def test_a_bad_job_is_refused_with_all_problems_in_the_words_of_the_condition():
    answer = asked(changed(BAD, training={"steps": 5, "warmupSteps": 6}))
    assert (answer["allowed"], answer["status"]["code"], answer["status"]["reason"]) == (False, 422, "Invalid")
    *lines, last = answer["status"]["message"].splitlines()
    assert len(lines) >= 2
    assert all(line.startswith("spec.") for line in lines)
    assert last.endswith("are made once the placement is possible")
    problems = review.problems_of(changed(BAD, training={"steps": 5, "warmupSteps": 6}))
    assert answer["status"]["message"] == admission.problems_text(problems, last)


def test_a_job_of_wrong_types_is_refused_with_what_was_not_checked():
    first, last = asked(changed(GOOD, seed="one"))["status"]["message"].splitlines()
    assert first.startswith('spec.seed: "one": is text')
    assert last.endswith("are made once this problem is fixed")


def test_only_new_problems_stand_in_the_way_of_a_change():
    assert asked(changed(BAD, suspend=True), BAD)["allowed"] is True
    worse = asked(changed(BAD, training={"steps": 5, "warmupSteps": 6}), BAD)
    assert worse["allowed"] is False
    assert not set(worse["status"]["message"].splitlines()) & set(review.problems_of(BAD))


@pytest.mark.parametrize("metadata", [{"labels": {"a": "b"}}, {"annotations": {"a": "b"}}, {"finalizers": []}])
def test_metadata_of_an_invalid_job_can_be_edited(metadata):
    assert asked(changed(BAD, metadata), BAD) == {"uid": "u1", "allowed": True}


def test_a_job_that_is_being_deleted_is_never_held():
    going = changed(BAD, {"deletionTimestamp": "2026-01-01T00:00:00Z"}, training={"steps": 5, "warmupSteps": 6})
    assert asked(going, BAD) == {"uid": "u1", "allowed": True}


def test_a_job_of_another_controller_is_not_checked():
    assert asked(changed(BAD, managedBy="kueue.x-k8s.io/multikueue")) == {"uid": "u1", "allowed": True, "warnings": [review.UNMANAGED]}


def test_a_name_that_is_still_to_be_generated_is_no_problem():
    job = changed(GOOD)
    job["metadata"] = {"generateName": "math-", "namespace": "team"}
    assert asked(job)["allowed"] is True


@pytest.mark.parametrize("request_", [{}, {"uid": "u"}, {"uid": "u", "object": None}, {"uid": "u", "object": {"metadata": 3}}])
def test_what_is_no_request_is_an_error_of_the_caller(request_):
    with pytest.raises((KeyError, TypeError, AttributeError)):
        review.review(request_)
