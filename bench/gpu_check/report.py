"""What has been measured so far: each line is shown and written as it comes, so that whatever ends the program takes none of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu_check.lines import Line
from bench.gpu_check.terminal import Screen, write_json


class Report:
    """The lines, and what is under way."""

    def __init__(self, facts: Mapping[str, Any], file: Path | None, screen: Screen, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing is measured.

        Args:
            facts: what is measured on, for the file.
            file: where the lines are written as JSON; None writes none.
            screen: where they are shown.
            clock: monotonic seconds.
        """
        self.lines: list[Line] = []
        self._facts, self._file, self._screen, self._clock = facts, file, screen, clock
        self._started_s = self._since_s = clock()
        self._check = self._stage = ""
        self._shown = 0

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return self._clock() - self._started_s

    def begin(self, check: str) -> None:
        """A check begins."""
        self._check, self._stage, self._since_s = check, "", self._clock()
        self._screen.begin(check)
        self._write()

    def stage(self, what: str) -> None:
        """What the check does from now on."""
        self._stage, self._since_s = what, self._clock()
        self._screen.stage(self._check, what)
        self._write()

    def add(self, line: Line) -> None:
        """A line of the check."""
        self.lines.append(line)
        self._stage, self._since_s = f"what follows {line.what!r}", self._clock()
        self._show()
        self._write()

    def end(self) -> None:
        """All checks are done."""
        self._check = ""
        self._write()

    def cut_off(self, why: str, not_begun: Sequence[str]) -> None:
        """One line for the check under way, if there is one, and one for each that has not begun."""
        self._show()  # one that came at that very moment
        if self._check:
            under_way = f"{self._stage or 'its beginning'}, {self._clock() - self._since_s:.0f} s of it"
            self.add(Line(check=self._check, what="cut off", skipped=f"cut off ({why}); under way: {under_way}"))
        for name in not_begun:
            self.add(Line(check=name, what="skipped", skipped=f"not begun ({why})"))
        self.end()

    def _show(self) -> None:
        while self._shown < len(self.lines):
            self._screen.show(self.lines[self._shown])
            self._shown += 1

    def _write(self) -> None:
        if self._file is None:
            return
        facts = {**self._facts, "seconds": self.seconds}
        if self._check:
            facts["under_way"] = {"check": self._check, "what": self._stage}
        write_json(self._file, facts, self.lines)
