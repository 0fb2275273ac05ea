"""What is left of a cluster after the machine restarted is removed; what runs in part is a person's to look at."""

from dataclasses import replace
from pathlib import Path

import pytest

from e2e.cluster import procfs
from e2e.cluster.errors import ClusterError
from e2e.cluster.lifecycle import runs_already
from e2e.cluster.state import ProcessRecord, State, StateFolder
from e2e.cluster.versions import Mode

LIVE = ProcessRecord(name="etcd", identity=procfs.me())
DEAD = ProcessRecord(name="kube-apiserver", identity=replace(procfs.me(), boot_id="the boot before"))


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    return StateFolder(path=tmp_path / "root" / "one")


def left(folder: StateFolder, *processes: ProcessRecord) -> None:
    folder.create(State(mode=Mode.API, processes=processes))
    folder.kubeconfig.touch()


@pytest.mark.parametrize("processes", [(), (DEAD,)], ids=["killed before its first program", "every program dead"])
def test_one_that_died_whole_is_removed(folder: StateFolder, processes: tuple[ProcessRecord, ...]):
    left(folder, *processes)
    assert not runs_already(folder, Mode.API)
    assert not folder.path.exists()
    left(folder, LIVE)  # the place is free


def test_one_that_runs_stays(folder: StateFolder):
    left(folder, LIVE)
    assert runs_already(folder, Mode.API)
    assert folder.path.exists()


def test_one_that_runs_in_part_stays_and_says_what_is_dead(folder: StateFolder):
    left(folder, LIVE, DEAD)
    with pytest.raises(ClusterError, match=r"half up: kube-apiserver does not run.*down --name one"):
        runs_already(folder, Mode.API)
    assert folder.path.exists()
