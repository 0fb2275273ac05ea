"""``python -m rljob_runtime.report``: writes the reference page of the metrics from their registry, or checks it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rljob_api import generate
from rljob_runtime.report.names import markdown_table

PAGE = "docs/reference/metrics.md"
HEAD = """# Metrics

Written to `metrics.jsonl` and TensorBoard once a step, and drawn in `report.html`. Generated from
`rljob_runtime/report/names.py` by `make generate`; a metric that is not listed there cannot be written.

"""


def main(argv: Sequence[str] | None = None) -> int:
    """Write or compare; 0 when done or up to date, 1 when ``--check`` finds a difference."""
    parser = argparse.ArgumentParser(prog="python -m rljob_runtime.report", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(), help="repository root (default: the working directory)")
    parser.add_argument("--check", action="store_true", help="write nothing, fail when the page is out of date")
    options = parser.parse_args(argv)
    changed = generate.sync({PAGE: HEAD + markdown_table()}, options.out, check=options.check)
    if options.check and changed:
        sys.stderr.write("\n".join([*changed, "", f"{PAGE} is out of date; run: make generate", ""]))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
