"""``python -m bench.newcomer``: the time from nothing to a first learning curve, by clone and by pip; ``results/newcomer.{json,md}``.

What is executed is what the pages say: ``make run`` in a fresh clone of this commit, and the commands of docs/install.md beside wheels that
are built here before the clock starts. On both ways a spec with two mistakes is run once. Package caches are empty unless ``--warm``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.measure import ROOT, ChildFailedError, machine, run_child, write_results
from rljob_runtime.exit_codes import ExitCode

PAGE = ROOT / "docs" / "install.md"
SECTION = "## On one machine, with pip alone"
QUICKSTART = ROOT / "examples" / "quickstart.yaml"
MISTAKES = (("promptsPerStep:", "promptPerStep:"), ('placement: {ranks: "1"}', 'placement: {ranks: "7"}'))
"""What stands in the quickstart, and what a newcomer writes: a misspelt field, a device that is not there."""
WRONG = "wrong.yaml"
METRICS = Path("runs/quickstart/metrics.jsonl")
SUMMARY = Path("runs/quickstart/summary.json")
REPORT = Path("runs/quickstart/report.html")
STEP_TIMEOUT_S = 3600.0
FOREIGN = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "MAKEFLAGS", "MAKELEVEL")
"""Variables that a newcomer's shell does not have."""
CACHES = ("UV_CACHE_DIR", "PIP_CACHE_DIR", "VLLM_CACHE_ROOT")
"""Go before XDG_CACHE_HOME."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One command of a way."""

    what: str
    command: str
    """For bash, in the way's folder."""
    exit_code: int = 0
    """The one that is right."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """From nothing to a learning curve."""

    name: str
    steps: tuple[Step, ...]
    environment: str
    """The Python environment's folder, whose size is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """One step as measured."""

    what: str
    command: str
    seconds: float
    output: tuple[str, ...] = ()
    """Of a step that is meant to fail."""


def by_clone(root: Path, wrong: Path) -> Way:
    """A fresh clone; set-up is timed apart from the run, which would do it first."""
    mistaken = Step(what="a wrong spec", command=f".venv/bin/rljob run {shlex.quote(str(wrong))}", exit_code=ExitCode.INVALID)
    return Way(
        name="from a clone",
        environment=".venv",
        steps=(
            Step(what="clone", command=f"git clone --quiet {shlex.quote(str(root))} ."),
            Step(what="set up", command="make setup"),
            mistaken,
            Step(what="model and run", command="make run"),
        ),
    )


def by_pip(page: str, wrong: Path) -> Way:
    """The commands of the page; the wrong spec is run once the command is there.

    Raises:
        ValueError: the page has not the four commands.
    """
    commands = documented(page)
    if len(commands) != 4:
        raise ValueError(
            f"{SECTION} has {len(commands)} commands in its first block, expected environment, packages, model, run: {commands}"
        )
    titles = ("environment", "packages", "model", "run")
    steps = [Step(what=what, command=command) for what, command in zip(titles, commands, strict=True)]
    mistaken = Step(what="a wrong spec", command=f"rl/bin/rljob run {shlex.quote(str(wrong))}", exit_code=ExitCode.INVALID)
    return Way(name="from wheels by pip", environment="rl", steps=(*steps[:2], mistaken, *steps[2:]))


def documented(page: str) -> list[str]:
    """The first block of commands of the section on pip.

    Raises:
        ValueError: there is none.
    """
    found = re.search(rf"^{re.escape(SECTION)}\n.*?^```\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"the page has no block of commands below {SECTION!r}")
    return found.group(1).splitlines()


def wrong_spec(text: str) -> str:
    """The quickstart with the mistakes.

    Raises:
        ValueError: it does not have what the mistakes replace, once each.
    """
    for right, mistaken in MISTAKES:
        if text.count(right) != 1:
            raise ValueError(f"{right!r} occurs {text.count(right)} times in the quickstart, not once")
        text = text.replace(right, mistaken)
    return text


def command_of(step: Step, folder: Path, *, path: str, root: Path, caches: Path | None) -> list[str]:
    """The child process: without this checkout's environment, and without its caches where ``caches`` is given."""
    kept = [entry for entry in path.split(os.pathsep) if not Path(entry).is_relative_to(root)]
    unset = [option for name in (*FOREIGN, *(CACHES if caches is not None else ())) for option in ("-u", name)]
    settings = [f"PATH={os.pathsep.join(kept)}", *([f"XDG_CACHE_HOME={caches}"] if caches is not None else [])]
    script = f"cd {shlex.quote(str(folder))} || exit 99\n(\n{step.command}\n)\n[ $? -eq {int(step.exit_code)} ]"
    return ["env", *unset, *settings, "bash", "-c", script]


def walk(way: Way, folder: Path, *, logs: Path, caches: Path | None, console: Console, root: Path = ROOT) -> dict[str, Any]:
    """Go all the way.

    Raises:
        ChildFailedError: a step failed, or one that is meant to fail did not.
        ValueError: there is no learning curve at the end.
    """
    took, first_step_s, foreign, logs_of = list[Took](), None, 0.0, logs / way.name.replace(" ", "-")
    logs_of.mkdir(parents=True)
    for number, step in enumerate(way.steps):
        log = logs_of / f"{number}.log"
        command = command_of(step, folder, path=os.environ.get("PATH", ""), root=root, caches=caches)
        try:
            use = run_child(command, log_file=log, timeout_s=STEP_TIMEOUT_S)
        except ChildFailedError as error:
            raise ChildFailedError(f"{way.name}, {step.what}: {step.command}: {error}") from error
        output = tuple(log.read_text(errors="replace").splitlines()) if step.exit_code else ()
        if (folder / METRICS).is_file() and first_step_s is None:
            first_step_s = sum(one.seconds for one in took) + use.wall_s - _since_first_step_s(folder)
        took.append(Took(what=step.what, command=step.command, seconds=use.wall_s, output=output))
        foreign = max(foreign, use.foreign_load)
        console.print(f"{way.name}: {step.what}: {use.wall_s:.0f} s", markup=False)
    if not (folder / REPORT).is_file() or first_step_s is None:
        raise ValueError(f"{way.name}: {folder / REPORT} is not there at the end")
    summary = json.loads((folder / SUMMARY).read_text())
    return {
        "name": way.name,
        "steps": [asdict(one) for one in took],
        "total_s": sum(one.seconds for one in took),
        "first_step_s": first_step_s,
        "rewards": [summary["reward_first"]["mean"], summary["reward_last"]["mean"]],
        "environment_bytes": size_of(folder / way.environment),
        "foreign_load": foreign,
    }


def _since_first_step_s(folder: Path) -> float:
    """From the end of the first step to the end of the run."""
    rows = [json.loads(line) for line in (folder / METRICS).read_text().splitlines()]
    return float(json.loads((folder / SUMMARY).read_text())["total_s"] - rows[0]["wall_s"])


def size_of(folder: Path) -> int:
    """Bytes of the files, those with several names once."""
    found = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            status = os.lstat(Path(parent) / name)
            found[status.st_dev, status.st_ino] = status.st_size
    return sum(found.values())


def headline(ways: Sequence[dict[str, Any]]) -> str:
    """One line."""
    curves = [f"{way['total_s']:.0f} s {way['name']}" for way in ways]
    answers_s = [step["seconds"] for way in ways for step in way["steps"] if step["output"]]
    return f"first learning curve {' and '.join(curves)}; a wrong spec is answered within {max(answers_s):.1f} s"


def markdown(values: dict[str, Any]) -> str:
    """The whole report."""
    about = values["machine"]
    lines = [
        "# A newcomer's way", "",
        f"Written by `python -m bench.newcomer` on {about['measured_at']}; {about['processor']}, {about['cores']} cores, load "
        f"{values['load']:.1f} of one minute at the end. From nothing to the report of the quickstart, each way once; package caches "
        f"{'as they were on this machine' if values['warm'] else 'empty'}.", "",
    ]  # fmt: skip
    for way in values["ways"]:
        lines += [f"## {way['name'].capitalize()}", "", "| step | command | s |", "|---|---|---:|"]
        lines += [f"| {step['what']} | `{_without_folders(step['command'])}` | {step['seconds']:.1f} |" for step in way["steps"]]
        lines += [f"| all, to the first learning curve | | {way['total_s']:.0f} |", ""]
        lines.append(
            f"The first training step was done after about {way['first_step_s']:.0f} s. Reward of the first and the last steps: "
            f"{way['rewards'][0]:.2f}, {way['rewards'][1]:.2f}. The environment has {way['environment_bytes'] / 1e9:.1f} GB. "
            f"Other programs kept at most {way['foreign_load']:.1f} cores busy during a step."
        )
        lines.append("")
    lines += ["## The wrong spec", "", "The quickstart with a misspelt field and a device that is not there:", "", "```"]
    lines += next(step["output"] for way in values["ways"] for step in way["steps"] if step["output"])
    return "\n".join([*lines, "```", ""])


def _without_folders(command: str) -> str:
    """Paths of this machine are nobody's business."""
    return re.sub(r"(?<=\s)'?/[^\s']*/([^\s'/]+)'?", r"\1", command)


def build_wheels(out: Path, root: Path = ROOT) -> None:
    """Wheels and pins, as tools/release makes them."""
    loader = SourceFileLoader("release", str(root / "tools" / "release"))
    spec = importlib.util.spec_from_loader("release", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["release"] = module  # its dataclasses look their module up
    loader.exec_module(module)
    module.build(root, out, root / ".venv" / "bin" / "uv")


def main() -> int:
    """Returns 0; a step that fails is an error."""
    parser = argparse.ArgumentParser(prog="python -m bench.newcomer", description=__doc__)
    parser.add_argument("--warm", action="store_true", help="use this machine's package caches")
    parser.add_argument("--only", nargs="+", choices=("clone", "pip"), default=["clone", "pip"], help="some of the ways")
    parser.add_argument("--folder", type=Path, help="where the ways are gone; needs 25 GB free (default: a temporary folder)")
    options = parser.parse_args()
    console, ways = Console(stderr=True), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="bench-newcomer-", dir=options.folder, ignore_cleanup_errors=True) as place:
        work = Path(place)
        wrong = work / WRONG
        wrong.write_text(wrong_spec(QUICKSTART.read_text()))
        for kind in options.only:
            folder, caches = work / kind, None if options.warm else work / f"caches-{kind}"
            folder.mkdir()
            if kind == "pip":
                build_wheels(folder / "dist")
                shutil.copy(QUICKSTART, folder)
            way = by_clone(ROOT, wrong) if kind == "clone" else by_pip(PAGE.read_text(), wrong)
            ways.append(walk(way, folder, logs=work / "logs", caches=caches, console=console))
            for used in (folder, caches):
                if used is not None:
                    shutil.rmtree(used, ignore_errors=True)
    values = {
        "machine": machine(("ray", "torch")),
        "load": os.getloadavg()[0],
        "warm": options.warm,
        "ways": ways,
        "headline": headline(ways),
    }
    for walked in ways:
        for step in walked["steps"]:
            step["command"] = _without_folders(step["command"])
            step["output"] = [_without_folders(f" {line}").removeprefix(" ") for line in step["output"]]
    write_results("newcomer", values, markdown(values))
    console.print(markdown(values), markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
