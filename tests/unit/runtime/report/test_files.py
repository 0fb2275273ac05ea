"""Metrics, folder, trajectories, summary: what a run leaves on disk."""

import contextlib
import errno
import io
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_runtime.errors import CheckpointError, RuntimeFault
from rljob_runtime.report import (
    METRICS,
    FolderMode,
    PlainDisplay,
    Reporter,
    RunFolder,
    RunStatus,
    TrajectorySampling,
    UnknownMetricError,
    load_metrics,
    load_summary,
)
from rljob_runtime.report.disk import replace_text, require_space, writing
from rljob_runtime.report.jsonl import JsonLinesWriter, read_rows, truncate_after
from rljob_runtime.report.metrics import MetricsWriter, table_of
from rljob_runtime.report.names import GROUP_TITLES, PHASES, describe, markdown_table
from rljob_runtime.report.summary import best_window, package_versions, save_summary, summarize, window_mean
from rljob_runtime.report.tensorboard import TensorboardWriter
from rljob_runtime.report.text import bucket_means, format_bytes, format_count, format_seconds, sparkline
from rljob_runtime.report.trajectories import choose, read_trajectories, write_trajectories
from tests.support.report_fakes import INFO, FakeClock, first_ids, make_record, make_trajectory

# ---- names -------------------------------------------------------------------------------------------------------


def test_every_metric_has_a_group_a_unit_and_a_meaning():
    units = {"1", "s", "bytes", "bytes/s", "GB/s", "tokens", "tokens/s", "fraction", "nats", "versions"}
    for name, info in METRICS.items():
        assert name.partition("/")[0] in GROUP_TITLES, name
        assert info.unit in units, name
        assert info.meaning.strip(". ") == info.meaning != "", name
        if name.endswith("_s") and not name.endswith("_per_s"):
            assert info.unit == "s", name
        if name.endswith("_bytes"):
            assert info.unit == "bytes", name


def test_every_phase_has_its_metric():
    assert [describe(f"time/{phase}_s").unit for phase in PHASES] == ["s"] * len(PHASES)


def test_the_reference_page_lists_every_metric_once():
    table = markdown_table()
    for name in METRICS:
        assert table.count(f"| `{name.replace('/*', '/<name>')}` |") == 1


def test_a_family_takes_any_last_part():
    assert describe("reward/part/my.rewards:exact").name == "reward/part/*"
    assert describe("reward/source/org/data").name == "reward/source/*"


@pytest.mark.parametrize("name", ["reward/meen", "reward/part/*", "reward/part/", "nothing", ""])
def test_unknown_names_are_refused(name):
    with pytest.raises(UnknownMetricError):
        describe(name)


def test_the_refusal_proposes_the_nearest_name():
    with pytest.raises(UnknownMetricError, match="reward/mean"):
        describe("reward/meen")


# ---- metrics.jsonl -----------------------------------------------------------------------------------------------


def test_an_unregistered_metric_cannot_be_written(tmp_path: Path):
    writer = MetricsWriter(tmp_path / "metrics.jsonl", clock=FakeClock())
    writer.write(make_record(1), 0.5)
    with pytest.raises(UnknownMetricError, match="train/los"):
        writer.write(make_record(2, train__los=1.0), 0.6)
    writer.close()
    assert load_metrics(tmp_path / "metrics.jsonl").steps == (1,)


def test_numbers_that_are_not_finite_become_null(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path, clock=FakeClock())
    writer.write(make_record(1, train__grad_norm=math.nan, train__total_loss=-math.inf), 0.5)
    writer.close()
    row = json.loads(path.read_text())
    assert row["train/grad_norm"] is None
    assert row["train/total_loss"] is None
    assert (row["step"], row["version"], row["wall_s"]) == (1, 1, 0.5)
    assert math.isnan(load_metrics(path).column("train/grad_norm")[0])


def test_rows_reach_the_disk_a_second_after_the_last_flush(tmp_path: Path):
    path, clock = tmp_path / "rows.jsonl", FakeClock()
    writer = JsonLinesWriter(path, clock=clock)
    writer.write({"step": 1})
    clock.advance(0.9)
    writer.write({"step": 2})
    assert path.read_text() == ""
    clock.advance(0.1)
    writer.write({"step": 3})
    assert [row["step"] for row in read_rows(path)] == [1, 2, 3]
    writer.close()
    writer.close()


@given(steps=st.lists(st.integers(1, 40), max_size=40), kept=st.integers(0, 40))
def test_resume_keeps_exactly_the_rows_up_to_its_step(tmp_path_factory, steps, kept):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps({"step": s, "n": n}) + "\n" for n, s in enumerate(steps)))
    rows = truncate_after(path, kept)
    assert rows == [{"step": s, "n": n} for n, s in enumerate(steps) if s <= kept]
    assert read_rows(path) == rows


def test_a_torn_last_line_is_dropped_on_resume_and_appending_goes_on_cleanly(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step":1}\n{"step":2}\n{"step":3,"rew')
    assert [row["step"] for row in truncate_after(path, 9)] == [1, 2]
    writer = JsonLinesWriter(path, clock=FakeClock())
    writer.write({"step": 3})
    writer.close()
    assert path.read_text() == '{"step":1}\n{"step":2}\n{"step":3}\n'


def test_what_is_no_text_is_written_as_question_marks(tmp_path: Path):
    """A policy can have a tool answer with half a pair of UTF-16; no file may refuse it."""
    half = "\ud83d!"
    writer = JsonLinesWriter(tmp_path / "rows.jsonl", clock=lambda: 0.0)
    writer.write({"text": half})
    writer.close()
    assert json.loads((tmp_path / "rows.jsonl").read_text()) == {"text": "?!"}
    replace_text(tmp_path / "page.html", half, "the page")
    assert (tmp_path / "page.html").read_text() == "?!"
    folder, out = RunFolder.open(tmp_path / "run", FolderMode.NEW), io.StringIO()
    with contextlib.suppress(ValueError), Reporter(folder, INFO, PlainDisplay(out, clock=lambda: 0.0), packages={}, ticker=False) as report:
        report.event(half)
        raise ValueError(half)
    assert json.loads((folder.path / "summary.json").read_text())["failure"] == "ValueError: ?!"
    out.getvalue().encode()


@pytest.mark.parametrize(("line", "what"), [("{broken", "not JSON"), ("[1]", "not a JSON object")])
def test_a_malformed_line_elsewhere_is_named(tmp_path: Path, line, what):
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"step":1}}\n{line}\n{{"step":2}}\n')
    with pytest.raises(RuntimeFault, match=rf"rows.jsonl:2: .*{what}|rows.jsonl:2: a list, {what}"):
        read_rows(path)


def test_a_full_disk_is_an_error_that_names_the_file_and_the_remedy(tmp_path: Path):
    path = tmp_path / "rows.jsonl"
    path.symlink_to("/dev/full")
    writer = JsonLinesWriter(path, clock=FakeClock())
    writer.write({"step": 1})
    with pytest.raises(RuntimeFault, match=r"rows\.jsonl: cannot write buffered lines: no space left: 11 B needed, .* free; free some"):
        writer.flush()


def test_tensorboard_holds_the_finite_scalars_and_forgets_steps_that_are_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.summary.writer import event_file_writer

    # Files of one second are read by the process's count of them, as text: its tenth would come before its ninth.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    first = TensorboardWriter(tmp_path, wall_time=lambda: 1.0)
    for step in (1, 2, 3):
        first.write(make_record(step, train__grad_norm=math.nan if step == 2 else 1.0))
    first.close()
    second = TensorboardWriter(tmp_path, purge_from_step=3, wall_time=lambda: 2.0)
    second.write(make_record(3, reward__mean=0.9))
    second.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [e.step for e in events.Scalars("train/grad_norm")] == [1, 3]
    rewards = events.Scalars("reward/mean")
    assert [e.step for e in rewards] == [1, 2, 3]
    assert rewards[-1].value == pytest.approx(0.9)


# ---- the folder --------------------------------------------------------------------------------------------------


def _run_folder(path: Path) -> RunFolder:
    folder = RunFolder.open(path, FolderMode.NEW)
    folder.metrics_jsonl.write_text('{"step":1}\n')
    return folder


def test_a_new_folder_has_its_subfolders(tmp_path: Path):
    folder = RunFolder.open(tmp_path / "a" / "run", FolderMode.NEW)
    assert all(p.is_dir() for p in (folder.tensorboard, folder.trajectories, folder.checkpoints, folder.logs))
    assert folder.trajectories_of(10).name == "step-000010.jsonl"


def test_new_refuses_a_run_and_anything_else_that_is_there(tmp_path: Path):
    _run_folder(tmp_path / "run")
    with pytest.raises(RuntimeFault, match=r"holds a run already; resume it \(--resume\), overwrite it \(--overwrite\), .* \(--run-dir\)"):
        RunFolder.open(tmp_path / "run", FolderMode.NEW)
    with pytest.raises(RuntimeFault, match=r"is not empty; choose another output folder"):
        RunFolder.open(tmp_path, FolderMode.NEW)


def test_overwrite_clears_a_run_but_no_other_folder(tmp_path: Path):
    folder = _run_folder(tmp_path / "run")
    (folder.checkpoints / "step-1").mkdir()
    RunFolder.open(folder.path, FolderMode.OVERWRITE)
    assert not folder.metrics_jsonl.exists()
    assert list(folder.checkpoints.iterdir()) == []
    thesis = tmp_path / "home" / "thesis.tex"
    thesis.parent.mkdir()
    thesis.write_text("years of work")
    with pytest.raises(RuntimeFault, match="not a run folder"):
        RunFolder.open(thesis.parent, FolderMode.OVERWRITE)
    assert thesis.read_text() == "years of work"


def test_overwrite_does_not_follow_links(tmp_path: Path):
    data = tmp_path / "data"
    data.mkdir()
    (data / "train.jsonl").write_text("x")
    folder = _run_folder(tmp_path / "run")
    (folder.path / "data").symlink_to(data)
    RunFolder.open(folder.path, FolderMode.OVERWRITE)
    assert (data / "train.jsonl").exists()
    assert not (folder.path / "data").exists()


def test_spec_and_metrics_without_a_marker_are_a_run(tmp_path: Path):
    folder = _run_folder(tmp_path / "run")
    folder.spec_yaml.write_text("kind: RLJob\n")
    folder.marker.unlink()
    assert RunFolder.open(folder.path, FolderMode.RESUME).metrics_jsonl.read_text() == '{"step":1}\n'


def test_resume_needs_a_run_unless_it_may_start_one(tmp_path: Path):
    with pytest.raises(RuntimeFault, match="holds no run to resume"):
        RunFolder.open(tmp_path / "missing", FolderMode.RESUME)
    assert RunFolder.open(tmp_path / "missing", FolderMode.RESUME_OR_NEW).marker.exists()
    assert RunFolder.open(tmp_path / "missing", FolderMode.RESUME_OR_NEW).marker.exists()
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(RuntimeFault, match="not a run folder"):
        RunFolder.open(tmp_path, FolderMode.RESUME_OR_NEW)


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path):
    (tmp_path / "run").write_text("x")
    with pytest.raises(RuntimeFault, match="is a file"):
        RunFolder.open(tmp_path / "run", FolderMode.NEW)


def test_no_space_says_path_needed_free_and_remedy(tmp_path: Path):
    path = tmp_path / "step-10"
    with pytest.raises(CheckpointError, match=r"step-10: no space for a checkpoint: 1024\.0 TiB needed, .* free; free some space"):
        require_space(path, 2**50, "a checkpoint", error=CheckpointError)
    with pytest.raises(CheckpointError, match=r"step-10: cannot write the shard: no space left: 3\.0 MiB needed, .* free") as caught:
        with writing(path, "the shard", needed_bytes=3 * 2**20, error=CheckpointError):
            raise OSError(errno.ENOSPC, "No space left on device")
    assert isinstance(caught.value.__cause__, OSError)


def test_a_read_only_place_says_so(tmp_path: Path):
    with pytest.raises(RuntimeFault, match="not writable"):
        with writing(tmp_path, "the run folder"):
            raise PermissionError(errno.EACCES, "Permission denied")


def test_a_folder_below_one_that_may_not_be_read_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refused(self: Path, *_: object, **__: object) -> bool:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "exists", refused)
    with pytest.raises(RuntimeFault, match=r"run: cannot write the run folder: not writable \(Permission denied\)"):
        RunFolder.open(tmp_path / "run", FolderMode.NEW)


def test_replacing_a_file_leaves_no_temporary_and_names_the_path_on_failure(tmp_path: Path):
    replace_text(tmp_path / "a.json", "{}", "it")
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    with pytest.raises(RuntimeFault, match=r"missing/a\.json: cannot write it"):
        replace_text(tmp_path / "missing" / "a.json", "{}", "it")


# ---- trajectories ------------------------------------------------------------------------------------------------


def test_the_choice_spans_best_to_worst_and_failed_rewards_come_last():
    made = [make_trajectory(i, s) for i, s in enumerate([0.2, 0.9, None, 0.5, 0.1, 0.7, 0.3])]
    assert [t.reward.score for t in choose(made, 4)] == [0.9, 0.5, 0.2, None]
    assert [t.reward.score for t in choose(made, 1)] == [0.9]
    assert len(choose(made, 100)) == 7


@given(scores=st.lists(st.one_of(st.none(), st.floats(-5, 5)), max_size=30), count=st.integers(1, 12))
def test_the_choice_has_no_duplicates_and_the_asked_size(scores, count):
    made = [make_trajectory(i, s) for i, s in enumerate(scores)]
    chosen = [(t.group_id, t.sample_index) for t in choose(made, count)]
    assert len(chosen) == min(count, len(scores)) == len(set(chosen))


def test_sampled_rows_hold_what_a_reader_wants(tmp_path: Path):
    folder = RunFolder.open(tmp_path / "run", FolderMode.NEW)
    sampling = TrajectorySampling(per_step=2, every_steps=10)
    made = [make_trajectory(0, 1.0), make_trajectory(1, None), make_trajectory(2, 0.0)]
    assert [step for step in range(31) if write_trajectories(folder, step, made, sampling, first_ids)] == [0, 1, 10, 20, 30]
    best, worst = read_trajectories(folder, 10)
    assert best == {
        "step": 10, "group_id": 0, "sample_index": 0, "source": "sums", "prompt": "0 + 1 = ?", "response": "0", "answer": "1",
        "reward": 1.0, "parts": {"sums": 1.0}, "passed": True, "error": None, "finish_reason": "stop", "prompt_tokens": 2,
        "response_tokens": 3, "version_first": 3, "version_last": 4, "logprob_mean": -0.5, "generation_s": 0.25,
    }  # fmt: skip
    assert worst["reward"] is None
    assert worst["error"] == "sums: ran past 1 s"


def test_sampling_can_be_switched_off_and_refuses_nonsense(tmp_path: Path):
    folder = RunFolder.open(tmp_path / "run", FolderMode.NEW)
    assert not write_trajectories(folder, 1, [make_trajectory(0, 1.0)], TrajectorySampling(per_step=0), first_ids)
    with pytest.raises(ValueError, match="every_steps 0"):
        TrajectorySampling(every_steps=0)


# ---- summary -----------------------------------------------------------------------------------------------------


def _summary(steps: int, **changes):
    rows = [{"step": r.step, "version": r.version, "wall_s": 0.1 * r.step, **r.metrics} for r in map(make_record, range(1, steps + 1))]
    facts = {
        "job_name": "j", "status": RunStatus.SUCCEEDED, "failure": None, "total_steps": 30, "total_s": 6.0, "startup_s": 3.0,
        "seed": 17, "packages": {"python": "3.11"}, **changes,
    }  # fmt: skip
    return summarize(table_of(rows), **facts)


def test_the_summary_takes_the_windows_it_names():
    summary = _summary(20)
    assert summary.reward_first.mean == pytest.approx(0.1 + 0.03 * 3)
    assert (summary.reward_first.first_step, summary.reward_first.last_step) == (1, 5)
    assert summary.reward_last.mean == pytest.approx(0.1 + 0.03 * 15.5)
    assert summary.pass_rate_last == pytest.approx(0.03 * 15.5)
    assert (summary.steps, summary.tokens, summary.weight_version) == (20, 12_800, 20)
    assert summary.training_s == pytest.approx(2.0)
    assert summary.tokens_per_s == pytest.approx(6400.0)


def test_a_run_without_steps_has_a_summary():
    summary = _summary(0, status=RunStatus.FAILED, failure="no engine came up")
    assert (summary.steps, summary.reward_first, summary.tokens_per_s, summary.weight_version) == (0, None, None, None)


def test_the_best_window_is_where_the_reward_was_highest():
    values = [0.0] * 5 + [1.0, math.nan, 1.0] + [0.0] * 5
    best = best_window(range(1, 14), values, 3)
    assert (best.mean, best.first_step, best.last_step) == (1.0, 6, 8)
    assert best_window([1, 2], [0.0, 1.0], 3).mean == 0.5
    assert best_window([1, 2], [math.nan, math.nan], 3) is None


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_a_window_lies_between_its_extremes(values):
    window = window_mean(range(len(values)), values)
    assert min(values) - 1e-6 <= window.mean <= max(values) + 1e-6


def test_a_summary_survives_the_disk_and_foreign_keys_do_not(tmp_path: Path):
    path = tmp_path / "summary.json"
    save_summary(path, _summary(20))
    assert load_summary(path) == _summary(20)
    row = json.loads(path.read_text())
    path.write_text(json.dumps({**row, "loss": 1}))
    with pytest.raises(RuntimeFault, match="loss: "):
        load_summary(path)
    del row["seed"]
    path.write_text(json.dumps(row))
    with pytest.raises(RuntimeFault, match="seed: "):
        load_summary(path)
    with pytest.raises(RuntimeFault, match="has the run ended"):
        load_summary(tmp_path / "none.json")


def test_package_versions_name_what_shapes_results():
    assert {"python", "numpy"} <= package_versions().keys()


# ---- text --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3.62, "3.6"),
        (16.0, "16"),
        (532.4, "532"),
        (999.6, "1.0k"),
        (9_100, "9.1k"),
        (53_800, "53.8k"),
        (999_700, "1.0M"),
        (1.2e7, "12.0M"),
        (math.nan, "-"),
    ],
)
def test_counts(value, text):
    assert format_count(value) == text


@pytest.mark.parametrize(("value", "text"), [(0.107, "0.11 s"), (8.06, "8.1 s"), (42.3, "42 s"), (725, "12:05"), (3723, "1:02:03")])
def test_seconds(value, text):
    assert format_seconds(value) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0 B"), (1536, "1.5 KiB"), (24 * 2**30, "24.0 GiB"), (2**50, "1024.0 TiB")])
def test_bytes(value, text):
    assert format_bytes(value) == text


@given(values=st.lists(st.floats(-1e3, 1e3), max_size=200), buckets=st.integers(1, 50))
def test_buckets_are_few_and_stay_in_range(values, buckets):
    means = bucket_means(values, buckets)
    assert len(means) == min(len(values), buckets)
    assert all(min(values) - 1e-9 <= m <= max(values) + 1e-9 for m in means)


def test_sparkline_shows_rise_gaps_and_flat_lines():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, math.nan, 1], 8) == "▁ █"
    assert sparkline([3, 3], 8) == "▁▁"
    assert sparkline([math.nan], 8) == ""
