"""The loop over scripted workers: order of phases, stopping, resuming, failing."""

import asyncio
import io
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil
from pathlib import Path

import pytest

from rljob_runtime.checkpoint_files import FileSum
from rljob_runtime.errors import CheckpointError, EngineLostError, Evicted, Interrupted, SupersededError, WeightSyncError, WorkerLostError
from rljob_runtime.journal.opening import open_journal
from rljob_runtime.journal.replay import Bounds, StartingPoint
from rljob_runtime.journal.writing import JournalWriter
from rljob_runtime.loop import saving
from rljob_runtime.loop.checkpointing import CheckpointStore, DriverState, NoCheckpoints
from rljob_runtime.loop.driver import Driver, LoopConfig
from rljob_runtime.loop.judging import Judging
from rljob_runtime.loop.replacement import ReplacementLimits
from rljob_runtime.loop.supervisor import EngineSupervisor, SharedDevices
from rljob_runtime.overlap.scheduler import RolloutScheduler
from rljob_runtime.overlap.scoring_gate import ScoringGate
from rljob_runtime.overlap.validation import ValidationConfig, Validator
from rljob_runtime.packed import RewardBatch
from rljob_runtime.records import GenerationRequest, RewardResult, Sampling
from rljob_runtime.report import FolderMode, PlainDisplay, Reporter, RunFolder, RunInfo
from rljob_runtime.weightsync.probe import ProbeLimits
from rljob_runtime.weightsync.publisher import ProbeConfig, WeightPublisher
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
    spec_fingerprint="f",
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


def test_engines_on_the_trainers_devices_release_them_while_it_works_and_the_others_go_on(tmp_path: Path) -> None:
    other = ServingEngine("engine-1", seed=3)
    run = Run(tmp_path, leased_engines=(0,), others=[other], lag=1)
    asked: dict[str, set[str]] = {"engine-0": set(), "engine-1": set()}

    def ask(engine: ServingEngine, requests: Sequence[GenerationRequest]) -> None:
        asked[engine.name].add(run.leases[-1] if run.leases else "")
        ServingEngine.submit(engine, requests)

    for engine in (run.engine, other):
        engine.submit = partial(ask, engine)  # type: ignore[method-assign]
    run.drive()

    def lease(group: str, what: str) -> list[str]:
        return [f"{group}: {what} begins", f"{group}: {what} ends"]

    def sync(step: int) -> list[str]:
        outer, inner = lease("trainer", f"weight sync after step {step}"), lease("rollout", f"weight sync after step {step}")
        return [outer[0], *inner, outer[1]]

    steps = [
        [*lease("rollout", f"generation for step {n}"), *lease("trainer", f"training of step {n}"), *sync(n)] for n in range(1, STEPS + 1)
    ]
    last = [*lease("rollout", f"generation for step {STEPS + 1}"), *lease("trainer", f"training of step {STEPS}")]
    assert run.leases == [*sync(0), *(what for step in steps for what in step), *last]
    assert {what.split(" for ")[0] for what in asked["engine-0"]} == {"rollout: generation"}
    assert len(asked["engine-1"]) >= 1
    assert all(0 <= m["staleness/max"] <= 1 for m in run.metrics())
    assert all(m["time/engine_pause_s"] >= 0 for m in run.metrics())


def inner(leases: list[str], name: str) -> list[list[str]]:
    """What happened inside each lease of a group for scoring or generation."""
    found: list[list[str]] = []
    for entry in leases:
        if entry.startswith(f"{name}: ") and entry.endswith(" begins"):
            found.append([])
        elif entry.startswith(f"{name}: ") and entry.endswith(" ends"):
            found.append(["end"])
        elif found:
            found[-1].append(entry)
    return [entries for entries in found if entries[:1] != ["end"]]


def phases(leases: list[str]) -> list[str]:
    """Leases in the order of their beginnings, without their steps, and scores."""
    begun = [entry.removesuffix(" begins") for entry in leases if not entry.endswith(" ends")]
    return [entry.split(" for ")[0].split(" of ")[0].split(" after ")[0] for entry in begun]


GENERATION, SCORES, TRAINING = "rollout: generation", "judge: scores", "trainer: training"
SYNC = ["trainer: weight sync", "rollout: weight sync"]


def test_judges_on_the_engines_devices_score_when_all_is_generated(tmp_path: Path) -> None:
    run = Run(tmp_path, leased_engines=(0,), judges="engines")
    run.drive()
    found = phases(run.leases)
    assert set(found[: found.index(GENERATION)]) == set(SYNC)
    step = [GENERATION, SCORES, *["scores"] * found[: found.index(TRAINING)].count("scores"), TRAINING, *SYNC]
    assert found == [*SYNC, *step * STEPS, GENERATION, TRAINING]
    assert all("rollout" not in entry for entries in inner(run.leases, "judge") for entry in entries[: entries.index("scores")])
    assert len(run.metrics()) == STEPS


def test_judges_on_the_engines_devices_come_again_for_what_replaces_a_dropped_group(tmp_path: Path) -> None:
    """The engines have dropped their weights for the judge, so that these are sent once more."""
    run = Run(tmp_path, leased_engines=(0,), judges="engines", scores=ScriptedRewards(lambda name: name.startswith("1/")))
    run.drive()
    found = [entry for entry in phases(run.leases) if entry != "scores"]
    again = [GENERATION, SCORES, *SYNC, GENERATION, SCORES, TRAINING]
    assert found[len(SYNC) : len(SYNC) + len(again)] == again
    assert len(run.metrics()) == STEPS
    assert sum(m["rollout/groups_dropped"] for m in run.metrics()) == 1


def test_judges_beside_the_engines_score_while_these_generate(tmp_path: Path) -> None:
    run = Run(tmp_path, leased_engines=(0,), judges="others")
    run.drive()
    found = [entry for entry in phases(run.leases) if entry != "scores"]
    assert found == [*SYNC, *[GENERATION, SCORES, TRAINING, *SYNC] * STEPS, GENERATION, SCORES, TRAINING]
    held = ""
    for entry in run.leases:
        assert entry != "scores" or held == "judge"
        held = entry.split(":")[0] if entry.endswith("begins") else "" if entry.startswith("judge") else held


@pytest.mark.parametrize(("judges", "leased", "lag"), [("engines", (0,), 0), ("engines", (0,), 1), ("others", (0,), 0), ("others", (), 1)])
def test_a_validation_is_scored_wherever_judges_are(tmp_path: Path, judges: str, leased: tuple[int, ...], lag: float) -> None:
    validation = replace(VALIDATION, every_steps=1)
    others = [ServingEngine("engine-1", seed=3)] if leased and lag else []
    run = Run(tmp_path, leased_engines=leased, judges=judges, lag=lag, validation=validation, others=others)
    run.drive()
    assert [m["validation/prompts"] for m in run.metrics()] == [3.0] * STEPS
    assert all(0 <= m["staleness/max"] <= lag for m in run.metrics())


def test_engines_begin_before_the_trainer_scores_the_probes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    started: list[str] = []
    for worker in (run.engine, run.trainer):
        begin = worker.start
        monkeypatch.setattr(worker, "start", lambda method, *args, begin=begin: started.append(method) or begin(method, *args))
    run.drive()
    order = [method for method in started if method in ("finish_update", "submit", "compute_logprobs")]
    assert order == ["finish_update", "submit", "compute_logprobs"] * STEPS + ["finish_update", "compute_logprobs"]


def test_every_step_is_trained_published_and_reported_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.drive()
    assert run.trainer.updates == STEPS
    assert run.engine.phases == [p for v in range(STEPS + 1) for p in (f"begin v{v}", "bucket 0", "bucket 1", "finish")]
    assert [m["step"] for m in run.metrics()] == [1, 2, 3, 4]
    assert [m["version"] for m in run.metrics()] == [1, 2, 3, 4]
    assert all(m["staleness/max"] == 0 for m in run.metrics())
    assert all(m["sync/probe_max_abs_diff"] == 0 for m in run.metrics())
    newest = run.store.choose("f").folder
    assert newest is not None
    assert newest.name.startswith("step-000004")


def test_stopping_finishes_the_step_saves_and_a_resumed_run_goes_on_with_the_next_prompts(tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.trainer.on_step = lambda step: first.stop.set() if step == 2 else None
    with pytest.raises(Interrupted, match="stopped after step 2 of 4"):
        first.drive()
    newest = first.store.choose("f").folder
    assert newest is not None
    assert newest.name.startswith("step-000002")
    state = first.store.choose("f").state
    assert state is not None
    second = Run(tmp_path, start=state)
    second.prompts.handed_out = int(str(state.source_state["next"]))
    second.drive()
    whole = Run(tmp_path / "whole")
    whole.drive()
    assert [r.seed for r in first.engine.seen + second.engine.seen] == [r.seed for r in whole.engine.seen], "nothing is generated twice"
    assert [m["step"] for m in second.metrics()] == [1, 2, 3, 4]


def test_a_trainer_whose_pod_is_drained_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.trainer.on_step = lambda step: run.trainer.draining.set() if step == 2 else None
    with pytest.raises(Evicted, match="stopped after step 2 of 4, because the pod of trainer-0 was asked to end"):
        run.drive()
    newest = run.store.choose("f").folder
    assert newest is not None
    assert newest.name.startswith("step-000002")


def test_a_driver_whose_run_another_one_has_taken_over_ends_before_it_records_or_saves_anything(tmp_path: Path) -> None:
    run = Run(tmp_path, every=1)
    run.trainer.on_step = lambda step: CheckpointStore(run.store.root, keep=2).take("the second") if step == 3 else None
    with pytest.raises(SupersededError, match=r"belongs to another driver now: the second; this one, the first, writes nothing more"):
        run.drive()
    newest = run.store.choose("f").folder
    assert newest is not None
    assert newest.name.startswith("step-000002")
    assert [m["step"] for m in run.metrics()] == [1, 2]


def test_a_dead_trainer_fails_the_run_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, every=1)

    def die(step: int) -> None:
        if step == 3:
            raise WorkerLostError("trainer-0", "signal 9", "trainer.log")

    run.trainer.on_step = die
    with pytest.raises(WorkerLostError, match=r"worker trainer-0 is gone \(signal 9\); its log: trainer.log"):
        run.drive()
    newest = run.store.choose("f").folder
    assert newest is not None
    assert newest.name.startswith("step-000002")


def test_a_checkpoint_that_is_still_written_is_resumed_from_only_once_it_is_whole(tmp_path: Path) -> None:
    """The next one and the end wait for it; a driver killed before resumes from the one that was whole."""
    run = Run(tmp_path, every=1)
    run.trainer.writes_slowly = True
    newest: list[int] = []

    def look(step: int) -> None:
        state = CheckpointStore(run.store.root, keep=2).choose("f").state
        newest.append(state.step if state else 0)

    run.trainer.on_step = look
    run.drive()
    assert newest == [0, 0, 1, 2], "while step n is trained, that of n - 1 is being written"
    state = run.store.choose("f").state
    assert state is not None
    assert state.step == STEPS


def test_a_checkpoint_counts_while_the_next_batch_is_still_generated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not on disk when its step ends, and the next batch is scored only once it counts."""
    monkeypatch.setattr(saving, "POLL_S", 0.01)
    run = Run(tmp_path, every=1)
    is_complete, complete, written, score = threading.Event(), CheckpointStore.complete, run.trainer.written_checkpoint, run.scores.score
    asked: list[int] = []

    def look(store: CheckpointStore, folder: Path, state: DriverState, files: Sequence[FileSum]) -> None:
        complete(store, folder, state, files)
        is_complete.set()

    def at_the_second_time() -> tuple[FileSum, ...] | None:
        asked.append(run.trainer.updates)
        return written() if len(asked) > 1 else None

    async def scored(batch: RewardBatch) -> list[RewardResult]:
        if run.trainer.updates == 1:
            await asyncio.to_thread(is_complete.wait, CONFIG.take_timeout_s)
        return await score(batch)

    monkeypatch.setattr(CheckpointStore, "complete", look)
    monkeypatch.setattr(run.trainer, "written_checkpoint", at_the_second_time)
    monkeypatch.setattr(run.scores, "score", scored)
    run.drive()
    assert asked[:2] == [1, 1]


def test_a_checkpoint_whose_files_cannot_be_written_fails_the_run_and_leaves_the_former(tmp_path: Path) -> None:
    run = Run(tmp_path, every=1)
    finish = run.trainer.finish_checkpoint

    def full(timeout_s: float) -> tuple[FileSum, ...]:
        if run.trainer.updates == 2:
            raise CheckpointError("no space left")
        return finish(timeout_s)

    run.trainer.finish_checkpoint = full  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="no space left"):
        run.drive()
    chosen = run.store.choose("f")
    assert chosen.state is not None
    assert chosen.state.step == 1
    assert "step-000002" in chosen.skipped[0]


def test_what_was_being_written_when_the_run_failed_is_kept(tmp_path: Path) -> None:
    run = Run(tmp_path, every=1)
    run.trainer.writes_slowly = True

    def lose_a_reward(step: int) -> None:
        if step == 2:
            raise WorkerLostError("reward-0", "signal 9", "reward.log")

    run.trainer.on_step = lose_a_reward
    with pytest.raises(WorkerLostError):
        run.drive()
    state = run.store.choose("f").state
    assert state is not None
    assert state.step == 1


def test_a_damaged_checkpoint_is_skipped_with_a_reason_and_none_is_overlooked(tmp_path: Path) -> None:
    run = Run(tmp_path, every=1)
    run.drive()
    newest = run.store.choose("f").folder
    assert newest is not None
    (file,) = (newest / "policy").iterdir()
    file.write_text("")
    older = run.store.choose("f")
    assert older.state is not None
    assert older.state.step == STEPS - 1
    assert older.skipped == (f"checkpoint {newest.name} is damaged and skipped: policy/updates has 0 bytes, 1 were written",)
    assert older.folder is not None
    (older.folder / "COMPLETE").write_text("3")
    with pytest.raises(CheckpointError, match=r"none of the checkpoints in .* is whole"):
        run.store.choose("f")


def test_a_checkpoint_that_does_not_fit_is_not_begun(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    with pytest.raises(CheckpointError, match=r"needs .* and the disk has .* left; free some, lower spec.checkpoint.keep \(2\)"):
        store.begin(1, 2**60)
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_counts_only_once_its_steps_are_in_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, every=1)
    on_disk: list[tuple[int, list[float]]] = []
    complete = CheckpointStore.complete

    def look(store: CheckpointStore, folder: Path, state: DriverState, files: Sequence[FileSum]) -> None:
        on_disk.append((state.step, [m["step"] for m in run.metrics()]))
        complete(store, folder, state, files)

    monkeypatch.setattr(CheckpointStore, "complete", look)
    run.drive()
    assert on_disk == [(step, list(range(1, step + 1))) for step in range(1, STEPS + 1)]


@pytest.mark.parametrize("every", [0, 2])
def test_a_restart_trains_the_same_batches_again_and_has_only_the_rest_generated(tmp_path: Path, every: int) -> None:
    first = Run(tmp_path, every=every)

    def die(step: int) -> None:
        if step == 3:
            raise WorkerLostError("trainer-0", "signal 9", "trainer.log")

    first.trainer.on_step = die
    with pytest.raises(WorkerLostError):
        first.drive()
    second = Run(tmp_path, start=first.store.choose("f").state, goes_on=True)
    second.prompts.handed_out = int(str(second.start.source_state["next"])) if second.start else 0
    second.drive()
    whole = Run(tmp_path / "whole")
    whole.drive()
    assert [r.seed for r in first.engine.seen + second.engine.seen] == [r.seed for r in whole.engine.seen], "nothing is generated twice"
    for again, before in zip(second.trainer.batches, whole.trainer.batches[every:], strict=True):
        assert [b.token_ids.tolist() for b in again] == [b.token_ids.tolist() for b in before]
    rows = second.metrics()
    assert [m["step"] for m in rows] == [1, 2, 3, 4]
    assert [m.get("rollout/groups_recovered", 0) for m in rows] == [BATCH if every < step <= 3 else 0 for step in (1, 2, 3, 4)]
    assert [m["rollout/tokens_per_s"] == 0 for m in rows] == [every < step <= 3 for step in (1, 2, 3, 4)]
    assert list((tmp_path / "run" / "journal").iterdir()) == []


def test_a_journal_that_cannot_be_written_is_reported_once_and_stops_nothing(tmp_path: Path) -> None:
    RunFolder.open(tmp_path / "run", FolderMode.NEW).journal.write_text("a file is in the way")
    run = Run(tmp_path, every=1, goes_on=True)
    run.drive()
    assert [m["step"] for m in run.metrics()] == [1, 2, 3, 4]
    events = (tmp_path / "run" / "logs" / "events.jsonl").read_text()
    assert events.count("cannot write the journal") == 1


def test_an_engine_that_dies_while_the_trainer_works_is_noticed(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.trainer.on_step = lambda step: run.engine.lost.set()
    with pytest.raises(WorkerLostError, match="engine-0"):
        run.drive()


def test_an_engine_that_serves_another_version_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.trainer.on_step = lambda step: setattr(run.engine, "forgets_version", step == 2)
    with pytest.raises(WeightSyncError, match="after publishing v2: engine-0 serves v1"):
        run.drive()


def test_the_probe_catches_an_engine_whose_weights_differ(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.engine.wrong_from = 3
    with pytest.raises(WeightSyncError, match=r"after publishing v3 engine-0 and the trainer disagree by 0\.00.*, more than 2 times what"):
        run.drive()
    assert [m["step"] for m in run.metrics()] == [1, 2, 3]


def test_the_probe_beside_an_update_ends_with_the_update_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    ended = []

    async def probe(self: WeightPublisher, version: int) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("probe")

    def die(step: int) -> None:
        raise WorkerLostError("trainer-0", "signal 9", "trainer.log")

    monkeypatch.setattr(WeightPublisher, "probe", probe)
    close = JournalWriter.close
    monkeypatch.setattr(JournalWriter, "close", lambda self: ended.append("run") or close(self))
    run.trainer.on_step = die
    with pytest.raises(WorkerLostError, match="trainer-0"):
        run.drive()
    assert ended == ["probe", "run"]


def test_a_probe_that_failed_before_the_update_did_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)

    async def probe(self: WeightPublisher, version: int) -> None:
        raise WeightSyncError("engine-0 and the trainer disagree")

    def die(step: int) -> None:
        raise WorkerLostError("trainer-0", "signal 9", "trainer.log")

    monkeypatch.setattr(WeightPublisher, "probe", probe)
    run.trainer.on_step = die
    with pytest.raises(WorkerLostError, match="trainer-0"):
        run.drive()
    assert (
        "the probe of weights v0 failed as well: engine-0 and the trainer disagree"
        in (tmp_path / "run" / "logs" / "events.jsonl").read_text()
    )


def test_only_complete_checkpoints_are_found_and_old_ones_go(tmp_path: Path) -> None:
    run = Run(tmp_path, every=1)
    run.drive()
    (run.store.root / "step-000009-abcdef").mkdir()
    assert sorted(p.name[:11] for p in run.store.root.glob("step-*")) == ["step-000003", "step-000004", "step-000009"]
    newest = run.store.choose("f").folder
    assert newest is not None
    assert newest.name.startswith("step-000004")


def test_without_shared_storage_all_steps_are_trained_and_nothing_is_kept(tmp_path: Path) -> None:
    run = Run(tmp_path, every=1, shared=False)
    run.drive()
    assert [m["step"] for m in run.metrics()] == [1, 2, 3, 4]
    assert run.store.choose("f").folder is None
    stopped = Run(tmp_path / "stopped", every=1, shared=False)
    stopped.trainer.on_step = lambda step: stopped.stop.set() if step == 2 else None
    with pytest.raises(Interrupted, match="stopped after step 2 of 4"):
        stopped.drive()
    assert list(stopped.store.root.glob("step-*")) == []


VALIDATION = ValidationConfig(
    every_steps=2,
    at_start=True,
    pauses=False,
    samples_per_prompt=1,
    sampling=Sampling(max_tokens=4, temperature=0.0),
    seed=5,
    timeout_s=10.0,
)


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("pauses", [False, True])
def test_each_due_version_is_validated_whole_and_told_with_the_step_that_follows_it(tmp_path: Path, pauses: bool, lag: float) -> None:
    run = Run(tmp_path, lag=lag, validation=replace(VALIDATION, pauses=pauses))
    run.drive()
    told = {m["step"]: m["validation/version"] for m in run.metrics() if "validation/version" in m}
    assert told == {1: 0, 3: 2, 4: 4}  # the last version is told with the step that made it
    asked = [r.request_id for r in run.engine.seen if r.sampling.temperature == 0]
    assert sorted(asked) == sorted(f"v{version}/{prompt}/0" for version in (0, 2, 4) for prompt in range(3))
    assert all(m["validation/prompts"] == 3 for m in run.metrics() if "validation/version" in m)
    trained = [r for r in run.engine.seen if r.sampling.temperature > 0]
    assert len({(r.seed) for r in trained}) == STEPS * BATCH * 2


def test_validation_changes_nothing_of_the_training(tmp_path: Path) -> None:
    plain, validated = Run(tmp_path / "plain"), Run(tmp_path / "validated", validation=VALIDATION)
    plain.drive()
    validated.drive()
    assert [r.seed for r in validated.engine.seen if r.sampling.temperature > 0] == [r.seed for r in plain.engine.seen]


def test_an_engine_that_dies_costs_no_response_while_another_is_left(tmp_path: Path) -> None:
    other = ServingEngine("engine-1", seed=3)
    run = Run(tmp_path, others=[other], lag=1)
    run.trainer.on_step = lambda step: run.engine.lost.set() if step == 2 else None
    run.drive()
    assert [m["step"] for m in run.metrics()] == [1, 2, 3, 4]
    assert sum(m["rollout/engines_lost"] for m in run.metrics()) == 1
    assert sum(m["rollout/groups_dropped"] for m in run.metrics()) == 0
    assert other.phases.count("finish") == STEPS + 1
    assert run.engine.phases.count("finish") < STEPS + 1


def test_the_version_before_the_last_is_reported_even_where_both_are_due(tmp_path: Path) -> None:
    run = Run(tmp_path, validation=replace(VALIDATION, every_steps=1))
    run.drive()
    assert [m["validation/version"] for m in run.metrics()] == [0, 1, 2, 4]
    events = (tmp_path / "run" / "logs" / "events.jsonl").read_text()
    assert "validation before the last step" in events
    assert "validation/version 3" in events


def fails_once(run: Run, how: str, *, after: int) -> None:
    """The engine fails with the ``after``-th request it is given; ``how`` is a flag of it, or ``process``."""
    submit = run.engine.submit

    def fail(requests: Sequence[GenerationRequest]) -> None:
        submit(requests)
        if len(run.engine.seen) >= after and not run.restarted:
            if how == "process":
                run.engine.dead = True
                run.engine.lost.set()
            else:
                setattr(run.engine, how, True)

    run.engine.submit = fail  # type: ignore[method-assign]


@pytest.mark.parametrize("leased", [(), (0,)])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("how", ["process", "failed", "stalled"])
def test_the_only_engine_is_replaced_and_every_step_is_trained_once(tmp_path: Path, how: str, lag: float, leased: tuple[int, ...]) -> None:
    run = Run(tmp_path, lag=lag, leased_engines=leased, restarts=1, stall_timeout_s=0.05)
    fails_once(run, how, after=6)
    run.drive()
    metrics = run.metrics()
    assert [m["step"] for m in metrics] == [1, 2, 3, 4]
    assert run.trainer.updates == STEPS
    assert run.restarted == [0]
    assert sum(m["rollout/engines_lost"] for m in metrics) == sum(m.get("engine/replaced", 0.0) for m in metrics) == 1
    assert sum(m["rollout/groups_dropped"] for m in metrics) == 0
    assert max(m["staleness/max"] for m in metrics) <= lag
    assert all(m["sync/probe_max_abs_diff"] == 0 for m in metrics)
    restart = run.engine.phases.index("restart")
    before = [p for p in run.engine.phases[:restart] if p.startswith("begin")][-1]
    assert run.engine.phases[restart + 1] in (before, f"begin v{int(before[7:]) + 1}"), "it serves what was served, or what is next"
    if leased:
        first = run.leases.index("engine-0 has its devices")
        assert run.leases[first : first + 3] == ["engine-0 has its devices", "engine-0 starts", "engine-0 leases them again"]
        open_leases = [what for what in run.leases[:first] if what.endswith("begins") and what[:-6] + "ends" not in run.leases[:first]]
        assert open_leases == []


@pytest.mark.parametrize("leased", [(), (0,)])
@pytest.mark.parametrize("alone", [True, False])
def test_an_engine_that_stops_while_nobody_needs_it_is_replaced_long_before_the_deadline_of_the_sync_that_meets_it(
    tmp_path: Path, alone: bool, leased: tuple[int, ...]
) -> None:
    run = Run(tmp_path, restarts=1, leased_engines=leased, others=[] if alone else [ServingEngine("engine-1", seed=3)])
    run.trainer.on_step = lambda step: setattr(run.engine, "stopped", step == 2)
    run.drive()  # at its deadline the sync would end it
    assert [m["step"] for m in run.metrics()] == [1, 2, 3, 4]
    assert run.trainer.updates == STEPS
    assert run.restarted == [0]
    events = (tmp_path / "run" / "logs" / "events.jsonl").read_text()
    assert "worker engine-0 is stuck: its process lives, but has not answered for 1 s" in events


def test_an_engine_that_is_lost_once_too_often_ends_the_run_with_the_cause(tmp_path: Path) -> None:
    run = Run(tmp_path, restarts=1)
    run.engine.restart = lambda: None  # type: ignore[method-assign]  # the new process is as dead as the old one
    run.trainer.on_step = lambda step: setattr(run.engine, "failed", True)
    with pytest.raises(EngineLostError, match=r"engine-0 is lost \(its thread ended\)"):
        run.drive()
    events = (tmp_path / "run" / "logs" / "events.jsonl").read_text()
    assert "1 of 1 restarts are used (spec.rollout.maxEngineRestarts)" in events


def test_a_validation_that_no_engine_can_end_is_given_up(tmp_path: Path) -> None:
    run = Run(tmp_path, lag=1, validation=replace(VALIDATION, every_steps=1), restarts=1)
    submit = run.engine.submit

    def hold_back(requests: Sequence[GenerationRequest]) -> None:
        submit([r for r in requests if r.sampling.temperature > 0 or run.restarted])

    def fail(step: int) -> None:
        run.engine.failed = step == 1

    run.engine.submit = hold_back  # type: ignore[method-assign]
    run.trainer.on_step = fail
    run.drive()
    assert [m["step"] for m in run.metrics()] == [1, 2, 3, 4]
    assert "validation under way is given up" in (tmp_path / "run" / "logs" / "events.jsonl").read_text()
