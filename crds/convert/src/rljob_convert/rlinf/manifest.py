"""RLinf configurations: what the sections become. Flow: :func:`convert`.

Placement lies in :mod:`rljob_convert.rlinf.placement` and :mod:`rljob_convert.rlinf.cluster`.
Facts about RLinf: version 0.3.0 (https://github.com/RLinf/RLinf), see also :mod:`rljob_convert.rlinf.keys`.
"""

from __future__ import annotations

from rljob_api.paths import Parts
from rljob_convert import common
from rljob_convert.common import Section, compact
from rljob_convert.keys import note_leftovers
from rljob_convert.rlinf.keys import TABLE
from rljob_convert.rlinf.learning import algorithm, rollout, training
from rljob_convert.rlinf.placement import Placed, place
from rljob_convert.source import Source

_TASKS = {"math": "RLVR", "reasoning": "RLVR", "reasoning_eval": "RLVR", "coding_online_rl": "RLVR", "sft": "RLVR"}
_FLAGS = ("offload_optimizer", "offload_weight", "offload_grad")


def convert(source: Source, name: str | None, devices_per_node: int | None) -> Section:
    """The manifest of an RLinf configuration; what did not become a field is in ``source.notes``."""
    job = common.job_name(source, name, "runner", "experiment_name")
    rule = algorithm(source, has_critic=_places_critic(source))
    placed = place(source, devices_per_node, has_kl=rule.kl_coefficient > 0)
    is_agentic = _is_agentic(source, placed)
    _engines(source, placed)
    offload = _offload(source, placed)
    generation = rollout(source)
    trained = training(source, generation)
    learning = common.without_idle_value_clip(source, ("algorithm", "value_clip"), rule.section, trained.get("miniBatches", 1))
    every = _validation_steps(source)
    spec: Section = {
        "nodeGroups": placed.node_groups,
        "components": placed.components,
        "pipeline": "Agentic" if is_agentic else "RLVR",
        "model": _model(source),
        "data": _data(source, validates=every > 0),
        "rewards": _rewards(source, is_agentic=is_agentic),
        "environments": _environments(source, placed) if is_agentic else None,
        "algorithm": learning,
        "rollout": generation,
        "training": trained,
        "validation": {"everySteps": every} if every else None,
        "offload": offload,
        "checkpoint": _checkpoint(source),
        "seed": source.integer("actor", "seed", high=2_147_483_647),
    }
    note_leftovers(source, TABLE)
    return common.manifest(job, spec)


def _places_critic(source: Source) -> bool:
    keys = source.keys("cluster", "component_placement")
    return any(name.strip() == "critic" for key in keys for name in str(key).split(","))


def _is_agentic(source: Source, placed: Placed) -> bool:
    task = source.text("runner", "task_type")
    places_environments = any(component["role"] == "Environment" for component in placed.components)
    if task is not None and task not in _TASKS and not places_environments:
        source.differs(("runner", "task_type"), "becomes pipeline Agentic")
        return True
    if task is not None and places_environments and task in _TASKS:
        source.differs(("runner", "task_type"), "becomes pipeline Agentic, because environments or agents are placed")
    return places_environments


def _engines(source: Source, placed: Placed) -> None:
    """Give every Rollout the engine of the section ``rollout``."""
    kinds = {"vllm": "VLLM", "sglang": "SGLang"}
    where = ("rollout", "rollout_backend")
    kind = source.choice(kinds, *where)
    if kind is None and not source.has(*where):
        kind = source.assume(where, "VLLM", "the file does not name an engine")
    tensor = source.integer("rollout", "tensor_parallel_size", low=1, high=64) or 1
    pipeline = source.integer("rollout", "pipeline_parallel_size", low=1, high=64) or 1
    engine = compact(
        {
            "type": kind or "VLLM",
            "tensorParallelSize": tensor,
            "pipelineParallelSize": pipeline if pipeline > 1 else None,
            "maxRunningRequests": source.integer("rollout", "max_running_requests", low=1, high=65_536),
            "memoryFraction": source.number("rollout", "gpu_memory_utilization", high=1.0),
            "prefixCaching": source.flag("rollout", "vllm", "enable_prefix_caching") if kind == "VLLM" else None,
            "enforceEager": source.flag("rollout", "enforce_eager"),
        }
    )
    for component in placed.components:
        if component["role"] == "Rollout":
            component["engine"] = dict(engine)


def _offload(source: Source, placed: Placed) -> Section | None:
    """Time-division: RLinf's flags, which count where components share devices, and whether those switch."""
    flags = {"Trainer": _trainer_offload(source), "Rollout": _engine_offload(source)}
    sharing = [component for component in placed.components if component["name"] in placed.sharing]
    switching = any("Always" in flags[c["role"]][0].values() for c in sharing if c["role"] in flags)
    for role, (policies, places) in flags.items():
        mine = [component for component in sharing if component["role"] == role]
        for parts in places:
            if not mine:
                source.drop(parts, f"state leaves only devices that components share, and the {role} shares none")
            elif not switching:
                source.differs(parts, "no offload is on, so it becomes offload.residency Resident")
        for component in mine if switching and policies else ():
            component["offload"] = dict(policies)
    if not sharing:
        return None
    if switching:
        return {"residency": "Switching"}
    if not any(places for _, places in flags.values()):
        why = "components share devices and no offload is on"
        source.assume(("actor", "offload_weight"), "Resident", why, "write Switching to save memory")
    return {"residency": "Resident"}


def _trainer_offload(source: Source) -> tuple[Section, list[Parts]]:
    """(policies of the Trainer, where they are said)."""
    everything = source.flag("actor", "enable_offload")
    places: list[Parts] = [] if everything is None else [("actor", "enable_offload")]
    policies: Section = {}
    for key in _FLAGS:
        value = source.flag("actor", key)
        places += [] if value is None else [("actor", key)]
        value = everything if value is None else value
        if value is not None:
            policies[key.removeprefix("offload_")] = "Always" if value else "Never"
    return policies, places


def _engine_offload(source: Source) -> tuple[Section, list[Parts]]:
    """(policies of the Rollout, where they are said)."""
    engine = source.flag("rollout", "enable_offload")
    if engine is None:
        return {}, []
    policy = "Always" if engine else "Never"
    return {"weight": policy, "kvCache": policy}, [("rollout", "enable_offload")]


def _model(source: Source) -> Section:
    paths = (("rollout", "model", "model_path"), ("rollout", "model_dir"), ("actor", "model", "model_path"))
    path = None
    for where in paths:
        other = source.text(*where)
        if path is not None and other not in (None, path):
            source.drop(where, f"RLJob trains and serves one model, {path}")
        path = path or other
    if path is None:
        path = source.assume(paths[0], common.MODEL_PLACEHOLDER, "the manifest needs a model", "write its folder or Hub id")
    dtype = None
    for where in (("rollout", "model", "precision"), ("rollout", "precision"), ("actor", "model", "precision")):
        word = source.peek(*where)
        if word is not None and dtype is not None and common.DTYPES.get(str(word).lower()) != dtype:
            source.drop(where, f"RLJob has one dtype for trainer and engines, {dtype}; master weights are float32", "check model.dtype")
        else:
            dtype = source.choice(common.DTYPES, *where) or dtype
    tokenizer = source.text("actor", "tokenizer", "tokenizer_model")
    lora = None
    if source.flag("actor", "model", "is_lora"):
        lora = {"rank": source.integer("actor", "model", "lora_rank", low=1, high=1024) or 16}
    return compact(
        {
            "path": path,
            "tokenizerPath": tokenizer if tokenizer != path else None,
            "dtype": dtype,
            "trustRemoteCode": source.flag("actor", "tokenizer", "trust_remote_code"),
            "lora": lora,
        }
    )


def _data(source: Source, *, validates: bool) -> Section:
    files = source.texts("data", "train_data_paths")
    prompt, answer = source.text("data", "prompt_key", limit=256), source.text("data", "answer_key", limit=256)
    if not files:
        why = "the file names no training data, and the manifest needs some"
        files = [source.assume(("data", "train_data_paths"), common.TRAIN_PLACEHOLDER, why, "write the path of your file")]
    section: Section = {"train": common.sources(files, "train", prompt, answer)}
    validation = source.texts("data", "val_data_paths") if validates else []
    if not validates and source.peek("data", "val_data_paths"):
        source.drop(("data", "val_data_paths"), "runner.val_check_interval is off, so nothing is validated")
    if validation:
        section["validation"] = common.sources(validation, "validation", prompt, answer)
    if source.flag("data", "apply_chat_template"):
        section["prompt"] = {"chatTemplate": True}
    return section


def _rewards(source: Source, *, is_agentic: bool) -> list[Section]:
    where = ("reward", "reward_type")
    kind = source.text(*where, limit=256)
    if kind is None:
        if is_agentic:
            if source.number("reward", "reward_scale", low=-1e6, high=1e6) is not None:
                source.drop(("reward", "reward_scale"), "the environment gives the rewards")
            return []
        kind = source.assume(where, "math", "the file names no reward, and the manifest needs one", "choose rewards[].type")
    reward = common.reward_rule(source, kind, common.label(kind, "reward"), where)
    scale = source.number("reward", "reward_scale", low=-1e6, high=1e6)
    if scale is not None:
        if scale != 1:
            why = "becomes rewards[].weight; RLJob's own rewards give a wrong answer 0, whatever yours gave"
            source.differs(("reward", "reward_scale"), why)
        reward["weight"] = scale
    return [reward]


def _environments(source: Source, placed: Placed) -> list[Section]:
    train = ("env", "train")
    kind = source.text(*train, "env_type", limit=256)
    other = source.text(*train, "simulator_type", limit=256)
    if kind is not None and other is not None and other != kind:
        source.drop((*train, "simulator_type"), f"env_type {kind} counts")
    turns = source.integer(*train, "max_episode_steps", low=1, high=10_000)
    loop = source.integer("agentloop", "max_turns", low=1, high=10_000)
    if turns is not None and loop is not None:
        source.drop(("agentloop", "max_turns"), f"env.train.max_episode_steps {turns} counts")
    workers = source.integer(*train, "total_num_envs", low=1, high=65_536)
    names = [component["name"] for component in placed.components if component["role"] == "Environment"]
    kind = kind or other
    if kind is None:
        kind = source.assume((*train, "env_type"), names[0] if names else "environment", "the file names no environment", "set its type")
    return [compact({"name": common.label(kind, "environment"), "type": kind, "workers": workers, "maxTurns": turns or loop})]


def _validation_steps(source: Source) -> int:
    """Steps between validations; 0 without."""
    where = ("runner", "val_check_interval")
    steps = max(0, source.integer(*where, low=-1) or 0)
    if steps and not source.peek("data", "val_data_paths"):
        source.drop(where, "the file has no validation data", "add data.validation and validation.everySteps")
        return 0
    return steps


def _checkpoint(source: Source) -> Section | None:
    steps = source.integer("runner", "save_interval", low=-1)
    if steps is None:
        return None
    return {"everySteps": max(0, steps)}
