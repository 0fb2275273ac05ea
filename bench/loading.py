"""What it takes to have a sharded model in memory: each process its slices of the files, beside the whole model in each process.

Two trainer processes on CPU, a random Qwen2 of 207 million parameters in bfloat16, trained in float32: 790 MiB, 395 a process. Peaks are
of anonymous memory, above what the process had before; pages of the files are the page cache's.

    python -m bench.loading
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, Qwen2Config

from bench.measure import free_port, machine, write_results
from rljob_runtime.training.config import PolicyConfig
from rljob_runtime.training.model import decoder_layers, load_model, shard_model
from rljob_runtime.training.parallel import local_tensor, make_layout

RANKS = 2
REPEAT = 3
DEADLINE_S = 240.0
SAMPLE_S = 0.002
MIB = 2**20
WAYS = {"slices": "each process reads its slices", "whole": "whole model in each process, then sharded"}
MODEL = Qwen2Config(
    vocab_size=32_000,
    hidden_size=1_024,
    intermediate_size=2_816,
    num_hidden_layers=12,
    num_attention_heads=16,
    num_key_value_heads=8,
    tie_word_embeddings=False,
)


def anonymous_bytes() -> int:
    """Of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class Peak(threading.Thread):
    """Samples this process's memory until ``stop``."""

    def __init__(self) -> None:
        """Begin."""
        super().__init__(daemon=True)
        self._ended = threading.Event()
        self.peak_bytes = 0
        self.start()

    def run(self) -> None:
        """Sample."""
        while not self._ended.wait(SAMPLE_S):
            self.peak_bytes = max(self.peak_bytes, anonymous_bytes())

    def stop(self) -> int:
        """The most there was."""
        self._ended.set()
        self.join()
        return self.peak_bytes


def rank_main(way: str, rank: int, port: int, folder: Path) -> None:
    """One process; prints what it took."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    device = torch.device("cpu")
    layout, config = make_layout(device), PolicyConfig(model_path=str(folder))
    dist.barrier()
    before, peak, started_s = anonymous_bytes(), Peak(), time.perf_counter()
    if way == "slices":
        model = load_model(config, folder)
        shard_model(model, config, layout, device)
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for layer in decoder_layers(model):
            fully_shard(layer, mesh=layout.fsdp_mesh)
        fully_shard(model, mesh=layout.fsdp_mesh)
    elapsed_s = time.perf_counter() - started_s
    shards = sum(local_tensor(p).numel() * 4 for p in model.parameters())
    found = {"seconds": elapsed_s, "peak_mib": (peak.stop() - before) / MIB, "left_mib": (anonymous_bytes() - before) / MIB}
    sys.stdout.write(json.dumps(found | {"shards_mib": shards / MIB}) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def measured(way: str, folder: Path) -> dict[str, float]:
    """The worse of the ranks.

    Raises:
        subprocess.SubprocessError: a rank failed, or took too long.
    """
    port = str(free_port())
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    commands = [[sys.executable, "-m", "bench.loading", "--rank", way, str(rank), port, str(folder)] for rank in range(RANKS)]
    ranks = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment) for command in commands
    ]
    found = []
    try:
        for process in ranks:
            printed, _ = process.communicate(timeout=DEADLINE_S)
            found.append(json.loads(printed.splitlines()[-1]))
    finally:
        for process in ranks:
            process.kill()
    return {key: max(one[key] for one in found) for key in found[0]}


def main() -> int:
    """Measure, show, write; or be one of the processes that are measured."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.loading", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rank", nargs=4, metavar=("WAY", "RANK", "PORT", "FOLDER"), help="used by the measurement itself")
    if (given := parser.parse_args().rank) is not None:
        way, rank, port, folder = given
        rank_main(way, int(rank), int(port), Path(folder))
        return 0
    return compare()


def compare() -> int:
    """Measure, show, write."""
    console = Console()
    values: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="bench-loading-") as root:
        folder = Path(root) / "model"
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(MODEL, dtype=torch.bfloat16).save_pretrained(folder)
        for turn in range(REPEAT):
            for way in WAYS:
                with console.status(f"{way}, {turn + 1} of {REPEAT}"):
                    values[way].append(measured(way, folder))
    rows = [
        (WAYS[way], *(f"{min(run[key] for run in runs):.{digits}f}" for key, digits in (("peak_mib", 0), ("left_mib", 0), ("seconds", 1))))
        for way, runs in values.items()
    ]
    table = Table(title=f"207 M parameters on {RANKS} processes, {values['slices'][0]['shards_mib']:.0f} MiB of shards each")
    lines = ["| way | peak MiB a process | left MiB | seconds |", "|---|---:|---:|---:|"]
    for column in ("way", "peak MiB a process", "left MiB", "seconds"):
        table.add_column(column)
    for row in rows:
        table.add_row(*row)
        lines.append(f"| {' | '.join(row)} |")
    console.print(table)
    text = "\n".join(["# Loading a model", "", *[" ".join(__doc__.split("\n\n")[index].split()) + "\n" for index in (0, 1)], *lines, ""])
    ratio = float(rows[1][1]) / float(rows[0][1])
    headline = f"each process reads its slices: {rows[0][1]} MiB at the peak instead of {rows[1][1]} ({ratio:.1f} times)"
    write_results("loading", {"machine": machine(("torch", "transformers", "safetensors")), "headline": headline, "runs": values}, text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
