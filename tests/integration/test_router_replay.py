"""Real vLLM on CPU says which experts it chose, and the trainer that replays them is nearer to its log-probs.

In bfloat16, where a rounding decides between experts that are nearly as likely.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from rljob_runtime.overlap.arrange import StepSamples, arrange
from rljob_runtime.overlap.buffer import Group
from rljob_runtime.overlap.samples import Sample
from rljob_runtime.records import Completion, RewardResult, Sampling, Segment, Trajectory
from rljob_runtime.routes import NO_ROUTE
from rljob_runtime.training.microbatch import make_micro_batches
from rljob_runtime.training.model import layer_costs
from rljob_runtime.training.step import run_micro_batch
from tests.support.engine_contract import config_for, drain
from tests.support.records import ids, make_prompt
from tests.support.trainers import whole_policy
from tests.support.vllm_engine import running

VOCAB, SAMPLES, TOKENS = 60, 6, 24
CONFIG = Qwen3MoeConfig(
    **{"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32},
    **{"max_position_embeddings": 512, "initializer_range": 0.2, "intermediate_size": 96, "moe_intermediate_size": 64},
    **{"num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True, "mlp_only_layers": [1]},
)
SAMPLING = Sampling(max_tokens=TOKENS, returns_routes=True)
PROMPTS = [tuple(range(3, 40)), (41, 7, 12, 50)]
OWNER: Any = object()


def sampled(folder: Path) -> list[Group]:
    """Responses of real vLLM; the last of each group in two parts, as a partial rollout, and with an observation and a further turn."""
    samples = [
        Sample(owner=OWNER, group_id=group, index=index, prompt=make_prompt(group, prompt))
        for group, prompt in enumerate(PROMPTS)
        for index in range(SAMPLES)
    ]
    with running(replace(config_for(str(folder)), dtype="bfloat16", returns_routes=True)) as engine:
        cut = replace(SAMPLING, max_tokens=7)
        engine.submit([s.request(cut if s.index == SAMPLES - 1 else SAMPLING, 1) for s in samples])
        first = drain(engine, len(samples))
        found: dict[str, Completion] = {}
        for sample in samples:
            part = first[sample.request_id]
            whole = sample.take(replace(part, finish_reason="abort") if sample.index == SAMPLES - 1 else part)
            if whole is not None:
                found[sample.key] = whole
        parted = [sample for sample in samples if sample.index == SAMPLES - 1]
        engine.submit([sample.request(SAMPLING, 1) for sample in parted])
        rest = drain(engine, len(parted))
        found |= {s.key: whole for s in parted if (whole := s.take(rest[s.request_id])) is not None}
        observation = ids(9, 9, 8)
        turns = []
        for sample in parted:
            so_far = np.concatenate([sample.prompt.token_ids, found[sample.key].segment.token_ids, observation])
            known = so_far.size - observation.size - 1
            prompt = replace(sample.prompt, token_ids=so_far)
            turns.append(Sample(owner=OWNER, group_id=sample.group_id, index=0, prompt=prompt, suffix=".1", num_routed=known))
        engine.submit([turn.request(SAMPLING, 1) for turn in turns])
        second = drain(engine, len(turns))
    seen = Segment(token_ids=observation, sampled=False)
    later = {s.key: (seen, second[turn.request_id].segment) for s, turn in zip(parted, turns, strict=True)}
    return [
        Group(group_id=group, trajectories=tuple(trajectory(s, found, later) for s in samples if s.group_id == group), failed_samples=0)
        for group in range(len(PROMPTS))
    ]


def trajectory(sample: Sample, found: dict[str, Completion], later: dict[str, tuple[Segment, ...]]) -> Trajectory:
    return Trajectory(
        group_id=sample.group_id,
        sample_index=sample.index,
        prompt=sample.prompt,
        segments=(found[sample.key].segment, *later.get(sample.key, ())),
        finish_reason="length",
        reward=RewardResult(sample_id=sample.key, score=0.0),
    )


def logprobs(model: PreTrainedModel, step: StepSamples, *, replays: bool) -> np.ndarray:
    """Of the trainer, shape (T,); its process group is left out, for vLLM had one of its own here."""
    costs = layer_costs(model, torch.device("cpu"))
    routes = step.routes if replays else None
    found = np.zeros(step.token_ids.shape, dtype=np.float32)
    for micro in make_micro_batches(step.token_ids, step.lengths, step.response_mask, 400, costs, None, routes):
        with torch.no_grad():
            found[micro.sources] = run_micro_batch(model, micro, 1.0, 64).numpy()
    return found


def test_replayed_routes_bring_the_trainer_nearer_to_the_engine(tmp_path: Path) -> None:
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(CONFIG).to(torch.bfloat16).save_pretrained(tmp_path)
    step = arrange(sampled(tmp_path), 0)
    assert step.routes is not None
    assert step.routes.dtype == np.int8
    last = np.zeros(step.token_ids.size, dtype=np.bool_)
    last[step.ends - 1] = True
    np.testing.assert_array_equal((step.routes == NO_ROUTE).all(axis=(1, 2)), last)  # all but what was never computed
    model = whole_policy(tmp_path, dtype="bfloat16", trainable=False, replays_routes=True)
    trained = step.response_mask > 0
    with_replay, without = (
        float(np.abs(logprobs(model, step, replays=replays) - step.behaviour_logprobs)[trained].mean()) for replays in (True, False)
    )
    assert with_replay < 0.7 * without, f"mean distance of log-probs to the engine's: {with_replay:.4f} with replay, {without:.4f} without"
