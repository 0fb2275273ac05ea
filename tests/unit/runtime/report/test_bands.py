"""switches.jsonl, the residency bands made of it, and how the page draws them."""

import asyncio
import io
import json
import time
from itertools import pairwise
from pathlib import Path

import plotly.graph_objects as go
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_runtime.errors import RuntimeFault
from rljob_runtime.offload.arbiter import DeviceArbiter
from rljob_runtime.offload.plan import Device, Direction
from rljob_runtime.offload.states import Residence
from rljob_runtime.report import FolderMode, PlainDisplay, Reporter, RunFolder, RunStatus
from rljob_runtime.report.band_chart import COLORS, MAX_BANDS, MAX_DEVICES, choose, colors
from rljob_runtime.report.bands import Band, bands, within
from rljob_runtime.report.charts import timeline_charts
from rljob_runtime.report.jsonl import Clock, iter_rows, read_rows
from rljob_runtime.report.switches import MAX_ERROR_CHARS, MAX_WORKERS, SwitchesWriter, drop_switches_after
from tests.support import cost
from tests.support.arbiter_fakes import Memory, make_client
from tests.support.report_fakes import GOLDEN, INFO, FakeClock, make_record
from tests.support.virtual_time import run_virtual
from tests.unit.runtime.report.switch_fakes import GRADS, KV, OPTIMIZER, PARAMS, make_move, make_residency, make_switch

OFFLOAD, LOAD = Direction.OFFLOAD, Direction.LOAD
D0, D1 = Device(0, 0), Device(0, 1)
ON, OFF = Residence.ON_DEVICE, Residence.OFFLOADED
START = {"trainer-0": {PARAMS: OFF, OPTIMIZER: OFF}, "rollout-0": {PARAMS: ON, KV: ON}}


def make_reporter(path: Path, clock: Clock, resumed_step: int | None = None) -> Reporter:
    folder = RunFolder.open(path, FolderMode.RESUME_OR_NEW)
    display = PlainDisplay(io.StringIO(), clock=clock)
    return Reporter(folder, INFO, display, resumed_step=resumed_step, clock=clock, packages={"python": "3.11"}, ticker=False)


def play_step(reporter: Reporter, clock: FakeClock, step: int, devices: tuple[Device, ...] = (D0,)) -> None:
    """Generate for 2 s, train for 1 s, with two switches of 0.5 s."""
    at = clock()
    reporter.span("engine 0", "generate", at, at + 2, step)
    reporter.switched(
        make_switch(
            make_move("rollout-0", OFFLOAD, (PARAMS, KV), at + 2, at + 2.2, devices=devices),
            make_move("trainer-0", LOAD, (PARAMS, OPTIMIZER), at + 2.2, at + 2.5, devices=devices),
            what=f"training of step {step}",
        )
    )
    reporter.span("trainer", "train", at + 2.5, at + 3.5, step)
    reporter.switched(
        make_switch(
            make_move("trainer-0", OFFLOAD, (OPTIMIZER,), at + 3.5, at + 3.75, devices=devices),
            make_move("trainer-0", OFFLOAD, (PARAMS,), at + 3.75, at + 3.9, devices=devices),
            make_move("rollout-0", LOAD, (PARAMS, KV), at + 3.9, at + 4, devices=devices),
            what=f"generation for step {step + 1}",
        )
    )
    clock.advance(4)
    reporter.record(make_record(step))


def played(path: Path, steps: int) -> RunFolder:
    clock = FakeClock()
    reporter = make_reporter(path, clock)
    clock.advance(1)
    reporter.resident(make_residency(START, D0))
    for step in range(1, steps + 1):
        play_step(reporter, clock, step)
    reporter.finish(RunStatus.SUCCEEDED)
    return RunFolder(path)


# ---- the file ----------------------------------------------------------------------------------------------------


def test_the_file_records_memory_before_and_after_every_switch(tmp_path: Path, golden):
    assert golden.differences(GOLDEN / "switches.jsonl", played(tmp_path / "run", 1).switches_jsonl.read_text()) == ""


def test_rows_reach_the_disk_with_the_others_and_survive_a_kill(tmp_path: Path):
    clock = FakeClock()
    reporter = make_reporter(tmp_path / "run", clock)
    reporter.resident(make_residency(START, D0))
    reporter.tick()  # and then the process is killed
    with RunFolder(tmp_path / "run").switches_jsonl.open("a") as torn:
        torn.write('{"row":"move","st')
    assert [row["row"] for row in read_rows(RunFolder(tmp_path / "run").switches_jsonl)] == ["start", "resident", "resident"]


def test_resume_drops_the_moves_of_lost_steps_and_bands_end_where_the_attempt_did(tmp_path: Path):
    clock = FakeClock()
    first = make_reporter(tmp_path / "run", clock)
    first.resident(make_residency(START, D0))
    for step in (1, 2, 3):
        play_step(first, clock, step)
    first.flush()
    clock = FakeClock(5.0)
    second = make_reporter(tmp_path / "run", clock, resumed_step=2)
    clock.advance(10)
    second.resident(make_residency(START, D0))
    play_step(second, clock, 3)
    second.finish(RunStatus.SUCCEEDED)
    rows = read_rows(RunFolder(tmp_path / "run").switches_jsonl)
    assert [row["what"] for row in rows if row["row"] == "move" and row["direction"] == "load"] == [
        f"{what} {step}" for n in (1, 2, 3) for what, step in (("training of step", n), ("generation for step", n + 1))
    ]
    engine = [band for band in bands(rows, 26.0) if band.worker == "rollout-0"]
    starting = [band for band in engine if band.end_s > 12.0 and band.start_s < 22.0]
    assert starting == []  # nobody is on the devices from the end of the first attempt, 12 s, to the snapshot of the second
    assert [row["at_s"] for row in rows if row["row"] == "start"] == [0.0, 12.0, 22.0]


def test_workers_beyond_the_first_are_counted_not_written(tmp_path: Path):
    clock = FakeClock()
    reporter = make_reporter(tmp_path / "run", clock)
    for _ in range(2):
        moves = [make_move(f"rollout-{i}", OFFLOAD, (KV,), clock(), clock() + 1) for i in range(MAX_WORKERS + 40)]
        reporter.switched(make_switch(*moves))
    reporter.flush()
    folder = RunFolder(tmp_path / "run")
    size = folder.switches_jsonl.stat().st_size
    assert len(read_rows(folder.switches_jsonl)) == 2 * MAX_WORKERS
    assert size / (2 * MAX_WORKERS) < 650
    assert [row["text"] for row in read_rows(folder.events_jsonl)] == [
        "switches.jsonl has the moves of the first 128 workers only; metrics count the others as well"
    ]


def test_a_failed_move_says_why_in_a_bounded_row(tmp_path: Path):
    writer = SwitchesWriter(tmp_path / "s.jsonl", clock=FakeClock())
    move = make_move("trainer-0", LOAD, (PARAMS,), 1.0, 2.0, error="out of memory " * 500, residence=Residence.BROKEN)
    writer.switched(1, 0.0, make_switch(move))
    writer.close()
    [row] = read_rows(tmp_path / "s.jsonl")
    assert len(row["error"]) == MAX_ERROR_CHARS
    assert (row["residence"], "before" in row) == ("Broken", False)


def test_a_full_disk_does_not_disturb_the_switch_but_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock = FakeClock()

    class OnFullDisk(SwitchesWriter):
        def __init__(self, path: Path, *, clock: Clock) -> None:
            super().__init__(Path("/dev/full"), clock=clock)

    monkeypatch.setattr("rljob_runtime.report.reporter.SwitchesWriter", OnFullDisk)
    reporter = make_reporter(tmp_path / "run", clock)
    clock.advance(2)
    reporter.switched(make_switch(make_move("trainer-0", LOAD, (PARAMS,), clock(), clock())))
    with pytest.raises(RuntimeFault, match="/dev/full: cannot write"):
        reporter.record(make_record(1))


def test_switches_after_the_end_are_not_written(tmp_path: Path):
    folder = played(tmp_path / "run", 1)
    clock = FakeClock()
    reporter = make_reporter(tmp_path / "other", clock)
    reporter.finish(RunStatus.SUCCEEDED)
    reporter.switched(make_switch(make_move("trainer-0", OFFLOAD, (PARAMS,), 1.0, 2.0)))
    assert read_rows(RunFolder(tmp_path / "other").switches_jsonl) == []
    assert read_rows(folder.switches_jsonl) != []


def test_a_record_costs_microseconds(tmp_path: Path):
    writer = SwitchesWriter(tmp_path / "s.jsonl", clock=time.monotonic)
    record = make_switch(make_move("trainer-0", LOAD, (PARAMS, OPTIMIZER), 1.0, 2.0))
    with cost.within(0.3):
        for _ in range(1000):
            writer.switched(1, 0.0, record)
    writer.close()
    assert len(read_rows(tmp_path / "s.jsonl")) >= 1000


@given(steps=st.lists(st.integers(1, 20), max_size=20), kept=st.integers(0, 20))
@settings(max_examples=40)
def test_dropping_keeps_exactly_the_rows_up_to_the_step(tmp_path_factory, steps, kept):
    path = tmp_path_factory.mktemp("rows") / "s.jsonl"
    path.write_text("".join(json.dumps({"row": "start", "step": s, "at_s": n / 2}) + "\n" for n, s in enumerate(steps)) + '{"torn')
    last_s, left = drop_switches_after(path, kept)
    assert last_s == max(0.0, (len(steps) - 1) / 2)
    assert left == any(s <= kept for s in steps)
    assert [row["at_s"] for row in iter_rows(path)] == [n / 2 for n, s in enumerate(steps) if s <= kept]
    assert [p.name for p in path.parent.iterdir()] == ["s.jsonl"]


# ---- the bands ---------------------------------------------------------------------------------------------------


def test_the_bands_of_a_step(tmp_path: Path):
    rows = read_rows(played(tmp_path / "run", 1).switches_jsonl)
    reported = [
        (b.worker, round(b.start_s, 2), round(b.end_s, 2), " ".join(b.kinds), b.partly, b.move["direction"] if b.move else "")
        for b in bands(rows, 6.0)
    ]
    assert [t[1:] for t in reported if t[0] == "trainer-0"] == [
        (1.0, 3.2, "", True, ""),
        (3.2, 3.5, "optimizer params", False, "load"),
        (3.5, 4.5, "optimizer params", False, ""),
        (4.5, 4.75, "optimizer params", False, "offload"),
        (4.75, 4.9, "params", True, "offload"),
        (4.9, 6.0, "", True, ""),
    ]
    assert [t[1:] for t in reported if t[0] == "rollout-0"] == [
        (1.0, 3.0, "kv_cache params", False, ""),
        (3.0, 3.2, "kv_cache params", False, "offload"),
        (3.2, 4.9, "", True, ""),
        (4.9, 5.0, "kv_cache params", False, "load"),
        (5.0, 6.0, "kv_cache params", False, ""),
    ]


def test_a_broken_worker_stays_broken(tmp_path: Path):
    writer = SwitchesWriter(tmp_path / "s.jsonl", clock=FakeClock())
    writer.resident(1, 0.0, make_residency(START, D0))
    writer.switched(1, 0.0, make_switch(make_move("trainer-0", LOAD, (PARAMS,), 1.0, 2.0, error="lost", residence=Residence.BROKEN)))
    writer.close()
    *_, last = [band for band in bands(iter_rows(tmp_path / "s.jsonl"), 9.0) if band.worker == "trainer-0"]
    assert (last.start_s, last.end_s, last.broken, last.kinds) == (2.0, 9.0, True, ("params",))


def test_bands_of_a_real_arbiter_are_what_its_workers_saw(tmp_path: Path):
    async def scenario() -> None:
        reporter = make_reporter(tmp_path / "run", asyncio.get_running_loop().time)
        memory = Memory({D0: 12})
        arbiter = DeviceArbiter(memory.budget_bytes, on_switch=reporter.switched)
        for name, sizes, resident in (("trainer", {PARAMS: 4, OPTIMIZER: 6}, ()), ("engine", {PARAMS: 4, KV: 6}, None)):
            client, _ = make_client(memory, name, [D0], sizes, resident=resident)
            arbiter.add(client, resident=resident)
        reporter.resident(arbiter.residency())
        for name in ("engine", "trainer", "engine"):
            async with arbiter.use(name, what=f"{name} works", timeout_s=99):
                await asyncio.sleep(5)
        await arbiter.aclose()
        reporter.flush()
        rows = read_rows(RunFolder(tmp_path / "run").switches_jsonl)
        drawn = list(bands(rows, asyncio.get_running_loop().time()))
        began = [(float(when), worker, event) for when, worker, event in memory.log if event.startswith(("offload ", "load "))]
        reported = [(b.start_s, b.worker, f"{b.move['direction']} {'+'.join(b.move['kinds'])}") for b in drawn if b.move]
        assert sorted(reported) == sorted(event for event in began if not event[2].endswith(" kv_cache"))  # a drop takes no time
        assert len(reported) >= 4
        assert memory.over == []
        reporter.finish(RunStatus.SUCCEEDED)

    run_virtual(scenario())


MOVES = st.lists(
    st.tuples(
        st.sampled_from(["trainer-0", "trainer-1", "rollout-0"]),
        st.sampled_from([OFFLOAD, LOAD]),
        st.sets(st.sampled_from([PARAMS, GRADS, OPTIMIZER, KV]), min_size=1).map(lambda kinds: tuple(sorted(kinds))),
        st.floats(-0.5, 3),  # negative: reported late, or clocks that differ
        st.floats(0, 3),
        st.sampled_from([None, *Residence]),
    ),
    max_size=30,
)


@given(moves=MOVES, tail=st.floats(0, 5), tell_start=st.booleans())
@settings(max_examples=150, deadline=None)
def test_bands_never_overlap_and_leave_no_gap_to_the_end(tmp_path_factory, moves, tail, tell_start):
    path = tmp_path_factory.mktemp("bands") / "s.jsonl"
    writer = SwitchesWriter(path, clock=FakeClock())
    devices = {"trainer-0": (D0,), "trainer-1": (D1,), "rollout-0": (D0, D1)}
    begun: dict[str, float] = {}
    if tell_start:
        writer.resident(1, 0.0, make_residency({name: {PARAMS: ON} for name in devices}, D0, D1))
        begun = dict.fromkeys(devices, 0.0)
    now, ends = 1.0, [0.0]
    for worker, direction, kinds, wait, length, residence in moves:
        now = max(0.0, now + wait)
        begun.setdefault(worker, now)
        end = round(now + length, 6)
        writer.switched(1, 0.0, make_switch(make_move(worker, direction, kinds, now, end, devices=devices[worker], residence=residence)))
        ends.append(end)
    writer.close()
    end_s = max(ends) + tail
    by_worker: dict[str, list[Band]] = {}
    for band in bands(iter_rows(path), end_s):
        by_worker.setdefault(band.worker, []).append(band)
        if not tell_start:
            assert band.devices == devices[band.worker]
    for worker, mine in by_worker.items():
        assert mine[0].start_s == pytest.approx(begun[worker], abs=1e-6)
        assert mine[-1].end_s == pytest.approx(end_s, abs=1e-6)
        assert all(band.end_s > band.start_s for band in mine)
        assert all(left.end_s == right.start_s for left, right in pairwise(mine))
    for worker, start in begun.items():
        assert worker in by_worker or start >= end_s - 1e-6


# ---- the page ----------------------------------------------------------------------------------------------------


def _figure(folder: RunFolder) -> go.Figure:
    *_, chart = timeline_charts(read_rows(folder.timeline_jsonl), iter_rows(folder.switches_jsonl))
    return chart.figure


def test_bands_are_drawn_under_the_lanes_as_they_were(tmp_path: Path, golden):
    figure = _figure(played(tmp_path / "run", 1))
    drawn = [trace.to_plotly_json() for trace in figure.data if trace.yaxis == "y2"]
    assert golden.differences(GOLDEN / "bands.json", json.dumps(drawn, indent=1, ensure_ascii=False) + "\n") == ""
    assert list(figure.layout.yaxis2.ticktext) == ["node 0 device 0"]
    assert figure.layout.yaxis.domain[0] >= figure.layout.yaxis2.domain[1]


def test_the_page_holds_the_bands(tmp_path: Path):
    text = played(tmp_path / "run", 30).report_html.read_text()
    assert text.count("what is in the memory of each device") == 2
    assert "memory of trainer" in text


def test_a_run_without_switches_has_no_band_lanes():
    spans = [{"lane": "trainer", "phase": "train", "start_s": 0.0, "end_s": 1.0, "step": 1}]
    [chart] = timeline_charts(spans)
    assert {trace.yaxis for trace in chart.figure.data} == {None}
    assert "memory" not in chart.note


def _bands(devices: int, per_device: int) -> list[Band]:
    return [
        Band(
            client=f"rollout-{d}",
            worker=f"rollout-{d}",
            devices=(Device(d // 8, d % 8),),
            start_s=float(n),
            end_s=n + 1.0,
            kinds=("params",),
            partly=True,
            broken=False,
            move=None,
            before=None,
        )
        for d in reversed(range(devices))
        for n in range(per_device)
    ]


def test_many_devices_and_bands_stay_readable():
    few = choose(_bands(64, 3))
    assert (len(few.devices), few.num_devices, few.dropped) == (MAX_DEVICES, 64, 0)
    assert list(few.devices) == sorted(few.devices)
    assert "16 of 64 devices are drawn" in few.note
    busy = choose(_bands(64, 300))
    assert (len(busy.devices), len(busy.bands)) == (3, 900)
    one = choose(_bands(2, 5000))
    assert (len(one.devices), len(one.bands), one.dropped) == (1, MAX_BANDS, 4000)
    assert "the first 1000 of 5000 bands are drawn" in one.note
    assert choose([]) is None


def test_long_runs_cost_the_page_only_their_windows(tmp_path: Path):
    folder = played(tmp_path / "run", 60)
    found = within(iter_rows(folder.switches_jsonl), [(1.0, 9.0), (233.0, 241.0)])
    assert [len(window) for window in found] == [len(found[0])] * 2
    assert len(found[0]) < 30


def test_components_have_colors_of_their_own_and_many_engines_share_one():
    assert len({color for _, color in colors(["actor-1", "actor-2", "critic"]).values()}) == 3
    many = colors(["trainer", *(f"rollout-{i}" for i in range(len(COLORS)))])
    assert {group for group, _ in many.values()} == {"trainer", "rollout"}
    assert len({color for _, color in many.values()}) == 2
