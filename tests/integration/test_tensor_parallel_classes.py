"""Every other class of models that tensor parallelism divides: two ranks against one, and one against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rljob_api.rules.model import EXPERT_COUNTS, TENSOR_PARALLEL_MODELS, UNDIVIDED_MODELS
from rljob_runtime.training.config import LoraConfig
from rljob_runtime.training.tensor_plan import IN_LAYERS
from rljob_runtime.training.worker import PolicyWorker
from tests.integration import test_tensor_parallel as layouts
from tests.integration.rank_processes import (
    fork_ranks,
    join,
    largest_difference,
    packed_weights,
    random_batch,
    read,
    run_script,
    write,
)
from tests.support.rounding import assert_gradients_equal

pytestmark = pytest.mark.slow

SIZES = layouts.SMALL | {"vocab_size": 62, "head_dim": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
NAMES = tuple(sorted(set(TENSOR_PARALLEL_MODELS) - layouts.MODELS.keys()))
ADAPTED = ("cohere", "glm4", "olmo2", "phi3")
"""Also trained with adapters, which the other classes have on the same kinds of layers."""
OWN: dict[str, dict[str, Any]] = {
    "cohere": {"use_qk_norm": True, "logit_scale": 0.5},  # norms with a weight for each head; attention and MLP of one norm
    "cohere2": {"logit_scale": 2.0, "sliding_window": 6},
    "gemma2": {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0},
    "granite": {"logits_scaling": 2.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3},
    "hyperclovax": {"logits_scaling": 0.5, "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "use_post_norm": True},
    "minicpm3": {
        **{"q_lora_rank": 24, "kv_lora_rank": 20, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 32, "head_dim": 8},
        **{"num_key_value_heads": 4, "dim_model_base": 64, "scale_emb": 2.0},  # logits are divided by hidden_size / dim_model_base
    },
    "vaultgemma": {"final_logit_softcapping": 3.0, "attn_logit_softcapping": None},
}
"""Settings of a class that its defaults leave out of the computation."""
ATTENTION = {"gemma2": "eager"}
"""What computes attention, where it is not ``sdpa``."""
MODELS: dict[str, PretrainedConfig] = {name: AutoConfig.for_model(name, **SIZES | OWN.get(name, {})) for name in NAMES}
LAYOUTS = {name: [(1, 1, 1), (1, 2, 1)] for name in NAMES}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of all results: ``model/DPxTP/result.npz`` and others."""
    folder = layouts.make_folders(tmp_path_factory.mktemp("classes"), MODELS, LAYOUTS)
    run_script(__file__, folder)
    return folder


@pytest.mark.parametrize("layout", ["1x2", "1x2" + layouts.SEQUENCE])
@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_equal_one(base: Path, name: str, layout: str) -> None:
    layouts.check_gradients(base, name, layout)
    layouts.check_step(base, name, layout)
    layouts.check_weights(base, name, layout)


@pytest.mark.parametrize("name", ADAPTED)
def test_adapters_of_two_ranks_equal_those_of_one(base: Path, name: str) -> None:
    one, two = (read(base / name, f"adapters {tp}") for tp in (1, 2))
    gradients = {key: array for key, array in one.items() if key.startswith("grad/")}
    norm = np.sqrt(sum(np.square(array, dtype=np.float64).sum() for array in gradients.values()))
    assert min(float(np.abs(array).max()) for array in gradients.values()) > 1e-5 * norm
    assert_gradients_equal({key: array for key, array in two.items() if key.startswith("grad/")}, gradients)
    packed = {key: array for key, array in one.items() if key.startswith("packed/")}
    assert largest_difference(packed, {key: two[key] for key in packed}) < 1e-6


def test_every_dense_class_with_a_plan_is_divided_or_says_why_not() -> None:
    """Of those that vLLM serves."""
    from vllm.model_executor.models.registry import ModelRegistry  # slow to import, and the ranks need none of it

    served, found = set(ModelRegistry.get_supported_archs()), set()
    for name, classes in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        config_class = CONFIG_MAPPING[name] if name in CONFIG_MAPPING else None
        plan = getattr(config_class, "base_model_tp_plan", None) or {}
        own = (classes,) if isinstance(classes, str) else classes
        if config_class is None or not set(own) & served or not any(IN_LAYERS in key for key in plan):
            continue
        config = config_class()
        if not any((getattr(config, key, None) or 0) > 1 for key in EXPERT_COUNTS):
            found.add(name)
    assert found >= {"llama", "phi3", "minicpm3"}
    assert found - set(TENSOR_PARALLEL_MODELS) == UNDIVIDED_MODELS.keys()


def test_one_rank_equals_transformers(base: Path) -> None:
    layouts.check_one_rank(base, MODELS, ATTENTION)


def main(rank: int, ports: list[int], base: Path) -> None:
    """All classes in turn, as far as they need this rank."""
    for name in NAMES:
        attention = ATTENTION.get(name, "sdpa")
        for tp, divided in ((1, False), (2, False), (2, True)):
            port = ports.pop()
            if rank < tp:
                settings: dict[str, Any] = {"attn_implementation": attention, "sequence_parallel": divided}
                layouts.run_layout(rank, port, base, name, MODELS[name].vocab_size, 1, tp, 1, **settings)

    for name in ADAPTED:
        for tp in (1, 2):
            port = ports.pop()
            if rank < tp:
                run_adapters(rank, port, base, name, tp)


def run_adapters(rank: int, port: int, base: Path, name: str, tp: int) -> None:
    """Gradients of adapters after a step, which makes all of them count, and merged weights; two ranks divide tokens."""
    vocab, lora = MODELS[name].vocab_size, LoraConfig(rank=3, alpha=6.0)
    config = layouts.settings(base / name / "model", tp, sequence_parallel=tp > 1, lora=lora)
    worker = PolicyWorker(config, rank, tp)
    join(worker, port)
    worker.train_step([random_batch(vocab)], step=0)
    arrays = {key: array for key, array in layouts.gradients_and_norms(worker, 1, 0, vocab).items() if key.startswith("grad/")}
    arrays |= {f"packed/{key}": array for key, array in packed_weights(worker).items()}
    worker.shutdown()
    if rank == 0:
        write(base / name, f"adapters {tp}", arrays)


if __name__ == "__main__":
    fork_ranks(2, 3 * len(NAMES) + 2 * len(ADAPTED), main)
