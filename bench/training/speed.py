"""Tokens per second of processor time of each side, in turns within one process and one thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from bench.measure import free_port
from bench.training.rows import CASES, Case, make_batch
from bench.training.sides import PlainSide, RLJobSide, Side, TrlSide

VOCAB = 1024
TOKEN_BUDGET = 4096
NORM_TOLERANCE = 1e-4
"""Relative difference of gradient norms that float32 explains; more, and the sides do not do the same work."""
SIZES: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 6},
    **{"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048, "tie_word_embeddings": True},
}
MODELS: Mapping[str, PretrainedConfig] = {
    "dense (Qwen3)": Qwen3Config(**SIZES),
    "mixture (Qwen3-MoE, 2 of 8 experts)": Qwen3MoeConfig(**SIZES, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256),
}


class UnequalWorkError(RuntimeError):
    """Raised when the sides compute different gradients."""


def measure(folder: Path, rounds: int, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """All models and cases.

    Args:
        folder: for models and what TRL writes.
        rounds: measured, each side once in each; one more before them warms up.
        tell: called with what is measured now.

    Raises:
        UnequalWorkError: gradients of the sides differ.
    """
    found = []
    for name, config in MODELS.items():
        path = folder / config.model_type
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        num_parameters = model.num_parameters()
        model.save_pretrained(path)
        ours = RLJobSide(path, TOKEN_BUDGET, free_port())
        try:
            sides: list[Side] = [ours, TrlSide(path, TOKEN_BUDGET, folder / "trl"), PlainSide(path, TOKEN_BUDGET)]
            for case in CASES:
                tell(f"{name}, {case.name}")
                found.append({"model": name, "parameters": num_parameters, **in_turns(sides, case, rounds)})
        finally:
            ours.worker.shutdown()
    return found


def in_turns(sides: Sequence[Side], case: Case, rounds: int) -> dict[str, Any]:
    """Tokens a second of each side in each round; the side that begins changes with the round."""
    rates: dict[str, list[float]] = {side.name: [] for side in sides}
    tokens = []
    for number in range(rounds + 1):
        batch = make_batch(case, VOCAB, seed=number)
        norms = {}
        for side in (*sides[number % len(sides) :], *sides[: number % len(sides)]):
            given = side.take(batch)
            started_s = time.process_time()
            side.accumulate(given)
            used_s = time.process_time() - started_s
            norms[side.name] = side.norm_and_clear()
            if number > 0:
                rates[side.name].append(batch.token_ids.size / used_s)
        if max(norms.values()) > (1 + NORM_TOLERANCE) * min(norms.values()):
            raise UnequalWorkError(f"{case.name}: gradient norms are {norms}; the sides do not compute the same loss")
        tokens.append(batch.token_ids.size)
    limits = {"token_budget": TOKEN_BUDGET, "norm_tolerance": NORM_TOLERANCE}
    return {"case": case.name, "lengths": asdict(case), "tokens": tokens[1:], "tokens_per_cpu_s": rates, **limits}
