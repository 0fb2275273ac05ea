"""Commands that look at jobs, on a cluster through kubectl or local by the run folder; also ``kubectl rlj``."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys
import time
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from rljob_runtime.commands import job_file

Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Namespace of the job; the current one of the kubeconfig by default.")
]
Context = Annotated[str | None, typer.Option(help="Context of the kubeconfig; the current one by default.")]
Job = Annotated[str, typer.Argument(metavar="NAME", help="Name of an RLJob on the cluster, or folder of a local run.")]

COMPLETE_VARIABLE = "_KUBECTL_RLJ_COMPLETE"
"""Environment variable that makes Typer print completions instead of running a command."""
SHELL_DEFAULT, NO_FILES = ":0", ":4"
"""Cobra's ShellCompDirectiveDefault and ShellCompDirectiveNoFileComp."""


class Page(StrEnum):
    """What ``rljob open`` opens."""

    REPORT = "report"
    TENSORBOARD = "tensorboard"
    DASHBOARD = "dashboard"
    METRICS = "metrics"


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (top, describe, logs):
        app.command()(command)
    app.command(name="open")(open_page)


def top(
    runs: Annotated[
        list[Path] | None, typer.Argument(metavar="[RUN]...", help="Folders of local runs; without any, the jobs of the cluster.")
    ] = None,
    namespace: Namespace = None,
    everywhere: Annotated[bool, typer.Option("--all-namespaces", "-A", help="List jobs of all namespaces.")] = False,
    context: Context = None,
    watch: Annotated[
        float | None, typer.Option(min=1.0, metavar="SECONDS", help="Refresh every so many seconds, until interrupted.")
    ] = None,
) -> None:
    """List jobs with their state and progress.

    Exit codes: 0 success, 2 no such run, or kubectl failed.
    """
    from rich.console import Console

    from rljob_runtime.commands import jobs
    from rljob_runtime.commands.kubectl import Kubectl
    from rljob_runtime.errors import RuntimeFault

    console = Console(highlight=False)
    cluster = Kubectl(namespace=namespace, context=context)
    while True:
        try:
            rows = jobs.local_rows(runs) if runs else jobs.top_rows(cluster.jobs(everywhere=everywhere))
        except RuntimeFault as error:
            job_file.fail(str(error))
        if watch is not None and console.is_terminal:
            console.clear()
        jobs.print_top(rows, console)
        if watch is None:
            return
        try:
            time.sleep(watch)
        except KeyboardInterrupt:
            return


def describe(name: Job, namespace: Namespace = None, context: Context = None) -> None:
    """Show the state of a job, and where the time goes.

    Conditions, nodes, progress, time by phase, the last failure with advice, and placement.

    Exit codes: 0 success, 2 no such job or run.
    """
    from rich.console import Console

    from rljob_runtime.commands import jobs
    from rljob_runtime.commands.kubectl import Kubectl
    from rljob_runtime.errors import RuntimeFault

    console = Console(highlight=False)
    try:
        if _is_local(name):
            jobs.describe_run(Path(name), console)
            return
        cluster = Kubectl(namespace=namespace, context=context)
        job = cluster.job(name)
        attempt = job.get("status", {}).get("attempt")
        jobs.describe_job(job, cluster.pods(name, attempt) if attempt else [], console)
    except RuntimeFault as error:
        job_file.fail(str(error))


def logs(
    name: Job,
    worker: Annotated[str | None, typer.Option(help="Worker, such as actor_train-0; the driver by default.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the log; cluster only.")] = False,
    tail: Annotated[int | None, typer.Option(min=0, metavar="N", help="Only the last N lines of each pod; cluster only.")] = None,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Print the log of the driver or of a worker.

    Exit codes: 0 success, 2 no such job, run, or worker; otherwise kubectl's.
    """
    from rljob_runtime.commands import logs as command
    from rljob_runtime.commands.kubectl import Kubectl
    from rljob_runtime.errors import RuntimeFault

    try:
        if _is_local(name):
            if follow or tail is not None:
                job_file.fail("--follow and --tail are for jobs of a cluster; a local run's logs are files in its folder logs/")
            typer.echo(command.local_logs(Path(name), worker), nl=False)
            return
        cluster = Kubectl(namespace=namespace, context=context)
        if follow and worker is not None:
            job_file.fail("--follow cannot be given with --worker: its lines are in one of several pods; leave --follow out")
        raise typer.Exit(command.pod_logs(cluster, name, worker, keep_on=follow, tail=tail))
    except RuntimeFault as error:
        job_file.fail(str(error))


def open_page(
    name: Job,
    what: Annotated[Page | None, typer.Option(help="Local run: report or tensorboard. Cluster: dashboard or metrics.")] = None,
    port: Annotated[int | None, typer.Option(min=1, max=65535, help="Local port for a forwarded page.")] = None,
    namespace: Namespace = None,
    context: Context = None,
) -> None:
    """Open the report of a run, or the dashboard of a job.

    Opens the report or TensorBoard of a local run; forwards the Ray dashboard or the metrics of a job on the cluster.

    Exit codes: 0 success, 2 no such job, run, or page; otherwise kubectl's or TensorBoard's.
    """
    from rljob_runtime.commands import logs as command
    from rljob_runtime.commands.kubectl import Kubectl
    from rljob_runtime.errors import RuntimeFault

    try:
        if _is_local(name):
            if port is not None:
                job_file.fail("--port is for jobs of a cluster")
            raise typer.Exit(command.open_page(Path(name), (what or Page.REPORT).value))
        cluster = Kubectl(namespace=namespace, context=context)
        raise typer.Exit(command.forward(cluster, name, (what or Page.DASHBOARD).value, port))
    except RuntimeFault as error:
        job_file.fail(str(error))


def kubectl_plugin() -> None:
    """Entry point ``kubectl-rlj``, which kubectl runs as ``kubectl rlj``: the commands that look at jobs."""
    plugin()()


def kubectl_complete() -> None:
    """Entry point ``kubectl_complete-rlj``, which kubectl runs to complete a command line that begins with ``kubectl rlj``.

    The arguments are the words after ``rlj``; the last one, possibly empty, is to be completed. Prints one completion per line, and
    then a directive of Cobra's completion protocol.
    """
    words = shlex.join(["kubectl-rlj", *(word for word in sys.argv[1:] if word)])
    # Typer's format for fish, one completion per line with its help after a tab, is also what kubectl reads.
    os.environ |= {
        COMPLETE_VARIABLE: "complete_fish",
        "_TYPER_COMPLETE_ARGS": words if sys.argv[-1] else f"{words} ",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        plugin()(prog_name="kubectl-rlj", complete_var=COMPLETE_VARIABLE)
    completions = [line for line in printed.getvalue().split("\n") if line]
    # Without completions it is an argument: the name of a job, or the folder of a run, which the shell completes.
    typer.echo("\n".join([*completions, NO_FILES if completions else SHELL_DEFAULT]))


def plugin() -> typer.Typer:
    """The command line of ``kubectl rlj``."""
    app = typer.Typer(
        name="kubectl rlj",
        no_args_is_help=True,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        help="Inspect RLJobs of the cluster.",
    )
    register(app)
    return app


def _is_local(name: str) -> bool:
    """Whether it is a run folder, or meant to be one: no RLJob's name has a slash."""
    return "/" in name or Path(name).is_dir()
