"""Tiny models on disk, and trainer workers of a single rank that tests start one after another."""

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, Qwen2Config

from rljob_runtime.training.config import PolicyConfig
from rljob_runtime.training.model import load_model, token_logprobs
from rljob_runtime.training.parallel import Layout
from rljob_runtime.training.worker import PolicyWorker
from rljob_runtime.weightsync.checkpoint_names import is_router_bias
from tests.support.ports import free_port

VOCAB = 61
"""Odd, so that shards are uneven."""
LEARNING_RATE = 1e-2


def tiny_qwen2(**changes: Any) -> Qwen2Config:
    """Two layers with grouped-query attention, 24 wide."""
    sizes = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
    }
    return Qwen2Config(**sizes | changes)


def save_model(folder: Path, config: PretrainedConfig, *, seed: int, bias_std: float = 0.0) -> Path:
    """Write a model with random weights, and correction biases of routers with this standard deviation; returns the folder."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    for name, buffer in model.named_buffers():
        if is_router_bias(name):
            buffer.normal_(std=bias_std)
    model.save_pretrained(folder)
    return folder


class SingleRank(Protocol):
    """A worker that is a whole process group."""

    def setup(self, host: str, port: int, timeout_s: float) -> object: ...

    def shutdown(self) -> None: ...


Worker = TypeVar("Worker", bound=SingleRank)
StartPolicy = Callable[..., PolicyWorker]


@contextmanager
def one_at_a_time(make: Callable[..., Worker]) -> Iterator[Callable[..., Worker]]:
    """``make``, but the worker is set up, and the one before is shut down: a process has one process group."""
    running: list[Worker] = []

    def stop() -> None:
        while running:
            running.pop().shutdown()

    def start(*args: Any, **settings: Any) -> Worker:
        stop()
        worker = make(*args, **settings)
        worker.setup("127.0.0.1", free_port(), timeout_s=30.0)
        running.append(worker)
        return worker

    try:
        yield start
    finally:
        stop()


def policy(model_folder: Path, **settings: Any) -> PolicyWorker:
    """A policy worker on one rank, not set up."""
    return PolicyWorker(PolicyConfig(**{"model_path": str(model_folder), "learning_rate": LEARNING_RATE} | settings), rank=0, world_size=1)


def whole_policy(model_folder: Path, **settings: Any) -> PreTrainedModel:
    """A policy's model with its entry ``token_logprobs``, not sharded, for tests whose process has no process group for it; untied."""
    config = PolicyConfig(**{"model_path": str(model_folder)} | settings)
    model = load_model(config, model_folder)
    dtype = next(model.parameters()).dtype
    model.load_state_dict(AutoModelForCausalLM.from_pretrained(model_folder, dtype=dtype).state_dict(), assign=True)
    make_whole(model)
    return model


def make_whole(model: PreTrainedModel) -> None:
    """Put on a model, which nobody shards, what the trainer's passes take from a sharded one: its entry, and a layout of one rank."""
    model.token_logprobs = types.MethodType(token_logprobs, model)
    model.layout = Layout(mesh=cast(DeviceMesh, None))
