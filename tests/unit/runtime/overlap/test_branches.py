"""Episodes of agent programs: several sequences of one episode, and actions of which a part was never read."""

from collections.abc import Sequence

import numpy as np
import pytest

from rljob_runtime.environments.messages import EpisodeReply, StopReason
from rljob_runtime.overlap.episodes import Episode
from rljob_runtime.overlap.samples import Response, Sample, first_tokens
from rljob_runtime.records import Completion, Prompt, Segment
from tests.support.records import make_segment
from tests.support.routes import routed

NO_TOKENS = np.zeros(0, dtype=np.int32)


def given(*ids: int, branch: int = 0, **more) -> EpisodeReply:
    return EpisodeReply(episode_id="0/0", token_ids=np.array(ids, dtype=np.int32), branch=branch, max_tokens=8, **more)


def ended(reward: float, **more) -> EpisodeReply:
    return EpisodeReply(episode_id="0/0", token_ids=NO_TOKENS, done=True, stop=StopReason.DONE, reward=reward, **more)


def play(*replies: EpisodeReply, actions: list[list[int]]) -> tuple[list[list[int]], Response]:
    """The prompt of every action, and what became of the episode."""
    prompt = Prompt(index=0, text="", token_ids=NO_TOKENS, answer="", source="agent", metadata={"seed": 1})
    episode = Episode(member=Sample(owner=None, group_id=0, index=0, prompt=prompt))  # type: ignore[arg-type]
    prompts = []
    for reply, action in zip(replies, [*actions, None], strict=True):
        episode.take(reply, 0.0)
        if action is not None:
            prompts.append(episode.next_turn(None).prompt.token_ids.tolist())  # type: ignore[arg-type]
            episode.sampled(Completion(request_id="", segment=make_segment(action), finish_reason="stop"), 0.0)
    return prompts, episode.response(replies[-1], None)


def written(segments: Sequence[Segment]) -> list[tuple[bool, list[int]]]:
    return [(segment.sampled, segment.token_ids.tolist()) for segment in segments]


def test_branches_go_on_with_their_own_tokens_and_share_the_score() -> None:
    replies = [
        given(1),
        given(2, action="a"),
        given(7, 8, branch=1, action="b"),
        given(3, branch=0, action="c"),
        ended(1.5, action="d"),
    ]
    prompts, response = play(*replies, actions=[[10], [11], [12], [13]])
    assert prompts == [[1], [1, 10, 2], [7, 8], [1, 10, 2, 11, 3]]
    whole = response.scored(4, 2, response.reward)
    assert [(tuple(prompt.tolist()), written(segments)) for prompt, segments in whole.sequences] == [
        ((1,), [(True, [10]), (False, [2]), (True, [11]), (False, [3]), (True, [13])]),
        ((7, 8), [(True, [12])]),
    ]
    assert (whole.reward.score, [turn.action for turn in whole.episode.turns]) == (1.5, ["a", "b", "c", "d"])
    assert response.num_sampled == 4


def test_what_nobody_read_is_not_trained() -> None:
    _, response = play(given(1), given(2, kept_tokens=2), ended(1.0, kept_tokens=0), actions=[[10, 11, 12], [13]])
    assert written(response.segments) == [(True, [10, 11])]
    assert (response.reward.score, len(response.episode.turns)) == (1.0, 1)


def test_an_episode_of_which_nothing_was_read_is_left_out() -> None:
    _, response = play(given(1), ended(1.0, kept_tokens=0), actions=[[10]])
    assert response.reward.score is None


def test_a_program_that_fails_has_no_score_whatever_it_did() -> None:
    failed = EpisodeReply(episode_id="0/0", token_ids=NO_TOKENS, done=True, stop=StopReason.TIMEOUT, error="too late")
    _, response = play(given(1), failed, actions=[[10]])
    assert (response.reward.score, response.reward.error) == (None, "too late")


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_first_tokens_keep_what_belongs_to_them(count) -> None:
    segment = make_segment([5, 6, 7, 8], logprobs=[-1, -2, -3, -4], versions=[0, 0, 1, 1])
    cut = first_tokens(segment, count)
    assert cut.token_ids.tolist() == [5, 6, 7, 8][:count]
    assert cut.logprobs.tolist() == [-1, -2, -3, -4][:count]
    assert [span.version for span in cut.version_spans for _ in range(span.start, span.end)] == [0, 0, 1, 1][:count]


def test_an_action_asks_for_the_routes_that_its_branch_has_not_got() -> None:
    prompt = Prompt(index=0, text="", token_ids=NO_TOKENS, answer="", source="agent", metadata={"seed": 1})
    episode = Episode(member=Sample(owner=None, group_id=0, index=0, prompt=prompt))  # type: ignore[arg-type]
    before, asked = np.zeros(0, dtype=np.int32), []
    for reply in (given(1, 2), given(3), given(4, 5, kept_tokens=2), given(7, 8, branch=1), given(6, branch=0)):
        episode.take(reply, 0.0)
        turn = episode.next_turn(None)  # type: ignore[arg-type]
        asked.append(turn.num_routed)
        before = turn.prompt.token_ids
        episode.sampled(
            Completion(request_id="", segment=routed(make_segment([10, 11, 12]), before, turn.num_routed), finish_reason="stop"), 0.0
        )
    assert asked == [0, 4, 7, 0, 12]
