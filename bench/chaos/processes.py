"""Layer: a real job on embedded Ray with the tiny model and two trainer ranks; its processes are killed, stopped or slowed while it trains.

"everything killed" is the measure of all other recoveries: the whole run, Ray and engines included, starts again from its folder.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from bench.chaos import killing
from bench.chaos.outcome import RECOVERED, WRONG, Outcome
from bench.chaos.slowed import Slowed
from rljob_runtime.cluster.host import START_WORD
from rljob_runtime.exit_codes import ExitCode
from tests.integration.jobs import Running, job, untrained_model

LAYER = "real processes, embedded Ray"
WORKERS = {
    "engine": "actor_infer-0", "trainer": "actor_train-0", "second trainer rank": "actor_train-1", "reward worker": "reward-0",
}  # fmt: skip
KINDS = (
    "trainer killed", "engine killed", "reward worker killed", "driver killed", "everything killed", "second trainer rank killed",
    "driver sent SIGTERM", "trainer stopped for 3 s", "engine stopped permanently", "raylet killed",
    "second trainer rank stopped permanently", "reward worker stopped for 3 s", "GCS killed",
    *(f"{who} slowed" for who in ("trainer", "engine", "driver", "reward worker")), *killing.PHASES,
)  # fmt: skip
SLOW_STEPS = 3
"""Steps that are trained while a process is slowed."""
STALL_S = 20
STEP_TIMEOUT_S = 60
"""After which a trainer rank that hangs is lost."""
RECOVERS_S = 300.0
"""Bound of one recovery, a start from nothing included, on a busy machine."""
STEPS_BETWEEN = 2
FAULTS_OF_A_RUN = 8


class ChaoticRun:
    """One run folder, and as many ``rljob run`` as it takes."""

    def __init__(self, folder: Path, model: Path, faults: int, rng: random.Random, *, as_users: bool = False) -> None:
        """``as_users``: workers import everything when they start, as a user's do, and are not forked from one that has."""
        self.steps = 6 + 4 * faults
        self._folder, self._rng, self._as_users = folder, rng, as_users
        self._orders = folder.with_suffix(".orders")
        self._manifest = job(model, steps=self.steps)
        spec = self._manifest["spec"]
        spec["nodeGroups"][0]["devicesPerNode"] = 3
        for component, ranks in zip(spec["components"], ("0-1", "2"), strict=False):
            component["placement"]["ranks"] = ranks
        spec["training"]["stepTimeoutSeconds"] = STEP_TIMEOUT_S
        spec["rewards"][0]["function"] = "length_reward:slow_score"
        spec["failurePolicy"] = {"maxWorkerRestarts": 90}
        spec["rollout"] |= {"maxEngineRestarts": 90, "stallTimeoutSeconds": STALL_S}
        self._start()

    def _start(self, *options: str) -> None:
        environment = {killing.ORDERS: str(self._orders)}
        self._run = Running(
            self._folder, self._manifest, *options, as_users=self._as_users, before=killing.PROGRAM, environment=environment
        )

    def _pid(self, worker: str) -> int:
        lines = [line for line in self._run.log(worker).splitlines() if f" {START_WORD} " in line]
        return int(lines[-1].split("pid ")[1].split()[0])

    def _rows(self) -> list[dict[str, Any]]:
        with contextlib.suppress(ValueError):  # a line that is being written
            return self._run.metrics()
        return []

    def _until(self, what: str, true: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + RECOVERS_S
        while not true():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{what} not within {RECOVERS_S:.0f} s; output:\n{self._run.output[-3000:]}")
            time.sleep(0.05)

    def ready(self) -> None:
        """Until it has trained a little since the last fault."""
        known = len(self._rows())
        self._until("more steps", lambda: self._over or len(self._rows()) >= known + STEPS_BETWEEN)

    @property
    def _over(self) -> bool:
        return self._run.process.poll() is not None

    @property
    def is_over(self) -> bool:
        """Whether all steps are trained."""
        return self._over and len(self._rows()) == self.steps

    def meet(self, kind: str, steps: int = 1) -> Outcome:
        """One fault, and the time until so many further steps are trained; what the first needs may be there before the fault."""
        time.sleep(self._rng.random())
        began_s, stamp = time.monotonic(), self._stamp()
        try:
            if kind in killing.PHASES:
                began_s, stamp = self._order(killing.PHASES[kind])
                self._train(steps, stamp)
            elif kind.endswith(" slowed"):
                self._slow(kind.removesuffix(" slowed"), stamp)
            else:
                self._do(kind)
                self._train(steps, stamp)
            if self._over and not self.is_over:
                raise RuntimeError(f"the run ended with exit code {self._run.process.returncode}:\n{self._run.output[-3000:]}")
        except (TimeoutError, RuntimeError, AssertionError, psutil.Error) as error:
            return Outcome(layer=LAYER, kind=kind, result=WRONG, detail=f"{type(error).__name__}: {error}"[:4000])
        return Outcome(layer=LAYER, kind=kind, result=RECOVERED, recovery_s=time.monotonic() - began_s)

    def _train(self, steps: int, stamp: tuple[Any, ...]) -> None:
        """Until so many steps are trained after the one of this stamp, or the run is over."""
        for _ in range(steps):
            self._until("the next step", lambda stamp=stamp: self._stamp() != stamp or self._over)  # type: ignore[misc]
            stamp = self._stamp()

    def _slow(self, who: str, stamp: tuple[Any, ...]) -> None:
        """A few steps while one process gets a fifth of its time: it may be late, and must not be taken for lost."""
        pid = self._run.process.pid if who == "driver" else self._pid(WORKERS[who])
        with Slowed(pid) as slowed:
            self._train(SLOW_STEPS, stamp)
        if slowed.num_bursts == 0:
            raise RuntimeError(f"{who} was never stopped: {SLOW_STEPS} steps took less than one burst")
        now = self._run.process.pid if who == "driver" else self._pid(WORKERS[who])
        if now != pid:
            raise RuntimeError(f"{who} was only slow and was replaced: process {pid} by {now}")

    def _stamp(self) -> tuple[Any, ...]:
        """Changes with every step that is trained, also one that is trained again: a row has its own times."""
        rows = self._rows()
        return (len(rows), rows[-1].get("time/step_s")) if rows else (0, None)

    def _do(self, kind: str) -> None:
        who, _, how = kind.partition(" killed") if " killed" in kind else kind.partition(" stopped ")
        if kind == "driver sent SIGTERM":
            self._end_driver()
        elif who == "everything":
            self._run.kill()
            self._start("--resume")
        elif who == "driver":
            self._lose_driver()
        elif who in ("raylet", "GCS"):
            self._lose_node("raylet" if who == "raylet" else "gcs_server")
        elif how == "for 3 s":
            pid = self._pid(WORKERS[who])
            os.kill(pid, signal.SIGSTOP)
            time.sleep(3)
            os.kill(pid, signal.SIGCONT)
        else:
            os.kill(self._pid(WORKERS[who]), signal.SIGSTOP if how == "permanently" else signal.SIGKILL)

    def _order(self, phase: str) -> tuple[float, tuple[Any, ...]]:
        """Kill the next process that reaches this phase of a sync. Returns when it did, and the stamp of then."""
        unfinished = self._orders.with_suffix(".new")
        unfinished.write_text(phase)
        unfinished.rename(self._orders)
        self._until(f"a process in the phase {phase} of a sync", lambda: not self._orders.exists() or self._over)
        killed = time.monotonic(), self._stamp()
        if phase == "transfer":
            self._lose_driver()
        return killed

    def _lose_driver(self) -> None:
        """Only the driver's own process; what it started has to end by itself."""
        self._run.process.kill()
        self._run.process.wait()
        self._until("the end of what the driver had started", lambda: not self._run.left_behind())
        self._start("--resume")

    def _end_driver(self) -> None:
        """What the eviction of a head pod sends: it ends by itself, with a checkpoint of the step under way."""
        self._run.process.terminate()
        self._until("the end of the run", lambda: self._over)
        if not self.is_over:
            if self._run.process.returncode != ExitCode.INTERRUPTED:
                raise RuntimeError(f"exit code {self._run.process.returncode} after SIGTERM:\n{self._run.output[-3000:]}")
            self._start("--resume")

    def _lose_node(self, name: str) -> None:
        """A node of one machine is all nodes: the run has to end with a cause, and to go on from its folder."""
        started = psutil.Process(self._run.process.pid).children(recursive=True)
        (process,) = [process for process in started if process.name() == name]
        process.kill()
        self._until("the end of the run", lambda: self._over)
        if self._run.process.returncode != 3:
            raise RuntimeError(f"exit code {self._run.process.returncode} after the loss of the node:\n{self._run.output[-3000:]}")
        self._until("the end of what the driver had started", lambda: not self._run.left_behind())
        self._start("--resume")

    def end(self) -> str:
        """What is wrong at the end; empty where nothing is."""
        try:
            self._until("the end", lambda: self._over)
        except TimeoutError as error:
            return str(error)
        steps = [int(row["step"]) for row in self._rows()]
        if self._run.process.returncode != 0 or steps != list(range(1, self.steps + 1)):
            return f"exit code {self._run.process.returncode}, steps {steps} of {self.steps}:\n{self._run.output[-3000:]}"
        if any(row["rollout/sequences"] != 16 for row in self._rows()):
            return "a step has fewer samples than asked for"
        if left := self._run.left_behind():
            return f"left behind: {left}"
        return ""

    def kill(self) -> None:
        """Whatever is left."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._run.kill()


def run(seed: int, count: int, only: str | None, say: Callable[[int], None], folder: Path) -> list[Outcome]:
    """So many faults, several in each run."""
    rng, found = random.Random(seed), list[Outcome]()
    model = untrained_model(folder / "model")
    kinds = [kind for kind in KINDS if only in (None, kind)]
    order = [kinds[number % len(kinds)] for number in range(count)]
    for first in range(0, count, FAULTS_OF_A_RUN):
        part = order[first : first + FAULTS_OF_A_RUN]
        chaotic, outcomes = ChaoticRun(folder / f"run-{first}", model, len(part), rng), list[Outcome]()
        try:
            chaotic.ready()
            for kind in part:
                if chaotic.is_over:
                    break
                outcomes.append(chaotic.meet(kind))
                say(len(found) + len(outcomes))
                if outcomes[-1].result == WRONG:
                    break
                chaotic.ready()
            problem = chaotic.end() if all(o.result == RECOVERED for o in outcomes) else ""
        except TimeoutError as error:
            problem = str(error)
        finally:
            chaotic.kill()
        if problem:
            outcomes.append(Outcome(layer=LAYER, kind="end of a run", result=WRONG, detail=f"after {part}: {problem}"[:4000]))
        found += outcomes
    return found
