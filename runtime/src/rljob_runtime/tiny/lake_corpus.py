"""Episodes of FrozenLake as token ids, made by the very modules that an Environment worker runs, and episodes that a model plays.

Shape legend: ``L`` tokens of an episode so far, prompt and responses together.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from rljob_runtime.environments.codec import Codec, Place, PromptSettings
from rljob_runtime.environments.frozen_lake import FrozenLake
from rljob_runtime.environments.protocol import Turn

MAX_TURNS, MAX_RESPONSE = 10, 8
CELLS = {"0": " P", "1": " F", "2": " H", "3": " G", "4": " X", "5": " W"}
"""Symbols behind a space are a token each, whatever stands beside them."""
PARAMETERS: Mapping[str, Any] = {"size": 4, "p": 0.8, "is_slippery": False, "grid_lookup": CELLS}
"""``environments[].parameters`` of examples/frozen-lake.yaml."""
PROMPT = PromptSettings(chat_template=False, instruction="", turn="{observation}\n")
"""``environments[].prompt`` there."""
ACTIONS = ("Left", "Down", "Right", "Up")
_MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))


def best_actions(observation: str) -> list[str]:
    """Actions on a shortest way from the player to the goal around the holes."""
    grid = [row.split() for row in observation.strip("\n").split("\n")]
    cells = {(r, c): cell for r, row in enumerate(grid) for c, cell in enumerate(row)}
    goal = next(at for at, cell in cells.items() if cell in ("G", "W"))
    distance, line = {goal: 0}, deque([goal])
    while line:
        at = line.popleft()
        for row, column in _MOVES:
            near = (at[0] + row, at[1] + column)
            if cells.get(near, "H") != "H" and near not in distance:
                distance[near] = distance[at] + 1
                line.append(near)
    player = next(at for at, cell in cells.items() if cell == "P")
    around = {name: (player[0] + row, player[1] + column) for name, (row, column) in zip(ACTIONS, _MOVES, strict=True)}
    least = min(distance.get(at, 99) for at in around.values())
    return [name for name, at in around.items() if distance.get(at, 99) == least]


def response(action: str) -> str:
    """What the policy writes."""
    return f"<answer>{action}</answer>"


@dataclass(slots=True)
class Episode:
    """One that is being played."""

    codec: Codec
    lake: FrozenLake = field(default_factory=lambda: FrozenLake(PARAMETERS))
    ids: list[int] = field(default_factory=list)
    """Shape (L,)."""
    labeled: list[bool] = field(default_factory=list)
    """Shape (L,): whether the token is one that is to be learned."""
    turn: int = 0
    done: bool = False
    success: bool = False
    observation: str = ""

    def begin(self, seed: int) -> None:
        """The first prompt."""
        first = self.lake.reset(seed)
        self.observation = first.observation
        self._append(self.codec.first_prompt(first, self._place()).tolist(), learned=False)

    def act(self, ids: Sequence[int], text: str, *, learned: bool) -> bool:
        """Take the tokens of a response, and append what it led to; whether it named an action."""
        self._append(ids, learned=learned)
        led = self.lake.step(text)
        self.turn, self.observation = self.turn + 1, led.observation
        self.success = led.info["success"] > 0
        self.done = led.done or self.turn == MAX_TURNS
        if not self.done:
            self._append(self._continuation(ids, led), learned=False)
        return led.action_valid

    def _continuation(self, ids: Sequence[int], led: Turn) -> list[int]:
        return list(self.codec.continuation(ids[-1] if ids else None, led, self._place()).tolist())

    def _place(self) -> Place:
        return Place(turn=self.turn, actions_left=MAX_TURNS - self.turn, max_tokens=MAX_RESPONSE)

    def _append(self, ids: Sequence[int], *, learned: bool) -> None:
        self.ids += ids
        self.labeled += [learned] * len(ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """Some turns of an episode to learn from."""

    ids: tuple[int, ...]
    labeled: tuple[bool, ...]


def demonstrations(
    tokenizer: PreTrainedTokenizerBase, *, count: int, turns: int, best_share: float | None, seed: int
) -> list[Demonstration]:
    """Episodes of at most ``turns`` turns on maps of their own.

    Args:
        tokenizer: of the model.
        count: of episodes.
        turns: after which they are cut.
        best_share: share of best actions, the others are chosen from the rest and learned as well; None: a third of the actions is random
            and not learned, all others are the best.
        seed: of maps and actions.
    """
    generator, codec = random.Random(seed), Codec(tokenizer, PROMPT)
    made = []
    for number in range(count):
        episode = Episode(codec)
        episode.begin(seed * 1_000_003 + number)
        while not episode.done and episode.turn < turns:
            best = best_actions(episode.observation)
            others = [action for action in ACTIONS if action not in best]
            random_action = others and generator.random() >= (2 / 3 if best_share is None else best_share)
            action = generator.choice(others if random_action else best)
            text = response(action)
            ids = [*tokenizer.encode(text, add_special_tokens=False), int(tokenizer.eos_token_id)]
            episode.act(ids, text, learned=best_share is not None or not random_action)
        made.append(Demonstration(ids=tuple(episode.ids), labeled=tuple(episode.labeled)))
    return made
