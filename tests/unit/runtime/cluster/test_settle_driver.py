"""What a settled driver does with memory; in a process of its own, whose allocator and collector it changes."""

import subprocess
import sys

import pytest

CHILD = """
import gc, os, sys
from rljob_runtime.cluster.host import collect_settled, settle_driver

class Ring:
    def __init__(self): self.own = self

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

if sys.argv[1] == "settled":
    settle_driver()
bytearray(16 << 20)  # what raises glibc's own limit when it is freed
before = resident()
blocks = [bytearray(b"x" * (1 << 20)) for _ in range(64)]
last = blocks.pop()  # pins what lies before it where all come from one heap
del blocks
held = resident() - before
Ring()
get_objects = gc.get_objects
gc.get_freeze_count = lambda: 1 / 0  # walks through all that is frozen, tens of milliseconds in every step
gc.get_objects = lambda generation=None: 1 / 0  # breaks tuples that other threads are making
collect_settled(0)
print(held, sum(isinstance(found, Ring) for found in get_objects()))
"""


@pytest.mark.parametrize("settled", [True, False])
def test_large_blocks_go_back_and_cycles_are_found_in_a_settled_process_alone(settled: bool) -> None:
    command = [sys.executable, "-c", CHILD, "settled" if settled else "plain"]
    held_mib, rings = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60.0).stdout.split()
    assert (float(held_mib) < 8.0) is settled
    assert int(rings) == (0 if settled else 1)


AMONG_MANY = """
import gc, sys
from rljob_runtime.cluster.host import FEW_SAMPLES, collect_settled, settle_driver

class Ring:
    def __init__(self): self.own = self

settle_driver()
old = Ring()
gc.collect(1)  # they are old now
del old
Ring()
collect_settled(int(sys.argv[1]) * FEW_SAMPLES)
print(sum(isinstance(found, Ring) for found in gc.get_objects()))
"""


@pytest.mark.parametrize("many", [True, False])
def test_where_many_samples_are_in_flight_only_young_ones_are_looked_at(many: bool) -> None:
    command = [sys.executable, "-c", AMONG_MANY, str(int(many))]
    left = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60.0).stdout
    assert int(left) == int(many)


IMPORTING = """
import gc, sys
from rljob_runtime.cluster.host import imports

class Ring:
    def __init__(self): self.own = self

with imports():
    enabled = gc.isenabled()
    made = [[] for _ in range(100_000)]
frozen = gc.get_freeze_count()
Ring()
gc.collect()
print(enabled, gc.isenabled(), frozen > 100_000, any(isinstance(found, Ring) for found in gc.get_objects()))
"""


def test_nothing_is_collected_while_modules_are_imported_and_what_they_made_is_left_alone() -> None:
    command = [sys.executable, "-c", IMPORTING]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60.0)
    assert done.stdout.split() == ["False", "True", "True", "False"]
