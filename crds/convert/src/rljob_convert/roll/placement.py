"""ROLL configurations: roles and their device mappings to components and one group of nodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rljob_api import paths
from rljob_api.errors import PlacementError
from rljob_api.placement import device_mapping
from rljob_convert import common
from rljob_convert.common import Section, compact
from rljob_convert.notes import NoteKind
from rljob_convert.roll.judge_places import SERVED, JudgeModel, fraction_limits, judge_component
from rljob_convert.roll.judges import judging_section, key_variables
from rljob_convert.roll.learning import context_keys, expert_keys, leave
from rljob_convert.roll.teachers import Teacher
from rljob_convert.source import Source

GROUP = "gpu"
DEFAULT_DEVICES_PER_NODE = 8
_CONFIG = ("actor_infer", "strategy_args", "strategy_config")
_EXTRA_LIMIT = 64
MAX_REWARDS = 32
"""Rewards of a job; further ones end in a note."""
MAX_DEVICES = 131_072
"""Devices of a job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Machines and components."""

    node_groups: list[Section]
    components: list[Section]
    num_trainer_devices: int
    num_critic_devices: int
    """0 without a critic."""
    num_engines: int
    """0 where the mapping is no mapping."""
    num_reward_workers: int
    sharing: frozenset[str]
    """Roles that have a device in common with others."""
    judges: Mapping[tuple[str, ...], str]
    """Components that serve the models of rewards, by the rewards' places."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mapping:
    text: str
    devices: Sequence[int]
    """Empty when the text is not a mapping; the planner says why."""


def place(
    source: Source, *, longest: int, needs_reference: bool, needs_critic: bool, is_agentic: bool, teachers: Sequence[Teacher] = ()
) -> Placed:
    """Node groups and components of a configuration; ``longest``: tokens of the longest request."""
    engine, size = _engine(source, longest)
    trainer, rollout = _trainer_and_rollout(source, size)
    mapped: dict[str, _Mapping] = {"actor_train": trainer, "actor_infer": rollout}
    components = [_component(source, "actor_train", "Trainer", trainer), _component(source, "actor_infer", "Rollout", rollout, size)]
    components[1]["engine"] = engine
    reference = _reference(source, trainer, needs_reference=needs_reference)
    if reference is not None:
        mapped["reference"] = reference
        components.append(_component(source, "reference", "Reference", reference))
    for teacher in teachers:
        mapped[teacher.name] = _mapping(source, *map(str, teacher.where)) or _like(source, teacher.where, trainer)
        components.append(_teacher(source, teacher, mapped[teacher.name]))
    if needs_critic:
        mapped["critic"] = _mapping(source, "critic") or _like(source, "critic", trainer)
        components.append(_component(source, "critic", "Critic", mapped["critic"]))
    elif source.keys("critic"):
        source.drop(("critic",), "only adv_estimator gae has a critic")
    judges = {} if is_agentic else _judges(source)
    models = list({model.name: model for model in judges.values()}.values())
    limits = fraction_limits(models)
    components += [judge_component(source, model, limits.get(model.name)) for model in models]
    mapped |= {model.name: _Mapping(text=model.mapping, devices=model.devices) for model in models}
    components += _cpu_components(source, judges, is_agentic=is_agentic)
    groups = [_node_group(source, [device for mapping in mapped.values() for device in mapping.devices])]
    secrets = [variable for component in components for variable in component.pop("_secrets", [])]
    _group_env(source, groups, secrets)
    users = Counter(device for mapping in mapped.values() for device in set(mapping.devices))
    sharing = frozenset(role for role, mapping in mapped.items() if any(users[device] > 1 for device in mapping.devices))
    return Placed(
        node_groups=groups,
        components=components,
        num_trainer_devices=len(trainer.devices) or 1,
        num_critic_devices=len(mapped["critic"].devices) if needs_critic else 0,
        num_engines=len(rollout.devices) // size,
        num_reward_workers=sum(c["placement"]["workers"] for c in components if c["role"] == "Reward"),
        sharing=sharing,
        judges={where: model.name for where, model in judges.items()},
    )


def _trainer_and_rollout(source: Source, size: int) -> tuple[_Mapping, _Mapping]:
    trainer, rollout = _mapping(source, "actor_train"), _mapping(source, "actor_infer")
    if trainer is None:
        trainer = _like(source, "actor_train", rollout or _whole(source, "actor_train", size))
    if rollout is None:
        rollout = _like(source, "actor_infer", trainer)
    beside = set(rollout.devices) - set(trainer.devices)
    is_whole = len(trainer.devices) % size == 0
    if beside and set(trainer.devices) < set(rollout.devices) and is_whole and not source.peek("async_generation_ratio"):
        why = f"becomes {trainer.text}: without generating ahead, engines beside the Trainer's devices would wait while it trains"
        source.differs(("actor_infer", "device_mapping"), why, "keep the mapping and write overlap.asyncGenerationRatio: 1")
        rollout = trainer
    return trainer, rollout


def _whole(source: Source, role: str, at_least: int) -> _Mapping:
    size = source.integer(role, "world_size", low=1, high=4096) or at_least
    return _Mapping(text=f"list(range(0,{size}))", devices=range(size))


def _like(source: Source, role: str | paths.Parts, other: _Mapping) -> _Mapping:
    where = (role,) if isinstance(role, str) else role
    why = f"the file does not say where {paths.join(where)} runs"
    source.assume((*where, "device_mapping"), other.text, why, "set components[].placement")
    return other


def _mapping(source: Source, *role: str) -> _Mapping | None:
    """The device mapping of a role as text."""
    where = (*role, "device_mapping")
    if isinstance(source.peek(*where), list):
        count = source.length(*where)
        ranks = [source.integer(*where, index, high=MAX_DEVICES) for index in range(min(count, 1024))]
        text = f"[{', '.join(str(rank) for rank in ranks if rank is not None)}]"
        source.differs(where, "a YAML list is written as text; ROLL evaluates a text and fails on a list")
    else:
        written = source.text(*where, limit=device_mapping.MAX_TEXT)
        if written is None:
            return None
        text = written.strip()
    try:
        devices: Sequence[int] = device_mapping.parse(text, MAX_DEVICES)
    except PlacementError as error:
        source.note(NoteKind.DIFFERENT, where, f"is kept, but no placement: {error.problem}", error.remedy)
        devices = ()
    return _Mapping(text=text, devices=devices)


def _component(source: Source, role: str, kind: str, mapping: _Mapping, size: int = 1) -> Section:
    """A component on devices; its own environment, with what must come from a Secret apart under ``_secrets``."""
    placement: Section = {"deviceMapping": mapping.text}
    if size > 1:
        placement["devicesPerWorker"] = size
    given = source.peek(role, "num_gpus_per_worker")
    if given is not None:
        number = source.integer(role, "num_gpus_per_worker", low=1, high=1024)
        if number is not None and number != size:
            why = "ROLL overwrites it with tensor times pipeline parallel size" if kind == "Rollout" else f"a {kind} process has one device"
            source.drop((role, "num_gpus_per_worker"), f"{why}, {size}")
    if source.has(role, "world_size"):
        source.integer(role, "world_size", low=1)
        if mapping.devices and source.peek(role, "world_size") != len(mapping.devices) // size:
            source.drop((role, "world_size"), f"ROLL overwrites it with devices / devices per worker = {len(mapping.devices) // size}")
    if kind != "Rollout":
        _strategy(source, role)
    divided = _sizes(source, mapping, role) if kind in ("Reference", "Critic") else {}
    env, secrets = _variables(source, (role, "system_envs"))
    component = {"name": role, "role": kind, "placement": placement, **divided, "env": env, "_secrets": secrets}
    return compact(component)


def _teacher(source: Source, teacher: Teacher, mapping: _Mapping) -> Section:
    where = tuple(map(str, teacher.where))
    _strategy(source, *where)
    component = {"name": teacher.name, "role": "Teacher", "placement": {"deviceMapping": mapping.text}, "model": teacher.model}
    return compact({**component, "teaches": teacher.teaches, **_sizes(source, mapping, *where)})


def _sizes(source: Source, mapping: _Mapping, *role: str) -> Section:
    """Parallel sizes of a component, from the keys that its strategy reads."""
    (context, other_context), (experts, other_experts) = context_keys(source, *role), expert_keys(source, *role)
    leave(source, other_context)
    leave(source, other_experts)
    tensor = (*role, "strategy_args", "strategy_config", "tensor_model_parallel_size")
    keys = common.SizeKeys(tensor=tensor, context=context, experts=experts)
    return common.component_sizes(source, keys, len(mapping.devices))


def _strategy(source: Source, *role: str) -> None:
    where = (*role, "strategy_args", "strategy_name")
    name = source.text(*where)
    if name not in (None, "fsdp2_train", "fsdp2_infer"):
        source.differs(where, "RLJob runs this role on FSDP2", "nothing to do unless the model does not fit")


def _engine(source: Source, longest: int) -> tuple[Section, int]:
    """The engine and the devices of one."""
    where = ("actor_infer", "strategy_args", "strategy_name")
    kind = source.choice({"vllm": "VLLM", "sglang": "SGLang"}, *where)
    if kind is None and not source.has(*where):
        kind = source.assume(where, "VLLM", "the file does not name an engine")
    kind = kind or "VLLM"
    tensor = source.integer(*_CONFIG, "tensor_parallel_size", low=1, high=64) or source.integer(*_CONFIG, "tp_size", low=1, high=64)
    pipeline = source.integer(*_CONFIG, "pipeline_parallel_size", low=1, high=64) or source.integer(*_CONFIG, "pp_size", low=1, high=64)
    stages = pipeline or 1
    if kind == "SGLang" or (tensor is None and not source.has(*where)):
        given = source.integer("actor_infer", "num_gpus_per_worker", low=1, high=64)
        if given is not None and given % stages == 0:
            tensor = given // stages
    tensor = tensor or 1
    running = source.integer("max_running_requests", low=1, high=65_536)
    own = source.integer(*_CONFIG, "max_num_seqs", low=1, high=65_536) or source.integer(
        *_CONFIG, "max_running_requests", low=1, high=65_536
    )
    if own is not None and running not in (None, own):
        source.drop(("max_running_requests",), f"the engine's own limit {own} counts")
    fraction = source.number(*_CONFIG, "gpu_memory_utilization", above=0.0, high=1.0)
    static = source.number(*_CONFIG, "mem_fraction_static", above=0.0, high=1.0)
    engine = compact(
        {
            "type": kind,
            "dtype": _engine_dtype(source),
            "tensorParallelSize": tensor,
            "pipelineParallelSize": pipeline if stages > 1 else None,
            "maxRunningRequests": own or running,
            "memoryFraction": static if kind == "SGLang" and static is not None else fraction,
            "prefixCaching": source.flag(*_CONFIG, "enable_prefix_caching"),
            "enforceEager": source.flag(*_CONFIG, "enforce_eager"),
            "extraArgs": common.engine_arguments(source, kind, _extra_args(source), _CONFIG, longest),
        }
    )
    return engine, tensor * stages


def _engine_dtype(source: Source) -> str | None:
    """The engine's type where it is not the Trainer's."""
    trained = common.DTYPES.get(str(source.peek("actor_train", "model_args", "dtype")).lower(), "bfloat16")
    dtype = source.choice(common.DTYPES, "actor_infer", "model_args", "dtype")
    return None if dtype == ("bfloat16" if trained == "float16" else trained) else dtype


_KNOWN_ARGS = {
    "tensor_parallel_size",
    "tp_size",
    "pipeline_parallel_size",
    "pp_size",
    "gpu_memory_utilization",
    "mem_fraction_static",
    "max_num_seqs",
    "max_running_requests",
    "enforce_eager",
    "enable_prefix_caching",
    "load_format",
}


def _extra_args(source: Source) -> Section:
    keys = [key for key in source.keys(*_CONFIG) if key not in _KNOWN_ARGS]
    args: Section = {}
    for key in keys[:_EXTRA_LIMIT]:
        value = source.peek(*_CONFIG, key)
        if isinstance(value, (dict, list)):
            args[key] = source.plain(*_CONFIG, key) if isinstance(value, dict) else source.texts(*_CONFIG, key)
        else:
            args[key] = source.take(*_CONFIG, key)
    return {key: value for key, value in args.items() if value is not None}


def _reference(source: Source, trainer: _Mapping, *, needs_reference: bool) -> _Mapping | None:
    if needs_reference:
        return _mapping(source, "reference") or _like(source, "reference", trainer)
    if source.has("reference"):
        why = "nothing in the loss or the rewards uses it (use_kl_loss and add_token_level_kl are off): ROLL loads it for metrics only"
        source.drop(("reference",), why, "set algorithm.kl.coefficient and add a Reference component for a KL penalty")
    return None


def _judges(source: Source) -> dict[tuple[str, ...], JudgeModel]:
    """Models on devices that rewards ask, by the rewards' places; rewards of type ``cluster`` ask one together."""
    found: dict[tuple[str, ...], JudgeModel] = {}
    for where in reward_places(source):
        section = judging_section(source, where, where[-1])
        mapping = None if section is None else _mapping(source, *section)
        if section is not None and mapping is not None and mapping.devices:
            taken = {model.name for model in found.values() if model.where != section}
            name = common.component_name("reward_model" if section == SERVED else f"{section[-1]}_model", taken)
            found[where] = JudgeModel(name=name, where=section, mapping=mapping.text, devices=mapping.devices)
    return found


def _cpu_components(source: Source, judges: Mapping[tuple[str, ...], JudgeModel], *, is_agentic: bool) -> list[Section]:
    if is_agentic:
        for key in ("reward", "rewards"):
            if source.has(key):
                why = "an agentic job is scored by its environments, and LLMJudge is a type of rewards[]"
                source.drop((key,), why, "call a judge that is served elsewhere from the environment")
        return [_environment_component(source)]
    components: list[Section] = []
    asking = {where for where, model in judges.items() if model.where == where}
    counts = [1 if where in asking else _reward_workers(source, where) for where in reward_places(source)]
    if source.keys("reward"):
        counts.append(_reward_workers(source, ("reward",)))
    if len(counts) > 1:
        source.assume(
            ("rewards",), sum(counts), "one Reward component scores for all rewards, with the sum of their workers", "set its workers"
        )
    if not counts:
        counts = [source.assume(("rewards",), 1, "responses are judged by CPU workers", "set workers of the Reward component")]
    if counts:
        secrets = [variable for where in reward_places(source) for variable in key_variables(source, where)]
        components.append({"name": "reward", "role": "Reward", "placement": {"workers": sum(counts)}, "_secrets": secrets})
    return components


_DOCUMENTED_DOMAINS = ("math_rule", "code_sandbox", "llm_judge", "crossthinkqa", "ifeval", "general_val", "multiple_choice_boxed")
"""Rewards that an excerpt of ROLL's documentation shows at the top."""


def reward_places(source: Source) -> list[tuple[str, ...]]:
    """Where the file describes rewards: below ``rewards``, or at the top under a name of ROLL's own domains."""
    places: list[tuple[str, ...]] = [("rewards", domain) for domain in source.keys("rewards")]
    places += [(key,) for key in source.keys() if key in _DOCUMENTED_DOMAINS]
    return places[:MAX_REWARDS]


def _reward_workers(source: Source, where: paths.Parts) -> int:
    if len(where) == 1 and where[0] != "reward":
        source.differs(where, "is one of ROLL's rewards, which belong below rewards")
    mapping = _mapping(source, *map(str, where))
    if mapping is None:
        return source.integer(*where, "world_size", low=1) or source.assume(
            (*where, "world_size"), 1, "the file gives no number of workers"
        )
    size = source.integer(*where, "num_gpus_per_worker", low=1, high=1024) or 1
    workers = max(1, len(mapping.devices) // size)
    source.differs(
        (*where, "device_mapping"),
        f"RLJob's rewards run on CPU: {workers} CPU workers instead, and these devices are free",
    )
    if source.has(*where, "world_size"):
        source.drop((*where, "world_size"), f"ROLL overwrites it with devices / devices per worker = {workers}")
    return workers


def _environment_component(source: Source) -> Section:
    manager = ("train_env_manager",)
    groups = source.integer(*manager, "num_env_groups", low=1) or 1
    size = (source.integer(*manager, "group_size", low=1, high=4096) or 1) + (source.integer(*manager, "group_size_redundancy") or 0)
    most = source.integer(*manager, "max_env_num_per_worker") or 0
    workers = 1 if most == 0 else min(-(-groups * size // most), 1_000_000)
    if most == 0:
        where = (*manager, "max_env_num_per_worker")
        source.assume(where, 1, "ROLL puts all environments into one process unless this is set", "set workers of the component")
    env, secrets = _variables(source, (*manager, "system_envs"))
    section = {"name": "train_env_manager", "role": "Environment", "placement": {"workers": workers}, "env": env, "_secrets": secrets}
    return compact(section)


def _variables(source: Source, where: paths.Parts) -> tuple[list[Section], list[Section]]:
    """Environment variables of a section: those of a component, and those that must come from a Secret."""
    env: list[Section] = []
    secrets: list[Section] = []
    for name in source.keys(*where):
        variable, is_secret = common.environment(source, (*where, name), name)
        if variable is not None:
            (secrets if is_secret else env).append(variable)
    return env, secrets


def _group_env(source: Source, groups: list[Section], secrets: list[Section]) -> None:
    env, own_secrets = _variables(source, ("system_envs",))
    merged = {variable["name"]: variable for variable in (*env, *own_secrets, *secrets)}
    if env:
        source.differs(("system_envs",), "reaches every worker; ROLL gives it to the four model roles only, not to rewards")
    if merged:
        for group in groups:
            group["env"] = list(merged.values())


def _node_group(source: Source, devices: Sequence[int]) -> Section:
    """One group of equal nodes that holds the highest device rank; a smaller single node when it is enough."""
    needed = max(devices, default=0) + 1
    per_node = source.integer("num_gpus_per_node", low=1, high=1024)
    if per_node is None:
        per_node = DEFAULT_DEVICES_PER_NODE
        if needed != per_node:
            source.assume(("num_gpus_per_node",), per_node, "ROLL's default", "set nodeGroups[].devicesPerNode")
    nodes = -(-needed // per_node)
    if source.has("num_nodes") and source.integer("num_nodes", low=1) not in (None, nodes):
        source.drop(("num_nodes",), f"the highest device rank {needed - 1} with {per_node} a node makes {nodes}, as in ROLL")
    if nodes == 1 and needed < per_node:
        why = f"ranks go up to {needed - 1}, so a node with {needed} is asked for; ROLL takes the whole node"
        if source.has("num_gpus_per_node"):
            source.differs(("num_gpus_per_node",), why, "set devicesPerNode for the whole node")
        per_node = needed
    return {"name": GROUP, "nodes": nodes, "devicesPerNode": per_node}
