"""Whatever a manifest holds, validating and planning it gives a job or a list of problems, never anything else."""

import copy
import json
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.errors import FieldError, SpecInvalidError
from rljob_api.validation import check

ROOT = Path(__file__).parents[2]
SOURCES = [yaml.load(path.read_text(), yaml.CSafeLoader) for path in sorted((ROOT / "examples").glob("*.yaml"))]
numbers = st.one_of(st.integers(-(2**70), 2**70), st.integers(-2, 9), st.floats(allow_nan=True))
texts = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["0-3", "all", "0:0-1", "0-1:0-3,3-5", "node", "cluster", "list(range(0,4))", "[1,0]", "١-٣", "Auto", "80Gi", "${x}", "0-99999"]
    ),
)
leaves = st.one_of(st.none(), st.booleans(), numbers, texts)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=3)),
    max_leaves=6,
)


@st.composite
def mutated(draw: st.DrawFn) -> Any:
    """An example with some of its parts replaced, removed, repeated or added."""
    document = copy.deepcopy(draw(st.sampled_from(SOURCES)))
    for _ in range(draw(st.integers(1, 4))):
        node: Any = document
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            child = node[key]
            if isinstance(child, (dict, list)) and child and draw(st.integers(0, 3)):
                node = child
                continue
            match draw(st.sampled_from(["replace", "remove", "repeat", "add"])):
                case "replace":
                    node[key] = draw(values)
                case "remove":
                    del node[key]
                case "repeat" if isinstance(node, list):
                    node.append(copy.deepcopy(child))
                case _ if isinstance(node, dict):
                    node[draw(texts)] = draw(values)
                case _:
                    node.append(draw(values))
            break
    return document


def problems_of(source: Any, *, runnable: bool) -> tuple[FieldError, ...]:
    """What is wrong with a manifest; empty where it has a plan. Any other exception is a fault."""
    try:
        plan = check(source, runnable=runnable).plan
    except SpecInvalidError as error:
        return error.errors
    assert plan.nodes
    return ()


def are_messages(problems: tuple[FieldError, ...]) -> bool:
    """Each says what is wrong and what to do, and all together can be read."""
    return all(problem.problem and problem.remedy for problem in problems) and sum(len(str(problem)) for problem in problems) < 2_000_000


@given(mutated(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_mutated_examples(document: Any, runnable: bool) -> None:
    assert are_messages(problems_of(yaml.safe_dump(document, allow_unicode=True, sort_keys=False), runnable=runnable))


@given(mutated())
@settings(max_examples=150, deadline=None)
def test_parsed_manifests(document: Any) -> None:
    if isinstance(document, dict):
        assert are_messages(problems_of(json.loads(json.dumps(document, default=str)), runnable=False))


@given(st.text(st.sampled_from("aApi:{}[]-&*!|>'\"\n 01,#?%@`\t"), max_size=120))
@settings(max_examples=200, deadline=None)
def test_any_text(text: str) -> None:
    assert are_messages(problems_of(text, runnable=True))
