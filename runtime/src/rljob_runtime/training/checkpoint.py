"""Training state in torch's distributed checkpoint format: loadable at another number of ranks, bit-equal at the same.

Frozen weights are not written, because training starts from the same model folder again: with adapters a checkpoint is small.
The caller makes a new folder per checkpoint and marks it complete afterwards; here a folder is only written or read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rljob_runtime.errors import CheckpointError

TRAINED_ONLY = StateDictOptions(ignore_frozen_params=True, strict=False)
"""Frozen parameters are in no checkpoint, and are not missed; of the others none can be missing, as loading fails before."""


def save_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, steps_done: int) -> None:
    """Write model, optimizer, finished steps and this rank's random state; all ranks must call it.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    state = _state(model, optimizer, steps_done)
    state[_random_key()] = torch.get_rng_state()
    try:
        save(state, checkpoint_id=folder)
    except (OSError, CheckpointException) as error:
        raise CheckpointError(
            f"checkpoint {folder} cannot be written: {error}; free space or point checkpoint storage elsewhere"
        ) from error


def load_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Restore what :func:`save_checkpoint` wrote; all ranks must call it.

    Hyperparameters stay those of the optimizer given, so that a changed configuration takes effect. A rank that the checkpoint does not
    know (another number of ranks) keeps its own random state.

    Returns:
        Finished training steps.

    Raises:
        CheckpointError: missing, unreadable, or of another model.
    """
    state = _state(model, optimizer, 0)
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    try:
        known = FileSystemReader(folder).read_metadata().state_dict_metadata
        if _random_key() in known:
            state[_random_key()] = torch.get_rng_state()
        load(state, checkpoint_id=folder)
    except (OSError, RuntimeError, ValueError, KeyError, CheckpointException) as error:
        raise CheckpointError(
            f"checkpoint {folder} cannot be loaded into this model: {error}; resume from a complete one of the same model"
        ) from error
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=TRAINED_ONLY)
    for group, kept in zip(optimizer.param_groups, settings, strict=True):
        group.update(kept)
    if _random_key() in state:
        torch.set_rng_state(state[_random_key()])
    return int(state["progress"]["steps_done"].item())


def _state(model: nn.Module, optimizer: torch.optim.Optimizer, steps_done: int) -> dict[str, Any]:
    """What every rank shares, tensors by reference."""
    model_state, optimizer_state = get_state_dict(model, optimizer, options=TRAINED_ONLY)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            model_state.pop(name, None)  # torch leaves the second name of a frozen tied parameter
    return {"model": model_state, "optimizer": optimizer_state, "progress": {"steps_done": torch.tensor(steps_done)}}


def _random_key() -> str:
    """Each rank stores its own random state under its own name."""
    return f"random_state_rank{dist.get_rank()}"
