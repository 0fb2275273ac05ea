"""A thin wrapper around the kubectl binary, and the waits that scenarios need; each has a timeout and reports the last state.

What users do goes through kubectl; what scenarios look at again and again, through :mod:`e2e.objects`.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import yaml

from e2e.objects import KubectlError, NotThereError, Objects

T = TypeVar("T")
POLL_S = 0.5
COMMAND_TIMEOUT_S = 180.0


class Kubectl:
    """kubectl with one kubeconfig and one default namespace."""

    def __init__(self, binary: str, kubeconfig: Path, namespace: str) -> None:
        self.binary = binary
        self.kubeconfig = kubeconfig
        self.namespace = namespace
        self._objects = Objects(kubeconfig)

    def command(self, *args: str, namespace: str | None = None) -> list[str]:
        return [self.binary, f"--kubeconfig={self.kubeconfig}", f"--namespace={namespace or self.namespace}", *args]

    def __call__(self, *args: str, input: str | None = None, namespace: str | None = None, timeout_s: float = COMMAND_TIMEOUT_S) -> str:
        done = subprocess.run(
            self.command(*args, namespace=namespace), input=input, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        if done.returncode != 0:
            raise KubectlError(f"kubectl {' '.join(args)} exited with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def apply(self, *manifests: Mapping[str, Any], namespace: str | None = None) -> None:
        self("apply", "-f", "-", input=yaml.safe_dump_all(manifests), namespace=namespace)

    def accepts(self, manifest: Mapping[str, Any]) -> bool:
        """Whether the server, with its webhooks, would take an object."""
        try:
            self("apply", "--dry-run=server", "-f", "-", input=yaml.safe_dump(manifest))
        except KubectlError:
            return False
        return True

    def get(self, kind: str, name: str, namespace: str | None = None) -> dict[str, Any]:
        return self._objects.get(kind, name, namespace or self.namespace)

    def exists(self, kind: str, name: str) -> bool:
        try:
            self.get(kind, name)
        except NotThereError:
            return False
        return True

    def items(self, kind: str, selector: str = "", namespace: str | None = None) -> list[dict[str, Any]]:
        return self._objects.items(kind, selector, namespace or self.namespace)

    def children(self, job: str, kind: str) -> list[dict[str, Any]]:
        """Objects of a kind that carry the job's label."""
        return self.items(kind, selector=f"rljob.dev/job={job}")

    def pod_of(self, job: str, group: str, attempt: int) -> dict[str, Any]:
        """The pod of a node group with one node in an attempt, unless it is being deleted."""
        labels = f"rljob.dev/job={job},ray.io/group={group},rljob.dev/attempt={attempt}"
        found = [pod for pod in self.items("pods", selector=labels) if "deletionTimestamp" not in pod["metadata"]]
        if len(found) != 1:
            raise KubectlError(f"{len(found)} pods of group {group} in attempt {attempt} of {job}, not 1")
        return found[0]

    def evict(self, pod: str) -> None:
        """As ``kubectl drain`` does."""
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": pod, "namespace": self.namespace}}
        self("create", "--raw", f"/api/v1/namespaces/{self.namespace}/pods/{pod}/eviction", "-f", "-", input=json.dumps(eviction))

    def condition(self, job: str, kind: str) -> dict[str, Any]:
        """One condition of an RLJob; empty until the operator has written it."""
        status = self.get("rljob", job).get("status", {})
        return next((c for c in status.get("conditions", []) if c["type"] == kind), {})

    def step(self, job: str) -> int:
        """Number of training steps that the job reports."""
        return int(self.get("rljob", job).get("status", {}).get("progress", {}).get("step", 0))

    def wait(self, job: str, condition: str, timeout_s: float, status: str = "True") -> None:
        """``kubectl wait``, as users call it; on a timeout the error has the diagnostics of the job."""
        try:
            self("wait", f"--for=condition={condition}={status}", f"rljob/{job}", f"--timeout={timeout_s:.0f}s", timeout_s=timeout_s + 30)
        except KubectlError as error:
            raise KubectlError(f"{error}\n{self.diagnostics(job)}") from None

    def until(self, what: str, probe: Callable[[], T], timeout_s: float, job: str | None = None) -> T:
        """Poll until the answer is true."""
        deadline = time.monotonic() + timeout_s
        while not (answer := probe()):
            if time.monotonic() > deadline:
                raise KubectlError(
                    f"{what}: not within {timeout_s:.0f} s; last answer: {answer!r}" + (f"\n{self.diagnostics(job)}" if job else "")
                )
            time.sleep(POLL_S)
        return answer

    def diagnostics(self, job: str) -> str:
        """Everything one would look at when a job misbehaves: status, children, events, logs."""
        parts = [
            self("get", "rljob", job, "-o", "yaml", "--ignore-not-found"),
            self("get", "rayjobs,rayclusters,pods", f"--selector=rljob.dev/job={job}", "-o", "wide"),
            self("get", "events", "--sort-by=.lastTimestamp")[-6000:],
        ]
        for pod in self.children(job, "pods"):
            name = pod["metadata"]["name"]
            log = subprocess.run(self.command("logs", name, "--tail=60", "--all-containers"), capture_output=True, text=True, check=False)
            parts.append(f"--- logs of {name}\n{log.stdout}{log.stderr}")
        return "\n".join(parts)

    @contextmanager
    def watching(self, *args: str) -> Iterator[Callable[[], str]]:
        """Run ``kubectl get -w`` in the background; yields a function that returns its output so far."""
        log = Path(f"{self.kubeconfig}.watch-{time.monotonic_ns()}")
        with log.open("w") as out:
            process = subprocess.Popen(self.command("get", *args, "-w"), stdout=out, stderr=subprocess.STDOUT, text=True)
            try:
                yield log.read_text
            finally:
                process.terminate()
                process.wait(timeout=10)
        log.unlink()
