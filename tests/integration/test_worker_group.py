"""Trainer and reference share one device through leases, with real models and real copies: no bit of the training changes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rljob_runtime.cluster.inprocess import InProcessWorker
from rljob_runtime.errors import DeadlineError, OffloadError
from rljob_runtime.offload.arbiter import DeviceArbiter
from rljob_runtime.offload.clients import ClientProcess, DeviceClient
from rljob_runtime.offload.plan import Device
from rljob_runtime.offload.records import SwitchRecord
from rljob_runtime.offload.states import Residence, StateKind
from rljob_runtime.offload.worker_group import WorkerGroup
from rljob_runtime.training import rank as rank_module
from rljob_runtime.training.config import PolicyConfig
from rljob_runtime.training.state import WEIGHTS
from rljob_runtime.training.worker import PolicyWorker
from rljob_runtime.weightsync.packing import plan_buckets
from tests.integration.test_offload_trainer import ALL, batch_of, model_folder, sequences
from tests.support.offload_fakes import bytes_of
from tests.support.ports import free_port

__all__ = ["model_folder"]  # a fixture
DEVICE = Device(0, 0)
TIMEOUT_S = 60.0
LATE_S = 1.0
"""Deadline of a call that takes longer; the lease before it takes far less."""


class Pair:
    """A trainer and a reference in this process, each in a thread of its own."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, **settings: Any) -> None:
        port = free_port()
        self.gradients: list[bytes] = []
        self.policies = {
            "trainer": PolicyWorker(PolicyConfig(model_path=str(folder), learning_rate=1e-2, **settings), 0, 1),
            "reference": PolicyWorker(PolicyConfig(model_path=str(folder), trainable=False), 0, 1),
        }
        self.policies["trainer"].setup("127.0.0.1", port, TIMEOUT_S)
        with patch.context() as one_group:  # a process has one group, the trainer's
            one_group.setattr(dist, "init_process_group", lambda *args, **kwargs: None)
            self.policies["reference"].setup("127.0.0.1", port, TIMEOUT_S)
        self.workers = {name: InProcessWorker(f"{name}-0", policy) for name, policy in self.policies.items()}
        clip = rank_module.clip_gradients

        def clipped(model: torch.nn.Module, most: float | None) -> torch.Tensor:
            self.gradients.append(b"".join(bytes_of(p.grad.full_tensor()) for p in model.parameters() if p.grad is not None))  # type: ignore[attr-defined]
            return clip(model, most)

        patch.setattr(rank_module, "clip_gradients", clipped)

    def groups(self, arbiter: DeviceArbiter | None) -> dict[str, WorkerGroup]:
        return {name: WorkerGroup(name, [worker], timeout_s=TIMEOUT_S, arbiter=arbiter) for name, worker in self.workers.items()}

    def share(self, **more: Any) -> DeviceArbiter:
        """An arbiter of a device that has room for the trainer alone; both are off it."""
        sizes = {name: dict(policy.offload(ALL).freed_bytes) for name, policy in self.policies.items()}
        sizes["trainer"][StateKind.GRADS] = sizes["trainer"][StateKind.PARAMS]
        arbiter = DeviceArbiter({DEVICE: sum(sizes["trainer"].values())}, **more)
        for name, worker in self.workers.items():
            arbiter.add(
                DeviceClient(name=name, processes=(ClientProcess(worker=worker, devices=(DEVICE,), size_bytes=sizes[name]),)), resident=()
            )
        return arbiter

    def stop(self) -> None:
        for worker in self.workers.values():
            worker.stop()
        self.policies["trainer"].shutdown()


@pytest.fixture
def pairs(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    running: list[Pair] = []

    def start(**settings: Any) -> Pair:
        while running:
            running.pop().stop()
        monkeypatch.undo()
        running.append(Pair(model_folder, monkeypatch, **settings))
        return running[-1]

    yield start
    running.pop().stop()


async def loop(pair: Pair, arbiter: DeviceArbiter | None) -> list[Any]:
    """Three steps, written once for every placement; exact results of all calls."""
    groups, found = pair.groups(arbiter), []
    trainer, reference = groups["trainer"], groups["reference"]
    (bucket,) = plan_buckets(pair.policies["trainer"].weight_specs(), 2**30).buckets
    for step in range(3):
        (expected,) = await reference.call("compute_logprobs", *sequences(), 1.0, include=WEIGHTS, is_offload_states=step == 1)
        (metrics,) = await trainer.call("train_step", [batch_of(step), batch_of(step + 100)], step)
        async with trainer.resident(WEIGHTS):
            (scored,) = await trainer.call("compute_logprobs", *sequences(), 1.0, include=WEIGHTS)
            (packed,) = await trainer.call("pack_buckets", {0: bucket}, include=[StateKind.PARAMS])
        found += [expected.tobytes(), metrics["train/grad_norm"].hex(), scored.tobytes(), packed.tobytes()]
        if step == 1:
            await trainer.offload_states()
            await trainer.reload_states([StateKind.PARAMS])
    return [*found, *pair.gradients]


@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16"}, {"optimizer_around_step": True}], ids=["plain", "bfloat16", "around step"])
def test_sharing_a_device_changes_no_bit(pairs: Any, settings: dict[str, Any]) -> None:
    alone = {name: value for name, value in settings.items() if name != "optimizer_around_step"}
    plain = asyncio.run(loop(pairs(**alone), None))
    assert len(set(plain)) == len(plain) - 2, "only the reference's log-probs are the same every time"
    pair = pairs(**settings)
    records: list[SwitchRecord] = []

    async def shared() -> list[Any]:
        arbiter = pair.share(on_switch=records.append)
        results = await loop(pair, arbiter)
        await arbiter.aclose()
        return results

    assert asyncio.run(shared()) == plain
    left = {move.client for record in records for move in record.moves if move.direction == "offload" and record.client != move.client}
    assert "trainer" in left or settings.get("optimizer_around_step"), "both had to leave for the other"
    assert "reference" in left
    assert all(not record.error for record in records)


def test_a_call_past_its_deadline_gives_the_device_to_the_next_only_when_it_is_idle(pairs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pairs()

    async def late() -> None:
        groups = pair.groups(pair.share())
        await groups["trainer"].reload_states()
        policy, never = pair.policies["trainer"], threading.Event()
        train_step = policy.train_step
        with monkeypatch.context() as patch:
            patch.setattr(policy, "train_step", lambda *arguments: never.wait(2 * LATE_S) or train_step(*arguments))
            with pytest.raises(DeadlineError, match=rf"worker trainer-0 did not finish train_step within {LATE_S:g} s"):
                await groups["trainer"].call("train_step", [batch_of(0)], 0, timeout_s=LATE_S)
        await groups["reference"].call("compute_logprobs", *sequences(), 1.0)
        assert pair.policies["trainer"].ready.store.residence(StateKind.OPTIMIZER) is Residence.OFFLOADED
        (metrics,) = await groups["trainer"].call("train_step", [batch_of(1)], 1)
        assert metrics["train/grad_norm"] > 0

    asyncio.run(late())


def test_device_memory_that_runs_out_at_a_load_is_reported_and_the_role_goes_on(pairs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = pairs()

    async def full() -> None:
        groups = pair.groups(pair.share())
        with monkeypatch.context() as patch:
            patch.setattr(torch.UntypedStorage, "resize_", no_memory)
            with pytest.raises(OffloadError, match=r"load of params.* failed \(OutOfMemoryError: no memory.* was undone"):
                await groups["reference"].call("compute_logprobs", *sequences(), 1.0)
        (scored,) = await groups["reference"].call("compute_logprobs", *sequences(), 1.0)
        assert scored.any()

    def no_memory(storage: torch.UntypedStorage, size: int) -> object:
        raise torch.OutOfMemoryError("no memory")

    asyncio.run(full())
