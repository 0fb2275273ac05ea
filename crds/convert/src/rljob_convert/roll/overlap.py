"""ROLL configurations: drawing responses beside training, which groups are trained, validation."""

from __future__ import annotations

import math

from rljob_api.errors import counted
from rljob_api.paths import Parts
from rljob_convert.common import Section, compact
from rljob_convert.roll.learning import Batch
from rljob_convert.source import Source

_INFER = ("actor_infer", "generating_args")
_VALIDATION = ("validation", "generating_args")
_SAMPLING = {"temperature": 0.95, "topP": 0.7, "topK": 50}
"""Defaults of ROLL's GeneratingArguments."""
_KEYS = {"temperature": "temperature", "topP": "top_p", "topK": "top_k"}
_PLAIN = {"temperature": "1.0", "topP": "1.0", "topK": "0"}
"""Values that change nothing about the model's distribution."""
_DEFAULT_EXTRA_PROMPTS = 16
_ALL_PROMPTS = 1_000_000
"""The most that a manifest may ask; ROLL validates on the whole set."""
_BOUNDS = {
    "mean_filter": {"threshold_down": "minMean", "threshold_up": "maxMean"},
    "std_filter": {"std_threshold": "minStd"},
}
"""Arguments of ROLL's filters, by type. Both leave out what is on a bound, as RLJob does."""


def rollout(source: Source, numbers: Batch, num_engines: int) -> Section:
    """How responses are generated.

    Args:
        source: the configuration.
        numbers: sizes of one step.
        num_engines: of the Rollout; 0 where that is not known.
    """
    section: Section = {
        "promptsPerStep": numbers.prompts,
        "samplesPerPrompt": numbers.samples,
        "redundantSamples": source.integer("train_env_manager", "group_size_redundancy", high=4096) or None,
        "extraPrompts": _extra_prompts(source),
        "groupFilter": _group_filter(source, numbers),
        "groupRouting": _routing(source, numbers, num_engines),
        "maxPromptTokens": numbers.prompt_tokens,
        "maxResponseTokens": numbers.response_tokens,
    }
    temperature = source.number(*_INFER, "temperature", high=2.0)
    if temperature == 0:
        source.differs((*_INFER, "temperature"), "greedy sampling cannot be trained on, 1.0 is used", "choose rollout.temperature")
        temperature = 1.0
    top_k = source.integer(*_INFER, "top_k", low=-1)
    values = {"temperature": temperature, "topP": source.number(*_INFER, "top_p", above=0.0, high=1.0), "topK": top_k}
    for field, value in values.items():
        if value is None:
            remedy = f"write {_PLAIN[field]} for plain sampling"
            value = source.assume((*_INFER, _KEYS[field]), _SAMPLING[field], "ROLL's default", remedy)
        section[field] = (max(0, value) or None) if field == "topK" else value
    section["stopStrings"] = list(dict.fromkeys(source.texts(*_INFER, "stop_strings")))
    return compact(section)


def _extra_prompts(source: Source) -> int | None:
    if not source.flag("is_use_additional_prompts"):
        return None
    where = ("max_additional_running_prompts",)
    number = source.integer(*where)
    if number is None:
        return source.assume(where, _DEFAULT_EXTRA_PROMPTS, "ROLL's default")
    source.differs(where, "becomes extraPrompts, which come on top of those of the step; ROLL bounds all that run", "check it")
    return number or None


def _group_filter(source: Source, numbers: Batch) -> Section | None:
    """ROLL has one filter per domain of rewards, RLJob one for all groups."""
    chosen: Section | None = None
    for domain in source.keys("rewards"):
        where = ("rewards", domain, "query_filter_config")
        kind = source.peek(*where, "type")
        if kind == "no_filter":
            source.take(*where, "type")
        if kind not in _BOUNDS:
            continue
        if chosen is not None or (kind == "std_filter" and numbers.samples < 2):
            why = "RLJob has one filter for all groups" if chosen is not None else "single responses do not deviate"
            source.drop(where, why, "set rollout.groupFilter")
            continue
        source.take(*where, "type")
        bounds = {field: _bound(source, (*where, "filter_args", key)) for key, field in _BOUNDS[kind].items()}
        if kind == "std_filter" and (bounds["minStd"] or 0) < 0:  # every deviation is above it
            bounds = {}
        chosen = compact(bounds) or None
        if chosen is not None and len(source.keys("rewards")) > 1:
            source.differs(where, "holds for the prompts of all rewards", "check rollout.groupFilter")
    return chosen


def _bound(source: Source, where: Parts) -> float | None:
    """A bound of a filter; infinity, the default of ROLL's, is none."""
    written = source.peek(*where)
    if isinstance(written, float) and math.isinf(written):
        source.take(*where)
        return None
    return source.number(*where, low=-1e6, high=1e6)


def without_repeats(source: Source, rule: Section, generation: Section) -> Section:
    """The learning rule without bounds of group means that ``rollout.groupFilter`` holds already: its groups never arrive."""
    given, filters = generation.get("groupFilter", {}), dict(rule.get("filters", {}))
    low, high = filters.get("minGroupMean"), filters.get("maxGroupMean")
    repeated = {"minGroupMean": low is not None and given.get("minMean", low - 1) >= low}
    repeated["maxGroupMean"] = high is not None and given.get("maxMean", high + 1) <= high
    for field, key in (("minGroupMean", "difficulty_low_threshold"), ("maxGroupMean", "difficulty_high_threshold")):
        if repeated[field]:
            where = key if source.has(key) else "difficulty_mask"
            source.drop((where,), f"{field} {filters.pop(field):g}: query_filter_config leaves those groups out already")
    return compact({**rule, "filters": filters})


def _routing(source: Source, numbers: Batch, num_engines: int) -> str | None:
    """One request for a whole group, unless its samples are requests of their own."""
    where = ("is_num_return_sequences_expand",)
    expand = source.flag(*where)
    if expand is not False:
        return None
    if source.peek("async_generation_ratio"):
        source.drop(where, "ROLL switches it on with async_generation_ratio")
        return None
    return "Together" if numbers.samples > 1 and num_engines > 1 else None


def overlap(source: Source) -> Section | None:
    """Generation ahead of training. ROLL aborts what runs when weights change, and goes on with the tokens it has."""
    ratio = source.number("async_generation_ratio", high=64.0)
    return {"asyncGenerationRatio": ratio, "updateMode": "Interrupt"} if ratio else None


def every_steps(source: Source) -> int:
    """Steps between validations; 0 without."""
    if not source.peek("validation", "data_args", "file_name"):
        return 0
    steps = source.integer("eval_steps")
    return source.assume(("eval_steps",), 10, "ROLL's default") if steps is None else steps


def validation(source: Source, steps: int, numbers: Batch) -> Section | None:
    """Validation every ``steps`` steps; None and notes where that is 0."""
    if not steps:
        if source.peek("validation", "data_args", "file_name"):
            source.drop(("validation", "data_args", "file_name"), "eval_steps is 0, so nothing is validated")
        elif source.has("eval_steps"):
            source.drop(("eval_steps",), "the file has no validation data", "add data.validation and validation.everySteps")
        for key in ("temperature", "top_p", "top_k", "num_return_sequences", "max_new_tokens"):
            if source.has(*_VALIDATION, key):
                source.drop((*_VALIDATION, key), "nothing is validated")
        return None
    temperature, top_p = source.number(*_VALIDATION, "temperature", high=2.0), source.number(*_VALIDATION, "top_p", above=0.0, high=1.0)
    if temperature is None:
        temperature = source.assume((*_VALIDATION, "temperature"), _SAMPLING["temperature"], "ROLL's default", "write 0 for greedy answers")
    if top_p is None and temperature:
        top_p = source.assume((*_VALIDATION, "top_p"), _SAMPLING["topP"], "ROLL's default", "write 1.0 for plain sampling")
    top_k = source.integer(*_VALIDATION, "top_k", low=-1, high=10_000_000)
    if top_k is None and temperature:
        top_k = source.assume((*_VALIDATION, "top_k"), int(_SAMPLING["topK"]), "ROLL's default", "write 0 for plain sampling")
    samples = source.integer(*_VALIDATION, "num_return_sequences", low=1, high=4096) or 1
    if not temperature:
        idle = {"top_p": top_p not in (None, 1.0), "top_k": top_k not in (None, 0, -1), "num_return_sequences": samples != 1}
        for key in (key for key, is_idle in idle.items() if is_idle):
            source.drop((*_VALIDATION, key), "answers are greedy, temperature is 0")
        samples, top_p, top_k = 1, None, None
    return compact(
        {
            "everySteps": steps,
            "maxPrompts": _ALL_PROMPTS,
            "samplesPerPrompt": samples if samples > 1 else None,
            "maxResponseTokens": _response_tokens(source, numbers),
            "temperature": temperature,
            "topP": top_p,
            "topK": max(0, top_k or 0) or None,
        }
    )


def _response_tokens(source: Source, numbers: Batch) -> int | None:
    """Tokens of an answer: ROLL sets ``max_new_tokens`` to what ``val_prompt_length`` leaves of a sequence, or else to that of training."""
    lengths = ("val_prompt_length", "val_sequence_length")
    prompt, total = (source.integer(key, low=1, high=10_000_000) for key in lengths)
    tokens = numbers.response_tokens
    if prompt is not None and total is not None and total > prompt:
        tokens = total - prompt
        if prompt != numbers.prompt_tokens:
            source.differs(lengths[:1], f"validation prompts have the bound of rollout, {counted(numbers.prompt_tokens, 'token')}")
    else:
        for key in (key for key in lengths if source.has(key)):
            source.drop((key,), "ROLL takes val_prompt_length and a longer val_sequence_length together or not at all")
    where = (*_VALIDATION, "max_new_tokens")
    if source.peek(*where) == tokens:
        source.take(*where)
    elif source.has(*where):
        source.drop(where, f"ROLL overwrites it with {tokens}, what a prompt leaves of a sequence")
    if tokens > numbers.response_tokens:
        why = f"{tokens} tokens of an answer are cut to {numbers.response_tokens}, the longest response that engines have room for"
        source.differs(lengths[1:], why)
    return tokens if tokens < numbers.response_tokens else None
