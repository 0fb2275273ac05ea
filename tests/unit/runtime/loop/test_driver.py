"""The loop over scripted workers: order of phases, stopping, resuming, failing."""

import asyncio
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest

from rljob_runtime.errors import Interrupted, WeightSyncError, WorkerLostError
from rljob_runtime.job.assemble import goes_on_without
from rljob_runtime.loop.batch_builder import BatchBuilder
from rljob_runtime.loop.checkpointing import Checkpoints, CheckpointStore, DriverState, NoCheckpoints
from rljob_runtime.loop.driver import Driver, LoopConfig, Parts
from rljob_runtime.overlap.batching import BatchingConfig
from rljob_runtime.overlap.rule import Rule
from rljob_runtime.overlap.rule_config import RuleConfig
from rljob_runtime.overlap.scheduler import RolloutScheduler
from rljob_runtime.overlap.validation import ValidationConfig, Validator
from rljob_runtime.records import Bucket, GenerationRequest, Sampling, WeightManifest
from rljob_runtime.report import FolderMode, PlainDisplay, Reporter, RunFolder, RunInfo
from rljob_runtime.weightsync.probe import ProbeLimits
from rljob_runtime.weightsync.publisher import ProbeConfig, WeightPublisher
from rljob_runtime.weightsync.transports.object_store import ObjectStoreTransport
from tests.support.fake_workers import CountingPrompts, CountingTrainer, ScriptedRewards, ServingEngine, no_texts
from tests.support.job_workers import make_job_workers
from tests.support.rollouts import make_gate, make_scheduler

BATCH, STEPS = 2, 4
MANIFEST = WeightManifest(buckets=(Bucket(index=0, size_bytes=64, slots=()), Bucket(index=1, size_bytes=64, slots=())))


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

    def validator(self, scheduler: RolloutScheduler) -> Validator:
        assert self.validation is not None
        prompts = CountingPrompts().next(3)
        return Validator(fleet=scheduler.fleet, prompts=prompts, decode=no_texts, score=ScriptedRewards().score, config=self.validation)

    def drive(self) -> None:
        asyncio.run(self._drive())

    async def _drive(self) -> None:
        start = self.start.step if self.start else 0
        folder = RunFolder.open(self.root / "run", FolderMode.RESUME if self.start else FolderMode.NEW)
        info = RunInfo(job_name="job", model="m", algorithm="GRPO PPO", devices="-", total_steps=STEPS, seed=0, spec_yaml="a: 1\n")
        self.store = CheckpointStore(folder.checkpoints, keep=2)
        checkpoints: Checkpoints = self.store if self.shared else NoCheckpoints()
        scheduler = make_scheduler(
            [self.engine, *self.others],
            make_gate(BATCH, self.lag, STEPS, version=start),
            prompts=self.prompts,
            next_group_id=self.start.next_group_id if self.start else 0,
            done=self.start.done if self.start else (),
        )
        probe = ProbeConfig(every_syncs=1, limits=ProbeLimits(mean=2e-5, tail=5e-5), sequences=((1, 2, 3),))
        config = LoopConfig(
            total_steps=STEPS,
            groups_per_step=BATCH,
            step_timeout_s=10.0,
            take_timeout_s=10.0,
            checkpoint_every_steps=self.every,
            spec_fingerprint="f",
        )
        with Reporter(
            folder, info, PlainDisplay(io.StringIO(), clock=lambda: 0.0, every_s=1.0), resumed_step=start or None, packages={}, ticker=False
        ) as reporter:
            workers = make_job_workers(
                trainer=[self.trainer], rollout=[self.engine, *self.others], leased_engines=self.leased_engines, log=self.leases
            )
            parts = Parts(
                workers=workers,
                scheduler=scheduler,
                publisher=WeightPublisher(
                    trainers=[self.trainer],
                    engines=[self.engine, *self.others],
                    manifest=MANIFEST,
                    transport=ObjectStoreTransport(),
                    timeout_s=10.0,
                    probe=probe,
                    goes_on_without=partial(goes_on_without, scheduler.fleet),
                ),
                batches=BatchBuilder(
                    rule=Rule(RuleConfig(max_response_tokens=4)),
                    workers=workers,
                    batching=BatchingConfig(num_ranks=1, mini_batches=1, epochs=1, temperature=1.0),
                    timeout_s=10.0,
                ),
                validator=self.validator(scheduler) if self.validation is not None else None,
                checkpoints=checkpoints,
                reporter=reporter,
            )
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


def test_every_step_is_trained_published_and_reported_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.drive()
    assert run.trainer.updates == STEPS
    assert run.engine.phases == [p for v in range(STEPS + 1) for p in (f"begin v{v}", "bucket 0", "bucket 1", "finish")]
    assert [m["step"] for m in run.metrics()] == [1, 2, 3, 4]
    assert [m["version"] for m in run.metrics()] == [1, 2, 3, 4]
    assert all(m["staleness/max"] == 0 for m in run.metrics())
    assert all(m["sync/probe_max_abs_diff"] == 0 for m in run.metrics())
    newest = run.store.newest()
    assert newest is not None
    assert newest.name == "step-000004"


def test_stopping_finishes_the_step_saves_and_a_resumed_run_goes_on_with_the_next_prompts(tmp_path: Path) -> None:
    first = Run(tmp_path)
    first.trainer.on_step = lambda step: first.stop.set() if step == 2 else None
    with pytest.raises(Interrupted, match="stopped after step 2 of 4"):
        first.drive()
    newest = first.store.newest()
    assert newest is not None
    assert newest.name == "step-000002"
    state = first.store.load(newest, "f")
    second = Run(tmp_path, start=state)
    second.prompts.handed_out = int(str(state.source_state["next"]))
    second.drive()
    whole = Run(tmp_path / "whole")
    whole.drive()
    asked = [r.seed for r in first.engine.seen[: BATCH * 2 * 2]] + [r.seed for r in second.engine.seen]
    assert asked == [r.seed for r in whole.engine.seen]
    assert [m["step"] for m in second.metrics()] == [1, 2, 3, 4]


def test_a_dead_trainer_fails_the_run_and_keeps_the_last_checkpoint(tmp_path: Path) -> None:
    run = Run(tmp_path, every=1)

    def die(step: int) -> None:
        if step == 3:
            raise WorkerLostError("trainer-0", "signal 9", "trainer.log")

    run.trainer.on_step = die
    with pytest.raises(WorkerLostError, match=r"worker trainer-0 is gone \(signal 9\); its log: trainer.log"):
        run.drive()
    newest = run.store.newest()
    assert newest is not None
    assert newest.name == "step-000002"


def test_a_checkpoint_counts_only_once_its_steps_are_in_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, every=1)
    on_disk: list[tuple[int, list[float]]] = []
    complete = CheckpointStore.complete

    def look(store: CheckpointStore, folder: Path, state: DriverState) -> None:
        on_disk.append((state.step, [m["step"] for m in run.metrics()]))
        complete(store, folder, state)

    monkeypatch.setattr(CheckpointStore, "complete", look)
    run.drive()
    assert on_disk == [(step, list(range(1, step + 1))) for step in range(1, STEPS + 1)]


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


def test_only_complete_checkpoints_are_found_and_old_ones_go(tmp_path: Path) -> None:
    run = Run(tmp_path, every=1)
    run.drive()
    (run.store.root / "step-000009").mkdir()
    assert sorted(p.name for p in run.store.root.iterdir()) == ["step-000003", "step-000004", "step-000009"]
    newest = run.store.newest()
    assert newest is not None
    assert newest.name == "step-000004"


def test_without_shared_storage_all_steps_are_trained_and_nothing_is_kept(tmp_path: Path) -> None:
    run = Run(tmp_path, every=1, shared=False)
    run.drive()
    assert [m["step"] for m in run.metrics()] == [1, 2, 3, 4]
    assert run.store.newest() is None
    stopped = Run(tmp_path / "stopped", every=1, shared=False)
    stopped.trainer.on_step = lambda step: stopped.stop.set() if step == 2 else None
    with pytest.raises(Interrupted, match="stopped after step 2 of 4"):
        stopped.drive()
    assert list(stopped.store.root.iterdir()) == []


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


def test_the_version_before_the_last_is_told_even_where_both_are_due(tmp_path: Path) -> None:
    run = Run(tmp_path, validation=replace(VALIDATION, every_steps=1))
    run.drive()
    assert [m["validation/version"] for m in run.metrics()] == [0, 1, 2, 4]
    events = (tmp_path / "run" / "logs" / "events.jsonl").read_text()
    assert "validation before the last step" in events
    assert "validation/version 3" in events
