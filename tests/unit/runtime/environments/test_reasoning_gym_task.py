import re

import pytest

from rljob_runtime.environments.reasoning_gym_task import ReasoningGym
from rljob_runtime.errors import EnvironmentSetupError

SUMS = {"task": "basic_arithmetic", "parameters": {"min_terms": 2, "max_terms": 2, "operators": ["+"], "allow_parentheses": False}}


def right_answer(question: str) -> str:
    """Of a sum: what the question's numbers add up to."""
    return f"<answer>{sum(map(int, re.findall(r'[0-9]+', question)))}</answer>"


def test_one_attempt() -> None:
    game = ReasoningGym(**SUMS)
    asked = game.reset(7)
    assert asked == game.reset(507)
    turn = game.step(right_answer(asked.observation))
    assert (turn.reward, turn.done, turn.info["success"]) == (1.0, True, 1.0)
    game.reset(8)
    turn = game.step("<answer>nonsense</answer>")
    assert (turn.done, turn.info["success"]) == (True, 0.0)


def test_more_attempts() -> None:
    game = ReasoningGym(**SUMS, max_attempts=3, format_penalty=-0.5)
    asked = game.reset(7)
    wrong, missing, right = game.step("<answer>-3</answer>"), game.step("no idea"), game.step(right_answer(asked.observation))
    assert [(t.reward, t.done, t.action_valid) for t in (wrong, missing, right)] == [
        (0, False, True),
        (-0.5, False, False),
        (1, True, True),
    ]
    assert wrong.observation == "That is not right. Try again."
    assert wrong.state_key != missing.state_key


@pytest.mark.parametrize(
    ("parameters", "message"),
    [({}, "task: Field required"), ({"task": "basic_arithmetics"}, "reasoning-gym has no task .*did you mean basic_arithmetic")],
)
def test_parameters_of_no_use_are_refused(parameters, message) -> None:
    with pytest.raises(EnvironmentSetupError, match=message):
        ReasoningGym(**parameters)
