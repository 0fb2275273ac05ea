"""The process that hosts one worker: environment first, log file second, heavy imports last."""

from __future__ import annotations

import faulthandler
import importlib
import os
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class WorkerHost:
    """Builds the worker inside its process and forwards calls to it."""

    def __init__(self, name: str, factory: str, kwargs: Mapping[str, Any], env: Mapping[str, str], log_file: str) -> None:
        """Prepare the process, then construct ``module:Class`` with ``kwargs``.

        Everything the worker or its libraries print goes to ``log_file``, so that it survives the process.
        """
        os.environ.update(env)
        _redirect_output(log_file)
        sys.stderr.write(f"[{name}] pid {os.getpid()} starts {factory}\n")
        module_name, _, class_name = factory.partition(":")
        self._worker = getattr(importlib.import_module(module_name), class_name)(**kwargs)

    def address(self) -> tuple[str, int]:
        """This node's address and a port that is free on it, for a process group; its answer means that the worker is constructed."""
        host = _own_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return host, int(probe.getsockname()[1])

    def watch(self) -> None:
        """Never returns: the call fails at the moment the process ends, which is how the driver learns of it."""
        threading.Event().wait()

    def call(self, method: str, *args: Any) -> Any:
        """Run one method of the worker."""
        return getattr(self._worker, method)(*args)


def visible_devices(local_devices: tuple[int, ...], pod_visible: str | None) -> str:
    """CUDA_VISIBLE_DEVICES for planned device indexes, translated through what the pod itself was given.

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
