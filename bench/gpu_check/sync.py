"""Weights from a trainer rank to another process through the transports of a job: every bit, and bytes a second."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from bench.gpu_check.children import context, served
from bench.gpu_check.limits import copy_rates
from bench.gpu_check.lines import Line, equal, share
from bench.gpu_check.policy import folder_of
from bench.gpu_check.ports import free_ports
from bench.gpu_check.scale import Scale
from bench.gpu_check.timing import median_s
from rljob_runtime.cluster.inprocess import InProcessWorker
from rljob_runtime.errors import RuntimeFault
from rljob_runtime.offload.copies import HostCopies
from rljob_runtime.records import WeightManifest
from rljob_runtime.weightsync.device_delta import DeviceDeltaEncoder
from rljob_runtime.weightsync.packing import plan_buckets
from rljob_runtime.weightsync.probe import ProbeLimits
from rljob_runtime.weightsync.publisher import ProbeConfig, WeightPublisher
from rljob_runtime.weightsync.shared_memory import Segments, prefix_of
from rljob_runtime.weightsync.staging import Staging, staging_for
from rljob_runtime.weightsync.transport import TransportSettings
from rljob_runtime.weightsync.transports.collective import NcclTransport, TcpTransport
from rljob_runtime.weightsync.transports.ipc import IpcTransport
from rljob_runtime.weightsync.transports.shared_memory import SharedMemoryTransport

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
    Way(title="NCCL, changes alone", make=NcclTransport, receiver=1, delta=True, versions=DeviceDeltaEncoder.whole_first + 1),
    Way(title="IPC, changes alone", make=IpcTransport, delta=True, versions=DeviceDeltaEncoder.whole_first + 1),
    Way(title="shared memory, changes alone", make=SharedMemoryTransport, delta=True),
    Way(title="TCP, changes alone", make=TcpTransport, delta=True),
)


def check(scale: Scale) -> Iterator[Line]:
    """Each transport: the first sync, one of weights that a step has changed, and the bits that have arrived."""
    from bench.gpu_check.sync_ends import EndedError, Proxy, serve

    yield from _staged(scale)
    settings = _settings(scale)
    with served(context(), serve, [(0, "trainer", settings), (1, "engine", settings)]) as pipes:
        trainer, engine = (Proxy(ours, 2 * scale.wait_s) for ours in pipes)
        manifest = plan_buckets(trainer.weight_specs(), scale.bucket_bytes)
        for way in WAYS:
            try:
                yield from _way(way, trainer, engine, manifest, scale)
            except (RuntimeFault, TimeoutError, RuntimeError) as error:
                yield Line(check="transports", what=way.title, failed=f"{way.title}: {type(error).__name__}: {error}")
                if _ended(error, EndedError):
                    return


def _ended(error: BaseException, kind: type[Exception]) -> bool:
    """Whether a process has ended; workers wrap what their calls raise."""
    return isinstance(error, kind) or (error.__cause__ is not None and _ended(error.__cause__, kind))


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
    if way.make is SharedMemoryTransport and not way.delta:
        copies = copy_rates(scale.device, scale.copied_bytes, scale.repeat)
        limit, name = min(copies["off"], copies["onto"]) / 1e9, "the slower of the copies off and onto the device, pinned"
        yield share("transports", what, rate, "GB/s", limit=limit, limit_name=name, at_least=None, note=_where(way, scale))
    else:
        yield Line(check="transports", what=what, value=rate, unit="GB/s", note=_where(way, scale))
    if way.delta:
        changed = f"{way.title}: bytes that traveled after a step"
        yield Line(check="transports", what=changed, value=moved / manifest.total_bytes, unit="of all")
    yield equal("transports", f"{way.title}: parameters with other bits", found["differing"])


def _staged(scale: Scale) -> Iterator[Line]:
    """Copies between the device and a segment as both ends of the transport make them, checksums included, beside bare copies."""
    segments = Segments.equal(prefix_of(f"staged{os.getpid()}"), 1, scale.bucket_bytes)
    staging = staging_for(scale.device) or Staging(scale.device, HostCopies(), _Unlocked())
    size = scale.bucket_bytes
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=scale.device)
    came: list[torch.Tensor] = []
    try:
        staging.add(*segments.whole(0))
        seconds = {
            "off": median_s(scale.device, scale.repeat, lambda: staging.off(source, segments.array(0, size))),
            "onto": median_s(scale.device, scale.repeat, lambda: came.append(staging.onto(segments.shared(0, size)))),
        }
        refused = staging.pageable
    finally:
        staging.close()
        segments.close()
    bare = copy_rates(scale.device, scale.copied_bytes, scale.repeat)
    for way, what in (("off", "device to a page-locked segment"), ("onto", "page-locked segment to the device")):
        rate, limit = size / seconds[way] / 1e9, bare[way] / 1e9
        if refused is not None:
            yield Line(check="transports", what=what, failed=refused)
        else:
            yield share("transports", what, rate, "GB/s", limit=limit, limit_name="bare copy, pinned", at_least=scale.speed(0.5))
    yield equal("transports", "bytes that a segment changed", float((came[-1] != source).sum().item()))


class _Unlocked:
    """Page-locking where the device is the host."""

    def lock(self, address: int, size_bytes: int) -> str | None:
        """Nothing to lock."""

    def unlock(self, address: int) -> str | None:
        """Nothing to unlock."""


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
