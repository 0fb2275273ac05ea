"""How long a vLLM engine stops for full updates, loaded by vLLM or written into its parameters, and for sparse ones.

Through shared memory it generates until all has come, as in jobs on devices of their own. With CUDA IPC, whose bytes do not leave the
device, trainer and engine share it, and the time has the trainer's part in it: it packs and compares one bucket while the engine takes
another.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
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
from rljob_runtime.weightsync.transports.shared_memory import SharedMemoryTransport

NAME = "stall"
CHANGED = (0.001, 0.01, 0.1)
"""Parts of all numbers, evenly spread, that change before an update."""
BOUNDED = 0.01
LEAST_RATIO = 5.0
"""Of the time of a full update that vLLM loads to that of a sparse one of :data:`BOUNDED`, where the engine generates meanwhile."""
UNWRITTEN = 2
"""Full updates before the first that is written: one is recorded, one compared."""
DENSE_ABOVE = 0.5
CACHE_BYTES = 1 << 30
CPU_CACHE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A transport between the two."""

    title: str
    make: type[SharedMemoryTransport] | type[IpcTransport]
    while_generating: bool
    cpu_title: str
    """What it is on a machine without a GPU."""


WAYS = (
    Way(title="shared memory", make=SharedMemoryTransport, while_generating=True, cpu_title="shared memory"),
    Way(title="CUDA IPC", make=IpcTransport, while_generating=False, cpu_title="shared memory in place of CUDA IPC"),
)


def check(scale: Scale) -> Iterator[Line]:
    """Medians of full and of sparse updates by each transport, their ratios, and the bits that they leave."""
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
    for way in WAYS:
        yield from _lines(way, found[way.title], manifest, scale)
    yield Line(check=NAME, what="tensors of the model", value=found["tensors"], unit="tensors")


def _lines(way: Way, found: Mapping[str, Any], manifest: WeightManifest, scale: Scale) -> Iterator[Line]:
    loaded, written, name = found["loaded"], found["written"], way.title if scale.on_cuda else way.cpu_title
    size = f"{manifest.total_bytes / 2**20:.0f} MiB in {len(manifest.buckets)} buckets"
    yield Line(
        check=NAME, what=f"{name}: the engine is stopped, full update by vLLM's loaders, {size}", value=loaded["stopped_s"], unit="s"
    )
    yield Line(check=NAME, what=f"{name}: the engine is stopped, full update, written", value=written["stopped_s"], unit="s")
    ratio = loaded["stopped_s"] / written["stopped_s"]
    yield Line(check=NAME, what=f"{name}: vLLM's loaders to writing, full update", value=ratio, unit="times")
    for changed in CHANGED:
        what = changed_part(changed)
        sparse = found[what]
        note = f"{sparse['bytes'] / manifest.total_bytes:.2%} of the bytes"
        yield Line(check=NAME, what=f"{name}: the engine is stopped, {what}", value=sparse["stopped_s"], unit="s", note=note)
        ratio = loaded["stopped_s"] / sparse["stopped_s"]
        bound = scale.speed(LEAST_RATIO) if changed == BOUNDED and way.while_generating else None
        yield Line(
            check=NAME,
            what=f"{name}: full update by vLLM's loaders to sparse update, {what}",
            value=ratio,
            unit="times",
            compared=ratio,
            at_least=bound,
        )
    moved = found["moved"]
    yield Line(check=NAME, what=f"{name}: tensors that updates changed", value=moved, unit="tensors", compared=moved, at_least=1)
    what = f"{name}: tensors with other bits than vLLM's loaders leave"
    yield equal(NAME, what, found["differing"], note="after the last sparse one")


def changed_part(changed: float) -> str:
    """A part of all numbers, in words."""
    return f"{changed:.1%} changed"


async def _measured(holder: WeightHolder, engine: Any, manifest: WeightManifest, scale: Scale) -> dict[str, Any]:
    """By transport: full updates, sparse ones of every part, and the bits after the last of them and after a full one."""
    workers = InProcessWorker("trainer", holder), InProcessWorker("engine", engine)
    found: dict[str, Any] = {}
    warnings: list[str] = []
    version = 0
    try:
        for way in WAYS:
            updates = _Updates(workers, manifest, scale, way, version)
            found[way.title] = await _updated(updates, workers[1], scale, way)
            version, warnings = updates.version, warnings + updates.warnings
        found["tensors"] = float(len(await workers[1].call("bits", timeout_s=scale.wait_s)))
    finally:
        for worker in workers:
            worker.stop()
    return found | ({"warning": "; ".join(warnings)} if warnings else {})


async def _updated(updates: _Updates, engine: InProcessWorker, scale: Scale, way: Way) -> dict[str, Any]:
    """What one transport takes and leaves."""
    scale.begin(f"{way.title}: full updates by vLLM's loaders")
    await engine.call("forget_loads", False, timeout_s=scale.wait_s)
    publisher = updates.publisher(None)
    await updates.run(publisher, BOUNDED, 1)
    first = await engine.call("bits", timeout_s=scale.wait_s)
    found: dict[str, Any] = {"loaded": await updates.run(publisher, BOUNDED, scale.repeat * 2 - 1)}
    scale.begin(f"{way.title}: full updates, written")
    await engine.call("forget_loads", True, timeout_s=scale.wait_s)
    await updates.run(publisher, BOUNDED, UNWRITTEN)
    found["written"] = await updates.run(publisher, BOUNDED, scale.repeat * 2 - 1)
    written = await engine.call("bits", timeout_s=scale.wait_s)
    scale.begin(f"{way.title}: sparse updates")
    publisher = updates.publisher(DENSE_ABOVE)
    await updates.run(publisher, BOUNDED, DeviceDeltaEncoder.whole_first)
    for changed in CHANGED:
        await updates.run(publisher, changed, 1)
        found[changed_part(changed)] = await updates.run(publisher, changed, scale.repeat * 2 - 1)
    sparse = await engine.call("bits", timeout_s=scale.wait_s)
    scale.begin(f"{way.title}: full update by vLLM's loaders, and its bits")
    await engine.call("forget_loads", False, timeout_s=scale.wait_s)
    await updates.run(updates.publisher(None), 0.0, 1)
    full = await engine.call("bits", timeout_s=scale.wait_s)
    different = [name for name in full if sparse.get(name) != full[name]]
    moved = [name for name in sparse if first[name] != sparse[name] and written[name] != sparse[name]]
    return found | {"differing": float(len(different)), "moved": float(len(moved))}


class _Updates:
    """Versions of the weights, one after the other, through publishers of a job."""

    def __init__(
        self, workers: tuple[InProcessWorker, InProcessWorker], manifest: WeightManifest, scale: Scale, way: Way, version: int
    ) -> None:
        self.warnings: list[str] = []
        self.version = version
        """Of the last one."""
        self._workers, self._manifest, self._scale, self._way = workers, manifest, scale, way

    def publisher(self, dense_above: float | None) -> WeightPublisher:
        """One whose transport has not been prepared; None: every update is a full one."""
        run = f"stall{os.getpid()}"
        settings = TransportSettings(run=run, while_generating=self._way.while_generating, dense_above=dense_above, neighbors=((0,),))
        return WeightPublisher(
            trainers=self._workers[:1],
            engines=self._workers[1:],
            manifest=self._manifest,
            transport=self._way.make(settings),
            timeout_s=self._scale.wait_s,
            while_generating=self._way.while_generating,
            probe=ProbeConfig(every_syncs=0, limits=ProbeLimits(mean=1.0, tail=1.0), sequences=()),
            warn=self.warnings.append,
        )

    async def run(self, publisher: WeightPublisher, changed: float, count: int) -> dict[str, float]:
        """So many updates, a part of all numbers changed before each: median seconds that the engine stops, and bytes of the last."""
        stopped, num_bytes = [], 0.0
        for _ in range(count):
            self.version += 1
            await self._workers[0].call("change", changed, timeout_s=self._scale.wait_s)
            report = await publisher.publish(self.version)
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
