"""Which checks there are, what each needs, and how one after another is run."""

from __future__ import annotations

import importlib
import importlib.util
import time
import traceback
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from bench.gpu_check.lines import Line
from bench.gpu_check.scale import Scale

RUNTIME = ("pydantic", "numpy")
TRAINER = (*RUNTIME, "transformers", "xxhash", "safetensors")
ENGINE = (*TRAINER, "vllm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One entry."""

    name: str
    entry: str
    """``module:function`` in this package; imported when it runs."""
    index: int | None = None
    """Argument of a function that makes the check of one model."""
    needs: tuple[str, ...] = ()
    """Modules beyond torch."""
    expected_s: float
    """On a GPU, roughly: what does not fit into the time that is left is skipped."""


CHECKS = (
    Check(name="limits", entry="limits:check", expected_s=15),
    Check(name="ipc", entry="transports:check_ipc", expected_s=20),
    Check(name="collective", entry="transports:check_collective", expected_s=30),
    Check(name="transports", entry="sync:check", needs=TRAINER, expected_s=60),
    Check(name="parallel", entry="parallel:check", needs=TRAINER, expected_s=200),
    Check(name="offload", entry="offload:check", needs=RUNTIME, expected_s=25),
    Check(name="attention", entry="attention:check", needs=TRAINER, expected_s=45),
    Check(name="train-0.5B", entry="trainer:check_of", index=0, needs=TRAINER, expected_s=20),
    Check(name="engine", entry="engine:check", needs=ENGINE, expected_s=60),
    *(
        Check(name=f"engine-{variant}", entry=f"generating:check_{variant}", needs=ENGINE, expected_s=45)
        for variant in ("plain", "ngram", "fp8", "async")
    ),
    Check(name="stall", entry="stall:check", needs=ENGINE, expected_s=60),
    Check(name="switch", entry="trainer:check_switch", needs=TRAINER, expected_s=15),
    Check(name="checkpoint", entry="trainer:check_checkpoint", needs=TRAINER, expected_s=25),
    Check(name="probe", entry="trainer:check_probe", needs=TRAINER, expected_s=15),
    Check(name="adapters", entry="trainer:check_adapters", needs=TRAINER, expected_s=40),
    Check(name="mixture", entry="trainer:check_mixture", needs=TRAINER, expected_s=60),
    *(
        Check(name=f"train-{size}", entry="trainer:check_of", index=index, needs=TRAINER, expected_s=seconds)
        for index, (size, seconds) in enumerate((("1.5B", 30.0), ("3B", 50.0), ("7B", 90.0)), start=1)
    ),
    Check(name="sglang", entry="engine:check_sglang", needs=(*TRAINER, "aiohttp"), expected_s=90),
)
"""In the order of their worth where time is short."""
FAULTS = (RuntimeError, OSError, ValueError, ImportError, AssertionError)
"""What a check may end with: of torch and of this project, RuntimeFault included. Anything else is a fault of this program."""


def chosen(names: Sequence[str]) -> list[Check]:
    """Those of the names, in the order of the table; all when there are none.

    Raises:
        ValueError: a name is none of a check.
    """
    known = [check.name for check in CHECKS]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--only {', '.join(unknown)}: no such check; there are {', '.join(known)}")
    return [check for check in CHECKS if not names or check.name in names]


def run(check: Check, scale: Scale, ends_s: float, *, is_last: bool) -> Generator[Line, None, None]:
    """The lines of one check; one line that says why where it is skipped or fails.

    Args:
        check: which.
        scale: how large.
        ends_s: of the monotonic clock: when everything should be over.
        is_last: nothing follows, so it may try and be cut off, however long it is expected to take.
    """
    if missing := [name for name in check.needs if importlib.util.find_spec(name) is None]:
        yield Line(check=check.name, what="skipped", skipped=f"not installed: {', '.join(missing)}")
        return
    if scale.on_cuda and not is_last and time.monotonic() + check.expected_s > ends_s:
        yield Line(check=check.name, what="skipped", skipped=f"takes some {check.expected_s:.0f} s, more than is left (--minutes)")
        return
    try:
        yield from _function(check)(scale)
    except FAULTS as error:
        if type(error).__name__ == "NoRoomHereError":
            yield Line(check=check.name, what="skipped", skipped=str(error))
        else:
            traceback.print_exc()
            yield Line(check=check.name, what="failed", failed=f"{type(error).__name__}: {error}")


def _function(check: Check) -> Callable[[Scale], Iterator[Line]]:
    module, _, name = check.entry.partition(":")
    function = getattr(importlib.import_module(f"bench.gpu_check.{module}"), name)
    made: Callable[[Scale], Iterator[Line]] = function if check.index is None else function(check.index)
    return made
