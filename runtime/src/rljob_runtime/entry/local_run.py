"""A job on this machine, from the manifest's text to an exit code. Called by ``rljob run``.

::

    text -> rljob_api (validate, plan) -> local, preflight -> run_place -> attempt on an embedded Ray cluster

Exit codes: see :mod:`rljob_runtime.entry.attempt`.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rljob_api import collector
from rljob_api.errors import SpecInvalidError
from rljob_api.v1alpha1 import RLJobSpec
from rljob_api.validation import check
from rljob_runtime.entry import attempt, local_checks, metrics, run_place
from rljob_runtime.errors import Interrupted, RuntimeFault, SetupError
from rljob_runtime.exit_codes import ExitCode
from rljob_runtime.job import launch, models
from rljob_runtime.job.model_shape import read_config, read_shape
from rljob_runtime.job.worker_settings import node_cpus
from rljob_runtime.report import make_display

if TYPE_CHECKING:
    from rljob_runtime.cluster.embedded import EmbeddedCluster


def run_job(text: str, path: Path, run_dir: Path | None, overwrite: bool, resume: bool, metrics_port: int | None = None) -> int:
    """Run the job; returns the exit code after it showed the user why.

    Args:
        text: the manifest.
        path: where it came from; reward functions are imported from its folder.
        run_dir: run folder; ``runs/<name>`` when None.
        overwrite: replace an earlier run in that folder.
        resume: go on from its newest complete checkpoint.
        metrics_port: of the loopback interface, at which Prometheus can read the run's metrics; None: nowhere.
    """
    job_folder = path.resolve().parent
    try:
        with collector.paused():  # most of it is imports of what makes the data
            checked = check(text, shape_of=read_shape, config_of=read_config)
            spec = checked.job.spec
            local_checks.check(spec, os.environ, resume=resume)
            run_path = run_dir or Path("runs") / checked.job.metadata.name
            sources = launch.preflight(spec, job_folder, models.recorded(run_path, spec) if resume else {})
    except (SpecInvalidError, RuntimeFault) as error:
        sys.stderr.write(f"{error}\n")
        return ExitCode.INVALID
    with contextlib.ExitStack() as held:
        try:
            folder, store = held.enter_context(run_place.taken(checked, run_path, overwrite=overwrite, resume=resume))
            prepared = attempt.prepare(
                checked,
                folder,
                store,
                resume=resume,
                job_folder=job_folder,
                model_folder=folder.model,
                sources=sources,
                notes=local_checks.notes(spec),
            )
        except RuntimeFault as error:
            sys.stderr.write(f"{error}\n")
            return ExitCode.INVALID if isinstance(error, SetupError) else ExitCode.FAILED
        return _run(prepared, metrics_port)


def _run(prepared: attempt.Attempt, metrics_port: int | None) -> int:
    checked = prepared.checked
    try:
        cluster = make_cluster(checked.job.spec, prepared.folder.logs)
        facts = metrics.facts_of(checked, namespace="", attempt=1)
        display = make_display(sys.stdout, clock=time.monotonic)
        with metrics.served(prepared, display, facts, metrics.LOOPBACK, metrics_port) as (noted, shown):
            attempt.run(noted, cluster, shown)
    except (Interrupted, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    except RuntimeFault as error:
        for note in getattr(error, "__notes__", []):
            sys.stderr.write(f"{error}\n{note}\n")
        return ExitCode.FAILED
    return ExitCode.OK


def make_cluster(spec: RLJobSpec, log_dir: Path) -> EmbeddedCluster:
    """The embedded cluster of a local run."""
    from rljob_runtime.cluster.embedded import EmbeddedCluster

    return EmbeddedCluster(log_dir.resolve(), node_cpus(spec), {g.name: dict(g.labels) for g in spec.node_groups})
