"""What a cluster has started and made, on disk, so that another process can stop exactly that.

The rule that makes a crash harmless: a thing is written down before it is made, or (a process) in the same step.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from e2e.cluster.errors import ClusterError
from e2e.cluster.procfs import ProcessIdentity
from e2e.cluster.versions import Mode

_FORMAT = 1
_LOCK_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRecord:
    """A process that was started."""

    name: str
    """Program, unique in its cluster; its log is ``logs/<name>.log``."""
    identity: ProcessIdentity
    """Which process exactly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Everything that :mod:`e2e.cluster.cleanup` has to undo."""

    mode: Mode
    """What was asked for."""
    token: str = field(default_factory=lambda: secrets.token_hex(16))
    """In the environment of every process that was started, and inherited by what they start: finds those that no record names."""
    holder: ProcessIdentity | None = None
    """Process without which the cluster is of no use (a test run); None for a cluster that stays until ``down``."""
    ports: Mapping[str, int] = field(default_factory=dict)
    """Listening ports by name."""
    processes: tuple[ProcessRecord, ...] = ()
    """In the order they were started."""
    bridge: str | None = None
    """Network bridge that was made."""
    nft_tables: tuple[str, ...] = ()
    """Packet filter tables that did not exist before, as ``family name``."""
    sysctls: Mapping[str, str] = field(default_factory=dict)
    """Kernel settings as they were before."""
    cgroups: tuple[str, ...] = ()
    """Control group folders that did not exist before."""

    def to_json(self) -> str:
        """The state as text."""
        return json.dumps({"format": _FORMAT, **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> State:
        """The reverse of :meth:`to_json`.

        Raises:
            ValueError: not a state of this format.
        """
        data: dict[str, Any] = json.loads(text)
        found = data.pop("format", None)
        if found != _FORMAT:
            raise ValueError(f"format {found!r}, this version reads {_FORMAT}")
        processes = tuple(ProcessRecord(name=p["name"], identity=ProcessIdentity(**p["identity"])) for p in data.pop("processes"))
        holder = data.pop("holder")
        return cls(
            **{
                **data,
                "mode": Mode(data["mode"]),
                "holder": ProcessIdentity(**holder) if holder else None,
                "processes": processes,
                "nft_tables": tuple(data["nft_tables"]),
                "cgroups": tuple(data["cgroups"]),
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StateFolder:
    """One cluster's folder: state, certificates, configuration, logs, data."""

    path: Path

    @property
    def file(self) -> Path:
        """The state itself."""
        return self.path / "state.json"

    @property
    def kubeconfig(self) -> Path:
        """Administrator's kubeconfig."""
        return self.path / "kubeconfig"

    @property
    def logs(self) -> Path:
        """One file per program."""
        return self.path / "logs"

    def log(self, name: str) -> Path:
        """Log file of a program."""
        return self.logs / f"{name}.log"

    def folder(self, name: str) -> Path:
        """A folder inside, made if need be."""
        path = self.path / name
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def create(self, state: State) -> None:
        """Make the folder, readable by its owner only, with a first state.

        Raises:
            ClusterError: something is there already, or the parent belongs to somebody else.
        """
        if self.path.exists():
            raise ClusterError(f"{self.path} exists already. Remedy: python -m e2e.cluster down --name {self.path.name}")
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = self.path.parent.stat().st_uid
        if owner not in (os.geteuid(), 0):
            raise ClusterError(f"{self.path.parent} belongs to user {owner}, not to user {os.geteuid()}; remove it or set RLJOB_E2E_STATE")
        self.path.mkdir(mode=0o700)
        self.logs.mkdir()
        self.save(state)

    def load(self) -> State | None:
        """The state, or None where there is no cluster.

        Raises:
            ClusterError: the file cannot be read as a state.
        """
        try:
            text = self.file.read_text()
        except FileNotFoundError:
            return None
        try:
            return State.from_json(text)
        except (ValueError, KeyError, TypeError) as error:
            raise ClusterError(f"{self.file}: {error}. Remedy: stop what is left by hand, then delete {self.path}") from error

    def require(self) -> State:
        """The state.

        Raises:
            ClusterError: there is no cluster here, or its state cannot be read.
        """
        state = self.load()
        if state is None:
            raise ClusterError(f"no cluster called {self.path.name!r} in {self.path.parent}. Remedy: python -m e2e.cluster up (or api)")
        return state

    def save(self, state: State) -> None:
        """Replace the state in one step: a reader, or a crash, sees the old one or the new one."""
        unfinished = self.file.with_suffix(".new")
        unfinished.write_text(state.to_json())
        unfinished.rename(self.file)

    def update(self, **changes: object) -> State:
        """Change some fields of the state on disk; returns the new state.

        Raises:
            ClusterError: there is no state.
        """
        state = dataclasses.replace(self.require(), **changes)  # type: ignore[arg-type]
        self.save(state)
        return state

    @contextmanager
    def lock(self, *, deadline_s: float) -> Iterator[None]:
        """One ``up`` or ``down`` at a time.

        Raises:
            ClusterError: another one still holds the lock at the deadline.
        """
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = self.path.with_name(f"{self.path.name}.lock")
        end_s = time.monotonic() + deadline_s
        while True:
            with file.open("w") as handle:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    if time.monotonic() > end_s:
                        raise ClusterError(f"another up or down of {self.path.name!r} has held {file} for {deadline_s:g} s") from error
                else:
                    if _is_at(handle.fileno(), file):
                        yield
                        return
            time.sleep(_LOCK_POLL_S)

    def remove_lock_file(self) -> None:
        """Leave nothing behind; call it with the lock held, whoever waits for it notices and makes another file."""
        self.path.with_name(f"{self.path.name}.lock").unlink(missing_ok=True)


def _is_at(handle: int, path: Path) -> bool:
    """Whether the open file is still the one that lies at ``path``."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False


def all_folders(root: Path) -> list[StateFolder]:
    """Every cluster below ``root``, by name."""
    if not root.is_dir():
        return []
    return [StateFolder(path=path) for path in sorted(root.iterdir()) if path.is_dir()]
