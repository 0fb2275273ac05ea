"""The plan of a checkpoint is read whichever Python wrote it, and asks for nothing but what a plan has."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from rljob_runtime.training.checkpoint_reading import METADATA, CheckedReader

SIZE = torch.Size([2])
PLAN = Metadata(
    state_dict_metadata={
        "weight": TensorStorageMetadata(TensorProperties(torch.float32), SIZE, [ChunkStorageMetadata(offsets=torch.Size([0]), sizes=SIZE)])
    },
    storage_data={MetadataIndex("weight"): _StorageInfo("__0_0.distcp", 0, 8)},
)


class OldPickler(pickle.Pickler):
    """Pickles members of enumerations as Python 3.11.2, that of Debian 12, does."""

    def reducer_override(self, value: Any) -> Any:
        return (getattr, (type(value), value.name)) if isinstance(value, _MEM_FORMAT_ENCODING) else NotImplemented


class Getting:
    """Asks for an attribute where it is unpickled without limits."""

    def __init__(self, owner: object, name: str) -> None:
        self.owner, self.name = owner, name

    def __reduce__(self) -> tuple[object, tuple[object, str]]:
        return getattr, (self.owner, self.name)


def test_a_plan_of_an_older_python_is_read(tmp_path: Path) -> None:
    written = io.BytesIO()
    OldPickler(written).dump(PLAN)
    assert b"getattr" in written.getvalue()
    (tmp_path / METADATA).write_bytes(written.getvalue())
    assert CheckedReader(tmp_path).read_metadata().state_dict_metadata == PLAN.state_dict_metadata


@pytest.mark.parametrize("asked", [Getting(_MEM_FORMAT_ENCODING, "__class__"), Getting(Metadata, "__init__"), Getting("text", "join")])
def test_nothing_else_is_got(tmp_path: Path, asked: Getting) -> None:
    (tmp_path / METADATA).write_bytes(pickle.dumps(asked))
    with pytest.raises(pickle.UnpicklingError, match=r"was not got"):
        CheckedReader(tmp_path).read_metadata()
