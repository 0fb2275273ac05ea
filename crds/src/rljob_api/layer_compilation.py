"""Which policies have their decoder layers compiled: the one rule of runtime and memory estimate."""

from __future__ import annotations

from rljob_api.vocabulary import LayerCompilation


def compiles_layers(wanted: LayerCompilation, *, on_cuda: bool, tensor_parallel_size: int, is_mixture: bool) -> bool:
    """Divided layers and mixtures of experts are not compiled: torch.compile would have to order their collectives, and experts."""
    if wanted is LayerCompilation.AUTO:
        return on_cuda and tensor_parallel_size == 1 and not is_mixture
    return wanted is LayerCompilation.ENABLED
