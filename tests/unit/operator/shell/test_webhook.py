"""Certificates of the webhook, how two operators share them, and its server under a flood."""

import asyncio
import base64
import ssl
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta

import aiohttp
import pytest
import yaml

from rljob_operator import certificates, review
from rljob_operator.metrics import Metrics
from rljob_operator.protocol import Kind
from rljob_operator.webhook import NUM_AT_ONCE, Webhook
from tests.support.invalid_manifests import named
from tests.support.ports import free_port
from tests.unit.operator.shell.fake_kube import FakeKube
from tests.unit.operator.shell.world import rljob

NOW = datetime(2026, 1, 1, tzinfo=UTC)
HOSTS = ("hook.system.svc", "127.0.0.1")
SERVICE = "system/hook"


@pytest.fixture
def kube() -> FakeKube:
    kube = FakeKube()
    hook = {"name": "validate.rljob.dev", "clientConfig": {"service": {"name": "hook"}}}
    metadata = {"namespace": "", "name": "system-hook"}
    kind = Kind.WEBHOOK_CONFIGURATION
    kube.add({"apiVersion": kind.api_version, "kind": str(kind), "metadata": metadata, "webhooks": [hook]})
    return kube


def webhook(kube: FakeKube, *, leads: bool = True, now: datetime = NOW, port: int = 0) -> Webhook:
    return Webhook(kube, Metrics(), service=SERVICE, port=port, may_write=lambda: leads, clock=lambda: now)


def bundle(kube: FakeKube) -> bytes:
    (hook,) = kube.one(Kind.WEBHOOK_CONFIGURATION, "system-hook", "")["webhooks"]
    return base64.b64decode(hook["clientConfig"]["caBundle"])


def secret(kube: FakeKube, key: str) -> bytes:
    return base64.b64decode(kube.one(Kind.SECRET, "hook", "system")["data"][key])


def test_certificates_are_due_before_they_expire_and_for_other_names():
    made = certificates.make(HOSTS, NOW)
    late = NOW + certificates.VALIDITY - certificates.RENEW_BEFORE
    assert not certificates.is_due(made, HOSTS, NOW)
    assert not certificates.is_due(made, HOSTS, late - timedelta(days=1))
    assert certificates.is_due(made, HOSTS, late + timedelta(days=1))
    assert certificates.is_due(made, ("other.system.svc",), NOW)


@pytest.mark.parametrize("field", ["authorities", "certificate", "key"])
def test_certificates_that_are_damaged_or_mixed_are_due(field):
    made, other = certificates.make(HOSTS, NOW), certificates.make(HOSTS, NOW)
    parts = {name: getattr(made, name) for name in ("authorities", "certificate", "key")}
    for value in (b"", b"no certificate", getattr(other, field)):
        assert certificates.is_due(certificates.Certificates(**{**parts, field: value}), HOSTS, NOW)


def test_the_bundle_keeps_the_previous_authority_and_no_more():
    first = certificates.make(HOSTS, NOW)
    second = certificates.make(HOSTS, NOW, first)
    third = certificates.make(HOSTS, NOW, second)
    assert second.authorities.endswith(first.authorities)
    assert third.authorities.count(b"BEGIN CERTIFICATE") == 2
    assert first.authorities not in third.authorities


async def test_the_leader_makes_what_the_standby_serves(kube):
    leader, standby = webhook(kube), webhook(kube, leads=False)
    assert await standby.step() is False, "nothing to serve yet"
    assert await leader.step() is True
    assert await standby.step() is True
    assert bundle(kube) == secret(kube, "ca.crt")
    written = list(kube.writes)
    assert await leader.step() is True
    assert await standby.step() is True
    assert kube.writes == written, "nothing changed"


async def test_a_certificate_is_renewed_once_by_the_leader_and_the_old_one_stays_trusted(kube):
    await webhook(kube).step()
    old = secret(kube, "ca.crt")
    later = NOW + timedelta(days=300)
    assert await webhook(kube, leads=False, now=later).step() is True
    assert secret(kube, "ca.crt") == old, "a standby writes nothing"
    assert await webhook(kube, now=later).step() is True
    assert bundle(kube) == secret(kube, "ca.crt") != old
    assert bundle(kube).endswith(old)


async def test_a_bundle_that_an_upgrade_removed_comes_back(kube):
    leader = webhook(kube)
    await leader.step()
    hook = {"name": "validate.rljob.dev", "clientConfig": {"service": {"name": "hook"}}}
    kube.edit(Kind.WEBHOOK_CONFIGURATION, "", "system-hook", {"webhooks": [hook]})
    await leader.step()
    assert bundle(kube) == secret(kube, "ca.crt")


async def test_a_missing_configuration_is_waited_for(kube):
    kube.remove(Kind.WEBHOOK_CONFIGURATION, "", "system-hook")
    assert await webhook(kube).step() is False


async def listens(port: int) -> bool:
    """Whether something on this machine takes connections at the port."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except ConnectionRefusedError:
        return False
    writer.close()
    return True


@pytest.fixture
async def served(kube) -> AsyncIterator[tuple[str, ssl.SSLContext]]:
    port = free_port()
    hook = Webhook(kube, Metrics(), service=SERVICE, port=port, may_write=lambda: True)
    running = asyncio.create_task(hook.run())
    while not await listens(port):
        assert not running.done(), running
        await asyncio.sleep(0.01)
    yield f"https://127.0.0.1:{port}/validate", ssl.create_default_context(cadata=bundle(kube).decode())
    running.cancel()
    await asyncio.wait([running])


def asked(job: dict) -> dict:
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": {"uid": "u1", "object": job, "oldObject": None}}


async def test_it_answers_over_tls_that_its_bundle_vouches_for(served):
    url, tls = served
    async with aiohttp.ClientSession() as session:
        async with session.post(url, json=asked(yaml.safe_load(named("mapping-beyond").manifest())), ssl=tls) as answer:
            response = (await answer.json())["response"]
        async with session.post(url, data=b"{", ssl=tls) as answer:
            malformed = answer.status
    assert (response["uid"], response["allowed"], malformed) == ("u1", False, 400)


async def test_a_flood_is_answered_unchecked_and_costs_no_memory(served, monkeypatch):
    url, tls = served
    may_go_on = asyncio.Event()
    loop = asyncio.get_running_loop()
    real = review.review

    def slow(request, known):
        asyncio.run_coroutine_threadsafe(may_go_on.wait(), loop).result(60)
        return real(request, known)

    monkeypatch.setattr(review, "review", slow)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def ask() -> list[str]:
            async with session.post(url, json=asked(rljob()), ssl=tls) as answer:
                return (await answer.json())["response"].get("warnings", [])

        asking = [asyncio.create_task(ask()) for _ in range(NUM_AT_ONCE + 50)]
        while sum(task.done() for task in asking) < 50:
            await asyncio.sleep(0.01)
        assert sum(task.done() for task in asking) == 50, "the others wait"
        may_go_on.set()
        answers = await asyncio.gather(*asking)
    assert sum("too many requests" in answer[0] for answer in answers) == 50
    assert sum(answer == [review.NO_STORAGE] for answer in answers) == NUM_AT_ONCE
