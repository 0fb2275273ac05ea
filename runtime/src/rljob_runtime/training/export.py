"""Writes the policy as an ordinary Hugging Face model folder."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from rljob_runtime.errors import CheckpointError
from rljob_runtime.training.weights import pack_buckets, weight_specs
from rljob_runtime.weightsync.packing import plan_buckets, unpack

GATHER_BYTES = 256 * 2**20
"""Bytes of the model that are gathered on rank 0 at once; a larger tensor goes alone."""

SIDE_FILES = (
    "tokenizer*",
    "vocab.*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "*.model",
    "chat_template*",
    "generation_config.json",
    "*.py",
)
"""What makes a model folder usable besides config and weights; copied byte for byte."""


def export_hf(folder: Path, model: PreTrainedModel, source: Path, dtype: str) -> None:
    """Gather the model on rank 0 and write config, safetensors and the source's tokenizer files; all ranks must call it.

    Weights are what engines get, adapters merged.

    Args:
        folder: made if missing.
        model: sharded.
        source: the folder the model was loaded from.
        dtype: of the written weights.

    Raises:
        CheckpointError: rank 0 cannot write.
    """
    state: dict[str, torch.Tensor] = {}
    for bucket in plan_buckets(weight_specs(model, dtype), GATHER_BYTES).buckets:
        data = pack_buckets(model, {0: bucket})
        if data is not None:
            state.update(unpack(bucket, data))
    kept = {name for name, _ in model.named_buffers()} & model.state_dict().keys()
    state.update((name, buffer.cpu()) for name, buffer in model.named_buffers() if name in kept)
    if dist.get_rank() == 0:
        try:
            _write(folder, model, source, state, dtype)
        except OSError as error:
            raise CheckpointError(f"model cannot be exported to {folder}: {error}; free space or choose another folder") from error
    dist.barrier()


def _write(folder: Path, model: PreTrainedModel, source: Path, state: dict[str, torch.Tensor], dtype: str) -> None:
    """Save through an unsharded twin without memory, because sharding renamed the model's class."""
    if model.config.tie_word_embeddings:
        head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
        state.pop(f"{head}.weight", None)
    plain_class: type[PreTrainedModel] = next(
        cls for cls in type(model).__mro__ if issubclass(cls, PreTrainedModel) and not issubclass(cls, FSDPModule)
    )
    with torch.device("meta"):
        twin = plain_class(copy.deepcopy(model.config)).to(getattr(torch, dtype))
    twin.save_pretrained(folder, state_dict=state, save_original_format=False)  # names are the checkpoint's already
    for pattern in SIDE_FILES:
        for file in source.glob(pattern):
            shutil.copyfile(file, folder / file.name)
