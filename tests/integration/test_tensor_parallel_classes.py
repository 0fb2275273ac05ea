"""Every other class of models that tensor parallelism divides: two ranks against one, and one against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig

from rljob_api.rules.model import TENSOR_PARALLEL_MODELS
from tests.integration import test_tensor_parallel as layouts
from tests.integration.rank_processes import fork_ranks, run_script

pytestmark = pytest.mark.slow

SIZES = layouts.SMALL | {"vocab_size": 62, "head_dim": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
NAMES = tuple(sorted(set(TENSOR_PARALLEL_MODELS) - layouts.MODELS.keys()))
OWN: dict[str, dict[str, Any]] = {
    "cohere": {"use_qk_norm": True, "logit_scale": 0.5},  # norms with a weight for each head; attention and MLP of one norm
    "cohere2": {"logit_scale": 2.0, "sliding_window": 6},
    "gemma2": {"final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0},
    "granite": {"logits_scaling": 2.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "attention_multiplier": 0.3},
    "hyperclovax": {"logits_scaling": 0.5, "embedding_multiplier": 3.0, "residual_multiplier": 0.7, "use_post_norm": True},
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
    layouts.check_gradients(base, name, layout, of_their_norm=True)
    layouts.check_step(base, name, layout)
    layouts.check_weights(base, name, layout)


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


if __name__ == "__main__":
    fork_ranks(2, 3 * len(NAMES), main)
