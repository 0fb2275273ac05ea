"""The process that hosts one worker: environment first, log file second, heavy imports last.

In a pod its log lines are also copied to the pod's own output, and a pid file lets the pod's stop hook wait for it.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import inspect
import os
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rljob_api import collector
from rljob_api.naming import ENV_NODE_RANK
from rljob_runtime.addresses import own_address
from rljob_runtime.cluster import pid_file
from rljob_runtime.cluster.pod_log import POD_OUTPUT, Follower, PodOutput
from rljob_runtime.cluster.ports import held_port
from rljob_runtime.errors import SetupError
from rljob_runtime.openmp import set_short_spin

POD_VISIBLE_DEVICES = "RLJOB_POD_VISIBLE_DEVICES"
"""Environment of a node: the CUDA_VISIBLE_DEVICES it was given itself."""
KEEP_VISIBLE_DEVICES = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
"""Environment of a node: Ray leaves CUDA_VISIBLE_DEVICES of its workers alone."""
START_WORD = "starts"
"""Word in the line that begins a process's part of its log; earlier attempts may have written parts before it."""
WAITS_WORDS = "waits to take the place of a lost worker"
"""In the line that ends the part of a standby process's log before it is used."""
PREPARED_WORDS = "has imported what it needs and waits for its turn on the devices"
"""In the line of a worker's log between what it did ahead and its construction."""
EARLY_WORDS = "has initialized CUDA while it was imported, and holds memory of its devices before its turn"
"""In a line before that one, where it is so."""
M_MMAP_THRESHOLD = -3
"""Of ``malloc.h``."""
LARGE_BLOCK_BYTES = 128 * 1024
YOUNG_OBJECTS = 5_000
YOUNG_COLLECTIONS = 2
"""Before a collection also looks at what earlier ones left: at 15,000 objects, some 5 ms."""
SELDOM = 5_000
"""For a step that never ends: 75 million more objects than are freed."""
FEW_SAMPLES = 5_000
"""Some 30,000 objects, which take 10 ms to look at."""
SWITCH_S = 5e-4
DRAIN_POLL_S = 0.5
CUDA_ERROR_NOT_INITIALIZED = 3
"""Of the CUDA driver API."""
_settled = threading.Event()
"""Set by :func:`settle_process`. ``gc.get_freeze_count`` would answer the same, but counts: it walks through all that is frozen."""


class WorkerHost:
    """Builds the worker inside its process and forwards calls to it."""

    def __init__(self, name: str, factory: str, kwargs: Mapping[str, Any], env: Mapping[str, str], log_file: str) -> None:
        """Prepare the process; :meth:`build` constructs ``module:Class`` with ``kwargs``.

        Everything the worker or its libraries print goes to ``log_file``, so that it survives the process.
        """
        self._in_pod = ENV_NODE_RANK in os.environ
        self._worker: Any = None
        self._enter(name, factory, kwargs, env, log_file)

    def _enter(self, name: str, factory: str, kwargs: Mapping[str, Any], env: Mapping[str, str], log_file: str) -> None:
        """Be the process of that worker from now on; a standby process enters twice, the second time as the worker that it becomes."""
        os.environ.update(env)
        set_short_spin()
        _redirect_output(log_file)
        if self._in_pod:
            _join_pod(name, log_file)
        sys.stderr.write(f"{start_line(name)} pid {os.getpid()} {START_WORD} {factory}{_place(env)}\n")
        self._name = name
        self._factory = factory
        self._kwargs = kwargs

    def prepare(self) -> None:
        """Do for the worker what needs none of its devices before they are its turn; :meth:`build` follows."""
        self._prepare()
        if _holds_device():
            sys.stderr.write(f"{start_line(self._name)} {EARLY_WORDS}\n")
        sys.stderr.write(f"{start_line(self._name)} {PREPARED_WORDS}\n")

    def stand_by(self) -> None:
        """The same for a process that may wait as long as the run. What is there then is left alone by later garbage collections.

        Raises:
            SetupError: it has initialized CUDA, and would keep memory of a device while it waits.
        """
        self._prepare()
        if _holds_device():
            raise SetupError("imports have initialized CUDA in a process that only waits; write rollout.standbyProcesses: Never")
        settle_process()
        sys.stderr.write(f"{start_line(self._name)} {WAITS_WORDS}\n")

    def _prepare(self) -> None:
        """Import the worker's class and call its class method ``prepare``, where it has one, with what :meth:`build` takes."""
        with _traceback_in_log():
            prepare = getattr(self._class(), "prepare", None)
            if inspect.ismethod(prepare):  # of an instance it is something else
                prepare(**self._kwargs)

    def build(self) -> None:
        """Construct the worker; a call of its own, so that its error arrives as it is and not as the death of the process."""
        with _traceback_in_log():
            self._worker = self._class()(**self._kwargs)

    def _class(self) -> Any:
        module_name, _, class_name = self._factory.partition(":")
        with imports():
            return getattr(importlib.import_module(module_name), class_name)

    def address(self) -> tuple[str, int]:
        """This node's address and a port of it that this process holds, for a process group.

        Raises:
            ClusterError: no free port was found.
        """
        host = own_address()
        return host, held_port(host)

    def settle(self) -> None:
        """The worker is set up; see :func:`settle_process`."""
        settle_process()

    def watch(self) -> None:
        """Never returns: the call fails at the moment the process ends, which is how the driver learns of it."""
        threading.Event().wait()

    def drained(self) -> None:
        """Returns when the pod of this process is asked to end; outside of pods never."""
        while not (self._in_pod and pid_file.stopping_file(pid_file.STATE_FOLDER).exists()):
            threading.Event().wait(DRAIN_POLL_S if self._in_pod else None)

    def call(self, method: str, *args: Any) -> Any:
        """Run one method of the worker."""
        with _traceback_in_log():
            return getattr(self._worker, method)(*args)


@contextlib.contextmanager
def imports() -> Iterator[None]:
    """Around imports of torch, transformers or vLLM: a fifth to a quarter less to compute.

    They make a million objects that stay, and the collector would walk through them again and again. What is there afterwards is left
    alone until :func:`settle_process`, too.
    """
    with collector.paused():
        yield
        gc.freeze()


def settle_process() -> None:
    """What this process holds now lasts as long as it: later garbage collections look at nothing of it.

    A collection of everything that torch, transformers and vLLM made takes 30 to 140 ms, and came in the middle of a training step.
    """
    gc.collect()
    gc.freeze()
    _settled.set()


def settle_driver() -> None:
    """:func:`settle_process` for the driver, through whose hands a step's samples go, beside threads that make batches of them.

    - Young objects are looked at in larger portions, which costs a third, and others in :func:`collect_settled`, not half-way through a
      step with all its samples: 16,384 of them are 100,000 objects, which take 40 ms.
    - A thread that computes in Python gives the interpreter's lock to the event loop after 0.5 ms, not after 5: the loop asks for it
      several times a pass, for each call of Ray's lets go of it.
    - Memory of more than 128 KiB goes back to the system when it is freed. glibc raises this limit by itself, up to 32 MiB, as soon as such
      a block is freed, and keeps what lies below: half as much again as a step uses (mallopt(3); musl has no such call and no need of it).
    """
    settle_process()
    gc.set_threshold(YOUNG_OBJECTS, YOUNG_COLLECTIONS, SELDOM)
    sys.setswitchinterval(SWITCH_S)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)


def collect_settled(samples_held: int) -> None:
    """Look for cycles among what came after :func:`settle_process`, for 10 ms or so at most; nothing in a process that is not settled.

    Among all of it where that is little, as between two steps of a synchronous run. Where many samples are held, in flight or finished
    ahead, the old ones are left to the interpreter's own rare collection (``SELDOM``): the data path makes no cycles. Objects are not
    counted here: ``gc.get_objects`` refers to tuples that other threads are still making, which fails there with a SystemError.
    """
    if not _settled.is_set():
        return
    gc.collect(2 if samples_held < FEW_SAMPLES else 1)


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


def _holds_device() -> bool:
    """Whether torch has initialized CUDA in this process, which takes memory of a device; another library may have without it."""
    torch = sys.modules.get("torch")
    return torch is not None and bool(torch.cuda.is_initialized())


def cuda_is_initialized() -> bool:
    """Whether this process has initialized the CUDA driver: from then on it sees the devices that it saw then."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != CUDA_ERROR_NOT_INITIALIZED)


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
