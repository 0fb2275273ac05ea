"""An engine whose log has how many requests it was given under which version, and which versions it served; everything else is real."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from rljob_runtime.engine.vllm.adapter import VllmAdapter
from rljob_runtime.engine.vllm.engine import VllmEngine
from rljob_runtime.records import GenerationRequest, OnRunning

ADAPTER = VllmAdapter(factory=f"{__name__}:CountingEngine")


class CountingEngine(VllmEngine):
    """Prints what :func:`requests_by_version` and :func:`versions` read."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        super().submit(requests)
        print(f"given {len(requests)} requests under version {self.version()}", flush=True)

    def finish_update(self, timeout_s: float, on_running: OnRunning = "recompute") -> int:
        version = super().finish_update(timeout_s, on_running)
        print(f"serves version {self.version()}", flush=True)
        return version


def requests_by_version(log: str) -> dict[int, int]:
    """How many requests an engine with this log was given under each version."""
    counts: Counter[int] = Counter()
    for number, version in re.findall(r"given (\d+) requests under version (\d+)", log):
        counts[int(version)] += int(number)
    return dict(counts)


def versions(log: str) -> list[int]:
    """The versions that it was updated to, in order."""
    return [int(version) for version in re.findall(r"serves version (\d+)", log)]
