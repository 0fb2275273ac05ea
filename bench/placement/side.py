"""One planner in a process of its own: ``python -m bench.placement.side SIDE --cases FILE --out FILE`` times every case.

The file has a JSON case a line; with ``plan``, a JSON object ``{name, devices, layout}``. Written is a JSON object:
``cases`` with the times, and the process's peak memory, its share before the first case apart.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

Case = dict[str, Any]
Run = Callable[[], tuple[Any, float, float | None]]
"""One run of a case: the outcome, its seconds, and those of placement alone, None where that is not known."""
PER_CASE_S = 2.0
"""A case is not repeated when its runs took so long together."""

GARBAGE_FROM_S = 0.05
"""After a longer run its garbage is collected before the next; for short ones that would take longer than they do."""

NOT_COMPARED = ("local_accelerator_rank", "visible_accelerators")
"""Fields that follow from the others for isolated accelerators, and that RLinf fills in its own way for all else."""


class Side(Protocol):
    """One planner."""

    def prepare(self, case: Case) -> Run:
        """A case, ready to run."""


class RlinfSide:
    """The wheel's planner: parse the configuration, form the cluster, place, write down."""

    def __init__(self) -> None:
        from bench.placement.rlinf_peer import Peer, prepare

        self._peer = Peer(prepare())

    def prepare(self, case: Case) -> Run:
        """See the protocol."""

        def run() -> tuple[Any, float, float]:
            result, whole_s = _clocked(lambda: self._peer.result(case))
            return result, whole_s, self._peer.placement_s

        return run


class ConformanceSide:
    """RLJob on the same cases, doing the same."""

    def __init__(self) -> None:
        from rljob_convert.conformance import limits

        # Before the modules that read it: cases that users send are bounded, here growth is the question.
        limits.MAX_PROCESSES = limits.MAX_UNITS
        from rljob_convert.conformance import answers

        self._result_of = answers.result_of

    def prepare(self, case: Case) -> Run:
        """See the protocol."""
        place = self._placement_of(case)

        def run() -> tuple[Any, float, float | None]:
            result, whole_s = _clocked(lambda: self._result_of(case))
            if place is None or not result["ok"]:
                return result, whole_s, None
            return result, whole_s, _clocked(place)[1]

        return run

    @staticmethod
    def _placement_of(case: Case) -> Callable[[], object] | None:
        """Placement alone through the library, everything before it done; None where the case fails before it."""
        from rljob_api.errors import PlacementError
        from rljob_convert.conformance.cases import read_config, read_hardware, strategy
        from rljob_convert.conformance.cluster import ClusterConfig, build_cluster, parse_cluster
        from rljob_convert.conformance.sizes import model_parallel_sizes
        from rljob_convert.conformance.values import rank_list
        from rljob_convert.placement import component, model_parallel, multi_agent

        kind = case["kind"]
        if kind == "parse_rank":
            return lambda: rank_list(case["rank_config"], case["available_ranks"], case["rank_type"])
        plain = {"component": component.ComponentPlacement, "hybrid": component.HybridComponentPlacement}
        sized = {
            "model_parallel": model_parallel.ModelParallelComponentPlacement,
            "model_parallel_eval": model_parallel.ModelParallelEvalComponentPlacement,
            "multi_agent": multi_agent.MultiAgentModelParallelComponentPlacement,
            "multi_agent_eval": multi_agent.MultiAgentModelParallelEvalComponentPlacement,
        }
        isolate = case.get("isolate_accelerator", True)
        with suppress(PlacementError):
            hardware = read_hardware(case["cluster"])
            parsed = ClusterConfig(num_nodes=len(hardware.machines), component_placement={})
            config = read_config(case) if "config" in case or "config_yaml" in case else {}
            if config:
                parsed = parse_cluster(config.get("cluster"), len(hardware.machines))
            there = build_cluster(parsed, hardware.machines, hardware.driver).topology
            if kind in ("packed", "flexible", "node"):
                return lambda: strategy(kind, case["strategy_args"]).get_placement(there, isolate)
            section = parsed.component_placement
            if kind in plain:
                return lambda: _all(plain[kind](section, there), isolate)
            sizes = model_parallel_sizes(config, evaluation=kind.endswith("_eval"))
            return lambda: _all(sized[kind](section, there, sizes), isolate)
        return None


def _clocked(work: Callable[[], Any]) -> tuple[Any, float]:
    start_s = time.perf_counter()
    result = work()
    return result, time.perf_counter() - start_s


def _all(placement: Any, isolate: bool) -> list[Any]:
    return [placement.get_placement(name, isolate) for name in placement.strategies]


class PlanSide:
    """RLJob from the spec of a manifest to its plan."""

    def prepare(self, case: Case) -> Run:
        """See the protocol."""
        from bench.placement.cases import growth_spec
        from rljob_api.planner import plan_or_errors
        from rljob_api.planning.plan import Plan

        spec = growth_spec(case["devices"], case["layout"])

        def run() -> tuple[Any, float, None]:
            planned, whole_s = _clocked(lambda: plan_or_errors(spec))
            return {"ok": isinstance(planned, Plan), "plan": planned}, whole_s, None

        return run


SIDES: dict[str, Callable[[], Side]] = {"plan": PlanSide, "conformance": ConformanceSide, "rlinf": RlinfSide}


class _TooLongError(BaseException):
    """A case ran past its limit. No Exception, which a planner might take for a refusal."""


def _alarm(_signal: int, _frame: FrameType | None) -> None:
    raise _TooLongError


def timed(side: Side, case: Case, repeat: int, limit_s: float) -> Case:
    """Best times of a case, and a digest of its placements."""
    row: Case = {"name": case["name"]}
    signal.signal(signal.SIGALRM, _alarm)
    try:
        run = side.prepare(case)
        times: list[float] = []
        placing: list[float] = []
        result: Any = None
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        while len(times) < repeat and sum(times) < PER_CASE_S:
            result = None
            if sum(times) > GARBAGE_FROM_S:
                gc.collect()
            result, whole_s, placement_s = run()
            times.append(whole_s)
            placing += [placement_s] if placement_s is not None else []
        signal.setitimer(signal.ITIMER_REAL, 0)
    except _TooLongError:
        return row | {"timed_out": True}
    row |= {"ok": result["ok"], "seconds": min(times), "placement_s": min(placing, default=None), "peak_bytes": peak_bytes()}
    return row | {"digest": digest(result), "difference": result.get("difference")}


def digest(result: Case) -> str | None:
    """Of the placements of all components; equal where they are, by the rules of the case format."""
    if "components" not in result:
        return json.dumps(result["ranks"]) if "ranks" in result else None
    placements = {
        name: [{key: value for key, value in each.items() if key not in NOT_COMPARED} for each in placed.get("placements") or ()]
        for name, placed in result["components"].items()
    }
    return hashlib.sha256(json.dumps(placements, sort_keys=True).encode()).hexdigest()


def peak_bytes() -> int:
    """Largest resident memory of this process so far; the kernel's rusage would count what forked it, too."""
    status = Path("/proc/self/status").read_text()
    return 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.placement.side", description=__doc__)
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("--cases", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeat", type=int, default=3, help="runs of a case, fewer when they take long; the best counts")
    parser.add_argument("--limit-s", type=float, default=60.0, help="of one case")
    arguments = parser.parse_args()
    side = SIDES[arguments.side]()
    base_bytes = peak_bytes()
    cases = [json.loads(line) for line in arguments.cases.read_text().splitlines()]
    rows = [timed(side, case, arguments.repeat, arguments.limit_s) for case in cases]
    arguments.out.write_text(json.dumps({"base_bytes": base_bytes, "cases": rows}))


if __name__ == "__main__":
    main()
