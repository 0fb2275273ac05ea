"""Demonstrations of FrozenLake: token ids as the Environment worker sends them, best actions, which tokens are learned."""

import pytest

from rljob_runtime.environments.frozen_lake import FrozenLake
from rljob_runtime.tiny.lake_corpus import ACTIONS, PARAMETERS, best_actions, demonstrations, response
from rljob_runtime.tiny.tokenizer import build_tokenizer


@pytest.mark.parametrize(
    ("grid", "best"),
    [(" P F\n F G", ["Down", "Right"]), (" P H\n F G", ["Down"]), (" F P\n F G", ["Down"]), (" G F P\n F H F\n F F F", ["Left"])],
)
def test_best_actions_lead_around_holes(grid: str, best: list[str]) -> None:
    assert best_actions(grid) == best


def test_the_best_actions_cross_every_lake() -> None:
    lake = FrozenLake(PARAMETERS)
    for seed in range(50):
        turn = lake.reset(seed)
        while not turn.done:
            turn = lake.step(response(best_actions(turn.observation)[0]))
        assert turn.info["success"] == 1.0


def test_demonstrations_are_conversations_whose_best_actions_are_learned() -> None:
    texts = [FrozenLake(PARAMETERS).reset(seed).observation + "\n" for seed in range(50)]
    tokenizer = build_tokenizer([*texts, *map(response, ACTIONS)], vocab_size=640)
    first, second = (demonstrations(tokenizer, count=20, turns=3, best_share=None, seed=1) for _ in range(2))
    assert first == second
    for made in first:
        turns = tokenizer.decode(made.ids).split(tokenizer.eos_token)
        learned = tokenizer.decode([token for token, is_learned in zip(made.ids, made.labeled, strict=True) if is_learned])
        for text in learned.split(tokenizer.eos_token)[:-1]:
            assert any(turn == f"{turn[: -len(text)]}{text}" and text in map(response, best_actions(turn[: -len(text)])) for turn in turns)
