"""Rules about the weight sync."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from rljob_api.adapters import SERVED_RANKS
from rljob_api.errors import FieldError, field_error
from rljob_api.planning import sync_places
from rljob_api.planning.plan import Plan
from rljob_api.planning.sync_routes import loads_whole_updates
from rljob_api.v1alpha1.operations import AdapterSync
from rljob_api.v1alpha1.rljob import RLJobSpec

_PATH = "spec.weightSync.adapters"


def _served_adapters(spec: RLJobSpec) -> Iterator[FieldError]:
    """An engine serves what vLLM can."""
    if spec.weight_sync.adapters is not AdapterSync.SERVED or spec.validates_only:
        return
    served, lora = AdapterSync.SERVED.value, spec.model.lora
    if lora is None:
        yield field_error(_PATH, served, "needs adapters, and spec.model.lora is not set", "set model.lora, or write Merged")
    elif lora.rank > SERVED_RANKS[-1]:
        problem = f"needs model.lora.rank of at most {SERVED_RANKS[-1]}, vLLM's largest; it is {lora.rank}"
        yield field_error(_PATH, served, problem, "lower the rank, or write Merged")
    if whole := loads_whole_updates(spec):
        yield field_error(_PATH, served, f"needs vLLM, and {whole}'s engine is SGLang", "write Merged, or engine.type: VLLM")
    if spec.weight_sync.delta is not None:
        problem = "sends adapters alone, of which every number changes; spec.weightSync.delta would send only what changed"
        yield field_error(_PATH, served, problem, "remove weightSync.delta, or write Merged")


def _probe(spec: RLJobSpec) -> Iterator[FieldError]:
    """Settings of a check that is never made."""
    probe = spec.weight_sync.probe
    for field, value in probe.changed().items() if probe.every_syncs == 0 and not spec.validates_only else ():
        if field != "everySyncs":
            problem = "has no effect, probe.everySyncs is 0 and nothing is checked"
            yield field_error(f"spec.weightSync.probe.{field}", value, problem, "remove it, or set everySyncs")


RULES: tuple[Callable[[RLJobSpec], Iterable[FieldError]], ...] = (_served_adapters, _probe)
"""Rules between fields, each independent of the others."""
PLAN_RULES: tuple[Callable[[RLJobSpec, Plan], Iterable[FieldError]], ...] = (sync_places.problems,)
"""Rules that need to know where processes are."""
