"""Buffers that engines read on the trainer's device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rljob_runtime.weightsync.transports import ipc

NUM_BYTES = 64


@pytest.fixture
def settings() -> Iterator[None]:
    """Of torch's allocator, as they were."""
    before = torch._C._accelerator_getAllocatorSettings()
    yield
    torch._C._accelerator_setAllocatorSettings(before)


@pytest.mark.usefixtures("settings")
@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ("max_split_size_mb:512", "max_split_size_mb:512"),
        ("expandable_segments:True,max_split_size_mb:512", "expandable_segments:False,max_split_size_mb:512"),
        ("max_split_size_mb:512,expandable_segments:False", "max_split_size_mb:512,expandable_segments:False"),
    ],
)
def test_buffers_are_in_no_expandable_segments_which_other_processes_cannot_open(
    chosen: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch._C._accelerator_setAllocatorSettings(chosen)
    zeros, found = torch.zeros, []

    def on_the_device(size: int, *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        found.append((torch._C._accelerator_getAllocatorSettings(), device))
        return zeros(size, dtype=dtype)

    monkeypatch.setattr(torch, "zeros", on_the_device)
    cuda = torch.device("cuda", 1)
    assert ipc.shared_buffer(NUM_BYTES, cuda).numel() == NUM_BYTES
    assert found == [(expected, cuda)]
    assert torch._C._accelerator_getAllocatorSettings() == chosen
