"""Gloo groups of a single process, in which nothing travels: one thread for all of them."""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist

SHARED = "shared_by_rljob"


def share_loop_of_lone_groups() -> None:
    """Give all later gloo groups of one process the same device of gloo; repeated calls do nothing.

    Torch makes a device for each group, and a device is a thread that wakes up a hundred times a second, whether or not anything
    travels (gloo, ``transport/tcp/loop.cc``). vLLM makes 13 groups for an engine on one device, and a mesh one for each of its
    dimensions. Groups of several processes keep devices of their own: their operations may run at the same time.
    """
    group: Any = dist.ProcessGroupGloo
    if hasattr(group.__init__, SHARED):
        return
    make = group.__init__

    @functools.wraps(make)
    def make_on_shared_device(self: Any, store: Any, rank: int, size: int, *options: Any, **named: Any) -> None:
        given = options[0] if options else named.get("timeout")
        if size != 1 or not isinstance(given, timedelta):
            make(self, store, rank, size, *options, **named)
            return
        chosen = group._Options()
        chosen._timeout = given
        chosen._devices = [_device(os.getpid())]
        make(self, store, rank, size, chosen)

    setattr(make_on_shared_device, SHARED, True)
    group.__init__ = make_on_shared_device


@functools.cache
def _device(pid: int) -> Any:
    """Of this process: a fork has no threads. It keeps the device that it inherited, whose end would wait for its thread."""
    group: Any = dist.ProcessGroupGloo
    return group.create_default_device()
