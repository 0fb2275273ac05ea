"""All measures in their order, and what of them this kernel gave."""

from __future__ import annotations

import math
import os
import resource
import sys
from dataclasses import dataclass

from rljob_runtime.sandbox import kernel, landlock, seccomp

SYSTEM_PATHS = (
    "/usr", "/bin", "/lib", "/lib32", "/lib64", "/opt", "/etc/ld.so.cache", "/etc/localtime", "/etc/ssl", "/etc/passwd", "/etc/group",
    "/etc/nsswitch.conf", "/etc/alternatives", "/proc/cpuinfo", "/proc/meminfo", "/proc/stat", "/proc/sys/vm", "/proc/self",
    "/sys/devices/system", "/sys/fs/cgroup", "/dev/urandom", "/dev/random",
)  # fmt: skip
RUN_MARKER = ".rljob-run"
"""Empty file that marks a folder as a run's."""
NETWORK_PATHS = ("/etc/resolv.conf", "/etc/hosts", "/etc/host.conf", "/etc/gai.conf", "/etc/services", "/etc/ca-certificates")
DEVICES = ("/dev/null", "/dev/zero")
_RUN_DEPTH = 2
"""Folders between one of the job folder and a run: runs/<namespace>/<job>."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a process may still do."""

    read_paths: tuple[str, ...] = ()
    """To read besides the system's and Python's own folders."""
    job_folder: str | None = None
    """The job file's, to read as it is now and without the runs in it, of this job or others; their names can be listed."""
    write_paths: tuple[str, ...] = ()
    """To do anything in."""
    network: bool = False
    connect_port: int | None = None
    """Without ``network``: TCP connections to this port are allowed."""
    processes: bool = False
    """May start, and signal, processes of its own; they inherit all limits."""
    memory_bytes: int | None = None
    """Address space."""
    file_bytes: int = 1 << 30
    """Size of a file it writes."""
    open_files: int = 1024
    cpu_s: float | None = None
    """Processor time of the process over its life."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Active:
    """What is in force."""

    landlock_abi: int
    """0: the kernel has no Landlock, so that files are as the user's rights have them."""
    connect_port: int | None = None
    """The port that connections are meant to be limited to, which Landlock does from ABI 4 on."""

    def __str__(self) -> str:
        """One line for a log."""
        if self.landlock_abi == 0:
            tcp = "" if self.connect_port is None else ", and connect to every TCP port"
            files = "the process can read every file that its user can, service-account tokens too"
            return f"seccomp; NO Landlock in this kernel: {files}{tcp}"
        if self.connect_port is not None and self.landlock_abi < landlock.TCP_ABI:
            return f"seccomp, Landlock ABI {self.landlock_abi}, which cannot limit TCP to one port, as Linux 6.7 does"
        signals = "" if self.landlock_abi >= 6 else ", signals to other processes of this user not kept back (Linux 6.12 does)"
        return f"seccomp, Landlock ABI {self.landlock_abi}{signals}"


def confine(limits: Limits) -> Active:
    """Take from the calling thread, and all it starts, what ``limits`` does not leave; to be called before there are other threads.

    Raises:
        OSError: seccomp or Landlock refused; then no foreign code must run.
    """
    kernel.drop_capabilities()
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, limits.memory_bytes),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, limits.open_files),
        (resource.RLIMIT_CPU, None if limits.cpu_s is None else math.ceil(limits.cpu_s)),
    ):
        if value is not None:
            _, hard = resource.getrlimit(kind)
            bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (bound, bound))
    network = NETWORK_PATHS if limits.network else ()
    own = () if limits.job_folder is None else without_runs(limits.job_folder)
    version = landlock.restrict(
        read=(*SYSTEM_PATHS, *network, *python_paths(), *limits.read_paths, *own),
        list_names=() if limits.job_folder is None else (limits.job_folder,),
        write=(*DEVICES, *limits.write_paths),
        network=not limits.network,
        connect_port=limits.connect_port,
    )
    streams = limits.connect_port is not None
    seccomp.deny(network=not limits.network, processes=not limits.processes, streams=streams)
    return Active(landlock_abi=version, connect_port=None if limits.network else limits.connect_port)


def without_runs(folder: str) -> tuple[str, ...]:
    """Files and folders directly in ``folder`` in which no run lies; what appears in it later is not among them."""
    with os.scandir(folder) as entries:
        return tuple(entry.path for entry in entries if not entry.is_symlink() and not _has_run(entry.path, _RUN_DEPTH))


def _has_run(path: str, depth: int) -> bool:
    if not os.path.isdir(path):
        return False
    if os.path.lexists(os.path.join(path, RUN_MARKER)):
        return True
    try:
        with os.scandir(path) as entries:
            return depth > 0 and any(entry.is_dir(follow_symlinks=False) and _has_run(entry.path, depth - 1) for entry in entries)
    except (FileNotFoundError, PermissionError):
        return True  # it vanishes, or nobody can say what lies there


def python_paths() -> tuple[str, ...]:
    """Folders of the interpreter and of every importable package."""
    return tuple(path for path in (sys.prefix, sys.base_prefix, sys.exec_prefix, *sys.path) if path)
