"""How the process configures kopf, its liveness probe, its help and its settings."""

import asyncio
import contextlib
import itertools
import json
import logging
import math
from collections.abc import AsyncIterator
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import kopf
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from yarl import URL

from rljob_api.naming import JOB_LABEL
from rljob_operator import logs, main
from rljob_operator.cache import Cache, Source
from rljob_operator.errors import NotFoundError, RejectedError, SettingsError, UnavailableError
from rljob_operator.lease import LEASE_S, Leadership
from rljob_operator.metrics import Metrics
from rljob_operator.model import Key, Manifest
from rljob_operator.protocol import WATCHED, Kind
from rljob_operator.settings import Settings
from tests.unit.operator.shell.fake_kube import FakeKube
from tests.unit.operator.shell.virtual_time import run
from tests.unit.operator.shell.world import SETTINGS, rljob

ENVIRONMENT = {"RLJOB_OPERATOR_RUNTIME_IMAGE": "image:1", "RLJOB_OPERATOR_RUNTIME_RAY_VERSION": "2.60.0"}


def _operator(kube: FakeKube | None = None, settings: Settings = SETTINGS, cache: Cache | None = None) -> main.Operator:
    return main.Operator(settings, kube or FakeKube(), Metrics(), cache or Cache(), Leadership())


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


async def test_only_a_list_that_follows_another_is_a_gap():
    noted: list[Kind] = []
    gaps = main.Gaps(noted.append, num_watches=lambda: 4)

    async def answered(url: str, status: int = 200) -> None:
        response = SimpleNamespace(status=status)
        await gaps.on_request(None, None, SimpleNamespace(url=URL(f"http://api{url}"), response=response))

    await answered("/apis/rljob.dev/v1alpha1/rljobs?limit=100")
    await answered("/apis/rljob.dev/v1alpha1/rljobs?limit=100&continue=x")
    await answered("/apis/rljob.dev/v1alpha1/rljobs?watch=true&resourceVersion=5")
    await answered("/apis/ray.io/v1/rayjobs?limit=100", 503)
    await answered("/apis/ray.io/v1/rayjobs?limit=100")
    await answered("/api/v1/namespaces/a/pods?limit=100")
    assert not gaps.all_begun.is_set()
    await answered("/api/v1/namespaces/b/pods?limit=100")
    assert noted == []
    assert gaps.all_begun.is_set()
    await answered("/apis/ray.io/v1/rayjobs?limit=100")
    await answered("/api/v1/namespaces/b/pods?limit=100")
    assert noted == [Kind.RAYJOB, Kind.POD]


async def test_kopf_gets_the_version_of_a_list_and_none_of_its_objects():
    page = {"kind": "PodList", "items": [{"metadata": {"name": "a"}}], "metadata": {"resourceVersion": "7", "continue": "x"}}
    other = {"kind": "APIResourceList", "resources": []}

    async def answer(request: web.Request) -> web.Response:
        return web.json_response(other if request.path == "/api/v1" else page)

    application = web.Application()
    application.router.add_get("/{tail:.*}", answer)
    async with TestServer(application) as server:
        info = kopf.ConnectionInfo(server=str(server.make_url("/")))
        context = main.observed_session(info, main.Gaps(lambda kind: None, num_watches=lambda: 1))
        async with context.aiohttp_session as session:
            listed = await (await session.get(server.make_url("/api/v1/pods?limit=1"))).json()
            assert listed == {"kind": "PodList", "items": [], "metadata": {"resourceVersion": "7"}}
            assert await (await session.get(server.make_url("/api/v1"))).json() == other
    assert main.kopf_settings().watching.chunk_size == 1


def test_before_the_first_list_only_new_jobs_are_acted_on():
    async def scenario() -> tuple[list[str], list[str]]:
        kube = FakeKube()
        operator = _operator(kube)
        operator.start()
        await asyncio.sleep(1)
        kube.add(rljob("begun"))
        begun = kube.set_status(Kind.RLJOB, "team", "begun", observedGeneration=1)
        operator.on_event(Kind.RLJOB, "ADDED", begun)
        operator.on_event(Kind.RLJOB, "ADDED", kube.add(rljob("new")))
        await asyncio.sleep(5)
        before = [write for write in kube.writes if "RayJob" in write]
        kube.add(rljob("silent"))  # no watch tells of it
        operator.gaps.all_begun.set()
        await asyncio.sleep(5)
        await operator.drain()
        return before, [write for write in kube.writes if "RayJob" in write]

    before, after = run(scenario())
    assert before == ["create RayJob new-a1"]
    assert sorted(after) == ["create RayJob begun-a1", "create RayJob new-a1", "create RayJob silent-a1"]


@pytest.mark.parametrize("leads_at_first", [True, False])
def test_a_new_job_waits_for_none_of_those_that_a_restart_looks_at(leads_at_first: bool):
    """Whether the lists are complete before or after this process leads."""

    async def scenario() -> list[str]:
        kube = FakeKube()
        for number in range(100):
            kube.add(rljob(f"begun-{number}"))
            kube.set_status(Kind.RLJOB, "team", f"begun-{number}", observedGeneration=1)
        kube.add(rljob("new"))  # while this process starts, so that the lists have it, as the last one
        kube.writes.clear()
        operator = _operator(kube)
        if not leads_at_first:
            operator.leadership.end()
        operator.gaps.all_begun.set()
        operator.start()
        await asyncio.sleep(1)
        operator.leadership.extend(math.inf)
        await asyncio.sleep(30)
        await operator.drain()
        return [write for write in kube.writes if "RayJob" in write]

    made = run(scenario())
    assert len(made) == 101
    assert made.index("create RayJob new-a1") <= SETTINGS.workers


def test_watches_that_never_begin_end_the_process():
    async def scenario() -> float:
        operator = _operator()
        resync = next(task for task in operator.start() if task.get_name() == "resync")
        with pytest.raises(SettingsError, match=r"the watches on RLJob, RayJob, RayCluster, Pod did not begin within 60 s"):
            await resync
        await operator.drain()
        return asyncio.get_running_loop().time()

    assert run(scenario()) == pytest.approx(60, abs=1)


def test_a_gap_is_compared_at_once_and_many_gaps_seldom():
    async def scenario() -> tuple[float, int]:
        kube = FakeKube()
        operator = _operator(kube)
        kube.add(rljob())
        await operator.resync.first()
        kube.remove(Kind.RLJOB, "team", "math")
        lists: list[Kind] = []
        kube.fault = lambda verb, kind, name: lists.append(kind) if verb == "list" else None
        running = asyncio.create_task(operator.resync.run())
        clock = asyncio.get_running_loop().time
        operator.resync.note_gap(Kind.RLJOB)
        while operator.cache.keys():
            await asyncio.sleep(0.1)
        found_s = clock()
        while clock() < 200:
            operator.resync.note_gap(Kind.RLJOB)
            await asyncio.sleep(0.5)
        running.cancel()
        return found_s, len(lists)

    found_s, lists = run(scenario())
    assert found_s < 1
    assert lists < 20


def test_a_list_after_a_gap_that_fails_is_tried_again():
    async def scenario() -> float:
        kube = FakeKube()
        operator = _operator(kube)
        kube.add(rljob())
        await operator.resync.first()
        kube.remove(Kind.RLJOB, "team", "math")
        clock = asyncio.get_running_loop().time
        kube.fault = lambda verb, kind, name: UnavailableError("list", 503, "no") if clock() < 5 else None
        running = asyncio.create_task(operator.resync.run())
        operator.resync.note_gap(Kind.RLJOB)
        while operator.cache.keys():
            await asyncio.sleep(0.1)
        running.cancel()
        return clock()

    assert 5 <= run(scenario()) <= 15  # pauses of 1, 2, 4 and 8 s at most


def test_the_pauses_between_tries_of_kopf_grow_and_never_end():
    pauses = list(itertools.islice(main.EndlessBackoff(), 100))
    assert 0.5 <= pauses[0] <= 1
    assert all(15 <= pause <= 30 for pause in pauses[10:])
    assert len(set(pauses)) == 100


async def test_kopf_neither_posts_events_nor_watches_definitions():
    settings = main.kopf_settings()
    assert settings.persistence.diffbase_storage.build(body={"spec": {}}) == {}
    assert not settings.posting.enabled
    assert settings.scanning.disabled
    assert settings.watching.client_timeout > settings.watching.server_timeout > settings.watching.inactivity_timeout


def test_an_event_reaches_cache_and_queue_and_its_deletion_too():
    async def scenario() -> None:
        operator = _operator()
        operator.start()
        await asyncio.sleep(1)
        obj = FakeKube().add(rljob())
        operator.on_event(Kind.RLJOB, "ADDED", obj)
        assert operator.cache.keys() == [Key(namespace="team", name="math")]
        assert operator.queue is not None
        assert len(operator.queue) == 1
        operator.on_event(Kind.RLJOB, "DELETED", {**obj, "metadata": {**obj["metadata"], "resourceVersion": "999"}})
        assert operator.cache.keys() == []
        await operator.drain()

    run(scenario())


def test_a_standby_learns_everything_writes_nothing_and_takes_over():
    async def scenario() -> tuple[list[str], list[str], float]:
        clock = asyncio.get_running_loop().time
        kube, leadership = FakeKube(), Leadership(clock)
        held = {"apiVersion": Kind.LEASE.api_version, "kind": "Lease", "metadata": {"namespace": "system", "name": "op"}}
        kube.add(held | {"spec": {"holderIdentity": "other", "leaseDurationSeconds": LEASE_S}})
        settings = replace(SETTINGS, lease="system/op")
        operator = main.Operator(settings, kube, Metrics(), Cache(), leadership)
        operator.start()
        operator.on_event(Kind.RLJOB, "ADDED", kube.add(rljob()))
        await asyncio.sleep(LEASE_S - 3)
        idle, problems = list(kube.writes), operator.problems()
        while "create RayJob math-a1" not in kube.writes:
            await asyncio.sleep(0.1)
        took_over_s = clock()
        await operator.drain()
        assert kube.one(Kind.LEASE, "op", "system")["spec"].get("holderIdentity") is None, "not released"
        return idle, problems, took_over_s

    idle, problems, took_over_s = run(scenario())
    assert (idle, problems) == ([], [])
    assert LEASE_S <= took_over_s <= LEASE_S + 5


def test_the_probe_names_a_dead_queue_and_a_watch_that_lags():
    async def scenario() -> tuple[list[str], list[str], list[str]]:
        clock = [0.0]
        operator = _operator(cache=Cache(lambda: clock[0]))
        before = operator.problems()
        operator.start()
        await asyncio.sleep(1)
        healthy = operator.problems()
        operator.cache.put(Kind.RLJOB, FakeKube().add(rljob()), Source.OTHER)
        clock[0] = 181.0
        silent = operator.problems()
        await operator.drain()
        return before, healthy, silent

    before, healthy, silent = run(scenario())
    assert before == ["it has not started"]
    assert healthy == []
    assert silent == ["the watch on RLJob has not delivered a known change for 181 s (limit 180 s)"]


@pytest.mark.parametrize("lists", ["first", "after a gap"])
def test_what_is_older_than_a_watch_is_not_waited_for(lists: str):
    """An operator that starts among jobs that are over hears nothing of them, and is healthy."""

    async def scenario() -> list[str]:
        clock, kube = [0.0], FakeKube()
        operator = _operator(kube, cache=Cache(lambda: clock[0]))
        kube.add(rljob())
        if lists == "first":
            await operator.resync.first()
        else:
            await operator.resync.compare([Kind.RLJOB], Source.LIST)
        clock[0] = 181.0
        return list(operator.cache.watch_ages_s().values())

    assert set(run(scenario())) == {0.0}


class PartlyReadable(FakeKube):
    """Some of its namespaces refuse to be listed, as without a Role, which a deleted namespace has no more."""

    unreadable: frozenset[str] = frozenset({"gone"})

    async def pages(self, kind: Kind, namespace: str | None, *selectors: str, **others: str) -> AsyncIterator[Manifest]:
        if namespace in self.unreadable:
            raise RejectedError(f"list {kind}", 403, f"cannot list resource in the namespace {namespace}")
        async for page in super().pages(kind, namespace, *selectors, **others):
            yield page


def test_a_deleted_namespace_does_not_keep_the_operator_from_others(caplog: pytest.LogCaptureFixture):
    kube = PartlyReadable()
    kube.add(rljob())
    operator = _operator(kube, replace(SETTINGS, namespaces="gone,team"))

    async def start() -> None:
        await operator.resync.wait_until_served()
        await operator.resync.first()

    run(start())
    assert operator.resync.namespaces == ("team",)
    assert operator.cache.keys() == [Key(namespace="team", name="math")]
    assert "namespaces that cannot be read are left out: gone" in caplog.text


def test_a_namespace_that_is_deleted_later_does_not_end_the_comparison_of_others():
    kube = PartlyReadable()
    kube.unreadable = frozenset()
    operator = _operator(kube, replace(SETTINGS, namespaces="gone,team"))

    async def scenario() -> list[Kind]:
        await operator.resync.wait_until_served()
        await operator.resync.first()
        kube.unreadable = frozenset({"gone"})
        kube.add(rljob())
        return await operator.resync.compare(WATCHED, Source.OTHER)

    assert run(scenario()) == []
    assert operator.cache.keys() == [Key(namespace="team", name="math")]


def test_a_namespace_that_can_be_read_again_restarts_the_operator():
    kube = PartlyReadable()
    operator = _operator(kube, replace(SETTINGS, namespaces="gone,team"))

    async def scenario() -> None:
        await operator.resync.wait_until_served()
        await operator.resync.first()
        running = asyncio.create_task(operator.resync.run())
        await asyncio.sleep(700)
        assert not running.done()
        kube.unreadable = frozenset()
        await running

    with pytest.raises(SettingsError, match="namespace gone can be read now; the operator restarts to watch it"):
        run(scenario())


def test_two_namespaces_of_which_each_refuses_another_kind_are_not_all_namespaces():
    class Half(FakeKube):
        async def pages(self, kind: Kind, namespace: str | None, *selectors: str, **others: str) -> AsyncIterator[Manifest]:
            if (namespace, kind) in (("a", Kind.POD), ("b", Kind.RAYJOB)):
                raise RejectedError(f"list {kind}", 403, "forbidden")
            async for page in super().pages(kind, namespace, *selectors, **others):
                yield page

    operator = _operator(Half(), replace(SETTINGS, namespaces="a,b"))
    with pytest.raises(SettingsError, match="none of the namespaces a, b can be read; install the CRDs"):
        run(operator.resync.wait_until_served())
    assert operator.resync.namespaces == ("a", "b"), "empty would be all of the cluster"


def test_an_operator_that_may_read_no_namespace_says_so():
    kube = PartlyReadable()
    kube.unreadable = frozenset({"gone", "team"})
    with pytest.raises(SettingsError, match=r"403 cannot list .*; install the CRDs"):
        run(_operator(kube, replace(SETTINGS, namespaces="gone,team")).resync.wait_until_served())


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
        ("LISTEN_ADDRESS", "127.0.0.1", "RLJOB_OPERATOR_LISTEN_ADDRESS='127.0.0.1' is not one of 0.0.0.0, ::"),
        ("LOG_LEVEL", "LOUD", "RLJOB_OPERATOR_LOG_LEVEL='LOUD' is not one of DEBUG, INFO, WARNING, ERROR"),
        ("LOG_FORMAT", "xml", "RLJOB_OPERATOR_LOG_FORMAT='xml' is not one of json, text"),
        ("NETWORK_POLICY", "yes", "RLJOB_OPERATOR_NETWORK_POLICY='yes' is not of type bool"),
        ("LEASE", "system", "RLJOB_OPERATOR_LEASE='system' is not of the form namespace/name"),
        ("EGRESS", "deny", "RLJOB_OPERATOR_EGRESS is not JSON"),
        ("METRICS_FROM", "monitoring", "RLJOB_OPERATOR_METRICS_FROM is not JSON"),
        ("METRICS_FROM", "[{}]", "is not a list of peers with ipBlock, namespaceSelector, podSelector"),
        ("EGRESS", '[{"from": []}]', "is not a list of rules with to and ports, as in spec.egress of a NetworkPolicy"),
        ("COLOR", "red", "RLJOB_OPERATOR_COLOR is not a known setting"),
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


@pytest.mark.parametrize(
    ("variables", "host"),
    [
        ({}, "0.0.0.0"),
        ({"KUBERNETES_SERVICE_HOST": "10.96.0.1"}, "0.0.0.0"),
        ({"KUBERNETES_SERVICE_HOST": "fd00:10:96::1"}, "[::]"),
        ({"KUBERNETES_SERVICE_HOST": "fd00:10:96::1", "RLJOB_OPERATOR_LISTEN_ADDRESS": "0.0.0.0"}, "0.0.0.0"),
    ],
    ids=["none", "ipv4", "ipv6", "named"],
)
def test_probes_are_answered_on_the_addresses_that_pods_have(variables: dict[str, str], host: str):
    required = {"RLJOB_OPERATOR_RUNTIME_IMAGE": "image:1", "RLJOB_OPERATOR_RUNTIME_RAY_VERSION": "2.60.0"}
    assert main.liveness_endpoint(Settings.from_environment(required | variables)) == f"http://{host}:8080/healthz"
