"""What a user sees: plain lines, the live panel, the report page, and the reporter that feeds them."""

import dataclasses
import io
import json
import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from rich.console import Console

from rljob_runtime.errors import ClusterError, Interrupted, RuntimeFault
from rljob_runtime.records import StepRecord
from rljob_runtime.report import (
    FolderMode,
    Level,
    PlainDisplay,
    Reporter,
    RunFolder,
    RunStatus,
    UnknownMetricError,
    load_metrics,
    load_summary,
)
from rljob_runtime.report.charts import MAX_POINTS, MAX_SPANS, metric_charts, running_mean, timeline_charts
from rljob_runtime.report.choose_display import make_display
from rljob_runtime.report.display import PhaseView, plain_line, view_of
from rljob_runtime.report.episodes import MAX_TEXT_CHARS
from rljob_runtime.report.jsonl import read_rows
from rljob_runtime.report.live import LiveDisplay, stacked_bar
from rljob_runtime.report.metrics import table_of
from tests.support.pace import HANG_S
from tests.support.report_fakes import GOLDEN, INFO, FakeClock, first_ids, make_record, make_trajectory


class FakeRun:
    """A reporter on a fake clock with plain output."""

    def __init__(self, path: Path, *, resumed_step: int | None = None, info=INFO) -> None:
        self.clock = FakeClock()
        self.stream = io.StringIO()
        self.folder = RunFolder.open(path, FolderMode.RESUME_OR_NEW)
        display = PlainDisplay(self.stream, clock=self.clock)
        self.reporter = Reporter(
            self.folder, info, display, resumed_step=resumed_step, clock=self.clock, packages={"python": "3.11"}, ticker=False
        )

    def step(self, number: int, **changes: float) -> None:
        start = self.clock()
        self.clock.advance(0.1)
        self.reporter.span("trainer", "train", start, self.clock(), number)
        self.reporter.record(make_record(number, **changes))
        self.reporter.trajectories(number, [make_trajectory(i, float(i % 2)) for i in range(4)], first_ids)

    def lines(self) -> str:
        return self.stream.getvalue().replace(str(self.folder.path), "RUN")


# ---- plain lines -------------------------------------------------------------------------------------------------


def test_plain_output_of_a_whole_run(tmp_path: Path, golden):
    run = FakeRun(tmp_path / "run")
    with run.reporter as reporter:
        with reporter.phase("starting the cluster"):
            run.clock.advance(3.2)
        with reporter.phase("loading the engine"):
            for _ in range(35):
                run.clock.advance(1)
                reporter.tick()
        for number in range(1, 31):
            run.clock.advance(0.9)
            run.step(number, **({"train__grad_norm": math.nan} if number == 9 else {}))
        reporter.event("checkpoint of step 30 written")
        reporter.finish(RunStatus.SUCCEEDED)
    assert golden.differences(GOLDEN / "plain_run.txt", run.lines()) == ""


def test_a_failed_run_says_why(tmp_path: Path, golden):
    run = FakeRun(tmp_path / "run")

    def driver() -> None:
        with run.reporter as reporter:
            run.step(1)
            with reporter.phase("loading the engine"):
                raise ClusterError("2 devices asked,\n1 there; lower the count")

    with pytest.raises(ClusterError):
        driver()
    assert golden.differences(GOLDEN / "plain_failed.txt", run.lines()) == ""
    summary = load_summary(run.folder.summary_json)
    assert (summary.status, summary.failure) == (RunStatus.FAILED, "ClusterError: 2 devices asked, 1 there; lower the count")
    assert "2 devices asked" in run.folder.report_html.read_text()


@pytest.mark.parametrize("error", [Interrupted(), KeyboardInterrupt()])
def test_an_interrupted_run_is_no_failure(tmp_path: Path, error):
    run = FakeRun(tmp_path / "run")
    with pytest.raises(type(error)), run.reporter:
        raise error
    summary = load_summary(run.folder.summary_json)
    assert (summary.status, summary.failure, summary.steps) == (RunStatus.INTERRUPTED, None, 0)


def test_a_line_leaves_out_what_no_step_reported():
    bare = dataclasses.replace(make_record(7), metrics={"reward/mean": 0.5})
    assert plain_line(view_of([bare]), 300) == "step   7/300  reward 0.500  v7"


def test_a_view_averages_its_steps_and_ignores_what_is_not_finite():
    view = view_of([make_record(1, reward__mean=0.2), make_record(2, reward__mean=math.nan), make_record(3, reward__mean=0.4)])
    assert view.reward == pytest.approx(0.3)
    assert dict(view.phases)["generate"] == pytest.approx(0.58)
    assert "checkpoint" not in dict(view.phases)
    with pytest.raises(ValueError, match="at least one"):
        view_of([])


def test_a_pipe_gets_plain_lines_and_a_terminal_the_panel(monkeypatch):
    clock = FakeClock()
    assert isinstance(make_display(io.StringIO(), clock=clock), PlainDisplay)

    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("TERM", "xterm-256color")
    assert isinstance(make_display(Terminal(io.BytesIO(), encoding="utf-8"), clock=clock), LiveDisplay)
    assert isinstance(make_display(Terminal(io.BytesIO(), encoding="ascii"), clock=clock), PlainDisplay)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_display(Terminal(io.BytesIO(), encoding="utf-8"), clock=clock), PlainDisplay)


# ---- the live panel ----------------------------------------------------------------------------------------------


def _frame(width: int, steps: int) -> str:
    clock = FakeClock()
    console = Console(
        file=io.StringIO(), width=width, force_terminal=True, color_system=None, legacy_windows=False, _environ={"TERM": "xterm"}
    )
    display = LiveDisplay(console, clock=clock)
    display.started(INFO, Path("runs/math-grpo"), None)
    display.close()  # frames are asked for by hand
    display.phase_started("starting the cluster")
    display.phase_ended(PhaseView(name="starting the cluster", elapsed_s=3.2), failed=False)
    for number in range(1, steps + 1):
        display.step(make_record(number))
    if steps:
        display.event("reward sums timed out on 3 of 64 responses", Level.WARNING)
        display.event("checkpoint of step 10 written", Level.INFO)
    display.phase_started("saving the model" if steps else "loading the engine")
    clock.advance(2.5)
    out = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False, _environ={"TERM": "xterm"})
    out.print(display.render())
    return out.file.getvalue()


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("steps", [0, 20])
def test_the_panel(width, steps, golden):
    frame = _frame(width, steps)
    assert {len(line) for line in frame.splitlines()} == {width}
    assert golden.differences(GOLDEN / f"panel_{width}_{steps}.txt", frame) == ""


def test_a_narrow_terminal_still_gets_a_panel():
    assert {len(line) for line in _frame(50, 20).splitlines()} == {50}


def test_an_agentic_run_shows_success_turns_and_environment_time() -> None:
    episodes = {"episode__turns_mean": 3.25, "episode__environment_s": 0.0123, "episode__errors": 2.0, "episode__timeouts": 1.0}
    out = Console(file=io.StringIO(), width=120, color_system=None, legacy_windows=False, _environ={"TERM": "xterm"})
    display = LiveDisplay(out, clock=FakeClock())
    display.started(INFO, Path("runs/lake"), None)
    display.close()
    display.step(make_record(10, **episodes))
    out.print(display.render())
    frame = out.file.getvalue()
    assert re.search(r"success +30%.* 3 failed a step", frame)
    assert re.search(r"turns +3\.2.* environment 12 ms", frame)
    assert "pass rate" not in frame
    assert "len 9.5  turns 3.2  6.4k tok/s" in plain_line(view_of([make_record(10, **episodes)]), 30)


def test_an_agentic_run_has_charts_of_its_episodes() -> None:
    ended = {"episode__turns_mean": 3.0, "episode__turns_max": 9.0, "episode__environment_s": 0.01, "episode__stopped__done": 0.75}
    ended["episode__success"] = 0.5
    rows = [{"step": s, "version": s, "wall_s": 1.0, **make_record(s, **ended).metrics} for s in range(1, 4)]
    rows[1]["episode/stopped/maxTurns"] = 0.25
    charts = {chart.title: chart.figure for chart in metric_charts(table_of(rows))}
    assert {"Success", "Turns of an episode", "Environment time"} <= charts.keys()
    assert "Pass rate" not in charts
    shares = {trace.name: list(trace.y) for trace in charts["How episodes ended"].data}
    assert shares == {"done": [0.75, 0.75, 0.75], "maxTurns": [0.0, 0.25, 0.0]}


def test_the_bar_fills_its_width_also_when_phases_overlap():
    assert stacked_bar([("generate", 0.5), ("train", 0.25)], 20).plain == "█" * 15 + "░" * 5
    assert stacked_bar([("generate", 0.9), ("train", 0.9)], 20).plain == "█" * 20


# ---- the reporter ------------------------------------------------------------------------------------------------


def test_resume_goes_on_where_the_checkpoint_was(tmp_path: Path):
    path = tmp_path / "run"
    first = FakeRun(path)
    for number in range(1, 15):
        first.step(number)
    first.reporter.flush()  # and then the process is killed
    second = FakeRun(path, resumed_step=10)
    second.clock.advance(2.0)
    for number in range(11, 31):
        second.step(number)
    summary = second.reporter.finish(RunStatus.SUCCEEDED)
    table = load_metrics(path / "metrics.jsonl")
    assert table.steps == tuple(range(1, 31))
    assert list(table.wall_s) == sorted(table.wall_s)
    assert table.wall_s[10] == pytest.approx(1.4 + 2.0 + 0.1)  # the lost work of steps 11 to 14 counts
    assert [row["step"] for row in read_rows(path / "timeline.jsonl")] == list(range(1, 31))
    assert (summary.steps, summary.startup_s) == (30, pytest.approx(2.0))
    assert "resumed after step 10" in second.lines()


def test_trajectories_of_lost_steps_are_removed(tmp_path: Path):
    first = FakeRun(tmp_path / "run")
    for number in range(1, 15):
        first.step(number)
    first.reporter.flush()
    FakeRun(tmp_path / "run", resumed_step=5)
    assert [p.name for p in first.folder.trajectories.iterdir()] == ["step-000001.jsonl"]


def test_an_attempt_that_died_before_its_first_checkpoint_leaves_no_steps_behind(tmp_path: Path):
    first = FakeRun(tmp_path / "run")
    first.step(1)
    first.step(2)
    first.reporter.flush()
    second = FakeRun(tmp_path / "run")
    second.step(1)
    second.reporter.finish(RunStatus.INTERRUPTED)
    table = load_metrics(second.folder.metrics_jsonl)
    assert table.steps == (1,)
    assert table.wall_s == (pytest.approx(0.3),)
    assert [row["step"] for row in read_rows(second.folder.timeline_jsonl)] == [1]


def test_a_tick_brings_buffered_rows_to_disk(tmp_path: Path):
    run = FakeRun(tmp_path / "run")
    run.step(1)
    assert run.folder.metrics_jsonl.read_text() == ""
    run.reporter.tick()
    assert json.loads(run.folder.metrics_jsonl.read_text())["step"] == 1
    assert len(read_rows(run.folder.timeline_jsonl)) == 1


def test_an_unknown_metric_ends_the_run_as_failed_with_the_steps_before_it_kept(tmp_path: Path):
    run = FakeRun(tmp_path / "run")
    run.step(1)
    with pytest.raises(UnknownMetricError), run.reporter:
        run.step(2, train__los=1.0)
    assert load_metrics(run.folder.metrics_jsonl).steps == (1,)
    assert "train/los" in load_summary(run.folder.summary_json).failure


def test_misuse_is_refused(tmp_path: Path):
    run = FakeRun(tmp_path / "run")
    with pytest.raises(ValueError, match="before its start"):
        run.reporter.span("trainer", "train", 2.0, 1.0, 1)
    with run.reporter.phase("loading"), pytest.raises(ValueError, match="running already"):
        with run.reporter.phase("loading"):
            pass
    run.reporter.finish(RunStatus.SUCCEEDED)
    with pytest.raises(RuntimeFault, match="finished already"):
        run.reporter.finish(RunStatus.SUCCEEDED)


def test_a_report_that_cannot_be_written_does_not_hide_the_error(tmp_path: Path):
    run = FakeRun(tmp_path / "run")
    run.folder.summary_json.mkdir()  # nothing can replace a folder
    with pytest.raises(ClusterError, match="node lost") as caught, run.reporter:
        raise ClusterError("node lost")
    assert "summary.json: cannot write" in caught.value.__notes__[0]


def test_importing_and_running_needs_neither_torch_nor_ray(tmp_path: Path):
    code = (
        "import sys, time; from pathlib import Path; from rljob_runtime.report import *\n"
        "heavy = {'torch', 'ray', 'plotly', 'tensorboard', 'vllm'} & sys.modules.keys(); assert not heavy, heavy\n"
        f"info = RunInfo(job_name='j', model='m', algorithm='a', devices='d', total_steps=1, seed=0, spec_yaml='')\n"
        f"folder = RunFolder.open(Path({str(tmp_path / 'run')!r}), FolderMode.NEW)\n"
        "with Reporter(folder, info, make_display(sys.stdout, clock=time.monotonic)): pass\n"
        "heavy = {'torch', 'ray', 'vllm'} & sys.modules.keys(); assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_S, env={"PYTHONPATH": ":".join(sys.path)})


# ---- the page ----------------------------------------------------------------------------------------------------


class Page(HTMLParser):
    """Checks nesting and collects tags and the text outside scripts and styles."""

    VOID = frozenset({"meta", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open_tags: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open_tags == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open_tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open_tags.pop() == tag

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open_tags):
            self.text += data


def _page(tmp_path: Path) -> Path:
    evil = "</pre><script>alert('x')</script>"
    info = dataclasses.replace(INFO, job_name="a<b", spec_yaml=f"note: {evil}\n")
    run = FakeRun(tmp_path / "run", info=info)
    with run.reporter.phase("starting <i>the cluster</i></script>"):
        run.clock.advance(1.0)
    for number in range(1, 31):
        run.step(number)
    made = [make_trajectory(0, 1.0), make_trajectory(1, None)]
    run.reporter.trajectories(30, made, lambda responses: [evil + "y" * MAX_TEXT_CHARS, "1"])
    run.reporter.event(f"warned {evil}", Level.WARNING)
    run.reporter.finish(RunStatus.SUCCEEDED)
    return run.folder.report_html


def test_the_page_parses_escapes_and_fetches_nothing(tmp_path: Path):
    path = _page(tmp_path)
    text = path.read_text()
    page = Page(text)
    assert path.stat().st_size < 6e6
    assert not [attrs for _, attrs in page.tags if {"src", "href"} & attrs.keys()]
    assert page.text.count("</pre><script>alert('x')</script>") == 3  # spec, response, event: as text
    assert "<script>alert(" not in text
    assert "a<b" in page.text
    assert "more characters in trajectories/step-000030.jsonl" in page.text
    for title in (
        "Reward",
        "Pass rate",
        "Time by phase",
        "Start-up",
        "Timeline, steps 1 to 6",
        "Timeline, steps 25 to 30",
        "Resolved spec",
    ):
        assert title in page.text


def test_every_chart_has_labeled_axes(tmp_path: Path):
    table = table_of([{"step": r.step, "version": 1, "wall_s": 1.0, **r.metrics} for r in map(make_record, range(1, 31))])
    charts = metric_charts(table)
    assert [c.title for c in charts] == [
        "Reward",
        "Pass rate",
        "Response length",
        "Speed",
        "Gradient norm",
        "Trainer against engine",
        "Staleness",
    ]
    for chart in charts:
        assert chart.figure.layout.xaxis.title.text == "step"
        assert chart.figure.layout.yaxis.title.text
        assert chart.note


def test_long_runs_are_drawn_small():
    rows = [{"step": s, "version": s, "wall_s": 1.0, "reward/mean": 0.5} for s in range(1, 20_001)]
    for trace in metric_charts(table_of(rows))[0].figure.data:
        assert len(trace.x) <= MAX_POINTS
    spans = [
        {"lane": f"engine {i}", "phase": "generate", "start_s": s, "end_s": s + 0.5, "step": s} for s in range(1, 1001) for i in range(400)
    ]
    for chart in timeline_charts(spans):
        assert sum(len(trace.x) for trace in chart.figure.data) <= MAX_SPANS
        assert re.search(r"first 1500 of 2400 spans", chart.note)


def test_running_mean_skips_what_is_not_finite():
    assert running_mean([1.0, math.nan, 3.0, 5.0], 2) == [1.0, 1.0, 3.0, 4.0]


def test_a_validation_alone_has_no_steps_to_show(tmp_path: Path) -> None:
    info = dataclasses.replace(INFO, total_steps=0)
    record = StepRecord(step=0, version=0, metrics={"validation/version": 0.0, "validation/mean": 0.25, "validation/pass_rate": 0.125})
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None, _environ={"TERM": "xterm"})
    live = LiveDisplay(console, clock=FakeClock())
    live.started(info, tmp_path, None)
    live.close()
    live.step(record)
    out = Console(file=io.StringIO(), width=100, color_system=None, _environ={"TERM": "xterm"})
    out.print(live.render())
    assert "validation" in out.file.getvalue()
    run = FakeRun(tmp_path / "run", info=info)
    run.reporter.record(record)
    summary = run.reporter.finish(RunStatus.SUCCEEDED)
    assert (summary.validation_mean, summary.validation_pass_rate) == (0.25, 0.125)
    assert "validation  0.250, 12% passed" in run.lines()
    assert "step 0" not in run.lines()
