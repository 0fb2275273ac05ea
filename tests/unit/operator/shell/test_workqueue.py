"""The work queue on a virtual clock: which keys are reconciled, when, how often, and how many concurrently."""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from datetime import datetime, timedelta

import pytest

from rljob_operator.errors import UnavailableError
from rljob_operator.metrics import Metrics
from rljob_operator.model import Key
from rljob_operator.workqueue import WorkQueue
from tests.unit.operator.shell import virtual_time
from tests.unit.operator.shell.virtual_time import now, run

A, B, C = (Key(namespace="team", name=name) for name in "abc")
Look = Callable[[Key], Awaitable[datetime | None]]


class Recorder:
    """A reconcile that records its calls and returns scripted answers."""

    def __init__(self, seconds: float = 0.0) -> None:
        self.looks: list[tuple[float, Key]] = []
        self.seconds = seconds
        self.answers: list[datetime | BaseException | None] = []
        self.at_once = 0
        self.most_at_once = 0

    async def __call__(self, key: Key) -> datetime | None:
        self.looks.append((asyncio.get_running_loop().time(), key))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await asyncio.sleep(self.seconds)
            answer = self.answers.pop(0) if self.answers else None
            if isinstance(answer, BaseException):
                raise answer
            return answer
        finally:
            self.at_once -= 1

    def times(self, key: Key = A) -> list[float]:
        return [round(time, 3) for time, looked in self.looks if looked == key]


def _queue(look: Look, workers: int = 2) -> WorkQueue:
    queue = WorkQueue(look, workers=workers, metrics=Metrics(), clock=now, jitter=lambda: 0.0)
    queue.start()
    return queue


def _seconds(seconds: float) -> datetime:
    return virtual_time.START + timedelta(seconds=seconds)


def test_events_overtake_a_resync():
    async def scenario() -> list[Key]:
        recorder = Recorder(seconds=1.0)
        queue = _queue(recorder, workers=1)
        for key in (A, B, C):
            queue.add_from_resync(key)
        queue.add(C)
        queue.add_from_resync(C)
        assert len(queue) == 3
        await asyncio.sleep(10)
        await queue.stop(1)
        return [key for _, key in recorder.looks]

    assert run(scenario()) == [C, A, B]


def test_a_key_added_many_times_is_reconciled_once():
    async def scenario() -> Recorder:
        look = Recorder()
        queue = _queue(look)
        for _ in range(5):
            queue.add(A)
        assert len(queue) == 1
        await asyncio.sleep(100)
        return look

    assert run(scenario()).times() == [0.0]


def test_keys_are_served_in_the_order_they_came():
    async def scenario() -> Recorder:
        look = Recorder(seconds=1)
        queue = _queue(look, workers=1)
        for key in (B, A, C, A):
            queue.add(key)
        await asyncio.sleep(100)
        return look

    assert [key for _, key in run(scenario()).looks] == [B, A, C]


def test_events_during_a_reconcile_cause_exactly_one_more():
    async def scenario() -> Recorder:
        look = Recorder(seconds=10)
        queue = _queue(look)
        queue.add(A)
        await asyncio.sleep(1)
        queue.add(A)
        queue.add(A)
        await asyncio.sleep(100)
        return look

    look = run(scenario())
    assert look.times() == [0.0, 10.0]
    assert look.most_at_once == 1


def test_no_more_concurrent_reconciles_than_workers():
    async def scenario() -> Recorder:
        look = Recorder(seconds=1)
        queue = _queue(look, workers=3)
        for number in range(10):
            queue.add(Key(namespace="team", name=str(number)))
        await asyncio.sleep(100)
        return look

    look = run(scenario())
    assert look.most_at_once == 3
    assert len(look.looks) == 10


def test_errors_back_off_up_to_a_minute_and_a_success_resets_the_backoff():
    async def scenario() -> Recorder:
        look = Recorder()
        look.answers = [UnavailableError("x", 500, "no") for _ in range(12)] + [None, UnavailableError("x", 500, "no")]
        queue = _queue(look)
        queue.add(A)
        await asyncio.sleep(1000)
        queue.add(A)
        await asyncio.sleep(10)
        return look

    times = run(scenario()).times()
    gaps = [round(b - a, 3) for a, b in itertools.pairwise(times)]
    assert gaps[:12] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 51.2, 60.0, 60.0]
    assert gaps[-1] == 0.1


def test_nothing_wakes_a_key_before_retry_after():
    async def scenario() -> Recorder:
        look = Recorder()
        look.answers = [UnavailableError("x", 429, "slow down", 7.0)]
        queue = _queue(look)
        queue.add(A)
        for _ in range(6):
            await asyncio.sleep(1)
            queue.add(A)
        await asyncio.sleep(100)
        return look

    assert run(scenario()).times() == [0.0, 7.0]


def test_an_event_does_not_wait_for_the_backoff():
    async def scenario() -> Recorder:
        look = Recorder()
        look.answers = [UnavailableError("x", 500, "no")] * 8
        queue = _queue(look)
        queue.add(A)
        await asyncio.sleep(7)  # the next try is due at 12.7
        queue.add(A)
        await asyncio.sleep(0.5)
        return look

    assert run(scenario()).times()[-1] == 7.0


def test_a_next_check_is_kept_and_replaced_by_a_later_answer():
    async def scenario() -> Recorder:
        look = Recorder()
        look.answers = [_seconds(50), _seconds(30)]
        queue = _queue(look)
        queue.add(A)
        await asyncio.sleep(10)
        queue.add(A)
        await asyncio.sleep(1000)
        return look

    assert run(scenario()).times() == [0.0, 10.0, 30.0]


def test_a_next_check_in_the_past_is_done_at_once():
    async def scenario() -> Recorder:
        look = Recorder()
        look.answers = [_seconds(-5)]
        queue = _queue(look)
        queue.add(A)
        await asyncio.sleep(1)
        return look

    assert run(scenario()).times() == [0.0, 0.0]


def test_replaced_deadlines_do_not_accumulate():
    async def scenario() -> int:
        look = Recorder()
        look.answers = [_seconds(86_400 + number) for number in range(1000)]
        queue = _queue(look)
        for _ in range(1000):
            queue.add(A)
            await asyncio.sleep(1)
        return queue.num_timers

    assert run(scenario()) < 100


def test_an_unexpected_error_is_logged_with_its_traceback_and_stops_no_worker(caplog):
    async def scenario() -> tuple[Recorder, bool]:
        look = Recorder()
        look.answers = [KeyError("spec")]
        queue = _queue(look, workers=1)
        queue.add(A)
        await asyncio.sleep(1)
        return look, queue.is_alive

    with caplog.at_level(logging.ERROR):
        look, is_alive = run(scenario())
    assert is_alive
    assert look.times() == [0.0, 0.1]
    assert "KeyError: 'spec'" in caplog.text


def test_a_hanging_reconcile_times_out(caplog):
    async def scenario() -> Recorder:
        look = Recorder(seconds=10_000)
        queue = _queue(look, workers=1)
        queue.add(A)
        await asyncio.sleep(241)
        return look

    assert run(scenario()).times() == [0.0, 240.1]
    assert "not done within 240 s" in caplog.text


def test_stopping_finishes_reconciles_in_progress_and_starts_none():
    async def scenario() -> tuple[Recorder, float]:
        look = Recorder(seconds=5)
        queue = _queue(look, workers=1)
        queue.add(A)
        queue.add(B)
        await asyncio.sleep(1)
        await queue.stop(20)
        return look, asyncio.get_running_loop().time()

    look, ended = run(scenario())
    assert [key for _, key in look.looks] == [A]
    assert look.at_once == 0
    assert ended == 5.0


def test_stopping_cancels_slow_reconciles(caplog):
    async def scenario() -> tuple[Recorder, float]:
        look = Recorder(seconds=100)
        queue = _queue(look, workers=1)
        queue.add(A)
        await asyncio.sleep(1)
        await queue.stop(20)
        return look, asyncio.get_running_loop().time()

    look, ended = run(scenario())
    assert ended == 21.0
    assert look.at_once == 0
    assert "not done within 20 s" in caplog.text


def test_idle_workers_stop_at_once():
    async def scenario() -> float:
        queue = _queue(Recorder(), workers=4)
        await asyncio.sleep(1)
        await queue.stop(20)
        assert not queue.is_alive
        return asyncio.get_running_loop().time()

    assert run(scenario()) == 1.0


def test_errors_and_reconciles_are_counted():
    async def scenario() -> Metrics:
        look = Recorder()
        look.answers = [UnavailableError("x", 500, "no")]
        metrics = Metrics()
        queue = WorkQueue(look, workers=1, metrics=metrics, clock=now, jitter=lambda: 0.0)
        queue.start()
        queue.add(A)
        await asyncio.sleep(1)
        return metrics

    registry = run(scenario()).registry
    assert registry.get_sample_value("rljob_operator_errors_total", {"error": "UnavailableError"}) == 1
    assert registry.get_sample_value("rljob_operator_reconcile_seconds_count") == 2
    assert registry.get_sample_value("rljob_operator_queue_depth") == 0


@pytest.mark.parametrize("workers", [1, 8])
def test_a_queue_that_was_not_started_is_not_alive(workers):
    assert not WorkQueue(Recorder(), workers=workers, metrics=Metrics()).is_alive


@pytest.mark.parametrize("jump_s", [-3600.0, 3600.0])
def test_a_clock_that_was_wrong_for_a_moment_delays_no_check(jump_s: float, caplog: pytest.LogCaptureFixture):
    """The check is asked for while the clock is wrong; after that nothing happens to the job."""
    caplog.set_level(logging.WARNING)
    offset_s = 0.0

    async def scenario() -> list[float]:
        nonlocal offset_s

        async def look(key: Key) -> datetime | None:
            looks.append(asyncio.get_running_loop().time())
            return _seconds(5.0) if clock() < _seconds(5.0) else None

        def clock() -> datetime:
            return now() + timedelta(seconds=offset_s)

        looks: list[float] = []
        queue = WorkQueue(look, workers=1, metrics=Metrics(), clock=clock, jitter=lambda: 0.0)
        queue.start()
        await asyncio.sleep(0.1)
        offset_s = jump_s
        await asyncio.sleep(1)
        queue.add(A)
        await asyncio.sleep(1)
        offset_s = 0.0
        await asyncio.sleep(20)
        await queue.stop(1)
        return looks

    looks = run(scenario())
    assert looks[0] == pytest.approx(1.1)
    if jump_s < 0:
        assert looks[-1] == pytest.approx(5.0), "at its time, as if the clock had never been wrong"
    assert len(looks) <= 4
    assert len(caplog.messages) == 2
