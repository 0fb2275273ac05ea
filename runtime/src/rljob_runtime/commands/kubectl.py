"""Jobs of a cluster through the user's own kubectl, with its kubeconfig and context: the runtime has no Kubernetes client."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rljob_api.naming import ATTEMPT_LABEL, JOB_LABEL
from rljob_runtime.errors import SetupError

RESOURCE = "rljobs.rljob.dev"
TIMEOUT_S = 30.0
"""Deadline of a question; logs that are followed have none."""
Json = dict[str, Any]
_LOG_LINE = re.compile(r"[IWEF]\d{4} [\d:.]+ ")
_UNREACHABLE = "check the kubeconfig and its context (--context), or give the folder of a local run such as runs/quickstart"
_REMEDIES = (
    ("was refused", _UNREACHABLE),
    ("Unable to connect", _UNREACHABLE),
    ("no such host", _UNREACHABLE),
    ("doesn't have a resource type", "RLJob is not installed on this cluster: docs/install.md"),
    ("not found", "rljob top -A lists the jobs of all namespaces; for another namespace add --namespace"),
    ("Forbidden", "the chart's aggregated roles view and edit allow it (rbac.aggregateToView)"),
)
"""What kubectl's messages contain, and what to do then; the first that fits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kubectl:
    """Where to ask."""

    namespace: str | None = None
    """The context's own when None."""
    context: str | None = None
    """The kubeconfig's current one when None."""

    def jobs(self, *, everywhere: bool = False) -> list[Json]:
        """All RLJobs of the namespace, or of the cluster.

        Raises:
            SetupError: kubectl is missing, or says why not.
        """
        return list(self._get(RESOURCE, *(["--all-namespaces"] if everywhere else []))["items"])

    def job(self, name: str) -> Json:
        """One RLJob.

        Raises:
            SetupError: there is none, or kubectl says why not.
        """
        return self._get(RESOURCE, name)

    def pods(self, name: str, attempt: int) -> list[Json]:
        """Pods of an attempt, the head first.

        Raises:
            SetupError: kubectl says why not.
        """
        items = self._get("pods", "--selector", f"{JOB_LABEL}={name},{ATTEMPT_LABEL}={attempt}")["items"]
        return sorted(items, key=lambda pod: (not is_head(pod), pod["metadata"]["name"]))

    def command(self, *arguments: str) -> list[str]:
        """The whole command line.

        Raises:
            SetupError: there is no kubectl.
        """
        found = shutil.which("kubectl")
        if found is None:
            raise SetupError("kubectl is not on the PATH; install it, or give the folder of a local run")
        place = [*(["--context", self.context] if self.context else []), *(["--namespace", self.namespace] if self.namespace else [])]
        return [found, *place, *arguments]

    def _get(self, *arguments: str) -> Json:
        command = self.command("get", *arguments, "--output", "json")
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise SetupError(f"kubectl get {arguments[0]} did not answer within {TIMEOUT_S:.0f} s; is the API server reachable?") from error
        except OSError as error:
            raise SetupError(f"kubectl cannot be run: {error.strerror}") from error
        if done.returncode != 0:
            raise SetupError(f"kubectl get {' '.join(arguments)}: {reason(done.stderr) or f'exit code {done.returncode}'}")
        try:
            answer = json.loads(done.stdout)
        except ValueError as error:
            raise SetupError(f"kubectl get {arguments[0]} returned no JSON: {error}; is it the real kubectl ({command[0]})?") from error
        if not isinstance(answer, dict):
            raise SetupError(f"kubectl get {arguments[0]} returned a {type(answer).__name__}, not an object ({command[0]})")
        return answer


def reason(stderr: str) -> str:
    """What kubectl says, without the log lines of its client library before it, and with what to do about it."""
    lines = stderr.strip().splitlines()
    said = "\n".join([line for line in lines if not _LOG_LINE.match(line)] or lines[-1:])
    remedies = (remedy for mark, remedy in _REMEDIES if mark in said)
    return "; ".join([said, *list(remedies)[:1]])


def is_head(pod: Json) -> bool:
    """Whether the driver runs there."""
    return bool(pod["metadata"].get("labels", {}).get("ray.io/node-type") == "head")


def attempt_of(job: Json) -> int:
    """The current or last attempt.

    Raises:
        SetupError: none was made yet.
    """
    attempt = job.get("status", {}).get("attempt")
    if not attempt:
        raise SetupError(f"{job['metadata']['name']}: no attempt was made yet, so there are no pods; rljob describe says why")
    return int(attempt)


def follow(command: Sequence[str], prefix: str) -> int:
    """Run a command that prints logs; only the lines that begin with ``prefix``, without it. Returns its exit code."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(prefix):
                sys.stdout.write(line.removeprefix(prefix))
                sys.stdout.flush()
        return process.wait()
