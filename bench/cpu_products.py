"""Forward and backward of a linear layer in 16 bits on a CPU: as torch computes them, and in float32 as jobs do on CPUs without AVX-512.

Both are compared with float32, in one process with one thread; times are CPU time, the median of some rounds. Prints a table and writes
bench/results/cpu_products.json.

    python -m bench.cpu_products
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from bench.measure import RESULTS, machine

SHAPES = ((10_660, 64, 256), (4096, 128, 512), (256, 896, 4864))
"""Tokens, columns, and outputs: a batch of the frozen lake, a small model, a few tokens of a model of 0.5B."""
ROUNDS = 5


def cpu_s(compute: Callable[[], object], rounds: int) -> float:
    """Median of the rounds, after one that counts for nothing."""
    compute()
    taken = []
    for _ in range(rounds):
        started = time.process_time()
        compute()
        taken.append(time.process_time() - started)
    return statistics.median(taken)


def measure(tokens: int, columns: int, outputs: int, rounds: int = ROUNDS) -> list[dict[str, Any]]:
    """Rows of one shape, seconds of each way for both types."""
    import torch

    from rljob_runtime.cpu_products import HALVES, register

    def layer(dtype: torch.dtype) -> Callable[[], object]:
        generator = torch.Generator().manual_seed(0)
        shapes = ((tokens, columns), (outputs, columns), (outputs,))
        tensors = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
        return lambda: torch.autograd.grad(torch.nn.functional.linear(*tensors).sum(), tensors)

    torch.set_num_threads(1)
    float32_s = cpu_s(layer(torch.float32), rounds)
    torch_s = {dtype: cpu_s(layer(dtype), rounds) for dtype in HALVES}
    with torch.library._scoped_library("aten", "IMPL") as library:
        register(library)
        widened_s = {dtype: cpu_s(layer(dtype), rounds) for dtype in HALVES}
    both = {"tokens": tokens, "columns": columns, "outputs": outputs, "float32_s": float32_s}
    names = {dtype: str(dtype).removeprefix("torch.") for dtype in HALVES}
    return [both | {"dtype": names[dtype], "torch_s": torch_s[dtype], "widened_s": widened_s[dtype]} for dtype in HALVES]


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title="Linear layer, forward and backward, times float32's time, one CPU thread")
    for column in ("tokens x columns x outputs", "type", "float32", "torch", "in float32"):
        table.add_column(column, justify="right")
    for row in rows:
        shape = f"{row['tokens']:,} x {row['columns']} x {row['outputs']:,}"
        times = (f"{row[key] / row['float32_s']:.2f} ({1000 * row[key]:.1f} ms)" for key in ("torch_s", "widened_s"))
        table.add_row(shape, row["dtype"], f"{1000 * row['float32_s']:.1f} ms", *times)
    Console(width=110).print(table)


def headline(rows: list[dict[str, Any]]) -> str:
    """Of the first row in bfloat16: how many times the time of float32."""
    row = next(row for row in rows if row["dtype"] == "bfloat16")
    as_torch, widened = (row[key] / row["float32_s"] for key in ("torch_s", "widened_s"))
    return f"{row['tokens']:,} tokens in bfloat16 take {as_torch:.1f} times float32's time in torch, {widened:.1f} times in float32"


def main() -> int:
    """Measure all shapes."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    import torch

    rows = [row for shape in SHAPES for row in measure(*shape)]
    show(rows)
    values = {"headline": headline(rows), "machine": machine(("torch",)), "vectors": torch.backends.cpu.get_cpu_capability(), "rows": rows}
    (RESULTS / "cpu_products.json").write_text(json.dumps(values, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
