"""``python -m bench.chaos.skewed_operator``: the operator on a node whose clock is off by the seconds in the file ``RLJOB_CHAOS_CLOCK``."""

from __future__ import annotations

import os
import sys
from datetime import datetime, timedelta
from pathlib import Path

from rljob_operator import clock

CLOCK = "RLJOB_CHAOS_CLOCK"


def main() -> int:
    """Patch the node's clock, before anything has imported it."""
    offset_file, true_now = Path(os.environ[CLOCK]), clock.utc_now

    def skewed_now() -> datetime:
        return true_now() + timedelta(seconds=float(offset_file.read_text()))

    clock.utc_now = skewed_now
    from rljob_operator.main import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
