"""ROLL configurations: questions with one answer, with gem's tools around them or without, as ToolUse and Chat.

Facts about ROLL: ``roll/pipeline/agentic/env/gem`` and ``roll/pipeline/agentic/tools`` of its source (https://github.com/alibaba/ROLL,
main of August 2026), and gem (https://github.com/axon-rl/gem).
"""

from __future__ import annotations

import re

from rljob_api import paths
from rljob_api.vocabulary import EnvironmentType
from rljob_convert.common import Section, compact
from rljob_convert.source import Source

_MATH, _QUESTIONS = ("roll_math", "math:"), ("roll_qa", "qa:", "logic:")
"""Types, and beginnings of types, by what scores an answer."""
_TOOLS = ("python_code", "search")
_NAMES = {"python_code": "code", "search": "search"}
"""The tags that ROLL's tools are called by."""


def conversation(source: Source, where: paths.Parts, kind: str) -> tuple[EnvironmentType, Section] | None:
    """Type and parameters of an environment that asks one question; None where it is another, or has tools that RLJob lacks."""
    is_math = any(kind == each or (each.endswith(":") and kind.startswith(each)) for each in _MATH)
    if not is_math and not any(kind == each or (each.endswith(":") and kind.startswith(each)) for each in _QUESTIONS):
        return None
    configs = [(*where, "tool_wrapper", "tool_configs", i) for i in range(source.length(*where, "tool_wrapper", "tool_configs"))]
    ids = [source.peek(*config, "tool_id") for config in configs]
    if not all(each in _TOOLS for each in ids) or len(set(ids)) < len(ids):
        return None
    parameters = {
        **_tasks(source, (*where, "env_config"), "problem" if is_math else "question"),
        "reward": _reward(source, (*where, "env_config"), is_math=is_math),
    }
    if not configs:
        return EnvironmentType.CHAT, parameters
    return EnvironmentType.TOOL_USE, {**parameters, **_wrapper(source, (*where, "tool_wrapper"), configs)}


def _tasks(source: Source, where: paths.Parts, prompt_field: str) -> Section:
    """A data set of the Hub is a file here; gem has names of its own for fields that the file does not name."""
    name = source.text(*where, "dataset_name") or "questions"
    slug = re.sub(r"[^a-z0-9]+", "-", name.rsplit("/", 1)[-1].lower()).strip("-") or "questions"
    path = source.assume((*where, "dataset_name"), f"data/{slug}.jsonl", "tasks are lines of a JSONL file", "write the data set into it")
    if source.has(*where, "split"):
        source.drop((*where, "split"), "the file has one split", f"write the split into {path}")
    prompt, answer = source.text(*where, "question_key"), source.text(*where, "answer_key")
    return compact({"path": path, "prompt_field": prompt or prompt_field, "answer_field": answer or "answer"})


def _reward(source: Source, where: paths.Parts, *, is_math: bool) -> Section:
    if is_math:
        return {"type": "MathRule"}
    boxed = source.flag(*where, "extract_boxed")
    why = "gem also leaves out articles and punctuation when it compares answers"
    source.assume((*where[:-1], "env_type"), "ExactMatch", why, "write a Function for another comparison, see docs/agents.md")
    extraction = {"extraction": "Boxed"} if boxed else {"extraction": "Tag"}
    return {"type": "ExactMatch", **extraction, "parameters": {"ignore_case": True}}


def _wrapper(source: Source, where: paths.Parts, configs: list[paths.Parts]) -> Section:
    calls = source.integer(*where, "wrapper_args", "max_tool_uses", low=1, high=10_000)
    for key in ("tool_reward", "tool_success_reward"):
        if source.number(*where, "wrapper_args", key, low=-1e6, high=1e6):
            source.differs(
                (*where, "wrapper_args", key), "is left out: calls of tools have no reward of their own", "use a Function reward"
            )
    tools = [_python(source, config) if source.text(*config, "tool_id") == "python_code" else _search(source, config) for config in configs]
    source.assume(
        where, "Tags", "RLJob describes tools in words of its own", "write call_format: ToolCall for models that know <tool_call>"
    )
    return compact({"tools": tools, "call_format": "Tags", "max_calls": calls})


def _python(source: Source, where: paths.Parts) -> Section:
    timeout = source.number(*where, "tool_args", "timeout", above=0.0, high=3600.0)
    if source.has(*where, "tool_args", "sandbox_type"):
        source.drop((*where, "tool_args", "sandbox_type"), "programs always run in RLJob's sandbox")
    if source.has(*where, "tool_args", "keep_error_last_line"):
        source.drop((*where, "tool_args", "keep_error_last_line"), "an error is its last line", "")
    return compact({"type": "Python", "name": _NAMES["python_code"], "timeout_s": timeout})


def _search(source: Source, where: paths.Parts) -> Section:
    why = "RLJob's Search finds passages of a JSONL file by their words"
    corpus = source.assume(
        (*where, "tool_args", "search_url"), "data/corpus.jsonl", why, "write the passages into it, or ask the server from a Function"
    )
    if source.has(*where, "tool_args", "search_url"):
        source.drop((*where, "tool_args", "search_url"), "Search asks no server", "see docs/agents.md")
    top_k = source.integer(*where, "tool_args", "topk", low=1, high=100)
    return compact({"type": "Search", "name": _NAMES["search"], "corpus": corpus, "top_k": top_k})
