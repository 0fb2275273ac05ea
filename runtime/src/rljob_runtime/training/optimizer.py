"""AdamW with a learning-rate schedule and global gradient clipping over FSDP2 shards."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from rljob_api.vocabulary import OptimizerStateDType, Schedule
from rljob_runtime.training.bfloat16_adamw import BFloat16AdamW
from rljob_runtime.training.config import PolicyConfig
from rljob_runtime.training.parallel import has_disjoint_shards, layout_of, local_tensor, sum_partial_gradients


def build_optimizer(model: nn.Module, config: PolicyConfig) -> torch.optim.AdamW:
    """AdamW of the trained parameters, fused, with all of its state allocated at once, in ``config.optimizer_state_dtype``.

    Early state has two uses: memory is taken at start rather than in the first step, and a checkpoint made before the first update is
    complete (torch's own lazy initialization would leave its step counter at 1).
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    decayed = [p for p in trained if p.ndim >= 2]
    plain = [p for p in trained if p.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": config.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if config.optimizer_state_dtype is OptimizerStateDType.BFLOAT16:
        return BFloat16AdamW(groups, betas=config.betas, eps=config.eps, seed=config.seed)
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=config.betas, eps=config.eps, fused=True)
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for state in optimizer.state.values():
        state["step"].zero_()
    optimizer.zero_grad(set_to_none=True)
    return optimizer


def learning_rate_at(config: PolicyConfig, step: int) -> float:
    """Learning rate of training step ``step``.

    Args:
        config: schedule and its lengths.
        step: finished training steps before this one: 0 for the first. All updates of a step share its rate.

    Returns:
        ``learning_rate * min(1, (step + 1) / warmup_steps)`` while warming up, then the schedule's share of the way from
        ``min_learning_rate`` to ``learning_rate`` (cosine annealing as in arXiv 1608.03983, without restarts).
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.lr_schedule is Schedule.CONSTANT:
        return config.learning_rate
    assert config.total_steps is not None
    done = min(1.0, (step - config.warmup_steps) / (config.total_steps - config.warmup_steps))
    share = 1.0 - done if config.lr_schedule is Schedule.LINEAR else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.min_learning_rate + (config.learning_rate - config.min_learning_rate) * share


def clip_gradients(model: nn.Module, max_norm: float | None) -> torch.Tensor:
    """Scale gradients in place so that their global 2-norm is at most ``max_norm``; once per update, before ``.grad`` is used.

    Completes gradients over tp first (:func:`~rljob_runtime.training.parallel.sum_partial_gradients`). Works on local shards and sums
    squares over ranks once: far fewer calls than norms of DTensors. What each tp rank has as a whole counts on the first of them only.

    Returns:
        The norm before scaling, float32 scalar, equal on all ranks.
    """
    sum_partial_gradients(model)
    first = layout_of(model).tp_rank == 0
    trained = [p for p in model.parameters() if p.grad is not None]
    gradients = [local_tensor(p.grad) for p in trained if p.grad is not None]
    counted = [g for g, p in zip(gradients, trained, strict=True) if first or has_disjoint_shards(p)]
    device = next(model.parameters()).device
    norm = torch.nn.utils.get_total_norm(counted, foreach=True).to(device)  # of nothing, it is on the CPU
    if dist.get_world_size() > 1:
        squared = norm.square()
        dist.all_reduce(squared)
        norm = squared.sqrt()
    if max_norm is not None:
        torch._foreach_mul_(gradients, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    return norm
