"""The state on disk comes back as it was, survives a crash while it is written, and is never taken for another's."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from e2e.cluster import procfs
from e2e.cluster.errors import ClusterError
from e2e.cluster.paths import state_folder
from e2e.cluster.procfs import ProcessIdentity
from e2e.cluster.state import ProcessRecord, State, StateFolder, all_folders
from e2e.cluster.versions import Mode

TEXT = st.text(min_size=1, max_size=20)
IDENTITIES = st.builds(ProcessIdentity, pid=st.integers(1, 2**22), start_ticks=st.integers(0, 2**60), boot_id=TEXT)
STATES = st.builds(
    State,
    mode=st.sampled_from(Mode),
    token=TEXT,
    holder=st.none() | IDENTITIES,
    ports=st.dictionaries(TEXT, st.integers(1, 65535)),
    processes=st.lists(st.builds(ProcessRecord, name=TEXT, identity=IDENTITIES)).map(tuple),
    bridge=st.none() | TEXT,
    nft_tables=st.lists(TEXT).map(tuple),
    sysctls=st.dictionaries(TEXT, TEXT),
    cgroups=st.lists(TEXT).map(tuple),
)


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    return StateFolder(path=tmp_path / "root" / "one")


@given(STATES)
def test_text_and_back(state: State):
    assert State.from_json(state.to_json()) == state


def test_every_cluster_has_a_token_of_its_own():
    assert State(mode=Mode.API).token != State(mode=Mode.API).token


def test_create_save_load(folder: StateFolder):
    assert folder.load() is None
    state = State(mode=Mode.API, ports={"etcd": 1})
    folder.create(state)
    assert folder.load() == state
    assert folder.update(bridge="b") == replace(state, bridge="b") == folder.load()
    assert folder.path.stat().st_mode & 0o077 == 0


def test_create_refuses_what_exists_and_says_how_to_remove_it(folder: StateFolder):
    folder.create(State(mode=Mode.API))
    with pytest.raises(ClusterError, match="down --name one"):
        folder.create(State(mode=Mode.API))


def test_a_half_written_state_is_never_read(folder: StateFolder):
    state = State(mode=Mode.API)
    folder.create(state)
    folder.file.with_suffix(".new").write_text('{"form')
    assert folder.load() == state


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 99}', '{"format": 1, "mode": "api"}'])
def test_another_format_is_an_error_that_names_the_file(folder: StateFolder, text: str):
    folder.create(State(mode=Mode.API))
    folder.file.write_text(text)
    with pytest.raises(ClusterError, match=str(folder.file)):
        folder.load()


def test_require_says_what_to_do(folder: StateFolder):
    with pytest.raises(ClusterError, match=r"no cluster called 'one'.*e2e\.cluster up"):
        folder.require()


def test_a_second_lock_names_its_deadline(folder: StateFolder):
    with folder.lock(deadline_s=0), pytest.raises(ClusterError, match="another up or down of 'one'"), folder.lock(deadline_s=0):
        pass


def test_a_removed_lock_file_is_made_again(folder: StateFolder):
    with folder.lock(deadline_s=0):
        folder.remove_lock_file()
        with folder.lock(deadline_s=0):
            assert len(list(folder.path.parent.iterdir())) == 1


def test_all_folders(folder: StateFolder, tmp_path: Path):
    assert all_folders(tmp_path / "root") == []
    folder.create(State(mode=Mode.API))
    assert all_folders(tmp_path / "root") == [folder]


@pytest.mark.parametrize("name", ["", "..", "a/b", "A", "-a", "x" * 33])
def test_a_name_that_is_no_folder_is_refused(name: str):
    with pytest.raises(ClusterError, match="cluster name"):
        state_folder(name)


def test_this_process_is_alive_and_its_predecessor_under_the_same_pid_is_not():
    me = procfs.me()
    assert me.alive()
    assert not replace(me, start_ticks=me.start_ticks - 1).alive()
    assert not replace(me, boot_id="another boot").alive()


def test_a_process_that_ended_is_not_alive_even_before_it_is_reaped():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    identity = procfs.identify(child.pid)
    assert identity is not None
    assert identity.alive()
    child.stdin.close()  # ends it
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not identity.alive()
    child.wait()
    assert procfs.identify(child.pid) is None
