"""What of a spec is compared with the first attempt's, and what the status says of a difference."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rljob_api.crd.schema import MUTABLE_BELOW, MUTABLE_SPEC_FIELDS
from rljob_api.validation import check
from rljob_operator.frozen import changed, hashes
from tests.support.operator_scene import scene
from tests.unit.api.manifests import manifest


def of(**fields: Any) -> dict[str, str]:
    document = manifest()
    document["spec"].update(fields)
    return hashes(check(document).job.spec)


BASE = of()


def test_a_key_that_takes_the_place_of_another_is_found() -> None:
    """The API server's == says that these are equal."""
    before = of(podTemplate={"metadata": {"labels": {"a": "b"}}})
    now = of(podTemplate={"spec": {"hostNetwork": True}})
    assert changed(before, now) == ("podTemplate",)
    assert changed(BASE, now) == changed(now, BASE) == ("podTemplate",)


def test_what_may_change_does_not_count() -> None:
    mutable = {
        "suspend": True,
        "activeDeadlineSeconds": 77,
        "ttlSecondsAfterFinished": 77,
        "failurePolicy": {"maxRestarts": 7},
        "startupDeadlineSeconds": 77,
        "schedulingDeadlineSeconds": 77,
        "training": {"steps": 77},
        "checkpoint": {"everySteps": 7, "keep": 7, "journal": False},
    }
    assert set(mutable) == MUTABLE_SPEC_FIELDS | set(MUTABLE_BELOW)
    assert of(**mutable) == BASE


def test_what_may_not_change_counts_in_the_same_sections() -> None:
    assert changed(BASE, of(training={"steps": 77, "learningRate": 0.5})) == ("training",)
    document = of(storage={"claimName": "c"}, checkpoint={"path": "/storage/c"})
    assert changed(BASE, document) == ("checkpoint", "storage")


def test_how_a_value_is_written_does_not_count() -> None:
    group = manifest()["spec"]["nodeGroups"][0]
    first, second = (of(nodeGroups=[group | {"resources": {"cpu": cpu}, "nodes": 1}]) for cpu in (4, "4"))
    assert first == second
    assert of(seed=0, doNotDisrupt=False) == BASE


@given(names=st.sets(st.sampled_from(["model", "podTemplate", "head", "nodeGroups"]), min_size=1))
def test_the_status_names_the_fields_and_keeps_the_first_hashes(names: set[str]) -> None:
    built = scene().stored(attempt=1).running().changed(*names)
    stored = built.job.status["specHashes"]
    rendered = built.render(60)
    (accepted,) = [c for c in rendered["conditions"] if c["type"] == "Accepted"]
    assert accepted["message"].startswith(", ".join(f"spec.{name}" for name in sorted(names)) + " cannot be changed.")
    assert "Attempt 1 goes on with what it began with" in accepted["message"]
    assert rendered["specHashes"] == stored


def test_the_first_attempt_records_them_and_a_suspended_job_without_one_does_not() -> None:
    new = scene()
    new.hashes = dict(BASE)
    assert new.render(1)["specHashes"] == BASE
    held = scene().suspended()
    held.hashes = dict(BASE)
    assert "specHashes" not in held.render(1)
