"""The process: settings, connections, watches, probe, an orderly end. The only module that imports kopf.

::

    kopf watches --on.event--> cache --key--> queue --workers--> Reconciler --> API server
    full lists (at the start, every five minutes) --^

kopf keeps four watches alive and serves the liveness probe; it handles no state of its own: no finalizers, timers, daemons, indexes
or annotations. Watches on children and pods select by the job's label on the server.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import MISSING, fields
from typing import Any, Final

import kopf
from prometheus_client import start_http_server

from rljob_api.docstrings import attribute_docs
from rljob_api.naming import JOB_LABEL
from rljob_operator import logs
from rljob_operator.cache import Cache, Source
from rljob_operator.errors import OperatorError
from rljob_operator.kube import KubernetesClient
from rljob_operator.metrics import Metrics
from rljob_operator.protocol import WATCHED, Kind
from rljob_operator.reconcile import Reconciler
from rljob_operator.resync import Resync
from rljob_operator.settings import Settings
from rljob_operator.workqueue import WorkQueue

DRAIN_S: Final = 20.0
"""How long an ending operator waits for what is being worked on."""
WATCH_OWES_S: Final = 180.0
"""A watch that owes a known change for longer is dead; kopf itself reconnects a silent one after 70 s."""

logger = logging.getLogger(__name__)


class Operator:
    """Everything one process holds, put together."""

    def __init__(self, settings: Settings, client: KubernetesClient, metrics: Metrics) -> None:
        """Nothing runs yet."""
        self.settings = settings
        self.client = client
        self.cache = Cache()
        self.queue = WorkQueue(Reconciler(client, self.cache, settings, metrics).reconcile, workers=settings.workers, metrics=metrics)
        self.resync = Resync(client, self.cache, self.queue.add_old, namespaces=settings.namespace_list, metrics=metrics)
        self.stop = asyncio.Event()
        self._watches_stop = asyncio.Event()
        self._resync_task: asyncio.Task[None] | None = None
        metrics.watch_cache(self.cache.num_jobs_by_reason, self.cache.watch_ages_s)

    async def run(self) -> None:
        """Run until :attr:`stop` is set or a watch fails for good.

        Raises:
            SettingsError: what is to be watched cannot be listed.
        """
        self.handle_signals()
        stop = asyncio.create_task(self.stop.wait(), name="stop")
        listing = asyncio.create_task(self.resync.first(), name="first lists")
        await asyncio.wait([listing, stop], return_when=asyncio.FIRST_COMPLETED)
        if not listing.done():
            listing.cancel()
            await asyncio.wait([listing])
            return
        listing.result()
        logger.info("listed %d RLJobs; starting %d workers", len(self.cache.keys()), self.settings.workers)
        self.queue.start()
        self._resync_task = asyncio.create_task(self.resync.run(), name="resync")
        watches = asyncio.create_task(self._watch(), name="watches")
        try:
            await asyncio.wait([watches, stop, self._resync_task], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            self._resync_task.cancel()
            await self.queue.stop(DRAIN_S)
            self._watches_stop.set()
            await watches
        if self._resync_task.done() and not self._resync_task.cancelled():
            self._resync_task.result()  # it never ends well by itself

    def handle_signals(self) -> None:
        """SIGTERM and SIGINT end the process in order."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop.set)

    def on_event(self, kind: Kind, event_type: str | None, obj: dict[str, Any]) -> None:
        """Take in what a watch tells."""
        key = self.cache.remove(kind, obj) if event_type == "DELETED" else self.cache.put(kind, obj, Source.WATCH)
        if key is not None:
            self.queue.add(key)

    def problems(self) -> list[str]:
        """Why this process should be replaced by a new one."""
        found = [] if self.queue.is_alive else ["a worker of the queue has ended"]
        if self._resync_task is None or self._resync_task.done():
            found.append("the comparison with full lists has ended")
        for kind, age_s in self.cache.watch_ages_s().items():
            if age_s > WATCH_OWES_S:
                found.append(f"the watch on {kind} has owed a known change for {age_s:.0f} s (limit {WATCH_OWES_S:g} s)")
        return found

    async def _watch(self) -> None:
        """Have kopf watch."""
        others = asyncio.all_tasks()
        tasks = await kopf.spawn_tasks(
            registry=_registry(self),
            settings=_kopf_settings(),
            standalone=True,
            clusterwide=not self.settings.namespace_list,
            namespaces=self.settings.namespace_list,
            liveness_endpoint=f"http://0.0.0.0:{self.settings.health_port}/healthz",
            stop_flag=self._watches_stop,
        )
        self.handle_signals()  # kopf has just taken them; it would stop before the queue is drained
        await kopf.run_tasks(tasks, ignored=others)


def _registry(operator: Operator) -> kopf.OperatorRegistry:
    """What kopf calls."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def login(**kwargs: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_via_client(**kwargs)

    @kopf.on.probe(registry=registry, id="problems", retries=1, errors=kopf.ErrorsMode.PERMANENT)
    async def probe(**_: Any) -> str:
        problems = operator.problems()
        if problems:
            raise kopf.PermanentError("; ".join(problems))
        return "none"

    def watch(kind: Kind) -> None:
        group, _, version = kind.api_version.rpartition("/")

        @kopf.on.event(group=group, version=version, plural=kind.plural, registry=registry, id=kind.plural)
        async def told(event: Any, **_: Any) -> None:
            operator.on_event(kind, event["type"], event["object"])

    for kind in WATCHED:
        watch(kind)
    return registry


class _NoDiffs(kopf.DiffBaseStorage):
    """Keeps kopf from copying every object at every event for diffs that no handler asks for."""

    def build(self, **_: Any) -> Any:
        """Nothing is compared."""
        return {}

    def fetch(self, **_: Any) -> None:
        """Nothing is remembered."""

    def store(self, **_: Any) -> None:
        """Nothing is written."""


def _kopf_settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.persistence.diffbase_storage = _NoDiffs()
    settings.posting.enabled = False
    settings.scanning.disabled = True  # the kinds are known and were listed; saves the right to watch CRDs and namespaces
    settings.watching.server_timeout = 240
    settings.watching.client_timeout = 260
    settings.watching.connect_timeout = 10
    settings.watching.reconnect_backoff = 1.0
    settings.watching.chunk_size = 100
    settings.networking.request_timeout = 30
    settings.networking.connect_timeout = 10
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
        SettingsError: no access to a cluster, or what is to be watched cannot be listed.
    """
    metrics = Metrics()
    client = await KubernetesClient.connect(max_in_flight=settings.requests, observe=metrics.observe_request)
    server, _ = start_http_server(settings.metrics_port, registry=metrics.registry)
    try:
        await Operator(settings, client, metrics).run()
    finally:
        await client.close()
        await asyncio.to_thread(server.shutdown)
        server.server_close()


def describe_settings() -> str:
    """Every environment variable, its default and its meaning."""
    docs = attribute_docs(Settings)
    lines = []
    for field in fields(Settings):
        default = "required" if field.default is MISSING else f"default {field.default!r}"
        lines.append(f"  RLJOB_OPERATOR_{field.name.upper()} ({field.type}, {default})\n      {' '.join(docs[field.name].split())}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the operator; the exit code: 0 after SIGTERM, 2 when its settings or its access do not do."""
    parser = argparse.ArgumentParser(
        prog="python -m rljob_operator",
        description="Turns each RLJob into KubeRay RayJobs. Configured by environment variables only:",
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
