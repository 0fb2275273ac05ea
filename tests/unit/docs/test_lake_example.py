"""The example with a frozen lake plays the game that its model was made for."""

from __future__ import annotations

from rljob_api.validation import check
from rljob_runtime.tiny import lake_corpus
from tests.layout.tree import ROOT


def test_the_example_plays_what_its_model_was_made_for():
    spec = check((ROOT / "examples" / "frozen-lake.yaml").read_text()).job.spec
    (lake,) = spec.environments
    assert dict(lake.parameters) == dict(lake_corpus.PARAMETERS)
    assert (lake.prompt.chat_template, lake.prompt.instruction, lake.prompt.turn) == (False, "", lake_corpus.PROMPT.turn)
    assert (lake.max_turns, spec.rollout.max_response_tokens) == (lake_corpus.MAX_TURNS, lake_corpus.MAX_RESPONSE)
