"""A run's journal, from its spec and checkpoint. Called by ``assemble``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Protocol

from rljob_api.rules.rollout import max_staleness
from rljob_api.v1alpha1 import RLJobSpec
from rljob_runtime.job.worker_settings import spec_fingerprint
from rljob_runtime.journal.opening import open_journal
from rljob_runtime.journal.replay import Bounds, StartingPoint
from rljob_runtime.journal.writing import Journal, NoJournal
from rljob_runtime.loop.checkpointing import DriverState
from rljob_runtime.overlap.group_log import Recovered
from rljob_runtime.report import Level


class Announcer(Protocol):
    """Takes lines for users; a :class:`~rljob_runtime.report.Reporter`."""

    def event(self, text: str, level: Level = Level.INFO) -> None:
        """Show one line."""


def run_journal(
    spec: RLJobSpec, folder: Path | None, data: str, state: DriverState | None, reporter: Announcer
) -> tuple[Journal, Recovered]:
    """The journal to write, and what an earlier attempt had finished.

    Args:
        spec: of the job.
        folder: of the journal; None where no checkpoint is kept either.
        data: identifies the order of the training prompts.
        state: of the checkpoint that this attempt goes on from.
        reporter: takes progress, and what cannot be used.
    """
    if folder is None:
        return NoJournal(), Recovered()
    if not (spec.checkpoint.journal and spec.checkpoint.every_steps):
        shutil.rmtree(folder, ignore_errors=True)  # a later attempt must not go on from it
        return NoJournal(), Recovered()
    start = StartingPoint(version=0, first_prompt=0)
    if state is not None:
        start = StartingPoint(version=state.step, first_prompt=state.first_prompt, done=frozenset(state.done))
    bounds = Bounds(groups_per_step=spec.rollout.prompts_per_step, total_steps=spec.training.steps, max_staleness=max_staleness(spec))
    opened = open_journal(folder, "/".join((*spec_fingerprint(spec).values(), data)), start, bounds)
    for problem in opened.problems:
        reporter.event(problem, Level.WARNING)
    batches, waiting = len(opened.recovered.batches), len(opened.recovered.waiting)
    if batches or waiting:
        reporter.event(
            f"finished by an earlier attempt after step {start.version} and not generated again: "
            f"batches of steps: {batches}, further groups: {waiting}"
        )
    return opened.journal, opened.recovered
