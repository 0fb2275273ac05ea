"""ROLL's example of asynchronous agents, as ``rljob convert`` writes it, scaled to this machine and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rljob_convert.conversion import convert

GUIDE = Path(__file__).resolve().parents[2] / "tests" / "data" / "convert" / "roll-agentic-async.yaml"
"""The example as ROLL's guide prints it: the manifest of the run with the lines below appended."""
LEFT_OUT = """
# What the guide leaves out of agent_val_frozen_lake_async.yaml and of the file that it includes, with their values.
exp_name: frozen-lake
num_gpus_per_node: 8
advantage_clip: 0.2
init_kl_coef: 0.0
max_grad_norm: 1.0
reward_normalization: {grouping: traj_group_id, method: mean_std}
train_env_manager: {max_env_num_per_worker: 16, num_env_groups: 128, group_size: 8, tags: [FrozenLake], num_groups_partition: [128]}
custom_envs:
  FrozenLake:
    env_type: frozen_lake
    max_steps: 10
    max_tokens_per_step: 64
    env_config: {action_pattern: "<answer>(.*?)</answer>", format_penalty: -0.01, is_slippery: false}
"""
LEARNING_RATE, WARMUP_STEPS = 7e-4, 3


def text() -> str:
    """ROLL's file, whole."""
    return GUIDE.read_text() + LEFT_OUT


def manifest(model: Path, *, steps: int) -> dict[str, Any]:
    """The job that ``rljob convert`` makes of :func:`text`, for this machine."""
    return scaled(dict(convert("roll", text()).manifest), model, steps=steps)


def scaled(found: dict[str, Any], model: Path, *, steps: int) -> dict[str, Any]:
    """From 8 accelerators and half a billion parameters to 2 virtual devices and the model that half knows the lake.

    Nodes, devices, the model's path and attention, the engine's cache, numbers of prompts, tokens and steps, learning rate and warm-up, and
    how a map is shown change; environment, estimator, loss, sampling, staleness and schedule do not.
    """
    spec = found["spec"]
    spec["nodeGroups"] = [{"name": "gpu", "devicesPerNode": 2, "deviceResource": "cpu"}]
    trainer, engine, games = spec["components"]
    trainer |= {"placement": {"deviceMapping": "[0]"}, "threadsPerWorker": 1}
    engine |= {"placement": {"deviceMapping": "[1]"}, "threadsPerWorker": 1, "engine": {"type": "VLLM", "maxRunningRequests": 128}}
    games |= {"placement": {"workers": 1}}
    spec["model"] = {"path": str(model), "dtype": spec["model"]["dtype"]}
    (environment,) = spec["environments"]
    environment["prompt"] = {"chatTemplate": False, "instruction": "", "turn": "{observation}\n"}
    environment["parameters"]["grid_lookup"] = {"0": " P", "1": " F", "2": " H", "3": " G", "4": " X", "5": " W"}
    spec["rollout"] |= {"promptsPerStep": 16, "maxPromptTokens": 400, "maxResponseTokens": 8}
    spec["training"] |= {"steps": steps, "learningRate": LEARNING_RATE, "warmupSteps": WARMUP_STEPS}
    return found
