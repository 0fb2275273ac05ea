"""Which policies have their layers compiled."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.layer_compilation import SMALL_PARAMETERS, compiles_layers
from rljob_api.vocabulary import LayerCompilation

LARGE_DENSE_ON_A_GPU: dict[str, Any] = {
    "on_cuda": True,
    "tensor_parallel_size": 1,
    "is_mixture": False,
    "may_be_custom": False,
    "num_parameters": SMALL_PARAMETERS + 1,
}


def test_auto_compiles_large_dense_models_on_gpus() -> None:
    assert compiles_layers(LayerCompilation.AUTO, **LARGE_DENSE_ON_A_GPU)


@pytest.mark.parametrize(
    "otherwise",
    [
        {"on_cuda": False},
        {"tensor_parallel_size": 2},
        {"is_mixture": True},
        {"may_be_custom": True},
        {"num_parameters": SMALL_PARAMETERS},
    ],
    ids=lambda otherwise: next(iter(otherwise)),
)
def test_auto_leaves_others_alone(otherwise: dict[str, Any]) -> None:
    assert not compiles_layers(LayerCompilation.AUTO, **LARGE_DENSE_ON_A_GPU | otherwise)


def test_who_says_so_gets_it() -> None:
    tiny_on_a_cpu = LARGE_DENSE_ON_A_GPU | {"on_cuda": False, "num_parameters": 1, "may_be_custom": True}
    assert compiles_layers(LayerCompilation.ENABLED, **tiny_on_a_cpu)
    assert not compiles_layers(LayerCompilation.DISABLED, **LARGE_DENSE_ON_A_GPU)
