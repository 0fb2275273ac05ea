"""What of a policy can leave its device: FSDP2 shards (float32 masters, frozen weights), AdamW's states, gradients, buffers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rljob_runtime.offload.slabs import HostSlabs
from rljob_runtime.offload.states import StateKind
from rljob_runtime.offload.store import StateStore

WEIGHTS = frozenset({StateKind.PARAMS, StateKind.OTHER})
"""Needed for a forward, and to hand weights out."""

TRAINED_STATE = WEIGHTS | {StateKind.GRADS, StateKind.OPTIMIZER}
"""Needed for an update, and for a checkpoint."""


def policy_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device, host_budget_bytes: int | None, name: str
) -> StateStore:
    """A store that knows all of a sharded policy's state; takes no memory yet.

    Everything is listed again at each switch, because a checkpoint's load replaces tensors.

    Args:
        model: after ``fully_shard``, whose shards lie in storages of their own.
        optimizer: None for a frozen policy.
        device: of the model.
        host_budget_bytes: most host memory for offloaded state; None sets no limit.
        name: of the worker, for messages.
    """
    store = StateStore(device, HostSlabs(pinned=device.type == "cuda", budget_bytes=host_budget_bytes), name=name)
    store.register_provider(StateKind.PARAMS, model.named_parameters)
    store.register_provider(StateKind.OTHER, model.named_buffers)
    if optimizer is not None:
        store.register_dropped(StateKind.GRADS, lambda: _gradients(model), lambda: model.zero_grad(set_to_none=True))
        store.register_provider(StateKind.OPTIMIZER, lambda: _optimizer_states(optimizer))
    return store


def prepare_offload(model: nn.Module) -> None:
    """Free gathered parameters, which a forward without backward or a failed step leaves behind."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _gradients(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            yield f"{name}.grad", parameter.grad


def _optimizer_states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for index, state in enumerate(optimizer.state.values()):
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                yield f"{key} of parameter {index}", value
