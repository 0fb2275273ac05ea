from collections import deque

import pytest

from rljob_runtime.environments.sokoban import Sokoban
from rljob_runtime.environments.sokoban_rooms import Room, make_room
from rljob_runtime.errors import EnvironmentSetupError

NAMES = {"Up": (-1, 0), "Down": (1, 0), "Left": (0, -1), "Right": (0, 1)}
ROLL = [
    {"dim_room": [6, 6], "num_boxes": 1},
    {"dim_room": [10, 10], "num_boxes": 2, "search_depth": 10},
    {"dim_room": [6, 6], "num_boxes": 1, "search_depth": 30},
    {},
]


def answer(name: str) -> str:
    return f"<answer>{name}</answer>"


def solution(room) -> list[str]:
    """Shortest actions that solve a room, by breadth-first search."""
    seen, line = {(room.player, room.boxes)}, deque([(room.player, room.boxes, [])])
    while line:
        player, boxes, actions = line.popleft()
        if boxes == room.targets:
            return actions
        for name, (down, right) in NAMES.items():
            ahead, beyond = (player[0] + down, player[1] + right), (player[0] + 2 * down, player[1] + 2 * right)
            after = boxes
            if ahead not in room.floor:
                continue
            if ahead in boxes:
                if beyond not in room.floor or beyond in boxes:
                    continue
                after = boxes - {ahead} | {beyond}
            if (ahead, after) not in seen:
                seen.add((ahead, after))
                line.append((ahead, after, [*actions, name]))
    raise AssertionError("the room has no solution")


def room_of(size, num_boxes, depth, seed):
    return make_room(height=size, width=size, num_boxes=num_boxes, num_walk_steps=int(3.4 * size), search_depth=depth, seed=seed)


@pytest.mark.parametrize(("size", "num_boxes", "depth"), [(6, 1, 300), (10, 2, 10), (8, 2, 60)])
def test_every_room_can_be_solved_and_is_not_solved_at_its_beginning(size, num_boxes, depth) -> None:
    for seed in range(25):
        room = room_of(size, num_boxes, depth, seed)
        assert len(room.boxes) == len(room.targets) == num_boxes
        assert not room.boxes & room.targets
        assert room.player in room.floor - room.boxes
        assert room == room_of(size, num_boxes, depth, seed)
        game = Sokoban({"dim_room": [size, size], "num_boxes": num_boxes, "search_depth": depth, "max_steps": None})
        game.reset(seed)
        turns = [game.step(answer(name)) for name in solution(room)]
        assert [turn.done for turn in turns] == [False] * (len(turns) - 1) + [True]
        # Source: gym-sokoban, sokoban_env.py: -0.1 a step, +1 for a box on a target, -1 off it, +10 at the end.
        assert sum(turn.reward for turn in turns) == pytest.approx(10 + num_boxes - 0.1 * len(turns))
        assert turns[-1].info["success"] == 1.0


def test_a_deeper_search_moves_boxes_farther() -> None:
    def distance(depth):
        rooms = [room_of(8, 1, depth, seed) for seed in range(40)]
        return sum(abs(a[0] - b[0]) + abs(a[1] - b[1]) for room in rooms for a, b in zip(room.boxes, room.targets, strict=True))

    assert distance(40) > 1.3 * distance(4)


@pytest.mark.parametrize("parameters", ROLL)
def test_rolls_configurations_have_rooms(parameters) -> None:
    game = Sokoban(parameters)
    shown = [game.reset(seed).observation for seed in range(8)]
    height, width = parameters.get("dim_room", [10, 10])
    for text in shown:
        rows = text.split("\n")
        assert [len(row) for row in rows] == [width] * height
        assert text.count("X") == text.count("O") + text.count("S") == parameters.get("num_boxes", 4)
        assert text.count("P") + text.count("S") == 1
    assert len(set(shown)) == len(shown)


def game_of(rows: str, **parameters) -> Sokoban:
    """A game whose room is what the rows show."""
    cells = {(r, c): symbol for r, row in enumerate(rows.split()) for c, symbol in enumerate(row)}
    room = Room(
        floor=frozenset(cell for cell, symbol in cells.items() if symbol != "#"),
        targets=frozenset(cell for cell, symbol in cells.items() if symbol in "O√S"),
        boxes=frozenset(cell for cell, symbol in cells.items() if symbol in "X√"),
        player=next(cell for cell, symbol in cells.items() if symbol in "PS"),
    )
    height = len(rows.split())
    game = Sokoban({"dim_room": [height, len(rows.split()[0])], "num_boxes": len(room.boxes), **parameters}, lambda *_: room)
    game.reset(0)
    return game


def test_pushes_walls_and_rewards() -> None:
    game = game_of("####### #PXO_O# #__X__# #######")
    on = game.step(answer("Right"))
    assert on.observation == "#######\n#_P√_O#\n#__X__#\n#######"
    assert on.reward == pytest.approx(0.9)
    off = game.step(answer("right"))
    assert off.observation == "#######\n#__SXO#\n#__X__#\n#######"
    assert off.reward == pytest.approx(-1.1)
    wall = game.step(answer("Up"))
    assert (wall.observation, wall.reward, wall.info["action_is_effective"]) == (off.observation, pytest.approx(-0.1), 0.0)
    blocked = game.step(answer("Down"))
    assert (blocked.observation, blocked.action_valid) == (off.observation, True)


def test_a_response_without_an_action_is_a_step_without_a_move() -> None:
    game = game_of("###### #PX_O# ###### ######", format_penalty=-0.15, max_steps=2)
    turns = [game.step("Right"), game.step("Right")]
    assert [turn.reward for turn in turns] == [pytest.approx(-0.25)] * 2
    assert [turn.done for turn in turns] == [False, True]
    assert turns[0].info == {"success": 0.0, "action_is_valid": 0.0, "action_is_effective": 0.0, "format_penalty": -0.15}


def test_other_symbols() -> None:
    lookup = {0: "W", 1: ".", 2: "G", 3: "C", 4: "B", 5: "A", 6: "@"}
    game = Sokoban({"dim_room": [6, 6], "num_boxes": 1, "grid_lookup": lookup, "grid_vocab": {"W": "wall"}})
    first = game.reset(1)
    assert set(first.observation) <= set("W.GCBA@\n")
    assert "W: wall" in first.instruction


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"dim_room": [6]}, "dim_room.1: Field required"),
        ({"action_lookup": {0: "Up"}}, r"action_lookup has the keys \[0\]; it must have \[1, 2, 3, 4\]"),
    ],
)
def test_parameters_of_no_use_are_refused(parameters, message) -> None:
    with pytest.raises(EnvironmentSetupError, match=message):
        Sokoban(parameters)


def test_a_room_without_place_is_refused() -> None:
    with pytest.raises(EnvironmentSetupError, match="no room of 4 x 4 with 3 boxes was found for seed 0; enlarge dim_room"):
        make_room(height=4, width=4, num_boxes=3, num_walk_steps=10, search_depth=10, seed=0)
