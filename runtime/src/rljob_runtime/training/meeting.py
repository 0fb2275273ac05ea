"""Where the ranks of a process group meet: rank 0's store, on the port that its process has held since it was chosen.

A port that is only known to be free can be another job's, or another group's of the same job, when torch listens on it.
"""

from __future__ import annotations

import datetime
import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from rljob_runtime.addresses import host_and_port
from rljob_runtime.cluster.ports import take_listener

C10D: Any = dist
"""Torch's annotations leave out its stores."""
_formed = itertools.count()
"""Groups of this process so far. Torch 2.13 splits a group with a bound device into those of a mesh, and reads beyond an empty list then
(signal 11) if the process had a group of NCCL before, even a destroyed one: https://github.com/pytorch/pytorch/pull/192109."""


def form_group(device: torch.device, host: str, port: int, *, rank: int, world_size: int, timeout_s: float) -> None:
    """Join the other ranks; returns when all are there.

    Only the first group of a process binds the device: NCCL then connects at once, and a mesh splits that communicator. Later groups, after
    a setup that failed, connect with their first collective, on the current device.

    Args:
        device: that this rank computes on.
        host: address of rank 0, as all ranks have it.
        port: of the group.
        rank: of this process.
        world_size: number of ranks.
        timeout_s: deadline of the rendezvous and of every later collective.
    """
    is_first = next(_formed) == 0
    with meeting_store(host, port, timeout_s):
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=f"tcp://{host_and_port(host, port)}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" and is_first else None,
        )


@contextmanager
def meeting_store(host: str, port: int, timeout_s: float) -> Iterator[Any]:
    """For the block, serve the port if this process holds it: the store, which ``init_process_group`` with ``tcp://`` finds, or None.

    Args:
        host: address of rank 0, as all ranks have it.
        port: of the group.
        timeout_s: deadline of the rendezvous.
    """
    listener = take_listener(port)
    if listener is None:  # of another rank, or of a caller that has chosen the port itself
        yield None
        return
    with listener:
        held = os.dup(listener.fileno())  # the store closes what it gets
        store = C10D.TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=held,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        yield store  # alive until the end of the block, whether or not the caller keeps it
