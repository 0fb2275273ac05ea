"""Gloo groups of one process have one thread together, and work as torch's own."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from rljob_runtime.lone_groups import share_loop_of_lone_groups

TIMEOUT = timedelta(seconds=30)


def group(store: dist.HashStore, rank: int, size: int, name: object) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(dist.PrefixStore(str(name), store), rank, size, timeout=TIMEOUT)


@pytest.fixture(autouse=True)
def sharing() -> None:
    share_loop_of_lone_groups()
    share_loop_of_lone_groups()  # as every engine of a process does


def test_groups_of_one_process_share_a_device_and_compute():
    store = dist.HashStore()
    kept = [group(store, 0, 1, name) for name in range(4)]
    (device,) = kept[0].options._devices
    for made in kept:
        numbers = torch.arange(3.0)
        made.allreduce([numbers]).wait()
        gathered = [[torch.zeros(3)]]
        made.allgather(gathered, [numbers]).wait()
        made.barrier().wait()
        assert numbers.tolist() == gathered[0][0].tolist() == [0.0, 1.0, 2.0]
        assert made.options._timeout == TIMEOUT
        assert made.options._devices == [device]


def test_the_end_of_one_is_not_the_end_of_the_others():
    store = dist.HashStore()
    first, second = (group(store, 0, 1, name) for name in "ab")
    first.allreduce([torch.ones(1)]).wait()
    del first
    numbers = torch.ones(2)
    second.allreduce([numbers]).wait()
    assert numbers.tolist() == [1.0, 1.0]


def test_groups_of_several_processes_keep_devices_of_their_own():
    store = dist.HashStore()
    lone = group(store, 0, 1, "lone")
    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(lambda rank: group(store, rank, 2, "both"), range(2)))
    devices = [device for made in (lone, *both) for device in made.options._devices]
    assert len(set(map(id, devices))) == len(devices) == 3
    sums = [torch.ones(2), torch.full((2,), 2.0)]
    for work in [made.allreduce([numbers]) for made, numbers in zip(both, sums, strict=True)]:
        work.wait()
    assert [found.tolist() for found in sums] == [[3.0, 3.0]] * 2
