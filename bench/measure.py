"""What all measurements share: child processes with a deadline, their memory, and a description of the machine."""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from bench.state import ROOT as ROOT
from bench.state import commit as commit

RESULTS = ROOT / "bench" / "results"
_SAMPLE_EVERY_S = 1.0
_KILL_WAIT_S = 20.0


class ChildFailedError(RuntimeError):
    """Raised when a measured process failed or ran past its deadline; names its log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChildUse:
    """What a process and all its descendants took."""

    wall_s: float
    peak_rss_bytes: int
    """Largest sum of resident memory at one moment; pages shared between processes count in each."""
    cpu_s: float
    """Processor time of the processes alive at the last sample, and of their finished children."""
    foreign_load: float
    """Mean one-minute load average minus the cores this child kept busy: what others ran meanwhile, roughly."""


def run_child(
    command: Sequence[str],
    *,
    log_file: Path,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    watch: Callable[[], None] | None = None,
) -> ChildUse:
    """Run ``command`` to its end, output into ``log_file``; ``watch`` is called once a second.

    Raises:
        ChildFailedError: it ended with an error, or did not end within ``timeout_s`` and was killed with its descendants.
    """
    started_s = time.monotonic()
    peak_bytes, cpu_s, loads = 0, 0.0, [os.getloadavg()[0]]
    with log_file.open("w") as log:
        child = psutil.Popen(list(command), stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **(env or {})})
        try:
            while child.poll() is None:
                if time.monotonic() - started_s > timeout_s:
                    raise ChildFailedError(f"{command[:4]} did not end within {timeout_s:.0f} s; its output: {log_file}")
                rss_bytes, used_s = _tree_use(child)
                peak_bytes, cpu_s = max(peak_bytes, rss_bytes), max(cpu_s, used_s)
                loads.append(os.getloadavg()[0])
                if watch is not None:
                    watch()
                _wait(child)
        finally:
            _kill_tree(child)
    wall_s = time.monotonic() - started_s
    if child.returncode != 0:
        tail = "\n".join(log_file.read_text(errors="replace").splitlines()[-15:])
        raise ChildFailedError(f"{command[:4]} ended with exit code {child.returncode}; the end of {log_file}:\n{tail}")
    foreign = max(0.0, statistics.fmean(loads) - cpu_s / wall_s)
    return ChildUse(wall_s=wall_s, peak_rss_bytes=peak_bytes, cpu_s=cpu_s, foreign_load=foreign)


def _wait(child: psutil.Popen) -> None:
    try:
        child.wait(timeout=_SAMPLE_EVERY_S)
    except (psutil.TimeoutExpired, subprocess.TimeoutExpired):
        return


def _tree_use(child: psutil.Popen) -> tuple[int, float]:
    """(resident bytes, processor seconds) of a process and its descendants now."""
    rss_bytes, cpu_s = 0, 0.0
    try:
        processes = [child, *child.children(recursive=True)]
    except psutil.NoSuchProcess:
        return 0, 0.0
    for process in processes:
        try:
            rss_bytes += process.memory_info().rss
            cpu_s += sum(process.cpu_times()[:4])
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # ended between listing and reading
    return rss_bytes, cpu_s


def _kill_tree(child: psutil.Popen) -> None:
    """End what is left of a process and its descendants."""
    if child.poll() is not None:
        return
    family = [*child.children(recursive=True), child]
    for process in family:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(family, timeout=_KILL_WAIT_S)


def machine(packages: Sequence[str]) -> dict[str, Any]:
    """Processor, memory and versions: what a reader needs to place the figures."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "versions": {p: metadata.version(p) for p in packages},
        "measured_at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": commit(),
    }


def machine_text(found: Mapping[str, Any]) -> str:
    """What :func:`machine` found, for a page."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    size = f"{found['cores']} cores, {found['memory_bytes'] / 2**30:.0f} GiB"
    return f"{found['processor']}, {size}; Python {found['python']}, {versions}"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def free_port() -> int:
    """A port of loopback that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def write_results(name: str, values: Mapping[str, Any], markdown: str) -> None:
    """Write ``results/<name>.json`` and ``results/<name>.md``."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(values, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text(markdown)
