"""The Prometheus endpoint of a run, around its attempt: on Kubernetes at the head's port, locally at ``rljob run --metrics-port``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from rljob_api.rules.rollout import max_staleness
from rljob_api.validation import CheckedJob
from rljob_runtime.entry.attempt import Attempt
from rljob_runtime.report import Display, Displays
from rljob_runtime.report.metrics_endpoint import serve
from rljob_runtime.report.prometheus import Deadline, RunFacts, TrainingMetrics

LOOPBACK = "127.0.0.1"


def facts_of(checked: CheckedJob, *, namespace: str, attempt: int, deadline: Deadline | None = None) -> RunFacts:
    """What the metrics of a job say of it from the start; ``deadline`` is one that the operator keeps."""
    spec = checked.job.spec
    return RunFacts(
        namespace=namespace,
        job=checked.job.metadata.name,
        attempt=attempt,
        target_steps=spec.training.steps,
        staleness_bound=max_staleness(spec),
        active_deadline_s=spec.active_deadline_seconds,
        deadline=deadline or Deadline(),
    )


@contextlib.contextmanager
def served(attempt: Attempt, display: Display, facts: RunFacts, address: str, port: int | None) -> Iterator[tuple[Attempt, Display]]:
    """Serve the run's metrics inside the block; gives the attempt, with a warning where that is not possible, and what to show it on.

    ``port`` None serves nothing. Training goes on without the endpoint: a run does not end because nobody can watch it.
    """
    if port is None:
        yield attempt, display
        return
    exporter = TrainingMetrics(facts)
    endpoint = serve(exporter, address, port)
    if isinstance(endpoint, str):
        yield replace(attempt, notes=(*attempt.notes, endpoint)), display
        return
    with contextlib.closing(endpoint):
        yield attempt, Displays([display, exporter])
