"""A worker's process in a pod: its log reaches the pod's output, the stop hook can find it, errors arrive as they are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rljob_runtime.cluster import pid_file
from rljob_runtime.cluster.host import EARLY_WORDS, PREPARED_WORDS, WAITS_WORDS
from tests.support.pace import HANG_S, until

CODE = """
import os, sys
from pathlib import Path
from rljob_runtime.cluster import pid_file
from rljob_runtime.cluster import host

folder = Path(sys.argv[1])
host.POD_OUTPUT, pid_file.STATE_FOLDER = folder / "pod", folder / "state"
worker = host.WorkerHost("w-0", sys.argv[2], {}, {"A": "1"}, str(folder / "w-0.log"))
assert (pid_file.running(folder / "state" / "workers" / "w-0.pid") == os.getpid()) is ("RLJOB_NODE_RANK" in os.environ)
try:
    worker.build()
    worker.call("elements")
except (ValueError, TypeError) as error:
    sys.stderr.write(f"raised {type(error).__name__}\\n")
import time
deadline = time.monotonic() + 10
while "RLJOB_NODE_RANK" in os.environ and "raised" not in (folder / "pod").read_text() and time.monotonic() < deadline:
    time.sleep(0.05)
"""


def run(folder: Path, factory: str, environment: dict[str, str]) -> str:
    (folder / "pod").touch()
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(folder), factory], env=environment, capture_output=True, text=True, timeout=HANG_S
    )
    assert done.returncode == 0, (folder / "w-0.log").read_text()
    return (folder / "pod").read_text()


def test_in_a_pod_every_line_of_the_log_is_copied_with_the_workers_name_tracebacks_too(tmp_path: Path) -> None:
    shown = run(tmp_path, "collections:namedtuple", {"RLJOB_NODE_RANK": "0"})
    log = (tmp_path / "w-0.log").read_text()
    assert "Traceback (most recent call last)" in log
    assert log.endswith("raised TypeError\n")
    assert shown == "".join(f"[w-0] {line}\n" for line in log.splitlines())


def test_elsewhere_the_log_is_all(tmp_path: Path) -> None:
    assert run(tmp_path, "collections:namedtuple", {}) == ""
    assert (tmp_path / "w-0.log").read_text().endswith("raised TypeError\n")


def test_the_log_begins_with_the_place_of_the_worker(tmp_path: Path) -> None:
    place = {"CLUSTER_NODE_RANK": "3", "RLJOB_NODE_GROUP": "arms", "RLJOB_HARDWARE_TYPE": "Franka", "LOCAL_HARDWARE_RANKS": "0,1"}
    code = CODE.replace('{"A": "1"}', repr(place))
    (tmp_path / "pod").touch()
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), "collections:namedtuple"], env={}, capture_output=True, timeout=HANG_S
    )
    assert done.returncode == 0
    first = (tmp_path / "w-0.log").read_text().splitlines()[0]
    assert first.endswith(" starts collections:namedtuple on node 3 (arms), Franka 0,1")


BECOMES = """
import os, sys
from pathlib import Path
from rljob_runtime.cluster.protocol import WorkerSpec
from rljob_runtime.cluster.ray_cluster import _HostActor

folder = Path(sys.argv[1])
os.environ |= {"CUDA_VISIBLE_DEVICES": "4,5,6,7", "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}
spec = dict(factory="prepared:Worker", kwargs={"size": 3}, node_rank=0)
host = _HostActor(WorkerSpec(name="w-standby-0", env={"RANK": "0"}, cuda_devices=(0,), **spec), str(folder / "standby.log"))
host.stand_by()
host.become(WorkerSpec(name="w-1", env={"RANK": "1"}, cuda_devices=(2, 3), **spec), str(folder / "w-1.log"))
print(host.call("place"))
"""
PREPARED = """
import os

def place():
    return os.environ["RANK"], os.environ["CUDA_VISIBLE_DEVICES"]

class Worker:
    prepared = []

    def __init__(self, size):
        print("made", size, *place(), self.prepared)

    @classmethod
    def prepare(cls, size):
        print("prepared", size, *place())
        cls.prepared.append(size)

    def place(self):
        return "called", *place()
"""


def importable(folder: Path) -> dict[str, str]:
    """Environment of a process that finds modules of ``folder``, and ours where these tests do."""
    return {"PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}


AHEAD = """
import sys
from rljob_runtime.cluster.host import WorkerHost

factory, log_file = sys.argv[1:]
host = WorkerHost("w-0", factory, {"size": 3}, {"RANK": "0", "CUDA_VISIBLE_DEVICES": "4"}, log_file)
host.prepare()
host.build()
"""
WITH_CUDA = """
import sys
from types import SimpleNamespace

sys.modules["torch"] = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True))

class Worker:
    def __init__(self, size):
        print("made", size)

    def prepare(self, batch):
        raise NotImplementedError("a method of what has been constructed")
"""


@pytest.mark.parametrize(
    ("module", "lines"),
    [
        (PREPARED, ["prepared 3 0 4", f"[w-0] {PREPARED_WORDS}", "made 3 0 4 [3]"]),
        (WITH_CUDA, [f"[w-0] {EARLY_WORDS}", f"[w-0] {PREPARED_WORDS}", "made 3"]),
    ],
    ids=["with a class method for it", "with memory of a device"],
)
def test_a_process_imports_and_prepares_its_worker_before_its_turn_and_constructs_it_then(
    module: str, lines: list[str], tmp_path: Path
) -> None:
    (tmp_path / "ahead.py").write_text(module)
    log = tmp_path / "w-0.log"
    subprocess.run([sys.executable, "-c", AHEAD, "ahead:Worker", str(log)], env=importable(tmp_path), check=True, timeout=HANG_S)
    assert log.read_text().splitlines()[1:] == lines


def test_a_process_that_holds_memory_of_a_device_does_not_stand_by(tmp_path: Path) -> None:
    (tmp_path / "ahead.py").write_text(WITH_CUDA)
    code = AHEAD.replace("host.prepare()", "host.stand_by()")
    command = [sys.executable, "-c", code, "ahead:Worker", str(tmp_path / "w-0.log")]
    assert subprocess.run(command, env=importable(tmp_path), check=False, timeout=HANG_S).returncode == 1
    log = (tmp_path / "w-0.log").read_text()
    assert "SetupError: imports have initialized CUDA in a process that only waits; write rollout.standbyProcesses: Never" in log
    assert WAITS_WORDS not in log


def test_a_prepared_process_becomes_another_worker_with_its_environment_devices_and_log(tmp_path: Path) -> None:
    (tmp_path / "prepared.py").write_text(PREPARED)
    subprocess.run([sys.executable, "-c", BECOMES, str(tmp_path)], env=importable(tmp_path), check=True, timeout=HANG_S)
    waited, worked = ((tmp_path / name).read_text().splitlines() for name in ("standby.log", "w-1.log"))
    assert waited[0].startswith("[w-standby-0] pid ")
    assert waited[1:] == ["prepared 3 0 4", f"[w-standby-0] {WAITS_WORDS}"]
    assert worked[0].startswith("[w-1] pid ")
    assert worked[1:] == ["made 3 1 6,7 [3]", "('called', '1', '6,7')"]


def test_a_settled_process_looks_at_nothing_old_in_later_collections() -> None:
    code = (
        "import gc\n"
        "from rljob_runtime.cluster.host import settle_process\n"
        "old = [[] for _ in range(1000)]\n"
        "settle_process()\n"
        "assert gc.get_freeze_count() >= 1000 and not any(found is old for found in gc.get_objects())\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=HANG_S)


DRAINED = """
import sys
from pathlib import Path
from rljob_runtime.cluster import host, pid_file

folder = Path(sys.argv[1])
host.POD_OUTPUT, pid_file.STATE_FOLDER = folder / "pod", folder / "state"
worker = host.WorkerHost("w-0", "collections:namedtuple", {}, {}, str(folder / "w-0.log"))
(folder / "waits").touch()
worker.drained()
assert pid_file.stopping_file(folder / "state").exists()
"""


def test_a_worker_learns_that_its_pod_is_asked_to_end(tmp_path: Path) -> None:
    (tmp_path / "pod").touch()
    waiting = subprocess.Popen([sys.executable, "-c", DRAINED, str(tmp_path)], env=importable(tmp_path) | {"RLJOB_NODE_RANK": "0"})
    try:
        until("the worker waits", (tmp_path / "waits").exists)
        pid_file.stopping_file(tmp_path / "state").touch()
        assert waiting.wait(HANG_S) == 0, (tmp_path / "w-0.log").read_text()
    finally:
        waiting.kill()
