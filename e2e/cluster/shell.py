"""Runs commands that end by themselves."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

from e2e.cluster.errors import ClusterError, CommandError

_OUTPUT_TAIL_CHARACTERS = 4000


def run(
    argv: Sequence[str | Path],
    *,
    timeout_s: float,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    text_input: str | None = None,
    stdin: IO[bytes] | None = None,
    show: bool = False,
) -> str:
    """Run a command to its end and return its standard output.

    Args:
        argv: program and arguments; never a shell text.
        timeout_s: deadline in seconds.
        cwd: folder to run in.
        env: variables added to the environment.
        text_input: standard input; nothing when None.
        stdin: what it reads instead of a text.
        show: let both outputs pass through to the terminal instead; then the result is empty.

    Raises:
        CommandError: it exited with another code than 0, or ran past the deadline.
        ClusterError: the program does not exist.
    """
    words = [str(part) for part in argv]
    try:
        done = subprocess.run(
            words,
            cwd=cwd,
            env={**os.environ, **(env or {})},
            **({"input": text_input or ""} if stdin is None else {"stdin": stdin}),
            stdout=None if show else subprocess.PIPE,
            stderr=None if show else subprocess.PIPE,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    except FileNotFoundError as error:
        raise ClusterError(f"{words[0]}: no such program (needed for: {shlex.join(words)[:200]})") from error
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"{shlex.join(words)[:400]}: still running after {timeout_s:g} s, stopped") from error
    if done.returncode != 0:
        printed = f"{done.stdout or ''}\n{done.stderr or ''}".strip()[-_OUTPUT_TAIL_CHARACTERS:]
        raise CommandError(f"{shlex.join(words)[:400]}: exit code {done.returncode}\n{printed}")
    return done.stdout or ""
