"""How the process configures kopf, its liveness probe, its help and its settings."""

import asyncio
import contextlib
import json
import logging
from dataclasses import fields, replace
from typing import Any

import kopf
import pytest

from rljob_api.naming import JOB_LABEL
from rljob_operator import logs, main
from rljob_operator.cache import Cache, Source
from rljob_operator.errors import NotFoundError, SettingsError, UnavailableError
from rljob_operator.metrics import Metrics
from rljob_operator.model import Key
from rljob_operator.protocol import WATCHED, Kind
from rljob_operator.settings import Settings
from tests.unit.operator.shell.fake_kube import FakeKube
from tests.unit.operator.shell.virtual_time import run
from tests.unit.operator.shell.world import SETTINGS, rljob

ENVIRONMENT = {"RLJOB_OPERATOR_RUNTIME_IMAGE": "image:1", "RLJOB_OPERATOR_RUNTIME_RAY_VERSION": "2.60.0"}


def _operator(kube: FakeKube | None = None, settings: Settings = SETTINGS, cache: Cache | None = None) -> main.Operator:
    return main.Operator(settings, kube or FakeKube(), Metrics(), cache or Cache())


def _resource(kind: Kind) -> Any:
    group, _, version = kind.api_version.rpartition("/")
    return kopf.Resource(group=group, version=version, plural=kind.plural, kind=str(kind), namespaced=True)


async def test_all_watches_but_the_one_on_rljobs_select_by_label_on_the_server():
    selectors = main.kopf_settings().watching.label_selectors
    assert {kind: selectors.collect(_resource(kind)) for kind in WATCHED} == {
        Kind.RLJOB: [],
        Kind.RAYJOB: [JOB_LABEL],
        Kind.RAYCLUSTER: [JOB_LABEL],
        Kind.POD: [JOB_LABEL],
    }


async def test_kopf_neither_posts_events_nor_watches_definitions():
    settings = main.kopf_settings()
    assert settings.persistence.diffbase_storage.build(body={"spec": {}}) == {}
    assert not settings.posting.enabled
    assert settings.scanning.disabled
    assert settings.watching.client_timeout > settings.watching.server_timeout > settings.watching.inactivity_timeout


async def test_an_event_reaches_cache_and_queue_and_its_deletion_too():
    operator = _operator()
    obj = FakeKube().add(rljob())
    operator.on_event(Kind.RLJOB, "ADDED", obj)
    assert operator.cache.keys() == [Key(namespace="team", name="math")]
    assert len(operator.queue) == 1
    operator.on_event(Kind.RLJOB, "DELETED", {**obj, "metadata": {**obj["metadata"], "resourceVersion": "999"}})
    assert operator.cache.keys() == []


def test_the_probe_names_a_dead_queue_and_a_watch_that_lags():
    async def scenario() -> tuple[list[str], list[str], list[str]]:
        clock = [0.0]
        operator = _operator(cache=Cache(lambda: clock[0]))
        before = operator.problems()
        operator.start()
        healthy = operator.problems()
        operator.cache.put(Kind.RLJOB, FakeKube().add(rljob()), Source.OTHER)
        clock[0] = 181.0
        silent = operator.problems()
        await operator.drain()
        return before, healthy, silent

    before, healthy, silent = run(scenario())
    assert before == ["a work queue worker has exited", "the resync task has exited"]
    assert healthy == []
    assert silent == ["the watch on RLJob has not delivered a known change for 181 s (limit 180 s)"]


def test_a_missing_definition_is_waited_for_and_then_named():
    async def scenario() -> float:
        kube = FakeKube()
        missing = NotFoundError("list RayJob", 404, "the server could not find the requested resource")
        kube.fault = lambda verb, kind, name: missing if kind is Kind.RAYJOB else None
        operator = _operator(kube)
        with pytest.raises(SettingsError, match=r"RayJob.*install the CRDs"):
            await operator.resync.first()
        return asyncio.get_running_loop().time()

    assert 120 <= run(scenario()) <= 125


def test_a_signal_while_waiting_for_the_first_lists_ends_the_process():
    async def scenario() -> float:
        kube = FakeKube()
        kube.fault = lambda verb, kind, name: UnavailableError("list", 0, "no connection")
        operator = _operator(kube)
        running = asyncio.create_task(operator.run())
        await asyncio.sleep(5)
        operator.stop.set()
        await running
        return asyncio.get_running_loop().time()

    with contextlib.suppress(ValueError):  # signal handlers need the main thread, which xdist does not give
        assert run(scenario()) == 5.0


def test_help_describes_every_setting(capsys):
    with pytest.raises(SystemExit) as ended:
        main.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for field in fields(Settings):
        assert f"RLJOB_OPERATOR_{field.name.upper()} " in text


def test_missing_settings_end_the_process_with_exit_code_2(capsys, monkeypatch):
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    assert main.main([]) == 2
    assert "RLJOB_OPERATOR_RUNTIME_IMAGE is not set" in capsys.readouterr().err


def test_settings_are_read():
    read = Settings.from_environment({**ENVIRONMENT, "RLJOB_OPERATOR_NAMESPACES": "a, b", "RLJOB_OPERATOR_NETWORK_POLICY": "false"})
    expected = Settings(runtime_image="image:1", runtime_ray_version="2.60.0", namespaces="a, b", network_policy=False)
    assert read == expected
    assert read.namespace_list == ("a", "b")


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("WORKERS", "0", "RLJOB_OPERATOR_WORKERS=0 is not between 1 and 256"),
        ("REQUESTS", "many", "RLJOB_OPERATOR_REQUESTS='many' is not of type int"),
        ("LOG_LEVEL", "LOUD", "RLJOB_OPERATOR_LOG_LEVEL='LOUD' is not one of DEBUG, INFO, WARNING, ERROR"),
        ("LOG_FORMAT", "xml", "RLJOB_OPERATOR_LOG_FORMAT='xml' is not one of json, text"),
        ("NETWORK_POLICY", "yes", "RLJOB_OPERATOR_NETWORK_POLICY='yes' is not of type bool"),
        ("EGRESS", "deny", "RLJOB_OPERATOR_EGRESS is not JSON"),
        ("EGRESS", '[{"from": []}]', "is not a list of rules with to and ports, as in spec.egress of a NetworkPolicy"),
        ("COLOUR", "red", "RLJOB_OPERATOR_COLOUR is not a known setting"),
    ],
)
def test_wrong_settings_are_named(name, value, problem):
    with pytest.raises(SettingsError) as caught:
        Settings.from_environment({**ENVIRONMENT, f"RLJOB_OPERATOR_{name}": value})
    assert problem in str(caught.value)


def test_a_log_record_is_one_line_of_json():
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        record = logging.LogRecord(
            "rljob_operator.x", logging.ERROR, "f", 1, "job %s\nfailed", ("a",), (ValueError, error, error.__traceback__)
        )
    line = logs.JsonFormatter().format(record)
    assert "\n" not in line
    entry = json.loads(line)
    assert (entry["level"], entry["logger"], entry["message"]) == ("ERROR", "rljob_operator.x", "job a\nfailed")
    assert "ValueError: two" in entry["error"]


async def test_only_the_namespaces_of_the_settings_are_listed():
    kube = FakeKube()
    kube.add(rljob())
    other = rljob("other")
    other["metadata"]["namespace"] = "elsewhere"
    kube.add(other)
    operator = _operator(kube, replace(SETTINGS, namespaces="elsewhere"))
    await operator.resync.first()
    assert operator.cache.keys() == [Key(namespace="elsewhere", name="other")]
