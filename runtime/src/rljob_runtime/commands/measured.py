"""Phase times of an earlier run for ``spec.measured``: the input of ``rljob plan --measured``.

::

    runs/<name>/summary.json ── names the run
                metrics.jsonl ── seconds of every step's phases: the median over the steps after the first
                spec.yaml ── through the planner: devices that generated and trained
"""

from __future__ import annotations

import math
import statistics
from pathlib import Path

from rljob_api.errors import SpecInvalidError
from rljob_api.planning.plan import Plan
from rljob_api.v1alpha1.components import Role
from rljob_api.v1alpha1.operations import Measured
from rljob_api.validation import CheckedJob, check
from rljob_runtime.errors import SetupError
from rljob_runtime.report.metrics import MetricsTable, load_metrics
from rljob_runtime.report.summary import load_summary

GENERATE, TRAIN, SYNC = "time/generate_s", "time/train_s", "time/sync_s"


def read(summary: Path) -> Measured:
    """What a finished run measured.

    Args:
        summary: its summary.json; metrics.jsonl and spec.yaml lie beside it.

    Raises:
        RuntimeFault: a file is missing or malformed, a metric is missing, or the run's times do not apply to another placement.
    """
    load_summary(summary)  # refuses what is no summary
    metrics, spec = summary.with_name("metrics.jsonl"), summary.with_name("spec.yaml")
    job = synchronous_job(spec)
    table = load_metrics(metrics)
    return Measured.model_validate(
        {
            "rolloutDevices": _num_devices(job.plan, Role.ROLLOUT, spec),
            "trainerDevices": _num_devices(job.plan, Role.TRAINER, spec),
            "generateSeconds": _typical(table, GENERATE, metrics),
            "trainSeconds": _typical(table, TRAIN, metrics),
            "syncSeconds": _typical(table, SYNC, metrics),
        }
    )


def synchronous_job(spec: Path) -> CheckedJob:
    """The job of a run that generated before it trained.

    Args:
        spec: its spec.yaml.

    Raises:
        RuntimeFault: it is missing or malformed, or the run generated ahead.
    """
    job = _job(spec)
    if job.job.spec.overlap.async_generation_ratio > 0:
        raise SetupError(
            f"{spec}: overlap.asyncGenerationRatio is {job.job.spec.overlap.async_generation_ratio:g}, so {GENERATE} is only the part of "
            "the generation that the step waited for; measure a run with ratio 0"
        )
    return job


def _job(path: Path) -> CheckedJob:
    """The job of the run."""
    try:
        return check(path.read_text(encoding="utf-8"), runnable=False)
    except OSError as error:
        raise SetupError(f"{path}: cannot be read ({error.strerror}); it holds the number of devices of the run") from error
    except SpecInvalidError as error:
        raise SetupError(f"{path}: is not the spec of a run: {error.errors[0]}") from error


def _typical(table: MetricsTable, name: str, path: Path) -> float:
    """Median over the steps after the first, which is slower than the others; over all when there is only one."""
    values = [value for value in table.column(name) if math.isfinite(value)]
    if not values:
        raise SetupError(f"{path}: no step has {name}; give the summary of a run that finished at least one step")
    typical = statistics.median(values[1:] or values)
    if typical <= 0 and name != SYNC:
        raise SetupError(f"{path}: {name} is {typical:g} s in most steps, which cannot be scaled; give the summary of another run")
    return typical


def _num_devices(plan: Plan, role: Role, path: Path) -> int:
    devices = {device for component in plan.with_role(role) for device in component.devices}
    if not devices:
        raise SetupError(f"{path}: its {role} has no devices; give the summary of a run that has")
    return len(devices)
