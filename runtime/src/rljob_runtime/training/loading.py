"""Weights of a sharded model, read by each process from the checkpoint's files: its own shard and nothing else.

::

    without_weights ── model: parameters on "meta", buffers real ── adapters, tensor parallelism, FSDP ──> shards on "meta"
    WeightFiles.find ── which file has which name ──────────────────────────────────────────────> fill: allocate, read slices

So host memory never holds more than the shards of its processes, where a whole model in each of them would be 4 bytes a parameter and
process; and every byte of the checkpoint is read once by each group of processes that divides it. Files are mapped: their pages are the
page cache's, shared by the processes of a node and reclaimable.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import PreTrainedModel

from rljob_runtime.errors import ModelError
from rljob_runtime.training.parallel import local_tensor
from rljob_runtime.weightsync.checkpoint_names import NamedPart

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

Region = tuple[slice, ...]
"""One slice for each dimension, with a start and a stop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A block of a checkpoint's tensor, and where it goes in this process's shard of a parameter."""

    name: str
    source: Region
    target: tuple[slice | int, ...]
    """An expert's number and two slices, where the file has a matrix for each expert."""


@contextmanager
def without_weights() -> Iterator[None]:
    """Parameters that modules get inside the block have no memory; buffers are computed as ever. For one thread at a time."""
    register = nn.Module.register_parameter

    def register_without_memory(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:  # one that has been here stays the same object: it may be tied
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_without_memory  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class WeightFiles:
    """The safetensors files of a checkpoint's folder."""

    def __init__(self, folder: Path, files: Mapping[str, str]) -> None:
        """``files``: name in the checkpoint -> file in ``folder``."""
        self.folder = folder
        self._files = files

    @classmethod
    def find(cls, folder: Path) -> WeightFiles | None:
        """Those of a folder; None where its weights are in files of another kind.

        Raises:
            ModelError: a file cannot be read.
        """
        try:
            if (folder / INDEX).is_file():
                return cls(folder, json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"])
            if (folder / SINGLE).is_file():
                with safe_open(folder / SINGLE, framework="pt") as file:
                    return cls(folder, dict.fromkeys(file.keys(), SINGLE))
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise ModelError(f"model folder {folder}: its weights cannot be read: {type(error).__name__}: {error}") from error
        return None

    def missing(self, parts: Collection[str], model: PreTrainedModel) -> list[str]:
        """Names that no file has, of a model's parameters (``parts``) and buffers."""
        return sorted({*parts, *_persistent_buffers(model)} - self._files.keys())

    def fill(self, model: PreTrainedModel, device: torch.device) -> None:
        """Allocate what the model has on "meta" and read it.

        Args:
            model: sharded; carries ``checkpoint_parts``.
            device: where its shards go.

        Raises:
            ModelError: a tensor of a file has another shape than the model, or cannot be read.
        """
        empty = {name for name, parameter in model.named_parameters() if parameter.is_meta}
        model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
        parts: dict[str, list[tuple[str, NamedPart]]] = {}
        for name, part in model.checkpoint_parts.items():
            parts.setdefault(part.parameter, []).append((name, part))
        with ExitStack() as stack, torch.no_grad():
            reader = _Reader(self.folder, self._files, stack)
            for name, parameter in model.named_parameters():
                if name in empty:
                    reader.read(parts[name], parameter)
            for name, buffer in _persistent_buffers(model).items():
                buffer.copy_(reader.block(name, tuple(buffer.shape), tuple(slice(0, size) for size in buffer.shape)))


class _Reader:
    """Files that are opened when something of them is needed."""

    def __init__(self, folder: Path, files: Mapping[str, str], stack: ExitStack) -> None:
        self._folder = folder
        self._files = files
        self._stack = stack
        self._open: dict[str, Any] = {}

    def read(self, parts: Sequence[tuple[str, NamedPart]], parameter: nn.Parameter) -> None:
        """Copy what the checkpoint has for this process's shard into it."""
        sizes, offsets = tuple(parameter.shape), (0,) * parameter.ndim
        if isinstance(parameter, DTensor):
            sizes, offsets = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
        local = local_tensor(parameter)
        shapes = {name: part.shape for name, part in parts}
        for piece in pieces(parts, tuple(parameter.shape), sizes, offsets):
            block = self.block(piece.name, shapes[piece.name], piece.source)
            local[piece.target].copy_(block.to(local.device))  # cast there: the host's cores are slower, and float32 travels twice as long

    def block(self, name: str, shape: tuple[int, ...], region: Region) -> torch.Tensor:
        """A block of a tensor of this shape, in the file's dtype."""
        file = self._files[name]
        try:
            if file not in self._open:
                self._open[file] = self._stack.enter_context(safe_open(self._folder / file, framework="pt"))
            found = self._open[file].get_slice(name)
            if tuple(found.get_shape()) != shape:
                raise ModelError(
                    f"model folder {self._folder}: {name} in {file} has shape {tuple(found.get_shape())}, but the model of config.json "
                    f"has {shape}; config.json and weights are of different models"
                )
            block: torch.Tensor = found[region] if region else self._open[file].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"model folder {self._folder}: {name} cannot be read from {file}: {error}") from error
        return block


def pieces(parts: Sequence[tuple[str, NamedPart]], shape: tuple[int, ...], sizes: Sequence[int], offsets: Sequence[int]) -> Iterator[Piece]:
    """What of the checkpoint is in a block of a parameter.

    Args:
        parts: of the parameter, by their names in the checkpoint.
        shape: of the parameter.
        sizes: of the block; one of them may be 0.
        offsets: where the block begins.
    """
    for name, part in parts:
        starts, lengths = (0,) * len(shape), shape
        if part.expert is not None:
            starts, lengths = (part.expert, part.first_row, 0), (1, *part.shape)
        begins = [max(start, offset) for start, offset in zip(starts, offsets, strict=True)]
        ends = [min(start + length, offset + size) for start, length, offset, size in zip(starts, lengths, offsets, sizes, strict=True)]
        if any(begin >= end for begin, end in zip(begins, ends, strict=True)):
            continue
        source = [slice(begin - start, end - start) for begin, end, start in zip(begins, ends, starts, strict=True)]
        target: list[slice | int] = [slice(begin - offset, end - offset) for begin, end, offset in zip(begins, ends, offsets, strict=True)]
        if part.expert is not None:  # the file has a matrix for each expert
            del source[0]
            target[0] = begins[0] - offsets[0]
        yield Piece(name=name, source=tuple(source), target=tuple(target))


def _persistent_buffers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Buffers that a checkpoint has."""
    passing = {
        f"{prefix}.{name}" if prefix else name for prefix, module in model.named_modules() for name in module._non_persistent_buffers_set
    }
    return {name: buffer for name, buffer in model.named_buffers() if name not in passing}
