"""TRL's side, in an interpreter that has TRL: ``python -m bench.fidelity.trl_peer FOLDER OUTPUT`` (:mod:`bench.fidelity.exchange`).

Advantages and weights come from ``_generate_and_score_completions`` of GRPOTrainer or RLOOTrainer, losses from their ``_compute_loss``,
both as installed. The trainer is made without ``__init__``, which would load a model and a data set; its attributes are set here as
``__init__`` would from the configuration. Replaced are generation (returns the batch's tokens), rewards (return its scores) and models:
they return the batch's log-probs, which ``_get_per_token_logps_and_entropies`` then cuts as ever. Settings of a case:

=============== =============================================================================================
trainer         ``grpo`` (default) or ``rloo``
estimator       true: advantages from the scores; else they are given
scale_rewards   ``group`` or ``none``
mode, low, high vLLM's importance sampling ratio: ``token_truncate`` and so on, and its bounds
head            temperature: log-probs and entropies of logits
any other       attribute of the trainer (``loss_type``, ``epsilon_low``, ``beta`` and so on) or, for ``delta``, of its arguments
=============== =============================================================================================
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from trl import GRPOTrainer, RLOOTrainer
from trl.trainer.utils import add_fused_lm_head

from bench.fidelity.exchange import Batch, Result, gradient, serve

_ATTRIBUTES: dict[str, Any] = {
    "loss_type": "dapo",
    "epsilon_low": 0.2,
    "epsilon_high": 0.2,
    "beta": 0.0,
    "importance_sampling_level": "token",
    "entropy_coef": 0.0,
    "scale_rewards": "group",
    "multi_objective_aggregation": "sum_then_normalize",
    "top_entropy_quantile": 1.0,
    "off_policy_mask_threshold": None,
    "use_adaptive_entropy": False,
    "aux_loss_enabled": False,
    "mask_truncated_completions": False,
    "normalize_advantages": False,
    "reward_clip_range": None,
    "num_iterations": 1,
    "current_gradient_accumulation_steps": 1,
    "environment_factories": None,
    "environments": None,
    "tools": None,
    "pad_to_multiple_of": None,
    "log_multimodal": False,
    "_is_vlm": False,
    "reward_func_names": ["score"],
    "reward_funcs": [None],
}
_ARGUMENTS: dict[str, Any] = {
    "delta": None,
    "use_bias_correction_kl": False,
    "per_device_train_batch_size": 64,
    "gradient_checkpointing_kwargs": None,
    "gradient_accumulation_steps": 1,
    "report_to": [],
}


class _Model:
    """Returns log-probs and entropies that are there already, as a TRL model's fused head does."""

    training = True
    is_gradient_checkpointing = False

    def __init__(self, logprobs: torch.Tensor, entropy: torch.Tensor) -> None:
        self._logprobs, self._entropy = logprobs, entropy

    def __call__(self, **_: object) -> SimpleNamespace:
        pad = torch.nn.functional.pad
        return SimpleNamespace(log_probs=pad(self._logprobs, (1, 0)), entropy=pad(self._entropy, (1, 0)))


def run(given: str, settings: Mapping[str, Any], batch: Batch) -> Result:
    """All results of one case on one batch."""
    tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
    kind = RLOOTrainer if settings.get("trainer") == "rloo" else GRPOTrainer
    trainer = _trainer(kind, settings, tensors)
    inputs = trainer._generate_and_score_completions([{"prompt": "p"}] * len(batch["scores"]))
    result: Result = {}
    if settings.get("estimator"):
        result["advantages"] = (inputs["advantages"][:, None] * tensors["mask"]).numpy()
    else:
        inputs["advantages"] = tensors[f"{given}_advantages"]
    if settings.get("loss", True):
        logprobs, entropy = tensors["logprobs"].clone().requires_grad_(), tensors["entropy"].clone().requires_grad_()
        loss = trainer._compute_loss(_Model(logprobs, entropy), inputs)
        loss.backward()
        result |= {"loss": loss.detach().numpy(), "d_logprobs": gradient(logprobs)}
        if settings.get("entropy_coef"):
            result["d_entropy"] = gradient(entropy)
    if "head" in settings:
        result |= _head(settings["head"], trainer, tensors)
    return result


class _Headed(torch.nn.Module):
    """A model whose hidden states are the batch's logits, and whose head is the identity."""

    config = SimpleNamespace(get_text_config=SimpleNamespace)

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self._hidden = torch.nn.functional.pad(logits, (0, 0, 0, 1))  # entry t speaks of token t + 1, the last of none
        self._head = torch.nn.Linear(logits.shape[-1], logits.shape[-1], bias=False)
        self._head.weight = torch.nn.Parameter(torch.eye(logits.shape[-1]), requires_grad=False)

    def base_model(self, **_: object) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=self._hidden)

    def get_output_embeddings(self) -> torch.nn.Linear:
        return self._head

    def forward(self) -> None:
        raise NotImplementedError


def _head(temperature: float, trainer: Any, tensors: Mapping[str, torch.Tensor]) -> Result:
    """Log-probs and entropies by the head that TRL gives to a model."""
    logits, mask = tensors["logits"].clone().requires_grad_(), tensors["mask"]
    model = _Headed(logits)
    add_fused_lm_head(model, temperature=temperature, outputs=("log_probs", "entropy"))
    tokens = torch.nn.functional.pad(tensors["tokens"], (1, 0))
    outputs = trainer._get_per_token_logps_and_entropies(model, tokens, torch.ones_like(tokens), mask.shape[1], compute_entropy=True)
    logprobs, entropy = outputs[0] * mask, outputs[1] * mask
    (logprobs * tensors["token_advantages"] + entropy * tensors["returns"]).sum().backward()
    return {"head_logprobs": logprobs.detach().numpy(), "head_entropy": entropy.detach().numpy(), "d_logits": gradient(logits)}


def _trainer(kind: type[Any], settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Any:
    trainer = object.__new__(kind)
    attributes = {name: settings.get(name, default) for name, default in _ATTRIBUTES.items()}
    samples = int((tensors["groups"] == tensors["groups"][0]).sum())
    arguments = {name: settings.get(name, default) for name, default in _ARGUMENTS.items()}
    old = _Model(tensors[settings.get("old", "proximal")], tensors["entropy"])
    fixed = {
        "accelerator": Accelerator(cpu=True),
        "args": SimpleNamespace(**arguments, steps_per_generation=1),
        "state": SimpleNamespace(global_step=0),
        "model": old,
        "ref_model": _Model(tensors["reference"], tensors["entropy"]),
        "num_generations": samples,
        "max_completion_length": tensors["mask"].shape[1],
        "reward_weights": torch.ones(1),
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "_entropy_bonus_enabled": attributes["entropy_coef"] > 0,
        "use_vllm": kind is GRPOTrainer,
        "vllm_importance_sampling_correction": True,
        "vllm_importance_sampling_mode": settings.get("mode", "token_truncate"),
        "vllm_importance_sampling_clip_min": settings.get("low"),
        "vllm_importance_sampling_clip_max": settings.get("high", 1e9),
        "_metrics": {"train": defaultdict(list)},
        "_logs": {"prompt": [], "completion": [], "advantages": [], "rewards": defaultdict(list), "extra": defaultdict(list)},
        "_pending_extra_logs": {},
        "_pending_metrics": {},
    }
    vars(trainer).update(attributes | fixed)
    lengths = tensors["lengths"].tolist()
    completions = [[1] * length for length in lengths]
    # Without a correction the engine's log-probs are the trainer's, so that the ratio of both is 1
    sampled = tensors["behavior"] if "mode" in settings else tensors[settings.get("old", "proximal")]
    sampling = [row[:length].tolist() for row, length in zip(sampled, lengths, strict=True)]
    masks = [row[:length].to(torch.int64).tolist() for row, length in zip(tensors["mask"], lengths, strict=True)]
    prompts, texts = [[1]] * len(lengths), [""] * len(lengths)
    grpo: tuple[Any, ...] = (prompts, completions, masks, texts, sampling, {}, None, None)
    trainer._generate = lambda _: grpo if kind is GRPOTrainer else (prompts, completions, texts)
    trainer._calculate_rewards = lambda *_: tensors["scores"][:, None]
    return trainer


if __name__ == "__main__":
    serve(Path(sys.argv[1]), Path(sys.argv[2]), run, ("trl", "torch", "transformers", "numpy"))
