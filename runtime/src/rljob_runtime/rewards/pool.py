"""All rewards of a job, each in a process that can do no harm: which score which sample, and what a sample's score is.

::

    requests ──tag──> rewards that apply ──> Crew of each isolation ──> Tally of each sample ──> RewardResult

One caller at a time drives ``score``.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rljob_runtime.errors import RewardSetupError
from rljob_runtime.records import Judgement, RewardRequest, RewardResult
from rljob_runtime.rewards.config import Isolation, RewardConfig, check_rewards, check_tags
from rljob_runtime.rewards.crew import Crew, Item, Tally

Judgements = Mapping[str, Judgement]
"""What judges said of one response, by the name of the reward that asked."""


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
        self._unanswered = 0
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
        """Evaluations that raised, gave no usable result, lost their process or had no answer of their judge, so far."""
        return self._unanswered + sum(crew.errors for _, crew in self._crews)

    @property
    def restarts(self) -> int:
        """Processes replaced so far."""
        return sum(crew.restarts for _, crew in self._crews)

    def describe_sandbox(self) -> str:
        """A line on what keeps the processes in, as they found it on this machine."""
        return f"scoring processes are sandboxed by {'; '.join(dict.fromkeys(crew.sandbox for _, crew in self._crews))}"

    def judges_of(self, request: RewardRequest) -> tuple[RewardConfig, ...]:
        """Rewards that ask a judge about a response; any thread may call.

        Raises:
            RewardSetupError: its prompt's tag has no reward.
        """
        return tuple(self._configs[n] for n in self._applicable(request) if self._configs[n].judge is not None)

    def score(self, requests: Sequence[RewardRequest], judgements: Sequence[Judgements] | None = None) -> list[RewardResult]:
        """Return one result per request, in order.

        ``judgements`` are those of each request; a reward with a judge that has none scores 0, because the part of the response that it
        judges is not there. A sample that raises, hangs, kills its process or scores no finite number fails alone, or gets the score that
        its reward has for that. Raises RewardSetupError when a process cannot be replaced, or a prompt's tag has no reward.
        """
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("RewardPool.score is already running in another thread; score one batch at a time")
        try:
            if self._closed:
                raise RuntimeError("RewardPool.score was called after close")
            applicable = [self._applicable(request) for request in requests]
            judged = judgements if judgements is not None else [{}] * len(requests)
            tallies = [Tally() for _ in requests]
            for wanted, said, tally in zip(applicable, judged, tallies, strict=True):
                self._settle_unread(wanted, said, tally)
            for numbers, crew in self._crews:
                place = {number: position for position, number in enumerate(numbers)}
                todos = [
                    tuple(place[n] for n in wanted if n in place and self._configs[n].name not in tally.scores)
                    for wanted, tally in zip(applicable, tallies, strict=True)
                ]
                crew.run(
                    Item(tally=tally, sample=_to_wire(request), todo=todo, said=self._words(numbers, said))
                    for request, tally, todo, said in zip(requests, tallies, todos, judged, strict=True)
                    if todo and not tally.dropped
                )
        except BaseException:
            # Interrupted in the middle of a batch: what the processes still send belongs to no one.
            self.close()
            raise
        finally:
            self._lock.release()
        return [self._result(*each) for each in zip(requests, applicable, tallies, judged, strict=True)]

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

    def _settle_unread(self, applicable: tuple[int, ...], judgements: Judgements, tally: Tally) -> None:
        """Scores of rewards whose judge said nothing: it was not asked, or failed."""
        for config in (self._configs[n] for n in applicable if self._configs[n].judge is not None):
            judgement = judgements.get(config.name)
            if judgement is None:
                tally.scores[config.name] = 0.0
            elif judgement.error is not None:
                self._unanswered += 1
                tally.failed(config, f"reward {config.name!r}: {judgement.error}")

    def _words(self, numbers: tuple[int, ...], judgements: Judgements) -> Mapping[int, str]:
        """What judges said, by the position of their reward in a crew."""
        if not judgements:
            return {}
        names = {self._configs[n].name: position for position, n in enumerate(numbers)}
        return {names[name]: judgement.text for name, judgement in judgements.items() if name in names}

    def _result(self, request: RewardRequest, applicable: tuple[int, ...], tally: Tally, judgements: Judgements) -> RewardResult:
        used = [self._configs[n] for n in applicable]
        score = None if tally.dropped else sum(config.weight * tally.scores[config.name] for config in used)
        first = used[0]
        return RewardResult(
            sample_id=request.sample_id,
            score=score,
            parts=tally.scores if tally.extra is None else tally.scores | tally.extra,
            passed=score is not None and tally.scores[first.name] >= first.pass_threshold,
            error=tally.error,
            errors=tally.errors,
            timeouts=tally.timeouts,
            retries=tally.retries,
            elapsed_s=tally.elapsed_s,
            judgements=tuple(judgements.values()),
        )


def _to_wire(request: RewardRequest) -> tuple[object, ...]:
    prompt = request.prompt
    return prompt.text, request.response_text, prompt.answer, dict(prompt.metadata)
