"""The operator process: settings, connections, watches, liveness probe, graceful shutdown. The only module that imports kopf.

::

    kopf watches --on.event--> cache --key--> work queue --workers--> Reconciler --> API server
    full lists (at startup, every five minutes) --^               `---------- a term ---------'

Watches and lists keep the cache current in every operator; queue and reconciler exist for a term, as long as the lease is held.
A new term looks at every job. Without a lease there is one term.

kopf begins a watch with a list, of which it only gets the version that the watch goes on from (:class:`VersionOnly`): with thousands of
jobs the objects would come twice, through the slower of two ways. They come from full lists of our own, the first once all watches have
begun. Until it is complete only jobs without a status are acted on: all of their children are younger than the watches.

A watch that had to begin again from a list (410 Gone) has missed changes: its kind is compared with a full list at once. That it
lists is seen in kopf's HTTP session. An error that kopf does not survive ends the process: the lease is released, and Kubernetes starts
another one.

kopf keeps four watches alive and serves the liveness probe. It holds no state: no finalizers, timers, daemons, indexes or annotations.
Watches on children and pods filter by the job's label on the server.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import math
import os
import random
import signal
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, fields
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

import aiohttp
import kopf
from prometheus_client import start_http_server

from rljob_api.crd.docstrings import attribute_docs
from rljob_api.naming import JOB_LABEL
from rljob_operator import logs
from rljob_operator.cache import Cache, Source
from rljob_operator.clock import ServerClock, utc_now
from rljob_operator.errors import OperatorError, SettingsError
from rljob_operator.kube import KubernetesClient
from rljob_operator.lease import Election, Leadership
from rljob_operator.metrics import Metrics
from rljob_operator.model import Key
from rljob_operator.protocol import WATCHED, Kind, KubeClient
from rljob_operator.reconcile import Reconciler
from rljob_operator.resync import Resync
from rljob_operator.served import ServedSchema
from rljob_operator.settings import Settings
from rljob_operator.workqueue import WorkQueue

if TYPE_CHECKING:
    from rljob_operator.webhook import Webhook

BEGIN_S: Final = 60.0
"""Until all watches have begun; what they need is known to be there."""
DRAIN_S: Final = 20.0
"""How long a shutdown waits for reconciles in progress."""
MAX_WATCH_AGE_S: Final = 180.0
"""A watch that has not delivered a known change for longer is dead; kopf itself reconnects a silent one after 70 s."""

LEADER_POLL_S: Final = 0.1
"""How often it is looked whether the lease was gained or lost."""
END_OF_TERM_S: Final = 1.0
"""How long reconciles in progress have to end once the lease is lost; they cannot write any more."""

logger = logging.getLogger(__name__)


class Operator:
    """The components of one operator process."""

    def __init__(
        self,
        settings: Settings,
        client: KubeClient,
        metrics: Metrics,
        cache: Cache,
        leadership: Leadership,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        """Wire the components; :meth:`run` starts them.

        Args:
            settings: from the environment.
            client: asks ``leadership`` before a write.
            metrics: of this process.
            cache: empty.
            leadership: whether this process may write.
            clock: the only time source of decisions.
        """
        self.settings = settings
        self.cache = cache
        self.queue: WorkQueue | None = None
        """Of the current term; None while this process stands by."""
        self.resync = Resync(client, cache, self._add_from_resync, namespaces=settings.namespace_list, metrics=metrics)
        self.served = ServedSchema(client, metrics, self._read_again)
        self.gaps = Gaps(self.resync.note_gap, num_watches=lambda: len(WATCHED) * max(1, len(self.resync.namespaces)))
        self._reconciler: Reconciler | None = None
        self._is_complete = False
        """Whether the cache has everything that was there before the watches began."""
        self.stop = asyncio.Event()
        self.leadership = leadership
        self._client = client
        self._metrics = metrics
        self._clock = clock
        self._election: Election | None = None
        if settings.lease:
            self._election = Election(client, leadership, lease=settings.lease, identity=identity())
        else:
            leadership.extend(math.inf)
        self._webhook: Webhook | None = None
        if settings.webhook:
            from rljob_operator.webhook import Webhook  # the image has cryptography for this alone

            self._webhook = Webhook(
                client, metrics, service=settings.webhook, port=settings.webhook_port, may_write=leadership.holds, known=self.served.known
            )
        self._watches_stop = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        metrics.watch_cache(cache.num_jobs_by_reason, cache.watch_ages_s)

    async def run(self) -> None:
        """Run until :attr:`stop` is set or a watch fails permanently.

        Raises:
            SettingsError: a watched kind cannot be listed.
        """
        self.handle_signals()
        stop = asyncio.create_task(self.stop.wait(), name="stop")
        served = asyncio.create_task(self.resync.wait_until_served(), name="watched kinds")
        await asyncio.wait([served, stop], return_when=asyncio.FIRST_COMPLETED)
        if not served.done():
            served.cancel()
            await asyncio.wait([served])
            return
        served.result()  # kopf would never notice a kind that is installed later
        running = self.start()
        watches = asyncio.create_task(self._watch(), name="watches")
        try:
            await asyncio.wait([watches, stop, *running], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            ended = [task for task in running if task.done()]
            await self.drain()
            self._watches_stop.set()
            await watches
        for task in ended:
            task.result()  # it only ends with an error

    def start(self) -> list[asyncio.Task[None]]:
        """Start resync, terms, schema, election and webhook, whose tasks are returned; none of them ends by itself."""
        parts = {"resync": self._keep_complete(), "terms": self._terms(), "schema": self.served.run()}
        if self._election is not None:
            parts["election"] = self._election.run()
        if self._webhook is not None:
            parts["webhook"] = self._webhook.run()
        self._tasks = [asyncio.create_task(part, name=name) for name, part in parts.items()]
        return self._tasks

    async def drain(self) -> None:
        """Finish the reconciles in progress, then hand the lease to another operator."""
        await self._cancel("resync", "terms")
        await self._end_term(DRAIN_S)
        if self._election is not None:
            await self._cancel("election")  # a renewal under way would come after the release
            await self._election.release()
        await self._cancel("webhook", "schema")

    async def _cancel(self, *names: str) -> None:
        tasks = [task for task in self._tasks if task.get_name() in names]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _keep_complete(self) -> None:
        """List everything once the watches have begun, so that no change falls between; then compare now and then.

        Raises:
            SettingsError: the watches did not begin in time, or a watched kind cannot be listed.
        """
        try:
            async with asyncio.timeout(BEGIN_S):
                await self.gaps.all_begun.wait()
        except TimeoutError:
            raise SettingsError(
                f"the watches on {', '.join(WATCHED)} did not begin within {BEGIN_S:g} s; the log has kopf's errors"
            ) from None
        await self.resync.first()
        self._is_complete = True
        logger.info("listed %d RLJobs", len(self.cache.keys()))
        self._look_at_all()
        await self.resync.run()

    async def _terms(self) -> None:
        """Begin a term whenever the lease is gained, and end it when it is lost."""
        while True:
            if self.leadership.holds() and self.queue is None:
                self._begin_term()
            elif not self.leadership.holds() and self.queue is not None:
                logger.warning("the lease is lost; standing by")
                await self._end_term(END_OF_TERM_S)
            await asyncio.sleep(LEADER_POLL_S)

    def _begin_term(self) -> None:
        """Look at every job, with nothing remembered of an earlier term."""
        reconciler = self._reconciler = Reconciler(
            self._client,
            self.cache,
            self.settings,
            self._metrics,
            clock=self._clock,
            known=self.served.known,
            storable=self.served.storable,
        )
        self.queue = WorkQueue(reconciler.reconcile, workers=self.settings.workers, metrics=self._metrics, clock=self._clock)
        for key in self.cache.keys():
            self._look_at(key, self.queue)
        self.queue.start()
        self._metrics.leader.set(1)
        logger.info("acting on %d RLJobs with %d workers", len(self.cache.keys()), self.settings.workers)

    async def _end_term(self, deadline_s: float) -> None:
        queue, self.queue = self.queue, None
        self._metrics.leader.set(0)
        if queue is not None:
            await queue.stop(deadline_s)

    def _read_again(self) -> None:
        """Specs that were refused may be accepted now."""
        if self._reconciler is not None:
            self._reconciler.forget_checked()
        self._look_at_all()

    def _look_at_all(self) -> None:
        for key in self.cache.keys():
            self._add_from_resync(key)

    def _add_from_resync(self, key: Key) -> None:
        if self.queue is not None:
            self._look_at(key, self.queue)

    def _look_at(self, key: Key, queue: WorkQueue) -> None:
        """Queue a job of a full list: a new one like an event, since somebody waits for it, others behind all events."""
        if self.cache.is_new(key):
            queue.add(key)
        elif self._is_complete:
            queue.add_from_resync(key)

    def handle_signals(self) -> None:
        """Shut down gracefully on SIGTERM and SIGINT."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop.set)

    def on_event(self, kind: Kind, event_type: str | None, obj: dict[str, Any]) -> None:
        """Handle one watch event."""
        key = self.cache.remove(kind, obj) if event_type == "DELETED" else self.cache.put(kind, obj, Source.WATCH)
        if key is not None and self.queue is not None and (self._is_complete or self.cache.is_new(key)):
            self.queue.add(key)

    def problems(self) -> list[str]:
        """Why this process is unhealthy and should be restarted."""
        found = [] if self._tasks else ["it has not started"]
        found += [f"the {task.get_name()} task has exited" for task in self._tasks if task.done()]
        if self.queue is not None and not self.queue.is_alive:
            found.append("a work queue worker has exited")
        for kind, age_s in self.cache.watch_ages_s().items():
            if age_s > MAX_WATCH_AGE_S:
                found.append(f"the watch on {kind} has not delivered a known change for {age_s:.0f} s (limit {MAX_WATCH_AGE_S:g} s)")
        return found

    async def _watch(self) -> None:
        """Run kopf's watches."""
        others = asyncio.all_tasks()
        tasks = await kopf.spawn_tasks(
            registry=kopf_registry(self),
            settings=kopf_settings(),
            standalone=True,
            clusterwide=not self.resync.namespaces,
            namespaces=self.resync.namespaces,
            liveness_endpoint=liveness_endpoint(self.settings),
            stop_flag=self._watches_stop,
        )
        self.handle_signals()  # kopf has just replaced the handlers; it would stop before the queue is drained
        await kopf.run_tasks(tasks, ignored=others)


def liveness_endpoint(settings: Settings) -> str:
    """Where kopf answers probes."""
    host = settings.listen_address
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.health_port}/healthz"


def kopf_registry(operator: Operator) -> kopf.OperatorRegistry:
    """The handlers that kopf calls."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def login(**kwargs: Any) -> kopf.AiohttpSession | None:
        info = kopf.login_via_client(**kwargs)
        return None if info is None else observed_session(info, operator.gaps)

    @kopf.on.probe(registry=registry, id="problems", retries=1, errors=kopf.ErrorsMode.PERMANENT)
    async def probe(**_: Any) -> str:
        problems = operator.problems()
        if problems:
            raise kopf.PermanentError("; ".join(problems))
        return "none"

    def watch(kind: Kind) -> None:
        group, _, version = kind.api_version.rpartition("/")

        @kopf.on.event(group=group, version=version, plural=kind.plural, registry=registry, id=kind.plural)
        async def on_event(event: Any, **_: Any) -> None:
            operator.on_event(kind, event["type"], event["object"])

    for kind in WATCHED:
        watch(kind)
    return registry


class Gaps:
    """Tells lists of kopf that follow a gap in a watch from the first ones, which begin it."""

    def __init__(self, note: Callable[[Kind], None], *, num_watches: Callable[[], int]) -> None:
        """``note`` is called with the kind whose watch begins again; ``num_watches``: one for each kind and watched namespace."""
        self._note = note
        self._begun: set[str] = set()
        self._num_watches = num_watches
        self.all_begun = asyncio.Event()
        """Set once each watch has the version to begin from."""

    async def on_request(self, _session: Any, _context: Any, params: aiohttp.TraceRequestEndParams) -> None:
        """Called after each of kopf's requests: a hook of aiohttp's."""
        kind = _KINDS.get(params.url.name)
        if kind is None or "watch" in params.url.query or "continue" in params.url.query or params.response.status != 200:
            return
        if params.url.path in self._begun:
            self._note(kind)
        self._begun.add(params.url.path)
        if len(self._begun) == self._num_watches():
            self.all_begun.set()


_KINDS: Final = {kind.plural: kind for kind in WATCHED}


class VersionOnly(aiohttp.ClientResponse):
    """An answer to kopf. A list of a watched kind has its version and no objects, also where there are more than the one asked for."""

    async def json(self, **options: Any) -> Any:
        """The body as JSON."""
        answer = await super().json(**options)
        if self.url.name in _KINDS and isinstance(answer, dict) and "items" in answer:
            return answer | {"metadata": {"resourceVersion": answer["metadata"]["resourceVersion"]}, "items": []}
        return answer


def observed_session(info: kopf.ConnectionInfo, gaps: Gaps) -> kopf.AiohttpSession:
    """The session that kopf would make of its credentials, with its requests observed."""
    trace = aiohttp.TraceConfig()
    trace.on_request_end.append(gaps.on_request)
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=info.as_ssl_context()),
        headers=info.as_http_headers(),
        proxy=info.proxy_url,
        trust_env=info.trust_env,
        trace_configs=[trace],
        response_class=VersionOnly,
    )
    return kopf.AiohttpSession(server=info.server, default_namespace=info.default_namespace, aiohttp_session=session)


class EndlessBackoff:
    """Seconds between tries of kopf's requests: 1, 2, 4 ... 30, less up to a half, without an end; an outage ends no watch."""

    def __iter__(self) -> Iterator[float]:
        """Begin at one second."""
        delay_s = 1.0
        while True:
            yield delay_s * random.uniform(0.5, 1.0)
            delay_s = min(2 * delay_s, 30.0)


class _NoDiffs(kopf.DiffBaseStorage):
    """Keeps kopf from copying every object on every event, for diffs that no handler needs."""

    def build(self, **_: Any) -> Any:
        """Compare nothing."""
        return {}

    def fetch(self, **_: Any) -> None:
        """Remember nothing."""

    def store(self, **_: Any) -> None:
        """Write nothing."""


def kopf_settings() -> kopf.OperatorSettings:
    """Settings of kopf: watches only, filtered by label on the server."""
    settings = kopf.OperatorSettings()
    settings.persistence.diffbase_storage = _NoDiffs()
    settings.posting.enabled = False
    settings.scanning.disabled = True  # the kinds are known and listed; avoids the right to watch CRDs and namespaces
    settings.watching.server_timeout = 240
    settings.watching.client_timeout = 260
    settings.watching.connect_timeout = 10
    settings.watching.reconnect_backoff = 1.0
    settings.watching.chunk_size = 1  # see VersionOnly
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 10
    settings.networking.error_backoffs = EndlessBackoff()
    settings.queueing.idle_timeout = 0.1  # an idle task per object keeps its last event alive
    settings.execution.max_workers = 2
    settings.process.ultimate_exiting_timeout = 60
    for kind in WATCHED:
        if kind is not Kind.RLJOB:
            group, _, version = kind.api_version.rpartition("/")
            settings.watching.label_selectors[group, version, kind.plural] = JOB_LABEL
    return settings


async def run(settings: Settings) -> None:
    """Run the operator until SIGTERM or SIGINT.

    Raises:
        SettingsError: no access to a cluster, or a watched kind cannot be listed.
    """
    metrics, leadership, clock = Metrics(), Leadership(), ServerClock(wall=utc_now)
    client = await KubernetesClient.connect(
        max_in_flight=settings.requests, observe=metrics.observe_request, may_write=leadership.holds, on_date=clock.synchronize
    )
    server, _ = start_http_server(settings.metrics_port, settings.listen_address, registry=metrics.registry)
    try:
        await Operator(settings, client, metrics, Cache(), leadership, clock.now).run()
    finally:
        await client.close()
        await asyncio.to_thread(server.shutdown)
        server.server_close()


def identity() -> str:
    """Name of this process in the lease: the pod's, and what makes a restarted container another one."""
    return f"{os.environ.get('HOSTNAME', 'operator')}_{uuid.uuid4()}"


def describe_settings() -> str:
    """Describe every environment variable: type, default and meaning."""
    docs = attribute_docs(Settings)
    lines = []
    for field in fields(Settings):
        default = "required" if field.default is MISSING else f"default {field.default!r}"
        lines.append(f"  RLJOB_OPERATOR_{field.name.upper()} ({field.type}, {default})\n      {' '.join(docs[field.name].split())}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the operator. Returns the exit code: 0 after SIGTERM, 2 for invalid settings or missing access."""
    parser = argparse.ArgumentParser(
        prog="python -m rljob_operator",
        description="Runs each RLJob as KubeRay RayJobs. Configured by environment variables only, see below.",
        epilog=describe_settings(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args(argv)
    try:
        settings = Settings.from_environment()
        logs.configure(settings.log_level, settings.log_format)
        asyncio.run(run(settings))
    except OperatorError as error:
        sys.stderr.write(f"rljob-operator: {error}\n")
        return 2
    return 0
