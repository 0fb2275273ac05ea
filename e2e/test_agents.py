"""An agentic job on pods of two node groups: episodes of the frozen lake go between the engine and the environment worker.

It is the job that preempts another one in the scenario of queues.
"""

from __future__ import annotations

import json
from concurrent.futures import Future

from e2e.queues import STEPS, TURNS, URGENT, Outcome
from e2e.test_queues import ENDS_S


def test_episodes_are_played_in_pods_and_trained(scenario_of_queues: Future[Outcome]) -> None:
    volume = scenario_of_queues.result(ENDS_S).volume
    steps = [json.loads(line) for line in volume.read(f"{URGENT}/metrics.jsonl").splitlines()]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert all(step["staleness/max"] <= 1 for step in steps)
    assert all(1 < step["episode/turns_mean"] <= TURNS for step in steps)
    assert sum(step["episode/errors"] for step in steps) == 0
    episodes = [json.loads(line) for line in volume.read(f"{URGENT}/trajectories/step-{STEPS:06d}.jsonl").splitlines()]
    assert all(turn["observation"].strip() and turn["tokens"] for episode in episodes for turn in episode["turns"])
