"""Make the quickstart model: tokenizer, small Qwen2 or Qwen3-MoE, warm start, measured pass rate, all in one Hugging Face folder."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rljob_runtime.data.reasoning_gym_source import create_task
from rljob_runtime.errors import ModelError
from rljob_runtime.tiny.folder import existing, torch_threads, write
from rljob_runtime.tiny.settings import QUICKSTART, TinySize, TinySummary, TinyTask
from rljob_runtime.tiny.tokenizer import build_tokenizer
from rljob_runtime.tiny.warmstart import Example, Progress, WarmStartConfig, pass_rate, warm_start

_FORMAT = 2
_NUM_EXAMPLES = 12_000
_NUM_MEASURED = 512

_WARM_STARTED = (TinySize.TINY, TinySize.MIXTURE)
_SHAPES: dict[TinySize, dict[str, int]] = {
    TinySize.TINY: {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4},
    TinySize.FRESH: {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4},
    TinySize.MIXTURE: {
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "moe_intermediate_size": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    TinySize.TEN_MILLION: {"hidden_size": 320, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 10},
}


def make(
    out_folder: Path,
    *,
    task: TinyTask = QUICKSTART,
    size: TinySize = TinySize.TINY,
    seed: int = 0,
    target_pass: tuple[float, float] = (0.2, 0.4),
    config: WarmStartConfig | None = None,
    progress: Progress | None = None,
    num_threads: int | None = None,
) -> TinySummary:
    """See ``rljob_runtime.tiny.make_tiny_model``; ``config`` overrides the warm start (sizes ``tiny`` and ``mixture`` have one)."""
    low, high = target_pass
    if not 0.0 <= low < high <= 1.0:
        raise ModelError(f"tiny model: target_pass is {target_pass}; it must be two shares, 0 <= low < high <= 1")
    if config is None and size in _WARM_STARTED:
        middle, quarter = (low + high) / 2, (high - low) / 4
        config = WarmStartConfig(wrong_share=1.0 - middle, aim=(middle - quarter, middle + quarter))
    fingerprint = _fingerprint(task, size, seed, target_pass, config)
    finished = existing(out_folder, fingerprint)
    if finished is not None:
        return finished
    started = time.perf_counter()
    with torch_threads(num_threads), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        examples = _examples(task, seed=seed, size=_NUM_EXAMPLES)
        tokenizer = build_tokenizer(e.prompt for e in examples)
        model = tiny_model(size, tokenizer)
        report = None if config is None else warm_start(model, tokenizer, examples, config, seed=seed, progress=progress)
        # Some entries are alike, so that more are generated than measured.
        measured = _examples(task, seed=seed + 1_000_003, size=2 * _NUM_MEASURED)[:_NUM_MEASURED]
        sampled = pass_rate(model, tokenizer, measured, temperature=1.0, seed=seed)
        greedy = pass_rate(model, tokenizer, measured, temperature=0.0, seed=seed)
    if config is not None and not low <= sampled <= high:
        raise ModelError(
            f"tiny model: after the warm start sampling solves {sampled:.3f} of {len(measured)} prompts (greedy {greedy:.3f}), "
            f"wanted {low:g} to {high:g}; "
            f"train longer (max_rule_steps is {config.max_rule_steps}), take another seed (now {seed}) or widen target_pass"
        )
    summary = TinySummary(
        folder=out_folder,
        reused=False,
        fingerprint=fingerprint,
        task=task.task,
        seed=seed,
        num_parameters=sum(p.numel() for p in model.parameters()),
        vocab_size=len(tokenizer),
        sampled_pass_rate=sampled,
        greedy_pass_rate=greedy,
        num_measured=len(measured),
        rule_steps=0 if report is None else report.rule_steps,
        noise_steps=0 if report is None else report.noise_steps,
        elapsed_s=time.perf_counter() - started,
    )
    described = {"params": dict(task.params), "warm_start": None if report is None else asdict(report)}
    write(out_folder, model, tokenizer, summary, described)
    return summary


def tiny_model(size: TinySize, tokenizer: Qwen2Tokenizer) -> Qwen2ForCausalLM | Qwen3MoeForCausalLM:
    """A model of this size with random weights, sampled with torch's generator."""
    config = model_config(size, tokenizer)
    return Qwen3MoeForCausalLM(config) if isinstance(config, Qwen3MoeConfig) else Qwen2ForCausalLM(config)


def model_config(size: TinySize, tokenizer: Qwen2Tokenizer) -> Qwen2Config | Qwen3MoeConfig:
    """Of a model of this size with this vocabulary."""
    shape = _SHAPES[size]
    common: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        **shape,
        # Two key-value heads allow tensor parallelism over two; heads of 32 are the least CPU engines take.
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        # Prompts are short: a small base tells neighboring positions apart from the first step on.
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "tie_word_embeddings": True,
        # About hidden_size ** -0.5: with the usual 0.02 a model this narrow needs several times the steps.
        "initializer_range": round(shape["hidden_size"] ** -0.5, 3),
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    if size is TinySize.MIXTURE:
        return Qwen3MoeConfig(**common, head_dim=32, norm_topk_prob=True)
    return Qwen2Config(**common)


def _examples(task: TinyTask, *, seed: int, size: int) -> list[Example]:
    """Return up to ``size`` different prompts. Raises ModelError when answers are not whole numbers, DataError for a bad task."""
    dataset = create_task(task.task, task.params, seed=seed, size=size)
    found: dict[str, int] = {}
    for index in range(size):
        entry = dataset[index]
        try:
            found[str(entry["question"])] = int(str(entry["answer"]))
        except ValueError as error:
            raise ModelError(
                f"tiny model: task {task.task!r} has the answer {entry['answer']!r}; "
                f"the warm start needs whole numbers, choose an arithmetic task"
            ) from error
    return [Example(prompt=prompt, answer=answer) for prompt, answer in found.items()]


def _fingerprint(task: TinyTask, size: TinySize, seed: int, target_pass: tuple[float, float], config: WarmStartConfig | None) -> str:
    described = [
        _FORMAT,
        task.task,
        dict(task.params),
        _SHAPES[size],
        seed,
        list(target_pass),
        None if config is None else asdict(config),
        torch.__version__,
        transformers.__version__,
    ]
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]
