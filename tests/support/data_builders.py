"""Small tokenizers, files and parameters for the data and reward tests."""

import json
from pathlib import Path

from rljob_runtime.tiny import QUICKSTART
from rljob_runtime.tiny.tokenizer import build_tokenizer

ADDITION = dict(QUICKSTART.params)


def make_tokenizer():
    return build_tokenizer(["Calculate 67 + 21."])


def numbers_file(path: Path, rows: int, *, long_every: int = 0) -> Path:
    """Write sums ``i + i+1``; every ``long_every``-th row, from the first on, is longer than 14 tokens."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for i in range(rows):
        padding = " + 0" * 12 if long_every and i % long_every == 0 else ""
        lines.append(json.dumps({"question": f"Calculate {i} + {i + 1}{padding}.", "answer": 2 * i + 1, "row": i}))
    path.write_text("\n".join(lines) + "\n")
    return path
