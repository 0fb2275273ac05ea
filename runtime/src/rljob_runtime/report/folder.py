"""The layout of a run on disk, and the rules for taking a folder.

::

    <run>/
      .rljob-run            marks the folder as a run's; without it nothing is ever overwritten
      .rljob-lock           held by a run on this machine that is in progress (entry.run_place)
      spec.yaml             the resolved spec
      models.json           commits of models that came from a Hub (job.models)
      metrics.jsonl         one line a step                 (report.names documents each metric)
      timeline.jsonl        one line a span {lane, phase, start_s, end_s, step}
      activity.jsonl        one line a phase of a worker {worker, phase, start_s, end_s, step} (report.activity)
      switches.jsonl        one line a move of state onto or off a device, with memory before and after (report.switches)
      summary.json          written at the end
      report.html           written at the end; opens without a network
      tensorboard/          the same metrics as events
      trackers/             of experiment trackers (report.trackers): the run's identifier, what each keeps on this machine
      trajectories/         step-000010.jsonl: sampled responses to read
      checkpoints/  model/  the trainer's
      journal/              groups that were finished since the newest checkpoint (rljob_runtime.journal)
      logs/                 events.jsonl and one file a worker
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from rljob_runtime.errors import SetupError
from rljob_runtime.report.disk import require_space, writing
from rljob_runtime.sandbox import RUN_MARKER

LOCK_FILE = ".rljob-lock"
_MINIMUM_FREE_BYTES = 64 * 1024 * 1024
"""Below this a run is refused at once: logs, events and the report (5 MB) alone would fill the disk."""


class FolderMode(StrEnum):
    """How to take a folder that may already hold something."""

    NEW = "new"
    """The folder must be missing or empty."""
    RESUME = "resume"
    """The folder must hold a run."""
    RESUME_OR_NEW = "resume-or-new"
    """Resume when it holds a run, start when it is missing or empty: what a restarted attempt wants."""
    OVERWRITE = "overwrite"
    """Remove the run it holds; refused unless the folder is recognisably a run's."""


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run; making the object touches no disk, ``open`` does."""

    path: Path

    @property
    def marker(self) -> Path:
        """Empty file that marks a run folder."""
        return self.path / RUN_MARKER

    @property
    def spec_yaml(self) -> Path:
        """The resolved spec."""
        return self.path / "spec.yaml"

    @property
    def metrics_jsonl(self) -> Path:
        """One line a step."""
        return self.path / "metrics.jsonl"

    @property
    def timeline_jsonl(self) -> Path:
        """One line a span."""
        return self.path / "timeline.jsonl"

    @property
    def activity_jsonl(self) -> Path:
        """One line a phase of a worker."""
        return self.path / "activity.jsonl"

    @property
    def switches_jsonl(self) -> Path:
        """One line a move of state."""
        return self.path / "switches.jsonl"

    @property
    def events_jsonl(self) -> Path:
        """One line a message that was shown to the user."""
        return self.logs / "events.jsonl"

    @property
    def summary_json(self) -> Path:
        """The result, written at the end."""
        return self.path / "summary.json"

    @property
    def report_html(self) -> Path:
        """The report, written at the end."""
        return self.path / "report.html"

    @property
    def tensorboard(self) -> Path:
        """Folder of event files."""
        return self.path / "tensorboard"

    @property
    def trackers(self) -> Path:
        """Folder of experiment trackers; made when the spec names one."""
        return self.path / "trackers"

    @property
    def trajectories(self) -> Path:
        """Folder of sampled trajectories."""
        return self.path / "trajectories"

    @property
    def model(self) -> Path:
        """Folder of the final model in Hugging Face layout."""
        return self.path / "model"

    @property
    def checkpoints(self) -> Path:
        """Folder of checkpoints."""
        return self.path / "checkpoints"

    @property
    def journal(self) -> Path:
        """Folder of what was finished since the newest checkpoint; made when something is."""
        return self.path / "journal"

    @property
    def logs(self) -> Path:
        """Folder of log files."""
        return self.path / "logs"

    def trajectories_of(self, step: int) -> Path:
        """File of the trajectories sampled at ``step``."""
        return self.trajectories / f"step-{step:06d}.jsonl"

    def holds_a_run(self) -> bool:
        """Whether the folder is recognisably a run's: the marker, or spec.yaml and metrics.jsonl together."""
        return self.marker.is_file() or (self.spec_yaml.is_file() and self.metrics_jsonl.is_file())

    def is_vacant(self) -> bool:
        """Whether the folder is missing or empty.

        Raises:
            SetupError: the path is a file.
            RuntimeFault: it may not be read.
        """
        with writing(self.path, "the run folder"):
            if self.path.exists() and not self.path.is_dir():
                raise SetupError(f"{self.path}: is a file, a folder is needed; choose another output folder")
            return not self.path.exists() or next(self.path.iterdir(), None) is None

    @classmethod
    def open(cls, path: Path, mode: FolderMode) -> RunFolder:
        """Take the folder by the rules of ``mode`` and make its subfolders.

        Raises:
            SetupError: the folder holds something that ``mode`` does not allow.
            RuntimeFault: it is not writable, or its disk is full.
        """
        folder = cls(path)
        vacant = folder.is_vacant()
        ours = not vacant and folder.holds_a_run()
        if mode is FolderMode.RESUME and not ours:
            raise SetupError(f"{path}: holds no run to resume; check the path, or start a new run, without --resume")
        if mode in (FolderMode.OVERWRITE, FolderMode.RESUME_OR_NEW) and not vacant and not ours:
            raise SetupError(
                f"{path}: is not empty and not a run folder (no {RUN_MARKER}, no spec.yaml with metrics.jsonl), so it is left alone; "
                "choose another output folder or empty it yourself"
            )
        if mode is FolderMode.NEW and not vacant:
            what = "holds a run already; resume it (--resume), overwrite it (--overwrite), or" if ours else "is not empty;"
            raise SetupError(f"{path}: {what} choose another output folder (--run-dir)")
        if mode is FolderMode.OVERWRITE and ours:
            folder._clear()
        folder._make()
        return folder

    def _clear(self) -> None:
        """Remove what the folder holds but not the folder, which may be a mount point; the marker goes last."""
        with writing(self.path, "over the run it holds"):
            self.marker.touch()
            for entry in sorted(self.path.iterdir()):
                if entry == self.marker:
                    continue
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
            self.marker.unlink()

    def _make(self) -> None:
        require_space(self.path, _MINIMUM_FREE_BYTES, "a run")
        with writing(self.path, "the run folder"):
            for sub in (self.path, self.tensorboard, self.trajectories, self.checkpoints, self.logs):
                sub.mkdir(parents=True, exist_ok=True)
            self.marker.touch()
