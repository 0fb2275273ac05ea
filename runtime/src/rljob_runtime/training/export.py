"""Writes the policy as an ordinary Hugging Face model folder."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from rljob_runtime.errors import CheckpointError
from rljob_runtime.records import Bucket
from rljob_runtime.training.weights import pack_buckets, parts_of, weight_specs
from rljob_runtime.weightsync.packing import plan_buckets, unpack

GATHER_BYTES = 256 * 2**20
"""Bytes of the model that are gathered on rank 0 at once; a larger tensor goes alone."""
SHARD_BYTES = 2 * 2**30
"""Bytes of weights in one file; a larger tensor has one of its own."""

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
    """Write config, safetensors and the source's tokenizer files, from rank 0; all ranks must call it.

    Weights are what engines get, adapters merged. They are gathered and written file by file, so that rank 0 never holds more of the model
    than ``SHARD_BYTES``, a second time while it is written, and one gather of ``GATHER_BYTES`` (or a single larger tensor).

    Args:
        folder: made if missing; weights of an earlier export are replaced.
        model: sharded.
        source: the folder the model was loaded from.
        dtype: of the written weights.

    Raises:
        CheckpointError: rank 0 cannot write; on all ranks.
    """
    shards = plan_buckets(weight_specs(model, dtype), SHARD_BYTES).buckets
    total_bytes = sum(slot.size_bytes for shard in shards for slot in shard.slots)
    _together(folder, lambda: _begin(folder, model, source, dtype, total_bytes))
    files: dict[str, str] = {}
    for index, shard in enumerate(shards):
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        weights = _gathered(model, shard)
        if index == len(shards) - 1:
            weights |= _persistent_buffers(model)
        files |= dict.fromkeys(weights, file)
        _together(folder, partial(save_file, weights, folder / file, metadata={"format": "pt"}))
        del weights
    if len(shards) > 1:
        index_json = {"metadata": {"total_size": total_bytes}, "weight_map": files}
        _together(folder, lambda: (folder / "model.safetensors.index.json").write_text(json.dumps(index_json, indent=2) + "\n"))


def _together(folder: Path, write: Callable[[], object]) -> None:
    """Have rank 0 write; what fails there fails on all ranks, which would wait for its next gather otherwise."""
    fault: OSError | None = None
    if dist.get_rank() == 0:
        try:
            write()
        except OSError as error:
            fault = error
        except SafetensorError as error:  # its way to pass the system's error on
            fault = OSError(str(error))
    failed = torch.tensor(int(fault is not None))
    if dist.get_world_size() > 1:
        dist.all_reduce(failed)
    if failed.item():
        raise CheckpointError(f"model cannot be exported to {folder}: {fault or 'rank 0 says why'}; free space or choose another folder")


def _gathered(model: PreTrainedModel, shard: Bucket) -> dict[str, torch.Tensor]:
    """The weights of one file, by name, on rank 0; empty on the others."""
    found: dict[str, torch.Tensor] = {}
    for bucket in plan_buckets([(slot.name, slot.dtype, slot.shape) for slot in shard.slots], GATHER_BYTES).buckets:
        data = pack_buckets(model, {0: bucket})
        if data is not None:
            found.update((name, tensor.clone()) for name, tensor in unpack(bucket, data))  # a file's tensors have storages of their own
    return found


def _persistent_buffers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Those that a checkpoint has besides what engines get; whole on every rank."""
    kept = model.state_dict().keys() - parts_of(model).keys()
    return {name: buffer.cpu().clone() for name, buffer in model.named_buffers() if name in kept}


def _begin(folder: Path, model: PreTrainedModel, source: Path, dtype: str, needed_bytes: int) -> None:
    """Everything but the weights, by an unsharded twin without memory, because sharding renamed the model's class.

    Raises:
        OSError: it cannot be written, or ``needed_bytes`` do not fit.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise OSError(f"its weights need {needed_bytes / 2**30:.1f} GiB and the disk has {free_bytes / 2**30:.1f} GiB left")
    plain_class: type[PreTrainedModel] = next(
        cls for cls in type(model).__mro__ if issubclass(cls, PreTrainedModel) and not issubclass(cls, FSDPModule)
    )
    with torch.device("meta"):
        twin = plain_class(copy.deepcopy(model.config)).to(getattr(torch, dtype))
    twin.config.dtype = dtype
    twin.config.architectures = [plain_class.__name__]
    if twin.is_remote_code():
        custom_object_save(twin, folder, config=twin.config)
    twin.config.save_pretrained(folder)
    if twin.can_generate():
        twin.generation_config.save_pretrained(folder)
    for pattern in SIDE_FILES:
        for file in source.glob(pattern):
            shutil.copyfile(file, folder / file.name)
