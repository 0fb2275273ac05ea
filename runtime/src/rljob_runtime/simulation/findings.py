"""What limits a simulated step, and what one change would do. Everything here is computed from worlds and outcomes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from rljob_api.rules.rollout import default_max_staleness
from rljob_api.v1alpha1.operations import Overlap
from rljob_api.v1alpha1.rljob import RLJobSpec
from rljob_runtime.errors import SetupError
from rljob_runtime.simulation.costs import Simulated
from rljob_runtime.simulation.layout import Layout
from rljob_runtime.simulation.running import simulate
from rljob_runtime.simulation.world import Outcome

Make = Callable[[RLJobSpec, Layout], Simulated]
"""The world of a job and a layout."""
MOVED_SHARE = 8
"""One of so many engines is moved to or from the trainer."""
LIMITS = {
    "turns": "generation and training take turns",
    "trainer": "the trainer: training and weight sync",
    "engines": "the engines: their slots are full",
    "tail": "the longest response",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One simulated configuration."""

    what: str
    simulated: Simulated
    outcome: Outcome
    limit: str
    """Key of :data:`LIMITS`."""

    @property
    def tokens_per_s(self) -> float:
        """Trained response tokens."""
        return self.outcome.tokens_per_step * self.simulated.unit_tokens / self.outcome.step_s

    @property
    def tokens_per_s_device(self) -> float:
        """The same by device of Trainer and engines."""
        return self.tokens_per_s / self.simulated.layout.devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A change that cannot be made."""

    what: str
    why: str


def find(what: str, made: Simulated) -> Finding:
    """Simulate one configuration.

    Raises:
        RuntimeFault: the scheduler failed.
    """
    outcome = simulate(made.world, made.lengths)
    bounds = lower_bounds_s(made, outcome)
    return Finding(what=what, simulated=made, outcome=outcome, limit=max(bounds, key=lambda name: bounds[name]))


def lower_bounds_s(made: Simulated, outcome: Outcome) -> dict[str, float]:
    """What no order of the requests can beat, by what binds; see ``bench/overlap/bounds.py``."""
    world = made.world
    sync_s = world.sync_s + world.sync_hidden_s
    loop_s = outcome.train_s + sync_s + (2 * world.switch_s if world.shares_devices else 0.0)
    running = max(1, min(world.slots, math.ceil(world.samples_per_step / world.num_engines)))
    work_s = outcome.tokens_per_step * world.decode.seconds(running) / (running * world.num_engines)
    prompts = world.groups_per_step * (1 if world.caches_prefixes else world.samples_per_group)
    work_s += prompts * world.prompt_tokens * world.prefill_token_s / world.num_engines
    longest_s = outcome.longest_tokens * world.token_s
    if world.ratio == 0 or world.shares_devices:
        return {"turns": max(work_s, longest_s) + loop_s}
    staleness = default_max_staleness(world.ratio)
    return {
        "trainer": loop_s,
        "engines": work_s + world.sync_s,
        "tail": (longest_s + loop_s + staleness * world.sync_s) / (staleness + 1),
    }


def changes(spec: RLJobSpec, layout: Layout, make: Make, *, measured: bool) -> Iterator[Finding | Refused]:
    """One change at a time, of those that apply.

    Args:
        spec: of the job.
        layout: of its plan.
        make: the world of a changed job.
        measured: whether seconds are those of a run, which says nothing of other sizes of engines.
    """
    for what, changed_spec, changed in _changed(spec, layout, measured=measured):
        try:
            made = make(changed_spec, changed)
        except SetupError as error:
            yield Refused(what=what, why=str(error))
        else:
            yield find(what, made)


def _changed(spec: RLJobSpec, layout: Layout, *, measured: bool) -> Iterator[tuple[str, RLJobSpec, Layout]]:
    if not layout.shares_devices:
        ratio = math.floor(spec.overlap.async_generation_ratio) + 1
        overlap = Overlap.model_validate({"asyncGenerationRatio": ratio})
        yield f"overlap.asyncGenerationRatio {ratio}", spec.model_copy(update={"overlap": overlap}), layout
    step = max(layout.engines // MOVED_SHARE, 1)
    step = math.lcm(step * layout.engine_devices, layout.device_unit) // layout.engine_devices
    for engines, text in ((step, "more for generation"), (-step, "fewer for generation")):
        moved = layout.moved(engines)
        if moved is not None:
            yield f"{abs(engines) * layout.engine_devices} devices {text}", spec, moved
    if measured:
        return
    if layout.engines % 2 == 0 and 2 * layout.engine_devices <= layout.max_engine_devices:
        larger = replace(layout, engines=layout.engines // 2, engine_devices=2 * layout.engine_devices)
        yield f"engines of {larger.engine_devices} devices", spec, larger
    if layout.engine_devices % 2 == 0:
        smaller = replace(layout, engines=2 * layout.engines, engine_devices=layout.engine_devices // 2)
        yield f"engines of {smaller.engine_devices} device{'' if smaller.engine_devices == 1 else 's'}", spec, smaller
