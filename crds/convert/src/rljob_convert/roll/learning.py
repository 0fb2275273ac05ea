"""ROLL configurations: batch sizes, the trainer's settings."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.errors import counted
from rljob_convert import common
from rljob_convert.common import Section, compact
from rljob_convert.source import Source

_ARGS = ("actor_train", "training_args")
_CONFIG = ("actor_train", "strategy_args", "strategy_config")
SCHEDULES = {
    "linear": "Linear",
    "cosine": "Cosine",
    "constant": "Constant",
    "constant_with_warmup": "Constant",
    "cosine_with_min_lr": "Cosine",
}
_GROUPS = ("grpo", "gigpo")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sizes of one step."""

    prompts: int
    samples: int
    """Responses per prompt."""
    prompt_tokens: int
    response_tokens: int


def batch(source: Source, *, is_agentic: bool) -> Batch:
    """Prompts, samples and lengths of one step."""
    size = source.integer("rollout_batch_size", low=1)
    if size is None:
        size = source.assume(("rollout_batch_size",), 128, "ROLL's default; negative numbers are not converted")
    samples = _group_size(source) if is_agentic else _samples(source)
    prompts = size
    if is_agentic:
        prompts = max(1, size // samples)
        if source.has("rollout_batch_size"):
            left = f", {size % samples} trajectories are left out" if size % samples else ""
            source.differs(
                ("rollout_batch_size",),
                f"{size} trajectories become {counted(prompts, 'prompt')} of {counted(samples, 'sample')} each{left}",
                "check both",
            )
    prompt_tokens, response_tokens = _lengths(source, is_agentic=is_agentic)
    return Batch(prompts=prompts, samples=samples, prompt_tokens=prompt_tokens, response_tokens=response_tokens)


def _samples(source: Source) -> int:
    samples = source.integer("num_return_sequences_in_group", low=1, high=4096)
    if samples is None:
        samples = source.assume(("num_return_sequences_in_group",), 1, "ROLL's default")
    where = ("actor_infer", "generating_args", "num_return_sequences")
    if source.peek(*where) == samples:
        source.take(*where)
    elif source.has(*where):
        source.drop(where, f"ROLL overwrites it with num_return_sequences_in_group, {samples}")
    return samples


def _group_size(source: Source) -> int:
    where = ("actor_infer", "generating_args", "num_return_sequences")
    if source.peek(*where) == 1:
        source.take(*where)
    elif source.has(*where):
        source.drop(where, "agentic jobs sample one response per turn")
    size = source.integer("train_env_manager", "group_size", low=1, high=4096)
    if size is not None:
        return size
    needs_groups = str(source.peek("adv_estimator")) in _GROUPS
    if needs_groups and not source.has("train_env_manager"):
        why = "the file has no train_env_manager, and the estimator compares the members of a group"
        return source.assume(("train_env_manager", "group_size"), 8, why, "set rollout.samplesPerPrompt")
    return source.assume(("train_env_manager", "group_size"), 1, "ROLL's default")


def _lengths(source: Source, *, is_agentic: bool) -> tuple[int, int]:
    """Tokens of a prompt and of a response."""
    prompt = source.integer("prompt_length", low=1, high=10_000_000)
    response = source.integer("response_length", low=1, high=10_000_000)
    total = source.integer("sequence_length", low=2, high=10_000_000)
    turn_at = ("actor_infer", "generating_args", "max_new_tokens")
    turn = source.integer(*turn_at, low=1, high=10_000_000)
    bound = "sequence_length"
    if is_agentic and total is None and response is not None and turn is not None:
        bound, total = "response_length", (prompt or 1024) + response  # as ROLL sets it
    if is_agentic and total is not None:
        if turn is not None:
            turn = _turn_tokens(source, turn)
        if turn is None or turn >= total:
            turn = source.assume(turn_at, max(1, total // 4), f"a turn needs a bound below {bound}", "set rollout.maxResponseTokens")
        why = f"becomes maxPromptTokens {total - turn} (what a turn sees) plus maxResponseTokens {turn} (what it writes)"
        source.differs((bound,), why if bound == "sequence_length" else f"a sequence has {total} tokens with its prompt, which {why}")
        return total - turn, turn
    if prompt is None:
        default = 1024 if total is None else min(1024, total - 1)
        prompt = source.assume(("prompt_length",), default, "ROLL's default" if default == 1024 else "fits into sequence_length")
    if response is not None:
        if total is not None and total != prompt + response:
            source.drop(("sequence_length",), f"response_length {response} counts: ROLL sets it to {prompt} + {response}")
    elif total is not None and total > prompt:
        response = total - prompt
    else:
        default = turn or 8192
        response = source.assume(("response_length",), default, "ROLL requires response_length or sequence_length", "set it")
    if turn is not None and turn != response and not is_agentic:
        source.drop(turn_at, f"ROLL overwrites it with {response}, what prompt_length leaves of a sequence")
    return prompt, response


def _turn_tokens(source: Source, limit: int) -> int:
    """The longest turn of all trained environments, at most ``limit``."""
    found = [source.peek("custom_envs", tag, "max_tokens_per_step") for tag in source.texts("train_env_manager", "tags")]
    lengths = [length for length in found if isinstance(length, int) and not isinstance(length, bool) and length > 0]
    return min(limit, max(lengths)) if lengths and len(lengths) == len(found) else limit


def training(source: Source, numbers: Batch, num_devices: int, alone: int) -> Section:
    """The trainer's settings.

    Args:
        source: the configuration.
        numbers: sizes of one step.
        num_devices: of the Trainer.
        alone: steps that train the critic alone.
    """
    steps = source.integer("max_steps", low=-1)
    if steps is None or steps < 1:
        default = 500 if steps is None else 100
        why = "ROLL's default" if steps is None else "the file trains without end"
        steps = source.assume(("max_steps",), default, why, "set training.steps")
    rate = source.number(*_ARGS, "learning_rate", above=0.0)
    if rate is None:
        rate = source.assume((*_ARGS, "learning_rate"), 5e-5, "ROLL's default")
    schedule = source.choice(SCHEDULES, *_ARGS, "lr_scheduler_type")
    if schedule is None:
        schedule = source.assume((*_ARGS, "lr_scheduler_type"), "Linear", "ROLL's default")
    tensor = source.integer(*_CONFIG, "tensor_model_parallel_size", low=1, high=64) or 1
    context = _context_parallel(source)
    updates, epochs = _updates(source, numbers, num_devices, tensor * context), source.integer("ppo_epochs", low=1)
    warmup = warmup_steps(source, _ARGS, (updates or 1) * (epochs or 1))
    ratio = None if _starts_at_once(source, _ARGS) else source.number(*_ARGS, "warmup_ratio", high=1.0)
    if warmup is None or (warmup == 0 and ratio):
        warmup = common.whole_steps(source, (*_ARGS, "warmup_ratio"), ratio, steps)
    elif ratio:
        source.drop((*_ARGS, "warmup_ratio"), "warmup_steps counts")
    most = common.most_warmup(max(0, steps - alone), schedule)
    if warmup is not None and warmup > most:
        place = "warmup_steps" if source.peek(*_ARGS, "warmup_steps") else "warmup_ratio"
        source.differs((*_ARGS, place), f"is cut to {most} of the {counted(steps, 'step')} of the job")
        warmup = most
    divided = tensor if tensor > 1 else None
    return compact(
        {
            "steps": steps,
            "learningRate": rate,
            "minLearningRate": min_learning_rate(source, "actor_train", rate, schedule),
            "schedule": schedule,
            "warmupSteps": warmup,
            "beta1": source.number(*_ARGS, "adam_beta1", high=0.999_999),
            "beta2": source.number(*_ARGS, "adam_beta2", high=0.999_999),
            "epsilon": epsilon(source, "actor_train"),
            "weightDecay": source.number(*_ARGS, "weight_decay"),
            "maxGradNorm": source.number("max_grad_norm", above=0.0),
            "miniBatches": None if updates is None else _mini_batches(source, numbers, updates),
            "epochs": epochs,
            "microBatchTokens": _micro_batch(source, numbers, context),
            "activationCheckpointing": _checkpointing(source),
            "tensorParallelSize": divided,
            "sequenceParallel": common.sequence_parallel(source, (*_CONFIG, "sequence_parallel"), divided),
            "contextParallelSize": context if context > 1 else None,
            "expertParallelSize": _expert_parallel(source, num_devices),
            "loadBalancing": common.load_balancing(source, (*_CONFIG, "moe_aux_loss_coeff")),
            "routerBiasUpdateRate": common.router_bias_rate(source, _CONFIG),
        }
    )


def _expert_parallel(source: Source, num_devices: int) -> int | None:
    """What the trainer's strategy reads."""
    read, unread = expert_keys(source, "actor_train")
    leave(source, unread)
    return common.expert_parallel(source, read, num_devices)


def expert_keys(source: Source, *role: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The key that a role's strategy reads, and the other: Megatron's and FSDP2's."""
    config = (*role, "strategy_args", "strategy_config")
    keys = (*config, "expert_model_parallel_size"), (*config, "ep_size")
    return keys if _is_megatron(source, *role) else keys[::-1]


def shares_sequences(source: Source) -> bool:
    """Whether several devices of the trainer compute one sequence."""
    size = source.peek(*context_keys(source, "actor_train")[0])
    return isinstance(size, int) and size > 1


def _context_parallel(source: Source) -> int:
    """Devices that share a sequence."""
    read, unread = context_keys(source, "actor_train")
    leave(source, unread)
    return source.integer(*read, low=1, high=64) or 1


def leave(source: Source, where: tuple[str, ...]) -> None:
    """Account for a size that a role's strategy ignores."""
    if source.peek(*where) not in (None, 1):
        source.drop(where, "ROLL's strategy does not read it")
    elif source.has(*where):
        source.take(*where)


def context_keys(source: Source, *role: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The key that a role's strategy reads, and the other: context parallelism is Megatron's, Ulysses FSDP2's."""
    keys = (*role, "strategy_args", "strategy_config", "context_parallel_size"), (*role, "model_args", "ulysses_size")
    return keys if _is_megatron(source, *role) else keys[::-1]


def _is_megatron(source: Source, *role: str) -> bool:
    return str(source.peek(*role, "strategy_args", "strategy_name")).startswith("megatron")


def min_learning_rate(source: Source, role: str, rate: float, schedule: str) -> float | None:
    """Where a schedule ends: ``min_lr``, or ``min_lr_rate`` of the peak."""
    place, smallest = _optimizer_number(source, role, "lr_scheduler_kwargs", "min_lr")
    if smallest is None:
        place = (role, "training_args", "lr_scheduler_kwargs", "min_lr_rate")
        share = source.number(*place, high=1.0)
        smallest = None if share is None else rate * share
    if not smallest:
        return None
    if schedule == "Constant" or smallest > rate:
        why = "the rate is constant" if schedule == "Constant" else f"is above the learning rate {rate:g}"
        source.drop(place, f"{why}, so no schedule ends there")
        return None
    _note_unread(source, place)
    return smallest


def epsilon(source: Source, role: str) -> float | None:
    """Adam's."""
    place, found = _optimizer_number(source, role, "adam_epsilon", above=0.0)
    if found is not None:
        _note_unread(source, place)
    return found


def _optimizer_number(source: Source, role: str, *key: str, above: float | None = None) -> tuple[tuple[str, ...], float | None]:
    """Where the file has a setting of the optimizer, and the setting.

    ROLL's Megatron strategy reads it in ``strategy_config``. Of ``training_args`` its loader drops it: a file that has it there is of an
    earlier version, or means what it says.
    """
    read, unread = (role, "strategy_args", "strategy_config", *key), (role, "training_args", *key)
    if _is_megatron(source, role) and source.has(*read):
        if source.has(*unread):
            source.drop(unread, "strategy_config counts")
        return read, source.number(*read, above=above)
    return unread, source.number(*unread, above=above)


def _note_unread(source: Source, place: tuple[str, ...]) -> None:
    if place[1] == "training_args":
        where = "; its Megatron strategy reads strategy_config" if _is_megatron(source, place[0]) else ""
        source.differs(place, f"counts here, and ROLL's loader drops it{where}")


def _checkpointing(source: Source) -> bool | None:
    disabled = source.flag("actor_train", "model_args", "disable_gradient_checkpointing")
    granularity_at = (*_CONFIG, "recompute_granularity")
    granularity = source.choice(common.GRANULARITIES, *granularity_at)
    if granularity == "selective":
        source.differs(granularity_at, "becomes activationCheckpointing, which recomputes whole layers")
    if disabled and granularity:
        source.drop(granularity_at, "disable_gradient_checkpointing is on")
    return not disabled if disabled is not None else (True if granularity else None)


def warmup_steps(source: Source, where: tuple[str, ...], updates: int) -> int | None:
    """Steps of warm-up: ROLL's schedulers count optimizer updates (``set_max_steps`` of its PPOConfig), of which a step has ``updates``."""
    at = (*where, "warmup_steps")
    if _starts_at_once(source, where):
        for key in ("warmup_steps", "warmup_ratio"):
            if source.peek(*where, key):
                source.drop((*where, key), "Transformers' schedule constant has no warm-up; constant_with_warmup has one")
            elif source.has(*where, key):
                source.take(*where, key)
        return None
    number = source.integer(*at, high=100_000_000)
    if not number or updates == 1:
        return number
    steps = -(-number // updates)
    source.differs(at, f"counts optimizer updates, of which a step has {updates}: becomes {counted(steps, 'step')}")
    return steps


def _starts_at_once(source: Source, where: tuple[str, ...]) -> bool:
    """Whether the schedule is Transformers' ``constant``, which has no warm-up; Megatron's has."""
    return source.peek(*where, "lr_scheduler_type") == "constant" and not _is_megatron(source, where[0])


def critic_updates(source: Source, numbers: Batch, devices: int) -> int:
    """Optimizer updates of the critic in one step, with batches of its own (ROLL's 8 and 1 by default); ``devices``: of it."""
    args, config = ("critic", "training_args"), ("critic", "strategy_args", "strategy_config")
    keys: list[tuple[str, ...]] = [(*args, "per_device_train_batch_size"), (*args, "gradient_accumulation_steps")]
    keys += [(*config, f"{kind}_parallel_size") for kind in ("tensor_model", "pipeline_model", "context")]
    sizes = [size if isinstance(size := source.peek(*key), int) and size > 0 else None for key in keys]
    together = (sizes[2] or 1) * (sizes[3] or 1) * (sizes[4] or 1)
    return max(1, numbers.prompts * numbers.samples // max(1, devices // together) // ((sizes[0] or 8) * (sizes[1] or 1)))


def _updates(source: Source, numbers: Batch, num_devices: int, together: int) -> int | None:
    """Optimizer updates of one step in ROLL: samples of a data-parallel process / (per-device batch * accumulation).

    Args:
        source: the file.
        numbers: of a step.
        num_devices: of the Trainer.
        together: devices that share layers and sequences.
    """
    per_device = source.integer(*_ARGS, "per_device_train_batch_size", low=1)
    accumulation = source.integer(*_ARGS, "gradient_accumulation_steps", low=1)
    if per_device is None and accumulation is None and not source.keys(*_ARGS):
        return None
    if per_device is None:
        per_device = source.assume((*_ARGS, "per_device_train_batch_size"), 8, "default of ROLL's training arguments")
    accumulation = accumulation or 1
    stages_at = (*_CONFIG, "pipeline_model_parallel_size")
    stages = source.integer(*stages_at, low=1, high=1024) or 1
    if stages > 1:
        source.drop(stages_at, "RLJob has no pipeline parallel training; it served to find the number of updates")
    parallel = max(1, num_devices // (together * stages))
    return max(1, numbers.prompts * numbers.samples // parallel // (per_device * accumulation))


def _mini_batches(source: Source, numbers: Batch, updates: int) -> int:
    """As many of the updates as divide the prompts."""
    result = common.largest_divisor(numbers.prompts, updates)
    if result != updates:
        why = f"gives {updates} updates per step, which do not divide {numbers.prompts} prompts; {result} are made"
        source.differs((*_ARGS, "gradient_accumulation_steps"), why, "check training.miniBatches")
    return result


def _micro_batch(source: Source, numbers: Batch, context: int) -> int | None:
    where = (*_ARGS, "per_device_train_batch_size")
    per_device = source.integer(*where, low=1)
    if per_device is None:
        return None
    tokens = min(-(-per_device * (numbers.prompt_tokens + numbers.response_tokens) // context), 100_000_000)
    shared = "" if context == 1 else f" on each of {context} devices"
    become = "becomes" if per_device == 1 else "become"
    source.differs(
        where,
        f"{counted(per_device, 'sequence')} of full length {become} at most {tokens} tokens per pass{shared}",
        "check training.microBatchTokens",
    )
    return tokens
