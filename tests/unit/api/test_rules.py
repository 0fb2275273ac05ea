"""What the rules between fields let pass: every setting beside the one that gives it an effect. Refusals are under tests/golden/invalid."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rljob_api import memory
from rljob_api.errors import SpecInvalidError
from rljob_api.planning.plan import PlacementMode
from rljob_api.rules import rollout
from rljob_api.v1alpha1 import RLJob
from rljob_api.validation import CheckedJob, check
from tests.unit.api.manifests import manifest

CRITIC = {"name": "critic", "role": "Critic", "placement": {"ranks": "2"}}
REFERENCE = {"name": "reference", "role": "Reference", "placement": {"ranks": "2"}}
QUESTIONS = {"validation": [{"name": "sums", "type": "ReasoningGym", "reasoningGym": {"task": "basic_arithmetic"}}]}


def job(*components: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """A job on four devices: a Trainer, an engine, further components, and sections of the spec."""
    document = manifest()
    spec = document["spec"]
    spec["nodeGroups"][0]["devicesPerNode"] = 4
    names = {component["name"] for component in components}
    spec["components"] = [one for one in spec["components"] if one["name"] not in names] + list(components)
    for key, value in sections.items():
        spec[key] = {**spec.get(key, {}), **value}
    return document


def paths(document: dict[str, Any]) -> list[str]:
    """Of all problems."""
    try:
        check(document)
    except SpecInvalidError as error:
        return [problem.path for problem in error.errors]
    return []


@pytest.mark.parametrize(
    "algorithm",
    [
        {"advantage": {"normalizeStd": False, "whiten": True, "clip": 2.0}},
        {"advantage": {"normalizeStd": False}, "reward": {"scale": "Batch"}},
        {"advantage": {"estimator": "RLOO"}, "reward": {"scale": "Running", "clip": 5.0}},
        {"reward": {"center": "Batch", "scale": "Group", "clip": 5.0, "overlong": {"bufferTokens": 1024}}},
        {"advantage": {"estimator": "Reinforce", "gamma": 0.9}, "reward": {"center": "Group", "scale": "Batch"}},
        {"advantage": {"estimator": "ReinforcePlusPlus", "gamma": 0.9}, "reward": {"center": "Group"}},
        {"advantage": {"estimator": "ReinforcePlusPlus"}, "reward": {"center": "Group", "scale": "Group"}},
        {"advantage": {"estimator": "ReinforcePlusPlus"}, "reward": {"center": "Batch", "clip": 1.0}},
        {"advantage": {"estimator": "ReinforcePlusPlus", "gamma": 0.9}, "reward": {"center": "Batch"}},
        {"policyLoss": {"clipLow": 0.1, "clipHigh": 0.3, "dualClip": 3.0}},
        {"policyLoss": {"variant": "GSPO", "clipLow": 0.0003, "dualClip": 3.0}},
        {"policyLoss": {"variant": "TIS", "clipLow": 1.0, "clipHigh": 1.0}},
        {"policyLoss": {"variant": "TOPR", "positiveWeight": 0.5, "negativeWeight": 0.0}},
        {"policyLoss": {"variant": "CISPO", "clipHigh": 3.0, "maskClipped": True}},
        {"policyLoss": {"variant": "Kimi15", "tau": 0.0}, "offPolicy": {"weight": {"level": "Sequence"}}},
        {"policyLoss": {"variant": "Vanilla"}, "offPolicy": {"weight": {"low": 0.5, "high": 0.5}}},
        {"offPolicy": {"masks": [{"level": "Token"}, {"level": "Sequence"}, {"level": "Geometric"}, {"level": "Segment"}]}},
        {"offPolicy": {"proximal": "Recompute", "weight": {}}},
        {"offPolicy": {"proximal": "Recompute", "masks": [{}]}, "policyLoss": {"variant": "Vanilla"}},
        {"filters": {"truncated": True, "minGroupMean": 0.1, "maxGroupMean": 0.9, "maxFailedTokens": 1024}},
        {"sampleWeights": {"difficulty": True, "length": True}, "entropyCoefficient": 0.01},
    ],
)
def test_learning_rules_with_an_effect(algorithm: dict[str, Any]) -> None:
    assert paths(job(algorithm=algorithm)) == []


@pytest.mark.parametrize("proximal", ["Recompute", "Interpolate"])
def test_another_proximal_policy_with_several_updates(proximal: str) -> None:
    overlap = {"asyncGenerationRatio": 2} if proximal == "Interpolate" else {}
    assert paths(job(algorithm={"offPolicy": {"proximal": proximal}}, training={"epochs": 2}, overlap=overlap)) == []


@pytest.mark.parametrize("kl", [{"coefficient": 0.1, "placement": "Reward"}, {"coefficient": 0.1, "target": 0.1}])
def test_another_proximal_policy_measures_the_penalty(kl: dict[str, Any]) -> None:
    for variant in ("PPO", "Vanilla"):
        loss = {"policyLoss": {"variant": variant}, "offPolicy": {"proximal": "Recompute"}}
        assert paths(job(REFERENCE, algorithm={**loss, "kl": kl})) == []
        assert paths(job(REFERENCE, algorithm={**loss, "kl": {"coefficient": 0.1}})) == ["spec.algorithm.offPolicy.proximal"]


def test_a_penalty_taken_from_rewards_needs_scores_of_a_scale() -> None:
    for estimator, scope in (("GRPO", "Group"), ("ReinforcePlusPlus", "Batch")):
        rule = {"advantage": {"estimator": estimator}, "reward": {"scale": scope}}
        assert paths(job(REFERENCE, algorithm={**rule, "kl": {"coefficient": 0.1, "placement": "Reward"}})) == []
        assert paths(job(REFERENCE, algorithm={**rule, "kl": {"coefficient": 0.1}})) == ["spec.algorithm.reward.scale"]


def test_interpolation_acts_on_old_tokens_with_a_single_update() -> None:
    document = job(algorithm={"offPolicy": {"proximal": "Interpolate"}}, overlap={"asyncGenerationRatio": 1.5})
    assert paths(document) == []
    document["spec"]["overlap"] = {"maxStaleness": 2}
    document["spec"]["rollout"] = {"extraPrompts": 4}
    assert paths(document) == []
    document["spec"]["overlap"] = {"asyncGenerationRatio": 1}
    assert paths(document) == ["spec.algorithm.offPolicy.proximal"]


def test_gae_with_its_critic() -> None:
    algorithm = {
        "advantage": {"estimator": "GAE", "gamma": 0.99, "lambda": 0.9, "whiten": True},
        "critic": {"learningRate": 1e-4, "valueClip": 0.2, "warmupSteps": 99},
    }
    assert paths(job(CRITIC, algorithm=algorithm, training={"miniBatches": 2})) == []


def test_a_validation_only_run_has_engines_rewards_and_prompts_alone() -> None:
    document = job(
        training={"steps": 0, "stepTimeoutSeconds": 60},
        validation={"maxPrompts": 5, "samplesPerPrompt": 4, "maxResponseTokens": 8, "temperature": 0.7, "topP": 0.9},
        rollout={"maxPromptTokens": 64, "maxResponseTokens": 16, "stopTokenIds": [3], "stallTimeoutSeconds": 60},
        report={"trajectoriesPerStep": 64},
    )
    spec = document["spec"]
    spec["components"] = [c for c in spec["components"] if c["role"] != "Trainer"]
    spec["data"] = {"validation": spec["data"]["train"]}
    assert paths(document) == []
    spec["model"]["parameterCount"] = 1_000_000
    checked = check(document)
    estimate = memory.estimate(checked.job.spec, checked.plan, memory.shape_of(checked.job.spec))
    assert {phase.phase for pool in estimate.pools for phase in pool.phases} == {memory.Phase.START_UP, memory.Phase.GENERATE}
    spec["training"]["steps"] = 1
    assert {"spec.components", "spec.data.train", "spec.data.validation"} <= set(paths(document))


def test_a_critic_may_end_where_the_policys_schedule_does_not_begin() -> None:
    policy = {"schedule": "Cosine", "learningRate": 1e-6, "minLearningRate": 1e-7, "warmupSteps": 50}
    own = {"learningRate": 1e-4, "minLearningRate": 1e-5, "learningRateWarmupSteps": 0, "weightDecay": 0.1, "maxGradNorm": 0.5}
    for critic in (own, {"schedule": "Constant"}, {"learningRate": 1e-8}):
        assert paths(job(CRITIC, algorithm={"advantage": {"estimator": "GAE"}, "critic": critic}, training=policy)) == []


@pytest.mark.parametrize(
    "kl",
    [
        {"coefficient": 0.1, "estimator": "Abs"},
        {"coefficient": 0.1, "placement": "Reward", "target": 0.1, "horizon": 100},
        {"coefficient": 0.1, "target": 0.1},
    ],
)
def test_a_penalty_with_its_reference(kl: dict[str, Any]) -> None:
    assert paths(job(REFERENCE, algorithm={"kl": kl})) == []


@pytest.mark.parametrize(
    "sections",
    [
        {"overlap": {"asyncGenerationRatio": 1.5, "maxStaleness": 1}},
        {"overlap": {"asyncGenerationRatio": 0.0, "maxStaleness": 0}},
        {"overlap": {"maxStaleness": 1, "updateMode": "InFlight"}, "rollout": {"extraPrompts": 1}},
        {"overlap": {"updateMode": "Interrupt"}, "data": QUESTIONS, "validation": {"everySteps": 1}},
        {"rollout": {"redundantSamples": 3, "extraPrompts": 4}},
        {"rollout": {"groupFilter": {"minStd": 0}}},
        {"rollout": {"groupFilter": {"minMean": 0.1, "maxMean": 0.9, "maxInRow": 5}}},
        {"rollout": {"groupFilter": {"minMean": 0.1}}, "algorithm": {"filters": {"minGroupMean": 0.2}}},
    ],
)
def test_sampling_responses(sections: dict[str, Any]) -> None:
    assert paths(job(**sections)) == []


def test_paused_validation_leaves_nothing_running_at_a_sync() -> None:
    paused = {"everySteps": 1, "pauseGeneration": True}
    document = job(overlap={"updateMode": "Interrupt"}, data=QUESTIONS, validation=paused)
    assert paths(document) == ["spec.overlap.updateMode"]


@pytest.mark.parametrize("placement", [{"ranks": "1-3"}, {"mode": "Auto"}])
def test_groups_stay_together_where_there_may_be_several_engines(placement: dict[str, Any]) -> None:
    engine = {"name": "actor_infer", "role": "Rollout", "placement": placement}
    assert paths(job(engine, rollout={"groupRouting": "Together"})) == []


def test_validation_with_sampling() -> None:
    validation = {
        "everySteps": 5,
        "atStart": False,
        "pauseGeneration": True,
        "maxPrompts": 8,
        "samplesPerPrompt": 4,
        "maxResponseTokens": 1024,
        "temperature": 1.0,
        "topP": 0.9,
    }
    assert paths(job(data=QUESTIONS, validation=validation)) == []


@pytest.mark.parametrize(
    ("overlap", "bound"), [({}, 0), ({"asyncGenerationRatio": 0.5}, 1), ({"asyncGenerationRatio": 2, "maxStaleness": 5}, 5)]
)
def test_the_staleness_that_a_spec_allows(overlap: dict[str, Any], bound: int) -> None:
    assert rollout.max_staleness(RLJob.model_validate_json(json.dumps(job(overlap=overlap))).spec) == bound


def checked(document: dict[str, Any]) -> CheckedJob:
    return check(document)


def test_a_critic_is_placed_like_any_model() -> None:
    gae = {"advantage": {"estimator": "GAE"}}
    beside = {**CRITIC, "placement": {"ranks": "0"}}
    alone = checked(job(CRITIC, algorithm=gae)).plan
    assert alone.mode is PlacementMode.DISAGGREGATED
    shared = checked(job(beside, algorithm=gae, offload={"residency": "Switching"})).plan
    assert [(one.name, one.shares_devices_with) for one in shared.components if one.shares_devices_with] == [
        ("actor_train", ("critic",)),
        ("critic", ("actor_train",)),
    ]


def test_a_critics_devices_are_given_and_not_chosen() -> None:
    document = job({**CRITIC, "placement": {"mode": "Auto"}}, algorithm={"advantage": {"estimator": "GAE"}})
    assert paths(document) == ["spec.components[3].placement.mode"]


def test_settings_that_only_name_their_default_pass() -> None:
    """The API server writes defaults into every object."""
    document = job()
    spec = RLJob.model_validate_json(json.dumps(document)).spec
    document["spec"] = spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert paths(document) == []


def test_a_spec_that_the_head_pod_cannot_carry_is_refused_with_both_sizes() -> None:
    env = [{"name": f"TEXT_{number}", "value": "x" * 20_000} for number in range(10)]
    long = job(podTemplate={"spec": {"containers": [{"name": "ray", "env": env}]}})
    with pytest.raises(SpecInvalidError) as caught:
        check(long)
    (problem,) = caught.value.errors
    assert problem.path == "spec"
    assert "196,608" in str(problem)
    env.pop()
    assert paths(long) == []


def test_sglangs_ranks_share_an_engine_on_cpu_devices_of_their_own():
    engine = {
        "name": "actor_infer",
        "role": "Rollout",
        "placement": {"ranks": "1-2"},
        "engine": {"type": "SGLang", "tensorParallelSize": 2},
    }
    document = job(engine)
    document["spec"]["nodeGroups"][0]["deviceResource"] = "cpu"
    assert paths(document) == []
