"""Weights from a trainer rank to another process through the transports of a job: every bit, and bytes a second."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu_check.children import context
from bench.gpu_check.lines import Line, equal
from bench.gpu_check.policy import folder_of
from bench.gpu_check.ports import free_ports
from bench.gpu_check.scale import Scale
from rljob_runtime.cluster.inprocess import InProcessWorker
from rljob_runtime.errors import RuntimeFault
from rljob_runtime.records import WeightManifest
from rljob_runtime.weightsync.device_delta import WHOLE_FIRST
from rljob_runtime.weightsync.packing import plan_buckets
from rljob_runtime.weightsync.probe import ProbeLimits
from rljob_runtime.weightsync.publisher import ProbeConfig, WeightPublisher
from rljob_runtime.weightsync.transport import TransportSettings
from rljob_runtime.weightsync.transports.collective import NcclTransport, TcpTransport
from rljob_runtime.weightsync.transports.ipc import IpcTransport
from rljob_runtime.weightsync.transports.shared_memory import SharedMemoryTransport

END_S = 10.0
DENSE_ABOVE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One transport."""

    title: str
    make: Any
    receiver: int = 0
    """Device of the engine, where there are two."""
    delta: bool = False
    versions: int = 2


WAYS = (
    Way(title="NCCL", make=NcclTransport, receiver=1),
    Way(title="IPC", make=IpcTransport),
    Way(title="shared memory", make=SharedMemoryTransport),
    Way(title="NCCL, changes alone", make=NcclTransport, receiver=1, delta=True, versions=WHOLE_FIRST + 1),
    Way(title="IPC, changes alone", make=IpcTransport, delta=True, versions=WHOLE_FIRST + 1),
    Way(title="shared memory, changes alone", make=SharedMemoryTransport, delta=True),
    Way(title="TCP, changes alone", make=TcpTransport, delta=True),
)


def check(scale: Scale) -> Iterator[Line]:
    """Each transport: the first sync, one of weights that a step has changed, and the bits that have arrived."""
    from bench.gpu_check.sync_ends import Proxy, serve

    ctx = context()
    settings = _settings(scale)
    pairs = [ctx.Pipe() for _ in range(2)]
    processes = [
        ctx.Process(target=serve, args=(rank, kind, settings, pairs[rank][1]), daemon=False)
        for rank, kind in enumerate(("trainer", "engine"))
    ]
    try:
        for process in processes:
            process.start()
        trainer, engine = (Proxy(ours, 2 * scale.wait_s) for ours, _ in pairs)
        manifest = plan_buckets(trainer.weight_specs(), scale.bucket_bytes)
        for way in WAYS:
            try:
                yield from _way(way, trainer, engine, manifest, scale)
            except (RuntimeFault, TimeoutError, RuntimeError) as error:
                yield Line(check="transports", what=way.title, failed=f"{way.title}: {type(error).__name__}: {error}")
                if not all(process.is_alive() for process in processes):
                    return
    finally:
        for ours, _ in pairs:
            ours.close()
        for _, theirs in pairs:
            theirs.close()
        for process in processes:
            process.join(END_S)
            if process.is_alive():
                process.kill()
                process.join(END_S)


def _settings(scale: Scale) -> dict[str, Any]:
    return {
        "devices": min(torch.cuda.device_count(), 2) if scale.on_cuda else 0,
        "wait_s": scale.wait_s,
        "port": free_ports(1)[0],
        "vocab_size": int(scale.models[0].config["vocab_size"]),
        "longest": scale.rank_tokens // 3,
        "sequences": 4,
        "policy": {
            "model_path": str(folder_of(scale.models[0], scale)),
            "dtype": "bfloat16",
            "learning_rate": 1e-6,
            "token_budget": scale.rank_tokens,
            "logprob_chunk_tokens": scale.logprob_chunk_tokens,
        },
    }


def _way(way: Way, trainer: Any, engine: Any, manifest: WeightManifest, scale: Scale) -> Iterator[Line]:
    scale.begin(way.title)
    engine.use(way.receiver if scale.on_cuda else None)
    found = asyncio.run(_published(way, trainer, engine, manifest, scale.wait_s))
    if found["warning"]:
        yield Line(check="transports", what=way.title, failed=f"{way.title}: {found['warning']}")
        return
    moved, seconds = found["bytes"], found["seconds"]
    what = f"{way.title}, {manifest.total_bytes / 2**20:.0f} MiB in {len(manifest.buckets)} buckets"
    rate = manifest.total_bytes / seconds / 1e9
    yield Line(check="transports", what=what, value=rate, unit="GB/s", note=_where(way, scale))
    if way.delta:
        changed = f"{way.title}: bytes that traveled after a step"
        yield Line(check="transports", what=changed, value=moved / manifest.total_bytes, unit="of all")
    yield equal("transports", f"{way.title}: parameters with other bits", found["differing"])


async def _published(way: Way, trainer: Any, engine: Any, manifest: WeightManifest, wait_s: float) -> dict[str, Any]:
    """Versions through the publisher of a job; what the last one took, and how many parameters of all of them differ."""
    workers = InProcessWorker("trainer", trainer), InProcessWorker("engine", engine)
    warnings: list[str] = []
    settings = TransportSettings(
        run=f"check{os.getpid()}", while_generating=False, dense_above=DENSE_ABOVE if way.delta else None, neighbors=((0,),)
    )
    publisher = WeightPublisher(
        trainers=workers[:1],
        engines=workers[1:],
        manifest=manifest,
        transport=way.make(settings),
        timeout_s=wait_s,
        probe=ProbeConfig(every_syncs=0, limits=ProbeLimits(mean=1.0, tail=1.0), sequences=()),
        warn=warnings.append,
    )
    differing = 0
    try:
        for version in range(1, way.versions + 1):
            await workers[0].call("step", timeout_s=2 * wait_s)  # the first compiles attention
            report = await publisher.publish(version)
            measured = await publisher.measured(report)
            sent, came = [await worker.call("sums", manifest, timeout_s=wait_s) for worker in workers]
            differing += sum(sent[name] != came.get(name) for name in sent)
        await publisher.close()
    finally:
        await workers[0].call("close_sender", timeout_s=wait_s)
        for worker in workers:
            worker.stop()
    return {"seconds": report.elapsed_s, "bytes": measured["sync/bytes"], "differing": float(differing), "warning": "; ".join(warnings)}


def _where(way: Way, scale: Scale) -> str:
    if not scale.on_cuda:
        return "on CPU: gloo and shared memory in place of NCCL and CUDA IPC" if way.make in (NcclTransport, IpcTransport) else ""
    if way.make is NcclTransport and torch.cuda.device_count() == 1:
        return "two processes on one GPU, through sockets: correctness, not speed"
    return ""
