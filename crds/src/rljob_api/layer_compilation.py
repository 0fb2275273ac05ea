"""Which policies have their decoder layers compiled: the one rule of runtime and memory estimate."""

from __future__ import annotations

from rljob_api.vocabulary import LayerCompilation

SMALL_PARAMETERS = 8 * 2**20
"""Up to so many a step takes less than the compilation does in hundreds of steps."""


def compiles_layers(
    wanted: LayerCompilation, *, on_cuda: bool, tensor_parallel_size: int, is_mixture: bool, may_be_custom: bool, num_parameters: int
) -> bool:
    """Whether a policy's layers are compiled.

    Divided layers and mixtures of experts are not: torch.compile would have to order their collectives, and experts.

    Args:
        wanted: ``training.layerCompilation``.
        on_cuda: whether it computes on GPUs.
        tensor_parallel_size: processes that divide each layer.
        is_mixture: whether it has experts.
        may_be_custom: whether its code may be another's than transformers' (``model.trustRemoteCode``).
        num_parameters: of the whole model.
    """
    if wanted is not LayerCompilation.AUTO:
        return wanted is LayerCompilation.ENABLED
    return on_cuda and tensor_parallel_size == 1 and not is_mixture and not may_be_custom and num_parameters > SMALL_PARAMETERS
