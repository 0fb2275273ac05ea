"""ROLL configurations: models that judge on devices of the job, as Judge components.

ROLL has each of them on devices of a reward (``inference``, ``RewardWorker``) or of the section ``reward_model`` (``cluster``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rljob_api import paths
from rljob_convert import common
from rljob_convert.common import Section, compact
from rljob_convert.source import Source

SERVED = ("reward_model",)
"""Section of the model that rewards of type ``cluster`` ask."""
ROOM = 0.9
"""Of a device's memory, which judges on it share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeModel:
    """A model to be served."""

    name: str
    """Of the component."""
    where: tuple[str, ...]
    """Its section."""
    mapping: str
    devices: Sequence[int]


def judge_component(source: Source, model: JudgeModel, fraction_limit: float | None) -> Section:
    """The component; ``fraction_limit`` is its share of devices on which other judges are, too."""
    where, config = model.where, (*model.where, "strategy_args", "strategy_config")
    path = source.text(*where, "model_args", "model_name_or_path", limit=256)
    if path is None:
        at = (*where, "model_args", "model_name_or_path")
        path = source.assume(at, common.MODEL_PLACEHOLDER, "the file names no model", f"set model.path of {model.name}")
    tensor = source.integer(*config, "tensor_parallel_size", low=1, high=64)
    size = source.integer(*where, "num_gpus_per_worker", low=1, high=64) or tensor or 1
    strategy = source.text(*where, "strategy_args", "strategy_name")
    if strategy not in (None, "vllm"):
        source.differs((*where, "strategy_args", "strategy_name"), "judges are served by vLLM")
    longest = source.integer(*config, "max_model_len", low=1) if strategy in (None, "vllm") else None
    engine: Section = {
        "tensorParallelSize": size if size > 1 else None,
        "dtype": source.choice(common.DTYPES, *where, "model_args", "dtype"),
        "memoryFraction": _fraction(source, config, fraction_limit),
        "enforceEager": source.flag(*config, "enforce_eager"),
        "prefixCaching": source.flag(*config, "enable_prefix_caching"),
        "extraArgs": None if longest is None else {"max_model_len": longest},
    }
    placement: Section = {"deviceMapping": model.mapping}
    if size > 1:
        placement["devicesPerWorker"] = size
    section = {"name": model.name, "role": "Judge", "placement": placement, "model": {"path": path}, "engine": compact(engine) or None}
    return compact(section)


def fraction_limits(models: Sequence[JudgeModel]) -> Mapping[str, float]:
    """By component: the share of a device's memory where several judges are on it."""
    users = Counter(device for model in models for device in set(model.devices))
    most = {model.name: max((users[device] for device in model.devices), default=1) for model in models}
    return {name: round(ROOM / count, 2) for name, count in most.items() if count > 1}


def _fraction(source: Source, config: paths.Parts, limit: float | None) -> float | None:
    given = source.number(*config, "gpu_memory_utilization", above=0.0, high=1.0)
    if limit is None or (given is not None and given <= limit):
        return given
    why = f"becomes {limit:g}: several models judge on these devices at the same time"
    source.differs((*config, "gpu_memory_utilization"), why, "set engine.memoryFraction, or place them on different devices")
    return limit
