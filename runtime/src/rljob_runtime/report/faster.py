"""What would make a run's steps shorter, and by how much at best: from its own phase times. Shown by the report and ``rljob describe``.

A step, from the phases of a synchronous run::

    G = generate + reward                what the engines' side takes
    T = score + train + sync             what the trainer's side takes
    in turn:       G + T + rest          asyncGenerationRatio 0, or shared devices
    side by side:  max(G + stall, T) + rest     stall: the part of sync in which engines do not generate

Generation scales with the engines' devices, scoring and training with the trainer's; rewards, sync and the rest stay. Side by side the two
are taken not to slow each other down. On CPU devices that is only the better bound: a synchronous job gives each phase all cores of its
node, one that overlaps divides them. Where both phases use all cores, only the wait for rewards is saved (``Change.contended_s``).
:mod:`rljob_api.auto.cost` is the same for placements that have not run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rljob_api.errors import SpecInvalidError
from rljob_api.planning.environment import device_type
from rljob_api.v1alpha1.components import Engine, Role
from rljob_api.v1alpha1.nodes import DeviceType
from rljob_api.v1alpha1.status import StepMilliseconds
from rljob_api.validation import CheckedJob, check
from rljob_runtime.records import StepRecord
from rljob_runtime.report.metrics import MetricsTable
from rljob_runtime.report.text import format_percent, format_seconds

WORTH_SHARE = 0.05
"""Of the step; less is not worth a change."""
SKIPPED_STEPS = 1
"""The first step is slower than the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Seconds of a typical step; ``rest_s`` is what no phase explains."""

    step_s: float
    generate_s: float
    reward_s: float
    score_s: float
    train_s: float
    sync_s: float
    stall_s: float
    """Part of ``sync_s``."""
    switch_s: float = 0.0
    """What roles on shared devices took to leave them and to come back."""

    @property
    def rest_s(self) -> float:
        """Checkpoints, switches of devices, the driver."""
        return max(0.0, self.step_s - self.generate_s - self.reward_s - self.score_s - self.train_s - self.sync_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """Who computed where."""

    trainer: int
    rollout: int
    per_engine: int
    trainer_unit: int
    """The trainer's number of devices is a multiple of it."""
    shared: bool
    """Trainer and engines take turns on devices."""
    on_cpu: bool = False
    """Devices are parts of processors, which phases at the same time may take from each other."""

    @property
    def total(self) -> int:
        """Of both."""
        return max(self.trainer, self.rollout) if self.shared else self.trainer + self.rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change and the step that it would make, at best."""

    what: str
    step_s: float
    contended_s: float | None = None
    """On CPU devices, the step where generation and training could each use all cores, and share them now."""
    lacks_switching: bool = False
    """What leaving devices and coming back takes is not in it: the run did not do that."""


def typical(table: MetricsTable) -> StepTimes | None:
    """Medians over the steps after the first; None where there are fewer than two."""
    return _medians(lambda name: table.column(name)[SKIPPED_STEPS:])


def typical_of(records: Sequence[StepRecord]) -> StepTimes | None:
    """Medians over these steps, of which none is the first; None where they have no times."""
    return _medians(lambda name: [record.metrics[name] for record in records if name in record.metrics])


def _medians(values_of: Callable[[str], Iterable[float]]) -> StepTimes | None:
    def median(name: str) -> float:
        values = [value for value in values_of(name) if math.isfinite(value)]
        return statistics.median(values) if values else 0.0

    if median("time/step_s") <= 0:
        return None
    return StepTimes(
        step_s=median("time/step_s"),
        generate_s=median("time/generate_s"),
        reward_s=median("time/reward_s"),
        score_s=median("time/score_s"),
        train_s=median("time/train_s"),
        sync_s=median("time/sync_s"),
        stall_s=median("sync/stall_s"),
        switch_s=median("time/offload_s") + median("time/load_s"),
    )


def to_milliseconds(times: StepTimes) -> StepMilliseconds:
    """As they are written into the RLJob's status."""
    return StepMilliseconds(
        step=max(1, round(1000 * times.step_s)),
        generate=round(1000 * times.generate_s),
        reward=round(1000 * times.reward_s),
        score=round(1000 * times.score_s),
        train=round(1000 * times.train_s),
        sync=round(1000 * times.sync_s),
        stall=round(1000 * times.stall_s),
        offload=round(1000 * times.switch_s),
    )


def of_milliseconds(written: StepMilliseconds) -> StepTimes:
    """The other way round."""
    return StepTimes(
        step_s=written.step / 1000,
        generate_s=written.generate / 1000,
        reward_s=written.reward / 1000,
        score_s=written.score / 1000,
        train_s=written.train / 1000,
        sync_s=written.sync / 1000,
        stall_s=written.stall / 1000,
        switch_s=written.offload / 1000,
    )


def devices_of(job: CheckedJob) -> Devices | None:
    """None where the job has no trainer or no engine on devices."""
    trainer = {device for component in job.plan.with_role(Role.TRAINER) for device in component.devices}
    rollout = {device for component in job.plan.with_role(Role.ROLLOUT) for device in component.devices}
    if not trainer or not rollout:
        return None
    engine = next((component.engine for _, component in job.job.spec.with_role(Role.ROLLOUT)), None) or Engine()
    return Devices(
        trainer=len(trainer),
        rollout=len(rollout),
        per_engine=engine.num_devices,
        trainer_unit=job.job.spec.training.device_unit,
        shared=bool(trainer & rollout),
        on_cpu=all(device_type(group) is DeviceType.CPU for group in job.job.spec.node_groups),
    )


def changes(times: StepTimes, devices: Devices, ratio: float) -> list[Change]:
    """Changes that are worth it, the best first, after them what lacks a part.

    Args:
        times: of the run.
        devices: of the run.
        ratio: its ``overlap.asyncGenerationRatio``. With more than 0 ``generate_s`` is what the step waited for, which says nothing of
            other placements; what is left to gain is that wait.
    """
    if ratio > 0 and not devices.shared:
        waited_s = times.generate_s + times.reward_s
        possible = [
            Change(what=f"more devices for generation, or overlap.asyncGenerationRatio {ratio + 1:g}", step_s=times.step_s - waited_s)
        ]
    else:
        possible = [*_in_turn(times, devices), *_side_by_side(times, devices)]
    worth = [change for change in possible if change.step_s < (1 - WORTH_SHARE) * times.step_s]
    return sorted(worth, key=lambda change: (change.lacks_switching, change.step_s))


def _splits(devices: Devices) -> Iterator[tuple[int, int]]:
    """Devices of the trainer and of the engines, where each has devices of its own."""
    for rollout in range(devices.per_engine, devices.total, devices.per_engine):
        trainer = devices.total - rollout
        if trainer % devices.trainer_unit == 0:
            yield trainer, rollout


def _scaled(times: StepTimes, devices: Devices, trainer: int, rollout: int) -> tuple[float, float]:
    """G and T with other numbers of devices."""
    generating_s = times.generate_s * devices.rollout / rollout + times.reward_s
    training_s = (times.score_s + times.train_s) * devices.trainer / trainer + times.sync_s
    return generating_s, training_s


def _in_turn(times: StepTimes, devices: Devices) -> Iterator[Change]:
    """Other numbers of devices in a synchronous job whose roles have devices of their own."""
    if devices.shared:
        return
    as_it_is = (devices.trainer, devices.rollout)
    split = min(_splits(devices), key=lambda split: sum(_scaled(times, devices, *split)), default=as_it_is)
    if split != as_it_is:
        yield Change(what=_placed(*split), step_s=sum(_scaled(times, devices, *split)) + times.rest_s)
    if devices.total % devices.per_engine == 0 and devices.total % devices.trainer_unit == 0:
        step_s = sum(_scaled(times, devices, devices.total, devices.total)) + times.rest_s
        what = f"trainer and engines on the same {devices.total} devices, plus the time of switching"
        yield Change(what=what, step_s=step_s, lacks_switching=True)


def _side_by_side(times: StepTimes, devices: Devices) -> Iterator[Change]:
    """Generation beside training, with the devices as they are and as they would be best; nobody leaves a device then."""
    rest_s = max(0.0, times.rest_s - times.switch_s) if devices.shared else times.rest_s

    def step_s(split: tuple[int, int]) -> float:
        generating_s, training_s = _scaled(times, devices, *split)
        return max(generating_s + times.stall_s, training_s) + rest_s

    def contended_s() -> float | None:
        # The cores' work is that of the phases in turn, whichever devices the spec gives to whom.
        generating_s, training_s = times.generate_s, times.score_s + times.train_s + times.sync_s
        return generating_s + training_s + rest_s if devices.on_cpu else None

    as_it_is = (devices.trainer, devices.rollout)
    if not devices.shared:
        yield Change(what="overlap.asyncGenerationRatio 1", step_s=step_s(as_it_is), contended_s=contended_s())
    split = min(_splits(devices), key=step_s, default=as_it_is)
    if split != as_it_is:
        yield Change(what=f"overlap.asyncGenerationRatio 1, {_placed(*split)}", step_s=step_s(split), contended_s=contended_s())


def _placed(trainer: int, rollout: int) -> str:
    return f"{trainer} {'device' if trainer == 1 else 'devices'} for training and {rollout} for generation"


def words(times: StepTimes, found: list[Change], *, on_cpu: bool) -> list[str]:
    """A sentence per change, the best three."""
    best = "if cores are left for it" if on_cpu else "at best"

    def contended(change: Change) -> str:
        if change.contended_s is None or change.contended_s <= change.step_s:
            return ""
        return f", {format_seconds(change.contended_s)} or more if generation and training each use all cores"

    return [
        f"{change.what}: a step of {format_seconds(change.step_s)} {best}{contended(change)}, now {format_seconds(times.step_s)} "
        f"({format_percent(1 - change.step_s / times.step_s)} less{' at best' if contended(change) else ''})"
        for change in found[:3]
    ]


def advice(spec: str | Mapping[str, object], times: StepTimes | None) -> list[str]:
    """What a job's manifest and its times say; empty where it cannot be planned, has too few steps, or nothing is worth a change."""
    if times is None:
        return []
    try:
        job = check(spec, runnable=False)
    except SpecInvalidError:  # of another version
        return []
    devices = devices_of(job)
    if devices is None:
        return []
    return words(times, changes(times, devices, job.job.spec.overlap.async_generation_ratio), on_cpu=devices.on_cpu)
