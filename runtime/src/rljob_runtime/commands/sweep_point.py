"""One point of a sweep in a process of its own: ``python -m rljob_runtime.commands.sweep_point JOB_FILE RUN_DIR new|overwrite|resume``.

Standard input is the point's manifest; reward functions and the like are looked for beside the job file of the sweep.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rljob_runtime.entry.local_run import run_job


def main(job_file: str, run_dir: str, mode: str) -> int:
    """Run it; returns the exit code of ``rljob run``."""
    return run_job(sys.stdin.read(), Path(job_file), Path(run_dir), mode == "overwrite", mode == "resume")


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
