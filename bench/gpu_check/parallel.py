"""Two trainer ranks against one, in float32: what differs is a fault of the multi-rank code."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from bench.gpu_check import ranks
from bench.gpu_check.children import context, messages
from bench.gpu_check.lines import Line, at_most, equal
from bench.gpu_check.policy import folder_of
from bench.gpu_check.ports import free_ports
from bench.gpu_check.scale import Scale

TOLERANCE = 1e-4
"""Of loss, gradient norm, and log-probs: float32, summed in another order."""
AFTER_STEP = 1e-3
"""Of log-probs and weights after a step of AdamW, whose division magnifies what gradients differ by."""


def check(scale: Scale) -> Iterator[Line]:
    """Every layout; one that breaks off does not keep the others from being tried."""
    devices = torch.cuda.device_count() if scale.on_cuda else 0
    plan = {
        "devices": min(devices, 2),
        "models": {"dense": str(folder_of(scale.small, scale)), "mixture": str(folder_of(scale.small_mixture, scale))},
        "vocab_size": min(int(model.config["vocab_size"]) for model in (scale.small, scale.small_mixture)),
        "token_budget": scale.rank_tokens,
        "longest": scale.rank_tokens // 3,
        "sequences": 12,
        "wait_s": 2 * scale.wait_s,
        "folder": str(scale.folder),
    }
    left = [case.name for case in ranks.CASES]
    while left:
        before = len(left)
        yield from _pair(plan, left, devices, scale.begin)
        if len(left) == before:  # a pair that says nothing at all
            yield _failed(left.pop(0), "the ranks ended without an answer; their errors are above")


def _pair(plan: Mapping[str, Any], left: list[str], devices: int, begin: Callable[[str], None]) -> Iterator[Line]:
    """Start two ranks for the cases that are left, and take each from the list whose result has come."""
    ctx = context()
    results = ctx.Queue()
    ports = free_ports(2 * len(left))
    own = {**plan, "cases": tuple(left), "ports": {name: (ports.pop(), ports.pop()) for name in left}}
    jobs = [(ranks.main, (rank, own, results)) for rank in range(2)]
    try:
        for name, found in messages(ctx, jobs, results, count=len(left), timeout_s=plan["wait_s"], what="parallel", begin=begin):
            left.remove(name)
            if isinstance(found, str):
                yield _failed(name, found)
                return
            yield from _lines(name, found, _where(devices))
    except (RuntimeError, TimeoutError) as error:
        yield _failed(left.pop(0), str(error))


def _lines(name: str, found: Mapping[str, float], where: str) -> Iterator[Line]:
    case = _case(name)
    scored, unit = ("values", "difference") if case.critic else ("log-probs", "nats")
    title = f"{case.title}, 2 ranks"
    yield at_most("parallel", f"{title}: loss and gradient norm", found["metrics"], "relative difference", TOLERANCE, note=where)
    yield at_most("parallel", f"{title}: {scored}", found["before"], unit, TOLERANCE)
    note = f"the step moved them by {found['learned']:.2g}"
    yield at_most("parallel", f"{title}: {scored} after a step", found["after"], unit, AFTER_STEP * max(1.0, found["learned"]), note=note)
    yield at_most("parallel", f"{title}: weights after a step", found["weights"], "difference", AFTER_STEP / 100, note="a step is 0.01")
    if "moved" in found:
        yield equal("parallel", f"{title}: {scored} after offload, load, and a checkpoint read back", found["moved"])


def _case(name: str) -> ranks.Case:
    return next(case for case in ranks.CASES if case.name == name)


def _failed(name: str, why: str) -> Line:
    return Line(check="parallel", what=_case(name).title, failed=f"{_case(name).title}: {why}")


def _where(devices: int) -> str:
    if not devices:
        return "gloo"
    return "NCCL, two GPUs" if devices > 1 else "NCCL, two ranks on one GPU, through sockets: correctness, not speed"
