"""Validation of one version in virtual time: what is asked, what is summed up, what happens to training's responses beside it."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from rljob_runtime.errors import DeadlineError
from rljob_runtime.overlap.fleet import EngineFleet, FleetConfig
from rljob_runtime.overlap.routing import Capacity
from rljob_runtime.overlap.samples import Sample
from rljob_runtime.overlap.scheduler import ScoreResponses
from rljob_runtime.overlap.validation import ValidationConfig, Validator
from rljob_runtime.packed import RewardBatch
from rljob_runtime.records import Completion, GenerationRequest, Prompt, RewardResult, Sampling
from tests.support.records import make_prompt
from tests.support.timed_engine import TimedEngine
from tests.support.virtual_time import run_virtual

CONFIG = ValidationConfig(
    every_steps=2,
    at_start=True,
    pauses=False,
    samples_per_prompt=2,
    sampling=Sampling(max_tokens=4, temperature=0.0),
    seed=5,
    timeout_s=50.0,
)
PROMPTS = [make_prompt(0, source="sums"), make_prompt(1, source="sums"), make_prompt(2, source="words")]


def length_of(key: str) -> int:
    """Of a response: 1 to 4 tokens of validation, at most as many as it may have, 12 of training."""
    if not key.startswith("v"):
        return 12
    _, group, index = key.split("/")
    return min(1 + int(group) + 2 * int(index), CONFIG.sampling.max_tokens)


class CuttingEngine(TimedEngine):
    """Says that responses were cut where they have as many tokens as they may."""

    def _give(self, request_id: str, finish: str) -> None:
        request, versions = self.running[request_id]
        super()._give(request_id, "length" if finish == "stop" and len(versions) == request.sampling.max_tokens else finish)


@dataclass(eq=False)
class Training:
    """Has responses sampled beside the validation."""

    priority: int = 1
    got: dict[str, Completion] = field(default_factory=dict)
    at_s: dict[str, float] = field(default_factory=dict)

    def request_of(self, sample: Sample) -> GenerationRequest:
        return sample.request(Sampling(max_tokens=100), 5)

    def on_finished(self, finished: list[tuple[Sample, Completion]]) -> None:
        self.got |= {sample.key: completion for sample, completion in finished}
        self.at_s |= {sample.key: asyncio.get_running_loop().time() for sample, _ in finished}

    def samples(self, count: int) -> list[Sample]:
        return [Sample(owner=self, group_id=i, index=0, prompt=make_prompt(i)) for i in range(count)]


def score_of(sample_id: str, tokens: int) -> RewardResult:
    """Each response scores its length; the second one of prompt 1 cannot be scored."""
    if sample_id.endswith("1/1"):
        return RewardResult(sample_id=sample_id, score=None, error="reward task: ran past its time limit of 1 s")
    score = float(tokens)
    return RewardResult(sample_id=sample_id, score=score, parts={"task": score, "brevity": -score}, passed=score >= 3)


async def score_all(batch: RewardBatch) -> list[RewardResult]:
    return [score_of(name, tokens) for name, tokens in zip(batch.sample_ids, batch.lengths.tolist(), strict=True)]


def within(
    body: Callable[[EngineFleet, Validator], Coroutine[Any, Any, None]],
    *,
    engines: Sequence[TimedEngine] | None = None,
    slots: int = 4,
    score: ScoreResponses | None = None,
    prompts: Sequence[Prompt] = PROMPTS,
    **config: Any,
) -> None:
    """Run ``body`` beside a fleet; ``score_of`` scores if ``score`` does not."""

    async def main() -> None:
        made: list[Any] = list(engines) if engines is not None else [CuttingEngine("e0", slots=slots, length_of=length_of)]
        fleet = EngineFleet(made, config=FleetConfig(capacities=(Capacity(slots=slots),) * len(made), stall_timeout_s=1000.0))
        validator = Validator(fleet=fleet, prompts=prompts, score=score or score_all, config=replace(CONFIG, **config))
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(fleet.run())
            await asyncio.sleep(0)
            await body(fleet, validator)
            running.cancel()

    run_virtual(main())


def test_metrics_are_over_scored_responses_and_lengths_over_all() -> None:
    reported: dict[str, float] = {}

    async def body(fleet: EngineFleet, validator: Validator) -> None:
        reported.update((await validator.run(7)).metrics)
        assert fleet.num_running == fleet.num_waiting == 0

    within(body)
    lengths = {(0, 0): 1, (0, 1): 3, (1, 0): 2, (1, 1): 4, (2, 0): 3, (2, 1): 4}  # those of 4 are cut
    scored = [1, 3, 2, 3, 4]
    seconds = reported.pop("time/validate_s")
    assert 4.0 <= seconds < CONFIG.timeout_s
    assert reported == pytest.approx(
        {
            "validation/version": 7,
            "validation/prompts": 3,
            "validation/errors": 1,
            "validation/tokens": sum(lengths.values()),
            "validation/mean_tokens": sum(lengths.values()) / 6,
            "validation/truncated_fraction": 2 / 6,
            "validation/mean": sum(scored) / 5,
            "validation/pass_rate": 3 / 5,
            "validation/source/sums": (1 + 3 + 2) / 3,
            "validation/source/words": (3 + 4) / 2,
            "validation/tag/sums": (1 + 3 + 2) / 3,
            "validation/tag/words": (3 + 4) / 2,
            "validation/part/task": sum(scored) / 5,
            "validation/part/brevity": -sum(scored) / 5,
        }
    )


def test_where_no_response_can_be_scored_there_is_no_mean() -> None:
    reported: dict[str, float] = {}

    async def failing(batch: RewardBatch) -> list[RewardResult]:
        return [RewardResult(sample_id=name, score=None, error="reward task: no such module") for name in batch.sample_ids]

    async def body(fleet: EngineFleet, validator: Validator) -> None:
        reported.update((await validator.run(0)).metrics)

    within(body, score=failing)
    assert reported["validation/errors"] == 6
    assert not {
        name for name in reported if name.startswith(("validation/mean", "validation/pass", "validation/source", "validation/part"))
    } - {"validation/mean_tokens"}


def test_each_version_asks_the_same_questions_in_the_same_way() -> None:
    engine = CuttingEngine("e0", slots=4, length_of=length_of)

    async def body(fleet: EngineFleet, validator: Validator) -> None:
        await validator.run(0)
        await validator.run(2)

    within(body, engines=[engine])
    assert len(engine.seen) == 12
    first, second = engine.seen[:6], engine.seen[6:]
    assert [r.request_id.removeprefix("v0/") for r in first] == [r.request_id.removeprefix("v2/") for r in second]
    assert [(r.seed, r.prompt_token_ids.tolist(), r.sampling) for r in first] == [
        (r.seed, r.prompt_token_ids.tolist(), r.sampling) for r in second
    ]
    assert len({r.seed for r in first}) == 6
    training = [sample.request(CONFIG.sampling, CONFIG.seed).seed for sample in Training().samples(3)]
    assert not {r.seed for r in first} & set(training)


def test_beside_the_validation_training_goes_on() -> None:
    engine, training = CuttingEngine("e0", slots=8, length_of=length_of), Training()

    async def body(fleet: EngineFleet, validator: Validator) -> None:
        fleet.add(training.samples(2))
        await asyncio.sleep(3.5)
        await validator.run(1)
        await asyncio.sleep(60.0)

    within(body, engines=[engine], slots=8)
    assert engine.aborted == []
    assert training.at_s == {"0/0": 12.0, "1/0": 12.0}


def test_pausing_calls_training_back_with_its_tokens_and_goes_on_afterwards() -> None:
    engine, training = CuttingEngine("e0", slots=8, length_of=length_of), Training()
    at_s: list[float] = []

    async def body(fleet: EngineFleet, validator: Validator) -> None:
        fleet.add(training.samples(2))
        await asyncio.sleep(3.5)
        reported = (await validator.run(1)).metrics
        at_s.append(asyncio.get_running_loop().time())
        assert reported["validation/prompts"] == 3
        await asyncio.sleep(60.0)

    within(body, engines=[engine], slots=8, pauses=True)
    assert sorted(engine.aborted) == ["0/0", "1/0"]
    order = [r.request_id for r in engine.seen]
    assert order[:2] == ["0/0", "1/0"]
    assert {i.split("/")[0] for i in order[2:8]} == {"v1"}
    assert order[8:] == ["0/0+1", "1/0+1"]
    assert [len(r.prompt_token_ids) for r in engine.seen[8:]] == [3 + 3, 3 + 3]  # the prompt and what was sampled in 3.5 s
    assert [c.segment.token_ids.tolist() for c in training.got.values()] == [list(range(12))] * 2  # nothing twice, nothing lost
    assert all(ended_s == pytest.approx(at_s[0] + 9.0, abs=1.0) for ended_s in training.at_s.values())


def test_validation_is_handed_out_before_what_training_has_waiting() -> None:
    engine, training = CuttingEngine("e0", slots=2, length_of=length_of), Training()

    async def body(fleet: EngineFleet, validator: Validator) -> None:
        fleet.add(training.samples(6))
        await validator.run(1)
        await asyncio.sleep(200.0)

    within(body, engines=[engine], slots=2)
    order = [r.request_id for r in engine.seen]
    assert order[:2] == ["0/0", "1/0"]
    assert {i.split("/")[0] for i in order[2:8]} == {"v1"}
    assert order[8:] == [f"{i}/0" for i in range(2, 6)]


@pytest.mark.parametrize("pauses", [False, True])
def test_a_validation_that_takes_too_long_names_its_version_and_counts_and_leaves_nothing_behind(pauses: bool) -> None:
    engine, training = CuttingEngine("e0", slots=8, length_of=lambda key: 40 if key.endswith("2/1") else length_of(key)), Training()

    async def body(fleet: EngineFleet, validator: Validator) -> None:
        fleet.add(training.samples(1))
        with pytest.raises(
            DeadlineError,
            match=r"^validation of weights v3: 5 of 6 responses within 20 s \(spec\.training\.stepTimeoutSeconds\)$",
        ):
            await validator.run(3)
        await asyncio.sleep(60.0)
        assert fleet.num_running == fleet.num_waiting == 0
        assert fleet.take_counts().requests_cancelled == 1

    within(body, engines=[engine], slots=8, pauses=pauses, sampling=Sampling(max_tokens=100), timeout_s=20.0)
    assert "v3/2/1" in engine.aborted
    assert list(training.got) == ["0/0"]


def test_a_reward_that_takes_too_long_is_bounded_too() -> None:
    async def never(batch: RewardBatch) -> list[RewardResult]:
        await asyncio.sleep(1000.0)
        return []

    async def body(fleet: EngineFleet, validator: Validator) -> None:
        with pytest.raises(DeadlineError, match="validation of weights v3: 6 of 6 responses within 50 s"):
            await validator.run(3)

    within(body, score=never)


def test_a_validation_that_is_given_up_withdraws_its_requests() -> None:
    engine = CuttingEngine("e0", slots=8, length_of=length_of)

    async def body(fleet: EngineFleet, validator: Validator) -> None:
        running = asyncio.ensure_future(validator.run(1))
        await asyncio.sleep(1.5)
        running.cancel()
        await asyncio.wait([running])
        await asyncio.sleep(60.0)
        assert fleet.num_running == fleet.num_waiting == 0
        assert (await validator.run(2)).metrics["validation/version"] == 2  # nothing of the last one is counted in the next

    within(body, engines=[engine], slots=8)
    assert len(engine.aborted) == 5  # one had ended


@pytest.mark.parametrize(
    ("every", "at_start", "first", "last", "due"),
    [
        (2, True, 0, 6, [0, 2, 4, 6]),
        (2, False, 0, 6, [2, 4, 6]),
        (2, True, 0, 5, [0, 2, 4, 5]),
        (4, True, 3, 6, [4, 6]),
        (2, True, 4, 6, [4, 6]),  # a resumed run repeats what came after its checkpoint
        (2, False, 4, 7, [4, 6, 7]),
        (1, False, 0, 3, [1, 2, 3]),
        (100, True, 0, 3, [0, 3]),
        (0, True, 0, 3, []),
        (0, False, 0, 3, []),
    ],
)
def test_when_a_version_is_due(every: int, at_start: bool, first: int, last: int, due: list[int]) -> None:
    config = replace(CONFIG, every_steps=every, at_start=at_start)
    assert [version for version in range(first, last + 1) if config.due(version, last=last)] == due
