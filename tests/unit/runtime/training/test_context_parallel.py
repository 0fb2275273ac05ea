"""Parts of a packed row are the row; what a model has to be like to have them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, MistralConfig, PretrainedConfig, Qwen2Config

from rljob_runtime.errors import ModelError
from rljob_runtime.routes import NO_ROUTE
from rljob_runtime.sampling_mask import SamplingMask
from rljob_runtime.training.context_parallel import check_context_parallel, part_of
from rljob_runtime.training.microbatch import MicroBatch, make_micro_batches
from rljob_runtime.training.model import layer_costs, prepare_attention
from rljob_runtime.training.sharing import LayerCosts

SMALL: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 1, "num_key_value_heads": 2, "vocab_size": 40}
COSTS = LayerCosts(
    linear_flops=1e4, attention_flops=1.0, call_flops=0.0, by_blocks=False, overhead_tokens=0.0, may_pack=True, may_share=True
)
"""Of a model for which sharing a prompt always pays."""


def micro_batches(lengths: list[int], budget: int) -> list[MicroBatch]:
    """Sequences in pairs that share their first two tokens, with a sampling mask at some places, and routes."""
    total = sum(lengths)
    tokens = np.arange(1, total + 1, dtype=np.int32)
    begins = np.cumsum(lengths) - lengths
    wanted = np.ones(total, dtype=np.float32)
    for index, begin in enumerate(begins):
        tokens[begin : begin + 2] = 1000 + index // 2
        wanted[begin : begin + 2] = 0.0
    counts = (np.arange(total, dtype=np.int32) % 3) * (wanted != 0)
    mask = SamplingMask(token_ids=np.arange(counts.sum(), dtype=np.int32), counts=counts.astype(np.int32))
    routes = np.tile(tokens[:, None, None].astype(np.int16) % 5, (1, 2, 2))
    return make_micro_batches(tokens, np.array(lengths, dtype=np.int32), wanted, budget, COSTS, mask, routes)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.lists(st.integers(3, 12), min_size=1, max_size=8), st.integers(1, 60), st.integers(2, 4))
def test_parts_of_a_row_are_the_row(lengths: list[int], budget: int, size: int) -> None:
    for micro in micro_batches(lengths, budget):
        parts = [part_of(micro, rank, size) for rank in range(size)]
        width = micro.input_ids.shape[1]
        assert {part.micro.input_ids.shape for part in parts} == {(1, -(-width // size))}
        joined = np.concatenate([part.micro.input_ids for part in parts], axis=1)
        assert np.array_equal(joined[:, :width], micro.input_ids)
        assert sorted(np.concatenate([part.own for part in parts])) == list(range(micro.positions.size))
        assert micro.packed is not None
        assert micro.possible_rows is not None
        assert micro.possible_ids is not None
        assert micro.routes is not None
        positions = [part.micro.packed.position_ids for part in parts if part.micro.packed is not None]
        assert np.array_equal(np.concatenate(positions, axis=1)[:, :width], micro.packed.position_ids)
        routes = np.concatenate([part.micro.routes for part in parts if part.micro.routes is not None])
        assert np.array_equal(routes[:width], micro.routes)
        assert (routes[width:] == NO_ROUTE).all()
        for rank, part in enumerate(parts):
            own, begin = part.micro, rank * part.micro.input_ids.shape[1]
            assert part.num_wanted == micro.positions.size
            assert np.array_equal(own.positions + begin, micro.positions[part.own])
            assert np.array_equal(own.targets, micro.targets[part.own])
            assert np.array_equal(own.sources, micro.sources[part.own])
            assert own.possible_rows is not None
            for row, whole in enumerate(part.own.tolist()):
                assert own.possible_ids is not None
                assert np.array_equal(own.possible_ids[own.possible_rows == row], micro.possible_ids[micro.possible_rows == whole])


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_attends_over_the_whole_row_and_nobody_sees_its_padding(size: int) -> None:
    (micro,) = micro_batches([5, 8, 6, 3, 7], 100)
    assert micro.packed is not None
    width = micro.input_ids.shape[1]
    whole = -(-width // size) * size
    for rank in range(size):
        row = part_of(micro, rank, size).micro.packed
        assert row is not None
        assert sum(part.num_tokens for part in row.parts) == row.until.size == whole
        assert np.array_equal(row.until[:width], micro.packed.until)
        assert (row.until[:width] <= width).all()
        assert (row.until[width:] == whole).all()


@pytest.mark.parametrize(
    ("config", "tp", "message"),
    [
        (Qwen2Config(**SMALL, num_attention_heads=4), 2, r"context_parallel_size \* tensor_parallel_size is 3 \* 2 but .*heads 4"),
        (MistralConfig(**SMALL, num_attention_heads=4, sliding_window=8), 1, "model type mistral with attention sdpa does not compute"),
        (
            Qwen2Config(**SMALL, num_attention_heads=4, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}),
            1,
            "rope_type is dynamic",
        ),
    ],
    ids=["heads", "sliding window", "rope"],
)
def test_a_model_whose_sequences_cannot_be_divided_is_refused(config: PretrainedConfig, tp: int, message: str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    prepare_attention(model)
    costs = layer_costs(model, torch.device("cpu"))
    with pytest.raises(ModelError, match=message):
        check_context_parallel(model, costs, cp_size=3, tp_size=tp)
    check_context_parallel(model, costs, cp_size=1, tp_size=tp)
