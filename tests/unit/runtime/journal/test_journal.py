"""What a restarted driver finds of an earlier one, and what is on disk meanwhile."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rljob_runtime.journal.opening import OpenedJournal, open_journal
from rljob_runtime.journal.reading import Adopted, files_of
from rljob_runtime.journal.replay import Bounds, StartingPoint
from rljob_runtime.journal.writing import Background, JournalFiles, JournalWriter
from rljob_runtime.overlap.group_log import Ending
from tests.support.records import make_group

BOUNDS = Bounds(groups_per_step=2, total_steps=10, max_staleness=1)


class AtOnce:
    """An executor without a thread."""

    def submit(self, work: Callable[[], None]) -> None:
        work()

    def close(self) -> None:
        pass


OPEN: list[JournalWriter] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Let go of the files of drivers that are killed in a test."""
    yield
    while OPEN:
        OPEN.pop().close()


def opened(
    folder: Path, version: int = 0, first: int = 0, done: Collection[int] = (), bounds: Bounds = BOUNDS, run: str = "run"
) -> OpenedJournal:
    found = open_journal(folder, run, StartingPoint(version=version, first_prompt=first, done=done), bounds, AtOnce())
    OPEN.append(found.journal)
    return found


def finish(journal: JournalWriter, *groups: int, version: int = 0) -> None:
    for group in groups:
        journal.finished(make_group(group, version=version))


def take(journal: JournalWriter, version: int, *groups: int) -> None:
    journal.taken(version, [make_group(group) for group in groups])


def ids(found: OpenedJournal) -> tuple[dict[int, list[int]], list[int]]:
    """Of the recovered batches and waiting groups."""
    batches = {version: [group.group_id for group in batch] for version, batch in found.recovered.batches.items()}
    return batches, [group.group_id for group in found.recovered.waiting]


def test_batches_waiting_groups_and_released_prompts_come_back(tmp_path: Path) -> None:
    journal = opened(tmp_path).journal
    finish(journal, 1, 0, 4)
    take(journal, 0, 1, 0)
    journal.released(3, Ending.FILTERED)
    finish(journal, 5, 7, version=1)
    take(journal, 1, 4, 7)
    journal.released(5, Ending.DROPPED)
    finish(journal, 2, version=2)
    found = opened(tmp_path)
    assert ids(found) == ({0: [1, 0], 1: [4, 7]}, [2])
    assert found.recovered.released == {3: Ending.FILTERED, 5: Ending.DROPPED}
    assert found.problems == ()
    assert all(replace(g, recovered=False) == make_group(g.group_id, version=g.oldest_version) for g in found.recovered.groups)


def test_what_the_checkpoint_has_is_neither_repeated_nor_counted_again(tmp_path: Path) -> None:
    journal = opened(tmp_path).journal
    finish(journal, 0, 1, 2, 3)
    journal.released(4, Ending.DROPPED)
    take(journal, 0, 0, 1)
    journal.cut(1, {2, 3, 5})
    journal.released(5, Ending.CANCELLED)
    journal.reported(1)
    journal.released(6, Ending.CANCELLED)
    found = opened(tmp_path, version=1, first=2, done={4})
    assert ids(found) == ({}, [2, 3])
    assert found.recovered.released == {5: None, 6: Ending.CANCELLED}, "the row of step 1 counts group 5"


def test_each_driver_writes_files_of_its_own_and_knows_only_what_it_took_over(tmp_path: Path) -> None:
    first = opened(tmp_path).journal
    finish(first, 0, 1)
    take(first, 0, 0, 1)
    second = opened(tmp_path).journal
    finish(first, 2, version=1)  # the first one lives on, unknown to the second
    take(first, 1, 2, 3)
    finish(second, 3, version=1)
    assert [path.name for path in files_of(tmp_path)] == ["000001-000001.journal", "000002-000001.journal"]
    assert ids(opened(tmp_path)) == ({0: [0, 1]}, [3])


def test_a_batch_is_trained_again_only_without_a_gap_whole_and_within_the_bound(tmp_path: Path) -> None:
    journal = opened(tmp_path).journal
    finish(journal, 0, 1, 2, 3)
    finish(journal, 4, 5, version=1)
    finish(journal, 6, 7, version=2)
    take(journal, 0, 0, 1)
    take(journal, 1, 2, 4)
    take(journal, 2, 5, 6)
    assert ids(opened(tmp_path)) == ({0: [0, 1], 1: [2, 4], 2: [5, 6]}, [3, 7])
    synchronous = replace(BOUNDS, max_staleness=0)
    assert ids(opened(tmp_path, bounds=synchronous)) == ({0: [0, 1]}, [2, 3, 4, 5]), "of version 2 nothing waits: it is not trained yet"
    fewer_steps = replace(BOUNDS, total_steps=1)
    assert ids(opened(tmp_path, bounds=fewer_steps)) == ({0: [0, 1]}, [2, 3, 4, 5])


def test_a_checkpoint_removes_what_only_older_ones_need(tmp_path: Path) -> None:
    def names() -> list[str]:
        return [path.stem for path in files_of(tmp_path)]

    earlier = opened(tmp_path).journal
    finish(earlier, 0)
    journal = opened(tmp_path).journal
    finish(journal, 1, 2)
    take(journal, 0, 0, 1)
    journal.cut(1, {2})
    assert names() == ["000001-000001", "000002-000001", "000002-000002"]
    journal.complete(1)
    assert names() == ["000002-000001", "000002-000002"], "group 2 waits in the first of them"
    finish(journal, 3)
    take(journal, 1, 2, 3)
    journal.cut(2, ())
    journal.complete(2)
    assert names() == ["000002-000003"]
    journal.close()
    assert names() == [], "nothing was left to go on with"


def test_a_group_of_an_earlier_driver_keeps_its_files_until_it_is_trained(tmp_path: Path) -> None:
    earlier = opened(tmp_path).journal
    finish(earlier, 0, 1, 2)
    take(earlier, 0, 0, 1)
    journal = opened(tmp_path).journal
    journal.cut(1, {2})
    journal.complete(1)
    assert len(files_of(tmp_path)) == 3
    assert ids(opened(tmp_path, version=1, first=2)) == ({}, [2])


def test_another_spec_or_other_data_use_nothing_of_it(tmp_path: Path) -> None:
    finish(opened(tmp_path).journal, 0)
    found = opened(tmp_path, run="other")
    assert ids(found) == ({}, [])
    assert found.problems == ("journal: 000001-000001.journal is of another spec or data",)
    finish(found.journal, 1)
    assert ids(opened(tmp_path, run="other")) == ({}, [1])


def test_damage_is_reported_and_what_follows_is_not_used_but_the_next_driver_goes_on(tmp_path: Path) -> None:
    journal = opened(tmp_path).journal
    finish(journal, 0, 1)
    (path,) = files_of(tmp_path)
    size = path.stat().st_size
    finish(journal, 2)
    journal.cut(1, {0, 1, 2})
    finish(journal, 3)
    data = bytearray(path.read_bytes())
    data[size + 100] ^= 1
    path.write_bytes(bytes(data))
    second = opened(tmp_path)
    assert ids(second) == ({}, [0, 1])
    assert second.problems == (f"journal: {path.name}: byte {size}: the record's checksum is wrong; what follows is not used",)
    finish(second.journal, 4)
    assert ids(opened(tmp_path)) == ({}, [0, 1, 4])


def test_a_file_that_was_cut_is_used_to_its_last_whole_record(tmp_path: Path) -> None:
    journal = opened(tmp_path).journal
    finish(journal, 0, 1)
    (path,) = files_of(tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    second = opened(tmp_path)
    assert ids(second) == ({}, [0])
    assert second.problems == ()
    files_of(tmp_path)[-1].write_bytes(b"RLJ1")  # killed while it began its file
    assert ids(opened(tmp_path)) == ({}, [0])


def test_without_space_it_is_reported_once_and_tried_again_at_the_next_checkpoint(tmp_path: Path) -> None:
    files = JournalFiles(tmp_path / "journal", "run", kept_free_bytes=1 << 60)
    journal = JournalWriter(files, step=0, adopts=Adopted(), executor=AtOnce())
    finish(journal, 0)
    problem = journal.take_problem()
    assert problem is not None
    assert "no space for the journal" in problem
    assert "generated again" in problem
    assert journal.take_problem() is None
    files.kept_free_bytes = 0
    finish(journal, 1)
    journal.cut(1, {0, 1})
    finish(journal, 2)
    assert ids(opened(tmp_path / "journal")) == ({}, [2])
    assert journal.take_problem() is None


def test_a_disk_that_refuses_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "journal").write_text("a file is in the way")
    journal = opened(tmp_path / "journal").journal
    finish(journal, 0, 1)
    take(journal, 0, 0, 1)
    journal.cut(1, ())
    journal.complete(1)
    journal.close()
    problem = journal.take_problem()
    assert problem is not None
    assert str(tmp_path / "journal") in problem


def test_a_disk_that_is_too_slow_ends_it_before_memory_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rljob_runtime.journal.writing.MAX_BEHIND_BYTES", 40)
    waiting: list[Callable[[], None]] = []
    executor = AtOnce()
    executor.submit = waiting.append  # type: ignore[method-assign]
    journal = open_journal(tmp_path, "run", StartingPoint(version=0, first_prompt=0), BOUNDS, executor).journal
    finish(journal, 0, 1, 2, 3)
    OPEN.append(journal)
    while waiting:
        waiting.pop(0)()
    executor.submit = lambda work: work()  # type: ignore[method-assign]
    assert "the disk takes less than is generated" in (journal.take_problem() or "")
    assert ids(opened(tmp_path)) == ({}, [0, 1])


def test_the_thread_writes_in_order_and_closing_waits_for_it(tmp_path: Path) -> None:
    journal = open_journal(tmp_path, "run", StartingPoint(version=0, first_prompt=0), BOUNDS, Background()).journal
    finish(journal, *range(30))
    take(journal, 0, 3, 5)
    journal.close()
    batches, waiting = ids(opened(tmp_path))
    assert batches == {0: [3, 5]}
    assert waiting == [i for i in range(30) if i not in (3, 5)]
