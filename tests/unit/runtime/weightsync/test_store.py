"""Questions to a store end at their deadline, whatever became of the process that has it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from rljob_runtime.errors import SyncBrokenError
from rljob_runtime.weightsync.store import Store
from tests.support.pace import HANG_S

NAME = "the store of trainer rank 3"


class Answers:
    """Stands for torch's store; silent until it is let go."""

    def __init__(self, let_go: threading.Event) -> None:
        self._let_go = let_go
        self.kept: dict[str, str] = {}

    def check(self, keys: list[str]) -> bool:
        self._let_go.wait(HANG_S)
        return all(key in self.kept for key in keys)

    def get(self, key: str) -> bytes:
        return self.kept[key].encode()

    def set(self, key: str, value: str) -> None:
        self.kept[key] = value


@pytest.fixture
def let_go() -> Iterator[threading.Event]:
    made = threading.Event()
    yield made
    made.set()


def test_a_question_without_an_answer_ends_and_names_the_store(let_go: threading.Event) -> None:
    store = Store(lambda: Answers(let_go), NAME, HANG_S)
    store.set("a", "b")
    assert store.get("a") == "b"
    with pytest.raises(SyncBrokenError, match=rf"^{NAME} did not answer within 0\.05 s$"):
        store.check(["a"], 0.05)
    let_go.set()
    assert store.check(["a"])  # answers come in order, and that of the question before is nobody's
    store.close()
    with pytest.raises(SyncBrokenError, match=rf"^{NAME} was left$"):
        store.check(["a"])


class JustTooLate(Future[Any]):
    """Is answered between the end of the wait and the look whether it was."""

    def result(self, timeout: float | None = None) -> Any:
        super().result(HANG_S)
        raise TimeoutError


def test_an_answer_that_comes_just_too_late_is_none(monkeypatch: pytest.MonkeyPatch, let_go: threading.Event) -> None:
    store = Store(lambda: Answers(let_go), NAME, HANG_S)
    with monkeypatch.context() as patch:
        patch.setattr("rljob_runtime.weightsync.store.Future", JustTooLate)
        with pytest.raises(SyncBrokenError, match=rf"^{NAME} did not answer within"):
            store.set("a", "b")
    store.close()


def test_a_connection_that_nobody_accepts_ends(let_go: threading.Event) -> None:
    with pytest.raises(SyncBrokenError, match="did not answer within"):
        Store(lambda: let_go.wait(HANG_S), NAME, 0.05)


def test_the_thread_of_a_store_that_nobody_closes_ends_with_it(let_go: threading.Event) -> None:
    """A driver does not close its own: in a process that continues, a thread and a connection would stay for each."""
    before = set(threading.enumerate())
    store = Store(lambda: Answers(let_go), NAME, HANG_S)
    (thread,) = set(threading.enumerate()) - before
    del store
    gc.collect()
    thread.join(HANG_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("error", [RuntimeError("reset by peer"), TimeoutError("torch's own")])
def test_errors_of_torch_come_as_they_are(error: Exception) -> None:
    def connect() -> None:
        raise error

    with pytest.raises(type(error)) as found:
        Store(connect, NAME, HANG_S)
    assert found.value is error
