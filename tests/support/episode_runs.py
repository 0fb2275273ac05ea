"""Agentic runs in virtual time and their restarts: the scenarios of ``overlap_runs``, played in scripted environments."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rljob_runtime.overlap.environment_router import EnvironmentRouter
from rljob_runtime.overlap.episodes import EnvironmentRules, Environments
from rljob_runtime.overlap.tasks import TRAINING, TaskOrder
from tests.support.episode_fakes import STOP_TOKEN, ActingEngine, Script, ScriptedEnvironments, check_exact, number
from tests.support.overlap_runs import Attempt
from tests.support.timed_engine import TimedEngine

SHARES = {"lake": 2.0, "rooms": 1.0}
TASKS = TaskOrder(SHARES, seed=3, purpose=TRAINING).next(1000)


class EpisodeAttempt(Attempt):
    """One process's worth of training on episodes; one of two environment workers dies in some scenarios, and some tasks fail."""

    def __post_init__(self) -> None:
        self.scenario = replace(self.scenario, filters=False)  # members of a group differ in nothing here
        super().__post_init__()

    def make_prompts(self, state: Mapping[str, object] | None) -> Any:
        order = TaskOrder(SHARES, seed=3, purpose=TRAINING)
        if state is not None:
            order.restore(state)
        return order

    def make_engine(self, name: str, **pace: Any) -> TimedEngine:
        return ActingEngine(name, **pace)

    def scoring(self) -> dict[str, Any]:
        s = self.scenario
        script = Script(
            turns=lambda task: 1 + number(s.seed, task) % 4,
            delay_s=lambda task, turn: number(s.seed, task, turn) % 40 / 10,
            fails_at=lambda task: task % 2 if s.fails and number(task) % 7 == 3 else None,
        )
        dies_at_s = 5.0 + s.seed % 20 if s.seed % 3 == 0 else float("inf")
        self.hosts: list[Any] = [ScriptedEnvironments("games-0", script), ScriptedEnvironments("games-1", script, dies_at_s=dies_at_s)]
        rules = {name: EnvironmentRules(stop_token_ids=(STOP_TOKEN,)) for name in SHARES}
        return {"environments": Environments(router=EnvironmentRouter(self.hosts, timeouts_s=dict.fromkeys(SHARES, 600.0)), rules=rules)}

    def check(self) -> None:
        """BOUND and EXACT: also of groups that an earlier attempt had finished, whose tasks their places in the order name."""
        for step, groups in self.taken.items():
            assert len(groups) == self.scenario.batch
            for group in groups:
                assert step - self.scenario.bound <= group.oldest_version <= group.newest_version <= step
                assert len({t.sample_index for t in group.trajectories}) == len(group.trajectories) == self.scenario.samples
                task = TASKS[group.group_id]
                for trajectory in group.trajectories:
                    assert (trajectory.prompt.index, trajectory.prompt.source) == (task.index, task.source)
                    check_exact(replace(trajectory, prompt=replace(trajectory.prompt, metadata=task.metadata)))
                    assert trajectory.episode is not None
                    assert trajectory.reward.score == sum(turn.reward for turn in trajectory.episode.turns)
                    assert trajectory.episode.summary == {"success": float(int(str(task.metadata["seed"])) % 2)}
