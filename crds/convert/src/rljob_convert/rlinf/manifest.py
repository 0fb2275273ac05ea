"""RLinf configurations: what the sections become. Flow: :func:`convert`.

Placement lies in :mod:`rljob_convert.rlinf.placement` and :mod:`rljob_convert.rlinf.cluster`.
Facts about RLinf: version 0.3.0 (https://github.com/RLinf/RLinf), see also :mod:`rljob_convert.rlinf.keys`.
"""

from __future__ import annotations

from rljob_api.paths import Parts
from rljob_convert import common
from rljob_convert.common import Section, compact
from rljob_convert.keys import note_leftovers
from rljob_convert.rlinf.environments import environments, with_environments
from rljob_convert.rlinf.keys import NEVER_VALIDATES, TABLE
from rljob_convert.rlinf.learning import algorithm, off_policy, rollout, training, whole_batches, with_critic
from rljob_convert.rlinf.placement import Placed, place
from rljob_convert.source import Source

_LOOPS = ("agentloop", "tools", "agentlightning", "rollout_server", "server")
"""Sections of jobs whose responses come from agents: they call tools, or answer requests from outside."""
VALIDATION_PLACEHOLDER = "data/validation.jsonl"
MAX_VALIDATION_PROMPTS = 1_000_000
"""The most that a manifest may ask; RLinf evaluates on the whole set."""
_FLAGS = ("offload_optimizer", "offload_weight", "offload_grad")


def convert(source: Source, name: str | None, devices_per_node: int | None) -> Section:
    """The manifest of an RLinf configuration; what did not become a field is in ``source.notes``."""
    job = common.job_name(source, name, "runner", "experiment_name")
    spec = _evaluation(source, devices_per_node) if _only_validates(source) else _training(source, devices_per_node)
    note_leftovers(source, TABLE)
    return common.manifest(job, spec)


def _training(source: Source, devices_per_node: int | None) -> Section:
    """A job that trains."""
    rule = algorithm(source, has_critic=_places_critic(source))
    placed = place(source, devices_per_node, has_kl=rule.kl_coefficient > 0)
    is_agentic = _is_agentic(source, placed)
    components = with_environments(source, placed.components) if is_agentic else placed.components
    model = _model(source)
    generation = rollout(source)
    _engines(source, placed, model, _longest(generation))
    offload = _offload(source, placed)
    trained = training(source, generation, placed.workers.get("actor", 0))
    _divide_critic(source, placed)
    updates = trained.get("miniBatches", 1)
    correction = off_policy(source, rule.section.get("policyLoss", {}).get("variant"), updates)
    clip = next((key for key in ("value_cliprange", "value_clip") if source.has("algorithm", key)), "value_clip")
    learning = common.without_idle_value_clip(source, ("algorithm", clip), with_critic(source, rule.section, trained), updates)
    processes = placed.workers.get("actor", 1) // (trained.get("tensorParallelSize", 1) * trained.get("contextParallelSize", 1))
    return {
        "nodeGroups": placed.node_groups,
        "components": components,
        "pipeline": "Agentic" if is_agentic else "RLVR",
        "model": model,
        "data": None if is_agentic else _data(source, trains=True),
        "rewards": None if is_agentic else _rewards(source),
        "environments": environments(source, placed, validates=False) if is_agentic else None,
        "algorithm": compact({**learning, "offPolicy": correction}),
        "rollout": whole_batches(source, generation, trained, max(1, processes)),
        "training": trained,
        "offload": offload,
        "checkpoint": _checkpoint(source),
        "seed": source.integer("actor", "seed", high=2_147_483_647),
    }


def _evaluation(source: Source, devices_per_node: int | None) -> Section:
    """A job that validates a model once; what the file says of training stays unread, and ends in notes."""
    placed = place(source, devices_per_node, has_kl=False, trains=False)
    is_agentic = _is_agentic(source, placed)
    components = with_environments(source, placed.components) if is_agentic else placed.components
    model = {key: value for key, value in _model(source).items() if key != "lora"}
    generation = rollout(source, trains=False)
    _engines(source, placed, model, _longest(generation))
    samples = generation.get("samplesPerPrompt", 1)
    if source.has("data", "val_rollout_batch_size"):
        source.drop(("data", "val_rollout_batch_size"), "the whole set is validated, as many at a time as engines have room for")
    return {
        "nodeGroups": placed.node_groups,
        "components": components,
        "pipeline": "Agentic" if is_agentic else "RLVR",
        "model": model,
        "data": None if is_agentic else _data(source, trains=False),
        "rewards": None if is_agentic else _rewards(source),
        "environments": environments(source, placed, validates=True) if is_agentic else None,
        "rollout": {key: generation[key] for key in ("maxPromptTokens", "maxResponseTokens", "stopTokenIds") if key in generation},
        "training": {"steps": 0},
        "validation": compact(
            {
                "maxPrompts": MAX_VALIDATION_PROMPTS,
                "samplesPerPrompt": samples if samples > 1 else None,
                **_sampling(source, generation),
            }
        ),
        "seed": source.integer("actor", "seed", high=2_147_483_647),
    }


def _sampling(source: Source, generation: Section) -> Section:
    """Of a validation, without what greedy answers have no use for."""
    keys = {"topP": ("top_p", 1.0), "topK": ("top_k", None)}
    if generation.get("temperature"):
        return {key: generation[key] for key in ("temperature", *keys) if key in generation}
    for key, (name, plain) in keys.items():
        if generation.get(key) not in (None, plain):
            source.drop(("algorithm", "sampling_params", name), "answers are greedy without a temperature above 0")
    return {"temperature": generation.get("temperature")}


def _longest(generation: Section) -> int:
    """Tokens of the longest request."""
    tokens: int = generation.get("maxPromptTokens", 1024) + generation.get("maxResponseTokens", 1024)
    return tokens


def _only_validates(source: Source) -> bool:
    """Whether the file evaluates a model: by its task, or by a switch of its runner."""
    switches = [source.flag(*where) for where in (("eval",), ("runner", "only_eval"))]
    return str(source.peek("runner", "task_type")).endswith("_eval") or any(switches)


def _divide_critic(source: Source, placed: Placed) -> None:
    """Give a Critic its parallel sizes."""
    keys = common.SizeKeys(
        tensor=("critic", "model", "tensor_model_parallel_size"),
        context=("critic", "model", "context_parallel_size"),
        experts=("critic", "model", "expert_model_parallel_size"),
    )
    for component in placed.components:
        if component["role"] == "Critic":
            if source.flag("critic", "use_critic_model") is False:
                source.drop(("critic", "use_critic_model"), "a Critic is placed")
            component |= common.component_sizes(source, keys, placed.workers.get("critic", 0))


def _places_critic(source: Source) -> bool:
    keys = source.keys("cluster", "component_placement")
    return any(name.strip() == "critic" for key in keys for name in str(key).split(","))


def _is_agentic(source: Source, placed: Placed) -> bool:
    task = source.text("runner", "task_type")
    loop = next((key for key in _LOOPS if source.keys(key)), None)
    places_environments = any(component["role"] == "Environment" for component in placed.components)
    if not (loop or places_environments or task == "coding_online_rl"):
        return False
    if task is not None:
        reason = "environments or agents are placed" if places_environments else f"of the section {loop}" if loop else f"the task is {task}"
        source.differs(("runner", "task_type"), f"becomes pipeline Agentic: {reason}")
    return True


def _engines(source: Source, placed: Placed, model: Section, longest: int) -> None:
    """Give every Rollout the engine of the section ``rollout``.

    Args:
        source: the configuration.
        placed: the components.
        model: the section model.
        longest: tokens of the longest request.
    """
    kinds = {"vllm": "VLLM", "sglang": "SGLang"}
    where = ("rollout", "rollout_backend")
    kind = source.choice(kinds, *where)
    if kind is None and not source.has(*where):
        kind = source.assume(where, "VLLM", "the file does not name an engine")
    tensor = source.integer("rollout", "tensor_parallel_size", low=1, high=64) or 1
    pipeline = source.integer("rollout", "pipeline_parallel_size", low=1, high=64) or 1
    kind = kind or "VLLM"
    options = ("rollout", kind.lower())
    given = {name: source.take(*options, name) for name in _ENGINE_OPTIONS.get(kind, ()) if source.has(*options, name)}
    engine = compact(
        {
            "type": kind,
            "dtype": _engine_dtype(source, model.get("dtype") or "bfloat16"),
            "tensorParallelSize": tensor,
            "pipelineParallelSize": pipeline if pipeline > 1 else None,
            "maxRunningRequests": source.integer("rollout", "max_running_requests", low=1, high=65_536),
            "memoryFraction": source.number("rollout", "gpu_memory_utilization", above=0.0, high=1.0),
            "prefixCaching": source.flag("rollout", "vllm", "enable_prefix_caching") if kind == "VLLM" else None,
            "enforceEager": source.flag("rollout", "enforce_eager"),
            "extraArgs": common.engine_arguments(source, kind, given, options, longest),
        }
    )
    for component in placed.components:
        if component["role"] == "Rollout":
            component["engine"] = dict(engine)


_ENGINE_OPTIONS = {"VLLM": ("enable_chunked_prefill", "max_num_batched_tokens"), "SGLang": ("attention_backend",)}
"""Options of the section that bears the engine's name whose names and meaning are the engine's own."""


def _engine_dtype(source: Source, trained: str) -> str | None:
    """The engine's type where it is not the Trainer's."""
    for where in (("rollout", "model", "precision"), ("rollout", "precision")):
        dtype = source.choice(common.DTYPES, *where)
        written = common.DTYPES.get(str(source.peek("actor", "model", "precision")).lower())
        if dtype == written == "float16":
            source.differs(where, "becomes the Trainer's bfloat16, so that both compute alike")
            return None
        if dtype is not None:
            return None if dtype == trained else dtype
    return None


def _offload(source: Source, placed: Placed) -> Section | None:
    """Time-division: RLinf's flags, which count where components share devices, and whether those switch."""
    flags = {"Trainer": _worker_offload(source, "actor"), "Critic": _worker_offload(source, "critic"), "Rollout": _engine_offload(source)}
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


def _worker_offload(source: Source, role: str) -> tuple[Section, list[Parts]]:
    """(policies of the Trainer or the Critic, where they are said)."""
    everything = source.flag(role, "enable_offload")
    places: list[Parts] = [] if everything is None else [(role, "enable_offload")]
    policies: Section = {}
    for key in _FLAGS:
        value = source.flag(role, key)
        places += [] if value is None else [(role, key)]
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
    dtype = common.trained_dtype(source, ("actor", "model", "precision"))
    critic = ("critic", "model", "precision")
    if common.DTYPES.get(str(source.peek(*critic)).lower()) == (dtype or "bfloat16"):
        source.take(*critic)
    elif source.has(*critic):
        source.drop(critic, f"all trained models have one dtype, {dtype or 'bfloat16'}", "check model.dtype")
    tokenizer = source.text("actor", "tokenizer", "tokenizer_model")
    lora = None
    if source.flag("actor", "model", "is_lora"):
        rank = source.integer("actor", "model", "lora_rank", low=1, high=1024) or 16
        alpha = source.assume(("actor", "model", "lora_alpha"), float(rank), "RLinf scales adapters by 1: its alpha is the rank")
        lora = {"rank": rank, "alpha": alpha}
    return compact(
        {
            "path": path,
            "tokenizerPath": tokenizer if tokenizer != path else None,
            "dtype": dtype,
            "trustRemoteCode": source.flag("actor", "tokenizer", "trust_remote_code"),
            "lora": lora,
        }
    )


def _data(source: Source, *, trains: bool) -> Section:
    """Files of a job: for training, or for the evaluation of a job that does not train."""
    files = source.texts("data", "train_data_paths") if trains else []
    prompt, answer = source.text("data", "prompt_key", limit=256), source.text("data", "answer_key", limit=256)
    if trains and not files:
        why = "the file names no training data, and the manifest needs some"
        files = [source.assume(("data", "train_data_paths"), common.TRAIN_PLACEHOLDER, why, "write the path of your file")]
    section = compact({"train": common.sources(files, "train", prompt, answer)})
    common.note_alike(source, ("data", "train_data_paths"), files)
    validation = source.texts("data", "val_data_paths") if not trains else []
    if trains and source.peek("data", "val_data_paths"):
        source.drop(("data", "val_data_paths"), NEVER_VALIDATES, "add data.validation and validation.everySteps")
    if not trains and not validation:
        why = "the file names no questions, and the manifest needs some"
        validation = [source.assume(("data", "val_data_paths"), VALIDATION_PLACEHOLDER, why, "write the path of your file")]
    if validation:
        section["validation"] = common.sources(validation, "validation", prompt, answer)
    if source.flag("data", "apply_chat_template"):
        section["prompt"] = {"chatTemplate": True}
    return section


def _rewards(source: Source) -> list[Section]:
    where = ("reward", "reward_type")
    kind = source.text(*where, limit=256)
    if kind is None:
        kind = source.assume(where, "math", "the file names no reward, and the manifest needs one", "choose rewards[].type")
    reward = common.reward_rule(source, kind, common.label(kind, "reward"), where)
    scale = source.number("reward", "reward_scale", low=-1e6, high=1e6)
    if scale is not None:
        if scale != 1:
            why = "becomes rewards[].weight; RLJob's own rewards give a wrong answer 0, whatever yours gave"
            source.differs(("reward", "reward_scale"), why)
        reward["weight"] = scale
    return [reward]


def _checkpoint(source: Source) -> Section | None:
    steps = source.integer("runner", "save_interval", low=-1)
    if steps is None:
        return None
    return {"everySteps": max(0, steps)}
