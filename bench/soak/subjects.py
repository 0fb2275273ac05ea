"""What is watched: a real job that never ends, and the operator with jobs that come and go."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from bench.operator.api import RAYJOBS, RLJOBS, Api
from bench.operator.scenarios import RUNNING, SUCCEEDED, job_manifest
from bench.operator.subject import Subject
from e2e.cluster.api_server import temporary_api_server
from rljob_runtime.cluster.host import START_WORD
from tests.integration.jobs import Running, job, untrained_model

RAY = {"gcs_server": "Ray's GCS", "raylet": "Ray's raylet"}
"""Ray's own processes by their names; its agents are "Ray's agents"."""
DATA_ROWS = 256
"""Distinct prompts: what the driver keeps of a data set is there after the first minutes."""
WORKERS = {"trainer": "actor_train-0", "engine": "actor_infer-0", "reward worker": "reward-0"}
KEPT_JOBS = 20
"""RLJobs that are over and not deleted yet: the operator's cache holds these."""
STEP_S = 30.0
"""Bound of the API server's and the operator's part of one job's step."""
PACED_REWARD = '''
"""A reward that waits, so that a step costs little of the machine."""
import time


def score(prompt, response, answer, metadata):
    time.sleep({pause_s})
    return sum(c.isdigit() for c in response) / 8
'''


@dataclass(slots=True, kw_only=True)
class Watched:
    """Processes by name, and how far the work has come."""

    groups: dict[str, list[int]] = field(default_factory=dict)
    """Name -> process ids whose memory is added up."""
    done: int = 0
    """Steps or jobs finished."""
    problem: str = ""
    """Why it cannot go on."""


def _family(pid: int) -> list[int]:
    try:
        process = psutil.Process(pid)
        return [pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []


def _ray_name(pid: int) -> str:
    try:
        return RAY.get(psutil.Process(pid).name(), "Ray's agents")
    except psutil.NoSuchProcess:
        return "Ray's agents"


class SoakedJob:
    """``rljob run`` of small steps with checkpoints, validation and records, until it is stopped."""

    unit = "steps"

    def __init__(self, folder: Path, pause_s: float) -> None:
        manifest = job(untrained_model(folder / "model"), steps=1_000_000)
        spec = manifest["spec"]
        spec["data"]["train"][0]["reasoningGym"]["size"] = DATA_ROWS
        spec["data"]["validation"] = [spec["data"]["train"][0] | {"name": "held-out"}]
        spec["validation"] = {"everySteps": 100, "maxPrompts": 16}
        spec["checkpoint"] = {"everySteps": 20, "keep": 2}
        spec["report"] = {"trajectoriesEverySteps": 20, "trajectoriesPerStep": 2}
        spec["overlap"] = {"asyncGenerationRatio": 1}
        spec["rewards"][0]["function"] = "paced_reward:score"
        (folder / "job").mkdir()
        (folder / "job" / "paced_reward.py").write_text(PACED_REWARD.format(pause_s=pause_s))
        self._run = Running(folder / "job", manifest)

    def look(self) -> Watched:
        """Processes that work now."""
        if self._run.process.poll() is not None:
            return Watched(problem=f"the job ended with exit code {self._run.process.returncode}:\n{self._run.output[-3000:]}")
        rows = self._run.metrics()
        groups = {"driver": [self._run.process.pid]}
        for name, worker in WORKERS.items():
            starts = [line for line in self._run.log(worker).splitlines() if f" {START_WORD} " in line]
            if starts:
                groups[name] = _family(int(starts[-1].split("pid ")[1].split()[0]))
        known = {pid for pids in groups.values() for pid in pids}
        for pid in _family(self._run.process.pid):
            if pid not in known:
                groups.setdefault(_ray_name(pid), []).append(pid)
        return Watched(groups=groups if rows else {}, done=int(rows[-1]["step"]) if rows else 0)

    def stop(self) -> None:
        if self._run.process.poll() is None:
            self._run.interrupt()
            self._run.wait(STEP_S * 4)


class SoakedOperator:
    """The operator on a real API server; jobs begin, run, succeed and are deleted, KubeRay's part played here."""

    unit = "jobs"

    def __init__(self, kubeconfig: Path, folder: Path, every_s: float) -> None:
        self._subject = Subject(kubeconfig, folder / "operator.log", server=())
        self._subject.start()
        self._watched = Watched()
        self._over = threading.Event()
        self._thread = threading.Thread(target=partial(asyncio.run, self._jobs(kubeconfig, every_s)))
        self._thread.start()

    def look(self) -> Watched:
        return Watched(groups={"operator": [self._subject.pid]}, done=self._watched.done, problem=self._watched.problem)

    def stop(self) -> None:
        self._over.set()
        self._thread.join(STEP_S * 4)
        self._subject.stop()

    async def _jobs(self, kubeconfig: Path, every_s: float) -> None:
        try:
            async with Api(kubeconfig) as api:
                await api.namespace("soak")
                while not self._over.is_set():
                    began_s = time.monotonic()
                    await self._life(api, self._watched.done)
                    self._watched.done += 1
                    await asyncio.sleep(max(0.0, every_s - (time.monotonic() - began_s)))
        except Exception as error:  # noqa: BLE001 - the sampling thread tells it and ends the measurement
            self._watched.problem = f"job {self._watched.done}: {type(error).__name__}: {error}"

    async def _life(self, api: Api, number: int) -> None:
        jobs, rayjobs = RLJOBS.format(namespace="soak"), RAYJOBS.format(namespace="soak")
        name = f"soak-{number}"
        await api.create(jobs, job_manifest(name))
        await _until(api, f"{rayjobs}/{name}-a1", lambda found: found["kind"] == "RayJob")
        for status, reason in ((RUNNING, "Running"), (SUCCEEDED, "Completed")):
            await api.patch_status(f"{rayjobs}/{name}-a1", status)
            await _until(api, f"{jobs}/{name}", lambda found, reason=reason: reason in _reasons(found))
        if number >= KEPT_JOBS:
            await api.call("DELETE", f"{jobs}/soak-{number - KEPT_JOBS}")


def _reasons(found: dict[str, Any]) -> list[str]:
    return [condition["reason"] for condition in found.get("status", {}).get("conditions", [])]


async def _until(api: Api, path: str, true: Any) -> None:
    deadline_s = time.monotonic() + STEP_S
    while not true((await api.answer("GET", path))[1]):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"{path} was not as expected within {STEP_S:.0f} s")
        await asyncio.sleep(0.2)


@contextmanager
def subject(part: str, folder: Path, pause_s: float, every_s: float) -> Iterator[SoakedJob | SoakedOperator]:
    """Start one part; it is stopped at the end of the block."""
    folder.mkdir()
    if part == "job":
        watched: SoakedJob | SoakedOperator = SoakedJob(folder, pause_s)
        try:
            yield watched
        finally:
            watched.stop()
        return
    with temporary_api_server(folder / "api", crds=True) as kubeconfig:
        watched = SoakedOperator(kubeconfig, folder, every_s)
        try:
            yield watched
        finally:
            watched.stop()
