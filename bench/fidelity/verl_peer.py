"""verl's side, in an interpreter that has verl: ``python -m bench.fidelity.verl_peer FOLDER OUTPUT`` (:mod:`bench.fidelity.exchange`).

Calls what verl's trainer calls: ``apply_kl_penalty`` and ``compute_advantage`` of ``ray_trainer``, the rollout correction, ``ppo_loss``
and ``value_loss`` of its workers. Settings of a case:

========== =======================================================================================================
estimator  verl's name; with ``gamma``, ``lam``, ``norm_std``
kl_reward  ``[kind, coefficient]``: the KL to the reference is subtracted from token rewards
old        ``proximal`` or ``behavior``: old_log_probs of the loss
actor      fields of ActorConfig; ``policy_loss`` those of PolicyLossConfig, in it ``rollout_correction``
correction arguments of compute_rollout_correction_and_rejection_mask: the weights for the loss, and the mask
head       temperature: log-probs and entropies of logits
value_clip of the value loss, 1e9 without; ``whiten`` false: whitened advantages are left out of the results
========== =======================================================================================================
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ["CUDA_VISIBLE_DEVICES"] = ""
warnings.simplefilter("ignore")

import torch  # noqa: E402
from verl import DataProto  # noqa: E402
from verl.trainer.config import AlgoConfig  # noqa: E402
from verl.trainer.config.algorithm import RolloutCorrectionConfig  # noqa: E402
from verl.trainer.ppo.core_algos import FixedKLController  # noqa: E402
from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_advantage  # noqa: E402
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask  # noqa: E402
from verl.utils.tensordict_utils import get_tensordict  # noqa: E402
from verl.utils.torch_functional import entropy_from_logits, logprobs_from_logits  # noqa: E402
from verl.workers.config import ActorConfig, CriticConfig  # noqa: E402
from verl.workers.config.actor import PolicyLossConfig  # noqa: E402
from verl.workers.utils.losses import ppo_loss, value_loss  # noqa: E402

from bench.fidelity.exchange import Batch, Result, gradient, serve  # noqa: E402

Tensors = dict[str, torch.Tensor]


def run(given: str, settings: Mapping[str, Any], batch: Batch) -> Result:
    """All results of one case on one batch."""
    tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
    tensors["response_mask"] = tensors["mask"].to(torch.int64)
    result: Result = {}
    tensors["advantages"] = tensors[f"{given}_advantages"]
    if "estimator" in settings:
        found = _advantages(settings, tensors, batch)
        tensors["advantages"] = found.batch["advantages"]
        result["advantages"] = (found.batch["advantages"] * tensors["mask"]).numpy()
        if settings["estimator"] == "gae":
            tensors["returns"] = found.batch["returns"] * tensors["mask"]
            result["returns"] = tensors["returns"].numpy()
    if "actor" in settings:
        result |= _policy(settings, tensors)
    if "value_clip" in settings:
        result |= _value(settings["value_clip"], tensors)
    if "head" in settings:
        result |= _head(settings["head"], tensors)
    return result


def _head(temperature: float, tensors: Tensors) -> Result:
    logits, mask = tensors["logits"].clone().requires_grad_(), tensors["mask"]
    scaled = logits / temperature
    logprobs, entropy = logprobs_from_logits(scaled, tensors["tokens"]), entropy_from_logits(scaled)
    ((logprobs * tensors["token_advantages"] + entropy * tensors["returns"]) * mask).sum().backward()
    outputs = {"head_logprobs": logprobs * mask, "head_entropy": entropy * mask}
    return {**{name: value.detach().numpy() for name, value in outputs.items()}, "d_logits": gradient(logits)}


def _advantages(settings: Mapping[str, Any], tensors: Tensors, batch: Batch) -> DataProto:
    rewards = torch.zeros_like(tensors["mask"])
    rewards[torch.arange(len(rewards)), tensors["lengths"] - 1] = tensors["scores"]
    chosen = {
        "token_level_scores": rewards,
        "token_level_rewards": rewards,
        "response_mask": tensors["response_mask"],
        "values": tensors["old_values"],
        "old_log_probs": tensors["proximal"],
        "ref_log_prob": tensors["reference"],
    }
    data = DataProto.from_dict(tensors=chosen, non_tensors={"uid": batch["groups"].astype(object)})
    if "kl_reward" in settings:
        kind, coefficient = settings["kl_reward"]
        data, _ = apply_kl_penalty(data, FixedKLController(coefficient), kind)
    gamma, lam = settings.get("gamma", 1.0), settings.get("lam", 1.0)
    return compute_advantage(
        data,
        settings["estimator"],
        gamma=gamma,
        lam=lam,
        norm_adv_by_std_in_grpo=settings.get("norm_std", True),
        config=AlgoConfig(gamma=gamma, lam=lam),
    )


def _policy(settings: Mapping[str, Any], tensors: Tensors) -> Result:
    mask, extra = tensors["response_mask"], {}
    if "correction" in settings:
        weights, mask, _ = compute_rollout_correction_and_rejection_mask(
            tensors["proximal"], tensors["behavior"], mask, **settings["correction"]
        )
        extra = {} if weights is None else {"rollout_is_weights": weights.batch["rollout_is_weights"]}
    logprobs, entropy = tensors["logprobs"].clone().requires_grad_(), tensors["entropy"].clone().requires_grad_()
    data = _data(
        tensors,
        {
            "response_mask": mask,
            "old_log_probs": tensors[settings.get("old", "proximal")],
            "advantages": tensors["advantages"],
            "ref_log_prob": tensors["reference"],
            **extra,
        },
    )
    actor = {"strategy": "fsdp", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1, **settings["actor"]}
    policy_loss = dict(actor.pop("policy_loss", {}))
    if "rollout_correction" in policy_loss:
        policy_loss["rollout_correction"] = RolloutCorrectionConfig(**policy_loss["rollout_correction"])
    config = ActorConfig(policy_loss=PolicyLossConfig(**policy_loss), **actor)
    outputs = {"log_probs": _outputs(logprobs, tensors["lengths"])}
    if config.entropy_coeff > 0:
        outputs["entropy"] = _outputs(entropy, tensors["lengths"])
    loss, _ = ppo_loss(config, outputs, data)
    loss.backward()
    result = {"loss": loss.detach().numpy(), "d_logprobs": gradient(logprobs)}
    return {**result, "d_entropy": gradient(entropy)} if config.entropy_coeff > 0 else result


def _value(clip: float, tensors: Tensors) -> Result:
    values = tensors["values"].clone().requires_grad_()
    data = _data(tensors, {"response_mask": tensors["response_mask"], "values": tensors["old_values"], "returns": tensors["returns"]})
    config = CriticConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=1, cliprange_value=clip)
    loss, _ = value_loss(config, {"values": _outputs(values, tensors["lengths"])}, data)
    loss.backward()
    return {"value_loss": loss.detach().numpy(), "d_values": gradient(values)}


def _outputs(rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Rows (S, R) as a model's output without padding: one prompt token, so that entry t speaks of token t + 1; the last says nothing."""
    return torch.cat([torch.cat([row[:length], row.new_zeros(1)]) for row, length in zip(rows, lengths.tolist(), strict=True)])


def _data(tensors: Tensors, fields: Tensors) -> Any:
    """A micro-batch as verl's losses take it, alone on one rank."""
    present = torch.arange(tensors["mask"].shape[1]) < tensors["lengths"][:, None]
    prompts = torch.zeros(len(present), 1, dtype=torch.int64)
    attention = torch.cat([torch.ones_like(prompts), present.to(torch.int64)], dim=1)
    whole = {"prompts": prompts, "responses": torch.zeros(present.shape, dtype=torch.int64), "attention_mask": attention}
    return get_tensordict({**whole, **fields}, {"dp_size": 1, "batch_num_tokens": None, "global_batch_size": None})


if __name__ == "__main__":
    serve(Path(sys.argv[1]), Path(sys.argv[2]), run, ("verl", "torch", "tensordict", "numpy"))
