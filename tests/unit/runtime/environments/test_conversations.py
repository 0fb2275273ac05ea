"""ToolUse and Chat in an environment worker: tools, users and scores in processes, and what happens when they raise, hang or die."""

import json
import time

import numpy as np
import psutil
import pytest

from rljob_runtime.environments.codec import PromptSettings
from rljob_runtime.environments.conversation_tasks import Tasks
from rljob_runtime.environments.messages import EpisodeAction, StopReason
from rljob_runtime.errors import EnvironmentSetupError
from tests.support.chat_tokenizers import chat_tokenizer
from tests.support.environments import Player, ShiftedClock, environment_config, environment_worker
from tests.support.pace import HANG_S

OWN = r'''
import os, socket, time
from rljob_runtime.environments.protocol import Turn


def weather(city):
    if city == "raise":
        raise ValueError("no such city")
    if city == "hang":
        time.sleep(3600)
    if city == "die":
        os._exit(7)
    if city == "half":
        return "half a pair: \ud83d"
    if city == "net":
        socket.socket()
    if city == "token":
        return str(sorted(name for name in os.environ if "SECRET" in name))
    return {"city": city, "degrees": len(city)}


def polite(prompt, response, answer, metadata):
    if answer == "raise":
        raise ValueError("no measure")
    if answer == "hang":
        time.sleep(3600)
    return {"score": float("please" in response), "messages": len(metadata["messages"])}


async def waits(): ...


class Guesser:
    """Thinks of a number; wants to hear it."""

    def __init__(self, number=3):
        self.number = number

    def reply(self, task, messages):
        said = messages[-1]["content"]
        if said == "raise":
            raise ValueError("offended")
        if said == "hang":
            time.sleep(3600)
        if said == "nothing":
            return 5
        if said == "too much":
            return Turn(observation="", reward=float("inf"))
        if said == str(self.number):
            return Turn(observation="", reward=1.0, done=True)
        return None if said == "bye" else f"not {said}, of {task['answer']}"
'''
ROWS = [{"question": "6 * 7?", "answer": "42"}, {"question": "Dog of Israel?", "answer": "Canaan dog"}]
WEATHER = {
    "type": "Function",
    "function": "own:weather",
    "description": "The weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
BOXED = {"type": "ExactMatch", "extraction": "Boxed"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("conversations")
    (made / "own.py").write_text(OWN)
    (made / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (made / "talks.jsonl").write_text(json.dumps({"question": "Hi", "answer": "please", "turns": ["Well?", "So?"]}))
    (made / "corpus.jsonl").write_text('{"text": "The Canaan dog is of Israel."}\n{"text": "Cats sleep."}\n')
    return made


@pytest.fixture
def make_player(folder):
    workers = []

    def make(kind: str, parameters, *, template="tools", **changes) -> Player:
        given = {"path": str(folder / "rows.jsonl"), "reward": BOXED} | parameters
        given = {name: value for name, value in given.items() if value is not None}
        config = environment_config("lake", kind, parameters=given, max_tokens_per_turn=4096, **{"max_episode_tokens": 65536} | changes)
        workers.append(environment_worker([config], folder, template))
        return Player(workers[-1])

    yield make
    for worker in workers:
        worker.close()


def call(name: str, **arguments) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def shown(ids) -> str:
    return chat_tokenizer("tools").decode(ids.tolist())


def children() -> list[psutil.Process]:
    found = psutil.Process().children()
    return [p for p in found if p.status() != psutil.STATUS_ZOMBIE and "rljob_runtime.environments.tool_child" in p.cmdline()]


def test_a_question_is_answered_with_tools(make_player, folder) -> None:
    tools = [{"type": "Python"}, {"type": "Calculator"}, {"type": "Search", "corpus": str(folder / "corpus.jsonl")}, WEATHER]
    texts = [
        call("python", code="print(6 * 7)") + call("calculator", expression="6 * 7"),
        call("search", query="dog israel") + call("weather", city="Rome"),
        "It is \\boxed{42}.",
    ]
    first, *turns = make_player("ToolUse", {"tools": tools}).play("e1", texts)
    prompt = shown(first.token_ids)
    assert prompt.startswith("<|im_start|>system\nFunctions:\n")
    assert all(f'"name": "{name}"' in prompt for name in ("python", "calculator", "search", "weather"))
    assert prompt.endswith("<|im_start|>user\n6 * 7?<|im_end|>\n<|im_start|>assistant\n")
    assert shown(turns[0].token_ids) == (
        "\n<|im_start|>user\n<tool_response>\n42\n</tool_response>\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert turns[1].observation == '[1] The Canaan dog is of Israel.\n{"city": "Rome", "degrees": 4}'
    last = turns[2]
    assert (last.reward, last.done, last.stop) == (1.0, True, StopReason.DONE)
    assert last.summary == {"tool_calls": 4.0, "tool_errors": 0.0, "tool_timeouts": 0.0, "score": 1.0, "success": 1.0}
    assert [turn.reward for turn in turns[:2]] == [0.0, 0.0]


def test_what_a_call_does_wrong_is_its_result(make_player) -> None:
    player = make_player(
        "ToolUse", {"tools": [{"type": "Python", "timeout_s": 1.0}, {"type": "Calculator"}, WEATHER], "max_calls": 20}, max_turns=20
    )
    wrong = {
        call("python", code="1 / 0"): "Error: ZeroDivisionError: division by zero (line 1)",
        call("python", code="while True: pass"): "Error: ran past its time limit",
        call("python", code="import socket; socket.socket()"): "Error: PermissionError",
        call("python", code="open('/etc/hostname')"): "Error: PermissionError",
        call("python", code="x = 3"): "(no output; print what you want to see)",
        call("calculator", expression="1 / 0"): "Error: division by zero",
        call("weather", city="raise"): "Error: weather: ValueError: no such city (own.py:8)",
        call("weather", city="die"): "Error: weather: its process died (exit code 7)",
        call("weather", city="half"): "half a pair: \ud83d",
        call("weather", town="Rome"): "Error: the arguments of weather do not fit: 'city' is a required property",
        call("wether", city="Rome"): "Error: there is no tool 'wether'; there are python, calculator, weather",
        "<tool_call>{</tool_call>": "Error: a tool call must be JSON",
    }
    _, *turns = player.play("e1", list(wrong))
    for turn, said in zip(turns, wrong.values(), strict=True):
        assert turn.observation.startswith(said)
    assert [turn.action_valid for turn in turns] == [True] * 5 + [False] + [True] * 3 + [False] * 3
    assert all(turn.reward == 0 and not turn.done for turn in turns)


def test_a_tool_that_hangs_costs_its_limit_once_and_no_other_episode_waits(make_player, monkeypatch) -> None:
    clock = ShiftedClock(monkeypatch)
    player = make_player(
        "ToolUse", {"tools": [WEATHER | {"timeout_s": HANG_S}]}, isolation={"max_processes": 2}, episode_timeout_s=9 * HANG_S
    )
    player.play("bad", [])
    player.play("good", [])
    player.act("bad", call("weather", city="hang"))
    player.act("good", call("weather", city="Rome"))
    assert "Rome" in player.wait("good", 2).observation
    assert len(player.replies["bad"]) == 1
    clock.shift_s = 2 * HANG_S
    player.play("another", [])  # the worker looks at the limits
    assert player.wait("bad", 2).observation == f"Error: weather: ran past its limit of {HANG_S:.0f} s"
    player.act("bad", "\\boxed{42}")
    assert player.wait("bad", 3).summary["tool_timeouts"] == 1.0
    metrics = player.worker.metrics()
    assert (metrics["timeout"], metrics["restarts"], metrics["retries"]) == (1.0, 1.0, 0.0)


def test_a_function_sees_no_variable_of_the_worker(make_player, monkeypatch) -> None:
    monkeypatch.setenv("SECRET", "42")
    assert make_player("ToolUse", {"tools": [WEATHER]}).play("e1", [call("weather", city="token")])[1].observation == "[]"


@pytest.mark.parametrize(("network", "result"), [(False, "Error: weather: PermissionError"), (True, '{"city": "net"')])
def test_a_function_has_the_network_where_it_was_asked_for(make_player, network, result) -> None:
    player = make_player("ToolUse", {"tools": [WEATHER]}, isolation={"network": network})
    assert player.play("e1", [call("weather", city="net")])[1].observation.startswith(result)


def test_no_more_calls_are_carried_out_than_allowed(make_player) -> None:
    player = make_player("ToolUse", {"tools": [{"type": "Calculator"}], "max_calls": 2, "max_result_characters": 20})
    _, first, second, last = player.play("e1", [call("calculator", expression=x) * 2 for x in ("1", "factorial(30)")] + ["no"])
    assert first.observation == "1\n1"
    assert second.observation == "Error: no tool calls are left; answer now"[:10] + "\n... (21 characters left out)\nanswer now" + (
        "\nError: no \n... (21 characters left out)\nanswer now"
    )
    assert last.summary["tool_calls"] == 2.0
    assert (last.reward, last.done) == (0.0, True)


def test_the_last_turn_is_scored_whatever_it_is(make_player) -> None:
    player = make_player("ToolUse", {"tools": [{"type": "Calculator"}]}, max_turns=2)
    *_, last = player.play("e1", [call("calculator", expression="1"), f"\\boxed{{42}} {call('calculator', expression='1')}"])
    assert (last.stop, last.reward) == (StopReason.MAX_TURNS, 1.0)


def test_tasks_are_found_by_their_seed(make_player) -> None:
    player = make_player("ToolUse", {"tools": [{"type": "Calculator"}]})
    assert [player.play(str(seed), [], seed=seed)[0].observation for seed in range(3)] == ["6 * 7?", "Dog of Israel?", "6 * 7?"]


def test_tasks_of_reasoning_gym_score_themselves(make_player) -> None:
    parameters = {"path": None, "task": "basic_arithmetic", "size": 3, "parameters": {"min_terms": 2, "max_terms": 2}}
    player = make_player("ToolUse", {**parameters, "tools": [{"type": "Calculator"}], "reward": {"type": "Task"}})
    question = player.play("e1", [])[0].observation.removesuffix("=").partition("alculate")[2].strip(" :.") or "0"
    player.act("e1", call("calculator", expression=question.removesuffix(" =")))
    player.act("e1", player.wait("e1", 2).observation)
    assert player.wait("e1", 3).done


def test_a_task_that_cannot_be_made_ends_its_own_episode(make_player, monkeypatch) -> None:
    """Entries of reasoning-gym are made when an episode begins, with whatever parameters the manifest has."""
    made = Tasks.of

    def of(self, seed):
        if seed == 1:
            raise ValueError("empty range for randrange()")
        return made(self, seed)

    monkeypatch.setattr(Tasks, "of", of)
    player = make_player("ToolUse", {"tools": [{"type": "Calculator"}]})
    player.start("good", seed=0)
    player.start("bad", seed=1)
    failed = player.wait("bad")
    assert (failed.done, failed.stop) == (True, StopReason.ERROR)
    assert failed.error.endswith("environment 'lake': the task of seed 1: ValueError: empty range for randrange()")
    player.wait("good")
    player.act("good", "\\boxed{42}")
    assert player.wait("good", 2).reward == 1.0
    assert player.play("later", ["\\boxed{42}"])[-1].reward == 1.0
    assert player.worker.metrics()["raised"] == 1.0


def test_calls_in_tags(make_player) -> None:
    player = make_player("ToolUse", {"tools": [{"type": "Python", "name": "code"}], "call_format": "Tags"}, template="chatml")
    first, result, last = player.play("e1", ["Let me see. <code>\nprint(40 + 2)\n</code>", "\\boxed{42}"])
    assert "- <code>code</code>: Runs a Python program" in shown(first.token_ids)
    assert (result.observation, last.reward) == ("42", 1.0)


def test_code_is_scored_where_programs_run(make_player, folder) -> None:
    rows = [{"question": "Add", "answer": "", "test_cases": [{"assert_code": "assert add(1, 2) == 3"}]}]
    (folder / "code.jsonl").write_text(json.dumps(rows[0]))
    player = make_player("ToolUse", {"path": str(folder / "code.jsonl"), "tools": [{"type": "Python"}], "reward": {"type": "Code"}})
    right = "def add(a, b):\n    return a + b"
    *_, last = player.play("e1", [call("python", code=f"{right}\nprint(add(1, 2))"), f"```python\n{right}\n```"])
    assert last.reward == 1.0
    assert len(children()) == 1


def test_a_scripted_user_speaks_in_turn(make_player, folder) -> None:
    reward = {"type": "Function", "function": "own:polite"}
    player = make_player("Chat", {"path": str(folder / "talks.jsonl"), "reward": reward})
    first, *turns = player.play("e1", ["hello", "what", "please"])
    assert [each.observation for each in (first, *turns)] == ["Hi", "Well?", "So?", ""]
    assert [turn.reward for turn in turns] == [0.0, 0.0, 1.0]
    assert turns[-1].summary == {"score": 1.0, "messages": 6.0, "success": 1.0}
    assert shown(turns[0].token_ids) == "\n<|im_start|>user\nWell?<|im_end|>\n<|im_start|>assistant\n"


def test_a_user_of_the_users_own(make_player) -> None:
    player = make_player("Chat", {"user": "own:Guesser", "user_parameters": {"number": 4}, "reward": None})
    first, wrong, right = player.play("e1", ["3", "4"])
    assert (first.observation, wrong.observation) == ("6 * 7?", "not 3, of 42")
    assert (right.reward, right.done, right.stop) == (1.0, True, StopReason.DONE)
    assert player.play("e2", ["bye"])[-1].stop == StopReason.DONE


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("raise", "its user: ValueError: offended"),
        ("hang", "its user: ran past its limit of 1 s"),
        ("nothing", "Guesser.reply returned int; it must return a text"),
        ("too much", "Guesser.reply gave the reward inf; it must be finite"),
    ],
)
def test_a_user_that_fails_ends_the_episode(make_player, said, message) -> None:
    player = make_player("Chat", {"user": "own:Guesser", "reward": None}, step_timeout_s=1.0)
    reply = player.play("e1", [said])[-1]
    assert reply.stop == StopReason.ERROR
    assert message in reply.error


@pytest.mark.parametrize(("answer", "stop", "reward"), [("raise", StopReason.ERROR, 0.0), ("hang", StopReason.DONE, 0.0)])
def test_a_reward_that_fails_ends_the_episode_and_one_that_hangs_scores_nothing(make_player, folder, answer, stop, reward) -> None:
    (folder / f"{answer}.jsonl").write_text(json.dumps({"question": "?", "answer": answer}))
    parameters = {"path": str(folder / f"{answer}.jsonl"), "reward": {"type": "Function", "function": "own:polite", "timeout_s": 0.5}}
    reply = make_player("Chat", parameters).play("e1", ["hm"])[-1]
    assert (reply.stop, reply.reward) == (stop, reward)


def test_many_episodes_share_few_processes_and_a_fifth_of_their_tools_fails(make_player) -> None:
    parameters = {"tools": [{"type": "Python", "timeout_s": 1.0}, WEATHER | {"timeout_s": 0.5}]}
    player = make_player("ToolUse", parameters, isolation={"max_processes": 2})
    bad = {"e0": "raise", "e5": "hang", "e10": "die", "e15": "hang"}

    def policy(reply):
        if reply.turn == 0:
            return call("python", code="print(1)") + call("weather", city=bad.get(reply.episode_id, "Rome"))
        return "\\boxed{42}"

    keys = [f"e{number}" for number in range(20)]
    player.play_all(keys, policy)
    assert {player.replies[key][-1].stop for key in keys} == {StopReason.DONE}
    assert {key for key in keys if player.replies[key][-1].summary["tool_errors"]} == set(bad)
    assert player.worker.metrics()["timeout"] == 2.0
    assert len(children()) <= 4


def test_an_episode_that_is_given_up_while_a_tool_works_is_forgotten(make_player) -> None:
    player = make_player("ToolUse", {"tools": [WEATHER | {"timeout_s": 0.5}]}, isolation={"max_processes": 1})
    player.play("e1", [])
    player.act("e1", call("weather", city="hang") + call("weather", city="Rome"))
    player.end("e1")
    assert "Rome" in player.play("e2", [call("weather", city="Rome")])[-1].observation
    assert len(player.replies["e1"]) == 1


def test_nothing_is_left_behind(make_player) -> None:
    player = make_player("ToolUse", {"tools": [{"type": "Python"}, WEATHER]})
    player.play("e1", [])
    player.act("e1", call("weather", city="hang"))
    player.worker.close()
    deadline = time.monotonic() + 20
    while children():
        assert time.monotonic() < deadline


@pytest.mark.parametrize(
    ("kind", "parameters", "message"),
    [
        ("ToolUse", {"tools": [WEATHER | {"function": "own:wether"}]}, "has no function 'wether'; did you mean 'weather'"),
        ("ToolUse", {"tools": [WEATHER | {"function": "own:waits"}]}, "is an async function"),
        ("ToolUse", {"tools": [WEATHER | {"function": "own:polite"}]}, "it must take the arguments of its schema, city"),
        (
            "ToolUse",
            {"tools": [WEATHER | {"parameters": {"type": "object", "properties": 1}}]},
            "tool weather: .* no JSON Schema: 1 is not",
        ),
        ("ToolUse", {"tools": [{"type": "Search", "corpus": "none.jsonl"}]}, "corpus none.jsonl cannot be read"),
        ("ToolUse", {"tools": [{"type": "Calculator"}], "path": "none.jsonl"}, "environment 'lake': .*none.jsonl: file does not exist"),
        ("ToolUse", {"tools": []}, "tools is empty"),
        ("Chat", {"user": "own:Guesser", "user_parameters": {"name": 1}}, "unexpected keyword argument 'name'"),
        ("Chat", {"turns_field": "answer2", "path": "talks"}, "file does not exist"),
    ],
)
def test_what_cannot_be_set_up_is_refused(make_player, kind, parameters, message) -> None:
    with pytest.raises(EnvironmentSetupError, match=message):
        make_player(kind, parameters)
    assert children() == []


def test_a_template_that_forgets_is_refused_and_one_that_rewrites_is_not(make_player) -> None:
    parameters = {"reward": {"type": "ExactMatch"}}
    with pytest.raises(EnvironmentSetupError, match=r"leaves out what was said before.*write prompt.chatTemplate: false, maxTurns: 1"):
        make_player("Chat", parameters, template="forgetful")
    make_player("Chat", parameters, template="forgetful", max_turns=1)
    make_player("Chat", parameters, template="forgetful", prompt=PromptSettings(chat_template=False))
    (described,) = make_player("Chat", parameters, template="reasoning").worker.describe()
    assert described.template_class == "rewritesHistory"


def test_a_response_that_was_cut_is_scored(make_player) -> None:
    player = make_player("Chat", {})
    player.play("e1", [])
    cut = np.asarray(chat_tokenizer("tools").encode("\\boxed{42}"), dtype=np.int32)
    player.worker.submit([EpisodeAction(episode_id="e1", token_ids=cut, finish_reason="length")])
    assert player.wait("e1", 2).reward == 1.0
