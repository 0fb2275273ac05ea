"""A conversation with tools: results stand in the order of their calls, whatever order they come in; none is lost, or one too many."""

import json
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rljob_api.v1alpha1.conversations import ToolUseParameters
from rljob_runtime.environments.conversation import Conversation, Rules, Task
from rljob_runtime.environments.protocol import Turn
from rljob_runtime.environments.tool_work import Answer, RunProgram, ScoreAnswer
from rljob_runtime.environments.toolbox import Toolbox

TOOLS = ToolUseParameters.model_validate_json(
    json.dumps({"path": "none", "tools": [{"type": "Python"}, {"type": "Calculator"}], "reward": {"type": "ExactMatch"}})
)
CALLS = st.lists(st.sampled_from(["python", "calculator", "unknown", "bad"]), max_size=6)


def written(kind: str, number: int) -> str:
    if kind == "bad":
        return "<tool_call>?</tool_call>"
    argument = {"python": {"code": f"print({number})"}, "calculator": {"expression": str(number)}}.get(kind, {})
    return f"<tool_call>{json.dumps({'name': kind, 'arguments': argument})}</tool_call>"


@given(turns=st.lists(CALLS, min_size=1, max_size=5), max_calls=st.integers(1, 12), max_turns=st.integers(1, 6), data=st.data())
def test_results_are_those_of_the_calls_in_their_order(turns, max_calls, max_turns, data) -> None:
    conversation = Conversation(Task(prompt="?", answer="1"), Rules(max_turns=max_turns, max_calls=max_calls, toolbox=Toolbox(TOOLS)))
    assert conversation.begin().observation == "?"
    ran, wanted_calls, seen = Counter(), 0, set()
    for number, kinds in enumerate(turns, start=1):
        step = conversation.said("".join(written(kind, place) for place, kind in enumerate(kinds)))
        waiting = list(step) if isinstance(step, list) else []
        while waiting:
            request = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
            if isinstance(request.work, RunProgram):
                ran["python"] += 1
                step = conversation.answered(request.place, Answer(value={"text": str(request.place), "failed": False}), request.work)
            else:
                assert isinstance(request.work, ScoreAnswer)
                step = conversation.answered(request.place, Answer(value={"score": 0.5}), request.work)
            assert isinstance(step, Turn) == (not waiting)
        assert isinstance(step, Turn)
        assert step.state_key not in seen
        seen.add(step.state_key)
        if not kinds or number == max_turns:
            assert (step.done, step.reward, step.results) == (not kinds, 0.5, ())
            break
        for place, (kind, result) in enumerate(zip(kinds, step.results, strict=True)):
            wanted_calls += 1
            if wanted_calls > max_calls:
                assert "no tool calls are left" in result
            elif kind in ("python", "calculator"):
                assert result == str(place)
            else:
                assert result.startswith("Error: ")
        assert step.info["tool_calls"] == sum(1 for _ in kinds) - max(0, min(wanted_calls - max_calls, len(kinds)))
    assert ran["python"] <= max_calls
