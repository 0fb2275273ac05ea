"""What the ranks of ``parallel`` compute, through the trainer's own workers: one rank first, then two."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.gpu_check.children import Stage

SOCKETS = {
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
}
"""NCCL between processes that it takes for two hosts."""
MOST_BUCKET_BYTES = 64 << 20
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One layout of two ranks."""

    name: str
    title: str
    model: str = "dense"
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of both one rank and two."""
    layout: Mapping[str, int] = field(default_factory=dict)
    """Of two ranks alone; empty: data-parallel."""
    critic: bool = False
    moves: bool = False
    """Also offload, reload, write a checkpoint, and read it."""

    @property
    def shares_batch(self) -> bool:
        """Whether both ranks compute the same sequences."""
        return any(name in self.layout for name in ("tensor_parallel_size", "context_parallel_size"))


EAGER = {"layer_compilation": "Disabled"}
"""Compiling takes most of a minute for each case with cold caches, and what is compiled knows nothing of ranks."""
CASES = (
    Case(name="tp", title="tensor parallel", settings=EAGER, layout={"tensor_parallel_size": 2}),
    Case(name="ep", title="expert parallel", model="mixture", layout={"expert_parallel_size": 2}),
    Case(
        name="tpep",
        title="tensor, sequence, and expert parallel",
        model="mixture",
        layout={"tensor_parallel_size": 2, "sequence_parallel": True, "expert_parallel_size": 2},
    ),
    Case(name="mixture", title="mixture, FSDP2", model="mixture"),
    Case(name="cp", title="context parallel", settings=EAGER, layout={"context_parallel_size": 2}),
    Case(
        name="split",
        title="FSDP2, gradients reduced by micro-batch, moments away between steps",
        settings={"reduces_each_micro_batch": True, "optimizer_around_step": True, **EAGER},
    ),
    Case(name="critic", title="critic, FSDP2", critic=True),
    Case(name="fsdp", title="FSDP2, compiled layers", moves=True),
    Case(name="lora", title="adapters, FSDP2, compiled layers", settings={"lora": 4}),
)
"""Those that compile layers come last: the time may be over before they are done."""


def environment(rank: int, devices: int) -> None:
    """Before NCCL is loaded: ranks that share a device have to look like ranks on two hosts, or NCCL refuses them."""
    os.environ["RES_OPTIONS"] = "attempts:0"  # torch looks up names of addresses, and nothing may answer
    if devices == 1:
        os.environ.update(SOCKETS, NCCL_HOSTID=f"gpu-check-{rank}")
    if devices:
        torch.cuda.set_device(rank % devices)


def main(rank: int, plan: Mapping[str, Any], results: Any) -> None:
    """Compute the cases of ``plan``; rank 0 puts stages and ``(case, numbers)`` into ``results``, any rank ``(case, error)``."""
    torch.set_num_threads(1)
    environment(rank, plan["devices"])
    from rljob_runtime.training import model

    model.ONE_UNIT_BYTES = 0  # layers are units of their own, as in large models
    alone: dict[str, Arrays] = {}
    for case in (case for case in CASES if case.name in plan["cases"]):
        try:
            key = repr((case.model, case.critic, sorted(case.settings.items())))
            if rank == 0 and key not in alone:
                results.put(Stage(f"{case.title}, one rank"))
                alone[key] = compute(case, 0, 1, plan)
            if rank == 0:
                results.put(Stage(f"{case.title}, two ranks"))
            found = compute(case, rank, 2, plan)
            if rank == 0:
                results.put((case.name, compare(alone[key], found)))
        except Exception as error:  # noqa: BLE001 - the parent reports it, and the other rank is ended
            traceback.print_exc()
            results.put((case.name, f"rank {rank}: {type(error).__name__}: {error}"))
            return


def compute(case: Case, rank: int, world_size: int, plan: Mapping[str, Any]) -> Arrays:
    """Log-probs, one step's metrics, and the weights after it, as one rank or two have them."""
    with started(case, rank, world_size, plan) as worker:
        batch = sequences(plan, case.critic, slice(rank, None, 2) if world_size == 2 and not case.shares_batch else slice(None))
        everything = sequences(plan, case.critic, slice(None if rank == 0 or case.shares_batch else 0))
        score = worker.compute_values if case.critic else worker.compute_logprobs

        def scores() -> np.ndarray:
            wanted = (everything.response_mask,) if case.critic else (1.0, everything.response_mask)
            found: np.ndarray = score(everything.token_ids, everything.lengths, *wanted)
            return found

        arrays = {"before": scores()}
        metrics = worker.train_step([batch], 0)
        role = "critic" if case.critic else "train"
        loss = metrics["critic/loss" if case.critic else "train/total_loss"]
        arrays |= {"metrics": np.array([loss, metrics[f"{role}/grad_norm"]]), "after": scores()}
        if case.moves and world_size == 2:
            arrays["moved"] = moved(worker, scores, batch, Path(plan["folder"]) / "ranks-checkpoint", rank) - arrays["after"]
        weights = values_of(worker) if case.critic else packed(worker)
        return arrays | {f"weight/{name}": value for name, value in weights.items()}


@contextmanager
def started(case: Case, rank: int, world_size: int, plan: Mapping[str, Any]) -> Iterator[Any]:
    """A worker of the case, set up."""
    from rljob_api.vocabulary import LayerCompilation
    from rljob_runtime.training.config import LoraConfig, PolicyConfig
    from rljob_runtime.training.critic import CriticWorker
    from rljob_runtime.training.critic_config import CriticConfig
    from rljob_runtime.training.worker import PolicyWorker

    settings = dict(case.settings)
    if "lora" in settings:
        settings["lora"] = LoraConfig(rank=settings["lora"], alpha=2.0 * settings["lora"])
    if "layer_compilation" in settings:
        settings["layer_compilation"] = LayerCompilation(settings["layer_compilation"])
    make: Any = CriticWorker if case.critic else PolicyWorker
    own: dict[str, Any] = {**settings, **(case.layout if world_size == 2 else {})}
    config = (CriticConfig if case.critic else PolicyConfig)(
        model_path=plan["models"][case.model],
        dtype="float32",
        learning_rate=1e-2,
        eps=1e-3,  # a small one would turn rounding of gradients near zero into whole steps
        token_budget=plan["token_budget"],
        **own,
    )
    worker = make(config, rank, world_size)
    worker.setup("127.0.0.1", plan["ports"][case.name][world_size - 1], plan["wait_s"])
    try:
        yield worker
    finally:
        worker.shutdown()


def moved(worker: Any, scores: Callable[[], np.ndarray], batch: Any, folder: Path, rank: int) -> np.ndarray:
    """Scores after the state has left the device and come back, and a checkpoint has undone a step."""
    from rljob_runtime.offload.states import StateKind

    kinds = (StateKind.PARAMS, StateKind.OPTIMIZER)
    worker.offload(kinds)
    worker.load(kinds)
    if rank == 0:
        folder.mkdir()
    torch.distributed.barrier()
    worker.begin_checkpoint(folder)
    worker.finish_checkpoint(60.0)
    worker.train_step([batch], 1)
    worker.load_checkpoint(folder)
    return scores()


def packed(worker: Any) -> Arrays:
    """What engines would get, by name, on rank 0; empty elsewhere."""
    from rljob_runtime.weightsync.packing import plan_buckets, unpack

    arrays: Arrays = {}
    for bucket in plan_buckets(worker.weight_specs(), MOST_BUCKET_BYTES).buckets:
        data = worker.pack_buckets({0: bucket})
        if data is not None:
            arrays |= {name: tensor.float().numpy().copy() for name, tensor in unpack(bucket, data)}
    return arrays


def values_of(worker: Any) -> Arrays:
    """A critic's parameters as wholes, on every rank."""
    return {
        name: getattr(parameter.detach(), "full_tensor", parameter.detach)().float().cpu().numpy().copy()
        for name, parameter in worker.model.named_parameters()
    }


def compare(one: Arrays, two: Arrays) -> dict[str, float]:
    """Largest differences of two ranks from one: metrics by share, scores in their unit, weights as a share of the largest of all."""
    weights = [name for name in one if name.startswith("weight/")]
    if set(weights) != {name for name in two if name.startswith("weight/")} or not weights:
        raise AssertionError(f"two ranks have other parameters than one: {sorted(set(one) ^ set(two))[:4]}")
    scale = np.maximum(np.abs(one["metrics"]), 1e-2)
    found = {
        "metrics": float((np.abs(one["metrics"] - two["metrics"]) / scale).max()),
        "before": float(np.abs(one["before"] - two["before"]).max()),
        "after": float(np.abs(one["after"] - two["after"]).max()),
        "learned": float(np.abs(one["after"] - one["before"]).max()),
        "weights": max(float(np.abs(one[name] - two[name]).max()) for name in weights),
    }
    return found | ({"moved": float(np.abs(two["moved"]).max())} if "moved" in two else {})


def sequences(plan: Mapping[str, Any], critic: bool, part: slice) -> Any:
    """Some sequences of one batch of several lengths and random tokens."""
    from rljob_runtime.records import TrainBatch

    random = np.random.default_rng(3)
    lengths = random.integers(plan["longest"] // 4, plan["longest"], plan["sequences"]).astype(np.int32)
    total = int(lengths.sum())
    tokens = random.integers(2, plan["vocab_size"], total).astype(np.int32)
    mask = np.ones(total, np.float32)
    for begin in np.cumsum(lengths) - lengths:
        mask[begin : begin + 4] = 0.0
    numbers = {name: random.normal(0.0, 1.0, total).astype(np.float32) * mask for name in ("advantages", "values", "returns")}
    behavior = random.normal(-np.log(plan["vocab_size"]), 0.2, total).astype(np.float32) * mask
    chosen = np.zeros(lengths.size, bool)
    chosen[part] = True
    kept = np.repeat(chosen, lengths)
    return TrainBatch(
        token_ids=tokens[kept],
        lengths=lengths[chosen],
        response_mask=mask[kept],
        behavior_logprobs=behavior[kept],
        advantages=numbers["advantages"][kept],
        values=numbers["values"][kept] if critic else None,
        returns=numbers["returns"][kept] if critic else None,
        global_tokens=int(mask.sum()),
        global_sequences=lengths.size,
        version=0,
    )
