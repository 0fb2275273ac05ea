"""Complete checkpoints only: written to a folder of their own, marked when everything is on disk, found by the mark (COMPLETE).

Layout: ``<root>/step-000100-3fa2c1/{policy/, critic/, driver.json, COMPLETE}``. Policy and critic, if there is one, are saved by their
ranks with torch's distributed checkpoint; ``driver.json`` holds what the loop needs. The mark has size and checksum of every file. A folder
without it, or with files that are not as it says, is never resumed from: the next older one is. The end of a folder's name is that of one
write, so that whoever still writes for a driver that was given up writes into no other's folder.

Only one driver may write here. The one that began last owns the store, by a file; an earlier one that still runs, on a machine that nobody
reaches for example, finds another owner before its next commit and ends (:class:`SupersededError`).

Pods that share no storage cannot write a checkpoint together: :class:`NoCheckpoints` stands in for the store then.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Protocol

from rljob_runtime.checkpoint_files import FileSum, missing_or_cut
from rljob_runtime.errors import CheckpointError, SupersededError
from rljob_runtime.report.text import format_bytes

FOLDER_NAME = re.compile(r"step-\d+(-[0-9a-f]+)?")
"""Others in the store's folder are the user's, and left alone."""
MARK = "COMPLETE"
MARK_BEGUN = "COMPLETE.new"
OWNER_FILE = "owner"
STATE_FILE = "driver.json"
POLICY_FOLDER = "policy"
CRITIC_FOLDER = "critic"


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverState:
    """What the loop needs to go on exactly where it was."""

    step: int
    """Steps trained; also the weights version."""
    source_state: Mapping[str, object]
    """Position of the prompt source, at or before the oldest prompt that is not done."""
    first_prompt: int
    """Index of the first prompt that it gives from there."""
    done: tuple[int, ...]
    """Indexes of prompts after that position that were trained or dropped already."""
    rule_state: Mapping[str, object]
    """Running statistics of rewards and the adapted KL coefficient."""
    spec_fingerprint: Mapping[str, str]
    """By section of the spec, the hash of what must not change between attempts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chosen:
    """The checkpoint to go on from."""

    folder: Path | None = None
    """None: there is none, and the run begins at its first step."""
    state: DriverState | None = None
    files: tuple[FileSum, ...] = ()
    """All files that its ranks wrote."""
    skipped: tuple[str, ...] = ()
    """Why newer ones are not used."""


class Checkpoints(Protocol):
    """Where the loop keeps its state."""

    @property
    def kept(self) -> bool:
        """Whether anything is kept; when not, ``begin`` and ``complete`` are not called."""

    def take(self, owner: str) -> None:
        """Be the only driver that writes here from now on."""

    def check_owner(self) -> None:
        """Fails when another driver has taken over since this one began; called before a step is recorded."""

    def begin(self, step: int, needed_bytes: int) -> Path:
        """An empty folder for the checkpoint after ``step`` steps, whose ranks write ``needed_bytes``."""

    def complete(self, folder: Path, state: DriverState, files: Sequence[FileSum]) -> None:
        """``files`` and nothing else of the ranks' is in ``folder``: mark it."""

    def choose(self, spec_fingerprint: Mapping[str, str], without: Collection[Path] = ()) -> Chosen:
        """The newest checkpoint that can be used, and is none of ``without``."""


class NoCheckpoints:
    """Keeps nothing: for workers that share no storage with the driver and the next attempt."""

    kept = False

    def check_owner(self) -> None:
        """Nothing is shared with another driver."""

    def take(self, owner: str) -> None:
        """There is nothing to own."""

    def begin(self, step: int, needed_bytes: int) -> Path:
        """There is no place.

        Raises:
            CheckpointError: always.
        """
        needed = format_bytes(needed_bytes)
        raise CheckpointError(f"no checkpoint of {needed} after step {step}: the pods share no storage; set spec.storage")

    def complete(self, folder: Path, state: DriverState, files: Sequence[FileSum]) -> None:
        """There is no place.

        Raises:
            CheckpointError: always.
        """
        written = f"{folder} ({len(files)} files)"
        raise CheckpointError(f"no checkpoint {written} after step {state.step}: the pods share no storage; set spec.storage")

    def choose(self, spec_fingerprint: Mapping[str, str], without: Collection[Path] = ()) -> Chosen:
        """Nothing was kept."""
        return Chosen()


class CheckpointStore:
    """Folders below one root."""

    kept = True

    def __init__(self, root: Path, keep: int) -> None:
        """``keep`` complete checkpoints stay, older ones are removed."""
        self.root = root
        self._keep = keep
        self._owner: str | None = None

    def take(self, owner: str) -> None:
        """Own the store from now on; ``owner`` names this driver and no other one, also for people.

        Raises:
            CheckpointError: the disk refuses.
        """
        path = self.root / OWNER_FILE
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            _write_synced(path.with_suffix(".new"), owner)
            path.with_suffix(".new").replace(path)
        except OSError as error:
            raise _disk_error(path, error) from error
        self._owner = owner

    def check_owner(self) -> None:
        """See the protocol.

        Raises:
            SupersededError: another driver owns the store.
            CheckpointError: the file cannot be read.
        """
        if self._owner is None:
            return
        path = self.root / OWNER_FILE
        try:
            owner = path.read_text()
        except OSError as error:
            raise CheckpointError(f"{path}, which says what driver may write here, cannot be read: {error}") from error
        if owner != self._owner:
            raise SupersededError(f"{self.root} belongs to another driver now: {owner}; this one, {self._owner}, writes nothing more")

    def begin(self, step: int, needed_bytes: int) -> Path:
        """An empty folder for the checkpoint after ``step`` steps; those that were not finished are removed.

        Raises:
            CheckpointError: the folder cannot be made, the disk has less than ``needed_bytes`` left, or (SupersededError) another driver
                owns the store.
        """
        self.check_owner()
        folder = self.root / f"step-{step:06d}-{secrets.token_hex(3)}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            for unfinished in self.folders(complete=False):
                shutil.rmtree(unfinished)
            free_bytes = shutil.disk_usage(self.root).free
            if free_bytes < needed_bytes:
                raise CheckpointError(
                    f"checkpoint {folder} needs {format_bytes(needed_bytes)} and the disk has {format_bytes(free_bytes)} left; free some, "
                    f"lower spec.checkpoint.keep ({self._keep}) or set spec.checkpoint.path to another volume"
                )
            (folder / POLICY_FOLDER).mkdir(parents=True)
        except OSError as error:
            raise _disk_error(folder, error) from error
        return folder

    def complete(self, folder: Path, state: DriverState, files: Sequence[FileSum]) -> None:
        """Write the driver's state, then the mark, then remove what is too old, and what another line of training left after this step.

        Raises:
            CheckpointError: the disk refuses, or (SupersededError) another driver owns the store.
        """
        self.check_owner()
        try:
            _write_synced(folder / STATE_FILE, json.dumps(asdict(state)))
            _write_synced(folder / MARK_BEGUN, json.dumps({"step": state.step, "files": [astuple(file) for file in files]}))
            (folder / MARK_BEGUN).replace(folder / MARK)
            for named in (folder, self.root):  # older ones are removed next: the name must outlive a loss of power
                _sync_folder(named)
            before = [other for other in self.folders(complete=True) if _step_of(other) < state.step]
            kept = {folder, *before[max(len(before) - self._keep + 1, 0) :]}
            for other in self.folders():
                if other not in kept:
                    shutil.rmtree(other)
        except OSError as error:
            raise _disk_error(folder, error) from error

    def choose(self, spec_fingerprint: Mapping[str, str], without: Collection[Path] = ()) -> Chosen:
        """See the protocol; looks at the sizes of files, not into them.

        Raises:
            CheckpointError: the newest that is whole was written under a spec that differs where it must not, or there are some and
                none is whole.
        """
        complete, skipped = self.folders(complete=True), []
        for folder in reversed(self.folders()):
            if folder not in complete:
                skipped.append(f"checkpoint {folder.name} was not finished and is skipped")
                continue
            if folder in without:
                continue
            try:
                files = _marked_files(folder)
                problems = missing_or_cut(folder, files)
                if problems:
                    raise CheckpointError("; ".join(problems))
                state = self._read(folder)
            except CheckpointError as error:
                skipped.append(f"checkpoint {folder.name} is damaged and skipped: {error}")
                continue
            _require_same_spec(folder, state, spec_fingerprint)
            return Chosen(folder=folder, state=state, files=files, skipped=tuple(skipped))
        if complete:
            names = ", ".join(folder.name for folder in complete)
            raise CheckpointError(
                f"none of the checkpoints in {self.root} is whole ({names}); restore one, or remove them to begin at the first step: "
                + "; ".join(skipped)
            )
        return Chosen(skipped=tuple(skipped))

    def clear(self) -> None:
        """Remove all checkpoints.

        Raises:
            OSError: one cannot be removed.
        """
        for folder in self.folders():
            shutil.rmtree(folder)

    def _read(self, folder: Path) -> DriverState:
        try:
            raw = json.loads((folder / STATE_FILE).read_text())
            return DriverState(done=tuple(raw.pop("done")), spec_fingerprint=dict(raw.pop("spec_fingerprint")), **raw)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"{folder / STATE_FILE} cannot be read: {error}") from error

    def folders(self, *, complete: bool | None = None) -> list[Path]:
        """Of checkpoints, by step: all, or those with the mark, or those without."""
        named = [folder for folder in self.root.glob("step-*") if FOLDER_NAME.fullmatch(folder.name)]
        found = sorted(named, key=lambda folder: (_step_of(folder), folder.name))
        return [folder for folder in found if complete is None or (folder / MARK).exists() is complete]


def _step_of(folder: Path) -> int:
    return int(folder.name.split("-")[1])


def _marked_files(folder: Path) -> tuple[FileSum, ...]:
    """What the mark says.

    Raises:
        CheckpointError: it is not one.
    """
    try:
        files = json.loads((folder / MARK).read_text())["files"]
        return tuple(FileSum(name=str(name), size_bytes=int(size_bytes), crc32=int(crc32)) for name, size_bytes, crc32 in files)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{folder / MARK} cannot be read: {error}") from error


def _require_same_spec(folder: Path, state: DriverState, spec_fingerprint: Mapping[str, str]) -> None:
    names = sorted({*state.spec_fingerprint, *spec_fingerprint})
    changed = [f"spec.{name}" for name in names if state.spec_fingerprint.get(name) != spec_fingerprint.get(name)]
    if changed:
        raise CheckpointError(
            f"{folder} was written under another spec: {', '.join(changed)} changed, and must stay the same except for limits of time and "
            "memory; restore the spec (spec.yaml in the run folder is the one of the last attempt), or start in another run folder"
        )


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _disk_error(folder: Path, error: OSError) -> CheckpointError:
    if error.errno == errno.ENOSPC:
        return CheckpointError(f"no space left for checkpoint {folder}; free some or set spec.checkpoint.path to another volume")
    return CheckpointError(f"checkpoint {folder} cannot be written: {error}")
