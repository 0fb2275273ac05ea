"""What a checkpoint costs the step that writes it: from the devices while training waits, and beside the next steps from a copy.

One trainer process on CPU, one thread, a random Qwen2 of 26 million float32 parameters: 105 MB of weights, 315 MB with AdamW's moments.
A step without a checkpoint, a step that writes one and waits, a step that copies; then the step beside which files are written.

    python -m bench.checkpoints
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen2Config

from bench.measure import free_port
from rljob_runtime.records import TrainBatch
from rljob_runtime.training.config import PolicyConfig
from rljob_runtime.training.worker import PolicyWorker
from tests.integration.rank_processes import random_batch

REPEAT = 5
DEADLINE_S = 300.0
KINDS = ("no checkpoint", "synchronous", "asynchronous", "beside its files", "files, in all")
VOCAB = 8_192
MODEL = Qwen2Config(
    vocab_size=VOCAB,
    hidden_size=512,
    intermediate_size=1_536,
    num_hidden_layers=7,
    num_attention_heads=8,
    num_key_value_heads=4,
    tie_word_embeddings=True,
)


def step_s(worker: PolicyWorker, batch: TrainBatch, step: int, after: Callable[[], object] = lambda: None) -> float:
    """Seconds of a training step and what follows it."""
    started = time.perf_counter()
    worker.train_step([batch], step)
    after()
    return time.perf_counter() - started


def measure(root: Path) -> dict[str, list[float]]:
    """Seconds of steps, by kind; kinds take turns, so that a busy machine slows all of them."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(MODEL).save_pretrained(root / "model")
    worker = PolicyWorker(PolicyConfig(model_path=str(root / "model")), rank=0, world_size=1)
    worker.setup("127.0.0.1", free_port(), DEADLINE_S)
    batch = random_batch(VOCAB, 0)
    found: dict[str, list[float]] = {kind: [] for kind in KINDS}
    try:
        worker.train_step([batch], 0)
        print(f"{worker.checkpoint_bytes() / 1e6:.0f} MB a checkpoint, {np.size(batch.token_ids)} tokens a step")
        for n in range(REPEAT):
            synchronous, asynchronous = str(root / f"s{n}"), str(root / f"a{n}")
            found["no checkpoint"].append(step_s(worker, batch, 4 * n + 1))
            found["synchronous"].append(step_s(worker, batch, 4 * n + 2, lambda folder=synchronous: worker.save_checkpoint(folder)))  # type: ignore[misc]
            found["asynchronous"].append(step_s(worker, batch, 4 * n + 3, lambda folder=asynchronous: worker.begin_checkpoint(folder)))  # type: ignore[misc]
            begun = time.perf_counter()
            found["beside its files"].append(step_s(worker, batch, 4 * n + 4))
            worker.finish_checkpoint(DEADLINE_S)
            found["files, in all"].append(time.perf_counter() - begun)
    finally:
        worker.shutdown()
    return found


def main() -> None:
    """Print the table of the how-to page."""
    argparse.ArgumentParser(
        prog="python -m bench.checkpoints", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    with tempfile.TemporaryDirectory() as root:
        found = measure(Path(root))
    print("| step | median s | least s |\n|---|---|---|")
    for kind, seconds in found.items():
        print(f"| {kind} | {statistics.median(seconds):.2f} | {min(seconds):.2f} |")


if __name__ == "__main__":
    main()
