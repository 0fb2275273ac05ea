"""The process that hosts one worker: environment first, log file second, heavy imports last.

In a pod its log lines are also copied to the pod's own output, and a pid file lets the pod's stop hook wait for it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import socket
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rljob_api.naming import ENV_NODE_RANK
from rljob_runtime.cluster import pid_file
from rljob_runtime.cluster.pod_log import POD_OUTPUT, Follower, PodOutput

POD_VISIBLE_DEVICES = "RLJOB_POD_VISIBLE_DEVICES"
"""Environment of a node: the CUDA_VISIBLE_DEVICES it was given itself."""
KEEP_VISIBLE_DEVICES = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
"""Environment of a node: Ray leaves CUDA_VISIBLE_DEVICES of its workers alone."""
START_WORD = "starts"
"""Word in the line that begins a process's part of its log; earlier attempts may have written parts before it."""


class WorkerHost:
    """Builds the worker inside its process and forwards calls to it."""

    def __init__(self, name: str, factory: str, kwargs: Mapping[str, Any], env: Mapping[str, str], log_file: str) -> None:
        """Prepare the process; :meth:`build` constructs ``module:Class`` with ``kwargs``.

        Everything the worker or its libraries print goes to ``log_file``, so that it survives the process.
        """
        in_pod = ENV_NODE_RANK in os.environ
        os.environ.update(env)
        _redirect_output(log_file)
        if in_pod:
            _join_pod(name, log_file)
        sys.stderr.write(f"{start_line(name)} pid {os.getpid()} {START_WORD} {factory}{_place(env)}\n")
        self._factory = factory
        self._kwargs = kwargs
        self._worker: Any = None

    def build(self) -> None:
        """Construct the worker; a call of its own, so that its error arrives as it is and not as the death of the process."""
        module_name, _, class_name = self._factory.partition(":")
        with _traceback_in_log():
            self._worker = getattr(importlib.import_module(module_name), class_name)(**self._kwargs)

    def address(self) -> tuple[str, int]:
        """This node's address and a port that is free on it, for a process group."""
        host = _own_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return host, int(probe.getsockname()[1])

    def watch(self) -> None:
        """Never returns: the call fails at the moment the process ends, which is how the driver learns of it."""
        threading.Event().wait()

    def call(self, method: str, *args: Any) -> Any:
        """Run one method of the worker."""
        with _traceback_in_log():
            return getattr(self._worker, method)(*args)


def start_line(name: str) -> str:
    """How the first line of a worker's process in its log begins."""
    return f"[{name}]"


def _place(env: Mapping[str, str]) -> str:
    """Where the process was placed, for its log: `` on node 2 (train), devices 0,1``."""
    if "CLUSTER_NODE_RANK" not in env:
        return ""
    what = f", {env['RLJOB_HARDWARE_TYPE']} {env['LOCAL_HARDWARE_RANKS']}" if env["RLJOB_HARDWARE_TYPE"] else ""
    return f" on node {env['CLUSTER_NODE_RANK']} ({env['RLJOB_NODE_GROUP']}){what}"


@contextlib.contextmanager
def _traceback_in_log() -> Iterator[None]:
    """Leave the traceback of an error in the log, for it does not travel to the driver."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
        raise


def _join_pod(name: str, log_file: str) -> None:
    """Copy the log to the pod's output and register this process for the stop hook; neither is worth failing for."""
    output = PodOutput(POD_OUTPUT, f"[{name}] ")
    try:
        pid_file.write(pid_file.worker_file(pid_file.STATE_FOLDER, name))
        if output.is_open:
            Follower(Path(log_file), output)
    except OSError as error:
        sys.stderr.write(f"[{name}] is not shown by kubectl logs, or not awaited when its pod stops: {error}\n")


def pod_visible_devices(environment: Mapping[str, str]) -> str | None:
    """The CUDA_VISIBLE_DEVICES that the node itself was given, read in a worker's process; None when it was given all."""
    own = environment.get("CUDA_VISIBLE_DEVICES") if environment.get(KEEP_VISIBLE_DEVICES) == "1" else None
    return environment.get(POD_VISIBLE_DEVICES) or own or None


def visible_devices(local_devices: tuple[int, ...], pod_visible: str | None) -> str:
    """CUDA_VISIBLE_DEVICES for planned device indexes, translated through what the pod itself was given; empty for none.

    ``pod_visible`` is the pod's own CUDA_VISIBLE_DEVICES (None: all): index i means its i-th entry.

    Raises:
        ValueError: an index beyond the pod's devices.
    """
    if pod_visible is None:
        return ",".join(str(i) for i in local_devices)
    ids = [entry.strip() for entry in pod_visible.split(",") if entry.strip()]
    beyond = [i for i in local_devices if i >= len(ids)]
    if beyond:
        raise ValueError(f"planned devices {beyond} do not exist: CUDA_VISIBLE_DEVICES={pod_visible!r} names {len(ids)}")
    return ",".join(ids[i] for i in local_devices)


def _own_address() -> str:
    """The address other nodes reach this one by: the source address of the default route, loopback without a network."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # documentation range: nothing is sent by a datagram connect
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def _redirect_output(log_file: str) -> None:
    """Send file descriptors 1 and 2 to the log; libraries written in C follow, too."""
    Path(log_file).parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=sys.stderr)
