"""From groups to train batches over scripted scorers: every token gets its own score back, under the lease of who computes it."""

import asyncio
import inspect
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rljob_api.v1alpha1.components import Role
from rljob_api.vocabulary import AdvantageEstimator, NormScope
from rljob_runtime.cluster.protocol import INLINE_BYTES
from rljob_runtime.errors import RuntimeFault, WorkerLostError
from rljob_runtime.job.roles import ROLES
from rljob_runtime.loop.batch_builder import BatchBuilder, Prepared
from rljob_runtime.loop.updates import Updates
from rljob_runtime.loop.workers import Component
from rljob_runtime.overlap.batching import BatchingConfig
from rljob_runtime.overlap.buffer import Group
from rljob_runtime.overlap.rule import Rule
from rljob_runtime.overlap.rule_config import RuleConfig
from rljob_runtime.records import FloatArray, IntArray, TrainBatch
from rljob_runtime.routes import RouteArray
from rljob_runtime.sampling_mask import SamplingMask
from rljob_runtime.training.critic import CriticWorker
from rljob_runtime.training.worker import PolicyWorker
from tests.support.fake_workers import Answered, CountingTrainer
from tests.support.job_workers import LoggedGroup, make_job_workers
from tests.support.records import make_trajectory
from tests.support.routes import routed_trajectory

REFERENCE, TRAINER, CRITIC = 0.5, 0.25, 0.125
"""What a scorer says of a token is its id times this: exact in float32, so that a score at another token shows."""
TEMPERATURE = 0.75


class Scorer:
    """Scores the tokens that are wanted, each by its id, and keeps what it was given."""

    log_file = "scorer.log"

    def __init__(self, name: str, scale: float, log: list[str]) -> None:
        self.name = name
        self._scale = scale
        self._log = log
        self.token_ids: list[IntArray] = []
        self.lengths: list[IntArray] = []
        self.temperatures: list[float] = []
        self.masks: list[SamplingMask | None] = []
        self.routes: list[RouteArray | None] = []
        self.lost = False

    def start(self, method: str, *args: Any) -> Answered:
        self._log.append(self.name)
        return Answered(lambda: getattr(self, method)(*args))

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        return await self.start(method, *args).result(timeout_s)

    def compute_logprobs(
        self,
        token_ids: IntArray,
        lengths: IntArray,
        temperature: float,
        wanted: FloatArray,
        sampling_mask: SamplingMask | None = None,
        routes: RouteArray | None = None,
    ) -> FloatArray:
        self.routes.append(routes)
        self.masks.append(sampling_mask)
        self.temperatures.append(temperature)
        return self.compute_values(token_ids, lengths, wanted)

    def compute_values(self, token_ids: IntArray, lengths: IntArray, wanted: FloatArray) -> FloatArray:
        if self.lost:
            raise WorkerLostError(self.name, "signal 9", self.log_file)
        assert token_ids.shape == wanted.shape == (int(lengths.sum()),)
        self.token_ids.append(token_ids)
        self.lengths.append(lengths)
        return (token_ids * wanted * self._scale).astype(np.float32)

    async def address(self, timeout_s: float) -> tuple[str, int]:
        return "127.0.0.1", 0

    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def drained(self) -> None:
        await asyncio.Event().wait()


class World:
    """A batch builder over so many scorers."""

    def __init__(
        self,
        rule: RuleConfig,
        *,
        references: int = 0,
        trainers: int = 1,
        tensor: int = 1,
        critics: int = 0,
        critic_tensor: int = 1,
        trainer_scores: Sequence[str] = ("proximal_logprobs",),
        **batching: int,
    ) -> None:
        self.log: list[str] = []
        self.references = [Scorer(f"reference-{i}", REFERENCE, self.log) for i in range(references)]
        self.trainers = [Scorer(f"trainer-{i}", TRAINER, self.log) for i in range(trainers)]
        self.critics = [Scorer(f"critic-{i}", CRITIC, self.log) for i in range(critics)]
        self.rule = Rule(rule)
        settings: dict[str, Any] = {"num_ranks": trainers // tensor, "mini_batches": 1, "epochs": 1} | batching
        self.builder = BatchBuilder(
            rule=self.rule,
            workers=make_job_workers(
                reference=self.references,
                trainer=self.trainers,
                critic=self.critics,
                ranks_per_share={Role.TRAINER: tensor, Role.CRITIC: critic_tensor},
                trainer_scores=trainer_scores,
                log=self.log,
            ),
            batching=BatchingConfig(temperature=TEMPERATURE, **settings),
            timeout_s=10.0,
        )

    def make(self, groups: Sequence[Group], version: int = 4) -> Prepared:
        return asyncio.run(self.builder.build(groups, version))


def groups_of(prompts: int, samples: int, version: int = 3) -> list[Group]:
    """Every sampled token has an id of its own; prompts are shared by a group, lengths differ."""
    fresh = iter(range(100, 10_000))
    made = []
    for number in range(prompts):
        prompt = tuple(next(fresh) for _ in range(1 + number % 3))
        responses = [tuple(next(fresh) for _ in range(1 + (3 * number + 2 * i) % 5)) for i in range(samples)]
        trajectories = tuple(
            make_trajectory(number, i, float((number + i) % 2), tokens, version, prompt) for i, tokens in enumerate(responses)
        )
        made.append(Group(group_id=number, trajectories=trajectories, failed_samples=0))
    return made


def sampled(groups: Sequence[Group]) -> dict[int, float]:
    """Every sampled token and the score of its response."""
    return {token: t.reward.score or 0.0 for g in groups for t in g.trajectories for token in t.segments[0].token_ids.tolist()}


def tokens_of(batches: Sequence[TrainBatch]) -> Iterator[tuple[TrainBatch, int]]:
    """Batches and the places of their trained tokens."""
    for batch in batches:
        yield from ((batch, int(place)) for place in np.flatnonzero(batch.response_mask))


def at(array: FloatArray | None, place: int) -> float:
    assert array is not None
    return float(array[place])


ALL = RuleConfig(max_response_tokens=8, estimator=AdvantageEstimator.GAE, kl_coefficient=0.1, lambda_=1.0)


@pytest.mark.parametrize(
    ("references", "trainers", "tensor", "critics"), [(1, 1, 1, 1), (2, 4, 1, 3), (3, 4, 2, 1), (4, 2, 2, 5), (1, 6, 2, 2), (2, 8, 4, 4)]
)
def test_every_sampled_token_gets_its_own_scores_back(references: int, trainers: int, tensor: int, critics: int) -> None:
    world = World(ALL, references=references, trainers=trainers, tensor=tensor, critics=critics)
    groups = groups_of(5, 4)
    prepared = world.make(groups)
    assert (len(prepared.policy), len(prepared.critic)) == (trainers // tensor, critics)
    wanted = sampled(groups)
    for by_rank in (prepared.policy, prepared.critic):
        found = [int(b.token_ids[place]) for b, place in tokens_of([b for batches in by_rank for b in batches])]
        assert sorted(found) == sorted(wanted)
        for batch, place in tokens_of([b for batches in by_rank for b in batches]):
            token = int(batch.token_ids[place])
            assert at(batch.reference_logprobs, place) == token * REFERENCE
            assert at(batch.proximal_logprobs, place) == token * TRAINER
            assert at(batch.values, place) == token * CRITIC
            assert at(batch.returns, place) == pytest.approx(wanted[token], abs=1e-3)  # with lambda 1 the score, whatever the value
            assert at(batch.advantages, place) == pytest.approx(wanted[token] - token * CRITIC, abs=1e-3)
    assert {t for s in (*world.references, *world.trainers) for t in s.temperatures} == {TEMPERATURE}


def test_routes_go_to_the_policy_that_sampled_and_to_nobody_else() -> None:
    world = World(ALL, references=1, trainers=2, critics=1)
    groups = [replace(g, trajectories=tuple(routed_trajectory(t) for t in g.trajectories)) for g in groups_of(3, 2)]
    prepared = world.make(groups)
    for trainer in world.trainers:
        (routes,) = trainer.routes
        assert routes is not None
        assert routes.shape[0] == trainer.token_ids[0].size
        assert trainer.masks == [None]
    assert [scorer.routes for scorer in world.references] == [[None]]
    assert all(batch.routes is not None for batches in prepared.policy for batch in batches)
    assert all(batch.routes is None for batches in prepared.critic for batch in batches)


@pytest.mark.parametrize(("trainers", "tensor"), [(2, 2), (4, 2), (8, 4)])
def test_trainers_of_one_data_parallel_rank_get_the_same_share(trainers: int, tensor: int) -> None:
    world = World(RuleConfig(max_response_tokens=8), trainers=trainers, tensor=tensor)
    groups = groups_of(4, 4)
    world.make(groups)
    shares = [np.concatenate(trainer.token_ids).tolist() for trainer in world.trainers]
    for rank in range(trainers // tensor):
        together = shares[rank * tensor : (rank + 1) * tensor]
        assert all(share == together[0] for share in together)
    scored = [token for share in shares[::tensor] for token in share if token in sampled(groups)]
    assert sorted(scored) == sorted(sampled(groups))


def test_with_more_ranks_than_samples_all_take_part_and_some_have_nothing() -> None:
    world = World(ALL, references=7, trainers=5, critics=6)
    groups = groups_of(1, 3)
    prepared = world.make(groups)
    for scorers in (world.references, world.trainers, world.critics):
        counts = [sum(lengths.size for lengths in s.lengths) for s in scorers]
        assert [len(s.lengths) for s in scorers] == [1] * len(scorers)  # every rank: a pass holds collectives
        assert sum(counts) == 3
    assert [len(batches) for batches in prepared.policy] == [1] * 5
    assert sum(b.lengths.size for batches in prepared.policy for b in batches) == 3
    assert {b.global_tokens for batches in prepared.policy for b in batches} == {len(sampled(groups))}


def lease(group: str, what: str, *workers: str) -> list[str]:
    """Log of a pass of these workers under a lease of their group."""
    return [f"{group}: {what} begins", *workers, f"{group}: {what} ends"]


REFERENCE_PASS = lease("reference", "reference log-probs of step 5", "reference-0", "reference-1")


def test_each_pass_is_made_under_the_lease_of_its_component_one_after_the_other() -> None:
    world = World(ALL, references=2, trainers=2, critics=1)
    world.make(groups_of(2, 2), version=4)
    assert world.log == [
        *REFERENCE_PASS,
        *lease("trainer", "training of step 5", "trainer-0", "trainer-1"),
        *lease("critic", "critic of step 5", "critic-0"),
    ]


def test_without_scorers_nobody_is_asked_and_there_is_nothing_for_a_critic() -> None:
    world = World(RuleConfig(max_response_tokens=8), trainers=2, trainer_scores=())
    prepared = world.make(groups_of(2, 2))
    assert world.log == []
    assert prepared.critic == []
    for batches in prepared.policy:
        assert [(b.reference_logprobs, b.proximal_logprobs, b.values, b.returns) for b in batches] == [(None, None, None, None)]


def test_a_lost_scorer_ends_the_pass_and_its_lease() -> None:
    world = World(ALL, references=2, trainers=1, critics=1)
    world.references[1].lost = True
    with pytest.raises(WorkerLostError, match="worker reference-1 is gone"):
        world.make(groups_of(2, 2))
    assert world.log == REFERENCE_PASS


@pytest.mark.parametrize("mini_batches", [1, 2])
def test_a_step_in_which_all_is_filtered_out_has_no_updates(mini_batches: int) -> None:
    world = World(replace(ALL, min_group_mean=1.0), references=1, trainers=2, critics=3, mini_batches=mini_batches, epochs=2)
    prepared = world.make(groups_of(4, 2))
    assert prepared.policy == [[], []]
    assert prepared.critic == [[], [], []]
    assert prepared.metrics["train/skipped_updates"] == mini_batches * 2
    assert prepared.metrics["train/masked_samples_fraction"] == 1.0


def test_updates_that_are_left_out_are_left_out_on_every_rank_and_reported() -> None:
    groups = groups_of(4, 2)  # scores 0 and 1 in each group
    solved = [replace(g, trajectories=tuple(replace(t, reward=replace(t.reward, score=1.0)) for t in g.trajectories)) for g in groups[:2]]
    world = World(replace(ALL, max_group_mean=1.0), references=1, trainers=2, critics=1, mini_batches=2, epochs=3)
    prepared = world.make([*solved, *groups[2:]])
    assert [len(batches) for batches in (*prepared.policy, *prepared.critic)] == [3, 3, 3]  # one of two updates, in three epochs
    assert prepared.metrics["train/skipped_updates"] == 3
    assert "train/skipped_updates" not in world.make(groups).metrics


def test_the_rules_state_survives_a_checkpoint() -> None:
    rule = RuleConfig(
        max_response_tokens=8, reward_center=NormScope.RUNNING, reward_scale=NormScope.RUNNING, kl_coefficient=0.1, kl_target=1.0
    )
    steps = [groups_of(2, 2), groups_of(3, 4)]
    straight = World(rule, references=1)
    straight.make(steps[0])
    kept = json.loads(json.dumps(straight.builder.rule_state()))
    resumed = World(rule, references=1)
    resumed.rule.restore(kept)
    assert resumed.builder.rule_state() == kept
    expected, fresh = straight.make(steps[1]), World(rule, references=1).make(steps[1])
    found = resumed.make(steps[1])
    np.testing.assert_array_equal(found.policy[0][0].advantages, expected.policy[0][0].advantages)
    assert found.policy[0][0].kl_coefficient == expected.policy[0][0].kl_coefficient
    assert found.metrics == expected.metrics
    assert resumed.builder.rule_state() == straight.builder.rule_state()
    assert fresh.metrics != expected.metrics  # the state matters here


def teacher(name: str, scale: float, log: list[str], *tags: str) -> tuple[Component, list[Scorer]]:
    workers = [Scorer(f"{name}-{rank}", scale, log) for rank in range(2)]
    description = ROLES[Role.TEACHER]
    group: Any = LoggedGroup(name, workers, log, ())  # type: ignore[arg-type]
    made = Component(
        role=Role.TEACHER, group=group, phase=description.phase, scorings=tuple(description.scorings), tags=tags, ranks_per_share=2
    )
    return made, workers


@pytest.mark.parametrize("default", [False, True])
def test_every_prompt_is_scored_by_its_own_teacher(default: bool) -> None:
    log: list[str] = []
    algebra, first = teacher("algebra", 3e-3, log, "s0")
    others, second = teacher("others", 5e-3, log, *(() if default else ("s1", "s2")))
    absent, third = teacher("absent", 7e-3, log, "nothing")
    groups = [
        replace(g, trajectories=tuple(replace(t, prompt=replace(t.prompt, source="all", own_tag=f"s{number}")) for t in g.trajectories))
        for number, g in enumerate(groups_of(3, 2))
    ]
    rule = RuleConfig(max_response_tokens=8, distillation_coefficient=0.1, teacher_weights={"s0": 2.0}, other_teacher_weight=0.5)
    workers = make_job_workers(trainer=[Scorer("trainer-0", TRAINER, log)], more=(algebra, others, absent))
    batching = BatchingConfig(temperature=TEMPERATURE, num_ranks=1, mini_batches=1, epochs=1, include_teacher=True)

    def made(rule: RuleConfig) -> TrainBatch:
        builder = BatchBuilder(rule=Rule(rule), workers=workers, batching=batching, timeout_s=10.0)
        return asyncio.run(builder.build(groups, 4)).policy[0][0]  # type: ignore[no-any-return]

    batch, own = made(rule), {token for t in groups[0].trajectories for token in t.segments[0].token_ids.tolist()}
    for _, place in tokens_of([batch]):
        token = int(batch.token_ids[place])
        assert at(batch.teacher_logprobs, place) == pytest.approx(token * (3e-3 if token in own else 5e-3))
    assert [len(scorer.token_ids) for scorer in (*first, *second, *third)] == [1, 1, 1, 1, 0, 0], "who has no prompt is not asked"
    assert "absent" not in " ".join(log)
    np.testing.assert_array_equal(first[0].token_ids[0], first[1].token_ids[0])
    weights = np.where(np.isin(batch.token_ids, list(own)), 2.0, 0.5) * batch.response_mask
    assert batch.teacher_logprobs is not None
    distance = batch.behavior_logprobs - batch.teacher_logprobs
    alone = made(replace(rule, distillation_coefficient=0.0)).advantages
    np.testing.assert_allclose(batch.advantages, alone - 0.1 * weights * distance, rtol=1e-5)


def test_a_prompt_that_no_teacher_has_is_an_error() -> None:
    algebra, _ = teacher("algebra", 3e-3, [], "s0")
    workers = make_job_workers(trainer=[Scorer("trainer-0", TRAINER, [])], more=(algebra,))
    batching = BatchingConfig(temperature=TEMPERATURE, num_ranks=1, mini_batches=1, epochs=1, include_teacher=True)
    rule = Rule(RuleConfig(max_response_tokens=8, distillation_coefficient=0.1))
    builder = BatchBuilder(rule=rule, workers=workers, batching=batching, timeout_s=10.0)
    with pytest.raises(RuntimeFault, match=r"no component computes teacher_logprobs of prompts with the tag .*; give it to a Teacher"):
        asyncio.run(builder.build(groups_of(1, 2), 4))


def updates_of(trainers: Sequence[CountingTrainer], critics: Sequence[CountingTrainer], *, warmup: int = 0, **tensor: int) -> Updates:
    """The part of the loop that trains; ``tensor`` parallel sizes by role."""
    sizes = {Role(role.capitalize()): size for role, size in tensor.items()}
    workers = make_job_workers(trainer=trainers, critic=critics, ranks_per_share=sizes)
    return Updates(workers=workers, step_timeout_s=10.0, critic_warmup_steps=warmup)


async def trained(updates: Updates, prepared: Prepared, version: int) -> dict[str, float]:
    return await updates.train(prepared, await updates.begin_critic(prepared, version), version)


@pytest.mark.parametrize("warmup", [0, 2])
def test_a_warm_up_trains_the_critic_alone(warmup: int) -> None:
    prepared = World(ALL, references=1, trainers=2, critics=1).make(groups_of(4, 2))
    trainers, critics = [CountingTrainer("trainer-0"), CountingTrainer("trainer-1")], [CountingTrainer("critic-0")]
    updates = updates_of(trainers, critics, warmup=warmup)
    for version in range(4):
        asyncio.run(trained(updates, prepared, version))
        assert critics[0].updates == version + 1
        assert [t.updates for t in trainers] == [max(version + 1 - warmup, 0)] * 2


def test_every_worker_trains_the_batches_of_its_rank() -> None:
    prepared = World(ALL, references=1, trainers=4, tensor=2, critics=6, critic_tensor=3).make(groups_of(4, 2))
    trainers, critics = [CountingTrainer(f"trainer-{i}") for i in range(4)], [CountingTrainer(f"critic-{i}") for i in range(6)]
    asyncio.run(trained(updates_of(trainers, critics, trainer=2, critic=3), prepared, 4))
    assert len(prepared.critic) == 2
    assert all(trainers[i].batches == [prepared.policy[i // 2]] for i in range(4))
    assert all(critics[i].batches == [prepared.critic[i // 3]] for i in range(6))


def test_large_batches_are_sent_as_soon_as_they_are_written_once_for_ranks_that_compute_together() -> None:
    sent: list[tuple[str, Any]] = []

    class Keeper(CountingTrainer):
        def share(self, value: Any) -> Any:
            sent.append((self.name, value))
            return ("shared", len(sent) - 1)

    trainers = [Keeper(f"trainer-{rank}") for rank in range(4)]
    world = World(RuleConfig(max_response_tokens=INLINE_BYTES), trainers=4, tensor=2)
    workers = make_job_workers(trainer=trainers, ranks_per_share={Role.TRAINER: 2})
    builder = BatchBuilder(rule=world.rule, workers=workers, batching=world.builder.batching, timeout_s=10.0)
    groups = [
        Group(
            group_id=number,
            trajectories=tuple(make_trajectory(number, i, float(i), (7,) * INLINE_BYTES) for i in range(2)),
            failed_samples=0,
        )
        for number in range(2)
    ]
    prepared = asyncio.run(builder.build(groups, 4))
    assert prepared.policy == [("shared", 0), ("shared", 1)]
    assert [name for name, _ in sent] == ["trainer-0", "trainer-2"]
    assert [int(batches[0].response_mask.sum()) for _, batches in sent] == [2 * INLINE_BYTES] * 2
    prepared.clear()
    assert prepared.policy == []


def test_a_step_without_updates_asks_nobody() -> None:
    prepared = World(replace(ALL, min_group_mean=1.0), references=1, trainers=2, critics=1).make(groups_of(4, 2))
    trainers, critics = [CountingTrainer("trainer-0"), CountingTrainer("trainer-1")], [CountingTrainer("critic-0")]
    assert asyncio.run(trained(updates_of(trainers, critics), prepared, 4)) == {}
    assert [w.updates for w in (*trainers, *critics)] == [0, 0, 0]


def test_workers_take_what_the_builder_gives() -> None:
    for worker, method in ((PolicyWorker, "compute_logprobs"), (CriticWorker, "compute_values")):
        theirs, fake = inspect.signature(getattr(worker, method)), inspect.signature(getattr(Scorer, method))
        assert list(theirs.parameters) == list(fake.parameters)
