"""Experiment trackers: what reaches them, that they never hold up or end a run, and what their real packages keep on disk."""

import json
import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rljob_api.v1alpha1.operations import Tracker, TrackerType
from rljob_runtime.errors import SetupError
from rljob_runtime.records import StepRecord
from rljob_runtime.report import FolderMode, Reporter, RunFolder, RunStatus, load_metrics
from rljob_runtime.report import trackers as registry
from rljob_runtime.report.jsonl import read_rows
from rljob_runtime.report.trackers import TRACKERS, TrackerPackage, check_installed
from rljob_runtime.report.trackers.feed import MAX_WAITING_BYTES, TrackerFeed, TrackerFeeds, run_id_of, start_trackers
from rljob_runtime.report.trackers.mlflow import flat
from rljob_runtime.report.trackers.process import follow
from rljob_runtime.report.trackers.protocol import TrackedRun
from tests.support.pace import until
from tests.support.report_fakes import INFO, FakeClock, make_record

RUN = {"project": "math", "name": "grpo", "run_id": "abc", "folder": "/nowhere", "config": {"spec": {"seed": 3}}}
COPIES_ITS_INPUT = "import sys; open(sys.argv[1], 'w').writelines(sys.stdin)"
FAILS = "import sys; sys.stdin.readline(); print('no such project'); sys.exit(4)"
READS_NOTHING = "import time; time.sleep(600)"


class Quiet:
    """A display that shows nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def feed(folder: Path, program: str, *arguments: Path) -> TrackerFeed:
    command = [sys.executable, "-I", "-S", "-c", program, *map(str, arguments)]
    return TrackerFeed(TrackerType.WANDB, command, RUN, folder / "tracker-wandb.log")


def warnings_of(feeds: TrackerFeeds) -> Callable[[], list[str]]:
    """All warnings so far."""
    problems: list[str] = []
    return lambda: problems.extend(feeds.problems()) or problems


def test_a_tracker_gets_the_run_every_step_in_order_and_how_it_ended(tmp_path: Path) -> None:
    feeds = TrackerFeeds([feed(tmp_path, COPIES_ITS_INPUT, tmp_path / "got")])
    records = [StepRecord(step=step, version=step, metrics={"a": step / 2, "lost": float("nan"), "x" * 9000: 1.0}) for step in range(1, 31)]
    for record in records:  # more than a pipe holds
        feeds.write(record)
    assert feeds.finish(succeeded=True) == []
    got = [json.loads(line) for line in (tmp_path / "got").read_text().splitlines()]
    assert got[0] == RUN
    assert got[1:-1] == [{"step": step, "metrics": {"a": step / 2, "x" * 9000: 1.0}} for step in range(1, 31)]
    assert got[-1] == {"succeeded": True}


def test_a_tracker_that_fails_is_named_once_and_the_run_goes_on(tmp_path: Path) -> None:
    feeds = TrackerFeeds([feed(tmp_path, FAILS), feed(tmp_path, COPIES_ITS_INPUT, tmp_path / "got")])
    problems = warnings_of(feeds)
    until("the tracker's end is reported", lambda: len(problems()) > 0)
    feeds.write(make_record(1))
    assert feeds.finish(succeeded=False) == []
    assert problems() == [
        f"tracker WandB ended (exit 4): no such project; the run goes on without it, its log: {tmp_path / 'tracker-wandb.log'}"
    ]
    assert [json.loads(line).get("step") for line in (tmp_path / "got").read_text().splitlines()] == [None, 1, None]


def test_a_tracker_that_does_not_read_never_holds_up_a_step_and_is_dropped_when_too_much_waits(tmp_path: Path) -> None:
    slow = feed(tmp_path, READS_NOTHING)
    large = StepRecord(step=1, version=1, metrics={"x" * (MAX_WAITING_BYTES // 4): 1.0})
    for _ in range(3):
        slow.write(large)
    assert slow.problems() == []
    slow.write(large)
    slow.write(large)
    (problem,) = slow.problems()
    assert "WandB does not take what it is given, 16," in problem or "WandB does not take what it is given, 20," in problem
    assert slow.has_ended()


def test_a_tracker_that_does_not_end_is_waited_for_until_its_time_is_over(tmp_path: Path) -> None:
    clock = FakeClock()
    feeds = TrackerFeeds([feed(tmp_path, READS_NOTHING)])
    (problem,) = feeds.finish(succeeded=True, timeout_s=20, clock=clock, sleep=lambda _: clock.advance(7))
    assert "had not sent everything when the time for it was over" in problem
    assert clock.now_s == 1021.0


def test_a_tracker_that_cannot_be_started_is_a_warning(tmp_path: Path) -> None:
    lost = TrackerFeed(TrackerType.MLFLOW, [str(tmp_path / "none")], RUN, tmp_path / "log")
    lost.write(make_record(1))
    assert [problem.partition(";")[0] for problem in lost.problems()] == ["tracker MLflow could not be started: No such file or directory"]


def test_a_reporter_warns_and_keeps_its_own_files(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path / "run", FolderMode.NEW)
    feeds = TrackerFeeds([feed(tmp_path, COPIES_ITS_INPUT, tmp_path / "got"), feed(tmp_path, FAILS)])
    with Reporter(folder, INFO, Quiet(), clock=FakeClock(), packages={}, ticker=False, trackers=feeds) as reporter:
        reporter.record(make_record(1))
        reporter.record(make_record(2))
        reporter.finish(RunStatus.FAILED, "broken")
    warnings = [str(row["text"]) for row in read_rows(folder.events_jsonl) if row["level"] == "warning"]
    assert len(warnings) == 1
    assert warnings[0].startswith("tracker WandB ended (exit 4): no such project")
    assert load_metrics(folder.metrics_jsonl).steps == (1, 2)
    rows = [json.loads(line) for line in (tmp_path / "got").read_text().splitlines()]
    assert rows[1]["metrics"] == make_record(1).metrics
    assert rows[-1] == {"succeeded": False}


class Opened:
    """A tracker that remembers."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def make(self, run: TrackedRun) -> "Opened":
        self.calls.append(run)
        return self

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.calls.append((step, dict(metrics)))

    def finish(self, *, succeeded: bool) -> None:
        self.calls.append(succeeded)


@pytest.mark.parametrize(("end", "succeeded"), [([{"succeeded": True}], True), ([], False)], ids=["said", "driver-lost"])
def test_a_tracked_run_ends_as_the_driver_says_and_failed_when_the_driver_is_lost(end: list[Any], succeeded: bool) -> None:
    opened = Opened()
    follow(map(json.dumps, [RUN, {"step": 1, "metrics": {"a": 0.5}}, *end]), opened.make)
    assert opened.calls == [TrackedRun(**RUN | {"folder": Path("/nowhere")}), (1, {"a": 0.5}), succeeded]


def test_a_run_keeps_its_identifier_until_it_is_overwritten(tmp_path: Path) -> None:
    first = run_id_of(RunFolder.open(tmp_path / "run", FolderMode.NEW))
    assert run_id_of(RunFolder.open(tmp_path / "run", FolderMode.RESUME)) == first
    assert run_id_of(RunFolder.open(tmp_path / "run", FolderMode.OVERWRITE)) != first


def test_missing_packages_are_named_with_their_extras_all_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "left_by_a_run").mkdir()  # a folder that an import would take for a package
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(
        registry,
        "TRACKERS",
        {
            TrackerType.WANDB: TrackerPackage(package="left_by_a_run", extra="wandb", module=""),
            TrackerType.MLFLOW: TrackerPackage(package="json", extra="mlflow", module=""),
            TrackerType.SWANLAB: TrackerPackage(package="no_such_tracker", extra="swanlab", module=""),
        },
    )
    with pytest.raises(SetupError) as error:
        check_installed([Tracker(type=kind) for kind in (TrackerType.WANDB, TrackerType.MLFLOW, TrackerType.SWANLAB)])
    assert str(error.value).splitlines() == [
        "spec.report.trackers[0].type WandB needs the package left_by_a_run, which is not installed; "
        "pip install 'rljob-runtime[wandb]', or remove the tracker",
        "spec.report.trackers[2].type SwanLab needs the package no_such_tracker, which is not installed; "
        "pip install 'rljob-runtime[swanlab]', or remove the tracker",
    ]


def test_a_spec_is_flat_in_mlflow() -> None:
    config = {"spec": {"components": [{"name": "a"}, {"name": "b"}], "seed": 3, "empty": {}}}
    assert flat(config) == [("spec.components.0.name", "a"), ("spec.components.1.name", "b"), ("spec.seed", "3")]


# ---- the packages themselves, without a network --------------------------------------------------------------------


INSTALLED = (TrackerType.WANDB, TrackerType.MLFLOW, TrackerType.TRACKIO)
CREDENTIALS = (
    *("WANDB_API_KEY", "WANDB_MODE", "MLFLOW_TRACKING_URI", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_DIR"),
    *("SWANLAB_API_KEY", "SWANLAB_MODE"),
)


def two_attempts(path: Path, kinds: tuple[TrackerType, ...]) -> RunFolder:
    """A run of steps 1 and 2 that failed, and its continuation by step 3."""
    for steps, succeeded in (((1, 2), False), ((3,), True)):
        folder = RunFolder.open(path, FolderMode.RESUME_OR_NEW)
        feeds = start_trackers([Tracker(type=kind, project="maths") for kind in kinds], folder, "grpo", {"spec": {"seed": 3}})
        for step in steps:
            feeds.write(make_record(step))
        assert feeds.finish(succeeded=succeeded, timeout_s=180) == []
    return folder


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunFolder]:
    with pytest.MonkeyPatch.context() as patch:
        for name in CREDENTIALS:
            patch.delenv(name, raising=False)
        yield two_attempts(tmp_path_factory.mktemp("tracked") / "run", INSTALLED)


REWARDS = [(step, make_record(step).metrics["reward/mean"]) for step in (1, 2, 3)]


def test_mlflow_has_one_run_with_all_steps(tracked: RunFolder) -> None:
    (run,) = {path.parent for path in (tracked.trackers / "mlflow").glob("*/*/meta.yaml")}
    rows = [line.split() for line in (run / "metrics" / "reward" / "mean").read_text().splitlines()]
    assert [(int(step), float(value)) for _, value, step in rows] == REWARDS
    assert (run / "tags" / "rljob.runId").read_text() == run_id_of(tracked)
    assert (run / "params" / "spec.seed").read_text() == "3"
    assert "status: 3" in (run / "meta.yaml").read_text()  # finished
    assert "name: maths" in (run.parent / "meta.yaml").read_text()


def test_mlflow_s_own_client_reads_back_metrics_of_every_step_and_parameters(tracked: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=(tracked.trackers / "mlflow").resolve().as_uri())
    experiment = client.get_experiment_by_name("maths")
    (run,) = client.search_runs([experiment.experiment_id], "metrics.`reward/mean` > 0 and params.`spec.seed` = '3'")
    assert (run.info.run_name, run.info.status, run.data.params) == ("grpo", "FINISHED", {"spec.seed": "3"})
    for name in make_record(1).metrics:
        history = client.get_metric_history(run.info.run_id, name)
        assert [(each.step, each.value) for each in history] == [(step, make_record(step).metrics[name]) for step in (1, 2, 3)]
        assert run.data.metrics[name] == history[-1].value


def test_trackio_s_own_client_reads_back_metrics_of_every_step_and_parameters(tracked: RunFolder) -> None:
    code = """import json, trackio
(run,) = trackio.Api().runs("maths")
print(json.dumps([run.name, run.config, trackio.SQLiteStorage.get_logs("maths", run.name, run_id=run.id)]))"""
    environment = os.environ | {"TRACKIO_DIR": str(tracked.trackers / "trackio")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    name, config, rows = json.loads(done.stdout)
    assert (name, config["spec"]) == (f"grpo-{run_id_of(tracked)}", {"seed": 3})
    assert [(row["step"], row["reward/mean"]) for row in rows] == REWARDS


def test_trackio_has_one_run_with_all_steps(tracked: RunFolder) -> None:
    with sqlite3.connect(tracked.trackers / "trackio" / "maths.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by step").fetchall()
    database.close()
    assert {name for name, _, _ in rows} == {f"grpo-{run_id_of(tracked)}"}
    assert [(step, json.loads(metrics)["reward/mean"]) for _, step, metrics in rows] == REWARDS


def wandb_records(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format behind a header of 7 bytes."""
    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        room = 2**15 - at % 2**15
        if room < 7:
            at += room
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def test_wandb_has_files_of_one_run_to_sync(tracked: RunFolder) -> None:
    from wandb.proto.wandb_internal_pb2 import Record

    rewards, ids = [], set()
    for path in sorted((tracked.trackers / "wandb").glob("wandb/offline-run-*/*.wandb")):
        for data in wandb_records(path):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                rewards.append((items["training step"], items["reward/mean"]))
            elif record.WhichOneof("record_type") == "run":
                ids.add((record.run.run_id, record.run.project, record.run.display_name))
    assert rewards == REWARDS
    assert ids == {(run_id_of(tracked), "maths", "grpo")}


def test_every_tracker_of_the_schema_has_a_module_and_is_tested() -> None:
    assert set(TRACKERS) == set(TrackerType)
    assert set(TrackerType) - set(INSTALLED) == {TrackerType.SWANLAB}  # tests/integration/test_swanlab.py
