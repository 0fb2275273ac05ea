"""How a rank leaves the others."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from rljob_runtime.training import rank


@pytest.mark.parametrize(("device", "expected"), [("cuda", "aborted"), ("cpu", "destroyed")])
def test_a_rank_that_cannot_be_set_up_waits_for_no_other(device: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's ranks of a node destroy a communicator together; gloo's each on its own."""
    done: list[str] = []
    monkeypatch.setattr(rank, "abort_process_group", lambda: done.append("aborted"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: done.append("destroyed"))
    rank.leave_alone(torch.device(device))
    assert done == [expected]
