"""Layer: a job in pods of a real cluster (:mod:`e2e.cluster`), with the built images, the installed chart, KubeRay, and one volume.

::

    tools/e2e --boot -> chart installed -> job of three pods (head, trainer, engine) that trains
        for every fault: pods, processes in them, their network, or a program of the cluster -> trains on -> the operator still answers
    fewer training.steps, head evicted -> Succeeded -> every step once, no pod left

Needs root, as the cluster does.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench.chaos import pods
from bench.chaos.observer import Observer
from bench.chaos.outcome import RECOVERED, WRONG, Outcome
from bench.operator.api import Api
from e2e.cluster import cleanup, exports
from e2e.cluster.paths import REPOSITORY, state_folder
from e2e.cluster.state import StateFolder
from e2e.environment import needed
from e2e.installation import NAMESPACE, SYSTEM, Helm, installation_values, installed
from e2e.jobs import Manifest, two_groups
from e2e.kubectl import Kubectl
from e2e.objects import KubectlError
from e2e.volumes import Volume, shared_volume
from rljob_runtime.cluster.host import START_WORD

LAYER = "real cluster"
CLUSTER = "cluster"
"""Name of the cluster that ``tools/e2e --boot`` starts."""
HEAD, TRAIN, INFER = "headgroup", "train", "infer"
PODS = {"head pod": HEAD, "trainer's pod": TRAIN, "engine's pod": INFER}
ENDLESS_STEPS = 1_000_000
STEPS_AFTER = 2
"""Steps trained after a fault until it counts as recovered: what the first one needs may be there before."""
LAST_STEPS = 20
FAULTS_OF_A_JOB = 12
BACKOFF_S = 1
MOST_RESTARTS = 90
CUT_S = 8.0
"""Shorter than Ray waits for a node that does not answer."""
RECOVERS_S = 400.0
"""Bound of one recovery: a node that Ray has to miss, a cluster that starts, an attempt, on a busy machine."""
STARTS_S = 600.0
PROBED_S = 900.0
"""Bound where nothing is reported: nodes of a head that is cut off end minutes later, and KubeRay's probe ends it after ten."""
Say = Callable[[int], None]


class _Wrong(Exception):
    """What is wrong after a fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One kind of fault."""

    do: Callable[[Scene], None]
    reasons: frozenset[str] = frozenset()
    """Those of ``status.lastFailure`` that name the true cause; empty: the attempt goes on."""
    limit_s: float = RECOVERS_S
    """Bound of its recovery."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """How far a job is."""

    attempt: int
    row: str
    """Last line of its metrics: with times of its own, also for a step that is trained again."""
    step: int


class Scene:
    """One job that trains until :meth:`end`."""

    def __init__(self, kubectl: Kubectl, volume: Volume, name: str, rng: random.Random) -> None:
        self.kubectl, self.name = kubectl, name
        self._volume, self._rng = volume, rng
        self.kubectl.apply(_manifest(name))

    # --- what faults do ---

    def pod(self, group: str) -> dict[str, Any]:
        """The pod of a node group in the present attempt."""
        return self.kubectl.pod_of(self.name, group, self.attempt)

    def pod_uid(self, group: str) -> str:
        """UID of the pod of a node group."""
        return str(self.pod(group)["metadata"]["uid"])

    def delete(self, kind: str, name: str, *options: str, namespace: str | None = None) -> None:
        """Delete an object and do not wait."""
        self.kubectl("delete", kind, name, "--wait=false", *options, namespace=namespace)

    def evict(self, group: str) -> None:
        """As ``kubectl drain`` does."""
        self.kubectl.evict(self.pod(group)["metadata"]["name"])

    def kill_worker(self, group: str, worker: str) -> None:
        """SIGKILL the process of a worker."""
        lines = [line for line in self._volume.read(f"{self.name}/logs/{worker}.log").splitlines() if f" {START_WORD} " in line]
        os.kill(pods.numbered(self.pod_uid(group), int(lines[-1].split("pid ")[1].split()[0])), 9)

    def kill_command(self, group: str, part: str) -> None:
        """SIGKILL the process of a pod with this in its command line."""
        os.kill(pods.with_command(self.pod_uid(group), part), 9)

    def kill_all(self, group: str) -> None:
        """SIGKILL every process of a pod's containers, as the kernel does when a node has no memory left."""
        for pid in pods.processes(self.pod_uid(group)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, 9)

    def cut_for(self, group: str, seconds: float) -> None:
        """The pod's packets are lost for a while."""
        pid = pods.cut(self.pod_uid(group))
        try:
            time.sleep(seconds)
        finally:
            pods.reconnect(pid)

    # --- what is seen ---

    @property
    def status(self) -> dict[str, Any]:
        """Status of the RLJob."""
        status: dict[str, Any] = self.kubectl.get("rljob", self.name).get("status", {})
        return status

    @property
    def attempt(self) -> int:
        """Number of the present attempt."""
        return int(self.status.get("attempt", 0))

    def mark(self) -> Mark:
        """How far it is now; step 0 before the first."""
        try:
            last = self.kubectl("exec", Volume.POD, "--", "tail", "-n", "1", f"/volume/{NAMESPACE}/{self.name}/metrics.jsonl")
            step = int(json.loads(last)["step"])
        except (KubectlError, ValueError, KeyError):  # no file yet, or a line that is being written
            return Mark(attempt=self.attempt, row="", step=0)
        return Mark(attempt=self.attempt, row=last, step=step)

    def until_trained(self, after: Mark, steps: int, limit_s: float = RECOVERS_S) -> Mark:
        """Until so many steps are trained after a mark.

        Raises:
            KubectlError: not within the limit.
        """
        for _ in range(steps):
            self.kubectl.until("the next step", partial(self._is_beyond, after), limit_s, job=self.name)
            after = self.mark()
        return after

    def _is_beyond(self, mark: Mark) -> bool:
        return self.mark().row not in ("", mark.row)

    def until_next_attempt(self, after: Mark, limit_s: float = RECOVERS_S) -> None:
        """Until the operator has made another attempt than the one of a mark."""
        self.kubectl.until("another attempt", lambda: self.attempt > after.attempt, limit_s, job=self.name)

    def until_own_steps(self) -> None:
        """Until the present attempt has trained.

        Rows of metrics do not tell: the driver of a pod that is deleted by force trains until its processes end, and the next one removes
        the rows after its checkpoint. In the progress, the second step of an attempt is one that it has trained.
        """
        seen: set[int] = set()
        self.kubectl.until("steps of the next attempt", partial(self._sees_steps, seen), RECOVERS_S, job=self.name)

    def _sees_steps(self, seen: set[int]) -> bool:
        status = self.status
        progress = status.get("progress", {})
        if progress.get("attempt") == status["attempt"]:
            seen.add(int(progress["step"]))
        return len(seen) > 1

    def meet(self, kind: str) -> Outcome:
        """One fault, until the job trains on and the operator answers."""
        time.sleep(self._rng.random() * 2)
        fault, began_s = FAULTS[kind], time.monotonic()
        try:
            before = self.mark()
            fault.do(self)
            if fault.reasons:
                self.until_next_attempt(before, fault.limit_s)
                self.until_own_steps()
            else:
                self.until_trained(self.mark(), STEPS_AFTER)
            took_s = time.monotonic() - began_s
            if problem := wrong_status(fault, before, self.status):
                raise _Wrong(problem)
            self._check_operator()
        except (KubectlError, _Wrong, OSError, ValueError, pods.NotRunning, subprocess.SubprocessError) as error:
            return Outcome(layer=LAYER, kind=kind, result=WRONG, detail=f"{type(error).__name__}: {error}"[:12000])
        return Outcome(layer=LAYER, kind=kind, result=RECOVERED, recovery_s=took_s)

    def _check_operator(self) -> None:
        """It sees a change of the spec: a TTL that is longer by a second."""
        seconds = int(self.kubectl.get("rljob", self.name)["spec"].get("ttlSecondsAfterFinished", 3600)) + 1
        self.kubectl("patch", "rljob", self.name, "--type=merge", "-p", json.dumps({"spec": {"ttlSecondsAfterFinished": seconds}}))

        def seen() -> bool:
            job = self.kubectl.get("rljob", self.name)
            return bool(job["status"]["observedGeneration"] == job["metadata"]["generation"])

        self.kubectl.until("an answer of the operator", seen, RECOVERS_S, job=self.name)

    def end(self) -> str:
        """Let it finish. Returns what is wrong at the end; empty where nothing is."""
        try:
            steps = self.mark().step + LAST_STEPS
            self.kubectl("patch", "rljob", self.name, "--type=merge", "-p", json.dumps({"spec": {"training": {"steps": steps}}}))
            before = self.mark()
            self.evict(HEAD)
            self.until_next_attempt(before)
            self.kubectl.wait(self.name, "Succeeded", STARTS_S)
            rows = [json.loads(line) for line in self._volume.read(f"{self.name}/metrics.jsonl").splitlines()]
            self.kubectl.until("the end of its pods", lambda: not self.kubectl.children(self.name, "pods"), RECOVERS_S, job=self.name)
        except (KubectlError, _Wrong) as error:
            return str(error)
        if problem := wrong_rows(rows, steps):
            return problem
        self.kubectl("delete", "rljob", self.name)
        return ""


def wrong_status(fault: Fault, before: Mark, status: Mapping[str, Any]) -> str:
    """What the status of a job reports otherwise than it was; empty where nothing is."""
    failed = status.get("lastFailure", {})
    if not fault.reasons:
        return "" if status["attempt"] == before.attempt else f"attempt {before.attempt} should have gone on, and failed: {failed}"
    if status["attempt"] != before.attempt + 1:
        return f"attempt {before.attempt} was followed by attempt {status['attempt']}: {failed}"
    if failed.get("attempt") != before.attempt or failed.get("reason") not in fault.reasons:
        return f"the failure of attempt {before.attempt} is reported as {failed}, not as {' or '.join(sorted(fault.reasons))}"
    return ""


def wrong_rows(rows: Sequence[Mapping[str, Any]], steps: int) -> str:
    """What is missing or twice among the metrics of a job that ended with so many steps; empty where nothing is."""
    trained = [int(row["step"]) for row in rows]
    if trained != list(range(1, steps + 1)):
        odd = next((number for number, step in enumerate(trained, 1) if step != number), len(trained) + 1)
        return f"{len(trained)} rows for {steps} steps; where step {odd} belongs: {trained[odd - 1 : odd + 4]}"
    if sizes := {row["rollout/sequences"] for row in rows} - {rows[0]["rollout/sequences"]}:
        return f"steps of {rows[0]['rollout/sequences']} and of {sorted(sizes)} samples"
    return ""


def _manifest(name: str) -> Manifest:
    manifest = two_groups(name, steps=ENDLESS_STEPS)
    spec = manifest["spec"]
    spec["failurePolicy"] = {"maxRestarts": MOST_RESTARTS, "restartBackoffSeconds": BACKOFF_S, "maxWorkerRestarts": MOST_RESTARTS}
    spec["rollout"] = {**spec.get("rollout", {}), "maxEngineRestarts": MOST_RESTARTS}
    return manifest


def _stop(program: str, seconds: float) -> Callable[[Scene], None]:
    return lambda _: pods.stop_for(state_folder(CLUSTER), program, seconds)


def _operator_pod(scene: Scene) -> None:
    (pod,) = scene.kubectl.items("pods", "app.kubernetes.io/name=rljob-operator", namespace=SYSTEM)
    scene.delete("pod", pod["metadata"]["name"], "--grace-period=0", "--force", namespace=SYSTEM)


def _operator_pod_and_head(scene: Scene) -> None:
    _operator_pod(scene)
    scene.delete("pod", scene.pod(HEAD)["metadata"]["name"], "--grace-period=0", "--force")


def _by_force(group: str) -> Callable[[Scene], None]:
    return lambda scene: scene.delete("pod", scene.pod(group)["metadata"]["name"], "--grace-period=0", "--force")


def _child(kind: str) -> Callable[[Scene], None]:
    def delete(scene: Scene) -> None:
        attempt = str(scene.attempt)
        (name,) = [
            each["metadata"]["name"]
            for each in scene.kubectl.children(scene.name, kind)
            if each["metadata"]["labels"].get("rljob.dev/attempt") == attempt
        ]
        scene.delete(kind, name)

    return delete


def _evicted(group: str) -> Callable[[Scene], None]:
    return lambda scene: scene.evict(group)


def _cut_for(group: str, seconds: float) -> Callable[[Scene], None]:
    return lambda scene: scene.cut_for(group, seconds)


def _cut(group: str) -> Callable[[Scene], None]:
    def cut(scene: Scene) -> None:
        pods.cut(scene.pod_uid(group))

    return cut


def _killed(group: str, worker: str) -> Callable[[Scene], None]:
    return lambda scene: scene.kill_worker(group, worker)


def _command_killed(group: str, part: str) -> Callable[[Scene], None]:
    return lambda scene: scene.kill_command(group, part)


def _faults() -> dict[str, Fault]:
    lost = frozenset({"WorkerLost", "Evicted", "PodFailed"})
    head_lost = frozenset({"HeadLost", "Evicted", "DriverFailed"})
    found = {}
    for who, group in PODS.items():
        of_pod = head_lost if group == HEAD else lost
        found[f"{who} deleted by force"] = Fault(do=_by_force(group), reasons=of_pod)
        found[f"{who} evicted"] = Fault(do=_evicted(group), reasons=frozenset({"Evicted"}))
        found[f"{who} cut off for {CUT_S:.0f} s"] = Fault(do=_cut_for(group, CUT_S))
        found[f"{who} cut off permanently"] = Fault(do=_cut(group), reasons=of_pod, limit_s=PROBED_S if group == HEAD else RECOVERS_S)
    return found | {
        "driver killed in its pod": Fault(do=_command_killed(HEAD, "rljob_runtime.entry.kubernetes"), reasons=head_lost),
        "GCS killed in its pod": Fault(do=_command_killed(HEAD, "gcs_server"), reasons=head_lost),
        "trainer killed in its pod": Fault(do=_killed(TRAIN, "actor_train-0")),
        "engine killed in its pod": Fault(do=_killed(INFER, "actor_infer-0")),
        "reward worker killed in its pod": Fault(do=_killed(TRAIN, "reward-0")),
        "raylet killed in the trainer's pod": Fault(do=_command_killed(TRAIN, "raylet/raylet"), reasons=lost),
        "all processes of the engine's pod killed": Fault(do=lambda scene: scene.kill_all(INFER), reasons=lost),
        "RayJob deleted on the cluster": Fault(do=_child("rayjobs"), reasons=frozenset({"ChildDeleted"})),
        "RayCluster deleted": Fault(do=_child("rayclusters"), reasons=head_lost | lost),
        "operator's pod deleted by force": Fault(do=_operator_pod),
        "operator's pod and head pod deleted by force": Fault(do=_operator_pod_and_head, reasons=head_lost),
        "API server stopped for 10 s": Fault(do=_stop("kube-apiserver", 10.0)),
        "etcd stopped for 10 s": Fault(do=_stop("etcd", 10.0)),
        "controller manager stopped for 20 s": Fault(do=_stop("kube-controller-manager", 20.0)),
        "kubelet stopped for 20 s": Fault(do=_stop("kubelet", 20.0)),
        "KubeRay stopped for 15 s": Fault(do=_stop("ray-operator", 15.0)),
    }


FAULTS = _faults()
KINDS = tuple(FAULTS)
LONG_KINDS = tuple(kind for kind, fault in FAULTS.items() if fault.limit_s > RECOVERS_S)
"""Each takes a quarter of an hour: one a run, at its end."""


@contextlib.contextmanager
def _cluster() -> Iterator[Kubectl]:
    """The cluster that is there (``make cluster-up``, or one that ``tools/e2e`` left), or one that is stopped at the end."""
    folder = StateFolder(path=state_folder(CLUSTER))
    is_there = folder.file.exists()
    subprocess.run(["tools/e2e", "--boot"], cwd=REPOSITORY, check=True)
    try:
        os.environ |= exports.variables(folder)
        yield Kubectl(needed("RLJOB_E2E_KUBECTL"), folder.kubeconfig, NAMESPACE)
    finally:
        if not is_there:
            cleanup.down(folder)


async def run(seed: int, count: int, only: str | None, say: Say) -> list[Outcome]:
    """So many faults, several in each job."""
    rng, order = random.Random(seed), _order(seed, count, only)
    found: list[Outcome] = []
    with _cluster() as kubectl, installed(kubectl, Helm(kubectl), installation_values()), shared_volume(kubectl) as volume:
        async with Api(kubectl.kubeconfig) as api, Observer(api, NAMESPACE) as observer:
            for number, first in enumerate(range(0, count, FAULTS_OF_A_JOB)):
                part = order[first : first + FAULTS_OF_A_JOB]
                scene = await asyncio.to_thread(Scene, kubectl, volume, f"chaos-{number}", rng)
                found += await asyncio.to_thread(_live, scene, part, len(found), say)
        found += [Outcome(layer=LAYER, kind="promises at every moment", result=WRONG, detail=text) for text in observer.violations]
    return found


def _order(seed: int, count: int, only: str | None) -> list[str]:
    """Kinds of so many faults."""
    if only is not None:
        return [only] * count
    kinds = [kind for kind in KINDS if kind not in LONG_KINDS]
    random.Random(seed).shuffle(kinds)
    order = [kinds[number % len(kinds)] for number in range(count)]
    return order if count <= len(kinds) else [*order[: -len(LONG_KINDS)], *LONG_KINDS]


def _live(scene: Scene, kinds: list[str], before: int, say: Say) -> list[Outcome]:
    """One job from its start to its end."""
    outcomes: list[Outcome] = []
    try:
        scene.until_trained(scene.mark(), STEPS_AFTER, STARTS_S)
    except KubectlError as error:
        return [Outcome(layer=LAYER, kind="start of a job", result=WRONG, detail=str(error)[:12000])]
    for kind in kinds:
        outcomes.append(scene.meet(kind))
        print(f"{kind}: {outcomes[-1].result}, {outcomes[-1].recovery_s} s {outcomes[-1].detail}", file=sys.stderr, flush=True)
        say(before + len(outcomes))
        if outcomes[-1].result == WRONG:
            try:
                scene.until_trained(scene.mark(), STEPS_AFTER)
            except KubectlError:
                return outcomes
    if problem := scene.end():
        outcomes.append(Outcome(layer=LAYER, kind="end of a job", result=WRONG, detail=f"after {kinds}: {problem}"[:12000]))
    return outcomes
