"""Layer: the operator on a real API server; :mod:`.lives` plays KubeRay's part; jobs and operator fail at the same time."""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from aiohttp import web

from bench.chaos import webhooks
from bench.chaos.lives import DEADLINE_S, LAYER, POLL_S, Life
from bench.chaos.lives import KINDS as JOB_KINDS
from bench.chaos.observer import Observer
from bench.chaos.outcome import RECOVERED, WRONG, Outcome
from bench.chaos.skewed_operator import CLOCK
from bench.chaos.slowed import Slowed
from bench.operator.api import RAYJOBS, RLJOBS, Api
from bench.operator.scenarios import job_manifest
from e2e.cluster import build
from e2e.cluster.api_server import temporary_api_server
from tests.integration.operator_world.faulty_proxy import FaultyProxy, refusal
from tests.integration.operator_world.process import OperatorProcess

REFUSALS = {409: "Conflict", 429: "TooManyRequests", 500: "InternalError", 503: "ServiceUnavailable"}
OPERATOR_KINDS = (
    "operator killed", "operator killed", "operator stopped and continued", "operator's clock jumps", "watches cut", "410 for a while",
    "API server slow", "API server away", *(f"every third write {status}" for status in REFUSALS), "etcd slowed", *webhooks.KINDS,
)  # fmt: skip
LONG_KINDS = (webhooks.HANGS,)
"""Faults of the operator; each takes some half a minute."""
LEASE_KINDS = ("leader killed", "leader stopped beyond its lease")
KINDS = (*JOB_KINDS, *dict.fromkeys(OPERATOR_KINDS), *LEASE_KINDS)
NAMESPACE = "chaos"
LIVES_AT_ONCE = 8
JUMPS_S = (-3600.0, -90.0, 90.0, 3600.0)
"""Jumps of the clock; longer ones than a deadline of the spec would end jobs, rightly."""
QUIET_S = 4.0
CHILD_COLLECTIONS = (
    "/api/v1/namespaces/{}/serviceaccounts", "/apis/ray.io/v1/namespaces/{}/rayjobs",
    "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/roles", "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings",
    "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies",
)  # fmt: skip
Say = Callable[[int], None]


@dataclass(kw_only=True)
class Scene:
    """An API server with a proxy that fails on demand, and the operator behind it."""

    api: Api
    namespace: str
    proxy: FaultyProxy
    operator: OperatorProcess
    clock: Path
    rng: random.Random
    numbers: Any
    folder: Path
    """Folder of the API server."""

    async def meet(self, kind: str) -> Outcome:
        """One fault of the operator or of what it depends on."""
        try:
            took_s = await (webhooks.meet(self, kind) if kind in webhooks.KINDS else self._probe(self.hand(kind)))
        except (TimeoutError, RuntimeError, AssertionError, psutil.Error) as error:
            log = self.operator.log_file.read_text()[-2500:]
            ended = f"the operator's exit code {self.operator.exit_code()}, its log: {log}"
            return Outcome(layer=LAYER, kind=kind, result=WRONG, detail=f"{type(error).__name__}: {error}; {ended}")
        return Outcome(layer=LAYER, kind=kind, result=RECOVERED, recovery_s=took_s)

    async def _probe(self, fault: Callable[[], Any]) -> float:
        """Apply a job in the middle of a fault; the seconds until it has its RayJob."""
        name = f"probe-{next(self.numbers)}"
        began_s = time.monotonic()
        hand = asyncio.ensure_future(fault())
        await asyncio.sleep(self.rng.random() * 0.3)
        await self.api.create(RLJOBS.format(namespace=self.namespace), job_manifest(name))
        await self.until_child(name)
        took_s = time.monotonic() - began_s
        await hand
        return took_s

    async def until_child(self, name: str) -> None:
        """The RayJob of the first attempt.

        Raises:
            TimeoutError: not within the deadline.
        """
        path, deadline_s = f"{RAYJOBS.format(namespace=self.namespace)}/{name}-a1", time.monotonic() + DEADLINE_S
        while (await self.api.answer("GET", path))[0] != 200:
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"no RayJob of {name} within {DEADLINE_S:.0f} s")
            await asyncio.sleep(POLL_S)

    async def killed(self) -> None:
        self.operator.kill()
        await asyncio.sleep(self.rng.random())
        await asyncio.to_thread(self.operator.start)

    async def stopped(self) -> None:
        os.kill(self.operator.pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(0.5 + 2 * self.rng.random())
        finally:
            os.kill(self.operator.pid, signal.SIGCONT)

    async def jumped(self) -> None:
        self.clock.write_text(str(self.rng.choice(JUMPS_S)))
        await asyncio.sleep(1 + self.rng.random())
        self.clock.write_text("0")

    async def cut(self) -> None:
        self.proxy.cut_watches()

    async def gone(self) -> None:
        self.proxy.watch_error = 410
        self.proxy.cut_watches()
        await asyncio.sleep(1 + self.rng.random())
        self.proxy.watch_error = None

    async def slow(self) -> None:
        self.proxy.delay_s = 0.3 + self.rng.random()
        await asyncio.sleep(3)
        self.proxy.delay_s = 0.0

    async def etcd_slowed(self) -> None:
        """The API server's store is on a node that is far too busy."""
        (etcd,) = [p for p in psutil.process_iter(["name", "cmdline"]) if _is_etcd_of(p, self.folder)]
        with Slowed(etcd.pid):
            await asyncio.sleep(4 + 2 * self.rng.random())

    async def away(self) -> None:
        self.proxy.rule = lambda method, path: refusal(503, "ServiceUnavailable")
        self.proxy.cut_watches()
        await asyncio.sleep(1 + 2 * self.rng.random())
        self.proxy.rule = lambda method, path: None

    async def refused(self, status: int) -> None:
        writes = itertools.count(self.rng.randint(1, 3))

        def rule(method: str, path: str) -> web.Response | None:
            if method == "GET" or next(writes) % 3:
                return None
            return refusal(status, REFUSALS[status], retry_after_s=1 if status == 429 else None)

        self.proxy.rule = rule
        await asyncio.sleep(2 + self.rng.random())
        self.proxy.rule = lambda method, path: None

    def hand(self, kind: str) -> Callable[[], Any]:
        """What does a kind of fault."""
        if kind.startswith("every third write"):
            return partial(self.refused, int(kind.split()[-1]))
        return {
            "operator killed": self.killed, "operator stopped and continued": self.stopped, "operator's clock jumps": self.jumped,
            "watches cut": self.cut, "410 for a while": self.gone, "API server slow": self.slow, "API server away": self.away,
            "etcd slowed": self.etcd_slowed,
        }[kind]  # fmt: skip


def _is_etcd_of(process: psutil.Process, folder: Path) -> bool:
    return process.info["name"] == "etcd" and any(str(folder) in word for word in process.info["cmdline"] or ())


async def run(seed: int, count: int, only: str | None, say: Say, failovers: int = 4) -> list[Outcome]:
    """So many faults on an API server of their own, a part of them of two replicas.

    Args:
        seed: of moments and of the order.
        count: faults.
        only: one kind.
        say: called with how many are done.
        failovers: of the count at most, for each takes some 20 seconds.
    """
    failovers = 0 if only is not None and only not in LEASE_KINDS else count if only is not None else min(failovers, count // 4)
    with tempfile.TemporaryDirectory(prefix="bench-chaos-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        with temporary_api_server(folder / "api", crds=True) as kubeconfig:
            async with Api(kubeconfig) as api:
                await api.namespace(NAMESPACE)
                found = await run_on(api, kubeconfig, folder, NAMESPACE, seed=seed, count=count - failovers, only=only, say=say)
                if failovers:
                    async with Observer(api, NAMESPACE) as observer:
                        found += await _replicas(api, kubeconfig, folder, failovers, only, lambda n: say(len(found) + n))
                    found += _violations(observer)
    return found


async def run_on(
    api: Api,
    kubeconfig: Path,
    folder: Path,
    namespace: str,
    *,
    seed: int,
    count: int,
    only: str | Sequence[str] | None = None,
    say: Say = lambda n: None,
) -> list[Outcome]:
    """So many faults of one operator and its jobs in a namespace that exists; all jobs are deleted afterwards."""
    only = (only,) if isinstance(only, str) else only
    found: list[Outcome] = []
    if not count:
        return found
    async with Observer(api, namespace) as observer:
        async with _scene(api, kubeconfig, folder, namespace, random.Random(seed)) as scene:
            await _rounds(scene, count, only, found, say)
            found += await _settled(scene)
        await _cleaned(api, namespace)
    return found + _violations(observer)


def _violations(observer: Observer) -> list[Outcome]:
    return [Outcome(layer=LAYER, kind="promises at every moment", result=WRONG, detail=text) for text in observer.violations]


@asynccontextmanager
async def _scene(api: Api, kubeconfig: Path, folder: Path, namespace: str, rng: random.Random) -> AsyncIterator[Scene]:
    clock = folder / "clock"
    clock.write_text("0")
    os.environ[CLOCK] = str(clock)
    proxy = await asyncio.to_thread(FaultyProxy, str(build.binary("kubectl")), kubeconfig, folder)
    operator = OperatorProcess(proxy.kubeconfig, folder / "operator.log", namespaces=namespace, module="bench.chaos.skewed_operator")
    try:
        await asyncio.to_thread(operator.start)
        yield Scene(
            api=api, namespace=namespace, proxy=proxy, operator=operator, clock=clock, rng=rng, numbers=itertools.count(),
            folder=kubeconfig.parent,
        )  # fmt: skip
    finally:
        operator.kill()
        await asyncio.to_thread(proxy.stop)


async def _rounds(scene: Scene, count: int, only: Sequence[str] | None, found: list[Outcome], say: Say) -> None:
    """Lives that overlap, and one fault of the operator after the other among them."""
    wanted = [kind for kind in JOB_KINDS if only is None or kind in only]
    job_kinds = itertools.cycle(wanted) if wanted else None
    operator_kinds = [kind for kind in OPERATOR_KINDS if only is None or kind in only]
    begun = 0

    def take() -> bool:
        nonlocal begun
        begun += 1
        return begun <= count

    async def lives() -> None:
        while job_kinds is not None and take():
            life = Life(
                api=scene.api, namespace=scene.namespace, name=f"job-{next(scene.numbers)}", kind=next(job_kinds),
                rng=random.Random(scene.rng.random()),
            )  # fmt: skip
            found.append(await life.live())
            say(len(found))

    async def hands() -> None:
        kinds: list[str] = []
        while operator_kinds and take():
            kinds = kinds or scene.rng.sample(operator_kinds, len(operator_kinds))
            kind = kinds.pop()
            found.append(await scene.meet(kind))
            say(len(found))

    await asyncio.gather(hands(), *(lives() for _ in range(LIVES_AT_ONCE)))


async def _settled(scene: Scene) -> list[Outcome]:
    """QUIET: nothing is written once all is done; and every child has an owner."""
    versions, deadline_s = await _versions(scene.api, scene.namespace), time.monotonic() + DEADLINE_S
    while True:
        await asyncio.sleep(QUIET_S)
        now = await _versions(scene.api, scene.namespace)
        if now == versions:
            break
        if time.monotonic() > deadline_s:
            changed = sorted(name for name, version in now.items() if versions.get(name) != version)
            return [Outcome(layer=LAYER, kind="quiet at the end", result=WRONG, detail=f"still written: {changed}")]
        versions = now
    jobs = {item["metadata"]["uid"] for item in (await scene.api.call("GET", RLJOBS.format(namespace=scene.namespace)))["items"]}
    orphans = []
    for collection in CHILD_COLLECTIONS:
        for item in (await scene.api.call("GET", collection.format(scene.namespace)))["items"]:
            owners = {owner["uid"] for owner in item["metadata"].get("ownerReferences", [])}
            if "rljob.dev/job" in item["metadata"].get("labels", {}) and not owners & jobs:
                orphans.append(f"{collection} {item['metadata']['name']}")
    return [Outcome(layer=LAYER, kind="no orphan", result=WRONG, detail=f"{orphans}")] if orphans else []


async def _versions(api: Api, namespace: str) -> dict[str, str]:
    found = {}
    for collection in (RLJOBS, RAYJOBS):
        for item in (await api.call("GET", collection.format(namespace=namespace)))["items"]:
            found[f"{item['kind']}/{item['metadata']['name']}"] = item["metadata"]["resourceVersion"]
    return found


async def _cleaned(api: Api, namespace: str) -> None:
    """Delete all jobs; the garbage collector takes what they own.

    Raises:
        TimeoutError: something stays.
    """
    await api.call("DELETE", RLJOBS.format(namespace=namespace))
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        left = []
        for collection in CHILD_COLLECTIONS:
            items = (await api.call("GET", collection.format(namespace)))["items"]
            left += [item["metadata"]["name"] for item in items if "rljob.dev/job" in item["metadata"].get("labels", {})]
        if not left:
            return
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"still there {DEADLINE_S:.0f} s after their jobs were deleted: {left[:10]}")
        await asyncio.sleep(0.5)


async def _replicas(api: Api, kubeconfig: Path, folder: Path, count: int, only: str | None, say: Say) -> list[Outcome]:
    """Two operators on one lease; the leader is killed, or stopped until the other one leads."""
    kinds = itertools.cycle([kind for kind in LEASE_KINDS if only in (None, kind)])
    pair = [
        OperatorProcess(kubeconfig, folder / f"replica-{name}.log", namespaces=NAMESPACE, lease=f"{NAMESPACE}/operator") for name in "ab"
    ]
    found: list[Outcome] = []
    try:
        for process in pair:
            await asyncio.to_thread(process.start)
        for number in range(count):
            kind, leader = next(kinds), await _leader(pair)
            name = f"heir-{number}"
            began_s = time.monotonic()
            if kind == "leader killed":
                leader.kill()
            else:
                os.kill(leader.pid, signal.SIGSTOP)
            scene = Scene(
                api=api, namespace=NAMESPACE, proxy=None, operator=leader, clock=folder, rng=random.Random(0), numbers=None,  # type: ignore[arg-type]
                folder=folder,
            )  # fmt: skip
            try:
                await api.create(RLJOBS.format(namespace=NAMESPACE), job_manifest(name))
                await scene.until_child(name)
                found.append(Outcome(layer=LAYER, kind=kind, result=RECOVERED, recovery_s=time.monotonic() - began_s))
            except TimeoutError as error:
                found.append(Outcome(layer=LAYER, kind=kind, result=WRONG, detail=str(error)))
            finally:
                if kind != "leader killed":
                    os.kill(leader.pid, signal.SIGCONT)
            if kind == "leader killed":
                await asyncio.to_thread(leader.start)
            say(len(found))
    finally:
        for process in pair:
            process.kill()
    return found


async def _leader(pair: list[OperatorProcess]) -> OperatorProcess:
    deadline_s = time.monotonic() + DEADLINE_S
    while True:
        leaders = [process for process in pair if "\nrljob_operator_leader 1.0" in await asyncio.to_thread(process.metrics)]
        if len(leaders) == 1:
            return leaders[0]
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{len(leaders)} of 2 operators lead")
        await asyncio.sleep(0.2)
