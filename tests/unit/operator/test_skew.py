"""What an operator makes of a CRD that is older or newer than itself."""

import copy
from typing import Any

import pytest

from rljob_api.crd.schema import job_schema
from rljob_operator import skew
from rljob_operator.skew import Skew, compare

OWN: dict[str, Any] = job_schema()["properties"]["spec"]
STATUS: dict[str, Any] = job_schema()["properties"]["status"]
SPEC: dict[str, Any] = {
    "model": {"path": "m"},
    "nodeGroups": [{"name": "a", "env": [{"name": "X", "value": "1"}]}, {"name": "b"}],
    "custom": {"anything": {"goes": 1}},
}
RETRIES = {
    "type": "object",
    "default": {},
    "properties": {
        "limit": {"type": "integer", "default": 3},
        "backoff": {"type": "object", "default": {"factor": 2}, "properties": {"first": {"type": "integer", "default": 1}}},
        "note": {"type": "string"},
    },
}
FILLED_IN = {"limit": 3, "backoff": {"factor": 2, "first": 1}}


def changed(**fields: dict[str, Any] | None) -> dict[str, Any]:
    """The operator's own schema with fields of ``spec`` and of node groups added, or taken away."""
    schema = copy.deepcopy(OWN)
    for path, field in fields.items():
        properties = schema["properties"]
        if path.startswith("group_"):
            properties = properties["nodeGroups"]["items"]["properties"]
        name = path.removeprefix("group_")
        if field is None:
            del properties[name]
        else:
            properties[name] = field
    return schema


def both(spec: dict[str, Any], status: dict[str, Any] = STATUS) -> dict[str, dict[str, Any]]:
    return {"spec": spec, "status": status}


def test_a_status_is_stored_without_what_an_older_crd_lacks() -> None:
    older = copy.deepcopy(STATUS)
    del older["properties"]["specHashes"]
    del older["properties"]["nodeGroups"]["items"]["properties"]["rankRange"]
    found = compare(both(OWN, older), both(OWN))
    assert sorted(found.missing) == ["status.nodeGroups[].rankRange", "status.specHashes"]
    group = {"name": "a", "desired": 1, "ready": 0}
    status = {"attempt": 1, "specHashes": {"model": "0"}, "nodeGroups": [{**group, "rankRange": "0"}]}
    assert found.storable(status) == {"attempt": 1, "nodeGroups": [group]}
    assert Skew().storable(status) is status


def test_equal_schemas_leave_a_spec_as_it_is() -> None:
    found = compare(both(copy.deepcopy(OWN)), both(OWN))
    assert (found, skew.describe(found)) == (Skew(), [])
    assert found.known(SPEC) is SPEC


def test_what_an_older_crd_lacks_is_named() -> None:
    found = compare(both(changed(refuseEvictions=None, group_labels=None)), both(OWN))
    assert sorted(found.missing) == ["spec.nodeGroups[].labels", "spec.refuseEvictions"]
    assert found.unknown == ()
    (text,) = skew.describe(found)
    assert "older than this operator" in text
    assert ", ".join(found.missing) in text
    assert found.known(SPEC) is SPEC


def test_defaults_of_a_newer_crd_are_left_out_and_chosen_values_stay() -> None:
    found = compare(both(changed(retries=RETRIES, group_zone={"type": "string", "default": ""})), both(OWN))
    assert found.unknown == ("spec.nodeGroups[].zone", "spec.retries")
    (text,) = skew.describe(found)
    assert "newer than this operator, which does not know spec.nodeGroups[].zone, spec.retries" in text
    first, second = SPEC["nodeGroups"]
    served = SPEC | {"retries": FILLED_IN, "nodeGroups": [first | {"zone": ""}, second | {"zone": ""}]}
    assert found.known(served) == SPEC
    chosen = SPEC | {"retries": FILLED_IN | {"limit": 4}, "nodeGroups": [first | {"zone": "x"}, second | {"zone": ""}]}
    assert found.known(chosen) == SPEC | {"retries": FILLED_IN | {"limit": 4}, "nodeGroups": [first | {"zone": "x"}, second]}


@pytest.mark.parametrize("value", [None, [], {}, "text"])
def test_an_unknown_field_without_a_default_stays(value: object) -> None:
    found = compare(both(changed(novel={"type": "object"})), both(OWN))
    assert found.known(SPEC | {"novel": value}) == SPEC | {"novel": value}


def test_fields_of_objects_without_a_schema_are_nobodys() -> None:
    served = changed(podMetadata={"type": "object", "x-kubernetes-preserve-unknown-fields": True})
    own = changed(podMetadata={"type": "object", "properties": {"a": {"type": "string"}}})
    assert compare(both(served), both(own)).missing == ()
    assert compare(both(served), both(own)).unknown == ()
