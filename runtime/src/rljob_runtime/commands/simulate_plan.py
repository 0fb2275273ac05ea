"""The output of ``rljob plan --simulate``: a job's step in virtual time, what limits it, and what one change would do."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljob_api import memory
from rljob_api.errors import counted
from rljob_api.memory import MemoryEstimate, PoolKind
from rljob_api.v1alpha1.rljob import RLJobSpec
from rljob_api.validation import CheckedJob
from rljob_runtime.commands.measured import synchronous_job
from rljob_runtime.errors import SetupError
from rljob_runtime.simulation import costs, measured
from rljob_runtime.simulation.devices import DEVICES, DeviceType
from rljob_runtime.simulation.findings import LIMITS, Finding, Refused, changes, find
from rljob_runtime.simulation.layout import Layout, layout_of
from rljob_runtime.simulation.measured import Measurement

if TYPE_CHECKING:
    from rich.console import Console

DEFAULT_DEVICE = "H100"


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """All that is shown of a job."""

    name: str
    device: DeviceType | None
    """None: seconds are measured ones."""
    finding: Finding
    changes: tuple[Finding | Refused, ...]
    estimate: MemoryEstimate
    measured_step_s: float | None
    """Of the run that seconds are from, where the job is that of the run."""


def simulate(checked: CheckedJob, *, device: str | None, mean_response: int | None, run: Path | None) -> Simulation:
    """Simulate a job and the changes that apply.

    Args:
        checked: the job.
        device: a name of :data:`DEVICES`; None: :data:`DEFAULT_DEVICE`.
        mean_response: tokens; None: half of the longest.
        run: folder of a run, or its summary.json, whose seconds count in place of arithmetic.

    Raises:
        RuntimeFault: it cannot be simulated, or the run's files cannot be read.
    """
    spec, shape = checked.job.spec, checked.shape or memory.shape_of(checked.job.spec)
    layout = layout_of(spec, checked.plan)
    estimate = memory.estimate(spec, checked.plan, shape, checked.served)
    if run is not None:
        if device is not None or mean_response is not None:
            raise SetupError("--device-type and --mean-response have no effect with --measured, which provides both; remove them")
        found, ran_on = read_run(run)

        def of_run(changed: RLJobSpec, on: Layout) -> costs.Simulated:
            return measured.simulated(changed, on, found, ran_on)

        base = find("as it is", of_run(spec, layout))
        others = tuple(changes(spec, layout, of_run, measured=True))
        same = layout == ran_on and spec.overlap.async_generation_ratio == 0
        step_s = found.step_s if same else None
        return Simulation(
            name=checked.job.metadata.name, device=None, finding=base, changes=others, estimate=estimate, measured_step_s=step_s
        )
    kind = device_type(device or DEFAULT_DEVICE)

    def by_arithmetic(changed: RLJobSpec, on: Layout) -> costs.Simulated:
        return costs.simulated(changed, on, shape, kind, mean_response)

    base = find("as it is", by_arithmetic(spec, layout))
    others = tuple(changes(spec, layout, by_arithmetic, measured=False))
    return Simulation(name=checked.job.metadata.name, device=kind, finding=base, changes=others, estimate=estimate, measured_step_s=None)


def read_run(path: Path) -> tuple[Measurement, Layout]:
    """What a run measured, and the layout that it ran on.

    Raises:
        RuntimeFault: its files cannot be read, or it generated ahead.
    """
    folder = path if path.is_dir() else path.parent
    job = synchronous_job(folder / "spec.yaml")
    return measured.read(folder / "metrics.jsonl"), layout_of(job.job.spec, job.plan)


def device_type(name: str) -> DeviceType:
    """A kind of device by its name.

    Raises:
        SetupError: there is none.
    """
    if name not in DEVICES:
        raise SetupError(f"--device-type {name}: not known; there are {', '.join(DEVICES)}")
    return DEVICES[name]


def as_document(simulation: Simulation) -> dict[str, Any]:
    """All figures as plain data."""
    found = simulation.finding
    peak = device_peak(simulation.estimate)
    return {
        "name": simulation.name,
        "deviceType": None if simulation.device is None else simulation.device.name,
        "basis": found.simulated.basis,
        "trainerDevices": found.simulated.layout.trainer_devices,
        "rolloutDevices": found.simulated.layout.rollout_devices,
        **_figures(found),
        "devicePeakBytes": None if peak is None else peak[0],
        "devicePeakPhase": None if peak is None else peak[1],
        "deviceMemoryBytes": None if simulation.device is None else simulation.device.memory_bytes,
        "measuredStepSeconds": simulation.measured_step_s,
        "changes": [
            {"what": change.what, "refused": change.why}
            if isinstance(change, Refused)
            else {"what": change.what, **_figures(change), "speedUp": found.outcome.step_s / change.outcome.step_s}
            for change in simulation.changes
        ],
    }


def _figures(found: Finding) -> dict[str, Any]:
    outcome = found.outcome
    return {
        "stepSeconds": outcome.step_s,
        "trainSeconds": outcome.train_s,
        "syncSeconds": found.simulated.world.sync_s + found.simulated.world.sync_hidden_s,
        "trainerIdleShare": outcome.trainer_idle_share,
        "engineIdleShare": outcome.engine_idle_share,
        "runningResponses": outcome.running_mean,
        "tokensPerSecond": found.tokens_per_s,
        "tokensPerSecondAndDevice": found.tokens_per_s_device,
        "stalenessMean": outcome.token_staleness_mean,
        "droppedGroups": outcome.dropped_groups,
        "limit": found.limit,
    }


def as_json(simulation: Simulation) -> str:
    """:func:`as_document` as JSON text."""
    return json.dumps(as_document(simulation), indent=2)


def print_simulation(simulation: Simulation, console: Console) -> None:
    """Everything for people."""
    for line in sentences(simulation):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    rows = list(change_rows(simulation))
    if rows:
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="One change at a time", title_justify="left", title_style="bold")
        table.add_column("", no_wrap=True)
        for column in ("step s", "speed-up", "trainer idle", "engines idle", "limited by"):
            table.add_column(column, justify="left" if column == "limited by" else "right", overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for refused in (change for change in simulation.changes if isinstance(change, Refused)):
        console.print(f"{refused.what}: cannot be: {refused.why}", highlight=False, markup=False, soft_wrap=True)


def sentences(simulation: Simulation) -> Iterator[str]:
    """Figures of the job as it is."""
    found, layout = simulation.finding, simulation.finding.simulated.layout
    outcome, world = found.outcome, found.simulated.world
    where = "the same devices in turn" if layout.shares_devices else f"{layout.trainer_devices} + {layout.rollout_devices} devices"
    yield f"Simulation of {simulation.name}: Trainer and {counted(layout.engines, 'engine')} on {where}, in virtual time"
    yield f"  seconds from {found.simulated.basis}"
    sync_s = world.sync_s + world.sync_hidden_s
    yield (
        f"  step {number(outcome.step_s)} s: training {number(outcome.train_s)} s, weight sync {number(sync_s)} s; "
        f"trainer idle {outcome.trainer_idle_share:.0%}, engines idle {outcome.engine_idle_share:.0%}, "
        f"{number(outcome.running_mean)} responses in an engine while it works"
    )
    yield f"  {number(found.tokens_per_s)} response tokens/s, {number(found.tokens_per_s_device)} a device"
    yield f"  limited by {LIMITS[found.limit]}"
    peak = device_peak(simulation.estimate)
    if peak is not None and simulation.device is not None:
        share = peak[0] / simulation.device.memory_bytes
        yield f"  memory {peak[0] / 2**30:.1f} GiB of {simulation.device.memory_bytes / 2**30:.0f} ({share:.0%}) in phase {peak[1]}"
    if simulation.measured_step_s is not None:
        error = outcome.step_s / simulation.measured_step_s - 1
        yield f"  the run itself: {number(simulation.measured_step_s)} s a step; the simulation is {error:+.1%} off"


def change_rows(simulation: Simulation) -> Iterator[Sequence[str]]:
    """Cells of every change that can be made."""
    for change in simulation.changes:
        if isinstance(change, Finding):
            outcome = change.outcome
            yield (
                change.what,
                number(outcome.step_s),
                f"{simulation.finding.outcome.step_s / outcome.step_s:.2f}",
                f"{outcome.trainer_idle_share:.0%}",
                f"{outcome.engine_idle_share:.0%}",
                LIMITS[change.limit],
            )


def device_peak(estimate: MemoryEstimate) -> tuple[int, str] | None:
    """Bytes and phase of the fullest device; None where nothing is known of devices."""
    pools = [pool for pool in estimate.pools if pool.kind is PoolKind.DEVICE]
    if not pools:
        return None
    fullest = max(pools, key=lambda pool: pool.peak.num_bytes)
    return fullest.peak.num_bytes, str(fullest.peak.phase)


def number(value: float) -> str:
    """Three significant digits, all of a large number."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
