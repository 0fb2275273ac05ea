"""Commands about several runs: ``rljob compare`` and ``rljob sweep``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rljob_runtime.commands import job_file
from rljob_runtime.exit_codes import ExitCode

if TYPE_CHECKING:
    from rljob_runtime.commands.sweep_file import Sweep


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (compare, sweep):
        app.command()(command)


def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, which may still be running; the first is the baseline.")
    ],
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Also write a page with curves; works offline.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Compare runs, with significance over seeds.

    Shows results with their spread over seeds, significance, and the fields of the spec that differ. Runs whose jobs differ only in seed
    and name count as one variant.

    Exit codes: 0 success, 2 no such run, or a file that cannot be written.
    """
    from rich.console import Console

    from rljob_runtime.commands import compare as command
    from rljob_runtime.errors import RuntimeFault
    from rljob_runtime.report.comparison import as_json as document

    try:
        comparison = command.load(runs)
        if html is not None:
            command.write_page(comparison, html)
            typer.echo(f"wrote {html}", err=True)
        if as_json:
            typer.echo(json.dumps(document(comparison), indent=2, allow_nan=False))
            return
        command.print_comparison(comparison, Console(highlight=False))
    except RuntimeFault as error:
        job_file.fail(str(error))


def sweep(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The sweep: a job and a matrix of values (docs/compare.md).")],
    run_dir: Annotated[
        Path | None, typer.Option(help="Parent folder of the runs; runs/<file name> by default. Finished runs are skipped.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and list all points; start nothing.")] = False,
    manifests: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write the points as RLJobs for a cluster instead.")] = None,
    queue: Annotated[str | None, typer.Option(metavar="NAME", help="With --manifests: Kueue LocalQueue; the job's own by default.")] = None,
    apply: Annotated[bool, typer.Option("--apply", help="With --manifests: apply them with kubectl.")] = False,
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="With --apply: namespace; the current one of the kubeconfig by default.")
    ] = None,
    context: Annotated[str | None, typer.Option(help="With --apply: context of the kubeconfig; the current one by default.")] = None,
) -> None:
    """Run a job with a matrix of values, and compare the results.

    All points are checked before the first one starts. Local runs are sequential; after an interruption the same command continues and
    skips finished points.

    Exit codes: 0 success, 2 an invalid point or argument, 3 a point failed, 130 interrupted.
    """
    if manifests is None and (queue, apply, namespace, context) != (None, False, None, None):
        job_file.fail("--queue, --apply, --namespace and --context are for jobs of a cluster; add --manifests FOLDER")
    if not apply and (namespace, context) != (None, None):
        job_file.fail("--namespace and --context are for kubectl; add --apply")
    from rich.console import Console

    from rljob_api.errors import counted
    from rljob_runtime.commands import compare as comparing
    from rljob_runtime.commands import sweep as command
    from rljob_runtime.commands.kubectl import Kubectl
    from rljob_runtime.errors import Interrupted, RuntimeFault

    found, console = _read(file, queue), Console(highlight=False)
    try:
        command.print_points(found, console)
        if dry_run:
            return
        if manifests is not None:
            written = command.write_manifests(found, manifests)
            console.print(f"wrote {counted(len(written), 'manifest')} to {manifests}", markup=False)
            if apply:
                console.print(command.apply(written, Kubectl(namespace=namespace, context=context)), markup=False, end="")
            console.print(command.compare_command(found, namespace), markup=False, soft_wrap=True)
            return
        root = run_dir or Path("runs") / file.stem
        ended = command.run_shown(found, root, console)
        done = [one.folder for one in ended if one.code == 0]
        if done:
            comparing.print_comparison(comparing.load(done), console)
    except Interrupted as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(ExitCode.INTERRUPTED) from error
    except RuntimeFault as error:
        job_file.fail(str(error))
    if (failed := command.failures(ended, root)) is not None:
        typer.echo(str(failed), err=True)
        raise typer.Exit(ExitCode.FAILED)


def _read(file: Path, queue: str | None) -> Sweep:
    """The sweep; problems are printed and end the command."""
    from rljob_api.errors import SpecInvalidError, counted
    from rljob_runtime.commands import sweep_file
    from rljob_runtime.errors import SetupError
    from rljob_runtime.job.model_shape import read_config, read_shape

    try:
        return sweep_file.read(file, shape_of=read_shape, config_of=read_config, queue=queue)
    except SpecInvalidError as error:
        head = f"{file} is not valid, {counted(len(error.errors), 'problem')}:"
        last = [error.unchecked] if error.unchecked else []
        job_file.fail("\n".join([head, *(f"  {problem}" for problem in error.errors), *last]))
    except SetupError as error:
        job_file.fail(str(error))
