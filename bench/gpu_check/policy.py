"""The trainer's own worker on one rank, over a model of random weights that is made here: nothing is downloaded."""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from bench.gpu_check.estimate import LORA_RANK, TYPE, shape_of
from bench.gpu_check.ports import free_ports
from bench.gpu_check.scale import Model, Scale
from rljob_runtime.records import TrainBatch
from rljob_runtime.training.config import LoraConfig, PolicyConfig
from rljob_runtime.training.worker import PolicyWorker

logging.disable_progress_bar()  # there is one already
SETUP_S = 300.0
SPARE = 1.2
"""Free space and host memory wanted, times what is written or loaded."""


class NoRoomHereError(RuntimeError):
    """Raised when this machine is too small for a check; says for what, with both values."""


def folder_of(model: Model, scale: Scale) -> Path:
    """The model's folder as ``save_pretrained`` writes it; made once per configuration.

    Raises:
        NoRoomHereError: there is no space for it.
    """
    key = repr(sorted(model.config.items()))
    if key not in scale.written:
        parameters = shape_of(model).parameters
        require(2 * parameters, shutil.disk_usage(scale.folder).free, f"model {model.name} in {scale.folder}")
        torch.manual_seed(0)
        with scale.device:
            made = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{**TYPE, **model.config}), dtype=torch.bfloat16)
        folder = scale.folder / f"model-{len(scale.written)}"
        made.save_pretrained(folder)
        scale.written[key] = folder
        del made
        empty(scale.device)
    return scale.written[key]


def forget(model: Model, scale: Scale) -> None:
    """Remove the model's files, where space is dear."""
    folder = scale.written.pop(repr(sorted(model.config.items())), None)
    if folder is not None:
        shutil.rmtree(folder)


def require(wanted_bytes: int, there_bytes: int, what: str) -> None:
    """Refuse what does not fit.

    Raises:
        NoRoomHereError: it does not.
    """
    if wanted_bytes * SPARE > there_bytes:
        raise NoRoomHereError(f"{what} needs {wanted_bytes * SPARE / 2**30:.1f} GiB, there are {there_bytes / 2**30:.1f}")


def host_free_bytes() -> int:
    """Memory of this machine that is free."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


@contextmanager
def policy(model: Model, scale: Scale, *, lora: bool = False, **settings: Any) -> Iterator[PolicyWorker]:
    """A worker that is set up, on a process group of its own.

    Raises:
        NoRoomHereError: model or host memory do not fit.
        RuntimeFault: it cannot be set up.
    """
    empty(scale.device)  # of an earlier worker, which its caller may have held on to until now
    scale.begin(f"loading model {model.name}")
    folder = folder_of(model, scale)
    loaded = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    if scale.on_cuda:
        require(loaded * (1 if lora else 2), host_free_bytes(), f"loading model {model.name} on the host")
    own: dict[str, Any] = {
        "model_path": str(folder),
        "dtype": scale.dtype,
        "token_budget": scale.micro_batch_tokens,
        "logprob_chunk_tokens": scale.logprob_chunk_tokens,
        "activation_checkpointing": model.checkpointing,
        "lora": LoraConfig(rank=LORA_RANK, alpha=2.0 * LORA_RANK) if lora else None,
    }
    config = PolicyConfig(**own | settings)
    worker = PolicyWorker(config, rank=0, world_size=1)
    (port,) = free_ports(1)
    worker.setup("127.0.0.1", port, SETUP_S)
    scale.begin(f"model {model.name}")
    try:
        yield worker
    finally:
        worker.shutdown()
        del worker
        empty(scale.device)


def empty(device: torch.device) -> None:
    """Give memory back that nothing holds any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def batch(scale: Scale, vocab_size: int) -> TrainBatch:
    """One update of full-length sequences of random tokens; the first of each are its prompt."""
    random = np.random.default_rng(0)
    each = scale.prompt_tokens + scale.response_tokens
    tokens = random.integers(2, vocab_size, size=(scale.sequences, each), dtype=np.int32)
    mask = np.zeros((scale.sequences, each), dtype=np.float32)
    mask[:, scale.prompt_tokens :] = 1.0
    advantages = mask * random.standard_normal((scale.sequences, 1)).astype(np.float32)
    return TrainBatch(
        token_ids=tokens.ravel(),
        lengths=np.full(scale.sequences, each, dtype=np.int32),
        response_mask=mask.ravel(),
        behavior_logprobs=mask.ravel() * np.float32(-np.log(vocab_size)),
        advantages=advantages.ravel(),
        global_tokens=scale.sequences * scale.response_tokens,
        global_sequences=scale.sequences,
        version=0,
    )
