"""What a run keeps of the order of prompts."""

import pickle

from rljob_runtime.overlap.prompt_order import PromptOrder, ResumePoint
from tests.support.fake_workers import CountingPrompts


def test_what_is_kept_does_not_grow_with_the_run() -> None:
    order = PromptOrder(CountingPrompts(), first_prompt=0, done=())
    sizes = []
    ahead = order.next(4)
    for _ in range(200):
        batch, ahead = ahead, order.next(4)
        for prompt in batch:
            order.end(prompt.index)
        order.forget_passed()  # as after every step, whether or not there are checkpoints
        sizes.append(len(pickle.dumps(order)))
    assert max(sizes[100:]) <= max(sizes[:100]) + 16  # only numbers have become longer


def test_forgetting_changes_no_resume_point() -> None:
    points = []
    for forgets in (False, True):
        order = PromptOrder(CountingPrompts(), first_prompt=0, done=(1,))
        first, second = order.next(3), order.next(3)
        for prompt in (first[1], *second[:2]):
            order.end(prompt.index)
            if forgets:
                order.forget_passed()
        points.append(order.resume_point())
    assert points == [ResumePoint(source_state={"next": 0}, first_prompt=0, done=(1, 2, 4, 5))] * 2
