"""The order of a start: processes of later stages are prepared while the first one sets up, and constructed when it is their turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rljob_api.validation import check
from rljob_runtime.cluster.protocol import WorkerSpec
from rljob_runtime.cluster.ray_cluster import RayCluster, RayWorker
from rljob_runtime.data import tokenizer
from rljob_runtime.errors import ModelError, WorkerFailedError
from rljob_runtime.job import launch
from rljob_runtime.job.models import LOCAL
from rljob_runtime.loop.workers import JobWorkers
from tests.integration.jobs import job
from tests.support.fake_workers import Answered
from tests.support.virtual_time import run_virtual

TRAINER, ENGINE, REWARD = "actor_train-0", "actor_infer-0", "reward-0"
PREPARE_S, SETUP_S, BUILD_S = 10.0, 30.0, 5.0
"""Of the process of every later stage, of the trainer, and of every worker: the engine is prepared long before the trainer is set up."""


class Process(RayWorker):
    """A worker's process that takes its time; ``faults`` says which of its steps raise, by worker and step."""

    def __init__(self, name: str, nodes: Nodes) -> None:
        super().__init__(name, "log", None)
        self._nodes = nodes

    async def _take(self, step: str, seconds: float) -> None:
        await asyncio.sleep(seconds)
        if (fault := self._nodes.faults.get((self.name, step))) is not None:
            raise fault
        self._nodes.log.append(f"{self.name} {step} {asyncio.get_running_loop().time():.0f}")

    async def prepared(self, timeout_s: float) -> None:
        await self._take("prepared", PREPARE_S)

    async def started(self, timeout_s: float) -> None:
        await self._take("built", BUILD_S)

    async def address(self, timeout_s: float) -> tuple[str, int]:
        return "host", 1

    def start(self, method: str, *args: Any) -> Any:
        if method == "setup":
            return SimpleNamespace(result=lambda timeout_s: self._take("setup", SETUP_S))
        return Answered(lambda: self._nodes.log.append(f"{self.name} {method} {asyncio.get_running_loop().time():.0f}"))

    def end(self) -> None:
        self._nodes.ended.append(self.name)


class Nodes(RayCluster):
    """The cluster as it is, but for nodes, and processes on them."""

    def __init__(self, faults: dict[tuple[str, str], Exception] | None = None) -> None:
        super().__init__("nowhere", Path("logs"))
        self.faults = faults or {}
        self.log: list[str] = []
        """Worker, what it has done, and when, in seconds."""
        self.ended: list[str] = []

    async def start(self, plan: Any, timeout_s: float, notify: Callable[[str], None]) -> None:
        pass

    async def _check_interpreters(self, specs: Sequence[WorkerSpec], timeout_s: float) -> None:
        pass

    def _create(self, spec: WorkerSpec) -> Process:
        return Process(spec.name, self)


class Inline(ThreadPoolExecutor):
    """Has no threads, for which virtual time would not wait."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(fn(*args, **kwargs))
        return done


@pytest.fixture(autouse=True)
def _no_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "import_ahead", lambda path: None)


async def starting(nodes: Nodes, *, engine_device: str) -> JobWorkers:
    """The start of a job whose engine has a device of its own, or that of the trainer."""
    made = job(Path("models/none"), steps=1, **({"offload": {"residency": "Switching"}} if engine_device == "0" else {}))
    made["spec"]["components"][1]["placement"] = {"ranks": engine_device}
    made["spec"]["nodeGroups"][0]["devicesPerNode"] = 1 + int(engine_device)
    checked = check(made)
    reporter: Any = SimpleNamespace(
        phase=lambda what: contextlib.nullcontext(), event=nodes.log.append, resident=lambda devices: None, switched=lambda record: None
    )
    asyncio.get_running_loop().set_default_executor(Inline())
    return await launch.launch(checked.job, checked.plan, nodes, reporter, None, Path("logs"), LOCAL)


def failed(nodes: Nodes, *, engine_device: str) -> tuple[Exception, float]:
    """How the start fails, and when; nothing of it goes on."""

    async def run() -> tuple[Exception, float]:
        with pytest.raises(Exception) as found:  # noqa: PT011  # the caller looks at it
            await starting(nodes, engine_device=engine_device)
        end_s = asyncio.get_running_loop().time()
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1
        return found.value, end_s

    result: tuple[Exception, float] = run_virtual(run())
    return result


def test_an_engine_on_the_trainers_device_is_prepared_at_once_and_constructed_when_the_trainer_has_left() -> None:
    nodes = Nodes()
    run_virtual(starting(nodes, engine_device="0"))
    assert nodes.log[:-2] == [
        f"{TRAINER} built 5",
        f"{ENGINE} prepared 10",
        f"{REWARD} prepared 10",
        f"{TRAINER} setup 35",
        f"{TRAINER} offload 35",
        f"{ENGINE} built 40",
        f"{REWARD} built 40",
    ]
    assert nodes.ended == []


def test_where_nothing_is_shared_all_workers_are_constructed_at_once() -> None:
    nodes = Nodes()
    run_virtual(starting(nodes, engine_device="1"))
    assert nodes.log[:4] == [f"{TRAINER} built 5", f"{ENGINE} built 5", f"{REWARD} built 5", f"{TRAINER} setup 35"]


@pytest.mark.parametrize(("step", "after_s"), [("built", BUILD_S), ("setup", BUILD_S + SETUP_S)])
def test_a_trainer_that_fails_ends_the_start_at_once_with_its_own_error_and_what_was_prepared(step: str, after_s: float) -> None:
    """Also while the others are still being prepared, as after 5 s."""
    fault = ModelError("no such file: model.safetensors")
    nodes = Nodes({(TRAINER, step): fault})
    assert failed(nodes, engine_device="0") == (fault, after_s)
    assert {ENGINE, REWARD} <= set(nodes.ended)
    assert not [line for line in nodes.log if line.startswith((f"{ENGINE} built", f"{REWARD} built"))]


@pytest.mark.parametrize(("step", "after_s"), [("prepared", PREPARE_S), ("built", 2 * BUILD_S + SETUP_S)])
def test_an_engine_that_cannot_be_imported_is_reported_at_once_and_one_that_cannot_be_constructed_at_its_turn(
    step: str, after_s: float
) -> None:
    fault = WorkerFailedError(ENGINE, "start", "ImportError: libcuda", "log")
    nodes = Nodes({(ENGINE, step): fault})
    assert failed(nodes, engine_device="0") == (fault, after_s)
    assert {ENGINE, REWARD} <= set(nodes.ended)


def test_a_trainer_that_cannot_load_its_model_does_not_wait_for_engines_on_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    fault = ModelError("no such file: model.safetensors")
    nodes = Nodes({(TRAINER, "setup"): fault})
    slow = Process.started

    async def started(process: Process, timeout_s: float) -> None:
        await asyncio.sleep(100.0 if process.name == ENGINE else 0.0)
        await slow(process, timeout_s)

    monkeypatch.setattr(Process, "started", started)
    assert failed(nodes, engine_device="1") == (fault, BUILD_S + SETUP_S)
    assert ENGINE in nodes.ended
