"""Complete checkpoints only: written to a folder of their own, marked when everything is on disk, found by the mark (COMPLETE).

Layout: ``<root>/step-000100/{policy/, critic/, driver.json, COMPLETE}``. Policy and critic, if there is one, are saved by their ranks
with torch's distributed checkpoint; ``driver.json`` holds what the loop needs. A folder without the mark is never resumed from.

Only one driver may write here. The one that began last owns the store, by a file; an earlier one that still runs, on a machine that nobody
reaches for example, finds another owner before its next commit and ends (:class:`SupersededError`).

Pods that share no storage cannot write a checkpoint together: :class:`NoCheckpoints` stands in for the store then.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from rljob_runtime.errors import CheckpointError, SupersededError

MARK = "COMPLETE"
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
    spec_fingerprint: str
    """Hash of the parts of the spec that must not change between attempts."""


class Checkpoints(Protocol):
    """Where the loop keeps its state."""

    @property
    def kept(self) -> bool:
        """Whether anything is kept; when not, ``begin`` and ``complete`` are not called."""

    def take(self, owner: str) -> None:
        """Be the only driver that writes here from now on."""

    def check_owner(self) -> None:
        """Fails when another driver has taken over since this one began; called before a step is recorded."""

    def begin(self, step: int) -> Path:
        """An empty folder for the checkpoint after ``step`` steps."""

    def complete(self, folder: Path, state: DriverState) -> None:
        """Everything is in ``folder``: mark it."""

    def newest(self) -> Path | None:
        """The newest complete checkpoint."""

    def load(self, folder: Path, spec_fingerprint: str) -> DriverState:
        """The driver's state in ``folder``."""


class NoCheckpoints:
    """Keeps nothing: for workers that share no storage with the driver and the next attempt."""

    kept = False

    def check_owner(self) -> None:
        """Nothing is shared with another driver."""

    def take(self, owner: str) -> None:
        """There is nothing to own."""

    def begin(self, step: int) -> Path:
        """There is no place.

        Raises:
            CheckpointError: always.
        """
        raise CheckpointError(f"no checkpoint after step {step}: the pods share no storage; set spec.storage")

    def complete(self, folder: Path, state: DriverState) -> None:
        """There is no place.

        Raises:
            CheckpointError: always.
        """
        raise CheckpointError(f"no checkpoint {folder} after step {state.step}: the pods share no storage; set spec.storage")

    def newest(self) -> Path | None:
        """Nothing was kept."""
        return None

    def load(self, folder: Path, spec_fingerprint: str) -> DriverState:
        """Nothing was kept.

        Raises:
            CheckpointError: always.
        """
        raise CheckpointError(f"{folder} (spec {spec_fingerprint}) is not resumed from: the pods share no storage; set spec.storage")


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

    def begin(self, step: int) -> Path:
        """An empty folder for the checkpoint after ``step`` steps.

        Raises:
            CheckpointError: the folder cannot be made, or (SupersededError) another driver owns the store.
        """
        self.check_owner()
        folder = self._folder(step)
        try:
            if folder.exists():
                shutil.rmtree(folder)
            (folder / POLICY_FOLDER).mkdir(parents=True)
        except OSError as error:
            raise _disk_error(folder, error) from error
        return folder

    def complete(self, folder: Path, state: DriverState) -> None:
        """Write the driver's state, then the mark, then remove what is too old.

        Raises:
            CheckpointError: the disk refuses, or (SupersededError) another driver owns the store.
        """
        self.check_owner()
        try:
            _write_synced(folder / STATE_FILE, json.dumps(asdict(state)))
            _write_synced(folder / MARK, f"{state.step}\n")
            complete = self._complete_folders()
            for folder_path in self.root.glob("step-*"):
                if folder_path not in complete[-self._keep :] and folder_path < folder:
                    shutil.rmtree(folder_path)
        except OSError as error:
            raise _disk_error(folder, error) from error

    def newest(self) -> Path | None:
        """The newest complete checkpoint."""
        complete = self._complete_folders()
        return complete[-1] if complete else None

    def load(self, folder: Path, spec_fingerprint: str) -> DriverState:
        """The driver's state in ``folder``.

        Raises:
            CheckpointError: unreadable, or written under a spec that differs where it must not.
        """
        try:
            raw = json.loads((folder / STATE_FILE).read_text())
            state = DriverState(done=tuple(raw.pop("done")), **raw)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"{folder / STATE_FILE} cannot be read: {error}; remove {folder} to resume from an older one") from error
        if state.spec_fingerprint != spec_fingerprint:
            raise CheckpointError(
                f"{folder} was written under another spec: model, data, seed, rollout sizes and trainer placement must stay the same "
                "(training.steps may grow); start again in another run folder (locally: --overwrite) or restore the spec"
            )
        return state

    def _folder(self, step: int) -> Path:
        return self.root / f"step-{step:06d}"

    def _complete_folders(self) -> list[Path]:
        return sorted(mark.parent for mark in self.root.glob(f"step-*/{MARK}"))


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _disk_error(folder: Path, error: OSError) -> CheckpointError:
    if error.errno == errno.ENOSPC:
        return CheckpointError(f"no space left for checkpoint {folder}; free some or set spec.checkpoint.path to another volume")
    return CheckpointError(f"checkpoint {folder} cannot be written: {error}")
