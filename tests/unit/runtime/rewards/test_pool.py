"""The pool against real child processes: what goes wrong in one sample stays in that sample."""

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psutil
import pytest

from rljob_runtime.data.config import ReasoningGymSource
from rljob_runtime.data.reasoning_gym_source import ReasoningGymRows
from rljob_runtime.errors import RewardSetupError
from rljob_runtime.records import Prompt, RewardRequest
from rljob_runtime.rewards import Extraction, RewardConfig, RewardType
from rljob_runtime.rewards.pool import RewardPool
from tests.support.data_builders import ADDITION
from tests.support.pace import HANG_S, until

MODULE = """
import ctypes, os, subprocess, sys, threading

def score(prompt, response, answer, metadata):
    if response == "hang":
        threading.Event().wait()
    if response == "hang with a child":
        child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
        print("started", child.pid, flush=True)
        threading.Event().wait()
    if response == "raise":
        raise ValueError("two\\nlines")
    if response == "exit":
        sys.exit(4)
    if response == "die":
        os._exit(3)
    if response == "crash":
        ctypes.string_at(0)
    if response == "nan":
        return float("nan")
    if response == "text":
        return "good"
    if response == "huge":
        return float(len(bytearray(8 << 30)))
    if response == "print":
        print("to stdout", flush=True)
        os.write(1, b"raw bytes\\n" * 20000)
        sys.stderr.write("to stderr\\n")
        return {"score": 0.5, "words": 2}
    return float(response == answer)

def pid(prompt, response, answer, metadata):
    return os.getpid()
"""


@pytest.fixture
def make_pool(tmp_path):
    (tmp_path / "pool_rewards.py").write_text(MODULE)
    pools = []

    def make(*configs, **options):
        if not configs:
            configs = (
                RewardConfig(
                    name="house",
                    type=RewardType.FUNCTION,
                    function="pool_rewards:score",
                    timeout_s=options.pop("timeout_s", 20.0),
                    **{key: options.pop(key) for key in list(options) if key in {"memory_bytes", "processes", "on_error", "on_timeout"}},
                ),
            )
        pool = RewardPool(configs, log_file=tmp_path / "rewards.log", folder=tmp_path, **options)
        pools.append(pool)
        return pool

    yield make
    for pool in pools:
        pool.close()


def request(number, response, *, answer="7", metadata=None):
    prompt = Prompt(index=number, text="3 + 4", token_ids=(1,), answer=answer, source="s", metadata=metadata or {})
    return RewardRequest(sample_id=f"s{number}", prompt=prompt, response_text=response, finish_reason="stop")


def requests(*responses):
    return [request(number, response) for number, response in enumerate(responses)]


def own_children():
    return [p for p in psutil.Process().children() if p.status() != psutil.STATUS_ZOMBIE and "rljob_runtime.rewards.child" in p.cmdline()]


def test_results_come_in_order_and_right(make_pool):
    pool = make_pool(num_workers=2)
    wanted = [number % 3 == 0 for number in range(300)]
    results = pool.score(requests(*["7" if w else "8" for w in wanted]))
    assert [r.sample_id for r in results] == [f"s{n}" for n in range(300)]
    assert [r.passed for r in results] == wanted
    assert [r.score for r in results] == [float(w) for w in wanted]
    assert pool.score([]) == []
    assert (pool.timeouts, pool.errors, pool.restarts) == (0, 0, 0)


@pytest.mark.parametrize(
    ("response", "error", "restarts"),
    [
        ("raise", "reward 'house': ValueError: two lines (pool_rewards.py:12)", 0),
        ("exit", "reward 'house': SystemExit: 4 (pool_rewards.py:14)", 0),
        ("nan", "reward 'house': ValueError: the result is nan, not a finite number", 0),
        ("text", "reward 'house': TypeError: the result is \"good\", not a number", 0),
        ("die", "reward 'house': its process died (exit code 3); its output: ", 1),
        ("crash", "reward 'house': its process died (signal SIGSEGV); its output: ", 1),
    ],
)
def test_a_failing_sample_fails_alone(make_pool, response, error, restarts):
    pool = make_pool()
    before, failed, after = pool.score(requests("7", response, "7"))
    assert (before.score, after.score) == (1.0, 1.0)
    assert failed.score is None
    assert not failed.passed
    assert failed.error is not None
    assert failed.error.startswith(error)
    assert "\n" not in failed.error
    assert (pool.errors, pool.timeouts, pool.restarts) == (1, 0, restarts)


def test_a_hanging_sample_is_ended_with_all_it_started(make_pool, tmp_path):
    pool = make_pool(timeout_s=0.7, processes=True, on_timeout=None)
    results = pool.score([*requests("7"), request(1, "hang with a child"), request(2, "7"), request(3, "hang")])
    assert [r.score for r in results] == [1.0, None, 1.0, None]
    assert results[1].error == "reward 'house': ran past its limit of 0.7 s twice; raise timeoutSeconds or make it faster"
    assert [r.timeouts for r in results] == [(), ("house",), (), ("house",)]
    assert [r.retries for r in results] == [0, 1, 0, 1]
    assert (pool.errors, pool.timeouts, pool.restarts) == (0, 2, 4)
    started = [int(line.split()[1]) for line in (tmp_path / "rewards.log").read_text().splitlines() if line.startswith("started ")]
    assert len(started) == 2
    assert [p for p in started if psutil.pid_exists(p) and psutil.Process(p).status() != psutil.STATUS_ZOMBIE] == []


def test_a_hanging_sample_does_not_hold_up_the_other_worker(make_pool):
    pool = make_pool(num_workers=2, timeout_s=2.0)
    results = pool.score(requests("hang", *["7"] * 99))
    assert [r.score for r in results] == [0.0] + [1.0] * 99


def test_prints_reach_the_log_and_leave_the_protocol_alone(make_pool, tmp_path):
    (result, other) = make_pool().score(requests("print", "7"))
    assert (result.score, result.parts, other.score) == (0.5, {"house": 0.5, "house/words": 2.0}, 1.0)
    log = (tmp_path / "rewards.log").read_text()
    assert "to stdout" in log
    assert "to stderr" in log
    assert log.count("raw bytes") == 20000


def test_a_memory_limit_fails_the_sample_only(make_pool):
    pool = make_pool(memory_bytes=2 << 30)
    huge, other = pool.score(requests("huge", "7"))
    assert huge.error == "reward 'house': MemoryError: (pool_rewards.py:24)"
    assert other.score == 1.0


def test_scores_are_weighted_and_the_first_reward_decides_passing(make_pool):
    exact = RewardConfig(name="exact", type=RewardType.EXACT_MATCH, weight=2.0, extraction=Extraction.LAST_NUMBER)
    house = RewardConfig(name="house", type=RewardType.FUNCTION, function="pool_rewards:score", weight=0.5, timeout_s=20.0)
    right, half, failed, empty = make_pool(exact, house).score(requests("7", "it is 7", "raise", "print"))
    assert (right.score, right.parts, right.passed) == (2.5, {"exact": 1.0, "house": 1.0}, True)
    assert (half.score, half.parts, half.passed) == (2.0, {"exact": 1.0, "house": 0.0}, True)
    assert (failed.score, failed.parts, failed.passed) == (None, {"exact": 0.0}, False)
    assert (empty.score, empty.passed) == (0.25, False)


def test_task_rewards_score_reasoning_gym_prompts(make_pool):
    rows = ReasoningGymRows(ReasoningGymSource(name="q", task="basic_arithmetic", params=ADDITION), seed=1)
    pool = make_pool(RewardConfig(name="task", type=RewardType.TASK))
    right = request(0, rows[0].answer, metadata=rows[0].metadata)
    wrong = request(1, "x", metadata=rows[1].metadata)
    foreign = request(2, "7")
    results = pool.score([right, wrong, foreign])
    assert [r.score for r in results] == [1.0, 0.0, None]
    assert "does not come from a reasoning-gym source" in results[2].error


def test_a_reward_that_cannot_be_loaded_stops_the_start_and_leaves_no_process(make_pool):
    with pytest.raises(RewardSetupError, match="no function 'scor'; did you mean 'score'"):
        make_pool(RewardConfig(name="house", type=RewardType.FUNCTION, function="pool_rewards:scor"), num_workers=2)
    assert own_children() == []


def test_a_module_that_ends_or_hangs_while_loading_stops_the_start(make_pool, tmp_path):
    (tmp_path / "quits.py").write_text("import os\nos._exit(9)\n")
    (tmp_path / "sleeps.py").write_text("import threading\nthreading.Event().wait()\n")
    with pytest.raises(RewardSetupError, match=r"ended while it loaded its rewards \(exit code 9\)"):
        make_pool(RewardConfig(name="a", type=RewardType.FUNCTION, function="quits:f"))
    with pytest.raises(RewardSetupError, match=r"was not ready within 1 s \(loading a\)"):
        make_pool(RewardConfig(name="a", type=RewardType.FUNCTION, function="sleeps:f"), startup_timeout_s=1.0)
    assert own_children() == []


def test_a_worker_killed_between_calls_is_replaced_and_no_sample_blamed(make_pool):
    pool = make_pool()
    (victim,) = own_children()
    victim.kill()
    victim.wait(10)
    assert [r.score for r in pool.score(requests("7", "8"))] == [1.0, 0.0]
    assert (pool.errors, pool.restarts) == (0, 1)


def test_closing_leaves_no_process_and_ends_scoring(make_pool):
    with make_pool(num_workers=2) as pool:
        assert len(own_children()) == 2
    assert own_children() == []
    pool.close()
    with pytest.raises(RuntimeError, match="after close"):
        pool.score(requests("7"))


HELD = """
import time
from pathlib import Path

def score(prompt, response, answer, metadata):
    print("held", flush=True)
    while Path(metadata["hold"]).exists():
        time.sleep(0.01)
    return 1.0
"""


def test_a_second_caller_is_refused(make_pool, tmp_path):
    (tmp_path / "held_rewards.py").write_text(HELD)
    hold = tmp_path / "hold"
    hold.touch()
    pool = make_pool(RewardConfig(name="held", type=RewardType.FUNCTION, function="held_rewards:score", timeout_s=HANG_S))
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(pool.score, [request(0, "7", metadata={"hold": str(hold)})])
        until("a sample is being scored", lambda: "held" in (tmp_path / "rewards.log").read_text())
        try:
            with pytest.raises(RuntimeError, match="already running in another thread"):
                pool.score(requests("7"))
        finally:
            hold.unlink()
        assert [r.score for r in first.result(HANG_S)] == [1.0]


def test_a_child_ends_when_its_parent_is_gone(tmp_path):
    ours, theirs = socket.socketpair()
    child = subprocess.Popen(
        [sys.executable, "-m", "rljob_runtime.rewards.child", str(theirs.fileno())], pass_fds=(theirs.fileno(),), env=dict(os.environ)
    )
    theirs.close()
    ours.close()
    assert child.wait(30) == 0


FLAKY = """
import os, threading

def score(prompt, response, answer, metadata):
    if response == "hang":
        threading.Event().wait()
    if response == "raise":
        raise ValueError("no")
    return 1.0
"""
FORGING = """
import os, struct, sys

def write_everywhere(body):
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            if fd > 2:
                os.write(fd, struct.pack("<I", len(body)) + body)
        except OSError:
            pass

def score(prompt, response, answer, metadata):
    if response.startswith("forge"):
        position = int(response.split()[1])
        write_everywhere(struct.pack("<16sIIBdd", bytes(16), position, 0, 1, 100.0, 0.0))
    if response == "repeat":
        child = sys.modules["__main__"]
        send = child.send_frame
        def twice(connection, body):
            connection.sendall(2 * (struct.pack("<I", len(body)) + body))
            child.send_frame = send
        child.send_frame = twice
    return float(response == answer)
"""


def test_scores_take_the_place_of_failures_and_the_other_rewards_still_count(make_pool, tmp_path):
    (tmp_path / "flaky.py").write_text(FLAKY)
    flaky = RewardConfig(name="flaky", type=RewardType.FUNCTION, function="flaky:score", timeout_s=0.5, on_error=-1.0, on_timeout=-2.0)
    exact = RewardConfig(name="exact", type=RewardType.EXACT_MATCH, weight=10.0)
    results = make_pool(flaky, exact).score([request(0, "raise", answer="raise"), request(1, "hang", answer="hang"), request(2, "7")])
    assert [r.score for r in results] == [9.0, 8.0, 11.0]
    assert [r.parts for r in results] == [{"flaky": -1.0, "exact": 1.0}, {"flaky": -2.0, "exact": 1.0}, {"flaky": 1.0, "exact": 1.0}]
    assert [(r.errors, r.timeouts, r.retries) for r in results] == [(("flaky",), (), 0), ((), ("flaky",), 1), ((), (), 0)]
    assert [r.passed for r in results] == [False, False, True]


def test_a_time_out_is_tried_again_in_a_fresh_process(make_pool, tmp_path):
    (tmp_path / "worn.py").write_text(
        "import threading\ncalls = []\n"
        "def score(prompt, response, answer, metadata):\n"
        "    calls.append(1)\n"
        "    if len(calls) > 1:\n"
        "        threading.Event().wait()\n"
        "    return 1.0\n"
    )
    pool = make_pool(RewardConfig(name="worn", type=RewardType.FUNCTION, function="worn:score", timeout_s=0.5))
    results = pool.score(requests("7", "7", "7"))
    assert [(r.score, r.retries, r.timeouts, r.error) for r in results] == [(1.0, 0, (), None), (1.0, 1, (), None), (1.0, 1, (), None)]
    assert (pool.timeouts, pool.restarts) == (0, 2)


@pytest.fixture
def forging_pool(make_pool, tmp_path):
    """Has a reward that writes results of its own."""
    (tmp_path / "forging.py").write_text(FORGING)
    return make_pool(RewardConfig(name="forging", type=RewardType.FUNCTION, function="forging:score", timeout_s=20.0))


@pytest.mark.parametrize("position", [0, 1, 2])
def test_a_function_that_writes_to_the_socket_fails_alone(forging_pool, position):
    before, forged, after = forging_pool.score(requests("7", f"forge {position}", "8"))
    assert (before.score, after.score) == (1.0, 0.0)
    assert forged.score is None
    assert "it wrote a result that no one asked for" in str(forged.error)


def test_a_result_that_comes_twice_is_not_that_of_the_next_sample(forging_pool):
    results = forging_pool.score([request(0, "repeat", answer="repeat")]) + forging_pool.score(requests("8"))
    assert [r.score for r in results] == [1.0, 0.0]
    assert (forging_pool.errors, forging_pool.restarts) == (0, 1)


def test_rewards_score_the_prompts_of_their_tags(make_pool):
    exact = RewardConfig(name="exact", type=RewardType.EXACT_MATCH, sources=("text", "s"))
    number = RewardConfig(name="number", type=RewardType.MATH_VERIFY, sources=("math",), weight=2.0)
    every = RewardConfig(name="every", type=RewardType.EXACT_MATCH, weight=0.5, extraction=Extraction.LAST_NUMBER)
    text, math, own = (request(n, "7.0", answer="7") for n in range(3))
    tagged = [replace(r, prompt=replace(r.prompt, own_tag=tag)) for r, tag in ((text, "text"), (math, "math"), (own, None))]
    results = make_pool(exact, number, every).score(tagged)
    assert [r.parts for r in results] == [{"exact": 0.0, "every": 0.0}, {"number": 1.0, "every": 0.0}, {"exact": 0.0, "every": 0.0}]
    assert [(r.score, r.passed) for r in results] == [(0.0, False), (2.0, True), (0.0, False)]


def test_a_tag_without_a_reward_is_named(make_pool):
    pool = make_pool(RewardConfig(name="exact", type=RewardType.EXACT_MATCH, sources=("text",)))
    with pytest.raises(RewardSetupError, match=r"the tag 's' of data source 's' has no reward \(sources of the rewards: text\)"):
        pool.score(requests("7"))


def test_a_function_that_prints_never_meets_the_bound_of_its_log(make_pool, tmp_path):
    """Confinement bounds files, and at its bound each print would raise."""
    (tmp_path / "rewards.log").touch()
    os.truncate(tmp_path / "rewards.log", (1 << 30) - 100)  # sparse: what a long run left
    results = make_pool().score(requests("print", "print", "print"))
    assert [result.error for result in results] == [None] * 3
    assert (tmp_path / "rewards.log").stat().st_size < 9 << 20
