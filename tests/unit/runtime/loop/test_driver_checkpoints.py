"""The loop over scripted workers: checkpoints, the journal, and what a restart goes on with."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from rljob_runtime.checkpoint_files import FileSum
from rljob_runtime.errors import CheckpointError, Interrupted, WorkerLostError
from rljob_runtime.loop import saving
from rljob_runtime.loop.checkpointing import CheckpointStore, DriverState
from rljob_runtime.packed import RewardBatch
from rljob_runtime.records import RewardResult
from rljob_runtime.report import FolderMode, RunFolder
from tests.unit.runtime.loop.driver_runs import BATCH, CONFIG, STEPS, Run


def test_a_checkpoint_that_is_still_written_is_resumed_from_only_once_it_is_whole(tmp_path: Path) -> None:
    """The next one and the end wait for it; a driver killed before resumes from the one that was whole."""
    run = Run(tmp_path, every=1)
    run.trainer.writes_slowly = True
    newest: list[int] = []

    def look(step: int) -> None:
        state = CheckpointStore(run.store.root, keep=2).choose({"seed": "f"}).state
        newest.append(state.step if state else 0)

    run.trainer.on_step = look
    run.drive()
    assert newest == [0, 0, 1, 2], "while step n is trained, that of n - 1 is being written"
    state = run.store.choose({"seed": "f"}).state
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
    chosen = run.store.choose({"seed": "f"})
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
    state = run.store.choose({"seed": "f"}).state
    assert state is not None
    assert state.step == 1


def test_a_damaged_checkpoint_is_skipped_with_a_reason_and_none_is_overlooked(tmp_path: Path) -> None:
    run = Run(tmp_path, every=1)
    run.drive()
    newest = run.store.choose({"seed": "f"}).folder
    assert newest is not None
    (file,) = (newest / "policy").iterdir()
    file.write_text("")
    older = run.store.choose({"seed": "f"})
    assert older.state is not None
    assert older.state.step == STEPS - 1
    assert older.skipped == (f"checkpoint {newest.name} is damaged and skipped: policy/updates has 0 bytes, 1 were written",)
    assert older.folder is not None
    (older.folder / "COMPLETE").write_text("3")
    with pytest.raises(CheckpointError, match=r"none of the checkpoints in .* is whole"):
        run.store.choose({"seed": "f"})


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
    second = Run(tmp_path, start=first.store.choose({"seed": "f"}).state, goes_on=True)
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


def test_only_complete_checkpoints_are_found_and_old_ones_go(tmp_path: Path) -> None:
    run = Run(tmp_path, every=1)
    run.drive()
    (run.store.root / "step-000009-abcdef").mkdir()
    assert sorted(p.name[:11] for p in run.store.root.glob("step-*")) == ["step-000003", "step-000004", "step-000009"]
    newest = run.store.choose({"seed": "f"}).folder
    assert newest is not None
    assert newest.name.startswith("step-000004")


def test_without_shared_storage_all_steps_are_trained_and_nothing_is_kept(tmp_path: Path) -> None:
    run = Run(tmp_path, every=1, shared=False)
    run.drive()
    assert [m["step"] for m in run.metrics()] == [1, 2, 3, 4]
    assert run.store.choose({"seed": "f"}).folder is None
    stopped = Run(tmp_path / "stopped", every=1, shared=False)
    stopped.trainer.on_step = lambda step: stopped.stop.set() if step == 2 else None
    with pytest.raises(Interrupted, match="stopped after step 2 of 4"):
        stopped.drive()
    assert list(stopped.store.root.glob("step-*")) == []
