"""The newcomer's ways: the commands are those of the pages, the wrong spec is wrong as said, and what a way's steps leave is measured."""

from __future__ import annotations

import io
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench import newcomer
from bench.measure import ChildFailedError
from bench.newcomer import Step, Way, by_clone, by_pip, command_of, documented, headline, markdown, size_of, walk, wrong_spec
from rljob_api.errors import SpecInvalidError
from rljob_api.validation import check
from tests.layout.tree import ROOT

SUMMARY = {"total_s": 0.25, "reward_first": {"mean": 0.25}, "reward_last": {"mean": 0.95}}
RUNS = f"""mkdir -p runs/quickstart rl/bin && cd runs/quickstart && echo '{{"wall_s": 0.125}}' > metrics.jsonl && touch report.html
echo '{json.dumps(SUMMARY)}' > summary.json; echo page > ../../rl/bin/python; ln ../../rl/bin/python ../../rl/bin/python3"""
MISTAKEN = Step(what="a wrong spec", command="echo /tmp/place/wrong.yaml is not valid; exit 2", exit_code=2)
"""In a shell of its own, as each step."""


def go(folder: Path, *steps: Step) -> dict[str, Any]:
    place = folder / "place"
    place.mkdir()
    way = Way(name="from nothing", steps=steps, environment="rl")
    return walk(way, place, logs=folder / "logs", caches=folder / "caches", console=Console(file=io.StringIO()))


def test_what_the_page_says_is_what_is_run() -> None:
    pip = by_pip(newcomer.PAGE.read_text(), Path("/tmp/a b/wrong.yaml"))
    assert [step.what for step in pip.steps] == ["environment", "packages", "a wrong spec", "model", "run"]
    assert [step.command for step in pip.steps if not step.exit_code] == documented(newcomer.PAGE.read_text())
    assert pip.steps[2].command == "rl/bin/rljob run '/tmp/a b/wrong.yaml'"
    assert pip.steps[-1].command == "rl/bin/rljob run quickstart.yaml"
    clone = by_clone(ROOT, Path("/tmp/wrong.yaml"))
    targets = (ROOT / "Makefile").read_text()
    assert all(f"\n{step.command.removeprefix('make ')}: " in targets for step in clone.steps if step.command.startswith("make "))
    with pytest.raises(ValueError, match="no block of commands"):
        documented("# Installing\n")
    with pytest.raises(ValueError, match="1 commands in its first block"):
        by_pip(f"{newcomer.SECTION}\n\ntext\n\n```\nmake run\n```\n", Path("wrong.yaml"))


def test_the_wrong_spec_has_a_misspelt_field_and_a_device_that_is_not_there() -> None:
    with pytest.raises(SpecInvalidError) as caught:
        check(wrong_spec(newcomer.QUICKSTART.read_text()))
    assert [(error.path, error.remedy) for error in caught.value.errors] == [
        ("spec.components[1].placement.ranks", "use existing ranks, or ask for more nodes or devices per node"),
        ("spec.rollout.promptPerStep", "did you mean promptsPerStep?"),
    ]
    with pytest.raises(ValueError, match="occurs 0 times in the quickstart"):
        wrong_spec("kind: RLJob\n")


def test_a_step_sees_neither_this_checkout_s_environment_nor_its_caches(tmp_path: Path) -> None:
    step = Step(what="look", command="pwd; echo $PATH")
    path = os.pathsep.join([str(ROOT / ".venv" / "bin"), "/usr/bin"])
    cold = command_of(step, tmp_path, path=path, root=ROOT, caches=Path("/empty"))
    warm = command_of(step, tmp_path, path=path, root=ROOT, caches=None)
    assert {"PATH=/usr/bin", "XDG_CACHE_HOME=/empty", "VIRTUAL_ENV", "UV_CACHE_DIR"} <= set(cold)
    assert {"PATH=/usr/bin", "VIRTUAL_ENV"} <= set(warm)
    assert not {"XDG_CACHE_HOME=/empty", "UV_CACHE_DIR"} & set(warm)


def test_a_way_is_measured_step_by_step(tmp_path: Path) -> None:
    way = go(tmp_path, Step(what="environment", command="test -z $VIRTUAL_ENV"), MISTAKEN, Step(what="run", command=RUNS))
    assert [step["what"] for step in way["steps"]] == ["environment", "a wrong spec", "run"]
    assert [step["output"] for step in way["steps"]] == [(), ("/tmp/place/wrong.yaml is not valid",), ()]
    assert way["total_s"] == pytest.approx(sum(step["seconds"] for step in way["steps"]))
    assert way["first_step_s"] == pytest.approx(way["total_s"] - 0.125)
    assert (way["rewards"], way["environment_bytes"]) == ([0.25, 0.95], len("page\n"))
    assert size_of(tmp_path / "nowhere") == 0


@pytest.mark.parametrize(
    ("steps", "error", "words"),
    [
        ([Step(what="set up", command="echo no such package; false")], ChildFailedError, "from nothing, set up: echo no such package"),
        ([Step(what="a wrong spec", command="true", exit_code=2)], ChildFailedError, "exit code 1"),
        ([Step(what="run", command="true")], ValueError, "report.html is not there"),
    ],
)
def test_a_way_that_does_not_lead_there_is_an_error(tmp_path: Path, steps: list[Step], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        go(tmp_path, *steps)


def test_the_page_of_results_names_no_folder_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    written: dict[str, Any] = {}
    monkeypatch.setattr(newcomer, "build_wheels", lambda out: out.mkdir())
    monkeypatch.setattr(
        newcomer, "by_pip", lambda page, wrong: Way(name="by pip", steps=(MISTAKEN, Step(what="run", command=RUNS)), environment="rl")
    )
    monkeypatch.setattr(
        newcomer,
        "by_clone",
        lambda root, wrong: Way(name="by clone", steps=(Step(what="clone", command=f"cat {wrong} && {RUNS}"),), environment="rl"),
    )
    monkeypatch.setattr(newcomer, "write_results", lambda name, values, text: written.update(name=name, values=values, text=text))
    monkeypatch.setattr("sys.argv", ["bench.newcomer", "--folder", str(tmp_path)])
    assert newcomer.main() == 0
    assert list(tmp_path.iterdir()) == []
    text = written["text"]
    assert (written["name"], str(tmp_path) in text + json.dumps(written["values"])) == ("newcomer", False)
    assert "| clone | `cat wrong.yaml && mkdir -p" in text
    assert "\nwrong.yaml is not valid\n" in text
    assert "Reward of the first and the last steps: 0.25, 0.95." in text
    found = headline(written["values"]["ways"])
    assert re.match(r"first learning curve \d+ s by clone and \d+ s by pip; a wrong spec is answered within \d+\.\d s", found), found
    assert markdown(written["values"]) == text
