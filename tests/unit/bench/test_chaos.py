"""What the chaos bench calls wrong: a fault of its checks would hide every other one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from bench.chaos import __main__ as command
from bench.chaos import cluster, killing, loop, operator_faults, processes, slowed
from bench.chaos.loop_attempt import REFUSED, TRAINED, Case, append
from bench.chaos.observer import Observer
from bench.chaos.outcome import FAILED, RECOVERED, Outcome, table
from rljob_runtime.loop.checkpointing import CheckpointStore, DriverState
from tests.support.pace import HANG_S

CASE = Case(seed=0, steps=3, batch=2, lag=0, engines=1, every=1, faults=())


def files(root: Path, trained: list[tuple[int, int, list[int]]], *, done: int = 6, rows: int = 3, dropped: float = 0.0) -> Path:
    """What attempts leave: (attempt, step, prompts) of every training, and a checkpoint of the last step with ``done`` prompts."""
    for attempt, step, prompts in trained:
        append(root / TRAINED, {"attempt": attempt, "step": step, "prompts": sorted(prompts * 2), "at_s": 0.0})
    (root / "run").mkdir()
    for step in range(rows):
        append(root / "run" / "metrics.jsonl", {"step": step + 1, "rollout/groups_dropped": dropped})
    store = CheckpointStore(root / "run" / "checkpoints", keep=2)
    state = DriverState(step=3, source_state={}, first_prompt=done, done=(), rule_state={}, spec_fingerprint={"seed": "f"})
    store.complete(store.begin(3, 0), state, ())
    return root


WHOLE = [(0, 0, [0, 1]), (0, 1, [2, 3]), (0, 2, [4, 5])]


def test_a_run_without_a_fault_and_one_that_goes_on_at_its_checkpoint_are_right(tmp_path: Path) -> None:
    assert loop.check(CASE, files(tmp_path, WHOLE), [0], over=True) == ""
    again = tmp_path / "again"
    again.mkdir()
    assert loop.check(CASE, files(again, [*WHOLE[:2], (1, 1, [2, 3]), (1, 2, [4, 5])]), [0, 1], over=True) == ""


@pytest.mark.parametrize(
    ("trained", "starts", "options", "says"),
    [
        (WHOLE[:2], [0], {}, "steps [0, 1] instead of 3"),
        ([*WHOLE[:2], (0, 1, [2, 3]), WHOLE[2]], [0], {}, "trained twice in one attempt"),
        ([*WHOLE[:2], (1, 2, [2, 3])], [0, 2], {}, "another number of times"),
        ([*WHOLE[:2], (0, 2, [4])], [0], {}, "a step of another size"),
        (WHOLE, [0], {"rows": 2}, "rows of steps [1, 2]"),
        (WHOLE, [0], {"done": 7}, "prompts [6] are done, not trained"),
    ],
)
def test_what_is_missing_or_twice_is_found(
    tmp_path: Path, trained: list[tuple[int, int, list[int]]], starts: list[int], options: dict[str, Any], says: str
) -> None:
    assert says in loop.check(CASE, files(tmp_path, trained, **options), starts, over=True)


def test_a_prompt_that_rewards_refused_or_that_was_counted_as_dropped_is_not_lost(tmp_path: Path) -> None:
    append(tmp_path / REFUSED, [6])
    assert loop.check(CASE, files(tmp_path, WHOLE, done=7), [0], over=True) == ""
    counted = tmp_path / "counted"
    counted.mkdir()
    assert loop.check(CASE, files(counted, WHOLE, done=7, dropped=1.0), [0], over=True) == ""


def rayjob(name: str, attempt: int, job: str = "j", **status: str) -> dict[str, Any]:
    labels = {"rljob.dev/job": job, "rljob.dev/attempt": str(attempt)}
    return {"metadata": {"name": name, "uid": name, "labels": labels}, "status": status}


def rljob(reason: str) -> dict[str, Any]:
    condition = {"type": "Succeeded", "status": "True", "reason": reason, "message": ""}
    return {"metadata": {"name": "j", "uid": "u"}, "status": {"conditions": [condition]}}


def test_the_observer_sees_two_live_children_a_restart_after_the_end_and_a_changed_end() -> None:
    seen = Observer(None, "n")  # type: ignore[arg-type]
    seen._rayjob("ADDED", rayjob("j-a1", 1))
    seen._rayjob("MODIFIED", rayjob("j-a1", 1, jobDeploymentStatus="Failed"))
    seen._rayjob("ADDED", rayjob("j-a2", 2))
    seen._rljob("MODIFIED", rljob("Completed"))
    assert seen.violations == []
    seen._rayjob("ADDED", rayjob("j-a3", 3))
    seen._rayjob("ADDED", rayjob("k-a2", 2, job="k"))
    seen._rayjob("ADDED", rayjob("k-a1", 1, job="k"))
    seen._rljob("MODIFIED", rljob("Other"))
    text = "\n".join(seen.violations)
    assert text.count("ONE-CHILD: j has") == 1
    assert "TERMINAL: j-a3 was made after j was over" in text
    assert "attempt 1 of k was made after attempt 2" in text
    assert "TERMINAL: j was over with" in text


def test_a_table_has_a_row_for_every_kind_and_times_of_what_recovered() -> None:
    found = [Outcome(layer="l", kind="a", result=RECOVERED, recovery_s=float(s)) for s in (1, 3)]
    found += [Outcome(layer="l", kind="a", result=FAILED, recovery_s=100.0), Outcome(layer="l", kind="b", result=RECOVERED)]
    first, second = table(found)
    assert (first["faults"], first[RECOVERED], first[FAILED], first["p50_s"]) == (3, 2, 1, 2.0)
    assert second["p50_s"] is None


def test_a_seed_gives_the_same_faults_and_no_kind_belongs_to_two_layers() -> None:
    assert loop.make_case(7, loop.KINDS) == loop.make_case(7, loop.KINDS)
    assert json.dumps(loop.make_case(7, loop.KINDS).faults) != json.dumps(loop.make_case(8, loop.KINDS).faults)
    layers = [set(loop.KINDS), set(operator_faults.KINDS), set(processes.KINDS), set(cluster.KINDS)]
    assert sum(map(len, layers)) - len(set.union(*layers)) <= 1  # the driver is killed in two


MARK = cluster.Mark(attempt=2, row="{}", step=7)
GOES_ON, FAILS = cluster.Fault(do=lambda _: None), cluster.Fault(do=lambda _: None, reasons=frozenset({"Evicted"}))


@pytest.mark.parametrize(
    ("fault", "attempt", "failure", "says"),
    [
        (GOES_ON, 2, {}, ""),
        (GOES_ON, 3, {"attempt": 2, "reason": "Evicted"}, "should have gone on"),
        (FAILS, 3, {"attempt": 2, "reason": "Evicted"}, ""),
        (FAILS, 4, {"attempt": 3, "reason": "Evicted"}, "was followed by attempt 4"),
        (FAILS, 3, {"attempt": 2, "reason": "DriverFailed"}, "not as Evicted"),
        (FAILS, 3, {"attempt": 1, "reason": "Evicted"}, "failure of attempt 2 is reported"),
    ],
)
def test_on_a_cluster_an_attempt_goes_on_or_fails_with_the_true_reason(
    fault: cluster.Fault, attempt: int, failure: dict[str, Any], says: str
) -> None:
    found = cluster.wrong_status(fault, MARK, {"attempt": attempt, "lastFailure": failure})
    assert says in found
    assert bool(found) == bool(says)


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ([1, 2, 3], ""),
        ([1, 3], "where step 2 belongs"),
        ([1, 2, 2, 3], "where step 3 belongs"),
        ([1, 2], "2 rows for 3 steps"),
        ([], "0 rows"),
    ],
)
def test_on_a_cluster_every_step_has_one_row(steps: list[int], says: str) -> None:
    found = cluster.wrong_rows([{"step": step, "rollout/sequences": 16} for step in steps], 3)
    assert says in found
    assert bool(found) == bool(says)
    assert "of 16 and of [8]" in cluster.wrong_rows([{"step": n, "rollout/sequences": size} for n, size in ((1, 16), (2, 8))], 2)


def test_an_order_kills_the_first_process_in_its_phase_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    orders, killed = tmp_path / "run.orders", list[int]()
    monkeypatch.setenv(killing.ORDERS, str(orders))
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(number))
    killing.obey("send")
    orders.write_text("send")
    killing.obey("take")
    assert (killed, orders.exists()) == ([], True)
    killing.obey("send")
    killing.obey("send")
    assert (killed, orders.exists()) == ([signal.SIGKILL], False)


def test_a_slowed_process_is_stopped_and_continued_in_turn_and_goes_on_at_the_end() -> None:
    sent: list[int] = []
    ready = threading.Event()

    def send(pid: int, number: int) -> None:
        assert pid == 7
        sent.append(number)
        if len(sent) >= 4:
            ready.set()

    with slowed.Slowed(7, send=send):
        assert ready.wait(HANG_S)
    assert sent[0] == signal.SIGSTOP
    assert sent[-1] == signal.SIGCONT, "nothing stays stopped"
    assert all(a != b for a, b in pairwise(sent))


def test_slowing_a_process_that_ends_is_no_error() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    with slowed.Slowed(child.pid) as gone:
        pass
    assert gone.num_bursts == 0


def test_one_kind_alone_does_not_take_the_place_of_its_layers_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["chaos", "--only", "etcd slowed"])
    arguments = command._parse()
    assert (arguments.layers, arguments.dry) == (["operator"], True)
