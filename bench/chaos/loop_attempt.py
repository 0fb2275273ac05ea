"""One attempt of a job in a process of its own: the real driver, journal and checkpoints over scripted workers, and faults in it.

``python -m bench.chaos.loop_attempt`` forks such a process for every line of its standard input, so that none imports anything, and
answers with its exit code. What an attempt did is in files that survive SIGKILL: ``trained.jsonl``, ``faults.jsonl``, ``end.json``.
"""

from __future__ import annotations

import asyncio
import errno
import io
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any, cast

from rljob_runtime.checkpoint_files import FileSum
from rljob_runtime.cluster.protocol import Worker
from rljob_runtime.errors import CorruptedWeightsError, Interrupted, RuntimeFault, WorkerLostError
from rljob_runtime.journal.opening import open_journal
from rljob_runtime.journal.replay import Bounds, StartingPoint
from rljob_runtime.loop import checkpointing
from rljob_runtime.loop.checkpointing import CheckpointStore
from rljob_runtime.loop.driver import Driver, LoopConfig
from rljob_runtime.loop.replacement import ReplacementLimits
from rljob_runtime.loop.supervisor import EngineSupervisor
from rljob_runtime.packed import RewardBatch
from rljob_runtime.records import RewardResult
from rljob_runtime.report import FolderMode, PlainDisplay, Reporter, RunFolder, RunInfo
from tests.support.fake_workers import CountingPrompts, CountingTrainer, ScriptedRewards, ServingEngine
from tests.support.job_workers import make_job_workers
from tests.support.loop_parts import make_parts
from tests.support.rollouts import make_gate, make_scheduler

TRAINED, FAULTS, END, REFUSED = "trained.jsonl", "faults.jsonl", "end.json", "refused.jsonl"
FIRST_PROMPT_TOKEN = 1000
"""A response's first token is this plus the index of its prompt, so that the trainer's batches show what they hold."""
STALL_S = 0.2
SYNC_S = 2.0
"""Deadline of a weight sync: a worker that never answers costs this long."""
DEADLINE_S = 60.0
INTERRUPTED, FAULT = 10, 11
"""Exit codes."""
ON_CALL = (
    "trainer lost in a step", "trainer lost in a sync", "trainer lost in a checkpoint", "reward worker lost", "rewards fail",
    "engine serves an old version", "corrupted bucket", "disk full at a checkpoint",
)  # fmt: skip
"""Kinds that a call meets."""
ENGINE_KINDS = ("engine process dies", "engine thread ends", "engine stalls")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A job, and what happens to it."""

    seed: int
    steps: int
    batch: int
    lag: float
    engines: int
    every: int
    """Steps between checkpoints."""
    faults: tuple[tuple[str, int, int, int], ...]
    """(kind, steps trained before it, passes of the event loop after that, engine)."""


@dataclass(kw_only=True)
class World:
    """The workers of an attempt, and hands that break them."""

    root: Path
    case: Case
    engines: Sequence[Engine]
    trainer: CountingTrainer
    stop: asyncio.Event
    store: CheckpointStore
    armed: dict[str, list[int]] = field(default_factory=dict)
    """Kind -> faults that the next calls meet."""

    def take(self, kind: str) -> bool:
        """Whether the call under way is to fail."""
        numbers = self.armed.get(kind)
        if not numbers:
            return False
        self._write_down(numbers.pop(0))
        return True

    def _write_down(self, number: int) -> None:
        append(self.root / FAULTS, {"number": number, "kind": self.case.faults[number][0], "at_s": time.monotonic()})

    async def inject(self, number: int) -> None:
        """Wait for the moment, write the fault down and do it, or have the next call meet it."""
        kind, step, passes, index = self.case.faults[number]
        while self.trainer.updates < step:
            await asyncio.sleep(0.0005)
        for _ in range(passes):
            await asyncio.sleep(0)
        if kind in ON_CALL:
            self.armed.setdefault(kind, []).append(number)
            return
        self._write_down(number)
        engine = self.engines[index % len(self.engines)]
        hands = {
            "driver killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
            "engine process dies": engine.die,
            "engine thread ends": lambda: setattr(engine, "failed", True),
            "engine stalls": lambda: setattr(engine, "stalled", True),
            "trainer process lost": self.trainer.lost.set,
            "pod of the trainer drained": self.trainer.draining.set,
            "driver asked to end": self.stop.set,
            "another driver takes over": lambda: CheckpointStore(self.store.root, keep=2).take("another driver"),
            "journal's disk fails": self._break_journal,
        }
        hands[kind]()

    def _break_journal(self) -> None:
        shutil.rmtree(self.root / "run" / "journal", ignore_errors=True)
        (self.root / "run" / "journal").write_text("a file is in the way")


class Trainer(CountingTrainer):
    """Writes down what it trains."""

    def __init__(self, root: Path, attempt: int) -> None:
        super().__init__()
        self._file, self._attempt = root / TRAINED, attempt
        self.world: World

    def train_step(self, batches: Sequence[Any], step: int) -> dict[str, float]:
        if self.world.take("trainer lost in a step"):
            raise WorkerLostError(self.name, "signal 9", self.log_file)
        found = sorted(int(t) - FIRST_PROMPT_TOKEN for b in batches for t in b.token_ids if t >= FIRST_PROMPT_TOKEN)
        row = {"attempt": self._attempt, "step": step, "prompts": found, "at_s": time.monotonic()}
        metrics = super().train_step(batches, step)
        append(self._file, row)
        return metrics

    def send_weights(self, version: int, part: int) -> Any:
        if self.world.take("trainer lost in a sync"):
            raise WorkerLostError(self.name, "signal 9", self.log_file)
        return super().send_weights(version, part)


class Engine(ServingEngine):
    """Tokens that tell the prompt; takes part in syncs that fail."""

    world: World

    def die(self) -> None:
        """As a process that is killed."""
        self.dead = True
        self.lost.set()

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        return await self.start(method, *args).result(timeout_s)

    def load_bucket(self, index: int, data: Any) -> None:
        if self.world.take("corrupted bucket"):
            raise CorruptedWeightsError(f"{self.name}: the checksum of bucket {index} differs")
        super().load_bucket(index, data)

    def finish_update(self, timeout_s: float, on_running: str) -> int:
        if self.world.take("engine serves an old version"):
            return self.version
        return super().finish_update(timeout_s, on_running)


class Rewards(ScriptedRewards):
    """Refuses samples, or is gone, when the case says so."""

    def __init__(self, root: Path) -> None:
        super().__init__()
        self._file = root / REFUSED
        self.world: World

    async def score(self, batch: RewardBatch) -> list[RewardResult]:
        if self.world.take("reward worker lost"):
            raise WorkerLostError("reward-0", "signal 9", "reward.log")
        if self.world.take("rewards fail"):
            append(self._file, sorted({int(name.split("/")[0]) for name in batch.sample_ids}))
            return [RewardResult(sample_id=name, score=None, error="injected") for name in batch.sample_ids]
        return await super().score(batch)


def append(path: Path, row: Any) -> None:
    """One line, whole or not at all, that outlives the process."""
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(row).encode() + b"\n")


def rows(path: Path) -> list[Any]:
    """What :func:`append` wrote."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def drive(root: Path, case: Case, attempt: int) -> None:
    """Go on from the run folder, as an attempt does."""
    folder = RunFolder.open(root / "run", FolderMode.RESUME if attempt else FolderMode.NEW)
    store = CheckpointStore(folder.checkpoints, keep=2)
    chosen = store.choose({"seed": "f"})
    newest, state = chosen.folder, chosen.state
    store.take(f"attempt {attempt}")
    start, first_prompt, done = (state.step, state.first_prompt, state.done) if state else (0, 0, ())
    trainer = Trainer(root, attempt)
    if newest is not None:
        trainer.updates = int((newest / checkpointing.POLICY_FOLDER / "updates").read_text())
    tokens_of = lambda request: (FIRST_PROMPT_TOKEN + int(request.request_id.split("/")[0]), 8)  # noqa: E731
    engines: list[Engine] = []
    for index in range(case.engines):
        engine = Engine(f"engine-{index}", seed=case.seed * 31 + attempt * 7 + index)
        engine._tokens_of = tokens_of
        engines.append(engine)
    rewards, prompts = Rewards(root), CountingPrompts()
    prompts.handed_out = int(str(state.source_state["next"])) if state else 0
    world = World(root=root, case=case, engines=engines, trainer=trainer, stop=asyncio.Event(), store=store)
    trainer.world = rewards.world = Engine.world = world
    _fill_disks(world)
    if (root / "run" / "journal").is_file():
        (root / "run" / "journal").unlink()  # the next attempt's disk works
    point = StartingPoint(version=start, first_prompt=first_prompt, done=done)
    opened = open_journal(
        folder.journal, "run", point, Bounds(groups_per_step=case.batch, total_steps=case.steps, max_staleness=ceil(case.lag))
    )
    info = RunInfo(job_name="chaos", model="m", algorithm="-", devices="-", total_steps=case.steps, seed=0, spec_yaml="a: 1\n")
    display = PlainDisplay(io.StringIO(), clock=time.monotonic)
    injected = {row["number"] for row in rows(root / FAULTS)}
    with Reporter(folder, info, display, resumed_step=start or None, packages={}, ticker=False) as reporter:
        supervisor = _supervisor(engines, reporter)
        scheduler = make_scheduler(
            engines,
            make_gate(case.batch, case.lag, case.steps, version=start),
            fleet={"stall_timeout_s": STALL_S},
            prompts=prompts,
            log=opened.journal,
            first_prompt=first_prompt,
            done=done,
            on_lost=supervisor.lost,
            score=rewards.score,
        )
        scheduler.restore(opened.recovered)
        workers = make_job_workers(trainer=[trainer], rollout=engines)
        parts = make_parts(
            workers, scheduler, supervisor, reporter, checkpoints=store, journal=opened.journal, timeout_s=SYNC_S
        )  # fmt: skip
        hands = [asyncio.ensure_future(world.inject(number)) for number in range(len(case.faults)) if number not in injected]
        try:
            await Driver(parts, _config(case), start_step=start, stop=world.stop).run()
        finally:
            for hand in hands:
                hand.cancel()
    (root / END).write_text(json.dumps({"updates": trainer.updates}))


def _config(case: Case) -> LoopConfig:
    return LoopConfig(
        total_steps=case.steps, groups_per_step=case.batch, step_timeout_s=DEADLINE_S, take_timeout_s=DEADLINE_S,
        checkpoint_every_steps=case.every, spec_fingerprint={"seed": "f"},
    )  # fmt: skip


def _supervisor(engines: Sequence[Engine], reporter: Reporter) -> EngineSupervisor:
    async def start(index: int, timeout_s: float) -> None:
        await asyncio.sleep(0.01)
        engines[index].restart()

    async def end(index: int) -> None:
        engines[index].dead = True

    limits = ReplacementLimits(max_restarts=1, start_timeout_s=DEADLINE_S, weights_timeout_s=DEADLINE_S)
    return EngineSupervisor(cast("Sequence[Worker]", engines), start=start, end=end, limits=limits, notify=reporter.event)


def _fill_disks(world: World) -> None:
    """Have the next write of a checkpoint's state, or of the policy, find no space when the case says so."""
    write, finish = checkpointing._write_synced, world.trainer.finish_checkpoint

    def write_synced(path: Path, text: str) -> None:
        if path.name != checkpointing.OWNER_FILE and world.take("disk full at a checkpoint"):
            path.write_text(text[: len(text) // 2])
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        write(path, text)

    def finish_checkpoint(timeout_s: float) -> tuple[FileSum, ...]:
        if world.take("trainer lost in a checkpoint"):
            folder, _ = world.trainer._copied
            (folder / "updates").write_text("")
            raise WorkerLostError(world.trainer.name, "signal 9", world.trainer.log_file)
        return finish(timeout_s)

    checkpointing._write_synced = write_synced
    world.trainer.finish_checkpoint = finish_checkpoint  # type: ignore[method-assign]


def attempt(root: Path, case: Case, number: int) -> int:
    """Run one attempt to its end; its exit code."""
    try:
        asyncio.run(drive(root, case, number))
    except RuntimeFault as error:
        text = {"error": type(error).__name__, "reason": error.reason, "retryable": error.retryable, "message": str(error)}
        (root / END).write_text(json.dumps(text))
        return FAULT
    except Interrupted as error:
        (root / END).write_text(json.dumps({"error": type(error).__name__, "reason": "", "retryable": True, "message": str(error)}))
        return INTERRUPTED
    except Exception as error:  # noqa: BLE001 - reported as a finding, whatever it is
        (root / END).write_text(json.dumps({"error": type(error).__name__, "reason": "", "retryable": False, "message": str(error)}))
        return 1
    return 0


def serve() -> None:
    """Fork an attempt for every line, end it at its deadline, answer with its exit code."""
    from rljob_runtime.report import html

    html.write_report = lambda *_, **__: None  # drawing the page takes longer than all else, and says nothing here
    with tempfile.TemporaryDirectory() as folder:  # what is imported late is imported once
        attempt(Path(folder), Case(seed=0, steps=1, batch=1, lag=0, engines=1, every=1, faults=()), 0)
    sys.stdout.write(json.dumps({"exit": 0}) + "\n")
    sys.stdout.flush()
    for line in sys.stdin:
        given = json.loads(line)
        case = Case(**given["case"] | {"faults": tuple(tuple(fault) for fault in given["case"]["faults"])})
        child = os.fork()
        if child == 0:
            os._exit(attempt(Path(given["root"]), case, given["attempt"]))
        deadline_s = time.monotonic() + given["deadline_s"]
        status: int | str | None = None
        while status is None:
            pid, code = os.waitpid(child, os.WNOHANG)
            if pid:
                status = os.waitstatus_to_exitcode(code)
            elif time.monotonic() > deadline_s:
                os.kill(child, signal.SIGABRT)
                os.waitpid(child, 0)
                status = "hang"
            else:
                time.sleep(0.002)
        sys.stdout.write(json.dumps({"exit": status}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
