"""``python -m rljob_runtime.entry.pre_stop``: the stop hook of every pod. Lets the run end in order before the kubelet ends its processes.

It leaves a file, by which driver and workers know that their pod was asked to end. On the head it asks the driver to stop, which then
writes a checkpoint, and waits for its end. On a node the workers' file tells the driver the same; the hook waits until no worker of the
job runs any more, because the driver still needs them for that checkpoint. Where nothing runs it ends at once. The kubelet ends it with
the pod when terminationGracePeriodSeconds are over.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rljob_runtime.cluster import pid_file
from rljob_runtime.cluster.pod_log import POD_OUTPUT, PodOutput

POLL_S = 0.2
TIMEOUT_S = 3600.0
"""Longer than any grace period: the kubelet decides."""


def stop(state_folder: Path, timeout_s: float, log: Callable[[str], None]) -> bool:
    """End the driver of this pod in order, or wait for the workers of this pod; returns whether all have ended in time."""
    deadline = time.monotonic() + timeout_s
    try:
        state_folder.mkdir(parents=True, exist_ok=True)
        pid_file.stopping_file(state_folder).touch()
    except OSError as error:
        log(f"the run takes this for a stop by a user: {error}")
    driver = pid_file.driver_file(state_folder)
    pid = pid_file.running(driver)
    if pid is not None:
        log(f"stopping: SIGTERM to the driver (pid {pid}), which writes a checkpoint of the last finished step first")
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, signal.SIGTERM)
    elif waiting := [path.stem for path in pid_file.worker_files(state_folder) if pid_file.running(path)]:
        log(f"stopping: waiting for the driver, which writes a checkpoint first, to end {', '.join(waiting)}")
    while left := [path.stem for path in (driver, *pid_file.worker_files(state_folder)) if pid_file.running(path)]:
        if time.monotonic() >= deadline:
            log(f"after {timeout_s:g} s there is still {', '.join(left)}")
            return False
        time.sleep(POLL_S)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0 when everything has ended, 1 after the time-out."""
    parser = argparse.ArgumentParser(prog="python -m rljob_runtime.entry.pre_stop", description="Stop hook of a pod of an RLJob.")
    parser.add_argument("--state-folder", type=Path, default=pid_file.STATE_FOLDER, help="where processes leave their pid files")
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S, help="give up after this many seconds")
    options = parser.parse_args(arguments)
    output = PodOutput(POD_OUTPUT, "[pre-stop] ") if "KUBERNETES_SERVICE_HOST" in os.environ else None

    def log(text: str) -> None:
        if output is not None:
            output.write(f"{text}\n".encode())

    return 0 if stop(options.state_folder, options.timeout_s, log) else 1


if __name__ == "__main__":
    raise SystemExit(main())
