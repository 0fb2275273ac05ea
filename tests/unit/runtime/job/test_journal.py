"""Which runs have a journal, and what users read about it."""

from pathlib import Path
from typing import Any

import pytest

from rljob_api.v1alpha1 import RLJobSpec
from rljob_api.validation import check
from rljob_runtime.job.journal import run_journal
from rljob_runtime.journal.writing import JournalWriter, NoJournal
from rljob_runtime.report import Level
from tests.integration.jobs import job
from tests.support.records import make_group


class Notices:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def event(self, text: str, level: Level = Level.INFO) -> None:
        self.lines.append(f"{level}: {text}")


def spec(**checkpoint: Any) -> RLJobSpec:
    return check(job(Path("m"), steps=9, checkpoint=checkpoint)).job.spec


def leave_a_group(folder: Path) -> None:
    journal, _ = run_journal(spec(), folder, "data", None, Notices())
    journal.finished(make_group(3))
    journal.close()


def test_a_restart_goes_on_and_says_so(tmp_path: Path) -> None:
    leave_a_group(tmp_path / "journal")
    reported = Notices()
    journal, recovered = run_journal(spec(everySteps=50), tmp_path / "journal", "data", None, reported)
    assert isinstance(journal, JournalWriter)
    assert [group.group_id for group in recovered.waiting] == [3]
    (line,) = reported.lines
    assert line.startswith("info: finished by an earlier attempt after step 0 and not generated again")
    assert line.endswith("batches of steps: 0, further groups: 1")
    journal.close()


def test_other_data_start_with_nothing_and_say_so(tmp_path: Path) -> None:
    leave_a_group(tmp_path / "journal")
    reported = Notices()
    journal, recovered = run_journal(spec(), tmp_path / "journal", "other data", None, reported)
    assert recovered.groups == []
    assert reported.lines == ["warning: journal: 000001-000001.journal is of another spec or data"]
    journal.close()


@pytest.mark.parametrize("checkpoint", [{"journal": False}, {"everySteps": 0}])
def test_a_run_without_one_leaves_none_to_a_later_attempt(tmp_path: Path, checkpoint: dict[str, Any]) -> None:
    leave_a_group(tmp_path / "journal")
    journal, recovered = run_journal(spec(**checkpoint), tmp_path / "journal", "data", None, Notices())
    assert isinstance(journal, NoJournal)
    assert recovered.groups == []
    assert not (tmp_path / "journal").exists()


def test_without_storage_there_is_none(tmp_path: Path) -> None:
    journal, _ = run_journal(spec(), None, "data", None, Notices())
    assert isinstance(journal, NoJournal)
