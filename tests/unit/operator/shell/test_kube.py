"""The real client against a local HTTP server: what it sends, and what it makes of answers."""

import asyncio
import datetime
import json
import subprocess
import sys
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web
from kubernetes.aio.client import Configuration
from kubernetes.aio.config import incluster_config

from rljob_operator import kube
from rljob_operator.errors import (
    AlreadyExistsError,
    ConflictError,
    NotFoundError,
    NotLeaderError,
    RejectedError,
    SettingsError,
    UnansweredError,
    UnavailableError,
)
from rljob_operator.protocol import Kind

RAYJOB = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": {"name": "math-a1", "namespace": "team"}}
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
    """Notes every request and gives the next scripted answer."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, dict[str, str], Any]] = []
        self.answers: list[web.Response | float | asyncio.Event] = []
        self.at_once = self.most_at_once = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        text = await request.text()
        self.requests.append(
            (
                request.method,
                request.path_qs,
                {name.title(): value for name, value in request.headers.items()},
                json.loads(text) if text else None,
            )
        )
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        answer = self.answers.pop(0) if self.answers else web.json_response({"kind": "RayJob", "metadata": {}})
        if not isinstance(answer, web.Response):
            await (answer.wait() if isinstance(answer, asyncio.Event) else asyncio.sleep(answer))
            answer = web.json_response({})
        await asyncio.sleep(0)
        self.at_once -= 1
        return answer


@pytest.fixture
async def server():
    served = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", served.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    served.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield served
    await runner.cleanup()


@pytest.fixture
async def client(server):
    seen: list[tuple[str, str, int]] = []
    made = kube.KubernetesClient(Configuration(host=server.url), max_in_flight=3, observe=lambda *request: seen.append(request))
    made.seen = seen
    yield made
    await made.close()


def _status(code: int, reason: str, message: str = "because") -> web.Response:
    return web.json_response({"kind": "Status", "status": "Failure", "reason": reason, "message": message, "code": code}, status=code)


async def test_create(client, server):
    assert await client.create(RAYJOB) == {"kind": "RayJob", "metadata": {}}
    method, path, headers, body = server.requests[0]
    assert (method, path, body) == ("POST", "/apis/ray.io/v1/namespaces/team/rayjobs?fieldValidation=Strict", RAYJOB)
    assert headers["Content-Type"] == "application/json"
    assert headers["User-Agent"] == "rljob-operator"
    assert client.seen == [("create", "RayJob", 200)]


async def test_core_kinds_have_a_path_of_their_own(client, server):
    await client.get(Kind.SERVICE_ACCOUNT, "team", "math-rljob")
    assert server.requests[0][:2] == ("GET", "/api/v1/namespaces/team/serviceaccounts/math-rljob")


async def test_merge_patch(client, server):
    await client.patch_merge(Kind.RAYJOB, "team", "math-a1", {"spec": {"suspend": True}})
    method, path, headers, body = server.requests[0]
    assert (method, path) == ("PATCH", "/apis/ray.io/v1/namespaces/team/rayjobs/math-a1")
    assert headers["Content-Type"] == "application/merge-patch+json"
    assert body == {"spec": {"suspend": True}}


async def test_status_is_applied_as_the_operator(client, server):
    manifest = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "math", "namespace": "team"}, "status": {}}
    await client.apply_status(manifest)
    method, path, headers, body = server.requests[0]
    assert method == "PATCH"
    assert path == "/apis/rljob.dev/v1alpha1/namespaces/team/rljobs/math/status?fieldManager=rljob-operator&force=true"
    assert headers["Content-Type"] == "application/apply-patch+yaml"
    assert body == manifest


async def test_delete_names_the_uid_and_says_whether_a_finalizer_holds_the_object(client, server):
    held = {"kind": "RayJob", "metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}}
    server.answers = [web.json_response(held), web.json_response({"kind": "Status", "status": "Success"})]
    assert await client.delete(Kind.RAYJOB, "team", "math-a1", "u1") == held
    assert await client.delete(Kind.RAYJOB, "team", "math-a1", "u1") is None
    assert server.requests[0][0] == "DELETE"
    assert server.requests[0][3]["preconditions"] == {"uid": "u1"}
    assert server.requests[0][3]["propagationPolicy"] == "Background"


async def test_a_list_is_read_page_by_page(client, server):
    server.answers = [
        web.json_response({"metadata": {"resourceVersion": "7", "continue": "to/ken="}, "items": [1]}),
        web.json_response({"metadata": {"resourceVersion": "7"}, "items": [2]}),
    ]
    pages = [page["items"] async for page in client.pages(Kind.POD, None, "rljob.dev/job")]
    assert pages == [[1], [2]]
    assert server.requests[0][1] == "/api/v1/pods?limit=100&labelSelector=rljob.dev/job"
    assert "continue=to/ken%3D" in server.requests[1][1]


@pytest.mark.parametrize(
    ("code", "reason", "expected"),
    [
        (404, "NotFound", NotFoundError),
        (409, "AlreadyExists", AlreadyExistsError),
        (409, "Conflict", ConflictError),
        (400, "BadRequest", RejectedError),
        (403, "Forbidden", RejectedError),
        (422, "Invalid", RejectedError),
        (401, "Unauthorized", UnavailableError),
        (410, "Expired", UnavailableError),
        (429, "TooManyRequests", UnavailableError),
        (500, "InternalError", UnavailableError),
        (503, "ServiceUnavailable", UnavailableError),
    ],
)
async def test_errors(client, server, code, reason, expected):
    server.answers = [_status(code, reason)]
    with pytest.raises(expected) as caught:
        await client.create(RAYJOB)
    assert type(caught.value) is expected
    assert str(caught.value) == f"create RayJob math-a1: {code} because"
    assert client.seen == [("create", "RayJob", code)]


async def test_retry_after_is_kept_and_nothing_is_tried_again(client, server):
    server.answers = [web.Response(status=429, text="slow down", headers={"Retry-After": "7"})]
    with pytest.raises(UnavailableError) as caught:
        await client.get(Kind.RLJOB, "team", "math")
    assert caught.value.retry_after_s == 7.0
    assert caught.value.message == "slow down"
    assert len(server.requests) == 1


async def test_an_answer_that_is_no_json_is_an_error(client, server):
    server.answers = [web.Response(text="<html>")]
    with pytest.raises(UnavailableError, match="not JSON"):
        await client.get(Kind.RLJOB, "team", "math")


async def test_no_answer_is_an_error_within_the_timeout(server):
    seen: list[tuple[str, str, int]] = []
    configuration = Configuration(host=server.url)
    made = kube.KubernetesClient(configuration, max_in_flight=1, observe=lambda *request: seen.append(request), request_timeout_s=0.05)
    server.answers = [5.0]
    with pytest.raises(UnansweredError, match=r"no answer .* within 0.05 s"):
        await made.get(Kind.RLJOB, "team", "math")
    assert seen == [("get", "RLJob", 0)]
    await made.close()


async def test_a_write_waits_for_webhooks_for_as_long_as_the_api_server_does(server):
    """Not for as long as a read: who hangs up ends the write, and an object that may be stored is not."""
    assert kube.WRITE_TIMEOUT_S > 34, "requestTimeoutUpperBound of the API server"
    made = kube.KubernetesClient(
        Configuration(host=server.url), max_in_flight=1, observe=lambda *request: None, request_timeout_s=0.05, write_timeout_s=10.0
    )
    server.answers = [0.2, 0.2, 0.2]
    await made.create(RAYJOB)
    await made.patch_merge(Kind.RAYJOB, "team", "math-a1", {})
    await made.delete(Kind.RAYJOB, "team", "math-a1", "uid")
    assert len(server.requests) == 3
    await made.close()


async def test_no_connection_is_an_error():
    made = kube.KubernetesClient(Configuration(host="http://127.0.0.1:1"), max_in_flight=1, observe=lambda *request: None)
    with pytest.raises(UnavailableError, match="no connection to"):
        await made.get(Kind.RLJOB, "team", "math")
    await made.close()


async def test_requests_under_way_are_bounded(client, server):
    await asyncio.gather(*(client.create(RAYJOB) for _ in range(20)))
    assert len(server.requests) == 20
    assert 1 < server.most_at_once <= 3


async def test_a_write_that_hangs_in_a_webhook_makes_room_and_the_number_of_those_is_bounded(server, monkeypatch):
    monkeypatch.setattr(kube, "LATE_S", 0.05)
    monkeypatch.setattr(kube, "MAX_LATE", 1)
    made = kube.KubernetesClient(Configuration(host=server.url), max_in_flight=1, observe=lambda *request: None)
    webhook = asyncio.Event()
    server.answers = [webhook, web.json_response({}), webhook]

    async def arrived(number: int) -> None:
        while len(server.requests) < number:
            await asyncio.sleep(0)

    first = asyncio.create_task(made.create(RAYJOB))
    await arrived(1)
    await made.get(Kind.RLJOB, "team", "math")
    assert not first.done()
    second = asyncio.create_task(made.create(RAYJOB))
    await arrived(3)
    third = asyncio.create_task(made.get(Kind.RLJOB, "team", "math"))
    await asyncio.wait([third], timeout=0.3)
    assert not third.done(), "the second write keeps its place"
    assert len(server.requests) == 3
    webhook.set()
    await asyncio.gather(first, second, third)
    await made.close()


async def test_without_the_lease_nothing_is_written_but_the_lease(server):
    seen: list[tuple[str, str, int]] = []
    made = kube.KubernetesClient(
        Configuration(host=server.url), max_in_flight=1, observe=lambda *request: seen.append(request), may_write=lambda: False
    )
    with pytest.raises(NotLeaderError, match="does not hold the lease"):
        await made.create(RAYJOB)
    with pytest.raises(NotLeaderError):
        await made.delete(Kind.RAYJOB, "team", "math-a1", "uid")
    await made.get(Kind.RAYJOB, "team", "math-a1")
    await made.patch_merge(Kind.LEASE, "team", "op", {"spec": {}})
    await made.close()
    assert [request[0] for request in server.requests] == ["GET", "PATCH"]
    assert [verb for verb, _, _ in seen] == ["get", "patch"]


async def test_the_token_file_is_read_again_when_it_was_rotated(server, monkeypatch, tmp_path):
    token, certificate = tmp_path / "token", tmp_path / "ca.crt"
    token.write_text("first")
    certificate.write_text("x")
    now = [datetime.datetime(2026, 1, 1)]
    clock = SimpleNamespace(datetime=SimpleNamespace(now=lambda: now[0]), timedelta=datetime.timedelta)
    monkeypatch.setattr(incluster_config, "datetime", clock)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(token))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(certificate))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "api")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    configuration = Configuration()
    incluster_config.load_incluster_config(client_configuration=configuration)
    assert configuration.host == "https://api:443"
    configuration.host, configuration.ssl_ca_cert = server.url, None
    loader_sets = configuration.refresh_api_key_hook

    def refresh(target: Configuration) -> None:
        loader_sets(target)
        target.host, target.ssl_ca_cert = server.url, None

    configuration.refresh_api_key_hook = refresh
    made = kube.KubernetesClient(configuration, max_in_flight=1, observe=lambda *request: None)
    await made.get(Kind.RLJOB, "team", "math")
    token.write_text("second")
    await made.get(Kind.RLJOB, "team", "math")
    now[0] += datetime.timedelta(minutes=2)
    await made.get(Kind.RLJOB, "team", "math")
    await made.close()
    assert [request[2]["Authorization"] for request in server.requests] == ["bearer first", "bearer first", "bearer second"]


async def test_without_any_cluster_the_error_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr("kubernetes.aio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(tmp_path / "none"))
    with pytest.raises(SettingsError, match="set KUBECONFIG"):
        await kube.KubernetesClient.connect(max_in_flight=1, observe=lambda *request: None)


def test_no_generated_models_are_imported():
    """They would cost 60 MB; only the few that the client itself needs may be there."""
    code = (
        "import sys, rljob_operator.kube; "
        "generated = ('kubernetes.aio.client.models.', 'kubernetes.aio.client.api.'); "
        "print(sum(name.startswith(generated) for name in sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50)
    assert int(found.stdout) <= 10
