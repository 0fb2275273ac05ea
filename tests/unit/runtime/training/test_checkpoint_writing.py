"""How a rank divides a checkpoint into files, and what it does where CUDA page-locks no memory."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rljob_runtime.cluster import ports
from rljob_runtime.training import checkpoint
from rljob_runtime.training.checkpoint import CheckpointWriter, State
from rljob_runtime.training.checkpoint_writing import PiecewiseWriter, pieces, size_bytes
from rljob_runtime.training.meeting import form_group


def item(number: int, length: int, whole: int) -> WriteItem:
    """Of a float32 tensor of shape (whole,), whose first ``length`` numbers this rank has."""
    data = TensorWriteData(
        chunk=ChunkStorageMetadata(offsets=torch.Size([0]), sizes=torch.Size([length])),
        properties=TensorProperties(dtype=torch.float32),
        size=torch.Size([whole]),
    )
    return WriteItem(index=MetadataIndex(f"t{number}"), type=WriteItemType.SHARD, tensor_data=data)


@given(lengths=st.lists(st.integers(0, 300), max_size=40), min_files=st.integers(1, 5), file_bytes=st.integers(100, 2000))
def test_files_hold_everything_once_and_are_of_limited_size(lengths: list[int], min_files: int, file_bytes: int) -> None:
    items = [item(number, length, 8 * length) for number, length in enumerate(lengths)]
    files = pieces(items, min_files, file_bytes)
    assert sorted(i.index.fqn for file in files for i in file) == sorted(i.index.fqn for i in items)
    sizes = [sum(map(size_bytes, file)) for file in files]
    largest = max(map(size_bytes, items), default=0)
    assert max(sizes) <= file_bytes + largest, "each file was the emptiest when it got its last tensor"


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one rank."""
    with contextlib.ExitStack() as leaving:
        form_group(torch.device("cpu"), "127.0.0.1", ports.held_port("127.0.0.1"), rank=0, world_size=1, timeout_s=20.0)
        leaving.callback(dist.destroy_process_group)
        yield


@pytest.mark.usefixtures("alone")
def test_many_files_are_read_as_one_checkpoint(tmp_path: Path) -> None:
    state = {f"w{number}": torch.randn(number + 1, 40) for number in range(9)}
    save(dict(state), storage_writer=PiecewiseWriter(tmp_path, threads=2, file_bytes=1000))
    assert len(list(tmp_path.glob("__0_*.distcp"))) == 8, "7,200 bytes"
    read = {name: torch.empty_like(tensor) for name, tensor in state.items()}
    load(read, checkpoint_id=tmp_path)
    assert all(torch.equal(read[name], tensor) for name, tensor in state.items())


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_file_that_a_further_thread_cannot_write_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch ends that thread in silence, and would call the rest a checkpoint."""
    files = PiecewiseWriter(tmp_path, threads=1).fs
    first, has_failed = threading.current_thread(), threading.Event()
    whole = type(files).create_stream

    @contextlib.contextmanager
    def stream(own: Any, path: Path, mode: str) -> Iterator[Any]:
        if threading.current_thread() is not first:
            has_failed.set()
            raise OSError(28, "No space left on device")
        assert has_failed.wait(20.0)
        with whole(own, path, mode) as file:
            yield file

    monkeypatch.setattr(type(files), "create_stream", stream)
    with pytest.raises(CheckpointException, match="1 of 9 tensors were not written"):
        save({f"w{n}": torch.randn(40) for n in range(9)}, storage_writer=PiecewiseWriter(tmp_path, threads=2, file_bytes=160))


class Refusing(DefaultStager):
    """Torch's, where CUDA page-locks no memory."""

    def __init__(self, options: StagingOptions) -> None:
        self._locks = options.use_pinned_memory
        super().__init__(dataclasses.replace(options, use_pinned_memory=False, use_non_blocking_copy=False))

    def stage(self, state_dict: State, **options: Any) -> Any:
        """The copy, or the error of torch."""
        if self._locks:
            raise RuntimeError("Registering memory failed with cudaError: 2.")
        return super().stage(state_dict, **options)


@pytest.mark.usefixtures("alone")
def test_without_page_locked_memory_a_checkpoint_is_copied_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(checkpoint, "DefaultStager", Refusing)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: None)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    writer = CheckpointWriter(torch.device("cuda"))
    with caplog.at_level(logging.WARNING):
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            writer.begin(tmp_path / name, model, optimizer, {})
            assert writer.finish(20.0)
    assert caplog.text.count("pageable memory, because CUDA page-locked none: Registering memory failed") == 1
