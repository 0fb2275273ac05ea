"""A policy loss and an advantage estimator of the user's own, from the manifest to an optimizer update."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from rljob_api.errors import SpecInvalidError
from rljob_api.v1alpha1 import RLJobSpec
from rljob_api.v1alpha1.components import Role
from rljob_api.validation import check
from rljob_runtime.errors import PluginError
from rljob_runtime.job import learning_settings, worker_settings
from rljob_runtime.overlap.arrange import arrange
from rljob_runtime.overlap.batching import split, train_batches
from rljob_runtime.overlap.rule import Rule
from rljob_runtime.training.worker import PolicyWorker
from tests.support.records import make_group
from tests.unit.api.manifests import manifest

PLUGIN = """
import numpy as np


def reinforce(tokens, *, weight):
    return -weight * tokens.advantages * tokens.logprobs


def one_too_few(tokens):
    return tokens.logprobs[1:]


def centered(step):
    return step.rewards - step.rewards.mean()


def infinite(step):
    return np.full(step.rewards.shape, np.inf)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "my_plugin.py").write_text(PLUGIN)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("my_plugin", None)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(3)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    Qwen2ForCausalLM(Qwen2Config(**sizes, vocab_size=16)).save_pretrained(folder)
    return folder


def spec_with(loss: dict[str, Any], advantage: dict[str, Any], model: Path | str = "model") -> RLJobSpec:
    document = manifest()
    document["spec"]["algorithm"] = {"policyLoss": loss, "advantage": advantage}
    document["spec"]["model"] = {"path": str(model), "dtype": "float32"}
    document["spec"]["training"] = {"learningRate": 0.01}
    return check(document).job.spec


def trained(spec: RLJobSpec, folder: Path) -> dict[str, torch.Tensor]:
    """Weights after one update on two groups."""
    rule, batching = Rule(learning_settings.rule_config(spec, folder)), learning_settings.batching_config(spec, 1)
    step = arrange([make_group(0, (0.0, 1.0, 3.0)), make_group(1, (1.0, 0.0, 0.0))], 0)
    (batches,) = train_batches(step, split(step, batching), rule.apply(step), batching).by_rank
    worker = PolicyWorker(worker_settings.policy_config(spec, role=Role.TRAINER, num_threads=1, job_folder=folder), 0, 1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    worker.setup("127.0.0.1", port, timeout_s=60.0)
    try:
        worker.train_step(batches, step=0)
        return {name: p.full_tensor().clone() for name, p in worker.model.named_parameters()}  # type: ignore[attr-defined]
    finally:
        worker.shutdown()


CUSTOM_LOSS = {"variant": "Custom", "function": "my_plugin:reinforce", "parameters": {"weight": 1.0}}
CUSTOM_ADVANTAGE = {"estimator": "Custom", "function": "my_plugin:centered"}


def test_a_function_that_is_reinforce_trains_as_the_built_in_one(folder: Path, model_folder: Path) -> None:
    own = trained(spec_with(CUSTOM_LOSS, {"estimator": "GRPO"}, model_folder), folder)
    built_in = trained(spec_with({"variant": "Vanilla"}, {"estimator": "GRPO"}, model_folder), folder)
    for name, weights in built_in.items():
        assert torch.equal(own[name], weights), name


def test_parameters_and_estimator_reach_the_weights(folder: Path, model_folder: Path) -> None:
    plain = trained(spec_with(CUSTOM_LOSS, {"estimator": "GRPO"}, model_folder), folder)
    other = trained(spec_with(CUSTOM_LOSS | {"parameters": {"weight": -1.0}}, {"estimator": "GRPO"}, model_folder), folder)
    advantage = trained(spec_with(CUSTOM_LOSS, CUSTOM_ADVANTAGE, model_folder), folder)
    for changed in (other, advantage):
        assert any(not torch.equal(changed[name], weights) for name, weights in plain.items())


def test_an_estimator_gets_a_steps_rewards_and_is_spread_over_tokens(folder: Path) -> None:
    rule = Rule(learning_settings.rule_config(spec_with({}, CUSTOM_ADVANTAGE), folder))
    step = arrange([make_group(0, (0.0, 3.0))], 0)
    advantages = rule.apply(step).advantages
    np.testing.assert_array_equal(advantages, np.where(step.response_mask > 0, np.repeat([-1.5, 1.5], step.lengths), 0.0))


@pytest.mark.parametrize(
    ("loss", "advantage", "reported"),
    [
        ({"variant": "Custom"}, {}, r"policyLoss\.function: is missing, and variant is Custom"),
        ({"function": "my_plugin:reinforce"}, {}, r"policyLoss\.function: .* has no effect with variant PPO; .* use variant Custom"),
        ({"parameters": {"weight": 1}}, {}, r"policyLoss\.parameters: .* has no effect with variant PPO"),
        (CUSTOM_LOSS | {"clipLow": 0.1}, {}, r"policyLoss\.clipLow: .* has no effect with variant Custom"),
        ({}, {"estimator": "Custom"}, r"advantage\.function: is missing, and estimator is Custom"),
        ({}, {"function": "my_plugin:centered"}, r"advantage\.function: .* has no effect with estimator GRPO"),
        ({}, CUSTOM_ADVANTAGE | {"gamma": 0.5}, r"advantage\.gamma: .* has no effect with estimator Custom"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(loss: dict[str, Any], advantage: dict[str, Any], reported: str) -> None:
    with pytest.raises(SpecInvalidError, match=reported):
        spec_with(loss, advantage)


@pytest.mark.parametrize(
    ("function", "parameters", "reported"),
    [
        ("my_plugin:reinforced", {}, r"policyLoss\.function: module 'my_plugin' .* has no function .*did you mean 'reinforce'"),
        ("my_plugins:loss", {}, r"policyLoss\.function: no module 'my_plugins' in .* nearest there: my_plugin\.py"),
        ("my_plugin:one_too_few", {"weight": 1}, r"one_too_few\(tokens\) cannot be called: .*'weight'"),
    ],
)
def test_what_cannot_be_imported_or_called_is_found_before_the_start(
    folder: Path, function: str, parameters: dict[str, Any], reported: str
) -> None:
    spec = spec_with({"variant": "Custom", "function": function, "parameters": parameters}, {})
    with pytest.raises(PluginError, match=reported):
        learning_settings.check_functions(spec, folder)


def test_results_of_another_shape_or_not_finite_are_refused(folder: Path, model_folder: Path) -> None:
    spec = spec_with({"variant": "Custom", "function": "my_plugin:one_too_few"}, {}, model_folder)
    with pytest.raises(ValueError, match=r"one_too_few returned torch.float32\(\d+,\); it must return the loss of each token"):
        trained(spec, folder)
    rule = Rule(learning_settings.rule_config(spec_with({}, {"estimator": "Custom", "function": "my_plugin:infinite"}), folder))
    with pytest.raises(ValueError, match="returned inf; all advantages must be finite"):
        rule.apply(arrange([make_group(0, (0.0, 3.0))], 0))
