"""The driver's parts over workers and a scheduler that a test makes."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from rljob_runtime.job.assemble import goes_on_without
from rljob_runtime.loop.batch_builder import BatchBuilder
from rljob_runtime.loop.checkpointing import NoCheckpoints
from rljob_runtime.loop.driver import Parts
from rljob_runtime.loop.supervisor import EngineSupervisor
from rljob_runtime.loop.workers import JobWorkers
from rljob_runtime.overlap.batching import BatchingConfig
from rljob_runtime.overlap.rule import Rule
from rljob_runtime.overlap.rule_config import RuleConfig
from rljob_runtime.overlap.scheduler import RolloutScheduler
from rljob_runtime.records import Bucket, WeightManifest
from rljob_runtime.report import Reporter
from rljob_runtime.weightsync.probe import ProbeLimits
from rljob_runtime.weightsync.publisher import ProbeConfig, WeightPublisher
from rljob_runtime.weightsync.transport import TransportSettings
from rljob_runtime.weightsync.transports.object_store import ObjectStoreTransport
from tests.support.fake_workers import no_texts

NO_PROBE = ProbeConfig(every_syncs=0, limits=ProbeLimits(mean=1.0, tail=1.0), sequences=())


def make_parts(
    workers: JobWorkers,
    scheduler: RolloutScheduler,
    supervisor: EngineSupervisor,
    reporter: Reporter,
    *,
    buckets: int = 2,
    probe: ProbeConfig = NO_PROBE,
    batching: Mapping[str, Any] = MappingProxyType({}),
    builder: Callable[..., BatchBuilder] = BatchBuilder,
    timeout_s: float = 10.0,
    **options: Any,
) -> Parts:
    """Real publisher, transport, learning rule and batches; no checkpoints, journal or validation.

    Args:
        workers: of every role; engines and trainers have the packed transport's ends.
        scheduler: over the same engines.
        supervisor: is connected here.
        reporter: open.
        buckets: of weights; with one an engine is updated in one call.
        probe: after each sync.
        batching: fields of ``BatchingConfig``.
        builder: makes the batch builder.
        timeout_s: of everything.
        options: further fields of ``Parts``.
    """
    publisher = WeightPublisher(
        trainers=workers.trainer.workers,
        engines=workers.engines,
        manifest=WeightManifest(buckets=tuple(Bucket(index=i, size_bytes=64, slots=()) for i in range(buckets))),
        transport=ObjectStoreTransport(TransportSettings(run="test", while_generating=False)),
        timeout_s=timeout_s,
        probe=probe,
        goes_on_without=partial(goes_on_without, scheduler.fleet),
    )
    supervisor.connect(scheduler.fleet, publisher)
    batches = builder(
        rule=Rule(RuleConfig(max_response_tokens=scheduler.config.sampling.max_tokens)),
        workers=workers,
        batching=BatchingConfig(**{"num_ranks": 1, "mini_batches": 1, "epochs": 1, "temperature": 1.0, **batching}),
        timeout_s=timeout_s,
    )
    made = {
        "workers": workers,
        "scheduler": scheduler,
        "publisher": publisher,
        "supervisor": supervisor,
        "batches": batches,
        "reporter": reporter,
    }
    return Parts(**{"checkpoints": NoCheckpoints(), "decode": no_texts, **made, **options})
