"""A CRD that changes under a running operator."""

import copy

import pytest

from rljob_operator.errors import UnavailableError
from rljob_operator.metrics import PREFIX, Metrics
from rljob_operator.served import ServedSchema
from tests.unit.operator.shell.fake_kube import FakeKube


def _serve(kube: FakeKube, *, without: str = "", with_default: str = "") -> None:
    kube.spec_schema = copy.deepcopy(kube.spec_schema)
    kube.schema_number += 1
    kube.spec_schema["properties"].pop(without, None)
    if with_default:
        kube.spec_schema["properties"][with_default] = {"type": "string", "default": "a"}


async def test_each_change_is_logged_counted_and_passed_on_once(caplog: pytest.LogCaptureFixture) -> None:
    kube, metrics, changes = FakeKube(), Metrics(), list[int]()
    served = ServedSchema(kube, metrics, lambda: changes.append(kube.schema_number))

    def fields(state: str) -> float | None:
        return metrics.registry.get_sample_value(PREFIX + "crd_fields", {"state": state})

    await served.look()
    assert (changes, fields("missing"), fields("unknown"), caplog.messages) == ([], 0, 0, [])
    _serve(kube, without="refuseEvictions")
    await served.look()
    await served.look()
    assert (changes, fields("missing"), fields("unknown")) == ([2], 1, 0)
    assert "older than this operator" in caplog.messages[-1]
    _serve(kube, with_default="novel")
    await served.look()
    assert (changes, fields("missing"), fields("unknown")) == ([2, 3], 1, 1)
    assert served.known({"novel": "a", "suspend": True}) == {"suspend": True}
    assert served.known({"novel": "b"}) == {"novel": "b"}
    assert len(caplog.messages) == 3
    _serve(kube, without="novel")
    await served.look()
    assert changes == [2, 3, 4]
    assert served.known({"novel": "a", "suspend": True}) == {"suspend": True}, "as the cache still has it"


async def test_a_schema_that_could_not_be_read_is_read_at_the_next_look() -> None:
    kube = FakeKube()
    served = ServedSchema(kube, Metrics())
    _serve(kube, with_default="novel")
    kube.fault = lambda verb, kind, name: UnavailableError(verb, 503, "no") if verb == "schema" else None
    with pytest.raises(UnavailableError):
        await served.look()
    assert served.known({"novel": "a"}) == {"novel": "a"}
    kube.fault = lambda verb, kind, name: None
    await served.look()
    assert served.known({"novel": "a"}) == {}
