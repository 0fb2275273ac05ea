"""Kept trajectories as people read them: `rljob show --trajectories`, and the episodes of the report."""

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rljob_runtime.commands.cli import app
from rljob_runtime.exit_codes import ExitCode
from rljob_runtime.records import Judgement
from rljob_runtime.report import FolderMode, RunFolder, TrajectorySampling
from rljob_runtime.report.episodes import episodes_html
from rljob_runtime.report.reading import Order, Selection, select, shown
from rljob_runtime.report.trajectories import read_trajectories, write_trajectories
from rljob_runtime.report.transcript import MAX_CHARS, MAX_LINES, cut, printable
from tests.support.report_fakes import GOLDEN, first_ids, make_episode, make_trajectory

SAMPLING = TrajectorySampling(per_step=8)


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """Episodes at steps 1 and 10, among them one that its environment failed at once."""
    folder = RunFolder.open(tmp_path / "run", FolderMode.NEW)
    write_trajectories(folder, 1, [make_episode(0, 0.0, stop="maxTurns"), make_episode(1, -0.5)], SAMPLING, _texts)
    failed = make_episode(5, None, stop="error", source="rooms", answers=0)
    write_trajectories(folder, 10, [make_episode(2, 1.0), make_episode(3, 0.5)], SAMPLING, _texts, [failed])
    return folder


def _texts(responses):
    return ["text"] * len(responses)


def show(folder: RunFolder, *options: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["show", str(folder.path), *options], env={"COLUMNS": "100", "TERM": "dumb"})
    return done.exit_code, done.output.replace(str(folder.path), "RUN")


def test_the_newest_episodes_are_printed_by_turns(run: RunFolder, golden) -> None:
    code, output = show(run, "-t")
    assert code == 0
    assert golden.differences(GOLDEN / "trajectories.txt", output) == ""


def test_a_single_response_is_one_turn(tmp_path: Path, golden) -> None:
    folder = RunFolder.open(tmp_path / "run", FolderMode.NEW)
    write_trajectories(folder, 1, [make_trajectory(0, 1.0), make_trajectory(1, None)], SAMPLING, first_ids)
    code, output = show(folder, "-t")
    assert code == 0
    assert golden.differences(GOLDEN / "trajectories_single.txt", output) == ""


def test_what_a_judge_said_stands_beside_its_score(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path / "run", FolderMode.NEW)
    judged = make_trajectory(0, 1.0)
    said = (Judgement(reward="grader", text="YES <b>"), Judgement(reward="kind", error="the endpoint answered 503"))
    write_trajectories(folder, 1, [replace(judged, reward=replace(judged.reward, judgements=said))], SAMPLING, first_ids)
    rows = read_trajectories(folder, 1)
    assert rows[0]["judgements"] == {"grader": "YES <b>", "kind": "the endpoint answered 503"}
    _, output = show(folder, "-t")
    assert "judge        grader: YES <b>" in output
    assert "kind: the endpoint answered 503" in output


def test_filters_choose_and_order(run: RunFolder) -> None:
    rows = [row for step in (1, 10) for row in read_trajectories(run, step)]

    def places(**wanted) -> list[tuple[int, int, int]]:
        return [(t.step, t.group_id, t.sample_index) for t in select(rows, Selection(**wanted))]

    assert places() == [(10, 1, 0), (10, 1, 1), (10, 2, 1), (1, 0, 0), (1, 0, 1)]
    assert places(order=Order.BEST, limit=2) == [(10, 1, 0), (10, 1, 1)]
    assert places(order=Order.WORST) == [(1, 0, 1), (1, 0, 0), (10, 1, 1), (10, 1, 0)]
    assert places(failed=True) == places(source="rooms") == places(group=2) == [(10, 2, 1)]
    assert places(failed=True, order=Order.WORST, limit=1) == [(10, 2, 1)]
    assert places(group=1, source="lake", limit=1) == [(10, 1, 0)]


def test_options_reach_the_choice(run: RunFolder) -> None:
    _, output = show(run, "-t", "--step", "1", "--worst", "1")
    assert "step 1  group 0  sample 1" in output
    assert "sample 0" not in output
    assert "raised ValueError: broken" in show(run, "-t", "--failed")[1]
    assert show(run, "-t", "--limit", "0")[1].count("group ") == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("-t", "--step", "3"), "none were kept at step 3, but at steps 1, 10"),
        (("-t", "--group", "9"), "none of the 5 kept trajectories match; there are groups 0, 1, 2 of lake, rooms"),
        (("-t", "--best", "1", "--worst", "1"), "contradict each other"),
        (("--failed",), "add --trajectories"),
    ],
)
def test_what_cannot_be_shown_says_what_can(run: RunFolder, options: tuple[str, ...], message: str) -> None:
    code, output = show(run, *options)
    assert code == ExitCode.INVALID
    assert message in " ".join(output.split())


def test_a_folder_without_a_run_or_trajectories_says_so(tmp_path: Path) -> None:
    assert "is not a run folder" in show(RunFolder(tmp_path))[1]
    empty = RunFolder.open(tmp_path / "empty", FolderMode.NEW)
    assert "trajectoriesEverySteps" in show(empty, "-t")[1]


def test_a_run_that_goes_on_shows_its_newest_step(run: RunFolder) -> None:
    assert "no step is done yet" in show(run)[1]
    run.spec_yaml.write_text("spec: {training: {steps: 30}}\n")
    run.metrics_jsonl.write_text('{"step":10,"version":10,"wall_s":1.0,"reward/mean":0.25,"episode/turns_mean":3.5}\n')
    output = show(run)[1]
    assert "step 10/30  reward 0.250  turns 3.5  v10" in output
    assert "kept at steps 1, 10" in output


def test_an_episode_whose_last_action_got_no_answer_keeps_the_turns_before(tmp_path: Path) -> None:
    folder = RunFolder.open(tmp_path / "run", FolderMode.NEW)
    episode = make_episode(0, 0.0)
    assert episode.episode is not None
    unanswered = replace(episode, episode=replace(episode.episode, turns=episode.episode.turns[:1]))
    write_trajectories(folder, 1, [unanswered], SAMPLING, _texts)
    (row,) = read_trajectories(folder, 1)
    (turn,) = shown(row).turns
    assert (turn.tokens, turn.versions) == (3, (3, 4))


def test_the_page_has_every_turn_escaped(run: RunFolder) -> None:
    trajectories = select(read_trajectories(run, 10), Selection())
    page = episodes_html(trajectories, "trajectories/step-000010.jsonl")
    assert page.count("<details") == page.count("</details>") == 3
    assert page.count("&lt;answer&gt;Down&lt;/answer&gt;") == 2
    assert page.count("[31m&lt;b&gt;") == 2
    assert page.count("v3 to v4") >= 2
    assert page.count("not understood</span>") == 2
    assert "raised ValueError: broken" in page


def test_what_a_model_wrote_cannot_steer_the_terminal() -> None:
    assert printable("a\tb\n\x1b[2J\r\u202e\ud800") == "a    b\n\\x1b[2J\\r\\u202e\\ud800"


def test_long_texts_lose_their_middle() -> None:
    text = "a" * MAX_CHARS + "b" * MAX_CHARS
    short = cut(text, full=False)
    assert short.startswith("a")
    assert short.endswith("b")
    assert f"{MAX_CHARS:,} more characters" in short
    lines = "\n".join(str(i) for i in range(MAX_LINES + 10))
    assert "10 more lines" in cut(lines, full=False)
    assert cut(text, full=True) == text
