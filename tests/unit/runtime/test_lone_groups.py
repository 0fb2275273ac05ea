"""Gloo groups of one process have one thread together, and work as torch's own."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from rljob_runtime.lone_groups import share_loop_of_lone_groups
from tests.support.gloo_loops import gloo_loops

TIMEOUT = timedelta(seconds=30)


def group(store: dist.HashStore, rank: int, size: int, name: object) -> dist.ProcessGroupGloo:
    return dist.ProcessGroupGloo(dist.PrefixStore(str(name), store), rank, size, timeout=TIMEOUT)


@pytest.fixture(autouse=True)
def sharing() -> None:
    share_loop_of_lone_groups()
    share_loop_of_lone_groups()  # as every engine of a process does


def test_groups_of_one_process_share_a_loop_and_compute():
    store = dist.HashStore()
    kept = [group(store, 0, 1, name) for name in range(2)]
    before = gloo_loops()
    kept += [group(store, 0, 1, name) for name in range(2, 6)]
    assert gloo_loops() == before
    for made in kept:
        numbers = torch.arange(3.0)
        made.allreduce([numbers]).wait()
        gathered = [[torch.zeros(3)]]
        made.allgather(gathered, [numbers]).wait()
        made.barrier().wait()
        assert numbers.tolist() == gathered[0][0].tolist() == [0.0, 1.0, 2.0]
        assert made.options._timeout == TIMEOUT


def test_the_end_of_one_is_not_the_end_of_the_others():
    store = dist.HashStore()
    first, second = (group(store, 0, 1, name) for name in "ab")
    first.allreduce([torch.ones(1)]).wait()
    del first
    numbers = torch.ones(2)
    second.allreduce([numbers]).wait()
    assert numbers.tolist() == [1.0, 1.0]


def test_groups_of_several_processes_keep_loops_of_their_own():
    store = dist.HashStore()
    lone = group(store, 0, 1, "lone")
    before = gloo_loops()
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda rank: group(store, rank, 2, "both"), range(2))
        assert gloo_loops() == before + 2
        sums = [torch.ones(2), torch.full((2,), 2.0)]
        works = [first.allreduce([sums[0]]), second.allreduce([sums[1]])]
        for work in works:
            work.wait()
    assert [found.tolist() for found in sums] == [[3.0, 3.0]] * 2
    assert lone.size() == 1
