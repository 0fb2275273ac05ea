"""``python -m bench.weightsync``: measure, write ``bench/results/weightsync.json``, ``.md`` and ``.svg``."""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray

import bench.weightsync
from bench.measure import machine, write_results
from bench.pairs import PAIRS, ratios
from bench.weightsync.bare import bare_s
from bench.weightsync.report import COMPARED, OWN, SPARSE, draw, headline, markdown
from bench.weightsync.world import ENGINES, specs, start
from rljob_runtime.cluster.ports import group_port
from rljob_runtime.cluster.protocol import gather_all
from rljob_runtime.cluster.ray_cluster import RayWorker
from rljob_runtime.weightsync.packing import plan_buckets
from rljob_runtime.weightsync.probe import ProbeLimits
from rljob_runtime.weightsync.publisher import ProbeConfig, WeightPublisher
from rljob_runtime.weightsync.shared_memory import prefix_of, remove
from rljob_runtime.weightsync.shares import bucket_bytes
from rljob_runtime.weightsync.transport import Transport, TransportSettings
from rljob_runtime.weightsync.transports.collective import NcclTransport, TcpTransport
from rljob_runtime.weightsync.transports.ipc import IpcTransport
from rljob_runtime.weightsync.transports.object_store import ObjectStoreTransport
from rljob_runtime.weightsync.transports.shared_memory import SharedMemoryTransport

SIZES_MIB = (1, 16, 128, 512, 1024, 2048)
CHANGED = (0.001, 0.01, 0.03, 0.1, 0.2, 1.0)
BUCKET_BYTES = 256 << 20
"""The default of ``weightSync.bucketBytes``."""
COPIES = 14
"""Of all weights at one time at most: trainer, engines, store, what pickling takes; sizes that do not fit are left out."""
TIMEOUT_S = 300.0
TRANSPORTS: Mapping[str, tuple[Callable[[TransportSettings], Transport], bool]] = {
    "SharedMemory, engines at rest": (SharedMemoryTransport, False),
    "SharedMemory, engines generate": (SharedMemoryTransport, True),
    "ObjectStore": (ObjectStoreTransport, True),
    "TCP": (TcpTransport, True),
    "NCCL's, over gloo": (NcclTransport, False),
    "IPC's, between processes": (IpcTransport, False),
}
"""And whether engines generate meanwhile. Without GPUs, NCCL and IPC are what their transports do between processes of the host."""


def main() -> int:
    """Measure, write, and print the markdown."""
    parser = argparse.ArgumentParser(prog="python -m bench.weightsync", description=bench.weightsync.__doc__)
    parser.add_argument("--largest", type=int, choices=SIZES_MIB, default=SIZES_MIB[-1], help="MiB of the largest model")
    parser.add_argument("--sparse", type=int, default=256, help="MiB of the model of which parts change")
    parser.add_argument("--repeat", type=int, default=7)
    args = parser.parse_args()
    started = time.monotonic()
    values: dict[str, Any] = {"machine": machine(("torch", "ray", "safetensors", "xxhash")), "load_before": os.getloadavg()[0]}
    values |= {"repeat": args.repeat, "engines": ENGINES, "bucket_bytes": BUCKET_BYTES, "sparse_mib": args.sparse}
    values |= measure([mib for mib in SIZES_MIB if mib <= args.largest], args.sparse, args.repeat)
    values["duration_s"] = time.monotonic() - started
    values["headline"] = headline(values)
    text = markdown(values)
    write_results("weightsync", values, text)
    draw(values)
    sys.stdout.write(text)
    return 0


def measure(sizes_mib: list[int], sparse_mib: int, repeat: int) -> dict[str, Any]:
    """Rows by size and by what changed."""
    free = psutil.virtual_memory().available
    fitting = [mib for mib in sizes_mib if mib * COPIES << 20 < free]
    for mib in sizes_mib[len(fitting) :]:
        sys.stderr.write(f"{mib} MiB: left out, it needs {mib * COPIES / 1024:.0f} GiB of memory and {free / 2**30:.0f} are free\n")
    with tempfile.TemporaryDirectory() as folder:
        store_bytes = (max(fitting) << 20) + (1 << 30)
        ray.init(address="local", num_cpus=2, object_store_memory=store_bytes, include_dashboard=False, log_to_driver=False)
        try:
            return asyncio.run(_measure(fitting, sparse_mib, repeat, Path(folder)))
        finally:
            ray.shutdown()
            remove(prefix_of(f"bench{os.getpid()}"))


async def _measure(sizes_mib: list[int], sparse_mib: int, repeat: int, folder: Path) -> dict[str, Any]:
    [trainer], engines = start("Trainer", 1, folder), start("Engine", ENGINES, folder)
    for worker in (trainer, *engines):
        await worker.started(TIMEOUT_S)
    port = group_port("127.0.0.1")
    members = [worker.start("meet", "127.0.0.1", port, rank, 1 + len(engines)) for rank, worker in enumerate((trainer, *engines))]
    await gather_all(members, TIMEOUT_S)
    sizes, changes = [], []
    for mib in sizes_mib:
        await trainer.call("take_model", mib << 20, timeout_s=TIMEOUT_S)
        limit_s = await asyncio.to_thread(bare_s, mib << 20, BUCKET_BYTES, len(engines), repeat)
        row: dict[str, Any] = {"mib": mib, "memcpy_s": memcpy_s(mib << 20, repeat), "bare_s": limit_s}
        for name, (make, generates) in TRANSPORTS.items():
            if name != OWN:
                row[name] = await syncs([trainer], engines, make, generates, mib << 20, repeat)
        row["broadcast"] = await _fastest(partial(_by_broadcast, trainer, engines, mib << 20), repeat)
        row |= await _in_pairs(trainer, engines, folder, mib << 20, repeat)
        sizes.append(row)
        took = {way: found["seconds"] for way, found in row.items() if isinstance(found, dict) and "seconds" in found}
        sys.stderr.write(f"{mib} MiB: " + ", ".join(f"{way} {seconds:.3f} s" for way, seconds in took.items()) + "\n")
    await trainer.call("take_model", sparse_mib << 20, timeout_s=TIMEOUT_S)
    for changed in CHANGED:
        row = {"changed": changed}
        for name, (make, generates) in ((name, TRANSPORTS[name]) for name in SPARSE):
            for kind, dense_above in (("dense", None), ("sparse", 1.0)):
                row[f"{name}, {kind}"] = await syncs(
                    [trainer], engines, make, generates, sparse_mib << 20, repeat, changed=changed, dense_above=dense_above
                )
        changes.append(row)
        sys.stderr.write(f"{changed:.1%}: " + ", ".join(f"{k} {v['seconds']:.3f} s" for k, v in row.items() if isinstance(v, dict)) + "\n")
    return {"sizes": sizes, "changes": changes}


async def _in_pairs(trainer: RayWorker, engines: list[RayWorker], folder: Path, size_bytes: int, repeat: int) -> dict[str, Any]:
    """Our sync while engines generate, a file, and pickled objects in turn, several rounds of each."""
    make, generates = TRANSPORTS[OWN]
    each = -(-repeat // PAIRS)
    rounds: dict[str, list[dict[str, Any]]] = {way: [] for way in (OWN, *COMPARED)}
    for _ in range(PAIRS):
        rounds[OWN].append(await syncs([trainer], engines, make, generates, size_bytes, each))
        rounds["safetensors"].append(await _fastest(lambda: _by_file(trainer, engines, folder), each))
        rounds["objects"].append(await _fastest(lambda: _by_objects(trainer, engines), each))
    return paired(rounds)


def paired(rounds: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """All rounds of each way as one row of figures, and the ratio of the medians of each round by peer."""
    found: dict[str, Any] = {}
    for way, parts in rounds.items():
        all_s = [seconds for part in parts for seconds in part["all_s"]]
        found[way] = {**min(parts, key=lambda part: part["seconds"]), "all_s": all_s, "median_s": statistics.median(all_s)}
    medians = {way: [part["median_s"] for part in parts] for way, parts in rounds.items()}
    return found | {"ratios": {way: ratios(medians[OWN], medians[way]) for way in COMPARED}}


async def syncs(
    trainers: list[RayWorker],
    engines: list[RayWorker],
    make: Callable[[TransportSettings], Transport],
    generates: bool,
    size_bytes: int,
    repeat: int,
    *,
    changed: float = 1.0,
    dense_above: float | None = None,
    senders: tuple[int, ...] = (0,),
) -> dict[str, Any]:
    """The fastest of some syncs, the first two of which are not counted; engines hold the same afterwards."""
    settings = TransportSettings(
        run=f"bench{os.getpid()}",
        while_generating=generates,
        dense_above=dense_above,
        senders=senders,
        neighbors=tuple((0,) for _ in engines),
    )
    transport = make(settings)
    publisher = WeightPublisher(
        trainers=trainers,
        engines=engines,
        manifest=plan_buckets(specs(size_bytes), bucket_bytes(size_bytes, BUCKET_BYTES, len(trainers))),
        transport=transport,
        timeout_s=TIMEOUT_S,
        probe=ProbeConfig(every_syncs=0, limits=ProbeLimits(mean=1.0, tail=1.0), sequences=()),
        while_generating=generates,
    )
    found = []
    for version in range(1, repeat + 3):
        await gather_all([trainer.start("step", changed) for trainer in trainers], TIMEOUT_S)
        report = await publisher.publish(version)
        found.append({"seconds": report.elapsed_s} | await publisher.measured(report))
    sums = await gather_all([engine.start("weights") for engine in engines], TIMEOUT_S)
    if transport.warning is not None or any(one != sums[0] for one in sums):
        raise RuntimeError(f"{transport}: {transport.warning or 'engines hold different weights'}")
    await publisher.close()
    best = min(found[2:], key=lambda one: one["seconds"])
    names = (("seconds", "seconds"), ("stall_s", "sync/stall_s"), ("hidden_s", "sync/hidden_s"), ("bytes", "sync/bytes"))
    all_s = [one["seconds"] for one in found[2:]]
    return {key: best[name] for key, name in names} | {"median_s": statistics.median(all_s), "all_s": all_s}


async def _by_broadcast(trainer: RayWorker, engines: list[RayWorker], size_bytes: int) -> None:
    """Torch's broadcast over gloo, tensor by tensor, into memory that is there; nothing is packed or checked."""
    await gather_all([worker.start("broadcast", size_bytes) for worker in (trainer, *engines)], TIMEOUT_S)


async def _by_file(trainer: RayWorker, engines: list[RayWorker], folder: Path) -> None:
    """A safetensors file that engines read once it is written."""
    path = str(folder / "weights.safetensors")
    written = trainer.start("write", path)
    await gather_all([engine.start("read", path, written) for engine in engines], TIMEOUT_S)


async def _by_objects(trainer: RayWorker, engines: list[RayWorker]) -> None:
    """A state dict as Ray pickles it."""
    given = trainer.start("objects")
    await gather_all([engine.start("take", given) for engine in engines], TIMEOUT_S)


async def _fastest(run: Callable[[], Awaitable[None]], repeat: int) -> dict[str, Any]:
    """Seconds of some runs, the first of which is not counted."""
    seconds = []
    for _ in range(repeat + 1):
        started = time.perf_counter()
        await run()
        seconds.append(time.perf_counter() - started)
    return {"seconds": min(seconds[1:]), "median_s": statistics.median(seconds[1:]), "all_s": seconds[1:]}


def memcpy_s(size_bytes: int, repeat: int) -> float:
    """Seconds of one bare copy into memory that is there."""
    source, target = np.ones(size_bytes, dtype=np.uint8), np.zeros(size_bytes, dtype=np.uint8)
    seconds = []
    for _ in range(repeat + 1):
        started = time.perf_counter()
        np.copyto(target, source)
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])


if __name__ == "__main__":
    sys.exit(main())
