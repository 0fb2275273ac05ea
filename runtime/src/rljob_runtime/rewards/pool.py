"""All rewards of a job, each in a process that can do no harm: which score which sample, and what a sample's score is.

::

    requests ──tag──> rewards that apply ──> Crew of each isolation ──> Tally of each sample ──> RewardResult

One caller at a time drives ``score``.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rljob_runtime.errors import RewardSetupError
from rljob_runtime.records import RewardRequest, RewardResult
from rljob_runtime.rewards.config import Isolation, RewardConfig, check_rewards, check_tags
from rljob_runtime.rewards.crew import Crew, Item, Tally


class RewardPool:
    """Scores responses in child processes, ``num_workers`` for each isolation that the rewards need."""

    def __init__(
        self,
        configs: Sequence[RewardConfig],
        *,
        log_file: Path,
        num_workers: int = 1,
        folder: Path | None = None,
        startup_timeout_s: float = 120.0,
    ) -> None:
        """Start the processes and wait until every reward is loaded in each.

        ``log_file`` receives whatever user code prints; ``folder`` is the job file's, searched first for Function modules. Raises
        RewardSetupError when a reward cannot be loaded or a process is not ready within ``startup_timeout_s``.
        """
        check_rewards(configs)
        if num_workers < 1:
            raise RewardSetupError(f"rewards: num_workers is {num_workers}; it must be at least 1")
        self._configs = tuple(configs)
        self._lock = threading.Lock()
        self._closed = False
        self._by_tag: dict[str, tuple[int, ...]] = {}
        members: dict[Isolation, list[int]] = defaultdict(list)
        for number, config in enumerate(configs):
            members[config.isolation].append(number)
        self._crews: list[tuple[tuple[int, ...], Crew]] = []
        where = None if folder is None else str(folder.resolve())
        try:
            for numbers in members.values():
                crew = Crew(
                    [configs[n] for n in numbers],
                    log_file=log_file,
                    num_workers=num_workers,
                    folder=where,
                    startup_timeout_s=startup_timeout_s,
                )
                self._crews.append((tuple(numbers), crew))
            for _, crew in self._crews:
                crew.run(())
        except BaseException:
            self.close()
            raise

    @property
    def timeouts(self) -> int:
        """Evaluations that ran past their limit twice, so far."""
        return sum(crew.timeouts for _, crew in self._crews)

    @property
    def errors(self) -> int:
        """Evaluations that raised, gave no usable result or lost their process, so far."""
        return sum(crew.errors for _, crew in self._crews)

    @property
    def restarts(self) -> int:
        """Processes replaced so far."""
        return sum(crew.restarts for _, crew in self._crews)

    def describe_sandbox(self) -> str:
        """What keeps the processes in, as they found it on this machine."""
        return "; ".join(dict.fromkeys(crew.sandbox for _, crew in self._crews))

    def score(self, requests: Sequence[RewardRequest]) -> list[RewardResult]:
        """Return one result per request, in order.

        A sample that raises, hangs, kills its process or scores no finite number fails alone, or gets the score that its reward has for
        that. Raises RewardSetupError when a process cannot be replaced, or a prompt's tag has no reward.
        """
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("RewardPool.score is already running in another thread; score one batch at a time")
        try:
            if self._closed:
                raise RuntimeError("RewardPool.score was called after close")
            applicable = [self._applicable(request) for request in requests]
            tallies = [Tally() for _ in requests]
            for numbers, crew in self._crews:
                place = {number: position for position, number in enumerate(numbers)}
                todos = [tuple(place[n] for n in wanted if n in place) for wanted in applicable]
                crew.run(
                    Item(tally=tally, sample=_to_wire(request), todo=todo)
                    for request, tally, todo in zip(requests, tallies, todos, strict=True)
                    if todo and not tally.dropped
                )
        except BaseException:
            # Interrupted in the middle of a batch: what the processes still send belongs to no one.
            self.close()
            raise
        finally:
            self._lock.release()
        return [self._result(*each) for each in zip(requests, applicable, tallies, strict=True)]

    def close(self) -> None:
        """End all processes and what they started; may be called twice."""
        self._closed = True
        for _, crew in self._crews:
            crew.close()

    def __enter__(self) -> Self:
        """Return the pool."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close it."""
        self.close()

    def _applicable(self, request: RewardRequest) -> tuple[int, ...]:
        """Positions of the rewards that score a prompt, in the order of the spec."""
        tag = request.prompt.tag
        if tag not in self._by_tag:
            check_tags(self._configs, {tag: f"data source {request.prompt.source!r}"})
            self._by_tag[tag] = tuple(n for n, config in enumerate(self._configs) if config.applies_to(tag))
        return self._by_tag[tag]

    def _result(self, request: RewardRequest, applicable: tuple[int, ...], tally: Tally) -> RewardResult:
        used = [self._configs[n] for n in applicable]
        score = None if tally.dropped else sum(config.weight * tally.scores[config.name] for config in used)
        first = used[0]
        parts = {config.name: tally.scores[config.name] for config in used if config.name in tally.scores}
        return RewardResult(
            sample_id=request.sample_id,
            score=score,
            parts=parts | tally.extra,
            passed=score is not None and tally.scores[first.name] >= first.pass_threshold,
            error=tally.error,
            errors=tuple(tally.errors),
            timeouts=tuple(tally.timeouts),
            retries=tally.retries,
            elapsed_s=tally.elapsed_s,
        )


def _to_wire(request: RewardRequest) -> tuple[object, ...]:
    prompt = request.prompt
    return prompt.text, request.response_text, prompt.answer, dict(prompt.metadata)
