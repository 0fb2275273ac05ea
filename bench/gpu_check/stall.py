"""How long a vLLM engine stops for a full update and for sparse ones, whose bytes do not leave the device."""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from bench.gpu_check.children import context, served
from bench.gpu_check.lines import Line, equal
from bench.gpu_check.policy import empty, folder_of
from bench.gpu_check.scale import Scale
from bench.gpu_check.stall_ends import WeightHolder, serve
from bench.gpu_check.sync_ends import Proxy
from rljob_runtime.cluster.inprocess import InProcessWorker
from rljob_runtime.records import WeightManifest
from rljob_runtime.weightsync.device_delta import DeviceDeltaEncoder
from rljob_runtime.weightsync.packing import plan_buckets
from rljob_runtime.weightsync.probe import ProbeLimits
from rljob_runtime.weightsync.publisher import ProbeConfig, WeightPublisher
from rljob_runtime.weightsync.transport import TransportSettings
from rljob_runtime.weightsync.transports.ipc import IpcTransport

NAME = "stall"
CHANGED = (0.001, 0.01, 0.1)
"""Parts of all numbers, evenly spread, that change before an update."""
BOUNDED = 0.01
LEAST_RATIO = 5.0
"""Of the full update's time to that of a sparse one of :data:`BOUNDED`."""
DENSE_ABOVE = 0.5
CACHE_BYTES = 1 << 30
CPU_CACHE_BYTES = 16 << 20


def check(scale: Scale) -> Iterator[Line]:
    """Medians of full and of sparse updates over CUDA IPC, their ratios, and the bits that they leave."""
    with _engine(scale) as engine:
        holder = WeightHolder(folder_of(scale.models[0], scale), scale.device, scale.dtype)
        manifest = plan_buckets(holder.weight_specs(), scale.bucket_bytes)
        try:
            found = asyncio.run(_measured(holder, engine, manifest, scale))
        finally:
            holder.close_sender()
            del holder
            empty(scale.device)
    if "warning" in found:
        yield Line(check=NAME, what="updates", failed=found["warning"])
        return
    yield from _lines(found, manifest, scale)


def _lines(found: Mapping[str, Any], manifest: WeightManifest, scale: Scale) -> Iterator[Line]:
    full = found["full"]
    where = "CUDA IPC" if scale.on_cuda else "shared memory in place of CUDA IPC"
    size = f"{manifest.total_bytes / 2**20:.0f} MiB in {len(manifest.buckets)} buckets"
    yield Line(check=NAME, what=f"the engine is stopped, full update, {size}", value=full["stopped_s"], unit="s", note=where)
    for changed in CHANGED:
        what = changed_part(changed)
        sparse = found[what]
        note = f"{sparse['bytes'] / manifest.total_bytes:.2%} of the bytes"
        yield Line(check=NAME, what=f"the engine is stopped, {what}", value=sparse["stopped_s"], unit="s", note=note)
        ratio = full["stopped_s"] / sparse["stopped_s"]
        bound = scale.speed(LEAST_RATIO) if changed == BOUNDED else None
        yield Line(check=NAME, what=f"full update to sparse update, {what}", value=ratio, unit="times", compared=ratio, at_least=bound)
    yield Line(check=NAME, what="tensors of the model", value=found["tensors"], unit="tensors")
    moved = found["moved"]
    yield Line(check=NAME, what="tensors that updates changed", value=moved, unit="tensors", compared=moved, at_least=1)
    yield equal(NAME, "tensors with other bits than after a full update", found["differing"], note="after the last sparse one")


def changed_part(changed: float) -> str:
    """A part of all numbers, in words."""
    return f"{changed:.1%} changed"


async def _measured(holder: WeightHolder, engine: Any, manifest: WeightManifest, scale: Scale) -> dict[str, Any]:
    """Full updates, sparse ones of every part, and the bits after the last of them and after a full one with the same weights."""
    workers = InProcessWorker("trainer", holder), InProcessWorker("engine", engine)
    updates = _Updates(workers, manifest, scale)
    try:
        scale.begin("full updates")
        publisher = updates.publisher(None)
        await updates.run(publisher, BOUNDED, 1)
        first = await workers[1].call("bits", timeout_s=scale.wait_s)
        found: dict[str, Any] = {"full": await updates.run(publisher, BOUNDED, scale.repeat * 2 - 1)}
        scale.begin("sparse updates")
        publisher = updates.publisher(DENSE_ABOVE)
        await updates.run(publisher, BOUNDED, DeviceDeltaEncoder.whole_first)
        for changed in CHANGED:
            await updates.run(publisher, changed, 1)
            found[changed_part(changed)] = await updates.run(publisher, changed, scale.repeat * 2 - 1)
        sparse = await workers[1].call("bits", timeout_s=scale.wait_s)
        scale.begin("full update, and its bits")
        await updates.run(updates.publisher(None), 0.0, 1)
        full = await workers[1].call("bits", timeout_s=scale.wait_s)
    finally:
        for worker in workers:
            worker.stop()
    if updates.warnings:
        found["warning"] = "; ".join(updates.warnings)
    different = [name for name in full if sparse.get(name) != full[name]]
    moved = [name for name in sparse if first[name] != sparse[name]]
    return found | {"tensors": float(len(full)), "differing": float(len(different)), "moved": float(len(moved))}


class _Updates:
    """Versions of the weights, one after the other, through publishers of a job."""

    def __init__(self, workers: tuple[InProcessWorker, InProcessWorker], manifest: WeightManifest, scale: Scale) -> None:
        self.warnings: list[str] = []
        self._workers, self._manifest, self._scale = workers, manifest, scale
        self._version = 0

    def publisher(self, dense_above: float | None) -> WeightPublisher:
        """One whose transport has not been prepared; None: every update is a full one."""
        run = f"stall{os.getpid()}"
        settings = TransportSettings(run=run, while_generating=False, dense_above=dense_above, neighbors=((0,),))
        return WeightPublisher(
            trainers=self._workers[:1],
            engines=self._workers[1:],
            manifest=self._manifest,
            transport=IpcTransport(settings),
            timeout_s=self._scale.wait_s,
            probe=ProbeConfig(every_syncs=0, limits=ProbeLimits(mean=1.0, tail=1.0), sequences=()),
            warn=self.warnings.append,
        )

    async def run(self, publisher: WeightPublisher, changed: float, count: int) -> dict[str, float]:
        """So many updates, a part of all numbers changed before each: median seconds that the engine stops, and bytes of the last."""
        stopped, num_bytes = [], 0.0
        for _ in range(count):
            self._version += 1
            await self._workers[0].call("change", changed, timeout_s=self._scale.wait_s)
            report = await publisher.publish(self._version)
            measured = await publisher.measured(report)
            stopped.append(measured["sync/load_s"])
            num_bytes = measured["sync/bytes"]
        return {"stopped_s": statistics.median(stopped), "bytes": num_bytes}


@contextmanager
def _engine(scale: Scale) -> Iterator[Proxy]:
    """vLLM in a process of its own, which is ended."""
    settings = {
        "model_path": str(folder_of(scale.models[0], scale)),
        "dtype": scale.dtype,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "gpu_memory_utilization": 0.5,
        "kv_cache_bytes": CACHE_BYTES if scale.on_cuda else CPU_CACHE_BYTES,
        "threads": None if scale.on_cuda else 1,
        "start_timeout_s": 4 * scale.wait_s,
    }
    scale.begin("start of the engine")
    with served(context(), serve, [(settings,)]) as (ours,):
        yield Proxy(ours, 4 * scale.wait_s)
