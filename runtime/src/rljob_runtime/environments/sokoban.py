"""Sokoban as text: push every box onto a target. Symbols, texts, rewards and penalties are those of ROLL (``agentic/env/sokoban``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Annotated, Any

from pydantic import Field

from rljob_runtime.environments.actions import action_parser
from rljob_runtime.environments.grid_settings import GridSettings, check_keys, read_settings
from rljob_runtime.environments.protocol import Turn
from rljob_runtime.environments.sokoban_rooms import DIRECTIONS, Cell, Room, make_room

WALL, EMPTY, TARGET, BOX_ON_TARGET, BOX, PLAYER, PLAYER_ON_TARGET = range(7)
_SYMBOLS = {WALL: "#", EMPTY: "_", TARGET: "O", BOX_ON_TARGET: "√", BOX: "X", PLAYER: "P", PLAYER_ON_TARGET: "S"}
_MEANINGS = {
    "#": "wall", "_": "empty", "O": "target", "√": "box on target", "X": "box", "P": "player", "S": "player on target",
}  # fmt: skip
_ACTIONS = {1: "Up", 2: "Down", 3: "Left", 4: "Right"}
_INSTRUCTION = (
    "You are solving the Sokoban puzzle. You are the player and you need to push all boxes to targets. "
    "When you are right next to a box, you can push it by moving in the same direction. "
    "You cannot push a box through a wall, and you cannot pull a box. "
    "The answer must be one of action in a turn, format is <answer>Right</answer>."
)
_STEP_REWARD, _BOX_REWARD, _SOLVED_REWARD = -0.1, 1.0, 10.0

Side = Annotated[int, Field(ge=4, le=64)]


class SokobanSettings(GridSettings):
    """Parameters of Sokoban, with ROLL's defaults."""

    dim_room: tuple[Side, Side] = (10, 10)
    """Rows and columns, walls included."""
    num_boxes: Annotated[int, Field(ge=1, le=64)] = 4
    search_depth: Annotated[int, Field(ge=2)] = 300
    """Moves that the search for a room looks ahead: the larger, the farther boxes can be from their targets."""
    num_gen_steps: Annotated[int, Field(ge=1)] | None = None
    """Length of the walk that clears the floor; None: 1.7 times rows plus columns."""
    max_steps: Annotated[int, Field(ge=1)] | None = 20
    grid_lookup: Mapping[int, str] = _SYMBOLS
    grid_vocab: Mapping[str, str] = _MEANINGS
    action_lookup: Mapping[int, str] = _ACTIONS
    env_instruction: str = _INSTRUCTION


class Sokoban:
    """One room at a time; a room is a function of the seed."""

    def __init__(self, parameters: Mapping[str, Any], room_of: Callable[[SokobanSettings, int], Room] | None = None) -> None:
        """Raise EnvironmentSetupError when a parameter is unknown or of no use; ``room_of``: the room of a seed, None: a random one."""
        self._settings = settings = read_settings(SokobanSettings, "Sokoban", parameters)
        check_keys("Sokoban", "grid_lookup", settings.grid_lookup, _SYMBOLS)
        check_keys("Sokoban", "action_lookup", settings.action_lookup, _ACTIONS)
        self._parser = action_parser(settings.action_pattern, settings.action_lookup, settings.special_token_list)
        self._rules = settings.rules()
        self._room_of = room_of or random_room

    def reset(self, seed: int) -> Turn:
        """Begin the episode of a seed."""
        self._room = self._room_of(self._settings, seed)
        self._boxes, self._player, self._steps = set(self._room.boxes), self._room.player, 0
        return Turn(observation=self._observation(), instruction=self._rules)

    def step(self, action: str) -> Turn:
        """Move or push, or stay where the response names no action."""
        self._steps += 1
        number = self._parser.number(action)
        before, on_target = self._player, self._num_on_target()
        reward = _STEP_REWARD
        if number is None:
            reward += self._settings.format_penalty
        else:
            self._move(DIRECTIONS[number - 1])
        reward += _BOX_REWARD * (self._num_on_target() - on_target)
        solved = self._num_on_target() == len(self._boxes)
        if solved:
            reward += _SOLVED_REWARD
        return Turn(
            observation=self._observation(),
            reward=reward,
            done=solved or self._steps == self._settings.max_steps,
            info={
                "success": float(solved),
                "action_is_valid": float(number is not None),
                "action_is_effective": float(self._player != before),
                "format_penalty": self._settings.format_penalty if number is None else 0.0,
            },
            action_valid=number is not None,
        )

    def close(self) -> None:
        """Nothing is held."""

    def _move(self, direction: Cell) -> None:
        """One cell on, with the box that stands there if the cell behind it is free."""
        ahead = (self._player[0] + direction[0], self._player[1] + direction[1])
        beyond = (ahead[0] + direction[0], ahead[1] + direction[1])
        if ahead not in self._room.floor:
            return
        if ahead in self._boxes:
            if beyond not in self._room.floor or beyond in self._boxes:
                return
            self._boxes.remove(ahead)
            self._boxes.add(beyond)
        self._player = ahead

    def _num_on_target(self) -> int:
        return len(self._boxes & self._room.targets)

    def _observation(self) -> str:
        height, width = self._settings.dim_room
        return "\n".join("".join(self._settings.grid_lookup[self._kind((row, column))] for column in range(width)) for row in range(height))

    def _kind(self, cell: Cell) -> int:
        on_target = cell in self._room.targets
        if cell == self._player:
            return PLAYER_ON_TARGET if on_target else PLAYER
        if cell in self._boxes:
            return BOX_ON_TARGET if on_target else BOX
        if on_target:
            return TARGET
        return EMPTY if cell in self._room.floor else WALL


def random_room(settings: SokobanSettings, seed: int) -> Room:
    """The same for equal settings and seed."""
    height, width = settings.dim_room
    steps = int(1.7 * (height + width)) if settings.num_gen_steps is None else settings.num_gen_steps
    return _kept_room(height, width, settings.num_boxes, steps, settings.search_depth, seed)


@lru_cache(maxsize=256)
def _kept_room(height: int, width: int, num_boxes: int, num_walk_steps: int, search_depth: int, seed: int) -> Room:
    """A group's members begin in the same room: one of them pays for it."""
    return make_room(height=height, width=width, num_boxes=num_boxes, num_walk_steps=num_walk_steps, search_depth=search_depth, seed=seed)
