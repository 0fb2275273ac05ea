"""Where the ranks of a process group meet: rank 0's store, on the port that its process has held since it was chosen.

A port that is only known to be free can be another job's, or another group's of the same job, when torch listens on it.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Any

import psutil
import torch
import torch.distributed as dist

from rljob_runtime.addresses import family_of, host_and_port, source_address
from rljob_runtime.cluster.ports import take_listener
from rljob_runtime.lone_groups import share_loop_of_lone_groups

C10D: Any = dist
"""Torch's annotations leave out its stores."""


def form_group(device: torch.device, host: str, port: int, *, rank: int, world_size: int, timeout_s: float) -> None:
    """Join the other ranks; returns when all are there.

    No device is bound to the group. Torch 2.13 would split such a group for each dimension of a mesh, and read beyond an empty list then
    (signal 11) if the process had a group of NCCL before, even a destroyed one: https://github.com/pytorch/pytorch/pull/192109. So NCCL
    connects with the first collective, on the current device.

    Args:
        device: that this rank computes on.
        host: address of rank 0, as all ranks have it.
        port: of the group.
        rank: of this process.
        world_size: number of ranks.
        timeout_s: deadline of the rendezvous and of every later collective.
    """
    set_gloo_interface(host)
    share_loop_of_lone_groups()
    with meeting_store(host, port, timeout_s):
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=f"tcp://{host_and_port(host, port)}",
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
        )


def set_gloo_interface(host: str) -> None:
    """Have gloo use the network that leads to the other ranks, unless the user has chosen one.

    By default it uses that of the host's name: a loopback where /etc/hosts says ``127.0.1.1``, also in pods with hostNetwork.

    Args:
        host: address of rank 0.
    """
    own = source_address(family_of(host), host)
    names = [name for name, addresses in psutil.net_if_addrs().items() if any(a.address == own for a in addresses)]
    if names and own is not None and not ip_address(own).is_loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])


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
