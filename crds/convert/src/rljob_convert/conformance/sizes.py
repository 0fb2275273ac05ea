"""Parallelism of the models, out of an RLinf run configuration (keys as RLinf 0.3.0 reads them in ``utils/placement.py``).

::

    actor, critic, inference or actor_inference, critic_inference:   model.{tensor_model,context,pipeline_model}_parallel_size
    rollout, and further engines by component name:                  {tensor,pipeline}_parallel_size, dp_size
    cluster: auto_scheduler, use_pre_process_policy                  algorithm: recompute_logprobs
"""

from __future__ import annotations

from collections.abc import Mapping

from rljob_api.errors import PlacementError, show
from rljob_convert.placement.sizes import EngineSizes, ModelParallelSizes

_CHECK = "M4"
_KNOWN = frozenset({"actor", "rollout", "reward", "inference", "actor_inference", "critic", "critic_inference"})


def model_parallel_sizes(config: Mapping[str, object], *, evaluation: bool = False) -> ModelParallelSizes:
    """The sizes that a run configuration gives; what it may leave out has RLinf's default.

    Args:
        config: the whole configuration, decoded from YAML or JSON.
        evaluation: the run evaluates only and has no actor.

    Raises:
        PlacementError: the section of the actor or of rollout is missing, or a section, size or flag has another type (M4).
    """
    cluster = _section(config, "cluster")
    actor = {} if evaluation and "actor" not in config else _model(config, "actor", required=True)
    rollout = _section(config, "rollout", required=True)
    critic = _model(config, "critic")
    named = next((name for name in ("inference", "actor_inference") if name in config), None)
    inference = None if named is None else _model(config, named, required=True)
    critic_inference = _model(config, "critic_inference")
    return ModelParallelSizes(
        actor_tp=_size(actor, "actor.model", "tensor_model_parallel_size") or 1,
        actor_cp=_size(actor, "actor.model", "context_parallel_size") or 1,
        actor_pp=_size(actor, "actor.model", "pipeline_model_parallel_size") or 1,
        rollout_tp=_size(rollout, "rollout", "tensor_parallel_size") or 1,
        rollout_pp=_size(rollout, "rollout", "pipeline_parallel_size") or 1,
        # A section without the key means 1, no section means as the actor.
        inference_tp=None if inference is None else _size(inference, f"{named}.model", "tensor_model_parallel_size") or 1,
        inference_pp=None if inference is None else _size(inference, f"{named}.model", "pipeline_model_parallel_size"),
        critic_tp=_size(critic, "critic.model", "tensor_model_parallel_size") or 1,
        critic_cp=_size(critic, "critic.model", "context_parallel_size") or 1,
        critic_pp=_size(critic, "critic.model", "pipeline_model_parallel_size") or 1,
        critic_inference_tp=_size(critic_inference, "critic_inference.model", "tensor_model_parallel_size"),
        critic_inference_pp=_size(critic_inference, "critic_inference.model", "pipeline_model_parallel_size"),
        auto_scheduler=_flag(cluster, "cluster", "auto_scheduler"),
        use_pre_process_policy=_flag(cluster, "cluster", "use_pre_process_policy"),
        recompute_logprobs=_flag(_section(config, "algorithm"), "algorithm", "recompute_logprobs"),
        engines=_engines(config, cluster),
    )


def _engines(config: Mapping[str, object], cluster: Mapping[str, object]) -> dict[str, EngineSizes]:
    placement = cluster.get("component_placement")
    keys = placement if isinstance(placement, Mapping) else {}
    names = {name.strip() for key in keys for name in str(key).split(",")} - _KNOWN
    sizes: dict[str, EngineSizes] = {}
    for name in sorted(names & config.keys()):
        section = _section(config, name)
        sizes[name] = EngineSizes(
            tp=_size(section, name, "tensor_parallel_size"),
            pp=_size(section, name, "pipeline_parallel_size"),
            dp=_size(section, name, "dp_size"),
        )
    return sizes


def _section(values: Mapping[str, object], name: str, *, where: str = "", required: bool = False) -> Mapping[str, object]:
    """A map of the configuration; empty when it is not there and need not be."""
    section = values.get(name)
    if section is None and not required:
        return {}
    if not isinstance(section, Mapping):
        is_there = f"is {_shown(section)}, not a map" if name in values else "is missing"
        raise PlacementError(_CHECK, f"{where}{name} {is_there}", f"add the section {where}{name} with the sizes")
    return section


def _model(config: Mapping[str, object], name: str, *, required: bool = False) -> Mapping[str, object]:
    return _section(_section(config, name, required=required), "model", where=f"{name}.", required=required)


def _size(section: Mapping[str, object], where: str, key: str) -> int | None:
    """A size of at least 1; None when it is not there."""
    if key not in section:
        return None
    value = section[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlacementError(_CHECK, f"{where}.{key} is {_shown(value)}, not a size", "write a whole number from 1")
    return value


def _flag(section: Mapping[str, object], where: str, key: str) -> bool:
    value = section.get(key)
    if value is not None and not isinstance(value, bool):
        raise PlacementError(_CHECK, f"{where}.{key} is {_shown(value)}, neither true nor false", "write true or false")
    return bool(value)


def _shown(value: object) -> str:
    """The value; of nested or very large ones only the kind, because they may be too deep or too long to write."""
    if isinstance(value, int) and abs(value) >= 10**18:
        return "a very large number"
    return show(value) if value is None or isinstance(value, str | int | float) else f"a {type(value).__name__}"
