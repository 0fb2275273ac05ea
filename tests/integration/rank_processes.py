"""Runs a test file's ranks in real processes over gloo; they leave results for the tests to read.

The ranks are forks of one fresh process, because importing torch and transformers costs more than all they do. That process in turn is
forked from one that all test files share (:mod:`tests.support.forked_workers`).
"""

from __future__ import annotations

import dataclasses
import gc
import multiprocessing
import multiprocessing.connection
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

from rljob_runtime.records import Bucket, TrainBatch
from rljob_runtime.sampling_mask import SamplingMask
from rljob_runtime.training.parallel import layout_of
from rljob_runtime.training.worker import PolicyWorker
from rljob_runtime.weightsync.packing import plan_buckets, unpack
from rljob_runtime.weightsync.parcel import checksum
from tests.support import forked_workers
from tests.support.pace import HANG_S
from tests.support.ports import free_ports

DEADLINE_S = 3 * HANG_S
"""Of all ranks together, which may compute for minutes, and of every rendezvous: ranks that sit out some layouts wait for the others."""

Arrays = dict[str, np.ndarray]


WITHOUT_COLLECTOR = Path(__file__).with_name("without_collector.py")


def run_script(script: str, folder: Path) -> None:
    """Run ``script FOLDER``, which calls :func:`fork_ranks`, and expect success."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    command = forked_workers.script_command(forked_workers.RANKS, WITHOUT_COLLECTOR, script, str(folder))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S + 10.0, check=False)
    assert done.returncode == 0, f"{script} failed:\n{done.stderr[-4000:]}"


def fork_ranks(num_ranks: int, num_ports: int, main: Callable[[int, list[int], Path], None]) -> None:
    """Call ``main(rank, ports, folder)`` in a process per rank, from a process that has computed nothing yet; folder: ``argv[1]``."""
    ports, context = free_ports(num_ports), multiprocessing.get_context("fork")
    ranks = [context.Process(target=main, args=(rank, list(ports), Path(sys.argv[1]))) for rank in range(num_ranks)]
    deadline = time.monotonic() + DEADLINE_S
    gc.freeze()  # a collection in a rank would copy all that it looks at
    gc.enable()
    for process in ranks:
        process.start()
    try:
        while alive := [process for process in ranks if process.is_alive()]:  # asked once: waiting for nobody would take all the time
            multiprocessing.connection.wait([process.sentinel for process in alive], timeout=max(0.0, deadline - time.monotonic()))
            failed = [rank for rank, process in enumerate(ranks) if process.exitcode not in (None, 0)]
            if failed or time.monotonic() > deadline:
                sys.exit(f"ranks {failed} failed" if failed else f"ranks took longer than {DEADLINE_S} s")
    finally:
        for process in ranks:
            process.kill()
            process.join(5.0)


def join(worker: PolicyWorker, port: int) -> None:
    """Meet the other ranks, without the groups of layouts before.

    Each group of gloo has a thread that wakes up a hundred times a second. It lives as long as the model whose mesh has the group, which
    the garbage collector may not find for the next ten layouts.
    """
    gc.collect()
    worker.setup("127.0.0.1", port, timeout_s=DEADLINE_S)


def random_batch(vocab: int, seed: int = 0, part: slice = slice(None), sequences: int = 11) -> TrainBatch:
    """The sequences ``part`` of one global batch: three prompts of three tokens, random responses, behavior near uniform."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, 14, sequences).astype(np.int32)
    total = int(lengths.sum())
    starts = np.cumsum(lengths) - lengths
    mask = np.ones(total, np.float32)
    tokens = rng.integers(0, vocab, total).astype(np.int32)
    for index, begin in enumerate(starts):
        mask[begin : begin + 3] = 0.0
        tokens[begin : begin + 3] = (7, 11 + index % 3, 5)
    behavior = rng.normal(-np.log(vocab), 0.2, total).astype(np.float32) * mask
    advantages = rng.normal(0, 1, total).astype(np.float32) * mask
    kept = np.isin(np.repeat(np.arange(sequences), lengths), np.arange(sequences)[part])
    return TrainBatch(
        token_ids=tokens[kept],
        lengths=lengths[part],
        response_mask=mask[kept],
        behavior_logprobs=behavior[kept],
        advantages=advantages[kept],
        global_tokens=int(mask.sum()),
        global_sequences=sequences,
        version=0,
    )


def masked(batch: TrainBatch, vocab: int) -> TrainBatch:
    """The batch, sampled from a few tokens at most places and from all at the others; the same for a token in whatever part it is."""
    rows = [
        [t, (t + 1) % vocab, 7 * t % vocab, t // 2] if m and t % 5 else []
        for t, m in zip(batch.token_ids, batch.response_mask, strict=True)
    ]
    counts = np.array([len(row) for row in rows], dtype=np.int32)
    ids = np.array([token for row in rows for token in row], dtype=np.int32)
    return dataclasses.replace(batch, sampling_mask=SamplingMask(token_ids=ids, counts=counts))


def packed_weights(worker: PolicyWorker, bucket_bytes: int = 50_000, *, adapters: bool = False) -> Arrays:
    """What engines would get, or those that serve adapters, by name, on rank 0; empty elsewhere."""
    arrays: Arrays = {}
    for bucket in plan_buckets(worker.adapter_specs() if adapters else worker.weight_specs(), bucket_bytes).buckets:
        data = worker.pack_buckets({0: bucket})
        check_packed_alike(worker, bucket, data)
        if data is not None:
            arrays |= {name: tensor.float().numpy().copy() for name, tensor in unpack(bucket, data)}
    return arrays


def check_packed_alike(worker: PolicyWorker, bucket: Bucket, on_first: np.ndarray | None) -> None:
    """Several ranks can have one bucket, with the bytes ``on_first`` that rank 0 gets of it alone; all of them by one collective."""
    world_size = dist.get_world_size()
    with mock.patch.object(dist, "gather", wraps=dist.gather) as gather:
        packed = [worker.pack_buckets(dict.fromkeys(range(world_size), bucket))]
        assert not gather.called
    packed.append(worker.pack_buckets(dict.fromkeys(range(1, world_size), bucket)) if world_size > 1 else None)
    assert [data is not None for data in packed] == [True, worker.rank > 0]
    sums: list[Any] = [None] * world_size
    dist.all_gather_object(sums, [checksum(data) for data in (on_first, *packed) if data is not None])
    assert {one for own in sums for one in own} == {sums[0][0]}


def check_deadlines(worker: PolicyWorker) -> None:
    """Every group of the ranks ends at the deadline that the worker was given, and not at torch's own."""
    layout, cpu = layout_of(worker.model), torch.device("cpu")
    groups = [g for mesh in (layout.mesh, layout.batches, layout.experts) if mesh is not None for g in mesh.get_all_groups()]
    assert {group._get_backend(cpu).options._timeout.total_seconds() for group in groups} == {DEADLINE_S}


def full_gradients(worker: PolicyWorker) -> Arrays:
    """Whole gradients by name, on every rank; collective."""
    return {n: p.grad.full_tensor().numpy().copy() for n, p in worker.model.named_parameters() if p.grad is not None}


def shards(worker: PolicyWorker) -> list[torch.Tensor]:
    """Copies of this rank's parts of weights and optimizer states."""
    optimizer = worker.ready.optimizer
    assert optimizer is not None
    moments = [value for state in optimizer.state.values() for value in state.values()]
    found = [*worker.model.parameters(), *moments]
    return [getattr(tensor, "_local_tensor", tensor).detach().clone() for tensor in found]


def write(folder: Path, name: str, arrays: Arrays) -> None:
    """Leave arrays for the tests."""
    np.savez(folder / f"{name}.npz", **arrays)  # type: ignore[arg-type]


def largest_difference(one: Arrays, other: Arrays) -> float:
    """Of arrays of the same names."""
    assert one.keys() == other.keys() != set()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def read(folder: Path, name: str, prefix: str = "") -> Arrays:
    """What :func:`write` left, those with the prefix, without it."""
    with np.load(folder / f"{name}.npz") as data:
        return {key.removeprefix(prefix): data[key] for key in data.files if key.startswith(prefix)}
