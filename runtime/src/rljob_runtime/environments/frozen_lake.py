"""FrozenLake as text: cross a lake, some of whose cells are holes.

The lake itself is gymnasium's; maps, symbols, texts and penalties are those of ROLL (``agentic/env/frozen_lake``), so that the same seed is
the same map there and here.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any

import numpy as np
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from gymnasium.utils import seeding
from pydantic import Field

from rljob_runtime.environments.actions import action_parser
from rljob_runtime.environments.grid_settings import GridSettings, check_keys, read_settings
from rljob_runtime.environments.protocol import Turn
from rljob_runtime.errors import EnvironmentSetupError

PLAYER, EMPTY, HOLE, GOAL, PLAYER_IN_HOLE, PLAYER_ON_GOAL = range(6)
_SYMBOLS = {PLAYER: "P", EMPTY: "_", HOLE: "O", GOAL: "G", PLAYER_IN_HOLE: "X", PLAYER_ON_GOAL: "√"}
_MEANINGS = {"P": "player", "_": "empty", "O": "hole", "G": "goal", "X": "player in hole", "√": "player on goal"}
_ACTIONS = {0: "Left", 1: "Down", 2: "Right", 3: "Up"}
_CELLS = {"P": PLAYER, "F": EMPTY, "H": HOLE, "G": GOAL}
_INSTRUCTION = (
    "You are solving the FrozenLake puzzle. Forbid the whole and go to the target. "
    "You may move to the unintended direction due to the slippery ice. "
    "The answer must be one of action in a turn, format is <answer>Right</answer>"
)


class FrozenLakeSettings(GridSettings):
    """Parameters of FrozenLake, with ROLL's defaults."""

    size: Annotated[int, Field(ge=2, le=64)] = 4
    """Cells on a side."""
    p: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of cells that are frozen, not holes."""
    is_slippery: bool = True
    """Whether a move goes to either side two times out of three."""
    map_seed: Annotated[int, Field(ge=0)] | None = None
    """Seed of one map for all episodes, whose own seed then only decides where the player slips; None: a map for each seed."""
    map_lookup: Mapping[str, int] = _CELLS
    """Key in ``grid_lookup`` of the lake's cells: F frozen, H hole, G goal."""
    grid_lookup: Mapping[int, str] = _SYMBOLS
    grid_vocab: Mapping[str, str] = _MEANINGS
    action_lookup: Mapping[int, str] = _ACTIONS
    env_instruction: str = _INSTRUCTION


class FrozenLake:
    """One lake at a time; a map is a function of the seed."""

    def __init__(self, parameters: Mapping[str, Any]) -> None:
        """Raise EnvironmentSetupError when a parameter is unknown or of no use."""
        self._settings = settings = read_settings(FrozenLakeSettings, "FrozenLake", parameters)
        check_keys("FrozenLake", "grid_lookup", settings.grid_lookup, _SYMBOLS)
        check_keys("FrozenLake", "action_lookup", settings.action_lookup, _ACTIONS)
        lacking = [cell for cell in "FHG" if settings.map_lookup.get(cell) not in settings.grid_lookup]
        if lacking:
            raise EnvironmentSetupError(
                f"parameters of FrozenLake: map_lookup has no key of grid_lookup for {', '.join(lacking)}; give each of F, H, G one"
            )
        self._parser = action_parser(settings.action_pattern, settings.action_lookup, settings.special_token_list)
        self._rules = settings.rules()

    def reset(self, seed: int) -> Turn:
        """Begin the episode of a seed."""
        settings = self._settings
        self._steps = 0
        self._map = make_map(settings.size, settings.p, seed if settings.map_seed is None else settings.map_seed)
        self._lake = copy.copy(_lake(self._map, settings.is_slippery))
        self._lake.reset(seed=seed)
        shown = settings.grid_lookup
        start = str.maketrans({"S": shown[settings.map_lookup["F"]]} | {cell: shown[settings.map_lookup[cell]] for cell in "FHG"})
        self._cells = [[cell.translate(start) for cell in row] for row in self._map]
        return Turn(observation=self._observation(), instruction=self._rules)

    def step(self, action: str) -> Turn:
        """Move, or stay where the response names no action."""
        self._steps += 1
        number = self._parser.number(action)
        before = self._lake.s
        reward, ended = self._settings.format_penalty, False
        if number is not None:
            _, reward, ended, _, _ = self._lake.step(number)
        return Turn(
            observation=self._observation(),
            reward=float(reward),
            done=bool(ended) or self._steps == self._settings.max_steps,
            info={
                "success": float(self._cell() == "G"),
                "action_is_valid": float(number is not None),
                "action_is_effective": float(self._lake.s != before),
                "format_penalty": self._settings.format_penalty if number is None else 0.0,
            },
            action_valid=number is not None,
        )

    def close(self) -> None:
        """Nothing is held."""

    def _cell(self) -> str:
        row, column = divmod(int(self._lake.s), self._settings.size)
        return self._map[row][column]

    def _observation(self) -> str:
        row, column = divmod(int(self._lake.s), self._settings.size)
        player = {"H": PLAYER_IN_HOLE, "G": PLAYER_ON_GOAL}.get(self._cell(), PLAYER)
        hidden = self._cells[row][column]
        self._cells[row][column] = self._settings.grid_lookup[player]
        shown = "\n".join("".join(cells) for cells in self._cells)
        self._cells[row][column] = hidden
        return shown


@lru_cache(256)
def _lake(rows: tuple[str, ...], is_slippery: bool) -> FrozenLakeEnv:
    """The lake of a map, with its table of moves, which all that are played on that map share: to be copied before a player steps on it."""
    return FrozenLakeEnv(desc=list(rows), is_slippery=is_slippery)


@lru_cache(256)
def make_map(size: int, p: float, seed: int) -> tuple[str, ...]:
    """Rows of a map with a way from start (S) to goal (G), both anywhere; F is frozen, H a hole.

    Sooner or later they are neighbors, whatever ``p`` is, so that there always is one.
    """
    generator, _ = seeding.np_random(seed)
    while True:
        cells = generator.choice(["F", "H"], (size, size), p=[p, 1 - p])
        start, goal = (tuple(generator.integers(size, size=2)) for _ in range(2))
        if start == goal:
            continue
        cells[start], cells[goal] = "S", "G"
        if _is_connected(cells, start, goal):
            return tuple("".join(row) for row in cells)


def _is_connected(cells: np.ndarray, start: tuple[int, ...], goal: tuple[int, ...]) -> bool:
    frontier, seen = [start], {start}
    while frontier:
        row, column = frontier.pop()
        for near in ((row + 1, column), (row, column + 1), (row - 1, column), (row, column - 1)):
            if near == goal:
                return True
            inside = 0 <= near[0] < len(cells) and 0 <= near[1] < len(cells)
            if inside and near not in seen and cells[near] != "H":
                seen.add(near)
                frontier.append(near)
    return False
