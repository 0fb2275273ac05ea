"""RLinf configurations: the learning rates of the policy and of the critic.

RLinf counts optimizer updates, RLJob steps, and each of RLinf's trainers reads keys of its own (version 0.3.0):

* ``megatron``: ``lr_sched``. Warm-up is ``lr_warmup_fraction * lr_decay_iters``, or ``lr_warmup_iters`` without a fraction; the rate falls
  over ``lr_decay_iters``, 100000 without (``config.py``, and ``get_optimizer_param_scheduler`` of Megatron-LM).
* ``fsdp``: ``optim``. The rate ends at ``min_lr_rate`` of its peak, or at ``min_lr`` without it. Warm-up is ``lr_warmup_steps``, or
  ``lr_warmup_steps_ratio * total_training_steps`` where that is negative; the rate falls over ``total_training_steps``, never where that
  is 0, its default (``fsdp_model_manager.py``); ``lr_sched_sync_with_optim: false`` counts steps instead of updates.

A file that names no trainer is read in both places.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from rljob_api.errors import counted
from rljob_api.paths import Parts
from rljob_convert import common
from rljob_convert.common import Section, compact
from rljob_convert.source import Source

MEGATRON, FSDP = "megatron", "fsdp"
_SCHEDULES = {"constant": "Constant", "linear": "Linear", "cosine": "Cosine", "constant_with_warmup": "Constant"}
_DECAY_ITERS = 100_000
"""Updates over which Megatron's rates fall where ``lr_decay_iters`` is not given: RLinf's ``megatron.train_iters``."""
_PLACES = {"schedule": ("lr_decay_style", "lr_scheduler"), "min": ("min_lr", "min_lr"), "end": ("lr_decay_iters", "total_training_steps")}
_COUNTS, _SHARES = ("lr_warmup_iters", "lr_warmup_steps"), ("lr_warmup_fraction", "lr_warmup_steps_ratio")


def backend(source: Source, role: str = "actor") -> str | None:
    """The trainer of a role, where the file says it."""
    return next((name for name in (MEGATRON, FSDP) if source.peek(role, "training_backend") == name), None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Length of a job."""

    steps: int
    updates: int
    """How often the schedule advances in one step: with every optimizer update of RLinf, or once."""
    unit: str = "optimizer update"
    """What the schedule counts."""


def rates(source: Source, role: str, rate: float | None, clock: Clock, warmup: str) -> Section:
    """``minLearningRate``, ``schedule`` and the steps of warm-up of a role.

    Args:
        source: the configuration.
        role: ``actor`` or ``critic``.
        rate: its peak.
        clock: of the job.
        warmup: name of the field with the steps of warm-up.
    """
    _drop_unread(source, role)
    if _counts_steps(source, role):
        clock = replace(clock, updates=1, unit="step")
    schedule = _schedule(source, role)
    end = _end(source, role, schedule, clock)
    smallest = None if rate is None else _smallest(source, role, rate, schedule)
    return compact({"minLearningRate": smallest, "schedule": schedule, warmup: _warmup(source, role, clock, schedule, end)})


def _counts_steps(source: Source, role: str) -> bool:
    """Whether the schedule advances once per step: ``lr_sched_sync_with_optim: false``, which RLinf's FSDP actor alone reads."""
    if role != "actor":
        return False
    where = (role, "lr_sched_sync_with_optim")
    is_by_update = source.flag(*where)
    if backend(source, role) == MEGATRON:
        if is_by_update is False:
            source.drop(where, f"training_backend {MEGATRON} does not read it, and counts optimizer updates")
        return False
    return is_by_update is False


def _at(role: str, name: str, key: str) -> Parts:
    return (role, "lr_sched" if name == MEGATRON else "optim", key)


def _drop_unread(source: Source, role: str) -> None:
    """Keys of the trainer that the file does not use."""
    used = backend(source, role)
    if used is None:
        return
    other = FSDP if used == MEGATRON else MEGATRON
    for keys in (*_PLACES.values(), _COUNTS, _SHARES):
        at = _at(role, other, keys[0] if other == MEGATRON else keys[1])
        if source.has(*at):
            source.drop(at, f"training_backend {used} reads {role}.{'lr_sched' if used == MEGATRON else 'optim'} alone")


def _places(source: Source, role: str, keys: tuple[str, str]) -> list[Parts]:
    """Where a trainer reads something, given its key in ``lr_sched`` and in ``optim``; both places where the trainer is not known."""
    used = backend(source, role)
    return [_at(role, name, key) for name, key in zip((MEGATRON, FSDP), keys, strict=True) if used in (None, name)]


def _schedule(source: Source, role: str) -> str | None:
    found = None
    for where in _places(source, role, _PLACES["schedule"]):
        schedule = source.choice(_SCHEDULES, *where)
        if None not in (found, schedule) and schedule != found:
            source.drop(where, f"lr_sched.lr_decay_style counts, {found}")
        found = found or schedule
    return found


def _smallest(source: Source, role: str, rate: float, schedule: str | None) -> float | None:
    """Where the schedule ends."""
    places = [where for where in _places(source, role, _PLACES["min"]) if source.has(*where)]
    for where in places[:-1]:
        source.drop(where, f"{'.'.join(map(str, places[-1]))} counts")
    smallest = source.number(*places[-1]) if places else None
    share_at = (role, "optim", "min_lr_rate")
    if backend(source, role) != MEGATRON and (share := source.number(*share_at, high=1.0)) is not None:
        if places:
            source.drop(places[-1], "min_lr_rate counts")
        places, smallest = [share_at], rate * share
    if not smallest:
        return None
    if schedule in (None, "Constant") or smallest > rate:
        why = "the rate is constant" if schedule in (None, "Constant") else f"is above the learning rate {rate:g}"
        source.drop(places[-1], f"{why}, so no schedule ends there")
        return None
    return smallest


def _end(source: Source, role: str, schedule: str | None, clock: Clock) -> int | None:
    """What the clock counts until RLinf's rate has fallen; None where the file does not say it. RLJob's falls over the steps of the job."""
    where = next((at for at in _places(source, role, _PLACES["end"]) if source.has(*at)), None)
    lowest = 0 if where is not None and where[-1] == _PLACES["end"][1] else 1  # 0 is the default of total_training_steps
    end = None if where is None else source.integer(*where, low=lowest, high=10**9) or None
    if schedule in (None, "Constant"):
        if where is not None and end is not None and not any(source.has(*at) for at in _places(source, role, _SHARES)):
            source.drop(where, "the rate is constant")
        return end
    if end is not None and where is not None:
        if end != clock.steps * clock.updates:
            total = "" if clock.updates == 1 else f", {counted(clock.steps * clock.updates, clock.unit)}"
            why = f"the rate falls over all {counted(clock.steps, 'step')} of the job{total}, instead of {end}"
            source.differs(where, why, "set training.steps to what you want to train")
    elif (used := backend(source, role)) is not None:
        at = _at(role, used, _PLACES["end"][used != MEGATRON])
        theirs = f"falls over {counted(_DECAY_ITERS, clock.unit)}, so hardly" if used == MEGATRON else "follows no schedule"
        why = f"the rate falls over all {counted(clock.steps, 'step')}; without it RLinf's {theirs}"
        source.assume(at, clock.steps * clock.updates, why, "write schedule: Constant for a rate that stays")
    return end


def _warmup(source: Source, role: str, clock: Clock, schedule: str | None, end: int | None) -> int | None:
    most = common.most_warmup(clock.steps, schedule)
    shares = [where for where in _places(source, role, _SHARES) if source.has(*where)]
    numbers = {where: source.integer(*where, low=-1, high=10**9) or 0 for where in _places(source, role, _COUNTS) if source.has(*where)}
    count = max(numbers, key=lambda where: numbers[where], default=None)
    used = backend(source, role)
    if count is not None and used != MEGATRON and numbers[count] >= (0 if used == FSDP else 1):
        for share in shares:
            source.drop(share, f"{count[-1]} {numbers[count]} counts")
        shares = []
    if shares:
        for where, number in numbers.items():
            if number:
                source.drop(where, f"{shares[0][-1]} counts")
        return _share(source, shares[0], clock, end, most)
    return None if count is None else _counted(source, count, max(0, numbers[count]), clock, most)


def _counted(source: Source, where: Parts, number: int, clock: Clock, most: int) -> int:
    """Steps of a warm-up of so many of what the clock counts."""
    steps = math.ceil(number / clock.updates)
    if steps > most:
        source.differs(where, f"is cut to {most} of the {counted(clock.steps, 'step')} of the job")
    elif steps != number:
        source.differs(where, f"counts optimizer updates, of which a step has {clock.updates} in RLinf: becomes {counted(steps, 'step')}")
    return min(steps, most)


def _share(source: Source, where: Parts, clock: Clock, end: int | None, most: int) -> int | None:
    """Steps of a warm-up that is a share: of the time in which the rate falls, where the file says or RLinf assumes some."""
    share, role = source.number(*where, high=1.0), str(where[0])
    if share is None:
        return None
    without = {MEGATRON: _DECAY_ITERS, FSDP: 0, None: clock.steps * clock.updates}
    total = without[backend(source, role)] if end is None else end
    updates = share * total
    steps = 0 if updates < 1 else min(most, math.ceil(round(updates / clock.updates, 6)))
    if share:
        becomes = f"becomes {steps} of {counted(clock.steps, 'step')}"
        why = f"is {updates:g} of the {counted(total, clock.unit)} over which RLinf's rate falls: {becomes}"
        source.differs(where, why, "check training.warmupSteps" if role == "actor" else "check algorithm.critic.learningRateWarmupSteps")
    return steps
