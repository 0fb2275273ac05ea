"""The timeline of a run from its files: lanes, bubbles and their causes, the trace, the page, the command."""

import json
import re
from collections import defaultdict
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from rljob_runtime.cluster.ray_cluster import RayPending, RayWorker
from rljob_runtime.commands import timeline as command
from rljob_runtime.errors import SetupError
from rljob_runtime.report import FolderMode, Reporter, RunFolder
from rljob_runtime.report.activity import MAX_ROWS_PER_STEP
from rljob_runtime.report.jsonl import read_rows
from rljob_runtime.report.perfetto import rows_of, trace
from rljob_runtime.report.timeline import CAUSES, ENGINE_CAUSES, OTHER_CAUSE, Span, bubbles, cause_of, merged, read
from rljob_runtime.report.timeline_page import page
from tests.support.report_fakes import INFO, FakeClock, make_record

STEP_S = 10.0


class Quiet:
    """A display that shows nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def reporter(path: Path, clock: FakeClock, mode: FolderMode = FolderMode.NEW, resumed: int | None = None) -> Reporter:
    return Reporter(RunFolder.open(path, mode), INFO, Quiet(), resumed_step=resumed, clock=clock, packages={}, ticker=False)


def write_steps(run: Reporter, clock: FakeClock, steps: range) -> None:
    """Steps of 10 s: 5 s of generation, 1 of rewards, 3 of training, 1 of sync."""
    for step in steps:
        at = clock.now_s
        run.worked("actor_infer-0", "generate", [(at, at + 5)])
        run.worked("actor_infer-1", "generate", [(at, at + 2)])
        run.called("reward-0", "score", at + 5, at + 6)
        run.called("reward-0", "stats", at, at + 9)  # no work
        run.called("actor_train-0", "train_step", at + 6, at + 9)
        run.called("actor_train-0", "send_weights", at + 9, at + 10)
        for engine in ("actor_infer-0", "actor_infer-1"):
            run.called(engine, "begin_update", at + 9, at + 9.2)
            run.called(engine, "load_bucket", at + 9.1, at + 10)
        for lane, phase, start, end in (
            ("rollout", "generate", 0, 5),
            ("rewards", "reward", 5, 6),
            ("trainer", "train", 6, 9),
            ("weights", "sync", 9, 10),
        ):
            run.span(lane, phase, at + start, at + end, step)
        clock.advance(STEP_S)
        run.record(make_record(step, time__step_s=STEP_S))


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    clock = FakeClock()
    with reporter(tmp_path / "run", clock) as writing:
        write_steps(writing, clock, range(1, 4))
        writing.flush()
        return RunFolder(tmp_path / "run")


def test_every_worker_has_a_lane_with_its_phases_and_its_waits(run: RunFolder) -> None:
    timeline = read(run)
    lanes = {lane.name: lane for lane in timeline.lanes}
    assert list(lanes) == ["step", "actor_infer-0", "actor_infer-1", "actor_train-0", "reward-0"]
    assert (timeline.first_step, timeline.last_step, timeline.end_s - timeline.start_s) == (1, 3, 30.0)
    engine = [(s.phase, s.start_s, s.end_s, s.note) for s in lanes["actor_infer-1"].spans if s.step == 1]
    # the gap of 7 s is mostly generation by the other engine and training; sync overlaps are one span
    assert engine == [("generate", 0.0, 2.0, ""), ("wait", 2.0, 9.0, ENGINE_CAUSES["generate"]), ("sync", 9.0, 10.0, "")]
    trainer = [(s.phase, s.start_s, s.end_s, s.note) for s in lanes["actor_train-0"].spans if s.step == 1]
    assert trainer == [("wait", 0.0, 6.0, CAUSES["generate"]), ("train", 6.0, 9.0, ""), ("sync", 9.0, 10.0, "")]
    assert timeline.waited_s()["actor_infer-0"] == {ENGINE_CAUSES["train"]: 12.0}


def test_only_chosen_steps_are_read_and_others_are_named(run: RunFolder) -> None:
    timeline = read(run, (2, 2))
    assert {span.step for lane in timeline.lanes for span in lane.spans} == {2}
    assert (timeline.start_s, timeline.end_s) == (10.0, 20.0)
    with pytest.raises(SetupError, match=r"none of steps \(7, 9\) is done; there are 1 to 3"):
        read(run, (7, 9))


def test_what_is_run_again_is_not_there_twice(run: RunFolder) -> None:
    clock = FakeClock()
    with reporter(run.path, clock, FolderMode.RESUME, resumed=2) as again:
        assert {row["step"] for row in read_rows(run.activity_jsonl)} == {1, 2}
        write_steps(again, clock, range(3, 4))
        again.flush()
        steps = [row["step"] for row in read_rows(run.activity_jsonl) if row["worker"] == "actor_train-0"]
        assert steps == [1, 1, 2, 2, 3, 3]


def test_a_step_of_very_many_calls_is_cut(tmp_path: Path) -> None:
    clock = FakeClock()
    with reporter(tmp_path / "run", clock) as writing:
        writing.worked("engine", "generate", [(1000.0 + i, 1000.5 + i) for i in range(MAX_ROWS_PER_STEP + 10)])
        writing.worked("other", "generate", [(1000.0, 1001.0)])
        writing.flush()
        assert len(read_rows(RunFolder(tmp_path / "run").activity_jsonl)) == MAX_ROWS_PER_STEP


def test_a_bubble_shorter_than_the_least_is_none_and_a_worker_without_work_is_one() -> None:
    whole = [Span(phase="train", start_s=0.0, end_s=10.0, step=1)]
    busy = [Span(phase="score", start_s=0.0, end_s=4.0, step=1), Span(phase="train", start_s=4.05, end_s=10.0, step=1)]
    assert bubbles(busy, whole, (0.0, 10.0), 0.1) == []
    (idle,) = bubbles([], whole, (0.0, 10.0), 0.1)
    assert (idle.start_s, idle.end_s, idle.note) == (0.0, 10.0, CAUSES["train"])
    assert cause_of(20.0, 21.0, whole) == OTHER_CAUSE


def test_who_has_the_devices_is_named_where_it_had_them_for_most_of_the_wait() -> None:
    whole = [Span(phase="generate", start_s=0.0, end_s=10.0, step=1)]
    assert cause_of(0.0, 10.0, whole, CAUSES, [(0.0, 6.0, "actor_infer-0")]) == f"{CAUSES['generate']}; actor_infer-0 has its devices"
    assert cause_of(0.0, 10.0, whole, CAUSES, [(0.0, 4.0, "actor_infer-0")]) == CAUSES["generate"]


def test_calls_that_overlap_are_one_span_and_moves_keep_their_words() -> None:
    spans = [Span(phase="sync", start_s=float(i), end_s=i + 1.5, step=1) for i in range(3)]
    moves = [
        Span(phase="load", start_s=0.0, end_s=2.0, step=1, note="params"),
        Span(phase="load", start_s=1.0, end_s=3.0, step=1, note="grads"),
    ]
    assert [(s.phase, s.start_s, s.end_s) for s in merged([*spans, *moves])] == [("sync", 0.0, 3.5), ("load", 0.0, 2.0), ("load", 1.0, 3.0)]
    assert [len(row) for row in rows_of(merged([*spans, *moves]))] == [1, 1, 1]


def test_slices_of_one_thread_of_the_trace_never_overlap(run: RunFolder) -> None:
    events = json.loads(trace(read(run)))["traceEvents"]
    names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {"step", "actor_infer-0", "actor_infer-1", "actor_train-0", "reward-0"}
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            assert event["dur"] > 0
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"} == threads.keys()
    for spans in threads.values():
        assert all(before[1] <= after[0] + 0.2 for before, after in zip(sorted(spans), sorted(spans)[1:], strict=False))
    assert any(e["cat"] == "wait" and e["args"]["note"] == CAUSES["generate"] for e in events if e["ph"] == "X")


def test_the_page_loads_nothing_and_holds_every_span(run: RunFolder) -> None:
    timeline = read(run)
    text = page(timeline)
    assert re.findall(r"(?:src|href)=\"(?!data:)", text) == []
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text)
    assert found is not None
    data = json.loads(found[1])
    assert [(lane["name"], len(lane["spans"])) for lane in data["lanes"]] == [(lane.name, len(lane.spans)) for lane in timeline.lanes]
    assert CAUSES["generate"] in text


def test_names_of_workers_cannot_write_into_the_page(tmp_path: Path) -> None:
    clock = FakeClock()
    with reporter(tmp_path / "run", clock) as writing:
        writing.worked("</script><b>", "generate", [(1000.0, 1001.0)])
        writing.span("rollout", "generate", 1000.0, 1004.0, 1)
        writing.record(make_record(1))
        writing.flush()
        assert "</script><b>" not in page(read(RunFolder(tmp_path / "run")))


def test_the_command_writes_both_and_prints_the_longest_wait(run: RunFolder, tmp_path: Path) -> None:
    console = Console(width=200, record=True, file=(tmp_path / "out").open("w"))
    command.show(run.path, "1-2", tmp_path / "t.json", tmp_path / "t.html", console)
    text = console.export_text()
    assert "steps 1 to 2 of 3" in text
    assert f"12 s {CAUSES['generate']}" in text
    assert (tmp_path / "t.json").exists()
    assert (tmp_path / "t.html").exists()
    for wrong in ("a", "5-", "7-5"):
        with pytest.raises(SetupError, match="give a step or a range of steps"):
            command.steps_of(wrong)
    with pytest.raises(SetupError, match="no step is done yet"):
        read(RunFolder(tmp_path))


async def test_a_call_is_reported_when_its_answer_is_there() -> None:
    seen: list[tuple[str, str]] = []
    done: Future[int] = Future()
    done.set_result(5)
    worker = RayWorker("trainer-0", "log", actor=None)
    pending = RayPending(
        worker, "train_step", SimpleNamespace(future=lambda: done), lambda name, method, start, end: seen.append((name, method))
    )
    assert seen == []
    assert await pending.result(30.0) == 5
    assert seen == [("trainer-0", "train_step")]
