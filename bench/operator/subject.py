"""The measured process: ``python -m rljob_operator``, its memory, processor time and own counters."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import psutil

from bench.measure import free_port

READY_S = 180.0
STOP_S = 30.0
_SAMPLE = re.compile(r"^(?P<name>[a-z_]+)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)$", re.MULTILINE)


class Subject:
    """Started and stopped by the measurement."""

    def __init__(self, kubeconfig: Path, log_file: Path, server: Sequence[int]) -> None:
        """``server``: pids of the API server and etcd."""
        self._log_file = log_file
        self._server = [psutil.Process(pid) for pid in server]
        self._ports = free_port(), free_port()
        self._env = {k: v for k, v in os.environ.items() if not k.startswith("KUBE")} | {
            "KUBECONFIG": str(kubeconfig),
            "RLJOB_OPERATOR_RUNTIME_IMAGE": "example.com/rljob-runtime:bench",
            "RLJOB_OPERATOR_RUNTIME_RAY_VERSION": "2.60.0",
            "RLJOB_OPERATOR_HEALTH_PORT": str(self._ports[0]),
            "RLJOB_OPERATOR_METRICS_PORT": str(self._ports[1]),
        }

    def start(self) -> float:
        """Start; returns the seconds until it is healthy."""
        began_s = time.monotonic()
        with self._log_file.open("ab") as log:
            self._process = psutil.Popen([sys.executable, "-m", "rljob_operator"], env=self._env, stdout=log, stderr=subprocess.STDOUT)
        while not self._healthy():
            if self._process.poll() is not None or time.monotonic() - began_s > READY_S:
                raise RuntimeError(f"the operator did not become healthy within {READY_S:.0f} s; its log: {self._log_file}")
            time.sleep(0.05)
        return time.monotonic() - began_s

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(STOP_S)

    @property
    def pid(self) -> int:
        """Of the running process."""
        return int(self._process.pid)

    def rss_bytes(self) -> int:
        return int(self._process.memory_info().rss)

    def cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)

    def server_cpu_s(self) -> float:
        """Processor time of the API server and etcd, whose pids are given."""
        times = [process.cpu_times() for process in self._server]
        return float(sum(each.user + each.system for each in times))

    def labels(self, metric: str, label: str) -> list[str]:
        """Values of a label of a metric."""
        return sorted({m[1] for s in self._samples(metric) if (m := re.search(rf'{label}="([^"]*)"', s["labels"] or ""))})

    def total(self, metric: str, **labels: str) -> float:
        """Sum of a metric's samples whose labels include these.

        Raises:
            KeyError: the operator serves no such metric.
        """
        samples = self._samples(metric)
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(float(m["value"]) for m in samples if all(w in (m["labels"] or "") for w in wanted))

    def _samples(self, metric: str) -> list[re.Match[str]]:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._ports[1]}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        samples = [m for m in _SAMPLE.finditer(text) if m["name"] == metric]
        if not samples:
            raise KeyError(f"the operator serves no metric {metric}; docs/reference/operator-metrics.md lists what it serves")
        return samples

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._ports[0]}/healthz", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False
