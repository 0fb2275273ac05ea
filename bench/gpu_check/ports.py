"""Free ports of this machine."""

from __future__ import annotations

from rljob_runtime.cluster.ports import group_port


def free_ports(count: int) -> list[int]:
    """So many different ones, free at the moment, where a job has its process groups.

    On all addresses, because torch's store listens on all: a job of this machine may hold the same port on the machine's own address.
    """
    found: set[int] = set()
    while len(found) < count:
        found.add(group_port("0.0.0.0"))
    return list(found)
