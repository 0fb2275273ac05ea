"""Episodes in virtual time: what a hang, a failure, the end of a worker and a group that is complete mean for the others."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import pytest

from rljob_runtime.errors import EpisodesFailedError, StartupDeadlineError, WorkerLostError, WorkerStuckError
from rljob_runtime.loop.environment_replacer import EnvironmentReplacer
from rljob_runtime.loop.replacement import ReplacementLimits
from rljob_runtime.overlap.buffer import Group
from rljob_runtime.overlap.environment_router import REPLY_SPARE_S, EnvironmentRouter
from rljob_runtime.overlap.episodes import EnvironmentRules, Environments
from rljob_runtime.overlap.scheduler import RolloutScheduler
from rljob_runtime.overlap.tasks import TRAINING, VALIDATION, TaskOrder
from rljob_runtime.overlap.validation import ValidationConfig, Validator
from rljob_runtime.records import Sampling
from tests.support.episode_fakes import NUM_ACTION_TOKENS, STOP_TOKEN, ActingEngine, Script, ScriptedEnvironments, check_exact
from tests.support.rollouts import make_gate, make_scheduler
from tests.support.virtual_time import run_virtual

TASKS = TaskOrder({"lake": 1.0}, seed=1, purpose=TRAINING).next(50)
SEEDS = [int(str(task.metadata["seed"])) for task in TASKS]
LONG_S = 500.0
TIMEOUT_S = 600.0
"""Of an episode."""
STEPS = 30


@dataclass
class Replacing:
    """Replaces the environment workers of a scheduler in virtual time."""

    hosts: Sequence[ScriptedEnvironments]
    restarts: int = 0
    start_s: float = 3.0
    fails: int = 0
    """Attempts to start one that fail."""
    log: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    """For users."""

    def __post_init__(self) -> None:
        self.replacer = EnvironmentReplacer(
            [host.name for host in self.hosts],
            start=self._start,
            end=self._end,
            limits=ReplacementLimits(max_restarts=self.restarts, start_timeout_s=9.0),
            notify=self.lines.append,
        )

    async def _start(self, index: int, timeout_s: float) -> None:
        self.log.append(f"{self.hosts[index].name} starts at {asyncio.get_running_loop().time():.0f} s within {timeout_s:.0f} s")
        await asyncio.sleep(self.start_s)
        if self.fails:
            self.fails -= 1
            raise StartupDeadlineError(f"{self.hosts[index].name} did not finish start within {timeout_s:.0f} s")
        self.hosts[index].restart()

    async def _end(self, index: int) -> None:
        self.log.append(f"{self.hosts[index].name} ends")


def environments(hosts: Sequence[ScriptedEnvironments], replacing: Replacing | None = None, **rule: Any) -> Environments:
    rules = {"lake": EnvironmentRules(**{"stop_token_ids": (STOP_TOKEN,), **rule})}
    replacer = (replacing or Replacing(hosts)).replacer
    router = EnvironmentRouter(hosts, timeouts_s={"lake": TIMEOUT_S}, replace=replacer.replace)  # type: ignore[arg-type]
    return Environments(router=router, rules=rules, take_metrics=replacer.take_metrics)


def make(
    hosts: Sequence[ScriptedEnvironments],
    *,
    batch: int = 4,
    steps: int = 10,
    engine: ActingEngine | None = None,
    rule: Mapping[str, Any] = MappingProxyType({}),
    replacing: Replacing | None = None,
    gate: Mapping[str, Any] = MappingProxyType({}),
    **rollout: Any,
) -> RolloutScheduler:
    return make_scheduler(
        [engine or ActingEngine("engine-0", slots=16, token_s=0.1)],
        make_gate(batch, 1, steps, **gate),
        rollout={"samples_per_prompt": 3, **rollout},
        prompts=TaskOrder({"lake": 1.0}, seed=1, purpose=TRAINING),
        environments=environments(hosts, replacing, **rule),
    )


def run(scheduler: RolloutScheduler, what: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """The scheduler beside a test's own coroutine; the failure of either is raised."""

    async def both() -> Any:
        running = asyncio.ensure_future(scheduler.run())
        await asyncio.sleep(0)
        scheduler.open()
        try:
            return await what()
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    return run_virtual(both())


def take(scheduler: RolloutScheduler, count: int) -> Callable[[], Coroutine[Any, Any, Any]]:
    return lambda: scheduler.buffer.take(count, version=0, timeout_s=10_000.0, what="a batch")


def test_an_environment_that_hangs_holds_up_its_own_group_alone() -> None:
    script = Script(delay_s=lambda seed, turn: LONG_S if seed == SEEDS[2] else 0.1)
    scheduler = make([ScriptedEnvironments("games-0", script)], batch=4)

    async def wait() -> int:
        await asyncio.sleep(LONG_S / 10)
        return len(scheduler.buffer)

    assert run(scheduler, wait) == 7  # of the 8 groups that the gate admits


def seconds_of_training(script: Script, *, slots: int = 4, train_s: float = 0.0, **gate: Any) -> float:
    """With few slots the engine is the bottleneck, with many the length of an episode."""
    engine = ActingEngine("engine-0", slots=slots, token_s=0.1)
    scheduler = make([ScriptedEnvironments("games-0", script)], batch=8, steps=STEPS, engine=engine, gate=gate)

    async def play() -> float:
        for step in range(STEPS):
            groups = await scheduler.buffer.take(8, version=step, timeout_s=500.0, what="a batch")
            await asyncio.sleep(train_s)
            scheduler.trained(groups)
            async with scheduler.updating(f"weights v{step + 1}"):
                engine.version = step + 1
                scheduler.resume([0])
            scheduler.advance(step + 1)
        return asyncio.get_running_loop().time()

    return float(run(scheduler, play))


def every_fifth_seed() -> set[int]:
    return {int(str(t.metadata["seed"])) for t in TaskOrder({"lake": 1.0}, seed=1, purpose=TRAINING).next(500)[::5]}


def test_a_fifth_of_failing_environments_costs_its_share_and_a_hang_its_deadline_once() -> None:
    """Those that fail do so at their end, when all was sampled for nothing."""
    failing = every_fifth_seed()
    whole_s = seconds_of_training(Script(turns=lambda seed: 3))
    failing_s = seconds_of_training(Script(turns=lambda seed: 3, fails_at=lambda seed: 3 if seed in failing else None))
    assert whole_s < failing_s < whole_s / 0.8
    hangs = SEEDS[2]
    hanging = Script(
        turns=lambda seed: 3,
        delay_s=lambda seed, turn: 20.0 if (seed, turn) == (hangs, 1) else 0.1,
        fails_at=lambda seed: 1 if seed == hangs else None,
    )
    assert seconds_of_training(hanging) < whole_s + 20.0


def test_a_group_in_place_of_a_failed_one_begins_at_the_same_moment() -> None:
    script = Script(turns=lambda seed: 3, delay_s=lambda seed, turn: 3.0, fails_at=lambda seed: 3 if seed == SEEDS[2] else None)
    host = ScriptedEnvironments("games-0", script)
    scheduler = make([host], engine=ActingEngine("engine-0", slots=200, token_s=0.1))

    async def begun_when_the_others_end() -> int:
        while not len(scheduler.buffer):
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.05)  # all that happens at the same virtual time
        return len({start.seed for start in host.started})

    assert run(scheduler, begun_when_the_others_end) == 8 + 1


@pytest.mark.parametrize("train_s", [0.0, 5.0])
def test_where_all_episodes_last_equally_long_extra_prompts_keep_the_cost_of_failures_at_their_share(train_s: float) -> None:
    """A batch that lacks one group waits for a whole episode: replacing a failed group is too late then, whoever does it how soon."""
    failing = every_fifth_seed()
    equal = Script(turns=lambda seed: 3, delay_s=lambda seed, turn: 3.0, max_tokens=1)
    some_fail = replace(equal, fails_at=lambda seed: 3 if seed in failing else None)
    whole_s = seconds_of_training(equal, slots=200, train_s=train_s)
    assert seconds_of_training(some_fail, slots=200, train_s=train_s) > 1.5 * whole_s
    extra = {"spare": 4, "max_staleness": 2}  # rollout.extraPrompts: the failing fifth of two batches, and of what replaces it
    assert seconds_of_training(some_fail, slots=200, train_s=train_s, **extra) < whole_s / 0.8


def test_actions_end_at_stop_tokens_and_at_the_limit_of_the_environment() -> None:
    engine = ActingEngine("engine-0", slots=16, token_s=0.1)
    scheduler = make([ScriptedEnvironments("games-0", Script(max_tokens=2))], engine=engine)
    groups = run(scheduler, take(scheduler, 4))
    sampled = [s.token_ids.tolist() for g in groups for t in g.trajectories for s in t.segments if s.sampled]
    assert {len(tokens) for tokens in sampled} == {1, 2}
    assert all(STOP_TOKEN not in tokens[:-1] for tokens in sampled)
    assert all(tokens[-1] == STOP_TOKEN for tokens in sampled if len(tokens) == 1)
    assert all(request.sampling.stop_token_ids == (STOP_TOKEN,) for request in engine.seen)
    assert max(max(tokens) for tokens in sampled) < NUM_ACTION_TOKENS


def test_each_turn_has_its_own_seconds() -> None:
    scheduler = make([ScriptedEnvironments("games-0", Script(delay_s=lambda seed, turn: 0.2 * (1 + turn)))])
    groups = run(scheduler, take(scheduler, 4))
    for trajectory in (t for group in groups for t in group.trajectories):
        assert trajectory.episode is not None
        turns = trajectory.episode.turns
        actions = [segment for segment in trajectory.segments if segment.sampled]
        assert all(turn.generation_s > 0.099 * len(action) for turn, action in zip(turns, actions, strict=True))
        assert all(turn.environment_s > 0.199 * (2 + number) for number, turn in enumerate(turns))
        assert trajectory.generation_s == pytest.approx(sum(t.generation_s for t in turns))
        assert trajectory.episode.environment_s == pytest.approx(0.2 + sum(t.environment_s for t in turns), abs=0.06)
        assert trajectory.episode.last_observation == f"{trajectory.prompt.metadata['seed']}:{len(turns)}"


def test_episodes_of_a_lost_worker_begin_again_with_their_seeds() -> None:
    hosts = [ScriptedEnvironments("games-0", Script(), dies_at_s=0.35), ScriptedEnvironments("games-1", Script())]
    scheduler = make(hosts)
    groups = run(scheduler, take(scheduler, 4))
    for group in groups:
        assert len(group.trajectories) == 3
        for trajectory in group.trajectories:
            check_exact(trajectory)
    lost = {start.episode_id: start.seed for start in hosts[0].started}
    again = {s.episode_id.removesuffix("r1"): s.seed for s in hosts[1].started if s.episode_id.endswith("r1")}
    assert again
    assert again.items() <= lost.items()
    counters = scheduler.take_counters().episodes
    assert counters is not None
    assert counters.restarts == len(again)


def test_episodes_that_lose_two_workers_fail_and_their_groups_go_on_smaller_or_are_replaced() -> None:
    script = Script(delay_s=lambda seed, turn: 0.5)
    hosts = [ScriptedEnvironments(f"games-{i}", script, dies_at_s=1.2 + i) for i in range(2)]
    hosts.append(ScriptedEnvironments("games-2", script))
    scheduler = make(hosts, batch=8)
    groups = run(scheduler, take(scheduler, 8))
    counters = scheduler.take_counters()
    assert counters.episodes is not None
    assert counters.episodes.errors["lake"] >= counters.rewards_dropped > 0
    assert all(len(group.trajectories) + group.failed_samples == 3 for group in groups)


def test_the_last_worker_is_indispensable() -> None:
    scheduler = make([ScriptedEnvironments("games-0", Script(), dies_at_s=0.35)])
    with pytest.raises(WorkerLostError, match="games-0"):
        run(scheduler, take(scheduler, 4))


def test_the_only_worker_is_replaced_and_its_episodes_begin_again_there() -> None:
    host = ScriptedEnvironments("games-0", Script(), dies_at_s=0.35)
    replacing = Replacing([host], restarts=1)
    scheduler = make([host], replacing=replacing)
    groups = run(scheduler, take(scheduler, 4))
    for trajectory in (t for group in groups for t in group.trajectories):
        check_exact(trajectory)
    assert all(len(group.trajectories) == 3 for group in groups)
    assert replacing.log == ["games-0 ends", "games-0 starts at 1 s within 9 s"]
    assert "games-0 is replaced now, restart 1 of 1; its episodes begin again with their seeds" in replacing.lines[0]
    assert replacing.lines[1] == "games-0 was replaced within 3.0 s"
    assert scheduler.environments is not None
    assert scheduler.environments.take_metrics() == {"environment/replaced": 1.0, "environment/replacement_s": pytest.approx(3.0)}
    assert scheduler.environments.take_metrics() == {}


def test_others_play_on_while_a_worker_is_replaced_and_it_gets_episodes_again() -> None:
    hosts = [ScriptedEnvironments("games-0", Script(), dies_at_s=0.35), ScriptedEnvironments("games-1", Script())]
    scheduler = make(hosts, replacing=Replacing(hosts, restarts=1, start_s=0.5))

    async def play() -> int:
        await take(scheduler, 4)()
        before = len(hosts[0].started)
        await asyncio.sleep(5.0)
        scheduler.advance(1)
        await asyncio.sleep(5.0)
        return len(hosts[0].started) - before

    assert run(scheduler, play) > 0


def test_a_worker_that_is_lost_once_too_often_ends_the_run_with_the_cause() -> None:
    host = ScriptedEnvironments("games-0", Script(), dies_at_s=0.35, again_at_s=[4.0])
    replacing = Replacing([host], restarts=1)
    scheduler = make([host], replacing=replacing)
    with pytest.raises(WorkerLostError, match="games-0"):
        run(scheduler, take(scheduler, 8))
    assert "1 of 1 restarts are used (spec.rollout.maxEngineRestarts)" in replacing.lines[-1]


def test_a_worker_that_does_not_start_is_tried_again_later_and_then_given_up() -> None:
    hosts = [ScriptedEnvironments("games-0", Script(), dies_at_s=0.35)]
    replacing = Replacing(hosts, restarts=2, fails=1)
    scheduler = make(hosts, replacing=replacing)
    assert len(run(scheduler, take(scheduler, 4))) == 4
    assert [line for line in replacing.log if "starts" in line] == [f"games-0 starts at {at_s} s within 9 s" for at_s in (1, 9)]
    hosts = [ScriptedEnvironments("games-0", Script(), dies_at_s=0.35)]
    scheduler = make(hosts, replacing=Replacing(hosts, restarts=2, fails=2))
    with pytest.raises(StartupDeadlineError, match="games-0 did not finish start"):
        run(scheduler, take(scheduler, 4))


def test_episodes_given_up_while_no_worker_is_there_never_begin() -> None:
    host = ScriptedEnvironments("games-0", Script(turns=lambda seed: 9), dies_at_s=0.35)
    scheduler = make([host], replacing=Replacing([host], restarts=1, start_s=5.0))

    async def give_up() -> None:
        await asyncio.sleep(2.0)
        scheduler.gate.advance(1)
        scheduler.advance(2)  # all that began under version 0 is too old
        await asyncio.sleep(5.0)

    run(scheduler, give_up)
    begun = [start.episode_id for start in host.started]
    assert not [episode for episode in begun if episode.endswith("r1")]


HANGS: dict[str, Any] = {"hangs_at_s": 0.35}
STOPS: dict[str, Any] = {"stops_at_s": 0.35}


@pytest.mark.parametrize(("stuck", "noticed_s"), [(HANGS, TIMEOUT_S + REPLY_SPARE_S), (STOPS, 60.0)], ids=["hangs", "stopped"])
def test_a_stuck_worker_is_ended_and_replaced_and_its_episodes_begin_again(stuck: dict[str, Any], noticed_s: float) -> None:
    host = ScriptedEnvironments("games-0", Script(), **stuck)
    replacing = Replacing([host], restarts=1)
    scheduler = make([host], replacing=replacing)

    async def play() -> tuple[list[Group], float]:
        return await take(scheduler, 4)(), asyncio.get_running_loop().time()

    groups, ended_s = run(scheduler, play)
    for trajectory in (t for group in groups for t in group.trajectories):
        check_exact(trajectory)
    assert noticed_s < ended_s < noticed_s + 20.0
    assert "games-0 is stuck" in replacing.lines[0]
    assert "games-0 is replaced now, restart 1 of 1; its episodes begin again with their seeds" in replacing.lines[0]
    assert replacing.log[0] == "games-0 ends"
    assert host.stacks == (stuck is HANGS)
    assert scheduler.environments is not None
    assert scheduler.environments.take_metrics()["environment/replaced"] == 1.0
    counters = scheduler.take_counters().episodes
    assert counters is not None
    assert counters.restarts > 0


def test_a_stuck_worker_is_noticed_at_the_limit_of_its_oldest_episode() -> None:
    """Which began long before the message that has no reply."""
    script = Script(turns=lambda seed: 100, delay_s=lambda seed, turn: 40.0)
    host = ScriptedEnvironments("games-0", script, hangs_at_s=0.9 * TIMEOUT_S)
    replacing = Replacing([host], restarts=1)
    scheduler = make([host], replacing=replacing)

    async def wait() -> list[str]:
        await asyncio.sleep(TIMEOUT_S + REPLY_SPARE_S - 1.0)
        early = list(replacing.lines)
        await asyncio.sleep(5.0)
        return early

    assert run(scheduler, wait) == []
    assert "games-0 is stuck" in replacing.lines[0]


def test_the_others_go_on_without_a_stuck_worker_that_is_not_replaced_but_ended() -> None:
    hosts = [ScriptedEnvironments("games-0", Script(), **STOPS), ScriptedEnvironments("games-1", Script())]
    replacing = Replacing(hosts)
    scheduler = make(hosts, replacing=replacing)
    assert len(run(scheduler, take(scheduler, 8))) == 8
    assert replacing.log == ["games-0 ends"]


def test_the_last_worker_that_is_stuck_ends_the_run_with_the_deadline_and_the_remedy() -> None:
    message = (
        r"worker games-0 is stuck: no reply to episode \d/\d of environment lake within 120 s beyond the 600 s of its "
        r"episodeTimeoutSeconds, \d+ episodes wait there; correct what .*, or allow episodes more time; its log: environments.log"
    )
    scheduler = make([ScriptedEnvironments("games-0", Script(), **HANGS)])
    with pytest.raises(WorkerStuckError, match=message):
        run(scheduler, take(scheduler, 4))
    scheduler = make([ScriptedEnvironments("games-0", Script(), **STOPS)])
    with pytest.raises(WorkerStuckError, match=r"worker games-0 is stuck: no answer to \w+ within 60 s .* look at the node; its log: "):
        run(scheduler, take(scheduler, 4))


def test_failed_episodes_are_left_out_and_counted() -> None:
    fails = SEEDS[1]
    scheduler = make([ScriptedEnvironments("games-0", Script(fails_at=lambda seed: 1 if seed == fails else None))])
    groups = run(scheduler, take(scheduler, 4))
    assert fails not in {t.prompt.metadata["seed"] for g in groups for t in g.trajectories}
    counters = scheduler.take_counters()
    assert counters.groups_dropped == 1
    assert counters.episodes is not None
    assert counters.episodes.errors == {"lake": 3}
    assert f"seed {fails} raised" in counters.reward_messages
    assert [t.episode.stop for t in counters.failed if t.episode] == ["error"] * 3  # to be read


def test_failed_episodes_may_have_a_score() -> None:
    fails = SEEDS[1]
    script = Script(fails_at=lambda seed: 1 if seed == fails else None)
    scheduler = make([ScriptedEnvironments("games-0", script)], rule={"on_error": -0.5})
    groups = run(scheduler, take(scheduler, 4))
    scores = [t.reward.score for g in groups for t in g.trajectories if t.prompt.metadata["seed"] == fails]
    assert scores == [-0.5] * 3


def test_the_run_fails_where_most_episodes_do() -> None:
    scheduler = make([ScriptedEnvironments("games-0", Script(fails_at=lambda seed: 0))])
    with pytest.raises(EpisodesFailedError, match="100 of the last 100 episodes failed"):
        run(scheduler, take(scheduler, 4))


def test_redundant_episodes_are_given_up_at_their_worker() -> None:
    host = ScriptedEnvironments("games-0", Script(turns=lambda seed: 2, delay_s=lambda seed, turn: 1.0))
    engine = ActingEngine("engine-0", slots=4, token_s=0.3)
    scheduler = make([host], engine=engine, redundant_samples=2)

    async def play() -> list[Group]:
        groups: list[Group] = await take(scheduler, 4)()
        await asyncio.sleep(10.0)
        return groups

    groups = run(scheduler, play)
    assert all(len(group.trajectories) == 3 for group in groups)
    begun = {s.episode_id for s in host.started if int(s.episode_id.split("/")[0]) in {g.group_id for g in groups}}
    assert host.ended
    assert host.running.isdisjoint(begun)


def test_validation_plays_its_own_tasks_before_the_training() -> None:
    host = ScriptedEnvironments("games-0", Script())
    scheduler = make([host])
    tasks = TaskOrder({"lake": 1.0}, seed=1, purpose=VALIDATION).next(5)
    config = ValidationConfig(
        every_steps=1,
        at_start=True,
        pauses=True,
        samples_per_prompt=2,
        sampling=Sampling(max_tokens=8, temperature=0.0),
        seed=5,
        timeout_s=1000.0,
    )
    assert scheduler.environments is not None
    validator = Validator(fleet=scheduler.fleet, prompts=tasks, environments=scheduler.environments, config=config)

    async def validate() -> list[dict[str, float]]:
        return [(await validator.run(0)).metrics, (await validator.run(0)).metrics]

    first, second = run(scheduler, validate)
    assert first["validation/prompts"] == 5.0
    assert first["validation/mean"] == first["validation/source/lake"] == second["validation/mean"]
    assert first["validation/pass_rate"] == sum(int(str(t.metadata["seed"])) % 2 for t in tasks) / 5
