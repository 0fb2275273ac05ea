"""Reads torch's distributed checkpoints without executing anything that somebody put into them.

Torch keeps the plan of a checkpoint, ``.metadata``, as a pickle, and unpickles it and everything that is no tensor without limits. Whoever
may write to a checkpoint's volume could run code in the trainer. Here the plan may consist of the few classes that torch's writer uses,
other values are what ``torch.load(weights_only=True)`` allows, and files lie in the checkpoint's folder.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

METADATA = ".metadata"
"""The file of the plan, as torch names it."""
_DCP = "torch.distributed.checkpoint"
ALLOWED = frozenset(
    {
        ("collections", "OrderedDict"),
        ("pathlib", "PosixPath"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        (f"{_DCP}.filesystem", "_StorageInfo"),
        *(
            (f"{_DCP}.metadata", name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
    }
)
"""Module and name of what a plan may use, besides torch's dtypes: frozen data, and functions that only look something up."""


class _PlanUnpickler(pickle.Unpickler):
    """Refuses whatever is not in ``ALLOWED``."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if (module, name) in ALLOWED or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"{METADATA} refers to {module}.{name}, which no checkpoint has: somebody changed it, and it was not executed"
        )


def _member(kind: object, name: str) -> _MEM_FORMAT_ENCODING:
    """What Python before 3.11.4 pickles members of an enumeration as: ``getattr(kind, name)``; nothing but that is got."""
    if kind is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise pickle.UnpicklingError(f"{METADATA} asks for {name!r} of {kind!r}, which no checkpoint does: it was not got")
    return _MEM_FORMAT_ENCODING[name]


class CheckedReader(FileSystemReader):
    """Torch's reader with a checked plan."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The plan.

        Raises:
            OSError: it cannot be read.
            pickle.UnpicklingError: it refers to something else than a plan does, or to files elsewhere.
        """
        with (Path(self.path) / METADATA).open("rb") as file:
            metadata = _PlanUnpickler(file).load()
        if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
            raise pickle.UnpicklingError(f"{METADATA} holds no plan of a checkpoint")
        for info in metadata.storage_data.values():
            if Path(info.relative_path).name != info.relative_path or info.transform_descriptors:
                raise pickle.UnpicklingError(f"{METADATA} refers to {info.relative_path!r}, which is no plain file of the checkpoint")
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class TensorsPlanner(DefaultLoadPlanner):
    """Torch's planner, whose values that are no tensors are numbers, strings and containers of them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take one such value.

        Raises:
            pickle.UnpicklingError: it is something else.
        """
        set_element(self.original_state_dict, self.mappings[read_item.dest_index.fqn], torch.load(value, weights_only=True))
