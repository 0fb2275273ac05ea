"""Rooms for Sokoban, made by playing backwards, so that each can be solved.

A random walk clears floor, the boxes are put on their targets, and the player, who pulls boxes now, searches for a state in which none is
on a target and boxes have come far. The parameters mean what they mean in gym-sokoban (M. Schrader, ``room_utils.py``), of which this is
no copy: a seed leads to another room than there.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from rljob_runtime.errors import EnvironmentSetupError

Cell = tuple[int, int]
"""(row, column)."""

UP, DOWN, LEFT, RIGHT = (-1, 0), (1, 0), (0, -1), (0, 1)
DIRECTIONS = (UP, DOWN, LEFT, RIGHT)
_TURN_PROBABILITY = 0.35
_PATCHES: tuple[tuple[Cell, ...], ...] = (
    (LEFT, (0, 0), RIGHT),
    (UP, (0, 0), DOWN),
    (LEFT, (0, 0), DOWN),
    (LEFT, (0, 0), (1, -1), DOWN),
    ((0, 0), RIGHT, DOWN),
)
"""Cells around the walker that become floor."""
_MAX_ROOMS = 400
_MAX_STATES = 3000
"""Of one search: about 20 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A game at its beginning; what is neither floor nor outside is wall."""

    floor: frozenset[Cell]
    targets: frozenset[Cell]
    boxes: frozenset[Cell]
    player: Cell


def make_room(*, height: int, width: int, num_boxes: int, num_walk_steps: int, search_depth: int, seed: int) -> Room:
    """The room of a seed.

    Args:
        height: rows, walls included.
        width: columns.
        num_boxes: boxes, and targets.
        num_walk_steps: length of the walk that clears the floor.
        search_depth: moves that the backward search looks ahead.
        seed: the only source of chance.

    Raises:
        EnvironmentSetupError: no room of this size has place for the boxes, or none was found in which all can be moved off their targets.
    """
    chance = random.Random(seed)
    for _ in range(_MAX_ROOMS):
        floor = _walk(chance, height, width, num_walk_steps)
        if len(floor) <= num_boxes + 1:
            continue
        player, *targets = chance.sample(sorted(floor), num_boxes + 1)
        found = _play_backwards(chance, floor, tuple(targets), player, search_depth)
        if found is not None:
            boxes, player, displacement = found
            player = _stroll(chance, floor - set(boxes), player, 0.8 if displacement == 1 else 0.5)
            return Room(floor=floor, targets=frozenset(targets), boxes=frozenset(boxes), player=player)
    raise EnvironmentSetupError(
        f"parameters of Sokoban: no room of {height} x {width} with {num_boxes} boxes was found for seed {seed}; "
        f"enlarge dim_room, lower num_boxes or raise search_depth"
    )


def _walk(chance: random.Random, height: int, width: int, num_steps: int) -> frozenset[Cell]:
    row, column = chance.randint(1, height - 2), chance.randint(1, width - 2)
    direction = chance.choice(DIRECTIONS)
    floor: set[Cell] = set()
    for _ in range(num_steps):
        if chance.random() < _TURN_PROBABILITY:
            direction = chance.choice(DIRECTIONS)
        row = min(max(row + direction[0], 1), height - 2)
        column = min(max(column + direction[1], 1), width - 2)
        for down, right in chance.choice(_PATCHES):
            if 0 < row + down < height - 1 and 0 < column + right < width - 1:
                floor.add((row + down, column + right))
    return frozenset(floor)


def _play_backwards(
    chance: random.Random, floor: frozenset[Cell], targets: tuple[Cell, ...], player: Cell, search_depth: int
) -> tuple[tuple[Cell, ...], Cell, int] | None:
    """Boxes, player and displacement of the best state with every target empty; None if there is none.

    The score is gym-sokoban's: times that another box began to be pulled, times the boxes' distances from their targets.
    """
    seen: set[tuple[frozenset[Cell], Cell]] = set()
    best: tuple[tuple[Cell, ...], Cell, int] | None = None
    best_score = 0
    # Boxes in the order of their targets, player, the box pulled last, swaps between boxes, depth.
    stack: list[tuple[tuple[Cell, ...], Cell, int, int, int]] = [(targets, player, -1, 0, 1)]
    while stack and len(seen) < _MAX_STATES:
        boxes, player, pulled, swaps, depth = stack.pop()
        occupied = frozenset(boxes)
        if (occupied, player) in seen or depth > search_depth:
            continue
        seen.add((occupied, player))
        displacement = sum(abs(a[0] - b[0]) + abs(a[1] - b[1]) for a, b in zip(boxes, targets, strict=True))
        if swaps * displacement > best_score and not occupied.intersection(targets) and player not in targets:
            best, best_score = (boxes, player, displacement), swaps * displacement
        for down, right in chance.sample(DIRECTIONS, 4):
            ahead, behind = (player[0] + down, player[1] + right), (player[0] - down, player[1] - right)
            if ahead not in floor or ahead in occupied:
                continue
            if behind in occupied:
                which = boxes.index(behind)
                moved = (*boxes[:which], player, *boxes[which + 1 :])
                stack.append((moved, ahead, which, swaps + (which != pulled), depth + 1))
            else:
                stack.append((boxes, ahead, pulled, swaps, depth + 1))
    return best


def _stroll(chance: random.Random, free: frozenset[Cell], player: Cell, probability: float) -> Cell:
    """Where the player stands after up to three moves, so that it is not always beside a box."""
    if chance.random() > probability:
        return player
    been = {player}
    for _ in range(3):
        near = [(player[0] + down, player[1] + right) for down, right in DIRECTIONS]
        possible = [cell for cell in near if cell in free and cell not in been]
        if not possible:
            break
        player = chance.choice(possible)
        been.add(player)
        if chance.random() > 0.5:
            break
    return player
