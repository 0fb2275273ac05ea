"""Takes the folders of a run on this machine: its own, and the one of its checkpoints where the spec names another place.

What is in them and somebody needs is not lost:

| in the run folder or ``checkpoint.path``             | what keeps it                                                        |
|------------------------------------------------------|----------------------------------------------------------------------|
| the model or data of this run, with ``--overwrite``  | refused                                                              |
| a run that is in progress                            | its lock, which ends with its process                                |
| checkpoints of another job                           | each job has a folder of its name in ``checkpoint.path``             |
| checkpoints of another run of the job                | a file there that names the run folder                               |
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from rljob_api.v1alpha1 import RLJobSpec
from rljob_api.validation import CheckedJob
from rljob_runtime.entry import local_checks
from rljob_runtime.errors import SetupError
from rljob_runtime.loop.checkpointing import CheckpointStore
from rljob_runtime.report.disk import writing
from rljob_runtime.report.folder import LOCK_FILE, FolderMode, RunFolder

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
"""Of a file system without locks, as some network volumes are: two runs in one folder are then not noticed."""
RUN_FILE = "run"
"""In a folder of checkpoints outside of the run folder: the path of that."""


@contextlib.contextmanager
def taken(checked: CheckedJob, path: Path, *, overwrite: bool, resume: bool) -> Iterator[tuple[RunFolder, CheckpointStore]]:
    """The run folder and the checkpoints of a job, for as long as it runs.

    Raises:
        SetupError: the folder may not be taken, see the table above and :meth:`RunFolder.open`.
        RuntimeFault: a folder is not writable, or its disk is full.
    """
    spec, mode = checked.job.spec, FolderMode.RESUME if resume else FolderMode.OVERWRITE if overwrite else FolderMode.NEW
    if overwrite:
        _keep_inputs(spec, path)
    if (path / LOCK_FILE).exists():
        with _locked(path):
            pass
    folder = RunFolder.open(path, mode)
    with _locked(path):
        place = local_checks.checkpoint_folder(checked.job, folder.checkpoints)
        store = CheckpointStore(place, spec.checkpoint.keep)
        if place != folder.checkpoints:
            _claim(store, path.resolve(), mode)
        yield folder, store


def _keep_inputs(spec: RLJobSpec, path: Path) -> None:
    """Raises SetupError where what the job starts from lies in the folder that is cleared."""
    cleared = path.resolve()
    inside = [
        f"{where} {named}" for where, named in _inputs(spec) if (found := Path(named)).exists() and found.resolve().is_relative_to(cleared)
    ]
    if inside:
        raise SetupError(
            f"--overwrite would delete {', '.join(inside)}, in {path}; copy it elsewhere, or give another output folder (--run-dir)"
        )


def _inputs(spec: RLJobSpec) -> Iterator[tuple[str, str]]:
    """Fields that name a file or folder which the job reads, and their values."""
    yield "spec.model.path", spec.model.path
    if spec.model.tokenizer_path is not None:
        yield "spec.model.tokenizerPath", spec.model.tokenizer_path
    for index, component in enumerate(spec.components):
        if component.model is not None:
            yield f"spec.components[{index}].model.path", component.model.path
    for part, sources in (("train", spec.data.train), ("validation", spec.data.validation)):
        for index, source in enumerate(sources):
            for kind, settings in (("jsonl", source.jsonl), ("parquet", source.parquet)):
                if settings is not None:
                    yield f"spec.data.{part}[{index}].{kind}.path", settings.path


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a run folder.

    Raises:
        SetupError: another process does.
    """
    with contextlib.ExitStack() as held:
        with writing(path, "the run folder"):
            handle = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            held.callback(os.close, handle)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                remedy = "wait for its end, or choose another output folder (--run-dir)"
                raise SetupError(f"{path}: a run is in progress there; {remedy}") from error
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
        yield


def _claim(store: CheckpointStore, run: Path, mode: FolderMode) -> None:
    """Make checkpoints outside of the run folder those of this run.

    Raises:
        SetupError: they are another run's, or an earlier one's of the same folder that is not to be overwritten.
    """
    owner = store.root / RUN_FILE
    with writing(store.root, "the folder of checkpoints"):
        store.root.mkdir(parents=True, exist_ok=True)
        known = owner.read_text().strip() if owner.is_file() else ""
        if store.folders() and known != str(run):
            whose = f"the run {known}" if known else "an unknown run"
            raise SetupError(
                f"{store.root} holds checkpoints of {whose}; give this job another spec.checkpoint.path or name, or remove them"
            )
        if store.folders() and mode is FolderMode.NEW:
            raise SetupError(f"{store.root} holds checkpoints of an earlier run in {run}; remove them, or let --overwrite do so")
        if mode is FolderMode.OVERWRITE:
            store.clear()
        owner.write_text(f"{run}\n")
