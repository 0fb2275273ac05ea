"""``python -m rljob_operator`` as users run it, against one API server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.support.pace import HANG_S
from tests.support.ports import free_port


class OperatorProcess:
    """Start, kill, start again; its log is one file over all starts."""

    def __init__(
        self, kubeconfig: Path, log_file: Path, namespaces: str, lease: str = "", webhook: str = "", module: str = "rljob_operator"
    ) -> None:
        """``module`` is what Python runs."""
        self._module = module
        self.log_file = log_file
        self.health_port = free_port()
        self.metrics_port = free_port()
        self.webhook_port = free_port()
        self._process: subprocess.Popen[bytes] | None = None
        self._env = {k: v for k, v in os.environ.items() if not k.startswith("KUBE")} | {
            "KUBECONFIG": str(kubeconfig),
            "RLJOB_OPERATOR_RUNTIME_IMAGE": "example.com/rljob-runtime:test",
            "RLJOB_OPERATOR_RUNTIME_RAY_VERSION": "2.60.0",
            "RLJOB_OPERATOR_NAMESPACES": namespaces,
            "RLJOB_OPERATOR_LEASE": lease,
            "RLJOB_OPERATOR_WEBHOOK": webhook,
            "RLJOB_OPERATOR_WEBHOOK_PORT": str(self.webhook_port),
            "RLJOB_OPERATOR_HEALTH_PORT": str(self.health_port),
            "RLJOB_OPERATOR_METRICS_PORT": str(self.metrics_port),
        }

    def start(self) -> None:
        assert self._process is None
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen([sys.executable, "-m", self._module], env=self._env, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + HANG_S
        while not self._healthy():
            assert self._process.poll() is None, f"the operator ended: {self.log_file.read_text()[-3000:]}"
            assert time.monotonic() < deadline, f"the operator was not healthy within {HANG_S:.0f} s: {self.log_file.read_text()[-3000:]}"
            time.sleep(0.1)

    def kill(self) -> None:
        """As a lost node would."""
        self._end(signal.SIGKILL)

    def stop(self) -> int:
        """As the kubelet does; returns the exit code."""
        return self._end(signal.SIGTERM)

    def metrics(self) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=HANG_S) as answer:
            return answer.read().decode()

    def exit_code(self) -> int | None:
        """None while it runs."""
        return None if self._process is None else self._process.poll()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def _end(self, number: int) -> int:
        if self._process is None:
            return 0
        process, self._process = self._process, None
        process.send_signal(number)
        try:
            return process.wait(HANG_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(HANG_S)
            raise AssertionError(f"the operator did not end within {HANG_S:.0f} s: {self.log_file.read_text()[-3000:]}") from None

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.health_port}/healthz", timeout=2) as answer:
                return answer.status == 200
        except (urllib.error.URLError, OSError):
            return False
