"""The stop hook with real processes in the driver's and the workers' place."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rljob_runtime.cluster import pid_file
from rljob_runtime.entry import pre_stop
from tests.support.pace import HANG_S

DRIVER = """
import signal, sys
from pathlib import Path
from rljob_runtime.cluster import pid_file
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
pid_file.write(Path(sys.argv[1]))
print("ready", flush=True)
signal.sigwait({signal.SIGTERM})
Path(sys.argv[2], "checkpoint").write_text("done")
sys.exit(130)
"""
"""It blocks the signal before it says that it is ready: one that arrived just before ``signal.pause()`` would never end the pause."""
WORKER = """
import sys
from pathlib import Path
from rljob_runtime.cluster import pid_file
pid_file.write(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.read()
"""
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    started = []

    def run(code: str, *arguments: Path) -> subprocess.Popen[str]:
        words = [sys.executable, "-c", code, *map(str, arguments)]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()


def test_the_driver_is_stopped_and_awaited(start: Start, tmp_path: Path) -> None:
    driver = start(DRIVER, pid_file.driver_file(tmp_path), tmp_path)
    said: list[str] = []
    assert pre_stop.stop(tmp_path, 30, said.append)
    assert (tmp_path / "checkpoint").read_text() == "done"
    assert driver.wait(5) == 130
    assert f"pid {driver.pid}" in said[0]
    assert pid_file.stopping_file(tmp_path).exists(), "the driver knows that it was not a user who stopped it"


def test_a_worker_is_awaited_and_left_alone(start: Start, tmp_path: Path) -> None:
    worker = start(WORKER, pid_file.worker_file(tmp_path, "actor_train-0"))
    said: list[str] = []
    assert not pre_stop.stop(tmp_path, 0, said.append)
    assert worker.poll() is None
    assert said == [
        "stopping: waiting for the driver, which writes a checkpoint first, to end actor_train-0",
        "after 0 s there is still actor_train-0",
    ]
    assert worker.stdin is not None
    threading.Timer(0.3, worker.stdin.close).start()
    assert pre_stop.stop(tmp_path, 30, said.append)


def test_there_is_nothing_to_wait_for_without_processes_and_for_processes_of_the_same_id(tmp_path: Path) -> None:
    assert pre_stop.stop(tmp_path, 0, lambda text: None)
    for path in (pid_file.driver_file(tmp_path), pid_file.worker_file(tmp_path, "w-0")):
        pid_file.write(path)
        assert pid_file.running(path) == os.getpid()
        path.write_text(f"{os.getpid()} 1\n")  # this id, but a process that started at another time
        assert pid_file.running(path) is None
    assert pre_stop.stop(tmp_path, 0, lambda text: None), "it would have stopped this very test"
    pid_file.driver_file(tmp_path).write_text("torn")
    assert pid_file.running(pid_file.driver_file(tmp_path)) is None


def test_an_ended_process_that_nobody_collected_counts_as_ended(start: Start, tmp_path: Path) -> None:
    path = pid_file.worker_file(tmp_path, "w-0")
    worker = start(WORKER, path)
    worker.kill()
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    assert pid_file.running(path) is None


def test_the_command_starts_quickly_and_light(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom rljob_runtime.entry import pre_stop\n"
        "done = pre_stop.main(['--state-folder', sys.argv[1]])\n"
        "heavy = {'ray', 'torch', 'numpy', 'pydantic', 'asyncio'} & set(sys.modules)\n"
        "print(sorted(heavy)); sys.exit(done)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
