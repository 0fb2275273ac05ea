"""MLflow. To the server of MLFLOW_TRACKING_URI where that is set; else into files of the run folder.

The server chooses the identifier of a run, so that ours is a tag by which a restarted run is found again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from rljob_runtime.report.trackers.protocol import TrackedRun, Tracker

ID_TAG = "rljob.runId"
MAX_PARAM_CHARACTERS = 500
"""Longer values are refused by older servers."""
PARAMS_PER_CALL = 100
"""MLflow's limit of a batch."""


def make(run: TrackedRun) -> Tracker:
    """Open the run, or open it again."""
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"  # MLflow refuses files otherwise, and its database needs many more packages
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or run.folder.resolve().as_uri())
    experiment = client.get_experiment_by_name(run.project)
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(run.project)
    known = client.search_runs([experiment_id], f"tags.`{ID_TAG}` = '{run.run_id}'", max_results=1)
    if known:
        run_id = known[0].info.run_id
        client.update_run(run_id, status="RUNNING")
    else:
        run_id = client.create_run(experiment_id, run_name=run.name, tags={ID_TAG: run.run_id}).info.run_id
        params = [Param(key, value[:MAX_PARAM_CHARACTERS]) for key, value in flat(run.config)]
        for first in range(0, len(params), PARAMS_PER_CALL):
            client.log_batch(run_id, params=params[first : first + PARAMS_PER_CALL])

    class _Run:
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            now_ms = int(time.time() * 1000)
            client.log_batch(run_id, metrics=[Metric(name, value, now_ms, step) for name, value in metrics.items()])

        def finish(self, *, succeeded: bool) -> None:
            client.set_terminated(run_id, status="FINISHED" if succeeded else "FAILED")

    return _Run()


def flat(config: object, path: str = "") -> list[tuple[str, str]]:
    """Leaves of the spec by their path, ``spec.components.0.name``: MLflow's parameters are flat, and brackets are not allowed in names."""
    children: list[tuple[Any, Any]] = []
    if isinstance(config, Mapping):
        children = list(config.items())
    elif isinstance(config, list):
        children = list(enumerate(config))
    elif path:
        return [(path, str(config))]
    return [leaf for key, value in children for leaf in flat(value, f"{path}.{key}".lstrip("."))]
