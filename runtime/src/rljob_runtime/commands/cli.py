"""The ``rljob`` command: check, plan, explain and run jobs.

Starts fast: every command imports what it needs when it is called; nothing here imports torch, vLLM or Ray.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rljob_runtime.commands import cli_experiments, cli_jobs, job_file
from rljob_runtime.exit_codes import ExitCode
from rljob_runtime.openmp import set_short_spin

if TYPE_CHECKING:
    from rljob_api.validation import CheckedJob


_EXIT_CODES = "Exit codes: 0 success, 2 invalid input, 3 failed run, 130 interrupted."

app = typer.Typer(
    name="rljob",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help=f"""Reinforcement-learning post-training of language models, described by one file.

    \b
    Start here:
      rljob model tiny --out models/tiny      make a tiny model for the examples
      rljob validate examples/quickstart.yaml is the job valid?
      rljob plan examples/quickstart.yaml     which process runs where?
      rljob run examples/quickstart.yaml      train
      rljob show runs/quickstart              how did it go? -t: what did the model do?
      rljob timeline runs/quickstart          what did each worker do, and when?
      rljob compare runs/a runs/b             is one better, and significantly so?
      rljob describe runs/quickstart          where does the time go? a run, or an RLJob
      rljob explain spec.rollout              what does a field mean?
      rljob convert --from roll old.yaml      convert a ROLL or RLinf configuration

    {_EXIT_CODES}""",
)


def _versions(is_wanted: bool) -> None:
    if is_wanted:
        from rljob_runtime.commands.versions import versions

        typer.echo(versions())
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[bool, typer.Option("--version", callback=_versions, is_eager=True, help="Show versions and exit.")] = False,
) -> None:
    """Options of the command itself; its help is that of ``app``."""


model_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Make tiny models for the examples.")
app.add_typer(model_app, name="model")

JobFile = Annotated[str, typer.Argument(metavar="FILE", help="The job as YAML or JSON; - reads standard input.")]
JobName = Annotated[str | None, typer.Option("--name", help="Name of the RLJob, for a file with several.")]


class PlanFormat(StrEnum):
    """How ``rljob plan`` writes."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


class Framework(StrEnum):
    """Frameworks whose configurations ``rljob convert`` reads."""

    ROLL = "roll"
    RLINF = "rlinf"


class ModelSize(StrEnum):
    """Sizes of ``rljob model tiny``."""

    SMALL = "small"
    FRESH = "fresh"
    MIXTURE = "mixture"
    TEN_MILLION = "10m"


class ModelTask(StrEnum):
    """Tasks of ``rljob model tiny``."""

    SUMS = "sums"
    FROZEN_LAKE = "frozen-lake"


@app.command()
def validate(file: JobFile, name: JobName = None) -> None:
    """Check a job and report its problems together.

    Checks types and unknown fields, then rules between fields, placement, and memory. If problems prevent later checks, the last line says
    how many were not made. Models that are not on this machine are named; they are checked when the job starts. Tasks of
    reasoning-gym are looked up in the version that is installed here. Starts nothing and needs no device.

    Exit codes: 0 valid, 2 invalid.
    """
    checked = job_file.checked(file, name)
    if refused := job_file.refused_tasks(checked.job.spec):
        job_file.fail(job_file.problem_lines(file, refused))
    from rljob_runtime.commands.show_plan import summary

    typer.echo(f"OK {checked.job.metadata.name}: {summary(checked)}")
    if absent := job_file.absent_models(checked.job.spec):
        typer.echo(f"not checked: {', '.join(absent)}: no config.json in a folder of this name here, nor in the cache of the Hub", err=True)


@app.command()
def plan(
    file: JobFile,
    name: JobName = None,
    output: Annotated[
        PlanFormat, typer.Option("--output", "-o", help="Output format: a picture in the terminal, or json or yaml for tools.")
    ] = PlanFormat.TABLE,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Also write the picture as SVG.")] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write the picture and tables as an HTML page.")] = None,
    processes: Annotated[bool, typer.Option("--processes", help="List every process, even when there are many.")] = False,
    no_color: Annotated[bool, typer.Option("--no-color", help="Disable colors; so does the environment variable NO_COLOR.")] = False,
    why: Annotated[bool, typer.Option("--explain", help="Explain what mode: Auto chose and why, and where the memory goes.")] = False,
    measured: Annotated[
        Path | None,
        typer.Option(metavar="SUMMARY", help="summary.json of an earlier run; mode: Auto and --simulate use its phase times."),
    ] = None,
    simulate: Annotated[bool, typer.Option("--simulate", help="Simulate the job: step time, idle time, and what limits them.")] = False,
    device_type: Annotated[str | None, typer.Option(metavar="NAME", help="With --simulate: H100 (default), A100, H200, ...")] = None,
    mean_response: Annotated[
        int | None, typer.Option(min=1, metavar="TOKENS", help="With --simulate: mean response length; half of the maximum by default.")
    ] = None,
) -> None:
    """Show the placement of a job, and what fits in memory.

    Shows which process runs on which node and devices, what is shared, how weights travel, and the memory of each device. The same
    planner places the workers of the real run, here and on Kubernetes. A job that only a run would refuse is planned, too;
    the reasons are shown at the end.

    Exit codes: 0 success, 2 invalid job or a file that cannot be written.
    """
    checked = job_file.checked(file, name, runnable=False)
    if simulate:
        if svg is not None or html is not None or why:
            job_file.fail("--simulate: shows no picture and no choice; leave --svg, --html and --explain out")
        _simulate(checked, output, device_type, mean_response, measured)
        return
    if device_type is not None or mean_response is not None:
        job_file.fail("--device-type, --mean-response: have no effect without --simulate; add it, or leave them out")
    if measured is not None:
        checked = _measured(checked, measured, file)
    from rljob_api.errors import PlacementError
    from rljob_runtime.commands import show_plan

    try:
        if svg is not None:
            job_file.write(svg, show_plan.as_svg(checked))
        if html is not None:
            job_file.write(html, show_plan.as_html(checked))
        if why:
            _explain(checked, output)
        elif output is PlanFormat.TABLE:
            from rich.console import Console

            console = Console(no_color=True if no_color else None)
            show_plan.print_picture(checked, console, processes=processes)
            for show in (show_plan.print_memory, show_plan.print_transport, show_plan.print_overlap, show_plan.print_standby):
                show(checked, console)
        else:
            typer.echo(show_plan.as_json(checked) if output is PlanFormat.JSON else show_plan.as_yaml(checked))
    except PlacementError as error:
        job_file.fail(f"{file}: weights cannot be synchronized: {error}")
    if checked.not_yet:
        typer.echo("\n".join(("\nA run would refuse this job:", *(f"  {problem}" for problem in checked.not_yet))), err=True)


@app.command()
def convert(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="The configuration (YAML), next to the files it includes; - reads standard input.")
    ],
    framework: Annotated[Framework, typer.Option("--from", help="Framework of the configuration.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the manifest to this file instead of standard output.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the job; the experiment's name by default.")] = None,
    devices_per_node: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Accelerators per node, which RLinf's files do not contain; 8 by default.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail if anything cannot be represented in the manifest.")] = False,
) -> None:
    """Convert a ROLL or RLinf configuration to a job.

    Reports what became of every key. The manifest goes to standard output; the notes go to standard error and to the top of the manifest.

    Exit codes: 0 success, 2 unreadable or not an RL job, or --strict and something was lost.
    """
    if devices_per_node is not None and framework is Framework.ROLL:
        job_file.fail(
            "--devices-per-node: is for RLinf's files; a ROLL file has num_gpus_per_node: change it there, or leave the option out"
        )
    if name is not None:
        _check_name(name)
    text = job_file.read(file, f"give the path of {'a ROLL' if framework is Framework.ROLL else 'an RLinf'} configuration")
    folder = None if file == "-" else Path(file).parent
    from rljob_api.errors import SpecInvalidError
    from rljob_runtime.commands.convert import convert_file

    try:
        is_written = convert_file(
            text, framework.value, folder=folder, out=out, name=name, devices_per_node=devices_per_node, strict=strict
        )
    except SpecInvalidError as error:
        job_file.fail(job_file.problems(file, error))
    except OSError as error:
        job_file.fail(f"{out}: cannot be written: {error.strerror}; name a file in a folder that exists")
    if not is_written:
        raise typer.Exit(ExitCode.INVALID)


@app.command()
def conformance(
    jsonl: Annotated[Path, typer.Option("--jsonl", metavar="FILE", help="Cases, one JSON object per line; - reads standard input.")],
) -> None:
    """Answer RLinf placement cases, one JSON result per line.

    A case is a configuration and the machines it runs on; docs/placement.md describes both. Every case gets a result: an impossible
    placement has ok: false and the id of the check that failed. Where the answer differs from RLinf 0.3.0 on purpose, difference says
    why.

    Exit codes: 0 success, 2 the file cannot be read.
    """
    from rljob_convert.conformance.answers import run_lines

    text = job_file.read(str(jsonl), "give the path of a JSONL file of cases (docs/placement.md)")
    for result in run_lines(text.removesuffix("\n").split("\n")):
        typer.echo(result)


@app.command()
def schema(
    crd: Annotated[bool, typer.Option("--crd/--json", help="The Kubernetes CRD (YAML), or a JSON schema for editors.")] = True,
) -> None:
    """Print the schema of the job file.

    Exit code: 0.
    """
    import json

    from rljob_api import generate
    from rljob_api.crd import schema as api_schema

    typer.echo(generate.to_yaml(api_schema.crd()).rstrip("\n") if crd else json.dumps(api_schema.json_schema(), indent=2))


@app.command()
def explain(path: Annotated[str, typer.Argument(metavar="PATH", help="A field, such as spec.rollout or spec.seed.")] = "spec") -> None:
    """Explain a field: type, default, bounds, nested fields.

    Exit codes: 0 success, 2 no such field.
    """
    from rljob_runtime.commands import explain_field
    from rljob_runtime.errors import SetupError

    try:
        for line in explain_field.lines(path):
            typer.echo(line)
    except SetupError as error:
        job_file.fail(str(error))


@app.command()
def run(
    file: JobFile,
    name: JobName = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder for metrics, logs, and checkpoints; runs/<name> by default.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete what an earlier run left in the folder and start over.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest complete checkpoint in the folder.")] = False,
    metrics_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Serve metrics to Prometheus at http://127.0.0.1:PORT/metrics.")
    ] = None,
) -> None:
    """Run a job on this machine.

    Ctrl-C stops it after the current step with a checkpoint; --resume continues from there.

    Exit codes: 0 success, 2 invalid job or arguments, 3 failed, 130 interrupted.
    """
    if overwrite and resume:
        job_file.fail("--overwrite and --resume contradict each other; give one of them")
    text = job_file.single(file, name)
    job_file.check_text(text, file, None)  # before anything heavy is imported; run_job checks again for its other callers
    from rljob_api import collector

    with collector.paused():
        from rljob_runtime.entry.local_run import run_job

    path = Path("stdin.yaml") if file == "-" else Path(file)
    raise typer.Exit(run_job(text, path, run_dir, overwrite, resume, metrics_port))


@app.command()
def show(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, such as runs/quickstart; it may still be running.")],
    trajectories: Annotated[
        bool, typer.Option("--trajectories", "-t", help="Print sampled responses or episodes, turn by turn, with rewards.")
    ] = False,
    step: Annotated[int | None, typer.Option(min=0, help="Only this step; 0 is a validation without training.")] = None,
    group: Annotated[int | None, typer.Option(min=0, help="Only this group: samples of the same prompt or task.")] = None,
    environment: Annotated[
        str | None, typer.Option("--environment", "--source", metavar="NAME", help="Only this environment or data source.")
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only those whose environment or reward failed.")] = False,
    best: Annotated[int | None, typer.Option(min=1, metavar="N", help="The N with the highest rewards.")] = None,
    worst: Annotated[int | None, typer.Option(min=1, metavar="N", help="The N with the lowest rewards.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="At most this many, newest steps first; 0 prints all.")] = 4,
    full: Annotated[bool, typer.Option("--full", help="Print long texts in full instead of eliding the middle.")] = False,
) -> None:
    """Show how a run went, and what its model did.

    
    Responses or episodes are kept every few steps (spec.report), and the first ones that failed:
      rljob show runs/lake                              how it went, and which steps have trajectories
      rljob show runs/lake -t                           the newest ones, turn by turn
      rljob show runs/lake -t --step 1 --worst 2        what went wrong at first
      rljob show runs/lake -t --environment lake --best 1
      rljob show runs/lake -t --failed --full           why environments failed

    A turn shows the observation, the action, the reward, the weight versions that sampled it, its sampled tokens, and the seconds of
    generation and of the environment. report.html has the same for the first and the last of these steps.

    Exit codes: 0 success, 2 no such run or trajectories.
    """
    if best is not None and worst is not None:
        job_file.fail("--best and --worst contradict each other; give one of them")
    if not trajectories and (step, group, environment, failed, best, worst, limit, full) != (None, None, None, False, None, None, 4, False):
        job_file.fail("these options choose trajectories; add --trajectories")
    from rich.console import Console

    from rljob_runtime.commands import show_run
    from rljob_runtime.errors import RuntimeFault
    from rljob_runtime.report.reading import Order, Selection
    from rljob_runtime.report.transcript import print_trajectories

    order = Order.BEST if best else Order.WORST if worst else Order.NEWEST
    wanted = Selection(group=group, source=environment, failed=failed, order=order, limit=best or worst or limit)
    console = Console(highlight=False)
    try:
        folder = show_run.open_run(run_folder)
        if trajectories:
            print_trajectories(show_run.trajectories(folder, wanted, step), console, full=full)
        else:
            show_run.print_summary(folder, console)
    except RuntimeFault as error:
        job_file.fail(str(error))


@app.command()
def timeline(
    run_folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, such as runs/quickstart; it may still be running.")],
    steps: Annotated[str | None, typer.Option(metavar="A-B", help="Only these steps; by default the last ones that fit.")] = None,
    perfetto: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a trace for ui.perfetto.dev or chrome://tracing.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with a lane per worker; works offline.")] = None,
) -> None:
    """Show what every worker did and when, and what it waited for.

    Phases: generate, environment, score, train, sync, offload, load, checkpoint; each wait names its cause. Where components take turns
    on devices, the page also shows what was in device memory.

    Exit codes: 0 success, 2 no such run or steps, or a file that cannot be written.
    """
    from rich.console import Console

    from rljob_runtime.commands import timeline as command
    from rljob_runtime.errors import RuntimeFault

    try:
        command.show(run_folder, steps, perfetto, html, Console(highlight=False))
    except RuntimeFault as error:
        job_file.fail(str(error))


@model_app.command(short_help="Make a tiny model: for sums, or the frozen lake.")
def tiny(
    out: Annotated[Path, typer.Option("--out", help="Folder to create.")],
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same weights.")] = 0,
    size: Annotated[
        ModelSize,
        typer.Option(help="small and mixture (four experts) are partly trained; fresh and 10m (ten million parameters) are random."),
    ] = ModelSize.SMALL,
    task: Annotated[
        ModelTask, typer.Option(help="sums for examples/quickstart.yaml, frozen-lake for examples/frozen-lake.yaml.")
    ] = ModelTask.SUMS,
) -> None:
    """Make a tiny, partly trained language model: for two-digit sums, or for the frozen lake.

    Exit codes: 0 success, 2 invalid arguments, 3 it could not be made.
    """
    from rljob_runtime.commands.model import make_with_progress

    if task is not ModelTask.SUMS and size is not ModelSize.SMALL:
        job_file.fail(f"--size {size} is not for --task {task}; leave out --task or --size")
    raise typer.Exit(make_with_progress(out, size=size.value, seed=seed, task=task.value))


cli_jobs.register(app)
cli_experiments.register(app)


def main() -> None:
    """Entry point of the ``rljob`` command."""
    set_short_spin()
    app()


def _measured(checked: CheckedJob, summary: Path, file: str) -> CheckedJob:
    """The job with the phase times of an earlier run; problems are printed and end the command."""
    from rljob_api.errors import SpecInvalidError
    from rljob_runtime.commands import explain_plan
    from rljob_runtime.errors import RuntimeFault

    try:
        return explain_plan.with_measured(checked.job, summary)
    except RuntimeFault as error:
        job_file.fail(f"--measured: {error}")
    except SpecInvalidError as error:
        job_file.fail(job_file.problems(file, error))


def _check_name(name: str) -> None:
    """A name that Kubernetes would refuse ends the command."""
    import re

    from rljob_api.naming import MAX_JOB_NAME
    from rljob_api.v1alpha1.base import JOB_NAME_PATTERN, PATTERN_WORDS

    if re.fullmatch(JOB_NAME_PATTERN, name) is None:
        job_file.fail(f"--name {name}: is not the name of a job; use {PATTERN_WORDS[JOB_NAME_PATTERN]}, at most {MAX_JOB_NAME} characters")
    if len(name) > MAX_JOB_NAME:
        job_file.fail(f"--name {name}: has {len(name)} characters, at most {MAX_JOB_NAME} are allowed; use a shorter one")


def _simulate(checked: CheckedJob, output: PlanFormat, device: str | None, mean_response: int | None, run: Path | None) -> None:
    """Simulate a job and print what came out."""
    from rljob_runtime.commands import simulate_plan
    from rljob_runtime.errors import RuntimeFault

    try:
        found = simulate_plan.simulate(checked, device=device, mean_response=mean_response, run=run)
    except RuntimeFault as error:
        job_file.fail(str(error))
    if output is PlanFormat.TABLE:
        from rich.console import Console

        simulate_plan.print_simulation(found, Console())
    elif output is PlanFormat.JSON:
        typer.echo(simulate_plan.as_json(found))
    else:
        job_file.fail("--simulate -o yaml: not written; take json")


def _explain(checked: CheckedJob, output: PlanFormat) -> None:
    """Print what placements with mode Auto became, and why, and where the memory goes."""
    from rljob_runtime.commands import explain_plan, show_plan

    choice = explain_plan.choice_of(checked.job)
    if output is not PlanFormat.TABLE:
        if choice is None:
            job_file.fail(
                "--explain -o: nothing was chosen, every placement is explicit; leave --explain out, the plan holds the memory estimate"
            )
        typer.echo(explain_plan.as_json(choice) if output is PlanFormat.JSON else explain_plan.as_yaml(choice))
        return
    from rich.console import Console

    console = Console()
    if choice is None:
        console.print("Every placement is explicit; placement: {mode: Auto} lets the planner choose.", highlight=False, markup=False)
    else:
        explain_plan.print_choice(choice, console)
    show_plan.print_memory(checked, console, arithmetic=True)


if __name__ == "__main__":
    main()
