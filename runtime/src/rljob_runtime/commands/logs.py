"""``rljob logs`` and ``rljob open``: what a job wrote, and the pages about it."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

from rljob_api.naming import METRICS_PORT, RAY_CONTAINER
from rljob_runtime.commands.kubectl import Kubectl, attempt_of, follow, is_head
from rljob_runtime.commands.show_run import open_run
from rljob_runtime.errors import SetupError
from rljob_runtime.report.folder import RunFolder
from rljob_runtime.report.jsonl import iter_rows, number_of
from rljob_runtime.report.text import format_seconds

DASHBOARD_PORT = 8265


def local_logs(path: Path, worker: str | None) -> str:
    """A worker's log, or the driver's lines.

    Raises:
        SetupError: it is no run, or has no log of that worker; names those that it has.
        RuntimeFault: a file is malformed.
    """
    folder = open_run(path)
    if worker is None:
        rows = iter_rows(folder.events_jsonl)
        return "".join(f"{format_seconds(number_of(row, 'wall_s')):>8}  {row.get('level')}  {row.get('text')}\n" for row in rows)
    file = folder.logs / f"{worker}.log"
    if worker not in workers_of(folder):
        raise SetupError(f"{path}: no log of worker {worker}; there are {', '.join(workers_of(folder)) or 'none'}")
    return file.read_text(encoding="utf-8", errors="replace")


def workers_of(folder: RunFolder) -> list[str]:
    """Workers that have a log."""
    return sorted(file.stem for file in folder.logs.glob("*.log"))


def pod_logs(cluster: Kubectl, name: str, worker: str | None, *, keep_on: bool, tail: int | None) -> int:
    """Print the driver's or a worker's lines of the pods of the current attempt; returns kubectl's exit code.

    Raises:
        SetupError: no such job, no attempt, no pod.
    """
    pods = cluster.pods(name, attempt_of(cluster.job(name)))
    if not pods:
        raise SetupError(f"{name}: the pods of its last attempt are gone; with spec.storage its logs are in the run folder on the volume")
    options = ["--container", RAY_CONTAINER, *(["--follow"] if keep_on else []), *([f"--tail={tail}"] if tail is not None else [])]
    if worker is None:
        heads = [pod for pod in pods if is_head(pod)]
        if not heads:
            raise SetupError(f"{name}: its head pod is gone; name a worker with --worker, or look at the run folder on the volume")
        return follow(cluster.command("logs", heads[0]["metadata"]["name"], *options), "[driver] ")
    code = 0
    for pod in pods:  # a worker's lines are in one pod only, and which one its name does not say
        code = follow(cluster.command("logs", pod["metadata"]["name"], *options), f"[{worker}] ") or code
    return code


def open_page(path: Path, what: str) -> int:
    """Open a page about a local run in the browser, or serve TensorBoard; returns the exit code.

    Raises:
        SetupError: there is no such page.
    """
    folder = open_run(path)
    if what == "tensorboard":
        return subprocess.run([sys.executable, "-m", "tensorboard.main", "--logdir", str(folder.tensorboard)], check=False).returncode
    if what == "dashboard":
        raise SetupError(f"{path}: a local run has no Ray dashboard; open its report or tensorboard")
    if not folder.report_html.exists():
        raise SetupError(f"{folder.report_html}: is written when the run ends; rljob timeline {path} --html FILE works before")
    import webbrowser

    sys.stdout.write(f"{folder.report_html.resolve().as_uri()}\n")
    webbrowser.open(folder.report_html.resolve().as_uri())
    return 0


def forward(cluster: Kubectl, name: str, what: str, port: int | None) -> int:
    """Forward a port of a job's head to this machine until interrupted; returns kubectl's exit code.

    Raises:
        SetupError: no such job or head pod, or what is asked for lies on the volume.
    """
    ports = {"dashboard": DASHBOARD_PORT, "metrics": METRICS_PORT}
    if what not in ports:
        raise SetupError(f"{what} of a job on a cluster is in its run folder on the volume; available from here: {', '.join(ports)}")
    heads = [pod for pod in cluster.pods(name, attempt_of(cluster.job(name))) if is_head(pod)]
    if not heads:
        raise SetupError(f"{name}: its head pod is gone, and the {what} with it")
    head = heads[0]["metadata"]
    own = port or ports[what]
    lines = [f"http://127.0.0.1:{own}{'/metrics' if what == 'metrics' else ''}"]
    if what == "dashboard":
        raycluster = head.get("labels", {}).get("ray.io/cluster", "<RayCluster>")
        command = cluster.command("get", "secret", raycluster, "-o", "jsonpath={.data.auth_token}")
        lines.append(f"token: {shlex.join(command)} | base64 -d")
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()
    return subprocess.run(cluster.command("port-forward", f"pod/{head['name']}", f"{own}:{ports[what]}"), check=False).returncode
