"""``python -m bench.newcomer``: from nothing to a first learning curve, by clone, by pip, on a cluster; ``results/newcomer.{json,md}``.

What is executed is what the pages say: ``make run`` in a fresh clone of this commit, and the commands of docs/install.md beside wheels that
are built here before the clock starts. ``--only cluster``, as root, adds the cluster of ``make cluster-up``, the images, the chart, and the
quickstart with ``kubectl apply``. On every way a wrong spec is tried once. Package caches are empty unless ``--warm``. Ways that are not
measured now keep what was recorded.
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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.measure import RESULTS, ROOT, ChildFailedError, ChildUse, machine, run_child, write_results
from e2e.cluster.packages import require_root
from e2e.cluster.paths import state_folder
from e2e.cluster.state import StateFolder
from rljob_runtime.exit_codes import ExitCode

PAGE = ROOT / "docs" / "install.md"
SECTION = "## On one machine, with pip alone"
QUICKSTART = ROOT / "examples" / "quickstart.yaml"
MISTAKES = (("promptsPerStep:", "promptPerStep:"), ('placement: {ranks: "1"}', 'placement: {ranks: "7"}'))
"""What stands in the quickstart, and what a newcomer writes: a misspelled field, a device that is not there."""
WRONG = "wrong.yaml"
NO_DEVICE = "no-device.yaml"
"""The second mistake alone: the API server itself refuses the first one, before the webhook sees the spec."""
METRICS = Path("runs/quickstart/metrics.jsonl")
SUMMARY = Path("runs/quickstart/summary.json")
REPORT = Path("runs/quickstart/report.html")
STEP_TIMEOUT_S = 3600.0
FOREIGN = ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "MAKEFLAGS", "MAKELEVEL", "KUBECONFIG")
"""Variables that a newcomer's shell does not have."""
CACHES = ("UV_CACHE_DIR", "PIP_CACHE_DIR", "VLLM_CACHE_ROOT", "GOCACHE", "RLJOB_E2E_CACHE")
"""Go before XDG_CACHE_HOME."""
KINDS = {"clone": "from a clone", "pip": "from wheels by pip", "cluster": "to a job on a cluster"}
"""Names of the ways by their option, in the order of the report."""
RUN_OUTPUT = ("models/tiny: made", "report ")
"""How the first and the last line of what ``make run`` says about the quickstart begin."""
EXPORTS, WATCHED = "cluster.env", Path("watch.txt")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One command of a way."""

    what: str
    command: str
    """For bash, in the way's folder."""
    exit_code: int = 0
    """The one that is right."""
    is_first_training_step: bool = False
    """It ends with the first training step."""
    is_transcribed: bool = False
    """The quickstart's lines of its output are recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """From nothing to a learning curve."""

    name: str
    steps: tuple[Step, ...]
    environment: str
    """The Python environment's folder, whose size is reported."""
    cleanup: Step | None = None
    """Runs at the end in any case; not timed."""


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
        name=KINDS["clone"],
        environment=".venv",
        steps=(
            Step(what="clone", command=f"git clone --quiet {shlex.quote(str(root))} ."),
            Step(what="set up", command="make setup"),
            mistaken,
            Step(what="model and run", command="make run", is_transcribed=True),
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
    return Way(name=KINDS["pip"], environment="rl", steps=(*steps[:2], mistaken, *steps[2:]))


def by_cluster(root: Path, wrong: Path, no_device: Path) -> Way:
    """The cluster, the images, and the chart from a fresh clone; then the wrong specs and the quickstart as it is."""
    images = "".join(
        f' --set {key}.repository="${{{image}%:*}}" --set-string {key}.tag="${{{image}##*:}}"'
        for key, image in (("image", "RLJOB_E2E_OPERATOR_IMAGE"), ("runtime.image", "RLJOB_E2E_RUNTIME_IMAGE"))
    )
    chart = "install rljob helm/rljob --namespace rljob-system --create-namespace --wait --timeout=180s --set webhook.enabled=true"
    refused = f"{_kubectl(f'apply --dry-run=server -f {shlex.quote(str(no_device))}')} 2>&1 | grep -q validate.rljob.dev"
    step = _kubectl("get rlj quickstart -o 'jsonpath={.status.progress.step}'")
    stepped = f'[ "$({step})" -gt 0 ] 2> /dev/null'
    succeeded = _kubectl("wait --for=condition=Succeeded rlj/quickstart --timeout=1800s")
    shown = f"grep -q Completed {WATCHED}"
    return Way(
        name=KINDS["cluster"],
        environment=".venv",
        steps=(
            Step(what="clone", command=f"git clone --quiet {shlex.quote(str(root))} ."),
            Step(what="set up", command="make setup"),
            Step(what="cluster", command="make cluster-up"),
            Step(what="images", command=f'PATH="$PWD/.venv/bin:$PATH" python -m e2e.cluster exports > {EXPORTS}'),
            Step(what="chart", command=f'. ./{EXPORTS}\n"$RLJOB_E2E_HELM" {chart}{images}'),
            Step(what="the webhook answers", command=f". ./{EXPORTS}\n{_until(refused, every_s=1.0, tries=120)}"),
            Step(what="a misspelled field", command=f". ./{EXPORTS}\n{_kubectl(f'apply -f {shlex.quote(str(wrong))}')}", exit_code=1),
            Step(
                what="a device that is not there",
                command=f". ./{EXPORTS}\n{_kubectl(f'apply -f {shlex.quote(str(no_device))}')}",
                exit_code=1,
            ),
            Step(
                what="kubectl apply",
                command=f". ./{EXPORTS}\n{_kubectl('apply -f examples/quickstart.yaml')} || exit 1\n"
                f"nohup timeout 7200 {_kubectl('get rlj quickstart -w')} > {WATCHED} 2>&1 &\necho $! > watch.pid",
            ),
            Step(
                what="first training step",
                command=f". ./{EXPORTS}\n{_until(stepped, every_s=0.5, tries=1800)}",
                is_first_training_step=True,
            ),
            Step(
                what="end of the job",
                command=f". ./{EXPORTS}\n{succeeded} || {{ {_kubectl('describe rlj quickstart')}; exit 1; }}\n"
                f"{_until(shown, every_s=0.2, tries=50)}",
            ),
        ),
        cleanup=Step(what="down", command="[ ! -f watch.pid ] || kill $(cat watch.pid) || true\nmake cluster-down"),
    )


def _kubectl(arguments: str) -> str:
    return f'"$RLJOB_E2E_KUBECTL" {arguments}'


def _until(command: str, *, every_s: float, tries: int) -> str:
    """A shell loop that fails after so many tries."""
    return f"for _ in $(seq {tries}); do {{ {command}; }} && exit 0; sleep {every_s}; done\nexit 1"


def documented(page: str) -> list[str]:
    """The first block of commands of the section on pip.

    Raises:
        ValueError: there is none.
    """
    found = re.search(rf"^{re.escape(SECTION)}\n.*?^```\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"the page has no block of commands below {SECTION!r}")
    return found.group(1).splitlines()


def wrong_spec(text: str, mistakes: Sequence[tuple[str, str]] = MISTAKES) -> str:
    """The quickstart with the mistakes.

    Raises:
        ValueError: it does not have what the mistakes replace, once each.
    """
    for right, mistaken in mistakes:
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
    """Go all the way, and clean up.

    Raises:
        ChildFailedError: a step failed, or one that is meant to fail did not.
        ValueError: there is no learning curve at the end.
    """
    logs_of = logs / way.name.replace(" ", "-")
    logs_of.mkdir(parents=True)

    def run(step: Step, log: Path) -> ChildUse:
        command = command_of(step, folder, path=os.environ.get("PATH", ""), root=root, caches=caches)
        try:
            return run_child(command, log_file=log, timeout_s=STEP_TIMEOUT_S)
        except ChildFailedError as error:
            raise ChildFailedError(f"{way.name}, {step.what}: {step.command}: {error}") from error

    try:
        walked = _walked(way, folder, logs_of, run, console)
    except BaseException:
        _clean_up(way, run, logs_of, console)
        raise
    if way.cleanup is not None:
        run(way.cleanup, logs_of / "cleanup.log")
    return walked


def _clean_up(way: Way, run: Callable[[Step, Path], ChildUse], logs: Path, console: Console) -> None:
    """After a failed step: what fails here as well is printed, and the first error goes on."""
    if way.cleanup is None:
        return
    try:
        run(way.cleanup, logs / "cleanup.log")
    except ChildFailedError as error:
        console.print(str(error), markup=False)


def _walked(way: Way, folder: Path, logs: Path, run: Callable[[Step, Path], ChildUse], console: Console) -> dict[str, Any]:
    took, first_step_s, foreign, transcript = list[Took](), None, 0.0, list[str]()
    for number, step in enumerate(way.steps):
        log = logs / f"{number}.log"
        use = run(step, log)
        printed = log.read_text(errors="replace").splitlines()
        took.append(Took(what=step.what, command=step.command, seconds=use.wall_s, output=tuple(printed) if step.exit_code else ()))
        transcript = quickstart_lines(printed) if step.is_transcribed else transcript
        if step.is_first_training_step:
            first_step_s = sum(one.seconds for one in took)
        elif (folder / METRICS).is_file() and first_step_s is None:
            first_step_s = sum(one.seconds for one in took) - _since_first_step_s(folder)
        foreign = max(foreign, use.foreign_load)
        console.print(f"{way.name}: {step.what}: {use.wall_s:.0f} s", markup=False)
    if (folder / WATCHED).is_file():
        transcript = (folder / WATCHED).read_text().splitlines()
        rewards = watched_rewards(transcript)
    elif (folder / REPORT).is_file():
        summary = json.loads((folder / SUMMARY).read_text())
        rewards = [summary["reward_first"]["mean"], summary["reward_last"]["mean"]]
    else:
        raise ValueError(f"{way.name}: {folder / REPORT} is not there at the end")
    return {
        "name": way.name,
        "steps": [asdict(one) for one in took],
        "total_s": sum(one.seconds for one in took),
        "first_step_s": first_step_s,
        "rewards": rewards,
        "environment_bytes": size_of(folder / way.environment),
        "foreign_load": foreign,
        "transcript": transcript,
    }


def quickstart_lines(printed: Sequence[str]) -> list[str]:
    """What ``make run`` says about the model and the job; empty where it printed something else."""
    first, last = ([n for n, line in enumerate(printed) if line.startswith(begins)] for begins in RUN_OUTPUT)
    return list(printed[first[0] : last[-1] + 1]) if first and last else []


def watched_rewards(rows: Sequence[str]) -> list[float]:
    """Reward of the first and the last row of ``kubectl get rlj -w`` that have one.

    Raises:
        ValueError: none has.
    """
    rewards = [float(found[1]) for row in rows if (found := re.match(r"\S+\s+\S+\s+\d+\s+(-?\d+\.\d+)\s", row))]
    if not rewards:
        raise ValueError(f"kubectl get rlj -w showed no reward: {rows}")
    return [rewards[0], rewards[-1]]


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
    here = [way for way in ways if way["name"] != KINDS["cluster"]]
    answers_s = [step["seconds"] for way in ways for step in way["steps"] if step["output"]]
    curves = " and ".join(f"{way['total_s']:.0f} s {way['name']}" for way in here)
    parts = [f"first learning curve {curves}"] if here else []
    for way in ways:
        if way["name"] == KINDS["cluster"]:
            parts.append(
                f"on a cluster {applied_s(way):.0f} s to the first kubectl apply, {way['first_step_s']:.0f} s to its first training step"
            )
    return "; ".join([*parts, f"a wrong spec is answered within {max(answers_s):.1f} s"])


def applied_s(way: dict[str, Any]) -> float:
    """Until the right spec has been applied."""
    names = [step["what"] for step in way["steps"]]
    return float(sum(step["seconds"] for step in way["steps"][: names.index("kubectl apply") + 1]))


def markdown(values: dict[str, Any]) -> str:
    """The whole report."""
    lines = [
        "# A newcomer's way", "",
        f"Written by `python -m bench.newcomer` on {values['machine']['measured_at']}. From nothing to the report of the quickstart, "
        "or to the end of that job on a cluster, each way once.", "",
    ]  # fmt: skip
    for way in values["ways"]:
        lines += [f"## {way['name'].capitalize()}", "", *_described(way), ""]
    lines += ["## The wrong spec", "", "The quickstart with a misspelled field and a device that is not there:", ""]
    for way in values["ways"]:
        for step in [step for step in way["steps"] if step["output"]]:
            on_cluster = way["name"] == KINDS["cluster"]
            if on_cluster or "```" not in lines:  # the local ways get the same answer
                lines += [*([f"On the cluster, {step['what']}:", ""] if on_cluster else []), "```", *step["output"], "```", ""]
    return "\n".join(lines)


def _described(way: dict[str, Any]) -> list[str]:
    about, on_cluster = way["machine"], way["name"] == KINDS["cluster"]
    goal = "the end of the first job" if on_cluster else "the first learning curve"
    lines = [
        f"Measured on {about['measured_at']}, commit {about.get('commit', '-')}; {about['processor']}, {about['cores']} cores, "
        f"load {way['load']:.1f} of one minute at the end; package caches {'as they were on this machine' if way['warm'] else 'empty'}"
        f"{', image layers and Go modules as they were' if on_cluster else ''}.", "",
        "| step | command | s |", "|---|---|---:|",
    ]  # fmt: skip
    for step in way["steps"]:
        command = _without_folders(step["command"]).removeprefix(f". ./{EXPORTS}\n").replace("\n", "; ").replace("|", "\\|")
        lines.append(f"| {step['what']} | `{command}` | {step['seconds']:.1f} |")
    lines += [f"| all, to {goal} | | {way['total_s']:.0f} |", ""]
    applied = f"The first `kubectl apply` was answered after {applied_s(way):.0f} s. " if on_cluster else ""
    lines.append(
        f"{applied}The first training step was done after about {way['first_step_s']:.0f} s. Reward of the first and the last steps: "
        f"{way['rewards'][0]:.2f}, {way['rewards'][1]:.2f}. The environment has {way['environment_bytes'] / 1e9:.1f} GB. "
        f"Other programs kept at most {way['foreign_load']:.1f} cores busy during a step."
    )
    return lines


_ABSOLUTE_PATH = re.compile(
    r"""
    (?<=[\s"])         # begins a word
    '?/(?!dev/)        # /dev/null stays
    [^\s'"]*/          # its folders
    ([^\s'"/]+)'?      # its file
    """,
    re.VERBOSE,
)


def _without_folders(command: str) -> str:
    """The command with the names of files instead of their paths, which another machine does not have."""
    return _ABSOLUTE_PATH.sub(r"\1", command)


def build_wheels(out: Path, root: Path = ROOT) -> None:
    """Wheels and pins, as tools/release makes them."""
    loader = SourceFileLoader("release", str(root / "tools" / "release"))
    spec = importlib.util.spec_from_loader("release", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["release"] = module  # its dataclasses look their module up
    loader.exec_module(module)
    module.build(root, out, root / ".venv" / "bin" / "uv")


def recorded(file: Path = RESULTS / "newcomer.json") -> list[dict[str, Any]]:
    """The ways of the last report, each with what they were measured on."""
    if not file.is_file():
        return []
    values = json.loads(file.read_text())
    return [{key: values[key] for key in ("machine", "load", "warm")} | way for way in values["ways"]]


def together(measured: Sequence[dict[str, Any]], earlier: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The ways measured now, and of those measured earlier the others, in the order of the report."""
    names = list(KINDS.values())
    kept = [way for way in earlier if way["name"] not in {one["name"] for one in measured}]
    return sorted([*measured, *kept], key=lambda way: names.index(way["name"]) if way["name"] in names else len(names))


def go(kind: str, work: Path, *, warm: bool, console: Console) -> dict[str, Any]:
    """One way in a folder of its own, which is removed."""
    folder, caches = work / kind, None if warm else work / f"caches-{kind}"
    folder.mkdir()
    wrong, no_device = work / WRONG, work / NO_DEVICE
    wrong.write_text(wrong_spec(QUICKSTART.read_text()))
    no_device.write_text(wrong_spec(QUICKSTART.read_text(), MISTAKES[1:]))
    if kind == "pip":
        build_wheels(folder / "dist")
        shutil.copy(QUICKSTART, folder)
        way = by_pip(PAGE.read_text(), wrong)
    else:
        way = by_clone(ROOT, wrong) if kind == "clone" else by_cluster(ROOT, wrong, no_device)
    found = walk(way, folder, logs=work / "logs", caches=caches, console=console)
    for used in (folder, caches):
        if used is not None:
            shutil.rmtree(used, ignore_errors=True)
    for step in found["steps"]:
        step["command"] = _without_folders(step["command"])
        step["output"] = [_without_folders(f" {line}").removeprefix(" ") for line in step["output"]]
    found["transcript"] = [_without_folders(f" {line}").removeprefix(" ") for line in found["transcript"]]
    return found | {"machine": machine(("ray", "torch")), "load": os.getloadavg()[0], "warm": warm}


def require_no_cluster() -> None:
    """The way on a cluster starts one as root, and removes it.

    Raises:
        ClusterError: not root.
        ValueError: a cluster runs.
    """
    require_root()
    folder = StateFolder(path=state_folder("cluster"))
    if folder.load() is not None:
        raise ValueError(f"a cluster has its state in {folder.path}, expected none: its start is timed. Remedy: make cluster-down")


def main() -> int:
    """Returns 0; a step that fails is an error."""
    parser = argparse.ArgumentParser(prog="python -m bench.newcomer", description=__doc__)
    parser.add_argument("--warm", action="store_true", help="use this machine's package caches")
    parser.add_argument("--only", nargs="+", choices=tuple(KINDS), default=["clone", "pip"], help="some of the ways (default: clone pip)")
    parser.add_argument(
        "--folder", type=Path, help="where the ways are run; needs 25 GB free, for cluster 40 (default: a temporary folder)"
    )
    options = parser.parse_args()
    if "cluster" in options.only:
        require_no_cluster()
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="bench-newcomer-", dir=options.folder, ignore_cleanup_errors=True) as place:
        measured = [go(kind, Path(place), warm=options.warm, console=console) for kind in options.only]
    ways = together(measured, recorded())
    values = {**{key: measured[-1][key] for key in ("machine", "load", "warm")}, "ways": ways, "headline": headline(ways)}
    write_results("newcomer", values, markdown(values))
    console.print(markdown(values), markup=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
