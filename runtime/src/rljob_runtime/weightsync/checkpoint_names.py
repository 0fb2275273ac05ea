"""The names that checkpoints and engines know a model's parameters by, and which part of a parameter each of them is.

Transformers computes with the experts of a mixture as one parameter per layer, shape (experts, rows, columns): gate and up projections one
above the other, and down projections. Checkpoints keep a matrix per expert and projection, some types under other module names
(Mixtral's ``block_sparse_moe``), and engines load these. What corresponds to what is asked of transformers' own conversion back to the
checkpoint (``revert_weight_conversion`` of ``transformers.core_model_loading``, version 5), on tensors that hold the numbers of their rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rljob_runtime.errors import ModelError
from rljob_runtime.weightsync.packing import layer_groups

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


ROUTER_BIAS = "e_score_correction_bias"
"""Last name of the correction biases of routers (DeepSeek-V3, GLM-4-MoE): buffers that training changes and engines have to get."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPart:
    """What stands behind one name of the checkpoint."""

    parameter: str
    """Name in the model; of a buffer where it ends with ``ROUTER_BIAS``."""
    shape: tuple[int, ...]
    """Of the tensor in the checkpoint."""
    expert: int | None = None
    """Of a parameter that has all experts of a layer: whose matrix; None: the whole parameter."""
    first_row: int = 0
    """Where the tensor begins in the expert's matrix."""


def checkpoint_parts(model: PreTrainedModel) -> dict[str, NamedPart]:
    """Name in the checkpoint -> part, for every parameter and router bias of the model; in the order of the parameters.

    Args:
        model: plain and whole (without adapters, not sharded), on any device.

    Raises:
        ModelError: the checkpoint has something else than rows of the model's parameters.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    parameters = _weights(model)
    if not get_model_conversion_mapping(model, add_legacy=False):
        return {name: NamedPart(parameter=name, shape=tuple(p.shape)) for name, p in parameters.items()}
    found: dict[str, NamedPart] = {}
    for group in layer_groups(list(parameters)):
        found.update(_parts_of_layer(model, {name: parameters[name] for name in group}))
    covered: dict[str, int] = {}
    for part in found.values():
        rows = part.shape[0] if part.expert is not None else _rows(parameters[part.parameter])
        covered[part.parameter] = covered.get(part.parameter, 0) + rows
    for name, p in parameters.items():
        if covered.get(name, 0) != _rows(p):
            raise _foreign(model, f"{name} {tuple(p.shape)} is not whole in it")
    return found


def _rows(parameter: torch.Tensor) -> int:
    """Of a parameter that may have all experts of a layer; other ones count as one."""
    return parameter.shape[0] * parameter.shape[1] if parameter.ndim == 3 else 1


def is_router_bias(name: str) -> bool:
    """Whether this is the name of a router's correction bias."""
    return name.rpartition(".")[2] == ROUTER_BIAS


def _weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters and router biases."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters())
    return found | {name: buffer for name, buffer in model.named_buffers() if is_router_bias(name)}


def _parts_of_layer(model: PreTrainedModel, parameters: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, NamedPart]]:
    """(Name, part) of a layer's parameters.

    Parameters of three dimensions go through the conversion with one column that counts rows, all others as their index alone. One of
    three dimensions that comes back as it went is no mixture's, such as the kernel of a convolution.
    """
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    names, starts, probes, count = list(parameters), [], {}, 0
    for name, parameter in parameters.items():
        rows = _rows(parameter)
        probes[name] = torch.arange(count, count + rows).view((*parameter.shape[:2], 1) if parameter.ndim == 3 else (1,))
        starts.append(count)
        count += rows
    for name, tensor in revert_weight_conversion(model, probes).items():
        first, rows = int(tensor.flatten()[0]), tensor.shape[0]
        index = max(i for i, start in enumerate(starts) if start <= first)
        parameter = parameters[names[index]]
        if torch.equal(tensor, probes[names[index]]):
            yield name, NamedPart(parameter=names[index], shape=tuple(parameter.shape))
            continue
        if parameter.ndim != 3 or not torch.equal(tensor.flatten(), torch.arange(first, first + rows)):
            raise _foreign(model, f"{name} is no block of rows of {names[index]}")
        expert, first_row = divmod(first - starts[index], parameter.shape[1])
        if first_row + rows > parameter.shape[1]:
            raise _foreign(model, f"{name} has rows of several experts of {names[index]}")
        yield name, NamedPart(parameter=names[index], shape=(rows, parameter.shape[2]), expert=expert, first_row=first_row)


def _foreign(model: PreTrainedModel, how: str) -> ModelError:
    return ModelError(
        f"model type {model.config.model_type} computes with other tensors than its checkpoint has: {how}; use a model whose experts "
        "are matrices of their own in the checkpoint, such as Qwen3-MoE or Mixtral"
    )
