"""``python -m rljob_api generate [--out DIR] [--check]``: write the CRD and the reference pages, or compare them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rljob_api import generate


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 when done or up to date, 1 when ``--check`` finds a difference."""
    parser = argparse.ArgumentParser(prog="python -m rljob_api", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("generate", help="write the CRD and the reference pages from the models")
    command.add_argument("--out", type=Path, default=Path(), help="repository root (default: the working directory)")
    command.add_argument("--check", action="store_true", help="write nothing, fail when a file is out of date")
    options = parser.parse_args(argv)
    changed = generate.sync(generate.files(), options.out, check=options.check)
    if options.check and changed:
        sys.stderr.write("\n".join([*changed, "", "Generated files are out of date; run: python -m rljob_api generate", ""]))
        return 1
    for name in changed:
        sys.stdout.write(f"{name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
