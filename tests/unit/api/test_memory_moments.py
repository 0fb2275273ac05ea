"""Terms of a backward pass, by hand for Qwen2.5-7B in float32 on the CPU: which moment is the fullest, and what is there."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from rljob_api import memory, planner
from rljob_api.memory.layer_activations import Attending, TreeSizes, cpu_attending, layer_bytes_per_token
from rljob_api.planning.plan import Plan
from rljob_api.v1alpha1 import RLJob
from tests.unit.api.manifests import manifest
from tests.unit.api.model_configs import CONFIGS, QWEN25_7B

PARAMETERS, HEAD, LAYER = 7_615_616_512, 152_064 * 3584, 233_057_792
ROOT = 2 * HEAD + 3584
HIDDEN, QUERY, KV, INNER, LAYERS = 3584, 3584, 512, 18_944, 28


def train_terms(ranks: int, *, layers: int = LAYERS, **training: Any) -> dict[str, int]:
    """Bytes by name of rank 0 in the phase train, of full sequences of 512 tokens, two micro-batches of 2,048 tokens a rank."""
    document = manifest()
    spec = document["spec"]
    spec["nodeGroups"] = [{"name": "cpu", "devicesPerNode": ranks + 1, "deviceResource": "cpu"}]
    spec["components"] = [
        {"name": "trainer", "role": "Trainer", "placement": {"ranks": f"0-{ranks - 1}" if ranks > 1 else "0"}},
        {"name": "engine", "role": "Rollout", "placement": {"ranks": str(ranks)}},
        {"name": "reward", "role": "Reward", "placement": {"workers": 1}},
    ]
    spec["model"] = {"path": "x", "dtype": "float32"}
    spec["rollout"] = {"promptsPerStep": 4 * ranks, "samplesPerPrompt": 2, "maxPromptTokens": 256, "maxResponseTokens": 256}
    spec["training"] = {"microBatchTokens": 2048, "gradientReduction": "EachMicroBatch", "logprobChunkTokens": 64} | training
    checked = RLJob.model_validate_json(json.dumps(document)).spec
    plan = planner.plan_or_errors(checked)
    assert isinstance(plan, Plan)
    needs = memory.process_needs(checked, plan, memory.shape_from_config(QWEN25_7B | {"num_hidden_layers": layers}))
    trainer = plan.components[0]
    return {need.name: need.num_bytes for need in needs(trainer, trainer.processes[0]).working[memory.Phase.TRAIN]}


def test_when_layers_are_large_the_fullest_moment_is_where_the_one_before_is_reduced() -> None:
    alone = train_terms(1, activationCheckpointing=True, microBatchTokens=8192)
    divided = train_terms(2, activationCheckpointing=True, microBatchTokens=8192)
    assert "logits of a chunk" not in alone
    assert alone["gathered weights"] == (ROOT + LAYER) * 4
    assert divided["gathered weights"] == (ROOT + 2 * LAYER) * 4  # the next one is gathered ahead
    assert alone["gradient of the head"] == divided["gradient of the head"] == HEAD * 4
    # own gradients and the buffer of the layer before; with gloo a copy of it and what its two threads still hold
    assert alone["gradients being reduced"] == LAYER * (4 + 4)
    assert divided["gradients being reduced"] == LAYER * (4 + 4 + 3 * 4)
    flowing = 2 * (HIDDEN + INNER) * 4
    assert alone["gradients flowing through a layer"] % flowing == 0


def test_sequence_parallelism_divides_the_inputs_of_recomputed_layers_but_of_the_first() -> None:
    settings = {"tensorParallelSize": 2, "activationCheckpointing": True, "microBatchTokens": 2048}
    whole, divided = (train_terms(2, **settings, sequenceParallel=on)["activations"] for on in (False, True))
    decoder, tree = memory.shape_from_config(QWEN25_7B).decoder, TreeSizes(prompt_tokens=256, response_tokens=256, samples=2)
    assert decoder is not None
    layer = [
        layer_bytes_per_token(decoder, tree, cpu_attending(decoder, tree), number=4, trains_all=True, tensor=2, token_parts=parts)
        for parts in (1, 2)
    ]
    assert whole == 2048 * ((LAYERS - 1) * HIDDEN * 4 + layer[0])  # the last layer is done
    assert divided == 2048 * (LAYERS * HIDDEN * 4 // 2 + layer[1])  # one as a whole and LAYERS - 2 halves
    assert layer[0] - layer[1] == (2 * (4 + 4) * HIDDEN + 8) // 2  # norms: float32 input and normalized input


def test_whole_gradients_have_the_heads_and_what_was_reduced_left_them() -> None:
    divided = train_terms(2, activationCheckpointing=True, gradientReduction="LastMicroBatch", microBatchTokens=2048)
    assert divided["whole gradients of several micro-batches"] == PARAMETERS * 4
    assert "gradient of the head" not in divided
    assert divided["gradients being reduced"] == LAYER * (4 + 3 * 4)


def test_a_model_of_one_small_layer_is_fullest_when_embedding_and_head_are_reduced() -> None:
    terms = train_terms(1, layers=1, microBatchTokens=512)
    parameters = ROOT + LAYER
    assert terms == {"gradients": parameters * 4, "gradients being reduced": ROOT * (4 + 4)}
    divided = train_terms(2, layers=1, microBatchTokens=512)
    assert divided["gradients being reduced"] == ROOT * (4 + 4 + 4) + 2 * LAYER * 4


@pytest.mark.parametrize(
    ("tree", "attending", "attention"),
    [
        (TreeSizes(prompt_tokens=64, response_tokens=64, samples=1), Attending.DIRECT, 2 * QUERY + 2 * KV),
        # of a tree of 1024 + 2 * 512 tokens: the prompt's keys and values, those of two branches for all heads, two masks
        (
            TreeSizes(prompt_tokens=1024, response_tokens=512, samples=2),
            Attending.BRANCHES,
            3 * QUERY + (2 * KV * 1024 + 2 * QUERY * 2 * 1536 + 2 * 512 * 1536) // 2048,
        ),
        (TreeSizes(prompt_tokens=8, response_tokens=2, samples=2), Attending.MASKED, 4 * QUERY + 12),
    ],
)
def test_keys_and_values_exist_as_often_as_the_attention_needs_them(tree: TreeSizes, attending: Attending, attention: int) -> None:
    decoder = memory.shape_from_config(QWEN25_7B).decoder
    assert decoder is not None
    assert cpu_attending(decoder, tree) is attending
    found = layer_bytes_per_token(decoder, tree, attending, number=4, trains_all=True, tensor=1)
    assert found == 2 * 12 * HIDDEN + 8 + 4 * (attention + 4 * INNER) + 4 * 28


def test_frozen_norms_keep_no_normalized_input_and_tensor_parallelism_divides_the_rest() -> None:
    decoder = memory.shape_from_config(QWEN25_7B).decoder
    assert decoder is not None
    tree = TreeSizes(prompt_tokens=64, response_tokens=64, samples=1)
    inner = 2 * (2 * QUERY + 2 * KV + 4 * INNER) + 4 * 28
    found = layer_bytes_per_token(decoder, tree, Attending.DIRECT, number=2, trains_all=False, tensor=2)
    assert found == 2 * 6 * HIDDEN + 8 + inner // 2


def test_context_parallelism_keeps_outputs_twice_and_repeats_the_keys_that_it_cannot_divide() -> None:
    decoder = memory.shape_from_config(QWEN25_7B).decoder
    assert decoder is not None
    tree = TreeSizes(prompt_tokens=8, response_tokens=2, samples=2)
    whole, two, seven = (
        layer_bytes_per_token(decoder, tree, Attending.DIRECT, number=2, trains_all=True, tensor=1, context=context)
        for context in (1, 2, 7)
    )
    assert two == whole + 2 * QUERY
    assert seven == whole + 2 * (QUERY + 2 * 6 * KV), "four key heads for seven processes: twenty-eight"
    masked = [
        layer_bytes_per_token(decoder, tree, Attending.MASKED, number=4, trains_all=True, tensor=1, context=context) for context in (1, 2)
    ]
    assert masked[1] == masked[0] + 4 * (QUERY + 12), "the mask of a row on each process"


def test_long_responses_to_a_short_prompt_share_nothing() -> None:
    decoder = memory.shape_from_config(QWEN25_7B).decoder
    assert decoder is not None
    assert cpu_attending(decoder, TreeSizes(prompt_tokens=1, response_tokens=8192, samples=2)) is Attending.DIRECT


def test_whether_a_prompt_is_shared_follows_from_the_projections_of_latent_attention() -> None:
    """They have fewer parameters than those of queries, keys and values as wide; the trainer (``sharing``) decides the same."""
    config = CONFIGS["deepseek_v3"] | {"num_attention_heads": 16, "num_key_value_heads": 16, "first_k_dense_replace": 1}
    config |= {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 96, "qk_rope_head_dim": 32, "v_head_dim": 128}
    decoder = memory.shape_from_config(config).decoder
    assert decoder is not None
    tree = TreeSizes(prompt_tokens=8, response_tokens=31, samples=4)
    assert cpu_attending(decoder, tree) is Attending.DIRECT
    assert cpu_attending(dataclasses.replace(decoder, latent=None), tree) is Attending.BRANCHES
