"""Peak memory and time of log-probs plus their backward: chunked (ours), torch's linear_cross_entropy, and full logits.

Each point is a process of its own, because a process's peak resident memory never falls: it prepares inputs, reads the peak, runs, and
reads it again. CPU, one thread, float32. Prints a table and writes bench/results/logprob_memory.json.

    python -m bench.logprob_memory
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any

from bench.measure import RESULTS, ROOT, machine

HIDDEN = 256
POINT_DEADLINE_S = 60.0

# (method, tokens, vocabulary, chunk tokens)
POINTS = [
    ("full", 1024, 16_384, 0),
    ("chunked", 1024, 16_384, 256),
    ("full", 4096, 16_384, 0),
    ("linear_cross_entropy", 4096, 16_384, 256),
    ("chunked", 4096, 16_384, 64),
    ("chunked", 4096, 16_384, 256),
    ("chunked", 4096, 16_384, 1024),
    ("full", 1024, 65_536, 0),
    ("chunked", 1024, 65_536, 256),
]


def measure(method: str, tokens: int, vocabulary: int, chunk_tokens: int) -> dict[str, float]:
    """Run one point in this process; megabytes are MiB, seconds are CPU time of forward plus backward."""
    import torch

    from rljob_runtime.training.logprob import selected_logprobs

    torch.set_num_threads(1)
    torch.manual_seed(0)
    hidden = torch.randn(tokens, HIDDEN, requires_grad=True)
    weight = (torch.randn(vocabulary, HIDDEN) * 0.05).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,))
    selected_logprobs(hidden[:2], weight[:64], targets[:2] % 64, temperature=1.0, chunk_tokens=2).sum().backward()  # libraries are loaded
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)  # the result's own memory is no method's cost
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.process_time()
    if method == "full":
        logprobs = (hidden @ weight.T).log_softmax(-1).gather(1, targets[:, None]).squeeze(1)
    elif method == "chunked":
        logprobs = selected_logprobs(hidden, weight, targets, temperature=1.0, chunk_tokens=chunk_tokens)
    else:
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk_tokens)
        logprobs = -torch.nn.functional.linear_cross_entropy(hidden, weight, targets, reduction="none", options=options)
    logprobs.mean().backward()
    cpu_s = time.process_time() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "peak_mib": (peak - before) / 1024,
        "cpu_s": cpu_s,
        "logprob_mean": float(logprobs.detach().mean()),
        "gradient_norm": float(weight.grad.norm()),
    }


def run_point(point: tuple[str, int, int, int]) -> dict[str, Any]:
    """Measure one point in a fresh process."""
    command = [sys.executable, "-m", "bench.logprob_memory", "--point", json.dumps(point)]
    # a fixed threshold: glibc otherwise adapts it during the run and peaks become a matter of luck
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "131072", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=POINT_DEADLINE_S, check=True, env=environment, cwd=ROOT)
    method, tokens, vocabulary, chunk_tokens = point
    return {"method": method, "tokens": tokens, "vocabulary": vocabulary, "chunk_tokens": chunk_tokens} | json.loads(done.stdout)


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table; the last columns compare with full logits of the same size."""
    from rich.console import Console
    from rich.table import Table

    full = {(r["tokens"], r["vocabulary"]): r for r in rows if r["method"] == "full"}
    table = Table(title=f"Log-probs with backward, float32, hidden size {HIDDEN}, one CPU thread")
    for column in ("method", "tokens", "vocabulary", "chunk", "peak MiB", "CPU s", "memory vs full", "log-prob diff"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for r in rows:
        base = full[(r["tokens"], r["vocabulary"])]
        table.add_row(
            str(r["method"]),
            f"{r['tokens']:,}",
            f"{r['vocabulary']:,}",
            f"{r['chunk_tokens']:,}" if r["chunk_tokens"] else "-",
            f"{r['peak_mib']:,.0f}",
            f"{r['cpu_s']:.2f}",
            f"{r['peak_mib'] / base['peak_mib']:.2f}x",
            f"{abs(r['logprob_mean'] - base['logprob_mean']):.1e}",
        )
    Console(width=110).print(table)


def main() -> int:
    """Measure all points, or the one a parent process asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--point", help="measure this point (JSON) in this process and print its result")
    point = parser.parse_args().point
    if point is not None:
        json.dump(measure(*json.loads(point)), sys.stdout)
        return 0
    rows = [run_point(point) for point in POINTS]
    show(rows)
    values = {"hidden_size": HIDDEN, "machine": machine(("torch",)), "points": rows}
    (RESULTS / "logprob_memory.json").write_text(json.dumps(values, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
