"""Agent programs: what they are given, how they end, and that nothing of theirs is left."""

import os
import re
import socket
import textwrap
from pathlib import Path

import numpy as np
import psutil
import pytest

from rljob_runtime.environments.messages import EpisodeAction, EpisodeReply, StopReason
from rljob_runtime.environments.reward_file import parse_reward
from rljob_runtime.environments.worker import EnvironmentWorker
from rljob_runtime.errors import EnvironmentSetupError
from rljob_runtime.sandbox import landlock
from tests.support.chat_tokenizers import chat_tokenizer
from tests.support.environments import Player, environment_config, environment_worker, tokens
from tests.support.pace import HANG_S, until

AGENT = textwrap.dedent(
    '''
    """Talks with plain HTTP; what the policy says is what it does."""

    import json, os, socket, subprocess, sys, time, urllib.request

    task = json.load(open(os.environ["RLJOB_TASK"]))


    def ask(messages, **more):
        body = json.dumps({"model": os.environ["RLJOB_MODEL"], "messages": messages} | more).encode()
        headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
        request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", data=body, headers=headers)
        return json.load(urllib.request.urlopen(request))["choices"][0]["message"]


    def reward(value):
        open(os.environ["RLJOB_REWARD_FILE"], "w").write(value if isinstance(value, str) else json.dumps(value))


    messages = [{"role": "user", "content": f"{sys.argv[1:]} {task}"}]
    while True:
        answer = ask(messages, **({"stop": ["STOP"]} if len(messages) > 1 else {}))
        messages += [answer, {"role": "user", "content": "go on"}]
        word, _, rest = answer["content"].partition(" ")
        if word == "reward":
            sys.exit(reward(json.loads(rest)))
        elif word == "text":
            sys.exit(reward(rest))
        elif word == "exit":
            print("out of ideas")
            sys.exit(int(rest))
        elif word == "hang":
            subprocess.Popen(["sleep", "3607"])
            time.sleep(3600)
        elif word == "die":
            os.kill(os.getpid(), 9)
        elif word == "forget":
            messages = [{"role": "user", "content": "something else"}]
        elif word == "connect":
            try:
                socket.create_connection(("127.0.0.1", int(rest)))
            except OSError as error:
                messages[-1]["content"] = f"no way: {error.strerror}"
        elif word == "environment":
            messages[-1]["content"] = " ".join(sorted(os.environ))
        elif word == "leave":
            import threading
            threading.Thread(target=ask, args=[messages], daemon=True).start()
            while not os.path.exists("go"):
                time.sleep(0.01)
            sys.exit(reward(0.5))
    '''
)


@pytest.fixture
def make(tmp_path: Path):
    workers: list[EnvironmentWorker] = []
    (tmp_path / "agent.py").write_text(AGENT)

    def player(*arguments: str, harness=(), **changes) -> Player:
        given = {"command": ("python", "agent.py", *arguments), "harness": dict(harness), "max_tokens_per_turn": 64} | changes
        workers.append(environment_worker([environment_config("agent", **given)], tmp_path))
        return Player(workers[-1])

    yield player
    for worker in workers:
        worker.close()
    until("its programs have ended", lambda: not programs_in(tmp_path))


def programs_in(folder: Path) -> list[object]:
    """Also those that nobody is the parent of; other tests have theirs in other folders."""
    found = [p.info for p in psutil.process_iter(["cmdline", "cwd"])]
    return [info for info in found if "agent.py" in (info["cmdline"] or []) and info["cwd"] == str(folder)]


def play(player: Player, *texts: str, key: str = "e1", seed: int = 5) -> list[EpisodeReply]:
    return player.play(key, texts, seed=seed, environment="agent")


def shown(reply: EpisodeReply) -> str:
    return chat_tokenizer("chatml").decode(reply.token_ids.tolist())


def test_an_episode_from_its_task_to_its_reward(make, tmp_path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"number": 0}\n\n{"number": 1}\n{"number": 2}\n')
    player = make("--fast", harness={"tasks": tmp_path / "tasks.jsonl"})
    first, second, last = play(player, "think first", 'reward {"reward": 0.75, "metrics": {"success": 1, "steps": 2}}')
    task = "{'environment': 'agent', 'seed': 5, 'task': {'number': 2}}"
    assert shown(first) == f"<|im_start|>user\n['--fast'] {task}<|im_end|>\n<|im_start|>assistant\n"
    assert shown(second) == "\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    assert (first.branch, second.branch, second.action, second.kept_tokens) == (0, 0, "think first", len(tokens("think first")))
    assert (last.done, last.stop, last.reward, last.turn) == (True, StopReason.DONE, 0.75, 2)
    assert last.summary == {"success": 1.0, "steps": 2.0, "calls": 2.0, "refused_calls": 0.0, "samples": 1.0}
    assert player.worker.metrics()["steps"] == 2


def test_what_continues_nothing_is_a_sample_of_its_own(make) -> None:
    player = make()
    _, second, last = play(player, "forget it", "reward 1")
    assert (second.branch, shown(second)) == (1, "<|im_start|>user\nsomething else<|im_end|>\n<|im_start|>assistant\n")
    assert (last.reward, last.summary["samples"]) == (1.0, 2.0)


def test_a_stop_string_cuts_the_action(make) -> None:
    player = make()
    *_, third, _ = play(player, "think", "more STOP and this nobody reads", "reward 0")
    assert third.action == "more "
    assert third.kept_tokens == len(tokens("more STOP", close=""))


@pytest.mark.parametrize(
    ("last", "error"),
    [
        ("exit 3", "its program ended with exit code 3; it said last: out of ideas"),
        ("die", "its program ended with signal 9"),
        ("exit 0", "its program wrote no reward to RLJOB_REWARD_FILE"),
        ("text nothing", "has a reward that is none: it is no JSON"),
        ('reward {"metrics": {}}', "has a reward that is none: reward must be a finite number"),
        ("reward true", "reward must be a finite number"),
        ("text NaN", "reward must be a finite number"),
        ('reward {"reward": 1, "metrics": {"a": "b"}}', "metrics must be finite numbers by name"),
    ],
)
def test_an_end_without_a_reward_fails_the_episode(make, last, error) -> None:
    reply = play(make(), last)[-1]
    assert (reply.done, reply.stop) == (True, StopReason.ERROR)
    assert error in reply.error


def test_a_program_that_hangs_is_killed_with_all_it_started(make) -> None:
    reply = play(make(step_timeout_s=1.0), "hang")[-1]
    assert re.search(r"took longer than 1 s \(stepTimeoutSeconds\) until its next call", reply.error)
    running = ["sleep", "3607"]
    until("the end of what it started", lambda: running not in [p.info["cmdline"] for p in psutil.process_iter(["cmdline"])])


def test_an_episode_ends_with_its_time(make) -> None:
    reply = play(make(episode_timeout_s=2.0), "hang")[-1]
    assert (reply.stop, reply.error) == (StopReason.TIMEOUT, "environment 'agent': its program took longer than 2 s")


def test_of_an_action_that_nobody_waits_for_any_more_nothing_counts(make, tmp_path) -> None:
    player = make()
    player.play("e1", ["leave"], environment="agent")
    (tmp_path / "go").touch()
    wait_until_programs_are_gone()
    player.act("e1", "nobody reads this")
    reply = player.wait("e1", 3)
    assert (reply.done, reply.reward, reply.kept_tokens) == (True, 0.5, 0)


def test_a_program_reaches_its_endpoint_alone_and_inherits_nothing(make, monkeypatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "s3cret")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        player = make(harness={"variables": {"MY_OPTION": "1"}})
        _, refused, names, last = play(player, f"connect {port}", "environment", "reward 1")
    if landlock.abi() >= landlock.TCP_ABI:
        assert "no way: Permission denied" in shown(refused)
    found = set(shown(names).split("user\n")[1].split("<|im_end|>")[0].split())
    assert {"OPENAI_BASE_URL", "OPENAI_API_KEY", "RLJOB_TASK", "RLJOB_REWARD_FILE", "RLJOB_SEED", "RLJOB_MODEL", "MY_OPTION"} <= found
    assert "HF_TOKEN" not in found
    assert last.reward == 1.0
    assert "seccomp" in player.worker.describe()[0].sandbox


def test_episodes_beyond_the_programs_allowed_wait(make) -> None:
    player = make(isolation={"max_processes": 2})
    player.play_all([f"e{n}" for n in range(6)], lambda reply: "reward 1" if reply.turn else "think", environment="agent")
    assert [replies[-1].reward for replies in player.replies.values()] == [1.0] * 6
    assert player.worker.metrics()["resets"] == 6


def test_a_given_up_episode_ends_its_program(make) -> None:
    player = make()
    play(player)
    running = programs()
    assert len(running) == 1
    player.end("e1")
    assert psutil.wait_procs(running, timeout=HANG_S)[1] == []


def test_log_probs_are_asked_for_where_a_call_wants_them(make, tmp_path) -> None:
    (tmp_path / "scorer.py").write_text(
        AGENT.partition("messages = [")[0]
        + textwrap.dedent(
            """
        body = {"prompt": "first question", "logprobs": 0}
        headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
        request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/completions", data=json.dumps(body).encode(), headers=headers)
        reward(sum(json.load(urllib.request.urlopen(request))["choices"][0]["logprobs"]["token_logprobs"]))
        """
        )
    )
    player = make(command=("python", "scorer.py"))
    (first,) = play(player)
    assert first.wants_logprobs
    given = EpisodeAction(
        episode_id="e1", token_ids=tokens("Up"), finish_reason="stop", logprobs=np.full(len(tokens("Up")), -0.5, np.float32)
    )
    player.worker.submit([given])
    assert player.wait("e1", 2).reward == -0.5 * len(tokens("Up"))


SCORES = """
def digits(task, calls):
    if task["seed"] == 13:
        raise ValueError("no thirteenth floor")
    return {"reward": float(task["seed"]), "metrics": {"calls_seen": len(calls), "right": float(calls[-1]["response"] == "exit 0")}}

def alone(task):
    return 1.0
"""


def test_a_function_gives_the_reward(make, tmp_path) -> None:
    (tmp_path / "scores.py").write_text(SCORES)
    player = make(harness={"reward": "scores:digits"})
    last = play(player, "think", "exit 0")[-1]
    assert (last.done, last.reward, last.summary["calls_seen"], last.summary["right"]) == (True, 5.0, 2.0, 1.0)
    assert (
        "its program was not scored: ValueError: no thirteenth floor (scores.py:4)" in play(player, "exit 0", key="e2", seed=13)[-1].error
    )
    assert "exit code 3" in play(player, "exit 3", key="e3")[-1].error


@pytest.mark.parametrize(
    ("harness", "message"),
    [
        ({"reward": "nowhere:score"}, "reward: no module 'nowhere'"),
        ({"reward": "scores:alone"}, "it must take task and calls"),
        ({"tasks": Path("/nowhere/tasks.jsonl")}, "harness.tasks: /nowhere/tasks.jsonl cannot be read"),
        ({"tasks": Path("bad.jsonl")}, "1 of 2 lines of .* are no JSON objects, such as line 2"),
        ({"tasks": Path("empty.jsonl")}, "holds no tasks"),
        ({"tasks": Path("half.jsonl")}, r"line 2 of .*half.jsonl: field 'a' has \\udfff, half of a surrogate pair"),
    ],
)
def test_what_is_of_no_use_is_found_at_the_start(make, tmp_path, monkeypatch, harness, message) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"a": 1}\n[1]\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "half.jsonl").write_text('{"a": "\\ud83d\\ude00"}\n{"a": [{"b": "\\udfff"}]}\n')
    (tmp_path / "scores.py").write_text(SCORES)
    with pytest.raises(EnvironmentSetupError, match=message):
        make(harness=harness)


def test_a_program_that_is_not_there_fails_its_episodes(make) -> None:
    (reply,) = play(make(command=("no-such-program",)))
    assert "'no-such-program' could not be started in" in reply.error


def programs() -> list[psutil.Process]:
    """The processes that this one started for programs; the fixture looks for what programs started."""
    found = psutil.process_iter(["ppid", "cmdline"])
    return [p for p in found if p.info["ppid"] == os.getpid() and "rljob_runtime.environments.program" in (p.info["cmdline"] or [])]


def wait_until_programs_are_gone() -> None:
    _, left = psutil.wait_procs(programs(), timeout=HANG_S)
    assert left == []


BAD_REWARDS = ["1" * 400, "[" * 60_000, f'{{"reward": 1, "metrics": {{"n": {"1" * 400}}}}}', "true", "NaN", '{"reward": "1"}']


@pytest.mark.parametrize("text", BAD_REWARDS, ids=lambda text: text[:8])
def test_a_reward_file_of_no_use_fails_its_episode_and_nothing_else(text: str) -> None:
    """A program writes what its model computed, and any other error than ValueError would end the worker."""
    with pytest.raises(ValueError, match=r"finite number|no JSON"):
        parse_reward(text)
