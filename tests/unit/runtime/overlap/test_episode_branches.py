"""Which sequence of an episode a program's call continues: the endpoint's side and the driver's together."""

from typing import Any

import numpy as np

from rljob_runtime.environments.endpoint.conversation import Conversation
from rljob_runtime.environments.messages import EpisodeReply
from rljob_runtime.overlap.episodes import Episode
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
