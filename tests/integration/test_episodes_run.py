"""A small agentic job from the command line: embedded Ray, real vLLM, an environment of the user's own in processes of its own, and a
scripted chat whose score is the user's own.
"""

import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.integration.jobs import EPISODE_METRICS, Running, job, rljob

GAME = '''
"""Says a number; wants digits back. It raises for one seed of three, once the first action is there."""

import time
from pathlib import Path

from rljob_runtime.environments.protocol import Turn


class Digits:
    def reset(self, seed):
        self.seed, self.turn = seed, 0
        return Turn(observation=f"{seed % 1000} + 1 = ")

    def step(self, action):
        self.turn += 1
        if self.seed % 3 == 0:
            raise ValueError("this one is broken")
        share = sum(c.isdigit() for c in action) / 8
        return Turn(observation=f"{self.seed % 100} + {self.turn} = ", reward=share, info={"digits": share})

    def close(self):
        pass


class Slow(Digits):
    def step(self, action):
        time.sleep(0.05)  # a step takes most of a second, so that it can be interrupted
        self.turn += 1
        return Turn(observation=f"{self.seed % 100} + {self.turn} = ", reward=sum(c.isdigit() for c in action) / 8)


class Held(Slow):
    def step(self, action):
        hold = Path(__file__).with_name("hold")
        if hold.exists():
            print("held", flush=True)  # an environment may write nothing but its log
        while hold.exists():
            time.sleep(0.01)
        return super().step(action)


def share(prompt, response, answer, metadata):
    return {"score": sum(c.isdigit() for c in response) / 8, "messages": len(metadata["messages"])}
'''
HELD_LOG = "games-0/environment-held"
STEPS, TURNS = 4, 3
GROUPS, SAMPLES = 4, 4
"""Of a step, of a group."""


def digits_job(model: Path, folder: Path) -> dict[str, Any]:
    environment = {
        "name": "digits",
        "type": "digits_game:Digits",
        "maxTurns": TURNS,
        "validationShare": 1.0,
        "prompt": {"chatTemplate": False, "turn": "{observation}"},
        "maxProcesses": 2,
        "episodesPerProcess": 8,
    }
    chat = {
        "name": "chat",
        "type": "Chat",
        "maxTurns": TURNS,
        "prompt": {"chatTemplate": False},
        "parameters": {"path": str(folder / "talks.jsonl"), "reward": {"type": "Function", "function": "digits_game:share"}},
    }
    shown = "{history}\n{current_observation}"
    fresh = {"chatTemplate": False, "turn": shown, "history": "Turn", "memoryTurns": 2, "memory": "Observations"}
    manifest = job(
        model,
        steps=STEPS,
        pipeline="Agentic",
        environments=[environment, chat, environment | {"name": "fresh", "validationShare": 0, "prompt": fresh}],
        algorithm={"advantage": {"estimator": "GiGPO", "gamma": 0.9, "episodeCount": "PerTurn"}},
        rollout={
            "promptsPerStep": GROUPS,
            "samplesPerPrompt": SAMPLES,
            "maxPromptTokens": 120,
            "maxResponseTokens": 8,
            "stopStrings": ["9"],
        },
        validation={"everySteps": 2, "maxPrompts": 5},
    )
    spec = manifest["spec"]
    del spec["data"], spec["rewards"]
    spec["components"][2] = {"name": "games", "role": "Environment", "placement": {"workers": 1}}
    return manifest


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Running:
    folder = tmp_path_factory.mktemp("agentic")
    (folder / "digits_game.py").write_text(GAME)
    talks = [{"question": f"{n} + 1 = ", "answer": "", "turns": ["and then? ", "and then? "]} for n in range(3)]
    (folder / "talks.jsonl").write_text("\n".join(map(json.dumps, talks)))
    running = Running(folder, digits_job(model, folder))
    assert running.wait() == 0, running.output
    return running


def test_the_tokens_trained_are_those_sampled_over_all_turns(run: Running) -> None:
    """On-policy, the trainer's log-probs of the sampled tokens behind all tokens before them are the engine's."""
    rows = run.metrics()
    assert len(rows) == STEPS
    for row in rows:
        assert row["staleness/max"] == 0
        assert row["mismatch/max_abs_logprob_diff"] < 1e-3
        assert row["train/grad_norm"] > 0
        assert row["episode/turns_mean"] == TURNS
        assert row["rollout/tokens"] < row["train/tokens"]
        assert row.keys() >= {name for name in EPISODE_METRICS if name.startswith("episode/")}
    assert any({"rollout/history_tokens_kept", "rollout/history_tokens_moved"} <= row.keys() for row in rows)
    assert rows[-1].keys() >= EPISODE_METRICS | {"validation/mean", "validation/source/digits", "validation/stopped/maxTurns"}


def test_turns_with_prompts_of_their_own_are_trained_beside_others(run: Running) -> None:
    assert {"reward/source/digits", "reward/source/fresh"} <= {name for row in run.metrics() for name in row}


def test_actions_end_with_a_stop_string(run: Running) -> None:
    rows = [row for step in range(1, STEPS + 1) for row in run.rows(f"trajectories/step-{step:06}.jsonl")]
    actions = [turn["action"] for row in rows for turn in row["turns"]]
    ended = [action for action in actions if "9" in action]
    assert ended
    assert all(action.index("9") == len(action) - 1 for action in ended)


def test_episodes_of_broken_tasks_are_counted_and_replaced(run: Running) -> None:
    rows = run.metrics()
    assert sum(row["episode/errors"] for row in rows) == sum(row["reward/dropped"] for row in rows) > 0
    assert all(row["rollout/sequences"] == GROUPS * SAMPLES for row in rows)
    assert "this one is broken" in run.output + str(run.rows("events.jsonl"))


def test_the_report_has_the_turns(run: Running) -> None:
    rows = [row for step in range(1, STEPS + 1) for row in run.rows(f"trajectories/step-{step:06d}.jsonl")]
    failed = [row for row in rows if row["reward"] is None]
    assert failed
    assert all(row["stop"] == "error" and "this one is broken" in row["error"] for row in failed)
    for row in [row for row in rows if row["reward"] is not None]:
        assert len(row["turns"]) == TURNS
        assert row["reward"] == pytest.approx(sum(turn["reward"] for turn in row["turns"]))
        assert row["stop"] in ("maxTurns", "done")
        assert [turn["versions"] for turn in row["turns"]] == [[row["step"] - 1]] * TURNS
        assert sum(turn["tokens"] for turn in row["turns"]) <= row["response_tokens"]
        assert all(turn["generation_s"] > 0 for turn in row["turns"])
    assert "this one is broken" in rljob("show", str(run.run_dir), "--trajectories", "--failed", cwd=run.folder)


def test_a_chat_is_scored_after_its_script(run: Running) -> None:
    (row, *_) = rows = [row for row in run.metrics() if "episode/info/chat/score" in row]
    assert row["episode/stopped/done"] > 0
    assert all(row["episode/info/chat/messages"] == 6 for row in rows)


def test_nothing_is_left_behind(run: Running) -> None:
    assert run.left_behind() == []


def interrupted_job(model: Path, steps: int) -> dict[str, Any]:
    """Half of each step's groups are held in the middle of their episodes while the file ``hold`` exists."""
    manifest = digits_job(model, model.parent)
    spec = manifest["spec"]
    slow = spec["environments"][0] | {"validationShare": 0}
    spec["environments"] = [slow | {"name": name, "type": f"digits_game:{name.capitalize()}"} for name in ("slow", "held")]
    del spec["validation"]
    spec["training"]["steps"] = steps
    spec["report"]["trajectoriesPerStep"] = GROUPS * SAMPLES
    return manifest


def finished_groups(run: Running) -> int:
    """Of the step whose episodes are being played, in the journal."""
    records = b""
    for file in sorted((run.run_dir / "journal").iterdir()):
        with contextlib.suppress(FileNotFoundError):  # removed since, after a checkpoint
            records += file.read_bytes()
    return records.count(b'"kind":"group"') - GROUPS * records.count(b'"kind":"step"')


def held_in_the_middle(run: Running) -> Path:
    """Holds episodes up; returns the file that does so, once others of the same step make a finished group."""
    hold = run.folder / "hold"
    before = run.log(HELD_LOG).count("held")
    hold.touch()
    run.until("an episode that is held", lambda: run.log(HELD_LOG).count("held") > before)
    run.until("a group that is finished", lambda: finished_groups(run) >= GROUPS // 2)
    return hold


@pytest.mark.slow
def test_a_killed_worker_and_a_killed_driver_cost_no_sample_and_double_none(model: Path, tmp_path: Path) -> None:
    steps = 6
    (tmp_path / "digits_game.py").write_text(GAME)
    manifest = interrupted_job(model, steps)
    hold = tmp_path / "hold"
    hold.touch()  # before the first step, so that none of the episodes that are held can be over
    run = Running(tmp_path, manifest, signaled=True)
    run.until("an episode that is held", lambda: "held" in run.log(HELD_LOG))  # and with it those that wait for its process
    run.until("a group that is finished", lambda: finished_groups(run) == GROUPS // 2)
    os.kill(run.worker_pid("games-0"), signal.SIGKILL)
    run.until("the replacement", lambda: "games-0 was replaced within" in run.output)
    hold.unlink()
    run.until("the end of the step", lambda: any("environment/replaced" in row for row in run.metrics()))
    (replaced,) = [row for row in run.metrics() if "environment/replaced" in row]
    assert replaced["environment/replaced"] == 1
    assert replaced["episode/restarts"] == GROUPS // 2 * SAMPLES, "those that were held, and no other"
    assert replaced["episode/errors"] == 0

    hold = held_in_the_middle(run)
    run.kill()
    hold.unlink()
    finished = finished_groups(run)
    assert GROUPS // 2 <= finished < GROUPS
    seen = len(run.metrics())
    assert seen < steps, "the kill came too late to show anything"
    again = Running(tmp_path, manifest, "--resume")
    assert again.wait() == 0, again.output
    rows = again.metrics()
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert all(row["rollout/sequences"] == GROUPS * SAMPLES for row in rows)
    assert rows[seen]["rollout/groups_recovered"] == finished, "what was finished is not played again"
    kept = [row for step in range(1, steps + 1) for row in again.rows(f"trajectories/step-{step:06}.jsonl")]
    once = [(group, sample) for group in range(GROUPS * steps) for sample in range(SAMPLES)]
    assert sorted((row["group_id"], row["sample_index"]) for row in kept) == once
    assert again.left_behind() == []
