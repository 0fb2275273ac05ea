"""Which sequence of an episode a program's call continues: the endpoint's side and the driver's together."""

from typing import Any

import numpy as np
import pytest

from rljob_api.vocabulary import AdvantageEstimator
from rljob_runtime.environments.endpoint.conversation import Conversation
from rljob_runtime.environments.messages import EpisodeReply, StopReason
from rljob_runtime.overlap.arrange import arrange
from rljob_runtime.overlap.buffer import Group
from rljob_runtime.overlap.episodes import Episode
from rljob_runtime.overlap.rule import Rule
from rljob_runtime.overlap.rule_config import RuleConfig
from rljob_runtime.overlap.samples import Sample
from rljob_runtime.records import Completion, Prompt, Segment, VersionSpan
from tests.support.chat_tokenizers import chat_tokenizer

TOKENIZER = chat_tokenizer("plain")


def encoded(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


def decoded(ids: Any) -> str:
    return str(TOKENIZER.decode(ids.tolist()))


class Calls:
    """An episode of a program that asks for completions of texts."""

    def __init__(self) -> None:
        prompt = Prompt(index=0, text="", token_ids=np.zeros(0, np.int32), answer="", source="agent", metadata={"seed": 1})
        self.episode = Episode(member=Sample(owner=None, group_id=0, index=0, prompt=prompt))  # type: ignore[arg-type]
        self.conversation = Conversation(encoded, None)

    def ask(self, prompt: str, response: str) -> str:
        """What the engine samples behind; it samples ``response``."""
        place = self.conversation.place(prompt)
        reply = EpisodeReply(episode_id="e", token_ids=place.token_ids, branch=place.branch, max_tokens=9, kept_tokens=None)
        self.episode.take(reply, 0.0)
        asked = decoded(self.episode.next_turn(object()).prompt.token_ids)  # type: ignore[arg-type]
        ids = np.asarray(encoded(response), np.int32)
        spans = (VersionSpan(start=0, end=len(ids), version=0),)
        segment = Segment(token_ids=ids, sampled=True, logprobs=np.zeros(len(ids), np.float32), version_spans=spans)
        self.episode.sampled(Completion(request_id="r", finish_reason="length", segment=segment), 0.0)
        self.conversation.sampled(place, ids, response)
        return asked


def test_a_call_that_adds_nothing_to_an_earlier_sequence_is_sampled_behind_that_one() -> None:
    calls = Calls()
    for prompt, response in [("story A: once", " upon"), ("story B: first", " question"), ("story A: once upon", " a time")]:
        assert calls.ask(prompt, response) == prompt
    trained = [[decoded(segment.token_ids) for segment in branch.segments] for branch in calls.episode.branches]
    assert trained == [[" upon", " a time"], [" question"]]


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        (AdvantageEstimator.REINFORCE, {" upon": 1.0, " question": 1.0, " a time": 1.0}),
        (AdvantageEstimator.STEP_REINFORCE, {" upon": 0.25, " question": 0.5, " a time": 1.0}),
    ],
)
def test_credit_goes_back_in_time_whatever_sequence_an_action_belongs_to(estimator: AdvantageEstimator, expected: dict[str, float]) -> None:
    """The middle call, of a sequence that is written last, came before the one that was rewarded."""
    calls = Calls()
    for prompt, response in [("story A: once", " upon"), ("story B: first", " question"), ("story A: once upon", " a time")]:
        calls.ask(prompt, response)
    reply = EpisodeReply(episode_id="e", token_ids=np.zeros(0, np.int32), done=True, reward=1.0, stop=StopReason.DONE)
    calls.episode.take(reply, 0.0)
    response = calls.episode.response(reply, None)
    trajectory = response.scored(0, 0, response.reward)
    step = arrange([Group(group_id=0, trajectories=(trajectory,), failed_samples=0)], version=0)
    gamma = 1.0 if estimator is AdvantageEstimator.REINFORCE else 0.5
    outcome = Rule(RuleConfig(max_response_tokens=64, estimator=estimator, gamma=gamma)).apply(step)
    found, places = {}, np.flatnonzero(step.response_mask)
    for segment in (segment for segment in trajectory.segments if segment.sampled):
        own, places = places[: len(segment)], places[len(segment) :]
        found[decoded(segment.token_ids)] = float(outcome.advantages[own[-1]])
    assert found == expected
