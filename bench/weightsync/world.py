"""Trainer ranks and engines whose models are plain memory, each a process; all that lies between them is a job's."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import ray
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from rljob_runtime.cluster.host import WorkerHost
from rljob_runtime.cluster.ray_cluster import CALLS, WATCH, RayWorker
from rljob_runtime.records import Bucket, OnRunning, WeightManifest
from rljob_runtime.training.parallel import Layout, make_layout
from rljob_runtime.training.weights import pack_buckets
from rljob_runtime.weightsync.checkpoint_names import NamedPart
from rljob_runtime.weightsync.packing import pack, unpack
from rljob_runtime.weightsync.parcel import Held, checksum, view
from rljob_runtime.weightsync.patching import Places, Region, write_changes
from rljob_runtime.weightsync.sending import SendingRank
from rljob_runtime.weightsync.transport import ByteArray, IncomingUpdate, Receiver, make_end

LAYER_BYTES = 8 << 20
ENGINES = 2


def specs(size_bytes: int) -> list[tuple[str, str, tuple[int, ...]]]:
    """bfloat16 tensors of that size together, up to 8 MiB each."""
    each = min(LAYER_BYTES, size_bytes)
    return [(f"model.layers.{i}.weight", "bfloat16", (each // 2048, 1024)) for i in range(size_bytes // each)]


class Member:
    """Takes part in bare broadcasts."""

    def meet(self, host: str, port: int, rank: int, number: int) -> None:
        """A process group of everybody, in which the trainer is first."""
        dist.init_process_group("gloo", init_method=f"tcp://{host}:{port}", rank=rank, world_size=number)

    def broadcast(self, size_bytes: int) -> None:
        """All weights of a model of that size from the first member to the others."""
        for tensor in self.broadcast_from_or_into(size_bytes):
            dist.broadcast(tensor.view(-1).view(torch.uint8), 0)

    def broadcast_from_or_into(self, size_bytes: int) -> list[torch.Tensor]:
        """Contiguous tensors, as many and as large on all members."""
        raise NotImplementedError


class Trainer(SendingRank, Member):
    """Packs what a step has changed; several ranks hold rows of every tensor each, and gather them as a job's do."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        """Without weights."""
        torch.set_num_threads(1)
        self.rank, self.world_size = rank, world_size
        self._tensors: dict[str, torch.Tensor] = {}
        self._model: Rows | None = None

    def join(self, host: str, port: int) -> None:
        """The process group of all ranks."""
        dist.init_process_group("gloo", init_method=f"tcp://{host}:{port}", rank=self.rank, world_size=self.world_size)

    def take_model(self, size_bytes: int) -> None:
        """Weights of another size."""
        random = torch.Generator().manual_seed(0)
        self._tensors = {
            name: torch.randint(-(2**15), 2**15, shape, generator=random, dtype=torch.int16)
            .view(torch.bfloat16)
            .chunk(self.world_size)[self.rank]
            for name, _, shape in specs(size_bytes)
        }
        if self.world_size > 1:
            self._model = Rows(self._tensors, make_layout(torch.device("cpu")))

    def step(self, changed: float) -> None:
        """Change the lowest bit of a part of all numbers, evenly spread."""
        for tensor in self._tensors.values():
            bits = tensor.view(torch.int16).view(-1)
            bits[:: max(round(1 / changed), 1)] ^= 1

    def pack_buckets(
        self, buckets: Mapping[int, Bucket], out: ByteArray | None = None, on_packed: Callable[[int], None] | None = None
    ) -> ByteArray | None:
        """As a trainer rank does."""
        if self._model is not None:
            return cast("ByteArray | None", pack_buckets(cast(Any, self._model), buckets, out, on_packed))
        bucket = buckets[self.rank]
        out = np.zeros(bucket.size_bytes, dtype=np.uint8) if out is None else out
        pack(bucket, self._tensors, out, on_packed)
        return out

    def broadcast_from_or_into(self, size_bytes: int) -> list[torch.Tensor]:
        """Its weights."""
        return list(self._tensors.values())

    def write(self, path: str) -> None:
        """All weights as a safetensors file."""
        from safetensors.torch import save_file

        save_file(self._tensors, path)

    def objects(self) -> dict[str, torch.Tensor]:
        """All weights as objects, for Ray to pickle."""
        return self._tensors


class Rows:
    """What the packing of a trainer rank asks of its model: parameters of which this rank has rows."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], layout: Layout) -> None:
        """Tensors of all ranks together are the whole ones."""
        self.layout = layout
        shapes = {name: (tensor.shape[0] * layout.mesh.size(), *tensor.shape[1:]) for name, tensor in tensors.items()}
        self.checkpoint_parts = {name: NamedPart(parameter=name, shape=shape) for name, shape in shapes.items()}
        self._parameters = [
            (name, torch.nn.Parameter(DTensor.from_local(tensor, layout.mesh, [Shard(0)], run_check=False), requires_grad=False))
            for name, tensor in tensors.items()
        ]

    def named_parameters(self) -> Sequence[tuple[str, torch.nn.Parameter]]:
        """In order of the model."""
        return self._parameters

    def named_buffers(self) -> Sequence[tuple[str, torch.Tensor]]:
        """It has none."""
        return ()

    def get_submodule(self, name: str) -> torch.nn.Module:
        """No layer has adapters."""
        del name
        return torch.nn.Identity()


class Engine(Member):
    """Copies what comes into its own memory: the part of a load that every engine has."""

    def __init__(self) -> None:
        """Without weights."""
        torch.set_num_threads(1)
        self._weights: dict[int, ByteArray] = {}
        self._objects: dict[str, torch.Tensor] = {}
        self._broadcast: list[torch.Tensor] = []
        self._receiver: Receiver | None = None
        self._incoming: IncomingUpdate | None = None
        self._opened_s: float | None = None
        self._stood_s = 0.0
        self._bytes = 0

    def prepare_receiver(self, receiver: str, settings: Mapping[str, Any]) -> None:
        """As an engine does."""
        self._weights, self._objects, self._broadcast = {}, {}, []
        if self._receiver is not None:
            self._receiver.close()
        made: Receiver = make_end(receiver, **settings)
        for test in made.tests:
            view(test)
        self._receiver = made

    def begin_update(self, manifest: WeightManifest, version: int) -> None:
        """As an engine does."""
        assert self._receiver is not None
        self._incoming, self._opened_s = self._receiver.begin(manifest, version, None), None

    def load_bucket(self, index: int, data: Any) -> None:
        """As an engine does."""
        assert self._incoming is not None
        self._incoming.take(index, data)
        if self._incoming.streams:
            self._load()

    def finish_update(self, timeout_s: float, on_running: OnRunning) -> int:
        """As an engine does."""
        assert self._incoming is not None
        self._load()
        assert self._opened_s is not None
        self._stood_s, self._bytes = time.perf_counter() - self._opened_s, self._incoming.received_bytes
        return self._incoming.version

    def update(self, manifest: WeightManifest, version: int, timeout_s: float, on_running: OnRunning, *parts: Any) -> int:
        """As an engine does."""
        self.begin_update(manifest, version)
        for index, data in enumerate(parts):
            self.load_bucket(index, data)
        return self.finish_update(timeout_s, on_running)

    def stats(self) -> dict[str, float]:
        """As an engine does."""
        return {"update_s": self._stood_s, "update_bytes": float(self._bytes)}

    def weights(self) -> list[int]:
        """A checksum of each bucket."""
        return [checksum(data) for _, data in sorted(self._weights.items())]

    def broadcast_from_or_into(self, size_bytes: int) -> list[torch.Tensor]:
        """Memory of its own, kept from one call to the next."""
        wanted = [shape for _, _, shape in specs(size_bytes)]
        if [tuple(tensor.shape) for tensor in self._broadcast] != wanted:
            self._weights, self._objects = {}, {}
            self._broadcast = [torch.zeros(shape, dtype=torch.bfloat16) for shape in wanted]
        return self._broadcast

    def read(self, path: str, _written: None) -> None:
        """Weights of a safetensors file."""
        from safetensors.torch import load_file

        self._keep(load_file(path))

    def take(self, objects: Mapping[str, torch.Tensor]) -> None:
        """Weights that came as objects."""
        self._keep(objects)

    def _keep(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._weights, self._broadcast = {}, []
        for name, tensor in tensors.items():
            if name not in self._objects:
                self._objects[name] = torch.empty_like(tensor)
            self._objects[name].copy_(tensor)

    def _load(self) -> None:
        assert self._incoming is not None
        if self._opened_s is None:
            self._opened_s = time.perf_counter()
        for bucket, payload in self._incoming.receive(time.monotonic() + 600):
            if isinstance(payload, Held) and payload.changes is not None and bucket.index in self._weights:
                write_changes(self._places(bucket), bucket, view(payload.changes))
                continue
            data = view(payload)
            if bucket.index not in self._weights:
                self._weights[bucket.index] = np.empty(data.size, dtype=np.uint8)
            np.copyto(self._weights[bucket.index], data)

    def _places(self, bucket: Bucket) -> Places:
        """Each tensor as a parameter of its own, in this engine's memory."""
        found = {}
        for name, tensor in unpack(bucket, self._weights[bucket.index]):
            region = Region.of(tensor.shape, 0, tensor.stride(), 0, tensor.stride())
            assert region is not None
            found[name] = [(tensor, region)]
        return found


def start(
    kind: str,
    count: int,
    folder: Path,
    *,
    nodes: Sequence[str] = (),
    settings: Sequence[Mapping[str, Any]] = (),
    env: Mapping[str, str] | None = None,
) -> list[RayWorker]:
    """Workers of a class of this module, each in a process.

    Args:
        kind: of the class.
        count: how many.
        folder: for their logs; made where it is not there.
        nodes: a Ray resource of the node of each, as many as workers; anywhere when empty.
        settings: arguments of each; none when empty.
        env: variables of their processes.
    """
    folder.mkdir(exist_ok=True)
    host = ray.remote(concurrency_groups={CALLS: 1, WATCH: 1})(WorkerHost)
    workers = []
    for index in range(count):
        name, given = f"{kind}-{index}", dict(settings[index]) if settings else {}
        log = str(folder / f"{name}.log")
        made = host.options(num_cpus=0, resources={nodes[index]: 0.001} if nodes else {})
        workers.append(RayWorker(name, log, made.remote(name, f"{__name__}:{kind}", given, dict(env or {}), log)))
    return workers
