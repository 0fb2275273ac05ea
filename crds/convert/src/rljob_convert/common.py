"""What both converters share: names, environment variables, data sources, rewards, the order of a manifest."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rljob_api import naming, paths
from rljob_api.errors import counted
from rljob_api.rules.engine_arguments import OWN_ARGUMENTS
from rljob_api.v1alpha1.base import ENV_NAME_PATTERN
from rljob_api.v1alpha1.rljob import API_VERSION, KIND
from rljob_convert.notes import is_secret_key
from rljob_convert.source import Source

Section = dict[str, Any]
"""A part of a manifest as plain data."""
SPEC_ORDER = (
    "nodeGroups",
    "components",
    "pipeline",
    "model",
    "data",
    "rewards",
    "environments",
    "algorithm",
    "rollout",
    "training",
    "validation",
    "overlap",
    "offload",
    "weightSync",
    "checkpoint",
    "seed",
)
MAX_LABEL = 40
MAX_JOB_NAME = 43
MAX_TAGS = 256
"""Tags of prompts in one list."""
SECRET_NAME = "rljob-secrets"
"""Secret that converted secret variables refer to."""
DTYPES = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "bf16-mixed": "bfloat16",
    "fp16": "float16",
    "float16": "float16",
    "16-mixed": "float16",
    "fp32": "float32",
    "float32": "float32",
    "32": "float32",
}
GRANULARITIES = {"full": "full", "selective": "selective"}
"""What Megatron recomputes in the backward pass."""
MEGATRON_BIAS_RATE = 1e-3
"""Megatron's default of moe_router_bias_update_rate."""

_PLACE = "change the placement"
TRAIN_PLACEHOLDER = "data/train.jsonl"
MODEL_PLACEHOLDER = "models/policy"


def compact(section: Mapping[str, Any]) -> Section:
    """Without None and empty sections."""
    return {key: value for key, value in section.items() if value is not None and value not in ({}, [])}


def manifest(name: str, spec: Mapping[str, Any]) -> Section:
    """The manifest with its keys in reading order."""
    ordered = {key: spec[key] for key in SPEC_ORDER if spec.get(key) not in (None, {}, [])}
    return {"apiVersion": API_VERSION, "kind": KIND, "metadata": {"name": name}, "spec": ordered}


class Labels:
    """Kubernetes labels near to given texts, each only once. O(1) a label."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        """``taken``: labels that are not given out."""
        self._taken = set(taken)
        self._last: dict[str, int] = {}

    def next(self, text: str, fallback: str) -> str:
        """A label near to ``text``; ``fallback`` when nothing of it can be in a label."""
        base = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:MAX_LABEL].strip("-") or fallback
        result, number = base, self._last.get(base, 1)
        while result in self._taken:
            number += 1
            result = f"{base[: MAX_LABEL - 6].rstrip('-')}-{number}"
        self._last[base] = number
        self._taken.add(result)
        return result


def label(text: str, fallback: str, taken: Iterable[str] = ()) -> str:
    """A Kubernetes label near to ``text`` that is not ``taken``."""
    return Labels(taken).next(text, fallback)


def component_name(text: str, taken: Iterable[str] = ()) -> str:
    """A component name near to ``text`` that is not ``taken``; underscores stay."""
    base = re.sub(r"[^a-z0-9_]+", "-", text.lower()).strip("-_")[:MAX_LABEL].strip("-_")
    base = base if base and base[0].isalpha() else f"c-{base}"[:MAX_LABEL].strip("-_")
    used, result, number = set(taken), base, 2
    while result in used:
        result = f"{base[: MAX_LABEL - 6]}-{number}"
        number += 1
    return result


def job_name(source: Source, name: str | None, *parts: str) -> str:
    """``name`` as it is, else one made from the experiment's name in the file, else a placeholder."""
    written = source.peek(*parts)
    if name is not None:
        if isinstance(written, str):
            source.drop(parts, f"the job is called {name}, as asked")
        return name
    if not isinstance(written, str) or not written:
        source.take(*parts)
        if source.has(*parts):
            if parts not in source.noted:
                source.drop(parts, "is not text to name the job by", "rename the job")
        return source.assume(parts, "converted", "the manifest needs a name", "choose one")
    result = re.sub(r"[^a-z0-9]+", "-", written.lower()).strip("-")
    result = re.sub(r"^[^a-z]+", "", result)[:MAX_JOB_NAME].strip("-") or "converted"
    source.text(*parts, limit=4096)
    if result != written:
        source.differs(parts, f"becomes {result}: names have at most {MAX_JOB_NAME} lower-case letters, digits and dashes")
    return result


def environment(source: Source, parts: paths.Parts, name: str) -> tuple[Section | None, bool]:
    """One environment variable of the file, and whether it comes from a Secret; None when it must not be set."""
    if name.startswith(naming.RESERVED_ENV_PREFIX) or name in naming.RESERVED_ENV:
        source.drop(parts, "the system sets this variable", "remove it")
        return None, False
    if not re.fullmatch(ENV_NAME_PATTERN, name) or len(name) > 128:
        source.drop(parts, "is not the name of an environment variable", "correct it")
        return None, False
    if is_secret_key(name):
        where = f"Secret {SECRET_NAME}, key {name}"
        source.differs(parts, f"becomes a reference to {where}: a manifest is readable for many", "create that Secret")
        return {"name": name, "valueFrom": {"secretKeyRef": {"name": SECRET_NAME, "key": name}}}, True
    value = source.take(*parts)
    if isinstance(value, (dict, list)) or (isinstance(value, str) and len(value) > 4096):
        source.drop(parts, "is not text of at most 4096 characters", "correct it")
        return None, False
    text = "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return {"name": name, "value": text}, False


def environment_class(kind: str) -> str:
    """The class that a user is to write for an environment that another framework has: its name there in one word."""
    words = re.findall(r"[A-Za-z0-9]+", kind)
    name = "".join(word[:1].upper() + word[1:] for word in words)[:64]
    return f"my_environments:{name if name[:1].isalpha() else f'Env{name}'}"


def file_source(name: str, path: str, prompt: str | None, answer: str | None, tag: str | None = None) -> Section:
    """A source of prompts."""
    fields = {"path": path, "promptField": prompt, "answerField": answer, "tagField": tag}
    if path.endswith(".parquet"):
        return {"name": name, "type": "Parquet", "parquet": compact(fields)}
    return {"name": name, "type": "JSONL", "jsonl": compact(fields)}


def sources(files: Iterable[str], fallback: str, prompt: str | None, answer: str | None, tag: str | None = None) -> list[Section]:
    """One source of prompts per file."""
    names = Labels()
    return [file_source(names.next(path.rsplit("/", 1)[-1].split(".", 1)[0], fallback), path, prompt, answer, tag) for path in files]


def note_alike(source: Source, parts: paths.Parts, files: Sequence[str]) -> None:
    """Several files are sampled alike, where other frameworks sample from all their prompts together."""
    if len(files) > 1:
        shares = " : ".join("1" for _ in files)
        source.assume(parts, shares, "as many prompts come from each file, whatever its size", "set data.train[].weight")


def trained_dtype(source: Source, *places: paths.Parts) -> str | None:
    """The Trainer's type at the first of some places that gives one; float16 becomes bfloat16.

    float16 needs its loss scaled, because small gradients vanish in it; RLJob's master weights are float32, and bfloat16 has their range.
    """
    for where in places:
        dtype = source.choice(DTYPES, *where)
        if dtype == "float16":
            why = "training in float16 needs loss scaling, which RLJob does not have; trained in bfloat16, with float32 master weights"
            source.differs(where, why, "check the model on bfloat16")
            return "bfloat16"
        if dtype is not None:
            return dtype
    return None


def engine_arguments(source: Source, kind: str, given: Mapping[str, object], where: paths.Parts, longest: int) -> Section:
    """Arguments that go to the engine under its own names, without those that RLJob sets itself or would cut responses.

    Args:
        source: the configuration.
        kind: of the engine.
        given: arguments and their values.
        where: their section.
        longest: tokens of the longest request.
    """
    own = next((names for engine, names in OWN_ARGUMENTS.items() if engine.value == kind), {})
    result: Section = {}
    for key, value in given.items():
        if key in own:
            source.drop((*where, key), "RLJob sets this argument of the engine itself", own[key])
        elif key == "max_model_len" and kind == "VLLM" and isinstance(value, int) and value < longest:
            why = f"is less than a prompt and its response may have, {longest} tokens, for which RLJob makes room"
            source.drop((*where, key), why, "lower rollout.maxPromptTokens or maxResponseTokens")
        elif value is not None:
            result[key] = value
    return result


def reward_rule(source: Source, kind: str, name: str, parts: paths.Parts) -> Section:
    """A reward by what its name promises; one without an equivalent becomes a Function to write."""
    word = kind.lower()
    known = {"math": "MathVerify", "boxed": "ExactMatch", "multiple_choice": "ExactMatch"}
    rule = next((rule for part, rule in known.items() if part in word), None)
    if rule is not None:
        source.differs(parts, f"{kind} is taken for {rule} of the boxed answer", "check rewards[].type and extraction")
        return {"name": name, "type": rule, "extraction": "Boxed"}
    function = f"my_rewards:{re.sub(r'[^a-z0-9]+', '_', name).strip('_') or 'reward'}"
    if not function.split(":")[1][0].isalpha():
        function = f"my_rewards:reward_{function.split(':')[1]}"
    source.assume(parts, function, f"RLJob has no reward like {kind} of its own", "write this function, see the field rewards[].function")
    return {"name": name, "type": "Function", "function": function}


def without_idle_value_clip(source: Source, parts: paths.Parts, rule: Section, updates: int) -> Section:
    """The learning rule without ``critic.valueClip`` where a step has one update: it begins with the old values, and nothing is cut.

    Args:
        source: the configuration.
        parts: where the file says it.
        rule: the section algorithm.
        updates: of one step.
    """
    critic = dict(rule.get("critic", {}))
    if updates > 1 or "valueClip" not in critic:
        return rule
    source.drop(parts, "with one update per step values do not move before it", "make several updates per step")
    del critic["valueClip"]
    return compact({**rule, "critic": critic})


def most_warmup(steps: int, schedule: str | None) -> int:
    """Warm-up steps that leave one step to a schedule that falls."""
    return steps if schedule in (None, "Constant") else max(0, steps - 1)


def whole_steps(source: Source, parts: paths.Parts, ratio: float | None, steps: int) -> int | None:
    """Warm-up steps of a warm-up ratio; a step that has begun counts."""
    if ratio is None:
        return None
    result = math.ceil(ratio * steps)
    source.differs(parts, f"becomes {result} of {counted(steps, 'step')}")
    return result


def largest_divisor(number: int, wanted: int) -> int:
    """The largest divisor of ``number`` that is at most ``wanted``."""
    return next(divisor for divisor in range(min(number, max(1, wanted)), 0, -1) if number % divisor == 0)


def sequence_parallel(source: Source, where: tuple[str, ...], tensor: int | None) -> bool | None:
    """Whether tokens are divided too; None where layers are not, and Megatron-Core has nothing to divide them over either.

    Args:
        source: the file.
        where: key of the flag.
        tensor: tensor parallel size of the converted trainer; None: 1.
    """
    return True if source.flag(*where) and tensor is not None else None


def expert_parallel(source: Source, where: tuple[str, ...], processes: int, whose: str = "the {} training processes") -> int | None:
    """The trainer's expert parallel size, or that of ``whose`` processes; None for 1.

    Args:
        source: the file.
        where: key of the size.
        processes: of the component, 0 if not known.
        whose: how a note calls them.
    """
    size = source.integer(*where, low=1, high=128) or 1
    if processes % size:
        source.drop(where, f"does not divide {whose.format(processes)}, which shard experts by FSDP2", "change the placement")
        return None
    return size if size > 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeKeys:
    """Keys of the parallel sizes of a critic, reference or teacher."""

    tensor: tuple[str, ...]
    context: tuple[str, ...]
    experts: tuple[str, ...]


def component_sizes(source: Source, keys: SizeKeys, processes: int) -> Section:
    """The parallel sizes of a critic, reference or teacher, as fields of its component; those of 1 are left out.

    Args:
        source: the file.
        keys: of the sizes.
        processes: of the component, 0 if not known.
    """
    tensor = source.integer(*keys.tensor, low=1, high=64) or 1
    if processes % tensor:
        source.drop(keys.tensor, f"does not divide its {processes} processes, which shard their layers by FSDP2 alone", _PLACE)
        tensor = 1
    context = source.integer(*keys.context, low=1, high=64) or 1
    if processes % (context * tensor):
        source.drop(keys.context, f"does not divide its {processes // tensor} data-parallel processes", _PLACE)
        context = 1
    return compact(
        {
            "tensorParallelSize": tensor if tensor > 1 else None,
            "contextParallelSize": context if context > 1 else None,
            "expertParallelSize": expert_parallel(source, keys.experts, processes, "its {} processes"),
        }
    )


def load_balancing(source: Source, where: tuple[str, ...]) -> dict[str, float] | None:
    """``training.loadBalancing`` from Megatron's coefficient of the auxiliary loss; None for 0, which adds no loss."""
    coefficient = source.number(*where)
    return {"coefficient": coefficient} if coefficient else None


def router_bias_rate(source: Source, where: tuple[str, ...]) -> float | None:
    """``training.routerBiasUpdateRate`` from Megatron's two settings below ``where``; None where it moves no biases."""
    enabled, rate = (*where, "moe_router_enable_expert_bias"), (*where, "moe_router_bias_update_rate")
    found = source.number(*rate)
    if source.flag(*enabled):
        return source.assume(rate, MEGATRON_BIAS_RATE, "Megatron's default") if found is None else found
    if found is not None:
        source.drop(rate, "has no effect without moe_router_enable_expert_bias")
    return None
