"""A connection to the store of a meeting on which every question has a deadline.

Torch's ``TCPStore`` bounds a connection and a ``wait``, but not ``check``: from a process that is stopped, or whose node is cut off, the
answer never comes, and the caller waits until the kernel gives the connection up. Here questions are asked in a thread of the connection's
own, and whoever asks stops waiting at the deadline.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from rljob_runtime.errors import SyncBrokenError

AnswerT = TypeVar("AnswerT")
Question = tuple[Callable[[Any], Any], "Future[Any]"]


class Store:
    """One connection; questions of several threads are asked one after the other."""

    def __init__(self, connect: Callable[[], Any], name: str, timeout_s: float) -> None:
        """Connect.

        Args:
            connect: returns torch's store, or raises.
            name: of the store, for messages.
            timeout_s: of connecting, and of each question.

        Raises:
            SyncBrokenError: the store did not answer in time.
        """
        self._name, self._timeout_s = name, timeout_s
        self._closed = False
        self._questions: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        self._end = weakref.finalize(self, self._questions.put, None)  # also of one that nobody closes, as a driver at its end
        threading.Thread(target=_serve, args=(connect, self._questions), name="rljob-store", daemon=True).start()
        try:
            self._ask(_itself)
        except BaseException:
            self.close()
            raise

    @property
    def connection(self) -> Any:
        """Torch's store, for torch's own groups, which bound their waits themselves.

        Raises:
            SyncBrokenError: a question before this one is not answered.
        """
        return self._ask(_itself)

    def check(self, keys: Sequence[str], timeout_s: float | None = None) -> bool:
        """Whether all keys are set.

        Args:
            keys: names.
            timeout_s: instead of the connection's.

        Raises:
            SyncBrokenError: no answer in time.
            RuntimeError: torch's, of a connection that broke.
        """
        return bool(self._ask(lambda store: store.check(list(keys)), timeout_s))

    def get(self, key: str, timeout_s: float | None = None) -> str:
        """The value of a key that is set; arguments and errors as of :meth:`check`."""
        return str(self._ask(lambda store: store.get(key).decode(), timeout_s))

    def set(self, key: str, value: str, timeout_s: float | None = None) -> None:
        """Set a key; arguments and errors as of :meth:`check`."""
        self._ask(lambda store: store.set(key, value), timeout_s)

    def close(self) -> None:
        """No more questions; the connection ends once the last one is answered."""
        self._closed = True
        self._end()

    def _ask(self, question: Callable[[Any], AnswerT], timeout_s: float | None = None) -> AnswerT:
        answer: Future[AnswerT] = Future()
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        if self._closed:
            raise SyncBrokenError(f"{self._name} was left")
        self._questions.put((question, answer))
        try:
            return answer.result(limit_s)
        except TimeoutError as error:
            if answer.done() and answer.exception() is error:  # torch's own
                raise
            raise SyncBrokenError(f"{self._name} did not answer within {limit_s:g} s") from error


def _serve(connect: Callable[[], Any], questions: queue.SimpleQueue[Question | None]) -> None:
    """The thread. It has no reference to the :class:`Store`, and is abandoned where an answer never comes."""
    store: Any = None
    while (asked := questions.get()) is not None:
        question, answer = asked
        try:
            if store is None:
                store = connect()
            found = question(store)
        except Exception as error:  # noqa: BLE001 - whoever asked raises it
            answer.set_exception(error)
        else:
            answer.set_result(found)
        del asked, question, answer


def _itself(store: Any) -> Any:
    return store
