"""How often and how soon an engine is replaced."""

from rljob_runtime.loop.replacement import backoff_s


def test_the_first_replacement_begins_at_once_later_ones_wait_longer_and_the_last_is_the_limits() -> None:
    assert [backoff_s(n, 9) for n in range(10)] == [0.0, 5.0, 10.0, 20.0, 40.0, 80.0, 120.0, 120.0, 120.0, None]
    assert backoff_s(0, 0) is None
