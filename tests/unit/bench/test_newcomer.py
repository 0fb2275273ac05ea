"""The newcomer's ways: the commands are those of the pages, the wrong spec is wrong as said, and what a way's steps leave is measured."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench import newcomer
from bench.measure import ChildFailedError
from bench.newcomer import (
    KINDS,
    MISTAKES,
    Step,
    Way,
    by_clone,
    by_cluster,
    by_pip,
    command_of,
    documented,
    headline,
    markdown,
    quickstart_lines,
    size_of,
    together,
    walk,
    watched_rewards,
    wrong_spec,
)
from e2e.cluster.__main__ import parser
from e2e.cluster.errors import ClusterError
from e2e.cluster.state import State, StateFolder
from e2e.cluster.versions import Mode
from rljob_api.errors import SpecInvalidError
from rljob_api.validation import check
from tests.layout.tree import ROOT

SUMMARY = {"total_s": 0.25, "reward_first": {"mean": 0.25}, "reward_last": {"mean": 0.95}}
RUNS = f"""mkdir -p runs/quickstart rl/bin && cd runs/quickstart && echo '{{"wall_s": 0.125}}' > metrics.jsonl && touch report.html
echo '{json.dumps(SUMMARY)}' > summary.json; echo page > ../../rl/bin/python; ln ../../rl/bin/python ../../rl/bin/python3"""
MISTAKEN = Step(what="a wrong spec", command="echo /tmp/place/wrong.yaml is not valid; exit 2", exit_code=2)
"""In a shell of its own, as each step."""


def go(folder: Path, *steps: Step, cleanup: Step | None = None) -> dict[str, Any]:
    place = folder / "place"
    place.mkdir()
    way = Way(name="from nothing", steps=steps, environment="rl", cleanup=cleanup)
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


def test_the_wrong_spec_has_a_misspelled_field_and_a_device_that_is_not_there() -> None:
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
    monkeypatch.setattr(newcomer, "recorded", list)
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


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("cat /tmp/a/wrong.yaml > out.txt", "cat wrong.yaml > out.txt"),
        ("run '/tmp/a/wrong.yaml'", "run wrong.yaml"),
        ('"/tmp/a/kubectl" apply', '"kubectl" apply'),
        ("quiet > /dev/null 2> /dev/null", "quiet > /dev/null 2> /dev/null"),
        ("helm/rljob docs/install.md", "helm/rljob docs/install.md"),
    ],
)
def test_commands_are_shown_without_folders_of_the_machine(command: str, shown: str) -> None:
    assert newcomer._without_folders(command) == shown


WATCHED = """NAME         STATUS      STEP   REWARD   ATTEMPT   NODES   AGE
quickstart   Starting                    1         0/1     1s
quickstart   Running     0               1         1/1     25s
quickstart   Running     1      0.2500   1         1/1     51s
quickstart   Completed   200    0.9490   1         0/1     94s
"""


def test_the_way_on_a_cluster_uses_the_commands_of_the_pages(tmp_path: Path) -> None:
    way = by_cluster(ROOT, Path("/tmp/a b/wrong.yaml"), Path("/tmp/a b/no-device.yaml"))
    what = [step.what for step in way.steps]
    assert what == [
        "clone", "set up", "cluster", "images", "chart", "the webhook answers", "a misspelled field", "a device that is not there",
        "kubectl apply", "first training step", "end of the job",
    ]  # fmt: skip
    assert way.cleanup is not None
    commands = [step.command for step in (*way.steps, way.cleanup)]
    targets = (ROOT / "Makefile").read_text()
    made = [words[1] for command in commands for line in command.splitlines() if (words := line.split())[0] == "make"]
    assert made == ["setup", "cluster-up", "cluster-down"]
    assert all(f"\n{target}: " in targets for target in made)
    assert parser().parse_args(["exports"]).command == "exports"
    assert "helm install rljob helm/rljob --namespace rljob-system --create-namespace" in (ROOT / "README.md").read_text()
    assert "install rljob helm/rljob --namespace rljob-system --create-namespace" in commands[4]
    assert "webhook:\n  enabled:" in (ROOT / "helm/rljob/values.yaml").read_text()
    assert "--set webhook.enabled=true" in commands[4]
    assert [step.exit_code for step in way.steps if step.exit_code] == [1, 1]
    assert "apply -f '/tmp/a b/wrong.yaml'" in commands[6]
    assert "apply -f '/tmp/a b/no-device.yaml'" in commands[7]
    for step in (*way.steps, way.cleanup):
        script = command_of(step, tmp_path, path="/usr/bin", root=ROOT, caches=None)[-1]
        subprocess.run(["bash", "-n", "-c", script], check=True, timeout=20)


def fake_cluster(folder: Path) -> Path:
    """A kubectl that answers as a cluster does, and a helm that prints its arguments."""
    kubectl = folder / "kubectl"
    kubectl.write_text(
        f"""#!/bin/bash
case "$*" in
"apply --dry-run=server"*) touch {folder}/asked; echo 'admission webhook "validate.rljob.dev" denied' >&2; exit 1;;
"apply -f examples/quickstart.yaml") touch {folder}/applied;;
"apply -f"*) echo "refused: $3" >&2; exit 1;;
"get rlj quickstart -w") cat {folder}/rows;;
"get rlj quickstart -o"*) [ -f {folder}/applied ] && echo 1;;
esac
"""
    )
    helm = folder / "helm"
    helm.write_text("#!/bin/bash\nprintf '%s\\n' \"$@\"\n")
    (folder / "rows").write_text(WATCHED)
    for program in (kubectl, helm):
        program.chmod(0o755)
    exports = folder / "cluster.env"
    exports.write_text(
        f"export RLJOB_E2E_KUBECTL={kubectl} RLJOB_E2E_HELM={helm} "
        "RLJOB_E2E_OPERATOR_IMAGE=localhost:5000/rljob-operator:1 RLJOB_E2E_RUNTIME_IMAGE=localhost/rljob-runtime:2\n"
    )
    return exports


def test_the_way_on_a_cluster_is_measured_to_the_first_step_and_the_end(tmp_path: Path) -> None:
    exports = fake_cluster(tmp_path)
    real = by_cluster(ROOT, Path("/tmp/wrong.yaml"), Path("/tmp/no-device.yaml"))
    steps = (Step(what="images", command=f"cp {exports} ."), *real.steps[4:])
    place = tmp_path / "place"
    place.mkdir()
    cleanup = Step(what="down", command="touch ../down")
    way = Way(name=KINDS["cluster"], steps=steps, environment="rl", cleanup=cleanup)
    found = walk(way, place, logs=tmp_path / "logs", caches=None, console=Console(file=io.StringIO()))
    assert (tmp_path / "down").is_file()
    chart = (tmp_path / "logs" / way.name.replace(" ", "-") / "1.log").read_text().splitlines()
    for value in ("image.repository=localhost:5000/rljob-operator", "image.tag=1", "runtime.image.repository=localhost/rljob-runtime"):
        assert value in chart
    assert found["transcript"] == WATCHED.splitlines()
    assert found["rewards"] == [0.25, 0.949]
    assert found["first_step_s"] == pytest.approx(found["total_s"] - found["steps"][-1]["seconds"])
    assert [step["output"] for step in found["steps"] if step["output"]] == [
        ("refused: /tmp/wrong.yaml",),
        ("refused: /tmp/no-device.yaml",),
    ]
    assert newcomer.applied_s(found) < found["first_step_s"]
    found |= {"machine": {"measured_at": "today", "processor": "P", "cores": 2}, "load": 1.0, "warm": True}
    assert re.search(r"on a cluster \d+ s to the first kubectl apply, \d+ s to its first training step", headline([found]))
    text = markdown({"machine": found["machine"], "ways": [found]})
    assert "On the cluster, a device that is not there:" in text
    assert '| kubectl apply | `"$RLJOB_E2E_KUBECTL" apply -f examples/quickstart.yaml' in text
    assert "\\|\\| exit 1" in text, "a bar within a cell"


def test_a_cluster_is_taken_down_after_a_step_that_failed(tmp_path: Path) -> None:
    with pytest.raises(ChildFailedError, match="from nothing, cluster"):
        go(tmp_path, Step(what="cluster", command="false"), cleanup=Step(what="down", command="touch ../down"))
    assert (tmp_path / "down").is_file()


def test_the_spec_that_the_webhook_refuses_has_known_fields_alone() -> None:
    with pytest.raises(SpecInvalidError) as caught:
        check(wrong_spec(newcomer.QUICKSTART.read_text(), MISTAKES[1:]))
    assert [error.path for error in caught.value.errors] == ["spec.components[1].placement.ranks"]


def test_a_cluster_that_runs_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(ClusterError, match="needs root"):
        newcomer.require_no_cluster()
    monkeypatch.setattr("os.geteuid", lambda: 0)
    monkeypatch.setenv("RLJOB_E2E_STATE", str(tmp_path))
    newcomer.require_no_cluster()
    StateFolder(path=tmp_path / "cluster").create(State(mode=Mode.CLUSTER))
    with pytest.raises(ValueError, match="make cluster-down"):
        newcomer.require_no_cluster()


def test_a_way_that_is_not_measured_again_stays(tmp_path: Path) -> None:
    file = tmp_path / "newcomer.json"
    assert newcomer.recorded(file) == []
    earlier = [{"name": KINDS["clone"], "total_s": 1.0}, {"name": KINDS["cluster"], "total_s": 2.0, "machine": {"commit": "b"}}]
    file.write_text(json.dumps({"machine": {"commit": "a"}, "load": 0.5, "warm": False, "ways": earlier}))
    ways = together([{"name": KINDS["pip"], "total_s": 3.0}, {"name": KINDS["clone"], "total_s": 4.0}], newcomer.recorded(file))
    assert [(way["name"], way["total_s"]) for way in ways] == [(KINDS["clone"], 4.0), (KINDS["pip"], 3.0), (KINDS["cluster"], 2.0)]
    assert ways[-1]["machine"] == {"commit": "b"}
    assert newcomer.recorded(file)[0] == earlier[0] | {"machine": {"commit": "a"}, "load": 0.5, "warm": False}


def test_what_is_transcribed() -> None:
    lines = ["uv sync", "models/tiny: made in 47 s", "step   1/200", "report     runs/quickstart/report.html", "make: done"]
    assert quickstart_lines(lines) == lines[1:4]
    assert quickstart_lines(["no model"]) == []
    with pytest.raises(ValueError, match="showed no reward"):
        watched_rewards(WATCHED.splitlines()[:3])
