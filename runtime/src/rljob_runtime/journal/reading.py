"""Reads a journal's files and sums up what they say. Nothing here changes a file.

A file goes on where the one before it ended, or names what of the files before it goes on (``adopts``): the first file of a driver does,
for another one wrote those, and may have written more than this one knew of.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rljob_runtime.journal.frames import DamagedError, Frame, read_file

FORMAT = 2
"""Of the records; a journal of another one is not used."""
SUFFIX = ".journal"
_NAME = re.compile(r"\d+-\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopted:
    """What of earlier files goes on; the rest of them never was."""

    first_version: int = 0
    next_version: int = 0
    """Batches for the versions ``[first_version, next_version)``."""
    groups: frozenset[int] = frozenset()
    released: frozenset[int] = frozenset()

    def to_json(self) -> dict[str, Any]:
        """For a begin record."""
        return {"steps": [self.first_version, self.next_version], "groups": sorted(self.groups), "released": sorted(self.released)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A group that is not trained."""

    ending: str
    row: int
    """Step of the last row of metrics before it."""


@dataclass(slots=True)
class History:
    """The sum of all records, in order."""

    groups: dict[int, Frame] = field(default_factory=dict)
    """Finished groups, by id."""
    steps: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """Ids of each batch, by version."""
    released: dict[int, Release] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    """What could not be used, for users."""

    def apply(self, frame: Frame, wanted: Callable[[int], bool]) -> None:
        """Add a record; groups that are not wanted are passed over.

        Raises:
            DamagedError: the record lacks something.
        """
        content = frame.content
        try:
            if frame.kind == "group" and wanted(content["group"]):
                self.groups[content["group"]] = frame
            elif frame.kind == "step":
                self.steps[content["version"]] = tuple(content["groups"])
            elif frame.kind == "release" and wanted(content["group"]):
                self.released[content["group"]] = Release(ending=content["ending"], row=content["row"])
        except (KeyError, TypeError) as error:
            raise DamagedError(f"a record of kind {frame.kind!r} lacks {error}") from error

    def keep_only(self, adopted: dict[str, Any]) -> None:
        """Forget what the driver that began a file did not go on with.

        Raises:
            DamagedError: the record lacks something.
        """
        try:
            first, end = adopted["steps"]
            groups, released = set(adopted["groups"]), set(adopted["released"])
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"its first record lacks {error}") from error
        self.groups = {i: g for i, g in self.groups.items() if i in groups}
        self.steps = {v: ids for v, ids in self.steps.items() if first <= v < end}
        self.released = {i: r for i, r in self.released.items() if i in released}


def files_of(folder: Path) -> list[Path]:
    """A journal's files in the order in which they were begun."""
    return sorted((path for path in folder.glob(f"*{SUFFIX}") if _NAME.fullmatch(path.stem)), key=place_of)


def place_of(path: Path) -> tuple[int, int]:
    """Number of the driver that wrote a file of :func:`files_of`, and of the file among its own."""
    start, sequence = path.stem.split("-")
    return int(start), int(sequence)


def read_history(folder: Path, run: str, wanted: Callable[[int], bool]) -> History:
    """Everything a journal's files say that can be used.

    Args:
        folder: of the journal; may be missing.
        run: identity of the run; files of another one are passed over.
        wanted: whether a group, by id, is of interest; bodies of others are not kept in memory.
    """
    history = History()
    before: tuple[int, int] | None = None
    """Of the last file that was read to its end; after damage no file goes on but one that names what it goes on with."""
    damaged = False
    for path in files_of(folder):
        place = place_of(path)
        try:
            frames = read_file(path)
            begin = next(frames, None)
            if begin is None:  # killed while it was begun: nothing else is in it
                continue
            if not _is_ours(begin, run):
                history, before = History(problems=[*history.problems, f"{path.name} is of another spec or data"]), None
                continue
            adopted = begin.content.get("adopts")
            if adopted is not None:
                history.keep_only(adopted)
                damaged = False
            elif damaged or (before is not None and place != (before[0], before[1] + 1)):
                damaged = True
                continue
            _apply_all(frames, history, wanted)
            before = place
        except (DamagedError, OSError) as error:
            damaged = True
            history.problems.append(f"{path.name}: {error}; what follows is not used")
    return history


def _is_ours(begin: Frame, run: str) -> bool:
    """Whether a file's first record is that of this run, in a format that is known."""
    content = begin.content
    return begin.kind == "begin" and content.get("format") == FORMAT and content.get("run") == run


def _apply_all(frames: Iterator[Frame], history: History, wanted: Callable[[int], bool]) -> None:
    for frame in frames:
        history.apply(frame, wanted)
