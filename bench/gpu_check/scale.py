"""Sizes of everything, for a GPU and for a machine without one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A decoder with random weights."""

    name: str
    config: Mapping[str, Any]
    """Of transformers' Qwen2Config, as published for Qwen2.5; with ``model_type`` of that type's."""
    checkpointing: bool
    """Whether decoder layers are computed again in the backward pass."""


def _unseen(what: str) -> None:
    """The default of ``Scale.begin``: stages of a check are not reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How large the checks are."""

    device: torch.device
    dtype: str
    """Of the trainer's and the engine's arithmetic."""
    models: tuple[Model, ...]
    """Dense ones, the smallest first."""
    mixture: Model
    small: Model
    """Dense, for ranks that are compared in float32."""
    small_mixture: Model
    bucket_bytes: int
    """Of a weight sync."""
    rank_tokens: int
    """Of a micro-batch there."""
    matrix: int
    """Rows and columns of the matrix product."""
    copied_bytes: int
    state_bytes: int
    """Of the parameters that the offload moves; moments are twice as much."""
    sequences: int
    """Of one update, each of ``prompt_tokens + response_tokens``."""
    prompt_tokens: int
    response_tokens: int
    micro_batch_tokens: int
    logprob_chunk_tokens: int
    sampled_prompts: int
    """That engines respond to, each of ``sampled_prompt`` tokens."""
    sampled_prompt: int
    sampled_tokens: int
    """Of each response."""
    repeat: int
    wait_s: float
    """Deadline of what other processes do; at CPU size a busy machine may take its time."""
    folder: Path
    """For models and checkpoints; removed at the end."""
    found: dict[str, float] = field(default_factory=dict)
    """What later checks stand beside."""
    written: dict[str, Path] = field(default_factory=dict)
    """Model folders by name, made when the first check needs one."""
    begin: Callable[[str], None] = _unseen
    """Called with what a check does from now on: where it is when it is cut off."""

    @property
    def on_cuda(self) -> bool:
        """Whether there is a GPU."""
        return self.device.type == "cuda"

    def speed(self, bound: float) -> float | None:
        """A bound on speed; none at CPU size, where it would mean nothing."""
        return bound if self.on_cuda else None


def _qwen(hidden: int, layers: int, heads: int, kv_heads: int, width: int, vocab: int = 151_936, *, tied: bool = True) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": width,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 32_768,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


GPU_MODELS = (
    Model(name="0.5B", config=_qwen(896, 24, 14, 2, 4864), checkpointing=False),
    Model(name="1.5B", config=_qwen(1536, 28, 12, 2, 8960), checkpointing=True),
    Model(name="3B", config=_qwen(2048, 36, 16, 2, 11_008), checkpointing=True),
    Model(name="7B", config=_qwen(3584, 28, 28, 4, 18_944, 152_064, tied=False), checkpointing=True),
)
"""Sizes of Qwen2.5 (config.json of Qwen/Qwen2.5-*)."""
TINY = _qwen(128, 2, 4, 2, 256, 512)
"""Heads of 32: vLLM's CPU attention takes no smaller ones."""


def _mixture(base: Mapping[str, Any], *, experts: int, width: int, each: int, head_dim: int) -> Model:
    sizes = {"num_experts": experts, "moe_intermediate_size": width, "num_experts_per_tok": each, "head_dim": head_dim}
    return Model(name="mixture", config={**base, **sizes, "model_type": "qwen3_moe", "norm_topk_prob": True}, checkpointing=True)


GPU_MIXTURE = _mixture(_qwen(2048, 8, 32, 4, 6144, tied=False), experts=64, width=768, each=8, head_dim=128)
"""The widths of Qwen3-30B-A3B with 8 of its 48 layers and half of its experts, so that one device holds its moments."""
CPU_MIXTURE = _mixture(TINY, experts=4, width=128, each=2, head_dim=32)

GPU_SMALL = Model(name="small", config=_qwen(256, 3, 8, 4, 1024, 32_768), checkpointing=False)
"""Just above where Auto begins to compile layers."""
GPU_SMALL_MIXTURE = _mixture(_qwen(256, 2, 8, 4, 1024, 4096), experts=8, width=256, each=2, head_dim=32)


def gpu(folder: Path) -> Scale:
    """For the first CUDA device."""
    return Scale(
        device=torch.device("cuda", 0),
        dtype="bfloat16",
        models=GPU_MODELS,
        mixture=GPU_MIXTURE,
        small=GPU_SMALL,
        small_mixture=GPU_SMALL_MIXTURE,
        sampled_prompts=16,
        sampled_prompt=128,
        sampled_tokens=128,
        bucket_bytes=256 << 20,
        rank_tokens=768,
        matrix=8192,
        copied_bytes=2 << 30,
        state_bytes=4 << 30,
        sequences=16,
        prompt_tokens=512,
        response_tokens=1536,
        micro_batch_tokens=16_384,
        logprob_chunk_tokens=1024,
        repeat=3,
        wait_s=60.0,
        folder=folder,
    )


def cpu(folder: Path) -> Scale:
    """For a machine without CUDA: every model is the same tiny one."""
    return Scale(
        device=torch.device("cpu"),
        dtype="float32",  # many processors have no bfloat16
        models=tuple(Model(name=model.name, config=TINY, checkpointing=model.checkpointing) for model in GPU_MODELS),
        mixture=CPU_MIXTURE,
        small=Model(name="small", config=TINY, checkpointing=False),
        small_mixture=CPU_MIXTURE,
        sampled_prompts=4,
        sampled_prompt=24,
        sampled_tokens=16,
        bucket_bytes=1 << 17,
        rank_tokens=48,
        matrix=128,
        copied_bytes=4 << 20,
        state_bytes=4 << 20,
        sequences=4,
        prompt_tokens=16,
        response_tokens=48,
        micro_batch_tokens=128,
        logprob_chunk_tokens=64,
        repeat=2,
        wait_s=600.0,
        folder=folder,
    )


def here(folder: Path) -> Scale:
    """What fits this machine."""
    return gpu(folder) if torch.cuda.is_available() else cpu(folder)
