"""How long the next driver waits for the pod of the one before it."""

from __future__ import annotations

import pytest

from rljob_operator.policies import handover
from rljob_operator.policies.situation import assess
from tests.support.operator_scene import Scene, at, scene


def wait(built: Scene, now: int, since: int = 100) -> handover.Wait | None:
    return handover.wait_for_heads(assess(built.observed(), at(now)), since=at(since))


def test_nobody_waits_without_a_head_pod() -> None:
    assert wait(scene().nodes(), 101) is None


ENDED = ("Succeeded", "Failed")


@pytest.mark.parametrize("phase", ["Pending", "Running", "Unknown", *ENDED])
def test_only_pods_that_may_run_something_are_waited_for(phase: str) -> None:
    assert (wait(scene().pod("h", head=True, phase=phase), 101) is None) == (phase in ENDED)


def test_the_wait_ends_ten_minutes_after_the_attempt_or_the_pods_own_term() -> None:
    stays = scene().pod("h", head=True)
    found = wait(stays, 699)
    assert found is not None
    assert found.until == at(700)
    assert "pod h" in found.message
    assert wait(stays, 700) is None
    goes = scene().pod("h", head=True, deleting=True, deletion_time=at(500))
    assert wait(goes, 1099) is not None
    assert wait(goes, 1100) is None


def test_the_last_of_several_pods_counts() -> None:
    found = wait(scene().pod("a", head=True, deletion_time=at(300)).pod("b", 2, head=True), 200)
    assert found is not None
    assert found.until == at(900)
