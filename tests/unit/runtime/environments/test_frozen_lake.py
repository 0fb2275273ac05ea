import gymnasium
import numpy as np
import pytest

from rljob_runtime.environments.frozen_lake import FrozenLake, make_map
from rljob_runtime.errors import EnvironmentSetupError

NAMES = ("Left", "Down", "Right", "Up")


def lake(**parameters) -> FrozenLake:
    return FrozenLake({"is_slippery": False, **parameters})


def answer(name: str) -> str:
    return f"<answer>{name}</answer>"


def rolls_map(size: int, p: float, seed: int) -> list[str]:
    """ROLL's rule, in its words: cells by p, start and goal anywhere and different, a way between them; else another draw."""
    generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed)))
    while True:
        board = generator.choice(["F", "H"], (size, size), p=[p, 1 - p])
        start = generator.integers(size, size=2)
        goal = generator.integers(size, size=2)
        if (start == goal).all():
            continue
        board[start[0]][start[1]], board[goal[0]][goal[1]] = "S", "G"
        reached = {tuple(start)}
        for _ in range(size * size):
            reached |= {
                (r + dr, c + dc)
                for r, c in reached
                for dr, dc in ((0, 1), (1, 0), (0, -1), (-1, 0))
                if 0 <= r + dr < size and 0 <= c + dc < size and board[r + dr][c + dc] != "H"
            }
        if tuple(goal) in reached:
            return ["".join(row) for row in board]


@pytest.mark.parametrize(("size", "p"), [(4, 0.8), (8, 0.6), (2, 0.9)])
def test_maps_are_those_of_roll(size, p) -> None:
    for seed in range(40):
        assert list(make_map(size, p, seed)) == rolls_map(size, p, seed)


@pytest.mark.parametrize("is_slippery", [False, True])
def test_moves_are_those_of_gymnasium(is_slippery) -> None:
    chance = np.random.default_rng(0)
    game = lake(is_slippery=is_slippery, size=5)
    for seed in range(25):
        game.reset(seed)
        peer = gymnasium.make("FrozenLake-v1", desc=list(make_map(5, 0.8, seed)), is_slippery=is_slippery)
        place, _ = peer.reset(seed=seed)
        done = False
        while not done:
            action = int(chance.integers(4))
            turn = game.step(answer(NAMES[action]))
            before, (place, reward, done, cut, _) = place, peer.step(action)
            assert (turn.reward, turn.done) == (float(reward), done)
            assert turn.info["action_is_effective"] == float(place != before)
            rows = turn.observation.split("\n")
            assert rows[place // 5][place % 5] in "PX√"
            if cut:
                break
        peer.close()


def test_a_way_to_the_goal_as_it_is_read() -> None:
    game = lake()
    first = game.reset(3)
    assert first.observation == "__O_\n__G_\n____\n_P_O"
    assert first.instruction.endswith(
        "The meaning of each symbol in the state is:\n"
        "P: player, _: empty, O: hole, G: goal, X: player in hole, √: player on goal\n"
        "Your available actions are:\nLeft, Down, Right, Up"
    )
    turns = [game.step(answer(name)) for name in ("Up", " up ", "RIGHT")]
    assert [turn.observation.split("\n")[1] for turn in turns] == ["__G_", "_PG_", "__√_"]
    assert [(turn.reward, turn.done, turn.info["success"]) for turn in turns] == [(0, False, 0), (0, False, 0), (1, True, 1)]


def test_a_fall_ends_it_without_reward() -> None:
    game = lake()
    game.reset(3)
    fall = [game.step(answer(name)) for name in ("Right", "Right")][-1]
    assert (fall.reward, fall.done, fall.info["success"]) == (0.0, True, 0.0)
    assert fall.observation.split("\n")[3] == "___X"


def test_a_response_without_an_action_costs_the_penalty_and_a_turn() -> None:
    game = lake(format_penalty=-0.01, max_steps=3)
    start = game.reset(3).observation
    turns = [game.step(text) for text in ("Right", answer("North"), answer(""))]
    assert [turn.observation for turn in turns] == [start] * 3
    assert [turn.reward for turn in turns] == [-0.01] * 3
    assert [turn.done for turn in turns] == [False, False, True]
    assert turns[0].info == {"success": 0.0, "action_is_valid": 0.0, "action_is_effective": 0.0, "format_penalty": -0.01}
    assert not turns[0].action_valid


def test_the_first_answer_counts_also_behind_reasoning() -> None:
    game = lake(action_pattern=r"<think>(.*?)</think>\s*<answer>(.*?)</answer>", special_token_list=["<|end|>"])
    game.reset(3)
    assert not game.step(answer("Up")).action_valid
    turn = game.step("<think>\nto the goal\n</think>\n<answer>Up<|end|></answer><answer>Down</answer>")
    assert turn.observation.split("\n")[2] == "_P__"


def test_symbols_names_and_cells_are_the_jobs() -> None:
    game = lake(
        grid_lookup={"0": " P", "1": " F", "2": " H", "3": " G", "4": " X", "5": " W"},  # keys are texts in a manifest
        grid_vocab={"P": "you"},
        action_lookup={"0": "west", "1": "south", "2": "east", "3": "north"},
        env_instruction="Cross.",
        map_lookup={"F": 1, "H": 2, "G": 3},
    )
    first = game.reset(3)
    assert first.observation == " F F H F\n F F G F\n F F F F\n F P F H"
    assert first.instruction == (
        "Cross.\nThe meaning of each symbol in the state is:\nP: you\nYour available actions are:\nwest, south, east, north"
    )
    assert game.step(answer("north")).action_valid


def test_one_map_for_all_episodes() -> None:
    game = lake(map_seed=3)
    assert {game.reset(seed).observation for seed in range(5)} == {lake().reset(3).observation}


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"sise": 4, "p": 2}, "parameters of FrozenLake: p: .*less than or equal to 1.*sise: Extra.*known are render_mode"),
        ({"action_pattern": "<answer>.*</answer>"}, "has 0 groups; write one around the action"),
        ({"action_pattern": "("}, "is not a regular expression"),
        ({"action_lookup": {0: "go", 1: "Go", 2: "b", 3: "c"}}, "names two actions alike"),
        ({"grid_lookup": {0: "P"}}, r"grid_lookup has the keys \[0\]; it must have \[0, 1, 2, 3, 4, 5\]"),
        ({"map_lookup": {"F": 1}}, "map_lookup has no key of grid_lookup for H, G"),
    ],
)
def test_parameters_of_no_use_are_refused(parameters, message) -> None:
    with pytest.raises(EnvironmentSetupError, match=message):
        FrozenLake(parameters)


def test_there_is_a_way_however_many_holes() -> None:
    assert sum(row.count("H") for row in make_map(8, 0.01, 0)) > 50
