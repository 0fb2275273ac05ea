"""Every field of the learning rule, of overlap and of validation reaches the code that acts on it.

Fields come from the spec's models, so that a new one without a case fails. Each case compares a valid manifest with the same one without
the field: fields of ``algorithm`` by the gradient of two steps through the real rule, batches and loss; others by what the loop is wired
with.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pydantic import BaseModel

from rljob_api.v1alpha1 import RLJobSpec
from rljob_api.v1alpha1.components import Role
from rljob_api.v1alpha1.rljob import Pipeline
from rljob_api.validation import check
from rljob_api.vocabulary import AdvantageEstimator
from rljob_runtime.job import assemble, learning_settings, worker_settings
from rljob_runtime.job.roles import ROLES
from rljob_runtime.loop.driver import LoopConfig, Parts
from rljob_runtime.losses.custom import StepRewards
from rljob_runtime.losses.objective import objective
from rljob_runtime.losses.tokens import LossTokens
from rljob_runtime.overlap.arrange import StepSamples, arrange
from rljob_runtime.overlap.batching import split, train_batches
from rljob_runtime.overlap.buffer import Group
from rljob_runtime.overlap.rule import Rule
from rljob_runtime.records import EpisodeRecord, RewardResult, Segment, TrainBatch, Trajectory, Turn, VersionSpan
from rljob_runtime.training.step import prepare_batches
from tests.support.data_builders import make_tokenizer, numbers_file
from tests.support.fake_workers import CountingTrainer, ScriptedEngine
from tests.support.job_workers import make_job_workers
from tests.support.records import ids, make_prompt, make_segment, make_trajectory
from tests.unit.api.manifests import manifest

PROMPTS, SAMPLES, MAX_TOKENS, VERSION = 4, 4, 8, 5
NOT_SET: Any = object()


@dataclass(frozen=True, kw_only=True)
class Case:
    """A field with another value than its default."""

    value: Any = NOT_SET
    """Members of enums are tried all, by themselves."""
    needs: Mapping[str, Any] = field(default_factory=dict)
    """What the field has no effect without, in both manifests."""
    default: Any = NOT_SET
    """To compare with, where leaving the field out is not possible or changes more than it."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """What the loop is wired with instead; exactly this. Empty for fields that the gradient shows."""


REINFORCE = {"algorithm.advantage.estimator": "Reinforce"}
CUSTOM_ADVANTAGE = {"algorithm.advantage.estimator": "Custom"}
GAE = {"algorithm.advantage.estimator": "GAE", "components[critic]": "Critic"}
AGENTIC = {"pipeline": "Agentic"}
GIGPO = AGENTIC | {"algorithm.advantage.estimator": "GiGPO"}
KL = {"algorithm.kl.coefficient": 0.5, "components[reference]": "Reference"}
TEACHER = {"components[teacher]": "Teacher"}
RECOMPUTE = {"algorithm.offPolicy.proximal": "Recompute"}
AHEAD = {"overlap.asyncGenerationRatio": 1.0}
VALIDATES = {"validation.everySteps": 2, "data.validation": True}
SAMPLED = VALIDATES | {"validation.temperature": 0.7}


def steep(tokens: LossTokens, *, slope: float = 2.0) -> torch.Tensor:
    return -slope * tokens.advantages * tokens.logprobs


def flat(tokens: LossTokens) -> torch.Tensor:
    return -0.5 * tokens.advantages * tokens.logprobs


def by_rank(step: StepRewards, *, scale: float = 1.0) -> np.ndarray:
    return scale * np.argsort(np.argsort(step.rewards))


def by_sign(step: StepRewards) -> np.ndarray:
    return np.sign(step.token_rewards)


def loss(variant: str) -> dict[str, Any]:
    return {"algorithm.policyLoss.variant": variant}


ALGORITHM: Mapping[str, Case] = {
    "advantage.estimator": Case(),
    "advantage.normalizeStd": Case(value=False),
    "advantage.gamma": Case(value=0.9, needs=REINFORCE),
    "advantage.episodeWeight": Case(value=0.5, needs=GIGPO),
    "advantage.turnWeight": Case(value=2.0, needs=GIGPO),
    "advantage.episodeCount": Case(needs=GIGPO),
    "advantage.lambda": Case(value=0.5, needs=GAE),
    "advantage.whiten": Case(value=True, needs=REINFORCE),
    "advantage.clip": Case(value=0.5),
    "advantage.function": Case(value=f"{__name__}:by_rank", default=f"{__name__}:by_sign", needs=CUSTOM_ADVANTAGE),
    "advantage.parameters": Case(value={"scale": 2.0}, needs=CUSTOM_ADVANTAGE | {"algorithm.advantage.function": f"{__name__}:by_rank"}),
    "reward.center": Case(needs=REINFORCE),
    "reward.scale": Case(needs=REINFORCE),
    "reward.clip": Case(value=0.5, needs=REINFORCE),
    "reward.overlong": Case(value={"bufferTokens": 4}),
    "reward.overlong.bufferTokens": Case(value=4, default=2),
    "reward.overlong.penalty": Case(value=3.0, needs={"algorithm.reward.overlong.bufferTokens": 4}),
    "policyLoss.variant": Case(),
    "policyLoss.clipLow": Case(value=0.05),
    "policyLoss.clipHigh": Case(value=0.4),
    "policyLoss.dualClip": Case(value=1.1),
    "policyLoss.maskClipped": Case(
        value=True, needs=loss("CISPO") | {"algorithm.policyLoss.clipLow": 0.2, "algorithm.policyLoss.clipHigh": 0.2}
    ),
    "policyLoss.positiveWeight": Case(value=2.0, needs=loss("TOPR")),
    "policyLoss.negativeWeight": Case(value=0.5, needs=loss("TOPR")),
    "policyLoss.tau": Case(value=0.3, needs=loss("Kimi15")),
    "policyLoss.function": Case(value=f"{__name__}:steep", default=f"{__name__}:flat", needs=loss("Custom")),
    "policyLoss.parameters": Case(value={"slope": 3.0}, needs=loss("Custom") | {"algorithm.policyLoss.function": f"{__name__}:steep"}),
    "policyLoss.aggregation": Case(),
    "offPolicy.proximal": Case(needs={"overlap.asyncGenerationRatio": 2.0, "training.miniBatches": 2}),
    "offPolicy.weight": Case(value={}, needs=RECOMPUTE | {"training.miniBatches": 2}),
    "offPolicy.weight.level": Case(needs=RECOMPUTE),
    "offPolicy.weight.low": Case(value=0.9, needs=RECOMPUTE | {"algorithm.offPolicy.weight.high": 1.5}),
    "offPolicy.weight.high": Case(value=1.1, needs=RECOMPUTE | {"algorithm.offPolicy.weight.low": 0.0}),
    "offPolicy.masks": Case(value=[{"low": 0.9, "high": 1.1}]),
    "offPolicy.masks[].level": Case(needs={"algorithm.offPolicy.masks[].low": 0.9, "algorithm.offPolicy.masks[].high": 1.2}),
    "offPolicy.masks[].low": Case(value=0.95, needs={"algorithm.offPolicy.masks[].high": 5.0}),
    "offPolicy.masks[].high": Case(value=1.05, needs={"algorithm.offPolicy.masks[].low": 0.5}),
    "kl.coefficient": Case(value=1.5, needs=KL, default=0.5),
    "kl.estimator": Case(needs=KL),
    "kl.placement": Case(needs=KL),
    "kl.target": Case(value=0.01, needs=KL),
    "kl.horizon": Case(value=100, needs=KL | {"algorithm.kl.target": 0.01}),
    "distillation.coefficient": Case(value=0.5, needs=TEACHER),
    "distillation.placement": Case(needs=TEACHER),
    "filters.truncated": Case(value=True),
    "filters.minGroupMean": Case(value=0.4),
    "filters.maxGroupMean": Case(value=0.6),
    "filters.maxFailedTokens": Case(value=4),
    "sampleWeights.difficulty": Case(value=True),
    "sampleWeights.length": Case(value=True),
    "entropyCoefficient": Case(value=0.1),
}

MASKED = {"rollout.sampling.top_k": 1024, "rollout.sampling.returns_mask": True}

LOOP: Mapping[str, Case] = {
    "algorithm.critic.learningRate": Case(value=0.5, needs=GAE, changes={"critic.learning_rate": 0.5}),
    "algorithm.critic.minLearningRate": Case(
        value=1e-6, needs=GAE | {"algorithm.critic.schedule": "Cosine"}, changes={"critic.min_learning_rate": 1e-6}
    ),
    "algorithm.critic.schedule": Case(needs=GAE | {"training.schedule": "Linear"}),
    "algorithm.critic.learningRateWarmupSteps": Case(value=7, needs=GAE, changes={"critic.warmup_steps": 7}),
    "algorithm.critic.beta1": Case(value=0.8, needs=GAE, changes={"critic.betas": (0.8, 0.999)}),
    "algorithm.critic.beta2": Case(value=0.95, needs=GAE, changes={"critic.betas": (0.9, 0.95)}),
    "algorithm.critic.epsilon": Case(value=1e-5, needs=GAE, changes={"critic.eps": 1e-5}),
    "algorithm.critic.weightDecay": Case(value=0.1, needs=GAE, changes={"critic.weight_decay": 0.1}),
    "algorithm.critic.maxGradNorm": Case(value=0.5, needs=GAE, changes={"critic.max_grad_norm": 0.5}),
    "algorithm.critic.microBatchTokens": Case(value=4096, needs=GAE, changes={"critic.token_budget": 4096}),
    "algorithm.critic.valueClip": Case(value=0.5, needs=GAE | {"training.miniBatches": 2}, changes={"critic.value.value_clip": 0.5}),
    "algorithm.critic.warmupSteps": Case(value=3, needs=GAE, changes={"loop.critic_warmup_steps": 3, "policy.total_steps": 97}),
    "overlap.asyncGenerationRatio": Case(value=1.25, changes={"gate.capacity": 9, "gate.max_staleness": 2, "rollout.drains": False}),
    "overlap.maxStaleness": Case(value=3, needs=AHEAD, changes={"gate.max_staleness": 3}),
    "overlap.updateMode": Case(needs=AHEAD),
    "validation.everySteps": Case(value=5, default=2, needs={"data.validation": True}, changes={"validation.every_steps": 5}),
    "validation.atStart": Case(value=False, needs=VALIDATES, changes={"validation.at_start": False}),
    "validation.pauseGeneration": Case(value=True, needs=VALIDATES, changes={"validation.pauses": True}),
    "validation.maxPrompts": Case(value=3, needs=VALIDATES, changes={"validation.prompts": 3}),
    "validation.samplesPerPrompt": Case(value=4, needs=SAMPLED, changes={"validation.samples_per_prompt": 4}),
    "validation.maxResponseTokens": Case(value=6, needs=VALIDATES, changes={"validation.sampling.max_tokens": 6}),
    "validation.temperature": Case(value=0.5, needs=VALIDATES, changes={"validation.sampling.temperature": 0.5}),
    "validation.topP": Case(value=0.5, needs=SAMPLED, changes={"validation.sampling.top_p": 0.5}),
    "validation.topK": Case(value=20, needs=SAMPLED, changes={"validation.sampling.top_k": 20}),
    "rollout.topP": Case(value=0.5, changes={"rollout.sampling.top_p": 0.5, **MASKED}),
    "rollout.topK": Case(value=7, changes=MASKED | {"rollout.sampling.top_k": 7}),
    "rollout.minP": Case(value=0.5, changes={"rollout.sampling.min_p": 0.5, **MASKED}),
    "rollout.stopStrings": Case(
        value=["</a>"],
        needs=VALIDATES,
        changes={f"{who}.sampling.stop_strings": ("</a>",) for who in ("rollout", "validation")},
    ),
    "rollout.redundantSamples": Case(value=3, changes={"rollout.redundant_samples": 3}),
    "rollout.extraPrompts": Case(value=3, changes={"gate.spare": 3, "gate.capacity": 7}),
    "rollout.groupFilter": Case(
        value={"minStd": 0.0},
        changes={"rollout.group_filter": NOT_SET, **{f"rollout.group_filter.{name}": None for name in ("min_mean", "max_mean")}}
        | {"rollout.group_filter.min_std": 0.0},
    ),
    "rollout.groupFilter.minMean": Case(
        value=0.1, needs={"rollout.groupFilter.minStd": 0.0}, changes={"rollout.group_filter.min_mean": 0.1}
    ),
    "rollout.groupFilter.maxMean": Case(
        value=0.9, needs={"rollout.groupFilter.minStd": 0.0}, changes={"rollout.group_filter.max_mean": 0.9}
    ),
    "rollout.groupFilter.minStd": Case(
        value=0.3, needs={"rollout.groupFilter.minMean": 0.1}, changes={"rollout.group_filter.min_std": 0.3}
    ),
    "rollout.groupFilter.maxInRow": Case(value=7, needs={"rollout.groupFilter.minStd": 0.0}, changes={"rollout.max_filtered_in_row": 7}),
    "rollout.groupRouting": Case(),
    "training.learningRate": Case(value=0.5, changes={"policy.learning_rate": 0.5}),
    "training.minLearningRate": Case(value=1e-7, needs={"training.schedule": "Linear"}, changes={"policy.min_learning_rate": 1e-7}),
    "training.tensorParallelSize": Case(value=2, changes={"policy.tensor_parallel_size": 2, "ranks_per_share": 2, "batching.num_ranks": 1}),
    "training.sequenceParallel": Case(value=True, needs={"training.tensorParallelSize": 2}, changes={"policy.sequence_parallel": True}),
    "training.contextParallelSize": Case(
        value=2, changes={"policy.context_parallel_size": 2, "ranks_per_share": 2, "batching.num_ranks": 1}
    ),
    "training.expertParallelSize": Case(value=2, changes={"policy.expert_parallel_size": 2}),
    "training.optimizerStateDtype": Case(needs=GAE),
    "training.layerCompilation": Case(needs=GAE),
    "training.routerReplay": Case(),
    "training.routerBiasUpdateRate": Case(value=0.5, changes={"policy.router_bias_update_rate": 0.5}),
    "training.loadBalancing": Case(value={}, changes={"policy.load_balancing": NOT_SET, "policy.load_balancing.coefficient": None}),
    "training.loadBalancing.coefficient": Case(value=0.5, default=0.1, changes={"policy.load_balancing.coefficient": 0.5}),
    "model.lora": Case(
        value={},
        changes={"policy.lora": NOT_SET, "policy.lora.rank": 16, "policy.lora.alpha": 32.0, "policy.lora.target_modules": ()},
    ),
    "model.lora.rank": Case(value=4, needs={"model.lora.alpha": 32.0}, changes={"policy.lora.rank": 4}),
    "model.lora.alpha": Case(value=8.0, needs={"model.lora.rank": 16}, changes={"policy.lora.alpha": 8.0}),
    "model.lora.targetModules": Case(value=["q_proj"], needs={"model.lora.rank": 16}, changes={"policy.lora.target_modules": ("q_proj",)}),
}

CASES = {**{f"algorithm.{path}": case for path, case in ALGORITHM.items()}, **LOOP}
SECTIONS = ("algorithm", "overlap", "validation", "model.lora", "rollout.groupFilter", "training.loadBalancing")
FIELDS = (
    *(
        "rollout.stopStrings",
        "rollout.topP",
        "rollout.topK",
        "rollout.minP",
        "rollout.redundantSamples",
        "rollout.extraPrompts",
        "rollout.groupRouting",
    ),
    *("training.learningRate", "training.minLearningRate", "training.routerReplay", "training.routerBiasUpdateRate"),
    *("training.tensorParallelSize", "training.sequenceParallel", "training.contextParallelSize", "training.expertParallelSize"),
    *("training.optimizerStateDtype", "training.layerCompilation"),
)

NEEDS_OF_MEMBER: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("algorithm.advantage.estimator", "GAE"): {"components[critic]": "Critic"},
    ("algorithm.advantage.estimator", "GiGPO"): AGENTIC,
    ("algorithm.advantage.estimator", "StepReinforce"): AGENTIC,
    ("algorithm.advantage.estimator", "Custom"): {"algorithm.advantage.function": f"{__name__}:by_rank"},
    ("algorithm.policyLoss.variant", "Custom"): {"algorithm.policyLoss.function": f"{__name__}:steep"},
}
EQUAL = [
    {"Geometric", "Segment"},  # a single response is one segment
]


def models_in(annotation: Any) -> tuple[type[BaseModel] | None, str]:
    """A field's model, if it has one, and how the section is written: ``[]`` in a list, ``?`` where it may be missing."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple and isinstance(arguments[0], type) and issubclass(arguments[0], BaseModel):
        return arguments[0], "[]"
    if origin in (typing.Union, types.UnionType):
        found = [a for a in arguments if isinstance(a, type) and issubclass(a, BaseModel)]
        return (found[0], "?") if found else (None, "")
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, ""
    return None, ""


def enum_in(annotation: Any) -> type[StrEnum] | None:
    options = (annotation, *typing.get_args(annotation))
    return next((a for a in options if isinstance(a, type) and issubclass(a, StrEnum)), None)


def walk(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, Any]]:
    """Path and annotation of every leaf, and of every section that may be missing."""
    for name, info in model.model_fields.items():
        path = f"{prefix}.{info.alias or name}" if prefix else str(info.alias or name)
        inner, written = models_in(info.annotation)
        if inner is None or written:
            yield path, info.annotation
        if inner is not None:
            yield from walk(inner, path + ("[]" if written == "[]" else ""))


ANNOTATIONS = {
    path: annotation
    for path, annotation in walk(RLJobSpec, "")
    if (path in FIELDS or any(path == section or path.startswith(section + ".") for section in SECTIONS))
}
ENUMS = {path: members for path, annotation in ANNOTATIONS.items() if (members := enum_in(annotation)) is not None}


def put(document: dict[str, Any], path: str, value: Any) -> None:
    """Set a field of the spec; ``[]`` stands for the first entry of a list."""
    if path.startswith("components["):
        own = {"model": {"path": "models/teacher"}} if value == "Teacher" else {}
        document["components"].append({"name": value.lower(), "role": value, "placement": {"ranks": "0-1"}, **own})
        return
    if path == "pipeline":
        document |= {"pipeline": value, "environments": [{"name": "lake", "type": "FrozenLake"}]}
        del document["data"], document["rewards"]
        others = [component for component in document["components"] if component["role"] != "Reward"]
        document["components"] = [*others, {"name": "lake", "role": "Environment", "placement": {"workers": 1}}]
        return
    if path == "data.validation":
        document["data"]["validation"] = [{"name": "held-out", "type": "JSONL", "jsonl": document["data"]["train"][0]["jsonl"]}]
        return
    *keys, last = path.split(".")
    for key in keys:
        document = document.setdefault(key.removesuffix("[]"), [{}] if key.endswith("[]") else {})
        document = document[0] if isinstance(document, list) else document
    document[last] = value


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return numbers_file(tmp_path_factory.mktemp("rows") / "sums.jsonl", 20)


@pytest.fixture(scope="module", autouse=True)
def _alone() -> Iterator[None]:
    """A process group of one, for batches are cut together."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def spec_with(rows: Path, *settings: Mapping[str, Any]) -> RLJobSpec:
    """Two trainer ranks, two engines, and these settings.

    Raises:
        SpecInvalidError: they do not go together.
    """
    document = manifest()
    spec = document["spec"]
    spec["nodeGroups"][0]["devicesPerNode"] = 4
    for component, ranks in zip(spec["components"], ("0-1", "2-3"), strict=False):
        component["placement"]["ranks"] = ranks
    spec["data"]["train"] = [{"name": "sums", "type": "JSONL", "jsonl": {"path": str(rows)}}]
    spec["rewards"] = [{"name": "answer", "type": "ExactMatch"}]
    spec["rollout"] = {"promptsPerStep": PROMPTS, "samplesPerPrompt": SAMPLES, "maxResponseTokens": MAX_TOKENS}
    for setting in settings:
        for path, value in setting.items():
            put(spec, path, value)
    return check(document).job.spec


def pair(rows: Path, path: str) -> tuple[RLJobSpec, RLJobSpec]:
    """The manifest without and with a field."""
    case = CASES[path]
    left = {} if case.default is NOT_SET else {path: case.default}
    return spec_with(rows, case.needs, left), spec_with(rows, case.needs, {path: case.value})


def by_member(rows: Path, path: str) -> dict[str, RLJobSpec]:
    """The manifest for every member of an enum that can be chosen, and without it where it may be missing."""
    needs, made = CASES[path].needs, {}
    for member in ENUMS[path]:
        made[str(member)] = spec_with(rows, needs, NEEDS_OF_MEMBER.get((path, str(member)), {}), {path: str(member)})
    if type(None) in typing.get_args(ANNOTATIONS[path]):
        made["not set"] = spec_with(rows, needs)
    return made


SCORES = ((0.0, 0.0, -0.5, 0.0), (1.0, 1.0, 1.5, 1.0), (0.0, 1.0, 0.25, 2.0), (1.0, 0.0, 0.0, 0.0))
"""Of the samples of each prompt; 1 and more is solved."""


def groups_of(number: int) -> list[Group]:
    """Of a step: all lengths, scores of both signs, two sources, tokens of three versions."""
    random = np.random.default_rng(number)
    groups = []
    for group, scores in enumerate(SCORES):
        made = []
        for index, score in enumerate(scores):
            length = 1 + (3 * group + 5 * index + number) % MAX_TOKENS
            cut = length // 2
            spans = [(0, cut, VERSION - 1 - group % 2), (cut, length, VERSION)]
            segment = replace(
                make_segment(range(length), logprobs=random.uniform(-2.0, -0.1, length).tolist()),
                version_spans=tuple(VersionSpan(start=a, end=b, version=v) for a, b, v in spans if a < b),
            )
            reward = RewardResult(sample_id=f"{group}/{index}", score=score + 0.1 * number, passed=score >= 1)
            trajectory = make_trajectory(group, index)
            prompt = make_prompt(group, source=("sums", "words")[group % 2])
            finish = "length" if length == MAX_TOKENS else "stop"
            made.append(replace(trajectory, prompt=prompt, segments=(segment,), finish_reason=finish, reward=reward))
        groups.append(Group(group_id=group, trajectories=tuple(made), failed_samples=0))
    return groups


def episodes_of(groups: list[Group]) -> list[Group]:
    """The same tokens as actions of episodes, two where there are two versions; all first ones of a group are of the same state."""
    return [replace(group, trajectories=tuple(episode_of(t) for t in group.trajectories)) for group in groups]


def episode_of(trajectory: Trajectory) -> Trajectory:
    (whole,) = trajectory.segments
    segments, turns = [], []
    for number, span in enumerate(whole.version_spans):
        tokens = slice(span.start, span.end)
        action = make_segment(whole.token_ids[tokens].tolist(), span.version, whole.logprobs[tokens].tolist())
        reward = (trajectory.reward.score or 0.0) * (0.25 if number else 1.0)
        segments += [replace(action, reward=reward), Segment(token_ids=ids(3), sampled=False)]
        turns.append(Turn(observation="", action="", reward=reward, action_valid=True, state_key=str(number)))
    record = EpisodeRecord(turns=tuple(turns), stop="done", summary={}, environment_s=0.0)
    return replace(trajectory, segments=tuple(segments[:-1]), episode=record)


def scored(number: int, rule: Any, proximal: bool, agentic: bool) -> StepSamples:
    """A step with all forward passes that a rule and a loss ask for."""
    groups = episodes_of(groups_of(number)) if agentic else groups_of(number)
    step, random = arrange(groups, VERSION), np.random.default_rng(100 + number)

    def near(deviation: float) -> np.ndarray:
        return (step.behavior_logprobs + random.normal(0.0, deviation, step.token_ids.size)).astype(np.float32)

    reference, old, values, teacher = near(0.6), near(0.3), near(1.0), near(0.9)
    return replace(
        step,
        reference_logprobs=reference if rule.kl_coefficient > 0 else None,
        teacher_logprobs=teacher if rule.distillation_coefficient > 0 else None,
        proximal_logprobs=old if proximal else None,
        values=values if rule.estimator is AdvantageEstimator.GAE else None,
    )


def gradient_of(batch: TrainBatch, policy: Any, number: int) -> np.ndarray:
    """Gradient of an update's loss by the log-prob of each token, shape (T,)."""
    prepared = prepare_batches([batch], policy, torch.device("cpu"))[0]
    noise = np.random.default_rng(200 + number).normal(0.0, 0.4, batch.token_ids.size)
    logprobs = torch.tensor(batch.behavior_logprobs + noise.astype(np.float32), requires_grad=True)
    for micro in prepared.micro_batches:
        chosen = logprobs[torch.from_numpy(micro.sources)]
        entropy = -chosen * chosen.exp() if policy.loss.entropy_coefficient > 0 else None
        inputs = prepared.inputs(micro, torch.device("cpu"))
        objective(chosen, inputs, policy.loss, kl_coefficient=prepared.kl_coefficient, entropy=entropy).loss.backward()
    assert logprobs.grad is not None
    return logprobs.grad.numpy()


def learned(spec: RLJobSpec) -> np.ndarray:
    """Gradients of two steps, one after another: what the learning rule does with two fixed sets of responses."""
    config = learning_settings.rule_config(spec)
    rule, batching = Rule(config), learning_settings.batching_config(spec, 1)
    policy = worker_settings.policy_config(spec, role=Role.TRAINER, num_threads=1)
    gradients = []
    for number in range(2):
        step = scored(number, config, policy.loss.needs_proximal, spec.pipeline is Pipeline.AGENTIC)
        batches = train_batches(step, split(step, batching), rule.apply(step), batching)
        gradients += [gradient_of(batch, policy, number) for batch in batches.by_rank[0]]
    return np.concatenate(gradients)


class SpecifiedTrainer(CountingTrainer):
    """Has one tensor."""

    def weight_specs(self) -> list[tuple[str, str, tuple[int, ...]]]:
        return [("model.embed_tokens.weight", "trainer's own", (2, 2))]


class PreparedRewards(CountingTrainer):
    """Takes a tokenizer."""

    def prepare(self, tokenizer_files: Mapping[str, bytes], trust_remote_code: bool, served: Mapping[str, object]) -> None:
        assert not trust_remote_code
        assert not served


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Every leaf of nested settings by its dotted name."""
    value = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    if not isinstance(value, dict):
        yield name, value
        return
    for key, inner in value.items():
        yield from leaves(f"{name}.{key}", inner)


def assembled(spec: RLJobSpec) -> tuple[Parts, LoopConfig]:
    """The loop's parts over scripted workers."""
    trainers: Any = [SpecifiedTrainer(f"trainer-{i}") for i in range(2)]
    critics: Any = [SpecifiedTrainer("critic-0")] if learning_settings.has_critic(spec) else []
    workers = make_job_workers(
        trainer=trainers,
        critic=critics,
        rollout=[ScriptedEngine()],
        reward=[PreparedRewards("reward-0")],
        ranks_per_share={component.role: spec.processes_per_share(component) for component in spec.components},
        trainer_scores=[scoring.result for scoring in ROLES[Role.TRAINER].scorings_in(spec)],
        names={component.role: component.name for component in spec.components},
    )
    nothing, reporter = cast(Any, None), cast(Any, SimpleNamespace(event=lambda text, level: None))
    return asyncio.run(assemble.assemble(spec, workers, nothing, None, reporter))


def wired(spec: RLJobSpec, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the loop's parts are made with, but for settings that the gradient shows."""
    monkeypatch.setattr(assemble, "load_tokenizer", lambda spec: make_tokenizer())
    parts, loop = assembled(spec)
    scheduler, validator = parts.scheduler, parts.validator
    policy = worker_settings.policy_config(
        spec,
        role=Role.TRAINER,
        num_threads=1,
        tensor_parallel_size=spec.training.tensor_parallel_size,
        context_parallel_size=spec.training.context_parallel_size,
        expert_parallel_size=spec.training.expert_parallel_size,
    )
    gate = scheduler.gate
    settings: dict[str, Any] = {
        "rollout": scheduler.config,
        "gate": {"capacity": gate.capacity, "max_staleness": gate.max_staleness, "spare": gate.spare},
        "publisher.on_running": parts.publisher.on_running,
        "batching": parts.batches.batching,
        "ranks_per_share": parts.workers.trainer.ranks_per_share,
        "loop": replace(loop, spec_fingerprint={}),
        "policy": policy,
    }
    if validator is not None:
        settings |= {"validation": validator.config, "validation.prompts": len(validator.prompts)}
    if parts.workers.critic:
        own = worker_settings.policy_config(spec, role=Role.CRITIC, num_threads=1)
        settings["critic"] = learning_settings.critic_config(spec, own)
    return dict(leaf for name, value in settings.items() for leaf in leaves(name, value))


def test_every_field_has_a_case() -> None:
    assert set(CASES) == set(ANNOTATIONS)
    assert all((case.value is NOT_SET) == (path in ENUMS) for path, case in CASES.items())


def test_the_same_manifest_gives_the_same_gradient(rows: Path) -> None:
    first, again = learned(spec_with(rows, KL)), learned(spec_with(rows, KL))
    np.testing.assert_array_equal(first, again)
    assert np.isfinite(first).all()
    assert np.count_nonzero(first) > 50


@pytest.mark.parametrize("path", [f"algorithm.{path}" for path in ALGORITHM if f"algorithm.{path}" not in ENUMS])
def test_a_field_of_the_algorithm_changes_the_gradient(rows: Path, path: str) -> None:
    left, right = (learned(spec) for spec in pair(rows, path))
    assert not np.array_equal(left, right)


@pytest.mark.parametrize("path", [path for path in ENUMS if path.removeprefix("algorithm.") in ALGORITHM])
def test_every_choice_of_the_algorithm_gives_a_gradient_of_its_own(rows: Path, path: str) -> None:
    gradients = {name: learned(spec) for name, spec in by_member(rows, path).items()}
    for one, other in itertools.combinations(gradients, 2):
        assert np.array_equal(gradients[one], gradients[other]) == ({one, other} in EQUAL), (one, other)


@pytest.mark.parametrize("path", [path for path in LOOP if path not in ENUMS])
def test_a_field_of_the_loop_changes_what_it_is_wired_with_and_nothing_else(rows: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = (wired(spec, monkeypatch) for spec in pair(rows, path))
    differ = {name for name in left.keys() | right.keys() if left.get(name, NOT_SET) != right.get(name, NOT_SET)}
    assert {name: right.get(name, NOT_SET) for name in differ} == dict(CASES[path].changes)


def test_what_new_weights_do_to_running_responses(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {name: wired(spec, monkeypatch) for name, spec in by_member(rows, "overlap.updateMode").items()}
    found = {name: (settings["rollout.drains"], settings["publisher.on_running"]) for name, settings in made.items()}
    assert found == {
        "not set": (False, "recompute"),
        "Drain": (True, "recompute"),
        "Interrupt": (False, "recompute"),
        "InFlight": (False, "keep"),
    }


def test_the_critics_schedule_is_its_own_or_the_policys(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {name: wired(spec, monkeypatch) for name, spec in by_member(rows, "algorithm.critic.schedule").items()}
    found = {name: (settings["critic.lr_schedule"], settings["policy.lr_schedule"]) for name, settings in made.items()}
    own = {name: (name, "Linear") for name in ENUMS["algorithm.critic.schedule"]}
    assert found == own | {"not set": ("Linear", "Linear")}


def test_where_the_samples_of_a_prompt_go(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {name: wired(spec, monkeypatch) for name, spec in by_member(rows, "rollout.groupRouting").items()}
    assert {name: settings["rollout.fleet.group_routing"] for name, settings in made.items()} == {name: name for name in made}
    assert set(made) == set(ENUMS["rollout.groupRouting"])


def test_whose_experts_the_trainer_takes(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {name: wired(spec, monkeypatch) for name, spec in by_member(rows, "training.routerReplay").items()}
    asked = {name: (settings["policy.replays_routes"], settings["rollout.sampling.returns_routes"]) for name, settings in made.items()}
    assert asked == {"Disabled": (False, False), "Engine": (True, True)}


def test_whether_layers_are_compiled_is_the_critics_too(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {name: wired(spec, monkeypatch) for name, spec in by_member(rows, "training.layerCompilation").items()}
    found = {name: (settings["policy.layer_compilation"], settings["critic.layer_compilation"]) for name, settings in made.items()}
    assert found == {name: (name, name) for name in ENUMS["training.layerCompilation"]}


def test_what_moments_are_kept_in_is_the_critics_too(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {name: wired(spec, monkeypatch) for name, spec in by_member(rows, "training.optimizerStateDtype").items()}
    found = {name: (settings["policy.optimizer_state_dtype"], settings["critic.optimizer_state_dtype"]) for name, settings in made.items()}
    assert found == {"float32": ("float32", "float32"), "bfloat16": ("bfloat16", "bfloat16")}


@pytest.mark.parametrize(("proximal", "asked"), [("Behaviour", False), ("Recompute", True), ("Interpolate", False)])
def test_the_trainer_scores_only_where_the_loss_asks_for_it(
    rows: Path, proximal: str, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assemble, "load_tokenizer", lambda spec: make_tokenizer())
    spec = spec_with(rows, CASES["algorithm.offPolicy.proximal"].needs, {"algorithm.offPolicy.proximal": proximal})
    parts, _ = assembled(spec)
    assert [component.role for component, _ in parts.workers.scorers] == ([Role.TRAINER] if asked else [])
    assert parts.validator is None


def test_cases_are_written_as_a_manifest_has_them() -> None:
    for case in CASES.values():
        assert case.value is NOT_SET or json.loads(json.dumps(case.value)) == case.value
