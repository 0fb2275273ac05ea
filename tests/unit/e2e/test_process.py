"""Programs that stay: started with a log and a token, waited for with a deadline, stopped one by one and nobody else."""

import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from e2e.cluster import cleanup, process, procfs
from e2e.cluster.errors import ClusterError
from e2e.cluster.state import State, StateFolder
from e2e.cluster.versions import Mode
from e2e.cluster.wait import wait_until

PYTHON = sys.executable
STAYS = "import sys, time; print('started', flush=True); time.sleep(60)"
STAYS_ON_SIGTERM = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('started', flush=True); time.sleep(60)"
HAS_CHILD = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {STAYS!r}]).wait()"
LEAVES_CHILD = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {STAYS!r}], start_new_session=True)"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[StateFolder]:
    folder = StateFolder(path=tmp_path / "one")
    folder.create(State(mode=Mode.API))
    yield folder
    cleanup.down(folder)


def started(folder: StateFolder, name: str = "a", code: str = STAYS) -> process.ProcessRecord:
    record = process.start(folder, name, [PYTHON, "-c", code])

    def check() -> str | None:
        return None if "started" in folder.log(name).read_text() else "silent"

    process.wait_ready("its word", check, deadline_s=20, folder=folder, record=record)
    return record


def test_start_is_written_down_with_log_and_token(folder: StateFolder):
    record = started(folder)
    state = folder.require()
    assert state.processes == (record,)
    assert record.identity in procfs.with_environment(f"{process.TOKEN_VARIABLE}={state.token}")


def test_only_what_comes_first_runs_before_others(folder: StateFolder):
    own = os.getpriority(os.PRIO_PROCESS, 0)
    pids = {first: process.start(folder, str(first), [PYTHON, "-c", STAYS], first=first).identity.pid for first in (True, False)}
    wanted = {True: process.FIRST, False: own} if os.geteuid() == 0 else {True: own, False: own}
    assert {first: os.getpriority(os.PRIO_PROCESS, pid) for first, pid in pids.items()} == wanted
    assert os.getpriority(os.PRIO_PROCESS, 0) == own
    if os.geteuid() == 0 and Path("/proc/self/autogroup").exists():  # "/autogroup-42 nice -10"
        groups = {first: Path(f"/proc/{pid}/autogroup").read_text().split()[-1] for first, pid in pids.items()}
        assert groups == {True: str(process.FIRST), False: "0"}


def test_no_proxy_reaches_a_program(folder: StateFolder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("https_proxy", "http://localhost:1")
    started(folder, code=f"import os; print(os.environ.get('https_proxy'), flush=True); {STAYS}")
    assert folder.log("a").read_text().splitlines()[0] == "None"


def test_an_early_end_shows_the_log(folder: StateFolder):
    record = process.start(folder, "a", [PYTHON, "-c", "print('no such flag'); raise SystemExit(3)"])
    with pytest.raises(ClusterError, match=r"a ended while waiting for the port\.\nlast lines of .*a\.log:\n  no such flag"):
        process.wait_ready("the port", lambda: "closed", deadline_s=20, folder=folder, record=record)


def test_a_deadline_names_what_and_why(folder: StateFolder):
    record = started(folder)
    with pytest.raises(ClusterError, match=r"the port: not ready after 0 s: closed\nlast lines of .*\n  started"):
        process.wait_ready("the port", lambda: "closed", deadline_s=0, folder=folder, record=record)


def test_waiting_without_a_process():
    with pytest.raises(ClusterError, match="the moon: not ready after 0 s: not risen"):
        wait_until("the moon", lambda: "not risen", deadline_s=0)


def test_a_program_that_is_not_there(folder: StateFolder):
    with pytest.raises(ClusterError, match=r"a: cannot start .*none: No such file"):
        process.start(folder, "a", [folder.path / "none"])


def test_stop_ends_the_named_process_only(folder: StateFolder):
    first, second = started(folder, "a"), started(folder, "b")
    assert process.stop([first.identity], grace_s=20) == [first.identity]
    assert (first.identity.alive(), second.identity.alive()) == (False, True)
    assert process.stop([first.identity], grace_s=0) == []


def test_a_recycled_pid_is_left_alone(folder: StateFolder):
    record = started(folder)
    before = dataclasses.replace(record.identity, start_ticks=record.identity.start_ticks - 1)
    assert process.stop([before], grace_s=0) == []
    assert record.identity.alive()


def test_who_ignores_the_request_is_ended(folder: StateFolder):
    record = started(folder, code=STAYS_ON_SIGTERM)
    process.stop([record.identity], grace_s=0.1)
    assert not record.identity.alive()


def test_descendants(folder: StateFolder):
    record = started(folder, code=HAS_CHILD)
    (child,) = procfs.descendants([record.identity])
    assert child.alive()
    assert procfs.descendants([child]) == []


def test_down_stops_everything_and_a_second_down_finds_nothing(tmp_path: Path):
    folder = StateFolder(path=tmp_path / "two")
    folder.create(State(mode=Mode.API))
    records = [started(folder, "a"), started(folder, "b")]
    assert cleanup.down(folder, keep_logs=tmp_path / "kept") is True
    assert [record.identity.alive() for record in records] == [False, False]
    assert not folder.path.exists()
    assert (tmp_path / "kept" / "a.log").read_text() == "started\n"
    assert cleanup.down(folder) is False
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept"]


def test_down_finds_what_no_record_names(tmp_path: Path):
    folder = StateFolder(path=tmp_path / "two")
    folder.create(State(mode=Mode.API))
    process.start(folder, "a", [PYTHON, "-c", LEAVES_CHILD])
    log = folder.log("a")
    wait_until("the child's word", lambda: None if "started" in log.read_text() else "silent", deadline_s=20)
    token = f"{process.TOKEN_VARIABLE}={folder.require().token}"
    assert any(identity.alive() for identity in procfs.with_environment(token))
    folder.update(processes=())  # as if it had crashed between the start and the note
    cleanup.down(folder)
    assert procfs.with_environment(token) == []


def test_a_folder_without_state_is_removed(tmp_path: Path):
    folder = StateFolder(path=tmp_path / "two")
    folder.path.mkdir()
    assert cleanup.down(folder) is True
    assert not folder.path.exists()


def test_abandoned_clusters_are_those_whose_holder_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RLJOB_E2E_STATE", str(tmp_path))
    gone = dataclasses.replace(procfs.me(), start_ticks=0)
    for name, holder in (("kept", procfs.me()), ("left", gone), ("stays", None)):
        StateFolder(path=tmp_path / name).create(State(mode=Mode.API, holder=holder))
    assert cleanup.down_abandoned() == ["left"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "stays"]


def test_mounts_below_a_folder():
    text = "\n".join(
        f"{number} 1 0:1 / {point} rw - tmpfs tmpfs rw" for number, point in enumerate(["/", "/a", "/a/b", r"/a/c\040d", "/ab/c", "/a/b"])
    )
    assert cleanup.mounts_below(text, Path("/a")) == ["/a/b", "/a/c d", "/a/b"]
