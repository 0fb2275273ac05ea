"""What ``rljob plan`` says that the trainer of these checks takes: its own estimate, of a job of the same sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.gpu_check.scale import Model, Scale
from rljob_api.memory import Kind, ModelShape, Phase, process_needs, shape_from_config
from rljob_api.memory.model import ProcessNeeds
from rljob_api.v1alpha1.components import Role
from rljob_api.validation import check

LORA_RANK = 16
TYPE: Mapping[str, Any] = {"model_type": "qwen2"}
"""Where a model's configuration names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Bytes on the trainer's device."""

    shape: ModelShape
    state_bytes: int
    """What is there between two steps: weights and moments."""
    peak_bytes: int
    """In the fullest phase of a training step, without what lies outside torch's allocator."""


def shape_of(model: Model) -> ModelShape:
    """Its sizes."""
    return shape_from_config({**TYPE, **model.config})


def estimate(model: Model, scale: Scale, *, lora: bool) -> Estimate:
    """Of one trainer process with one engine on a device of its own.

    Raises:
        SpecInvalidError: the job of these sizes is not valid.
    """
    shape = shape_of(model)
    checked = check(job(model, scale, lora=lora), runnable=False, shape_of=lambda _spec: shape)
    (trainer,) = checked.plan.with_role(Role.TRAINER)
    needs = process_needs(checked.job.spec, checked.plan, shape)(trainer, trainer.processes[0])
    return Estimate(shape=shape, state_bytes=_states(needs), peak_bytes=_states(needs) + max(_working(needs, phase) for phase in TRAINING))


TRAINING = (Phase.TRAIN, Phase.OPTIMIZER_STEP)


def _states(needs: ProcessNeeds) -> int:
    return sum(need.num_bytes for need in needs.states if need.kind is not Kind.PROCESS)


def _working(needs: ProcessNeeds, phase: Phase) -> int:
    return sum(need.num_bytes for need in needs.working.get(phase, ()))


def job(model: Model, scale: Scale, *, lora: bool) -> dict[str, Any]:
    """The manifest."""
    adapters = {"lora": {"rank": LORA_RANK}} if lora else {}
    group = {"name": "here", "nodes": 1, "devicesPerNode": 2}
    return {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "gpu-check"},
        "spec": {
            "nodeGroups": [group if scale.on_cuda else {**group, "deviceResource": "cpu"}],
            "components": [
                {"name": "trainer", "role": "Trainer", "placement": {"ranks": "0"}},
                {"name": "engine", "role": "Rollout", "placement": {"ranks": "1"}},
                {"name": "reward", "role": "Reward", "placement": {"workers": 1}},
            ],
            "model": {"path": f"models/{model.name}", "dtype": scale.dtype, **adapters},
            "data": {"train": [{"name": "none", "type": "JSONL", "jsonl": {"path": "prompts.jsonl"}}]},
            "rewards": [{"name": "none", "type": "Function", "function": "rewards:none"}],
            "rollout": {
                "promptsPerStep": scale.sequences // 2,
                "samplesPerPrompt": 2,
                "maxPromptTokens": scale.prompt_tokens,
                "maxResponseTokens": scale.response_tokens,
            },
            "training": {
                "steps": 1,
                "microBatchTokens": scale.micro_batch_tokens,
                "logprobChunkTokens": scale.logprob_chunk_tokens,
                "activationCheckpointing": model.checkpointing,
            },
        },
    }
