"""Which prompts are in flight, which are done, and where a resumed run has to begin again."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from rljob_runtime.records import Prompt


class Prompts(Protocol):
    """An endless supply of prompts whose position can be saved; ``Prompt.index`` grows along it."""

    def next(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts."""

    def state(self) -> dict[str, object]:
        """Its position, JSON-able."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """Where a resumed run continues in the order of prompts: what was admitted and is neither done nor recovered is asked again (ONCE)."""

    source_state: Mapping[str, object]
    """Position of the source, at or before the oldest prompt that is not done."""
    first_prompt: int
    """Index of the first prompt that it gives from there."""
    done: tuple[int, ...]
    """Indexes of prompts after that position that were trained or dropped already."""


class PromptOrder:
    """Gives each prompt once; what it keeps grows with the prompts in flight, not with the run."""

    def __init__(self, prompts: Prompts, *, first_prompt: int, done: Iterable[int]) -> None:
        """Begin at a :class:`ResumePoint`, or at the first prompt."""
        self._prompts = prompts
        self._done = set(done)
        self._in_flight: set[int] = set()
        self._newest = first_prompt - 1
        """Index of the last prompt that the source gave."""
        self._positions: deque[tuple[int, Mapping[str, object]]] = deque([(first_prompt, prompts.state())])
        """Of the source, each with the index of the next prompt there."""

    @property
    def in_flight(self) -> Collection[int]:
        """Indexes of the prompts that were given, or restored, and are not done."""
        return self._in_flight

    def restore(self, in_flight: Iterable[int], done: Iterable[int]) -> None:
        """Prompts that an earlier attempt was given after the point from which this one goes on: they are not given again."""
        self._in_flight.update(in_flight)
        self._done.update(done)

    def next(self, count: int) -> list[Prompt]:
        """The next prompts that are neither in flight nor done; they are in flight from now on."""
        prompts: list[Prompt] = []
        while len(prompts) < count:
            position = self._prompts.state()
            taken = self._prompts.next(count - len(prompts))
            self._positions.append((taken[0].index, position))
            self._newest = taken[-1].index
            prompts += [p for p in taken if p.index not in self._done and p.index not in self._in_flight]
        self._in_flight.update(p.index for p in prompts)
        return prompts

    def end(self, index: int) -> None:
        """A prompt in flight is done."""
        self._in_flight.remove(index)
        self._done.add(index)

    def forget_passed(self) -> None:
        """Let go of what lies before all that is in flight, which no checkpoint needs; O(prompts in flight)."""
        oldest = min(self._in_flight, default=None)
        if oldest is None:
            self._positions.clear()
            self._done = {i for i in self._done if i > self._newest}  # a resumed source has yet to pass these
            return
        while len(self._positions) > 1 and self._positions[1][0] <= oldest:
            self._positions.popleft()
        self._done = {i for i in self._done if i >= self._positions[0][0]}

    def resume_point(self) -> ResumePoint:
        """What a checkpoint must remember; O(prompts in flight)."""
        self.forget_passed()
        done = tuple(sorted(self._done))
        if not self._positions:
            return ResumePoint(source_state=self._prompts.state(), first_prompt=self._newest + 1, done=done)
        first, state = self._positions[0]
        return ResumePoint(source_state=state, first_prompt=first, done=done)
