"""ROLL configurations: what the sections become. Flow: :func:`convert`; placement in :mod:`rljob_convert.roll.placement`.

Facts about ROLL: its source (https://github.com/alibaba/ROLL, main of August 2026), see also :mod:`rljob_convert.roll.keys`.
"""

from __future__ import annotations

from collections.abc import Sequence

from rljob_api.paths import Parts
from rljob_convert import common
from rljob_convert.common import Section, compact
from rljob_convert.keys import note_leftovers
from rljob_convert.roll import environments
from rljob_convert.roll.algorithm import algorithm, critic_in_steps, off_policy
from rljob_convert.roll.distillation import Distilled, distilled, measuring
from rljob_convert.roll.keys import TABLE
from rljob_convert.roll.learning import batch, shares_sequences, training
from rljob_convert.roll.overlap import every_steps, overlap, rollout, validation, without_repeats
from rljob_convert.roll.placement import Placed, place
from rljob_convert.roll.rewards import TAG_FIELD, chooses_by_tag, domains, rewards
from rljob_convert.source import Source

AGENTIC_KEYS = ("train_env_manager", "val_env_manager", "custom_envs", "env_manager_cls", "max_actions_per_traj", "max_tokens_per_step")
RLVR_KEYS = ("prompt_length", "response_length", "rewards", "num_return_sequences_in_group", "validation")
AGENTIC_ESTIMATORS = ("gigpo", "step_reinforce", "agentic_reinforce")
_CONFIG = ("actor_infer", "strategy_args", "strategy_config")
MAX_LISTED = 16
"""Domains, and tags of one, in a note."""
_TRAIN_DATA = ("actor_train", "data_args")
_ATTENTION = {"fa2": "flash_attention_2", "flash_attention_2": "flash_attention_2", "sdpa": "sdpa", "eager": "eager", "disabled": "eager"}


def convert(source: Source, name: str | None) -> Section:
    """The manifest of a ROLL configuration; what did not become a field is in ``source.notes``."""
    is_agentic = _is_agentic(source)
    teacher = _distilled(source, is_agentic=is_agentic)
    is_measured = teacher is not None and teacher.is_pure
    job = common.job_name(source, name, "exp_name")
    numbers = batch(source, is_agentic=is_agentic)
    rule = algorithm(source, numbers, is_agentic=is_agentic, teacher=teacher)
    longest = numbers.prompt_tokens + numbers.response_tokens
    reference = rule.kl_coefficient > 0
    placed = place(
        source,
        longest=longest,
        needs_reference=reference,
        needs_critic=rule.needs_critic,
        is_agentic=is_agentic,
        teachers=() if teacher is None else teacher.teachers,
    )
    trained = training(source, numbers, placed.num_trainer_devices, rule.section.get("critic", {}).get("warmupSteps", 0))
    updates = trained.get("miniBatches", 1) * trained.get("epochs", 1)
    correction = off_policy(source, rule, updates)
    learned = critic_in_steps(source, rule, numbers, placed.num_critic_devices)
    learning = common.without_idle_value_clip(source, ("value_clip",), learned, updates)
    validated = environments.every_steps(source) if is_agentic else every_steps(source)
    generation = rollout(source, numbers, placed.num_engines)
    if is_measured and generation.pop("groupFilter", None) is not None:
        source.differs(("rewards",), "query_filter_config is left out: scores count for nothing in distillation alone")
    if is_agentic:
        _note_template(source)
    spec: Section = {
        "nodeGroups": placed.node_groups,
        "components": placed.components,
        "pipeline": "Agentic" if is_agentic else "RLVR",
        "model": _model(source, placed),
        "data": None if is_agentic else _data(source, teacher, validates=validated > 0),
        "rewards": None if is_agentic else _rewards(source, placed, is_measured=is_measured),
        "environments": environments.environments(source, numbers, validates=validated > 0) if is_agentic else None,
        "algorithm": compact({**without_repeats(source, learning, generation), "offPolicy": correction}),
        "rollout": generation,
        "training": trained,
        "validation": environments.validation(source, validated) if is_agentic else validation(source, validated, numbers),
        "overlap": overlap(source),
        "offload": _offload(source, placed),
        "weightSync": _weight_sync(source),
        "checkpoint": _checkpoint(source),
        "seed": _seed(source),
    }
    note_leftovers(source, TABLE)
    return common.manifest(job, spec)


def _distilled(source: Source, *, is_agentic: bool) -> Distilled | None:
    """Whom the policy follows; prompts of an agentic job have the names of their environments for tags."""
    if is_agentic:
        return distilled(source, (), environments.trained_names(source), is_agentic=True)
    return distilled(source, domains(source), {}, is_agentic=False)


def _rewards(source: Source, placed: Placed, *, is_measured: bool) -> list[Section]:
    found = rewards(source, placed.num_reward_workers, placed.judges)
    return measuring(source, found) if is_measured else found


def _is_agentic(source: Source) -> bool:
    if any(source.has(key) for key in AGENTIC_KEYS):
        return True
    if str(source.peek("adv_estimator")) in AGENTIC_ESTIMATORS:
        return True
    has_rlvr = any(
        source.has(key) for key in ("prompt_length", "response_length", "rewards", "num_return_sequences_in_group", "validation")
    )
    if source.has("sequence_length") and not has_rlvr:
        source.assume(
            ("pipeline",), "Agentic", "only sequence_length is given and nothing of an RLVR pipeline", "write pipeline: RLVR if it is one"
        )
        return True
    return False


def _model(source: Source, placed: Placed) -> Section:
    train = ("actor_train", "model_args")
    named = [source.peek(role, "model_args", "model_name_or_path") for role in ("actor_train", "actor_infer", "reference")]
    pretrain = source.text("pretrain")
    if None not in named and pretrain is not None and pretrain != named[0]:
        source.drop(("pretrain",), "actor_train, actor_infer and reference all name their model, and ROLL takes theirs")
        pretrain = None
    path = pretrain or source.text(*train, "model_name_or_path")
    if path is None:
        path = source.assume(("pretrain",), common.MODEL_PLACEHOLDER, "the manifest needs a model", "write its folder or Hub id")
    for where in (("reward_pretrain",), *(((role, "model_args", "model_name_or_path")) for role in ("actor_infer", "reference", "critic"))):
        if source.peek(*where) == path:
            source.take(*where)
    if source.peek(*train, "model_name_or_path") not in (None, path):
        source.drop(
            (*train, "model_name_or_path"),
            f"pretrain {path} is trained: ROLL takes it for all roles unless each of the three names its model",
        )
    elif source.has(*train, "model_name_or_path"):
        source.take(*train, "model_name_or_path")
    dtype = common.trained_dtype(source, (*train, "dtype"))
    for role in ("reference", "critic"):
        where = (role, "model_args", "dtype")
        if common.DTYPES.get(str(source.peek(*where)).lower()) == (dtype or "bfloat16"):
            source.take(*where)
        elif source.has(*where):
            source.drop(where, f"all trained and reference models have one dtype, {dtype or 'bfloat16'}", "check model.dtype")
    return compact({"path": path, "dtype": dtype, "attention": _attention(source, placed), "lora": _lora(source)})


def _attention(source: Source, placed: Placed) -> str | None:
    """The trainer's; one that takes whole sequences gives way where devices share them, because ROLL divides them with any."""
    shared = shares_sequences(source) or any("contextParallelSize" in component for component in placed.components)
    where = ("actor_train", "model_args", "attn_implementation")
    attention = source.choice(_ATTENTION, *where)
    if attention in (None, "sdpa") or not shared:
        return attention
    source.differs(where, "is sdpa, which alone computes sequences that devices share; on CUDA FlexAttention computes them")
    return None


def _lora(source: Source) -> Section | None:
    """Adapters, which ROLL trains where ``lora_target`` is set, and only there."""
    where = ("actor_train", "model_args")
    if not source.has(*where, "lora_target"):
        for key in ("lora_rank", "lora_alpha"):
            if source.has(*where, key):
                source.drop((*where, key), "ROLL trains all weights without lora_target", "set model.lora for adapters")
        return None
    rank = source.integer(*where, "lora_rank", low=1, high=1024)
    if rank is None:
        rank = source.assume((*where, "lora_rank"), 8, "ROLL's default")
    alpha = source.number(*where, "lora_alpha", above=0.0)
    if alpha is None:
        alpha = source.assume((*where, "lora_alpha"), 2.0 * rank, "ROLL's default, twice lora_rank")
    targets = source.texts(*where, "lora_target")
    if len(targets) == 1:
        targets = [] if targets[0] in ("all-linear", "all") else [part.strip() for part in targets[0].split(",") if part.strip()]
    return compact({"rank": rank, "alpha": alpha, "targetModules": targets})


def _note_template(source: Source) -> None:
    """An agentic job has no data; its conversations are made by the tokenizer's own template."""
    if source.has(*_TRAIN_DATA, "template"):
        source.text(*_TRAIN_DATA, "template", limit=256)
        source.differs((*_TRAIN_DATA, "template"), "the tokenizer's own chat template is used")
        for role in ("actor_infer", "reference", "critic"):
            if source.peek(role, "data_args", "template") == source.peek(*_TRAIN_DATA, "template"):
                source.take(role, "data_args", "template")


def _data(source: Source, teacher: Distilled | None, *, validates: bool) -> Section:
    files = source.texts(*_TRAIN_DATA, "file_name")
    prompt, answer = ("prompt", "ground_truth") if files else (None, None)
    if files:
        source.assume(
            (*_TRAIN_DATA, "file_name"), "prompt, ground_truth", "fields of ROLL's data files", "check promptField and answerField"
        )
    else:
        why = "the manifest needs prompts"
        files = [source.assume((*_TRAIN_DATA, "file_name"), common.TRAIN_PLACEHOLDER, why, "write the path of your file")]
    tag = TAG_FIELD if chooses_by_tag(source) else None
    taught = TAG_FIELD if teacher is not None and teacher.chooses_by_tag else tag
    section: Section = {"train": common.sources(files, "train", prompt, answer, taught)}
    questions = source.texts("validation", "data_args", "file_name") if validates else []
    if questions:
        section["validation"] = common.sources(questions, "validation", "prompt", "ground_truth", tag)
    if _chat_template(source):
        section["prompt"] = {"chatTemplate": True}
    probabilities = (*_TRAIN_DATA, "domain_interleave_probs")
    domains = source.keys(*probabilities)
    if len(domains) == 1:
        source.take(*probabilities, domains[0])
    if len(domains) < 2:
        common.note_alike(source, (*_TRAIN_DATA, "file_name"), files)
    else:
        _note_shares(source, probabilities, domains)
    return section


def _note_shares(source: Source, where: Parts, domains: Sequence[str]) -> None:
    """How to have as many prompts of each domain in a step as ROLL, which finds them by their tags."""
    weights = []
    for domain in domains[:MAX_LISTED]:
        share, tags = source.number(*where, domain), source.texts("rewards", domain, "tag_included", most=common.MAX_TAGS)[:MAX_LISTED]
        named = f" (tag {', '.join(tags)})" if tags else ""
        weights.append(f"weight {share or 0:g} for {domain}{named}")
    why = "ROLL fills a step by the domain that the tag of a prompt belongs to, RLJob from all files alike"
    source.drop(
        where, why, f"write the prompts of each domain to a file of its own, and list these in data.train with {', '.join(weights)}"
    )


def _chat_template(source: Source) -> bool:
    """Whether a file names a template; ``global_template`` counts before that of actor_train (rlvr_pipeline.py of ROLL)."""
    places = (("global_template",), (*_TRAIN_DATA, "template"))
    name, at = next(((source.text(*where, limit=256), where) for where in places if source.has(*where)), (None, ()))
    if name is None:
        return False
    for where in places[1:] if at == places[0] else ():
        if source.has(*where):
            source.take(*where) if source.peek(*where) == name else source.drop(where, f"global_template {name} counts")
    source.differs(at, "becomes data.prompt.chatTemplate: the tokenizer's own template is used")
    for role in ("actor_infer", "reference", "critic", "validation"):
        if source.peek(role, "data_args", "template") == name:
            source.take(role, "data_args", "template")
    return True


def _offload(source: Source, placed: Placed) -> Section | None:
    """Time-division: ROLL keeps one role at a time on shared devices, unless states are to stay."""
    trainer, places = _trainer_offload(source)
    leaves = source.flag("is_offload_states")
    if not placed.sharing and leaves is not None:
        source.drop(("is_offload_states",), "state leaves only devices that roles share, and none do")
    switching = bool(placed.sharing) and leaves is not False
    if switching and "actor_train" in placed.sharing:
        if trainer:
            next(component for component in placed.components if component["name"] == "actor_train")["offload"] = trainer
    else:
        for parts in places:
            source.drop(parts, "state leaves only devices that roles share, and actor_train shares none")
    if not placed.sharing:
        return None
    if leaves is None:
        source.assume(("offload",), "Switching", "roles share devices, and ROLL keeps one at a time on them", "write Resident if all fit")
    return {"residency": "Switching" if switching else "Resident"}


def _trainer_offload(source: Source) -> tuple[Section, list[Parts]]:
    """(policies of the Trainer, where they are said): of ROLL itself, FSDP2's CPUOffloadPolicy, and DeepSpeed's ZeRO-Offload."""
    policies: Section = {}
    places: list[Parts] = []

    def said(parts: Parts, *fields: str) -> None:
        places.append(parts)
        policies.update(dict.fromkeys(fields, "Always"))

    around_step = source.flag("is_offload_optimizer_states_in_train_step")
    if around_step is not None:
        said(("is_offload_optimizer_states_in_train_step",), *(("optimizer",) if around_step else ()))
    config = ("actor_train", "strategy_args", "strategy_config")
    whole = source.flag(*config, "offload_policy")
    if whole is not None:
        said((*config, "offload_policy"), *(("optimizer", "weight", "grad") if whole else ()))
    for key, field in (("offload_optimizer", "optimizer"), ("offload_param", "weight")):
        device = (*config, "zero_optimization", key, "device")
        if source.peek(*device) == "cpu":
            source.text(*device)
            said(device, field)
    return policies, places


def _weight_sync(source: Source) -> Section | None:
    size = source.integer("model_update_buffer_size_mb", low=1, high=16_384)
    return None if size is None else {"bucketBytes": size * 1_048_576}


def _checkpoint(source: Source) -> Section:
    steps = source.integer("save_steps")
    if steps is None:
        steps = source.assume(("save_steps",), 50, "ROLL's default")
    keep = source.integer("max_ckpt_to_keep")
    if keep == 0:
        source.differs(("max_ckpt_to_keep",), "0 means all in ROLL; the last 1000 are kept")
    return compact(
        {
            "path": source.text("checkpoint_config", "output_dir"),
            "everySteps": steps,
            "keep": None if keep is None else min(keep or 1000, 1000),
        }
    )


def _seed(source: Source) -> int:
    seed = source.integer("seed", high=2_147_483_647)
    return source.assume(("seed",), 42, "ROLL's default") if seed is None else seed
