"""Who replaces lost engines and environment workers, from the spec and the running workers."""

from __future__ import annotations

from functools import partial

from rljob_api.v1alpha1 import RLJobSpec
from rljob_api.v1alpha1.components import Engine, Role
from rljob_runtime.cluster.protocol import Worker
from rljob_runtime.cluster.replaceable import ReplaceableWorker
from rljob_runtime.engine.registry import engine_adapter
from rljob_runtime.loop.environment_replacer import EnvironmentReplacer
from rljob_runtime.loop.replacement import ReplacementLimits
from rljob_runtime.loop.saving import IO_TIMEOUT_S
from rljob_runtime.loop.supervisor import EngineSupervisor, SharedDevices, at_once
from rljob_runtime.loop.workers import WEIGHTS, JobWorkers
from rljob_runtime.report import Level, Reporter


def replacement_limits(spec: RLJobSpec) -> ReplacementLimits:
    """How often and how long; engines whose loss ends the attempt (restart policy of their adapter) are never replaced.

    The trainer's next weights come after an update, the passes before it, and a checkpoint.
    """
    spared = all(engine_adapter((component.engine or Engine()).type).spares_lost for _, component in spec.with_role(Role.ROLLOUT))
    return ReplacementLimits(
        max_restarts=spec.rollout.max_engine_restarts if spared else 0,
        start_timeout_s=spec.startup_deadline_seconds,
        weights_timeout_s=2 * spec.training.step_timeout_seconds + IO_TIMEOUT_S + spec.weight_sync.timeout_seconds,
    )


def supervisor(spec: RLJobSpec, workers: JobWorkers, reporter: Reporter) -> EngineSupervisor:
    """The supervisor over running workers."""
    trainers = workers.with_role(Role.TRAINER)
    standby = dict.fromkeys(engine.standby for engine in workers.engines if isinstance(engine, ReplaceableWorker))
    return EngineSupervisor(
        workers.engines,
        start=lambda index, timeout_s: _replaceable(workers.engines[index]).restart(timeout_s),
        end=lambda index: _replaceable(workers.engines[index]).end(),
        limits=replacement_limits(spec),
        notify=lambda text: reporter.event(text, Level.WARNING),
        shared=_shared_devices(spec, workers),
        beside=[each.run for each in standby if each is not None],
        sending=partial(trainers[0].group.resident, WEIGHTS, what="weights of a replaced engine") if trainers else at_once,
    )


def environment_replacer(spec: RLJobSpec, workers: JobWorkers, reporter: Reporter) -> EnvironmentReplacer:
    """What replaces lost environment workers; as often as engines are."""
    environments = workers.environments
    return EnvironmentReplacer(
        [worker.name for worker in environments],
        start=lambda index, timeout_s: _replaceable(environments[index]).restart(timeout_s),
        end=lambda index: _replaceable(environments[index]).end(),
        limits=ReplacementLimits(max_restarts=spec.rollout.max_engine_restarts, start_timeout_s=spec.startup_deadline_seconds),
        notify=lambda text: reporter.event(text, Level.WARNING),
    )


def _replaceable(worker: Worker) -> ReplaceableWorker:
    assert isinstance(worker, ReplaceableWorker), worker  # launch makes one of each whose role says so
    return worker


def _shared_devices(spec: RLJobSpec, workers: JobWorkers) -> SharedDevices | None:
    """Engines that lease their devices, and what the arbiter does around their start."""
    arbiter = workers.arbiter
    if arbiter is None:
        return None

    async def clear(index: int) -> None:
        lost = arbiter.clients[workers.engines[index].name]  # an engine is a client of its own, by its own name
        others = [c.name for c in arbiter.clients.values() if c is not lost and not c.broken and set(c.devices) & set(lost.devices)]
        for other in others:  # as when the job started: an engine measures what is free
            await arbiter.offload_states(other, timeout_s=spec.training.step_timeout_seconds, what=f"restart of {lost.name}")

    return SharedDevices(
        engines=frozenset(workers.leased_engines),
        forget=arbiter.lost,
        clear=clear,
        settle=lambda index: arbiter.revive(workers.engines[index].name),
    )
