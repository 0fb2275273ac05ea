"""Classes of the user's, in processes: what they may be, and what happens when they raise, hang, flood or die."""

import re
import time

import psutil
import pytest

from rljob_runtime.environments.messages import StopReason
from rljob_runtime.errors import EnvironmentSetupError, PluginError
from tests.support.environments import Player, environment_config, environment_worker

PLUGINS = '''
import os, pathlib, time
import gymnasium
from rljob_runtime.environments.protocol import Turn


class Counter:
    """Counts actions; what an action says is what it does."""

    def __init__(self, marks, target=3):
        self.marks, self.target = pathlib.Path(marks), target

    def once(self, name):
        mark = self.marks / name
        if mark.exists():
            return False
        mark.touch()
        return True

    async def reset(self, seed):
        self.seed, self.count = seed, 0
        self.noise = os.urandom(4).hex() if seed == 66 else ""
        if seed == 1313:
            raise ValueError("no thirteenth floor")
        return f"{seed}:0{self.noise}"

    async def step(self, action):
        self.count += 1
        if action == "raise":
            raise ValueError("not today")
        if action == "raise once" and self.once("raised"):
            raise ValueError("only now")
        if action == "hang" or (action == "hang once" and self.once("hung")):
            time.sleep(3600)
        if action == "die" or (action == "die once" and self.once("died")):
            os._exit(7)
        if action == "print":
            while True:
                print("x" * 100_000)
        if action == "flood":
            return Turn(observation="x" * 10_000_000)
        if action == "hoard":
            self.hoard = bytearray(3 << 30)
        if action == "fill":
            for number in range(20):
                pathlib.Path(str(number)).write_bytes(bytes(1 << 20))
            time.sleep(3600)
        if action == "number":
            return 5
        if action == "nan":
            return Turn(observation="", reward=float("nan"))
        if action == "forge":
            for fd in range(3, 4096):  # the socket keeps the number that it has in the parent
                try:
                    os.write(fd, b"\\x05\\0\\0\\0hello")
                except OSError:
                    pass
        if action == "pid":
            return Turn(observation=str(os.getpid()))
        shown, done = f"{self.seed}:{self.count}{self.noise}", self.count == self.target
        return Turn(observation=shown, reward=float(self.count), done=done, info={"count": self.count})

    async def close(self):
        pass


class Words(gymnasium.Env):
    """Texts in, texts out."""

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.word = str(self.np_random.integers(1000))
        return f"say {self.word}", {"env_instruction": "Repeat.", "suffix": "now"}

    def step(self, action):
        right = action == self.word
        info = {"metrics": {"action_is_valid": right, "tries": 1}, "metrics_agg_mode": {"tries": "sum"}}
        return "again", float(right), right, False, info


class Waits(gymnasium.Env):
    action_space = gymnasium.spaces.Box(0.0, 1.0)

    def reset(self, seed=None, options=None):
        return "", {}

    def step(self, action):
        return "", 0.0, True, False, {}


class Slow:
    def __init__(self):
        time.sleep(3600)

    def reset(self, seed): ...
    def step(self, action): ...
    def close(self): ...


class Broken:
    def __init__(self):
        raise KeyError("nothing")

    def reset(self, seed): ...
    def step(self, action): ...
    def close(self): ...
'''


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "toys.py").write_text(PLUGINS)
    (tmp_path / "marks").mkdir()
    return tmp_path


@pytest.fixture
def make_player(folder):
    workers = []

    def make(name="Counter", **changes) -> Player:
        if name == "Counter":
            changes["parameters"] = {"marks": ".", **changes.get("parameters", {})}
        workers.append(environment_worker([environment_config("toy", f"toys:{name}", **changes)], folder))
        return Player(workers[-1])

    yield make
    for worker in workers:
        worker.close()


def children() -> list[psutil.Process]:
    found = psutil.Process().children()
    return [p for p in found if p.status() != psutil.STATUS_ZOMBIE and "rljob_runtime.environments.child" in p.cmdline()]


def test_a_class_of_the_users_own_is_played(make_player) -> None:
    player = make_player()
    first, *turns = player.play("e1", ["a", "b", "c"], seed=5, environment="toy")
    assert first.observation == "5:0"
    assert [(t.observation, t.reward, t.done) for t in turns] == [("5:1", 1.0, False), ("5:2", 2.0, False), ("5:3", 3.0, True)]
    assert turns[-1].summary == {"count": 2.0}
    assert "seccomp" in player.worker.describe()[0].sandbox


def test_a_process_is_used_again(make_player) -> None:
    player = make_player()
    pids = {player.play(f"e{number}", ["pid"], environment="toy")[1].observation for number in range(1)}
    player.end("e0")
    pids |= {player.play("e9", ["pid"], environment="toy")[1].observation}
    assert len(pids) == len(children()) == 1


def test_a_gymnasium_environment_of_texts(make_player) -> None:
    player = make_player("Words")
    first = player.play("e1", [], seed=4, environment="toy")[0]
    player.act("e1", "nonsense")
    wrong = player.wait("e1", 2)
    assert (wrong.action_valid, wrong.done, wrong.observation) == (False, False, "again")
    player.act("e1", first.observation.removeprefix("say "))
    last = player.wait("e1", 3)
    assert (last.reward, last.done, last.summary) == (1.0, True, {"action_is_valid": 0.5, "tries": 2.0})


def test_a_gymnasium_environment_of_numbers(make_player, folder) -> None:
    parameters = {
        "render_mode": "ansi", "is_slippery": False, "action_lookup": {"0": "left", "1": "down", "2": "right", "3": "up"},
        "env_instruction": "Cross.", "format_penalty": -0.5,
    }  # fmt: skip
    kind = "gymnasium.envs.toy_text.frozen_lake:FrozenLakeEnv"
    worker = environment_worker([environment_config("toy", kind, parameters=parameters)], folder)
    try:
        first, missed, down = Player(worker).play("e1", ["down", "<answer>Down</answer>"], environment="toy")
    finally:
        worker.close()
    assert "FHFH" in first.observation
    assert (missed.reward, missed.action_valid) == (-0.5, False)
    assert "(Down)" in down.observation


@pytest.mark.parametrize("action", ["raise once", "hang once", "die once"])
def test_a_failure_is_tried_once_more_with_the_same_seed(make_player, action) -> None:
    player = make_player(step_timeout_s=1.0)
    turns = player.play("e1", ["a", action, "c"], seed=5, environment="toy")
    assert [t.observation for t in turns][:2] == ["5:0", "5:1"]
    metrics = player.worker.metrics()
    assert metrics["retries"] == 1


@pytest.mark.parametrize(
    ("action", "message"),
    [
        ("raise", r"ValueError: not today \(toys.py:\d+\)"),
        ("die", r"its process died \(exit code 7\)"),
        ("hang", "took longer than its limit of 0.3 s"),
        ("flood", "its observation has 10000000 characters"),
        ("print", "OSError: .*File too large"),
        ("hoard", "MemoryError"),
        ("fill", "its files took .* more than the 16777216 of diskBytes"),
        ("number", "toys:Counter.step returned int; it must return a Turn, or the five values"),
        ("nan", "reward is nan; it must be finite"),
        ("forge", "it wrote an answer that no one asked for"),
    ],
)
def test_what_goes_wrong_twice_ends_the_episode_and_no_other(make_player, action, message) -> None:
    isolation = {"memory_bytes": 2 << 30, "disk_bytes": 16 << 20}
    player = make_player(step_timeout_s=0.3 if action == "hang" else 20.0, isolation=isolation)
    player.play("other", ["a"], environment="toy")
    player.play("bad", ["a", action], environment="toy")
    last = player.wait("bad", 3)
    assert (last.stop, last.done) == (StopReason.ERROR, True)
    assert re.search(message, last.error), last.error
    assert "environment 'toy'" in last.error
    player.act("other", "b")
    assert player.wait("other", 3).observation == "0:2"


def test_a_reset_that_raises_ends_the_episode(make_player) -> None:
    (reply,) = make_player().play("e1", [], seed=1313, environment="toy")
    assert "no thirteenth floor" in reply.error


def test_a_hang_stalls_no_other_process(make_player) -> None:
    player = make_player(step_timeout_s=600.0)
    player.play("stuck", [], environment="toy")
    player.act("stuck", "hang")
    assert [t.done for t in player.play("other", ["a", "b", "c"], environment="toy")][-1]
    player.end("stuck")


def test_others_of_a_lost_process_are_played_again(make_player) -> None:
    player = make_player(isolation={"episodes_per_process": 4, "max_processes": 1})
    player.play("kept", ["a"], seed=5, environment="toy")
    player.play("bad", ["die"], environment="toy")
    assert player.replies["bad"][-1].stop == StopReason.ERROR
    player.act("kept", "b")
    assert player.wait("kept", 3).observation == "5:2"
    assert player.worker.metrics()["restarts"] == 2


def test_an_episode_that_is_no_function_of_its_seed_is_not_played_again(make_player) -> None:
    player = make_player(isolation={"episodes_per_process": 4, "max_processes": 1})
    player.play("kept", ["a"], seed=66, environment="toy")
    player.play("bad", ["die"], environment="toy")
    player.act("kept", "b")
    assert "the same seed and actions led to another observation" in player.wait("kept", 3).error


def test_episodes_beyond_the_places_wait(make_player) -> None:
    player = make_player(isolation={"max_processes": 2})
    player.play_all([f"e{number}" for number in range(6)], lambda reply: "go", environment="toy")
    assert all(replies[-1].reward == 3.0 for replies in player.replies.values())
    assert len(children()) <= 2


def test_a_fifth_of_the_episodes_fails_and_the_rest_goes_on(make_player) -> None:
    player = make_player(step_timeout_s=4.0, isolation={"max_processes": 4})  # what a busy machine does not need
    bad = {"e0": "raise", "e5": "hang", "e10": "die", "e15": "flood"}
    keys = [f"e{number}" for number in range(20)]
    player.play_all(keys, lambda reply: bad.get(reply.episode_id, "go"), environment="toy")
    assert {key for key in keys if player.replies[key][-1].stop == StopReason.ERROR} == set(bad)
    metrics = player.worker.metrics()
    assert (metrics["timeout"], metrics["died"], metrics["raised"], metrics["retries"]) == (2, 2, 4, 4)


def test_nothing_is_left_behind(make_player) -> None:
    player = make_player()
    player.play("e1", [], environment="toy")
    player.act("e1", "hang")
    player.worker.close()
    deadline = time.monotonic() + 20
    while children():
        assert time.monotonic() < deadline


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("Countr", {}, "has no class 'Countr'; did you mean 'Counter'"),
        ("Counter", {"aim": 3}, "unexpected keyword argument 'aim'|missing a required argument"),
        ("Waits", {}, "has actions of Box.* wrap it in a gymnasium.Env whose step takes text"),
        ("Words", {"format_penalty": 1}, "takes no parameter format_penalty, and its actions are texts"),
        ("Broken", {}, "toys:Broken could not be constructed: KeyError: 'nothing'"),
    ],
)
def test_a_class_of_no_use_is_refused_at_the_start(folder, name, parameters, message) -> None:
    with pytest.raises((EnvironmentSetupError, PluginError), match=message):
        environment_worker([environment_config("toy", f"toys:{name}", parameters=parameters)], folder)
    assert children() == []
