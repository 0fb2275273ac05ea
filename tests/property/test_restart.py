"""ONCE, BOUND and EXACT for a driver that is killed at any moment, once or several times: what was finished is trained, nothing twice."""

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rljob_runtime.journal.opening import OpenedJournal, open_journal
from rljob_runtime.journal.reading import files_of, read_history
from rljob_runtime.journal.replay import Bounds, StartingPoint
from rljob_runtime.journal.writing import JournalWriter
from rljob_runtime.overlap.buffer import Group
from tests.support.episode_runs import EpisodeAttempt
from tests.support.overlap_runs import Attempt, Checkpoint, Scenario, scenarios
from tests.support.virtual_time import run_until_killed, run_virtual


@dataclass
class Disk:
    """Writes late, and in the middle of a record when the process is killed."""

    folder: Path
    rng: random.Random
    waiting: list[Callable[[], None]] = field(default_factory=list)
    killed: bool = False

    def submit(self, work: Callable[[], None]) -> None:
        if self.killed:
            return
        self.waiting.append(work)
        for _ in range(self.rng.randint(0, 3)):
            self._write_one()

    def close(self) -> None:
        while self.waiting:
            self._write_one()

    def kill(self) -> None:
        """A part of what was to be written next is there, the rest never."""
        before = {path: path.stat().st_size for path in files_of(self.folder)}
        self._write_one()
        self.killed = True
        self.waiting.clear()
        for path in files_of(self.folder)[-1:]:
            size = path.stat().st_size
            with path.open("r+b") as file:
                file.truncate(self.rng.randint(before.get(path, 0), size))

    def _write_one(self) -> None:
        if self.waiting:
            self.waiting.pop(0)()


def opened(folder: Path, scenario: Scenario, start: Checkpoint | None, disk: Disk) -> OpenedJournal:
    point = StartingPoint(
        version=start.step if start else 0, first_prompt=start.point.first_prompt if start else 0, done=start.point.done if start else ()
    )
    bounds = Bounds(groups_per_step=scenario.batch, total_steps=scenario.steps, max_staleness=scenario.bound)
    return open_journal(folder, "run", point, bounds, disk)


def asked(attempt: Attempt) -> set[int]:
    """Prompts that engines were given."""
    return {int(request.request_id.split("/")[0]) for engine in attempt.engines for request in engine.seen}


@dataclass
class Job:
    """All attempts, and what may be asked of any sequence of them."""

    folder: Path
    scenario: Scenario
    every: int
    attempts: list[Attempt] = field(default_factory=list)
    attempt: type[Attempt] = Attempt
    """Of responses, or of episodes."""
    finished: dict[int, Group] = field(default_factory=dict)
    """Groups of which the files say that they are finished, as they were first taken over."""
    checkpoint: Checkpoint | None = None
    journals: list[tuple[Disk, JournalWriter]] = field(default_factory=list)

    def close(self) -> None:
        """Let go of the files of dead processes."""
        for disk, journal in self.journals:
            disk.killed = False
            journal.close()

    def run(self, kill_after: int | None) -> bool:
        """One more attempt; whether it was killed."""
        disk = Disk(self.folder, random.Random(self.scenario.seed + len(self.attempts)))
        on_disk = self._on_disk()
        journal = opened(self.folder, self.scenario, self.checkpoint, disk)
        assert journal.problems == ()
        self.journals.append((disk, journal.journal))
        recovered = journal.recovered
        ids = {group.group_id for group in recovered.groups}
        assert ids == on_disk, "something that is on disk is not used"
        for group in recovered.groups:
            kept = self.finished.setdefault(group.group_id, group)
            assert group == kept
        attempt = self.attempt(self.scenario, start=self.checkpoint, every=self.every, journal=journal.journal, recovered=recovered)
        self.attempts.append(attempt)
        killed = False
        if kill_after is None:
            run_virtual(attempt.train(self.scenario.steps))
            journal.journal.close()
        else:
            killed = run_until_killed(attempt.train(self.scenario.steps), kill_after, disk.kill)
        for checkpoint in attempt.checkpoints:
            self.checkpoint = checkpoint
        attempt.check()
        assert asked(attempt).isdisjoint(ids | recovered.released.keys()), "a finished prompt was asked again"
        for version, batch in recovered.batches.items():
            if version in attempt.taken:
                assert attempt.taken[version] == list(batch), "another batch than before"
        return killed

    def _on_disk(self) -> set[int]:
        """Finished groups that the checkpoint does not have and that were not released."""
        point = self.checkpoint.point if self.checkpoint else None
        history = read_history(self.folder, "run", lambda i: point is None or (i >= point.first_prompt and i not in point.done))
        return history.groups.keys() - history.released.keys()

    def timeline(self) -> list[int]:
        """Prompts of the batches that count: a checkpoint ends what came before it."""
        starts = [attempt.start.step if attempt.start else 0 for attempt in self.attempts]
        steps: dict[int, list[int]] = {}
        for attempt, start in zip(self.attempts, starts, strict=True):
            steps = {step: prompts for step, prompts in steps.items() if step < start}
            steps |= {step: [group.group_id for group in attempt.taken[step]] for step in attempt.taken}
        return [prompt for step in sorted(steps) for prompt in steps[step]]


@settings(max_examples=100, deadline=None)
@given(scenario=scenarios(), every=st.integers(1, 4), kills=st.lists(st.integers(1, 250), min_size=1, max_size=3))
def test_a_driver_killed_at_any_moment_trains_each_finished_group_once(scenario: Scenario, every: int, kills: list[int]) -> None:
    run_and_check(Attempt, scenario, every, kills)


@settings(max_examples=40, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])  # a long run shrinks for minutes
@given(scenario=scenarios(), every=st.integers(1, 4), kills=st.lists(st.integers(1, 2500), min_size=1, max_size=3))
def test_a_driver_killed_at_any_moment_trains_each_finished_episode_once(scenario: Scenario, every: int, kills: list[int]) -> None:
    run_and_check(EpisodeAttempt, scenario, every, kills)


def run_and_check(attempt: type[Attempt], scenario: Scenario, every: int, kills: list[int]) -> None:
    """Kill it after so many rounds of the event loop, one attempt after the other; the last one ends."""
    with TemporaryDirectory() as folder, ExitStack() as cleaning:
        job = Job(Path(folder), scenario, every, attempt=attempt)
        cleaning.callback(job.close)
        for rounds in kills:
            if not job.run(rounds):
                break
        job.run(None)
        last = job.attempts[-1]
        prompts = job.timeline()
        assert len(set(prompts)) == len(prompts) == scenario.batch * scenario.steps
        point = last.scheduler.resume_point()
        # a group that ended between a checkpoint and the row of its step is counted there, and again if the journal had not got it
        counted = len(prompts) + last.released - (point.first_prompt + len(point.done))
        starts = [attempt.start for attempt in job.attempts if attempt.start]
        assert 0 <= counted <= sum(start.reported - start.released for start in starts)
