"""Whether a Python of the spec can run workers, found out on its node before a worker is started on it.

Ray reports nothing useful about an interpreter that does not start: it tries again until the deadline.
"""

from __future__ import annotations

import json
import platform
import subprocess

import ray

CHECK = """
import json, platform, ray, rljob_runtime.cluster.ray_cluster
print()
print(json.dumps([platform.python_version(), ray.__version__]))
"""
"""What the interpreter is asked to run; the answer is the last line, whatever a wrapper or the imports print before it."""
CHECK_TIMEOUT_S = 60.0
"""Importing Ray from a slow volume takes its time."""


def interpreter_problem(path: str, timeout_s: float = CHECK_TIMEOUT_S) -> str | None:
    """What keeps the Python at ``path`` from running workers on this machine, as the end of a sentence; None when nothing does."""
    try:
        done = subprocess.run([path, "-c", CHECK], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return f"did not answer within {timeout_s:.0f} s"
    except FileNotFoundError:
        return "does not exist, or its script names an interpreter that does not"
    except OSError as error:
        return f"cannot be started: {error.strerror}"
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        return f"cannot run a worker (exit {done.returncode}): {lines[-1][:300] if lines else 'no message'}"
    try:
        python, installed = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError, TypeError):
        return f"is not a Python: it answered {done.stdout[-80:]!r}"
    if _minor(python) != _minor(platform.python_version()):
        return f"is Python {python}, but Ray runs on {platform.python_version()} there"
    if installed != ray.__version__:
        return f"has ray {installed}, but the cluster runs {ray.__version__}"
    return None


def _minor(version: str) -> list[str]:
    return version.split(".")[:2]
