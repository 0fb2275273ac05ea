"""Real vLLM on CPU says which experts it chose, and the trainer that replays them is nearer to its log-probs.

In bfloat16, where a rounding decides between experts that are nearly as likely.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from rljob_runtime.engine.request_checks import RequestLimits
from rljob_runtime.errors import DataError, ModelError, RuntimeFault
from rljob_runtime.overlap.arrange import StepSamples, arrange
from rljob_runtime.overlap.buffer import Group
from rljob_runtime.overlap.samples import Sample
from rljob_runtime.records import Completion, GenerationRequest, RewardResult, Sampling, Segment, Trajectory
from rljob_runtime.routes import NO_ROUTE
from rljob_runtime.training.microbatch import make_micro_batches
from rljob_runtime.training.model import layer_costs
from rljob_runtime.training.step import run_micro_batch
from tests.support.engine_contract import config_for, drain
from tests.support.records import ids, make_prompt
from tests.support.trainers import whole_policy
from tests.support.vllm_engine import running

if TYPE_CHECKING:
    from rljob_runtime.engine.vllm.response import Response

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
        float(np.abs(logprobs(model, step, replays=replays) - step.behavior_logprobs)[trained].mean()) for replays in (True, False)
    )
    assert with_replay < 0.7 * without, f"mean distance of log-probs to the engine's: {with_replay:.4f} with replay, {without:.4f} without"


def response(prompt_tokens: int, known: int = 0) -> Response:
    from rljob_runtime.engine.vllm.response import Response

    asked = GenerationRequest(
        request_id="r", prompt_token_ids=ids(*range(prompt_tokens)), sampling=SAMPLING, seed=0, num_routed_before=known
    )
    return Response.of(asked, None)


def routes(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int8).reshape(-1, 1, 1)


def found(made: Response) -> list[int] | None:
    segment = made.completion("r", "abort").segment
    return None if segment.routes is None else segment.routes.reshape(-1).tolist()


def test_tokens_that_are_computed_again_keep_their_first_routes() -> None:
    made = response(prompt_tokens=3, known=1)
    made.take_routes(routes(0, 1, 2), 0)
    assert found(made) is None  # no token was sampled
    made.token_ids, made.logprobs = [7], [-1.0]
    assert found(made) == [1, 2]
    made.take_routes(routes(3), 3)
    made.take_routes(routes(10, 11, 12, 13, 4), 0)  # preempted, and computed again
    made.token_ids, made.logprobs = [7, 8, 9], [-1.0] * 3
    assert found(made) == [1, 2, 3, 4]
    made.token_ids, made.logprobs = [7, 8, 9, 6, 5], [-1.0] * 5  # a thread that hangs had sampled more
    assert made.whole().token_ids == [7, 8, 9]
    assert found(made.whole()) == [1, 2, 3, 4]
    with pytest.raises(RuntimeFault, match="from place 7 on, and routes of 2 before that are missing"):
        made.take_routes(routes(0), 7)


def test_pieces_that_vllm_returns_on_accelerators_are_one() -> None:
    from vllm.v1.engine import EngineCoreOutput

    from rljob_runtime.engine.vllm.response import Response
    from rljob_runtime.engine.vllm.routes import ReturnedRoutes

    made = {"r": response(prompt_tokens=3), "silent": Response(prompt_tokens=2)}
    for pieces in ({"r": [200, 1, 2], "silent": [9, 9]}, {"r": None, "gone": [5]}, {"r": [3]}):
        outputs = [
            EngineCoreOutput(request_id=name, new_token_ids=[], routed_experts=None if of is None else np.uint8(of).reshape(-1, 1, 1))
            for name, of in pieces.items()
        ]
        ReturnedRoutes(np.int16).hand_out(outputs, made)
    made["r"].token_ids, made["r"].logprobs = [7, 8], [-1.0] * 2
    assert found(made["r"]) == [200, 1, 2, 3]
    made["silent"].token_ids, made["silent"].logprobs = [7], [-1.0]
    assert found(made["silent"]) is None  # did not ask


def test_vllm_is_asked_where_it_can_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    from rljob_runtime.engine.vllm.engine_args import engine_args

    CONFIG.save_pretrained(tmp_path)
    config = replace(config_for(str(tmp_path)), max_model_len=4096, returns_routes=True)
    on_cpu = engine_args(config)
    assert (on_cpu.enable_return_routed_experts, on_cpu.enable_prefix_caching) == (False, False)
    with pytest.raises(ModelError, match="routes are read in the engine's own process; use one"):
        engine_args(replace(config, tensor_parallel_size=2))
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    elsewhere = engine_args(replace(config, tensor_parallel_size=2))
    assert (elsewhere.enable_return_routed_experts, elsewhere.enable_prefix_caching) == (True, True)


def test_a_draft_keeps_its_weights_while_those_of_the_model_are_discarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No update brings them, and vLLM's sleep of level 2 drops all that it is not asked to keep."""
    from vllm.platforms import current_platform

    from rljob_runtime.engine.vllm.engine_args import engine_args

    CONFIG.save_pretrained(tmp_path)
    config = replace(config_for(str(tmp_path)), max_model_len=4096)
    assert engine_args(replace(config, release="discard")).sleep_preserve_parameter_names == []
    monkeypatch.setattr(current_platform, "is_cpu", lambda: False)
    kept = {
        release: engine_args(replace(config, release=release)).sleep_preserve_parameter_names for release in ("never", "discard", "copy")
    }
    assert kept == {"never": [], "discard": ["draft.*"], "copy": []}


def test_routes_are_not_asked_of_an_engine_that_has_none() -> None:
    limits = RequestLimits(max_model_len=64, vocab_size=VOCAB, finds_texts=False)
    asked = [GenerationRequest(request_id="r", prompt_token_ids=ids(1), sampling=SAMPLING, seed=0)]
    replace(limits, returns_routes=True).check(asked)
    with pytest.raises(DataError, match="request r: asks for routes, and the engine was started without returns_routes"):
        limits.check(asked)
