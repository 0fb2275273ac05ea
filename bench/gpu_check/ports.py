"""Free ports of this machine."""

from __future__ import annotations

from rljob_runtime.cluster.ports import group_port


def free_ports(count: int) -> list[int]:
    """So many different ones, free at the moment, where a job has its process groups."""
    found: set[int] = set()
    while len(found) < count:
        found.add(group_port("127.0.0.1"))
    return list(found)
