"""``python -m bench.offload``: measure, write, and print the markdown."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

import bench.offload
from bench.offload.limits import WIDTH, limits
from bench.offload.peers import offload_policy, to_cpu
from bench.offload.report import report
from bench.offload.switches import duplex, switches
from bench.pairs import PAIRS
from bench.state import commit
from rljob_runtime.offload.slabs import DEFAULT_CHUNK_BYTES

RESULTS = Path(__file__).resolve().parent.parent / "results"
DEFAULT_MEBIBYTES = {"cpu": 256, "cuda": 8192}
"""Of parameters; AdamW's states are twice as much."""
DEVICE_SHARE = 0.12
"""Largest share of a GPU's memory, and of the host's, that the parameters take: states, gradients and a second copy need the rest."""


def main() -> int:
    """Measure, write, and print the markdown."""
    parser = argparse.ArgumentParser(prog="python -m bench.offload", description=bench.offload.__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, help="JSON file (default: bench/results/offload.json, offload-cuda.json for a GPU)")
    parser.add_argument("--mebibytes", type=int, help="of float32 parameters (default: 256 on a CPU; 8192 on a GPU, or what fits)")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    out: Path = args.out or RESULTS / ("offload.json" if args.device == "cpu" else "offload-cuda.json")
    if args.device == "cpu":
        torch.set_num_threads(1)
    values = measure(torch.device(args.device, 0) if args.device == "cuda" else torch.device("cpu"), args.mebibytes, args.repeat)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(values, indent=1) + "\n")
    text = report(values)
    out.with_suffix(".md").write_text(text)
    sys.stdout.write(text)
    return 0


def measure(device: torch.device, mebibytes: int | None, repeat: int) -> dict[str, Any]:
    """All figures; rates in 10^9 bytes a second."""
    started = time.perf_counter()
    size_bytes = (mebibytes or DEFAULT_MEBIBYTES[device.type]) * 2**20
    if device.type == "cuda":
        torch.cuda.set_device(device)
        smaller_bytes = min(torch.cuda.get_device_properties(device).total_memory, host_bytes())
        size_bytes = min(size_bytes, int(smaller_bytes * DEVICE_SHARE))
    layers = max(2, size_bytes // (4 * WIDTH * WIDTH))
    values: dict[str, Any] = {
        "machine": machine(device),
        "parameter_bytes": layers * 4 * WIDTH * WIDTH,
        "chunk_bytes": DEFAULT_CHUNK_BYTES,
        "repeat": repeat,
        "limits": limits(device, 3 * layers * 4 * WIDTH * WIDTH, repeat),
        "switch": switches(device, layers, repeat),
        "duplex": duplex(device, max(1, layers // 2), repeat),
        "to_cpu": to_cpu(device, layers, max(PAIRS, repeat)),
        "cpu_offload_policy": offload_policy(device, layers, repeat),
    }
    values["duration_s"] = time.perf_counter() - started
    return values


def host_bytes() -> int:
    """Memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def machine(device: torch.device) -> dict[str, Any]:
    """What a reader needs to place the figures; from the standard library and torch."""
    names = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.machine(),
        "cores": os.cpu_count(),
        "memory_bytes": host_bytes(),
        "load_before": os.getloadavg()[0],
        "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "measured_at": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": commit(),
    }


if __name__ == "__main__":
    sys.exit(main())
