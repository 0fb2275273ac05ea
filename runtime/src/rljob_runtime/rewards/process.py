"""One scoring process as its parent sees it, and what its results are."""

from __future__ import annotations

import json
import math
import pickle
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rljob_runtime.rewards.child import RESULT, Setup
from rljob_runtime.sandbox.process import BrokenProtocolError, SandboxProcess


class Result(NamedTuple):
    """One evaluation, as the process reports it; a tuple, because a hundred thousand a second are made."""

    nonce: bytes
    position: int
    reward: int
    score: float | None
    extra: Mapping[str, float]
    error: str | None
    elapsed_s: float


class ScoringProcess(SandboxProcess):
    """One child process that scores."""

    def __init__(self, setup: Setup, log_file: Path, startup_timeout_s: float) -> None:
        """Start it; it says READY later."""
        super().__init__(
            "rljob_runtime.rewards.child",
            pickle.dumps(setup),
            purpose="reward",
            log_file=log_file,
            startup_timeout_s=startup_timeout_s,
            disk_bytes=setup.disk_bytes,
        )
        self.used = False
        """Whether it has scored anything: only a fresh one takes a sample that ran past a limit elsewhere."""


def parse_result(frame: bytes) -> Result:
    """Read a result frame.

    Raises:
        BrokenProtocolError: it is none.
    """
    try:
        nonce, position, reward, ok, score, elapsed_s = RESULT.unpack_from(frame)
        rest = json.loads(frame[RESULT.size :]) if len(frame) > RESULT.size else {}
        extra = {str(name): float(value) for name, value in rest.items()} if ok else {}
    except (struct.error, ValueError, TypeError, AttributeError) as error:
        raise BrokenProtocolError("it wrote something that is not a result") from error
    if not math.isfinite(score) or not math.isfinite(elapsed_s):
        raise BrokenProtocolError("it wrote a result that is not a number")
    return Result(
        nonce=nonce,
        position=position,
        reward=reward,
        score=score if ok else None,
        extra=extra,
        error=None if ok else str(rest),
        elapsed_s=elapsed_s,
    )
