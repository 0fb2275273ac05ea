"""A driver over scripted workers, and what tests look at."""

import asyncio
import io
import json
from dataclasses import dataclass, field, replace
from math import ceil
from pathlib import Path

from rljob_runtime.errors import WorkerLostError
from rljob_runtime.journal.opening import open_journal
from rljob_runtime.journal.replay import Bounds, StartingPoint
from rljob_runtime.loop.checkpointing import CheckpointStore, DriverState, NoCheckpoints
from rljob_runtime.loop.driver import Driver, LoopConfig
from rljob_runtime.loop.judging import Judging
from rljob_runtime.loop.replacement import ReplacementLimits
from rljob_runtime.loop.supervisor import EngineSupervisor, SharedDevices
from rljob_runtime.overlap.scheduler import RolloutScheduler
from rljob_runtime.overlap.scoring_gate import ScoringGate
from rljob_runtime.overlap.validation import ValidationConfig, Validator
from rljob_runtime.packed import RewardBatch
from rljob_runtime.records import RewardResult, Sampling
from rljob_runtime.report import FolderMode, PlainDisplay, Reporter, RunFolder, RunInfo
from rljob_runtime.weightsync.probe import ProbeLimits
from rljob_runtime.weightsync.publisher import ProbeConfig
from tests.support.fake_workers import CountingPrompts, CountingTrainer, ScriptedRewards, ServingEngine
from tests.support.job_workers import make_job_workers
from tests.support.loop_parts import make_parts
from tests.support.rollouts import make_gate, make_scheduler

BATCH, STEPS = 2, 4
INFO = RunInfo(job_name="job", model="m", algorithm="GRPO PPO", devices="-", total_steps=STEPS, seed=0, spec_yaml="a: 1\n")
PROBE = ProbeConfig(every_syncs=1, limits=ProbeLimits(mean=2e-5, tail=5e-5), sequences=((1, 2, 3),))
CONFIG = LoopConfig(
    total_steps=STEPS,
    groups_per_step=BATCH,
    step_timeout_s=10.0,
    take_timeout_s=10.0,
    checkpoint_every_steps=0,
    spec_fingerprint={"seed": "f"},
)


def _nowhere() -> PlainDisplay:
    return PlainDisplay(io.StringIO(), clock=lambda: 0.0, every_s=1.0)


@dataclass
class Run:
    """A driver over fakes, and what a test looks at."""

    root: Path
    start: DriverState | None = None
    trainer: CountingTrainer = field(default_factory=CountingTrainer)
    engine: ServingEngine = field(default_factory=ServingEngine)
    prompts: CountingPrompts = field(default_factory=CountingPrompts)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    every: int = 0
    shared: bool = True
    others: list[ServingEngine] = field(default_factory=list)
    """Further engines."""
    lag: float = 0
    leased_engines: tuple[int, ...] = ()
    leases: list[str] = field(default_factory=list)
    validation: ValidationConfig | None = None
    judges: str = ""
    """Devices that judges share: of ``engines``, or of ``others``; empty: there are no judges."""
    scores: ScriptedRewards = field(default_factory=ScriptedRewards)
    goes_on: bool = False
    """Whether something may be in the folder, without a checkpoint."""
    stall_timeout_s: float = 60.0
    restarts: int = 0
    """Of each engine."""
    restarted: list[int] = field(default_factory=list)

    def supervisor(self, reporter: Reporter) -> EngineSupervisor:
        engines = [self.engine, *self.others]

        async def start(index: int, timeout_s: float) -> None:
            self.restarted.append(index)
            self.leases.append(f"engine-{index} starts")
            await asyncio.sleep(0.01)
            engines[index].restart()

        async def end(index: int) -> None:
            self.leases.append(f"engine-{index} ends")
            engines[index].killed.set()

        async def clear(index: int) -> None:
            self.leases.append(f"engine-{index} has its devices")

        def settle(index: int) -> None:
            self.leases.append(f"engine-{index} leases them again")

        def forget(error: WorkerLostError) -> None:
            assert f"{error.worker} ends" in self.leases

        return EngineSupervisor(
            engines,
            start=start,
            end=end,
            limits=ReplacementLimits(
                max_restarts=self.restarts, start_timeout_s=10.0, weights_timeout_s=10.0, ask_every_s=0.01, answer_timeout_s=0.5
            ),
            notify=reporter.event,
            shared=SharedDevices(engines=frozenset(self.leased_engines), forget=forget, clear=clear, settle=settle),
        )

    def validator(self, scheduler: RolloutScheduler, gate: ScoringGate | None) -> Validator:
        assert self.validation is not None
        prompts, score = CountingPrompts().next(3), ScriptedRewards().score if gate is None else gate.score
        return Validator(fleet=scheduler.fleet, prompts=prompts, score=score, config=self.validation)

    async def scored(self, batch: RewardBatch) -> list[RewardResult]:
        """Written down between the leases."""
        self.leases.append("scores")
        return await self.scores.score(batch)

    def drive(self) -> None:
        asyncio.run(self._drive())

    async def _drive(self) -> None:
        start, first_prompt, done = (self.start.step, self.start.first_prompt, self.start.done) if self.start else (0, 0, ())
        folder = RunFolder.open(self.root / "run", FolderMode.RESUME if start or self.goes_on else FolderMode.NEW)
        self.store = CheckpointStore(folder.checkpoints, keep=2)
        if self.shared:
            self.store.take("the first")
        bounds = Bounds(groups_per_step=BATCH, total_steps=STEPS, max_staleness=ceil(self.lag))
        opened = open_journal(folder.journal, "run", StartingPoint(version=start, first_prompt=first_prompt), bounds)
        engines = [self.engine, *self.others]
        with Reporter(folder, INFO, _nowhere(), resumed_step=start or None, packages={}, ticker=False) as reporter:
            supervisor = self.supervisor(reporter)
            gate = ScoringGate(self.scored) if self.judges else None
            workers = make_job_workers(
                trainer=[self.trainer],
                rollout=engines,
                leased_engines=self.leased_engines,
                judge=[ServingEngine("judge-0")] if self.judges else [],
                judges_displace_engines=self.judges == "engines",
                log=self.leases,
            )
            scheduler = make_scheduler(
                engines,
                make_gate(BATCH, self.lag, STEPS, version=start),
                fleet={"stall_timeout_s": self.stall_timeout_s},
                prompts=self.prompts,
                log=opened.journal,
                first_prompt=first_prompt,
                done=done,
                on_lost=supervisor.lost,
                score=self.scores.score if gate is None else gate.score,
            )
            scheduler.restore(opened.recovered)
            parts = make_parts(
                workers,
                scheduler,
                supervisor,
                reporter,
                probe=PROBE,
                validator=self.validator(scheduler, gate) if self.validation is not None else None,
                judging=None if gate is None else Judging(workers=workers, gate=gate, fleet=scheduler.fleet),
                checkpoints=self.store if self.shared else NoCheckpoints(),
                journal=opened.journal,
            )
            config = replace(CONFIG, checkpoint_every_steps=self.every)
            await Driver(parts, config, start_step=start, stop=self.stop).run()

    def metrics(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.root / "run" / "metrics.jsonl").read_text().splitlines()]


VALIDATION = ValidationConfig(
    every_steps=2,
    at_start=True,
    pauses=False,
    samples_per_prompt=1,
    sampling=Sampling(max_tokens=4, temperature=0.0),
    seed=5,
    timeout_s=10.0,
)
