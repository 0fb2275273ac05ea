"""Which state of the code is measured; with the standard library alone."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WRITTEN = ("bench/results", "docs/measurements.md", "docs/figures.md", "docs/images", "README.md")
"""What measurements and ``bench.figures`` write."""


def commit() -> str:
    """What is measured: the commit checked out, with ``+`` where files differ from it; results of other measurements may differ."""
    described = _git("describe", "--always", "--exclude", "*") or "unknown"
    changed = _git("status", "--porcelain", "--", ".", *(f":!{written}" for written in WRITTEN))
    return f"{described}+" if changed else described


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
