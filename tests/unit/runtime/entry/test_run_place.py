"""Folders of a run on this machine: what is not taken, because somebody needs what is in them."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rljob_api.validation import CheckedJob, check
from rljob_runtime.entry import run_place
from rljob_runtime.errors import SetupError
from rljob_runtime.loop.checkpointing import CheckpointStore, DriverState
from tests.integration.jobs import job


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def checked(model: str = "m", **changes: Any) -> CheckedJob:
    return check(job(Path(model), steps=1, **changes))


def save(store: CheckpointStore, step: int) -> str:
    state = DriverState(step=step, source_state={}, first_prompt=0, done=(), rule_state={}, spec_fingerprint={})
    folder = store.begin(step, 0)
    store.complete(folder, state, ())
    return folder.name


@contextlib.contextmanager
def run(where: str, found: CheckedJob, mode: str = "") -> Iterator[CheckpointStore]:
    with run_place.taken(found, Path(where), overwrite=mode == "overwrite", resume=mode == "resume") as (_, store):
        yield store


@pytest.mark.parametrize("mode", ["overwrite", "resume"])
def test_a_run_in_progress_is_left_alone_and_its_folder_can_be_taken_after_its_end(mode: str) -> None:
    with (
        run("runs/a", checked()),
        pytest.raises(SetupError, match="runs/a: a run is in progress there; wait for its end"),
        run("runs/a", checked(), mode),
    ):
        pass
    with run("runs/a", checked(), mode):
        pass


def test_what_a_run_starts_from_is_not_overwritten() -> None:
    with run("runs/a", checked()):
        for name in ("model", "tokenizer"):
            Path("runs/a", name).mkdir()
        Path("runs/a/train.jsonl").write_text("{}")
    data = {"train": [{"name": "mine", "type": "JSONL", "jsonl": {"path": "runs/a/train.jsonl"}}]}
    rewards = [{"name": "exact", "type": "ExactMatch"}]
    again = checked("runs/a/model", data=data, rewards=rewards)
    said = r"--overwrite would delete spec.model.path runs/a/model, spec.data.train\[0\].jsonl.path runs/a/train.jsonl, in runs/a; copy it"
    with pytest.raises(SetupError, match=said), run("runs/a", again, "overwrite"):
        pass
    assert Path("runs/a/model").exists()
    with run("runs/b", again):
        pass


def test_jobs_with_one_checkpoint_path_have_folders_of_their_own_there() -> None:
    place = {"path": "kept"}
    with run("runs/a", checked(checkpoint=place)) as store:
        assert store.root == Path("kept") / checked().job.metadata.name


def test_checkpoints_elsewhere_belong_to_a_run() -> None:
    found = checked(checkpoint={"path": "kept"})
    with run("runs/a", found) as store:
        first = save(store, 1)
    with pytest.raises(SetupError, match=r"kept/.* holds checkpoints of the run .*/runs/a; give this job another"), run("runs/b", found):
        pass
    with run("runs/a", found, "resume") as store:
        assert [folder.name for folder in store.folders()] == [first]
    with run("runs/a", found, "overwrite") as store:
        assert store.folders() == [], "of the run that was discarded"
        save(store, 1)
    Path("runs/a").rename("runs/old")
    with (
        pytest.raises(SetupError, match=r"holds checkpoints of an earlier run in .*/runs/a; remove them, or let --overwrite do so"),
        run("runs/a", found),
    ):
        pass
