"""Specs between valid and absurd, the same for the same seed: examples and refused manifests, changed where the schema has its limits."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rljob_api.crd import schema
from rljob_api.reading.manifest import read
from rljob_api.v1alpha1.rljob import KIND

ROOT = Path(__file__).resolve().parents[2]
Node = dict[str, Any] | list[Any]
TEXTS = (
    "", " ", "a", "A", "-", "0", "1", "-1", "0-3", "all", "0:0-1", "0-1:0-3,3-5", "node", "cluster", "list(range(0,4))", "[1,0]", "١-٣",
    "Auto", "80Gi", "1e3", "0.5", "${x}", "0-99999", "/a", "/a:b", "../..", "a b", "a\nb", "\u0000", "null", "true", "x" * 64, "y" * 300,
    "spec", "actor_train", "actor_infer", "local", "list(range(0,2**40))", "[" * 50 + "]" * 50, "http://x", "module:function", "😀",
)  # fmt: skip
NUMBERS = (0, 1, -1, 2, 3, 7, 64, 1000, 2**31, 2**53 + 1, 2**63, -(2**63), 0.5, 1.0, -0.0, 1e-9, 1e300)
"""JSON has no NaN."""


def mutants(seed: int, count: int) -> Iterator[dict[str, Any]]:
    """``count`` manifests named ``m<index>``."""
    sources = _sources()
    for index in range(count):
        dice = random.Random(f"{seed}/{index}")
        document = copy.deepcopy(dice.choice(sources))
        for _ in range(dice.choice((0, 1, 1, 1, 2, 3, 5))):
            _mutate(document["spec"], schema.job_schema()["properties"]["spec"], dice)
        yield {**document, "metadata": {"name": f"m{index}"}}


def _sources() -> list[dict[str, Any]]:
    """Every RLJob of the examples."""
    texts = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples").rglob("*.yaml"))]
    return [dict(read(text).data) for text in texts if f"kind: {KIND}" in text]


def _mutate(node: Any, about: Mapping[str, Any], dice: random.Random) -> None:
    """Change one place below ``node``, which the schema describes by ``about``."""
    while True:
        keys: list[Any] = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys or dice.random() < 0.15:
            return _add(node, about, dice)
        key = dice.choice(keys)
        child, below = node[key], _below(about, key)
        if isinstance(child, dict | list) and dice.random() < 0.8:
            node, about = child, below
            continue
        match dice.randrange(6):
            case 0:
                del node[key]
            case 1 if isinstance(node, list):
                node.insert(key, copy.deepcopy(child))
            case 2:
                node[key] = _anything(dice)
            case _:
                node[key] = _near(below, child, dice)
        return None


def _below(about: Mapping[str, Any], key: Any) -> Mapping[str, Any]:
    """The schema of a member; empty where there is none."""
    found = about.get("items") if isinstance(key, int) else about.get("properties", {}).get(key, about.get("additionalProperties"))
    return found if isinstance(found, dict) else {}


def _add(node: Node, about: Mapping[str, Any], dice: random.Random) -> None:
    """Set a field that is not there, mostly one that the schema knows."""
    if isinstance(node, list):
        node.append(copy.deepcopy(dice.choice(node)) if node and dice.random() < 0.5 else _near(_below(about, 0), None, dice))
        return
    absent = sorted(set(about.get("properties", {})) - set(node))
    if absent and dice.random() < 0.9:
        name = dice.choice(absent)
        node[name] = _near(_below(about, name), None, dice)
    else:
        node[dice.choice(("unknown", "Name", "x-y", "", "kind"))] = _anything(dice)


def _near(about: Mapping[str, Any], now: Any, dice: random.Random, depth: int = 0) -> Any:
    """A value near a limit of the schema."""
    if about.get("enum"):
        return dice.choice([*about["enum"], *about["enum"], "Other", str(about["enum"][0]).lower()])
    match about.get("type"):
        case "integer" | "number":
            bounds = [about.get("minimum", 0), about.get("maximum", 1000)]
            close = [b + d for b in bounds for d in (-1, 0, 1)] + [about.get("default", 1), 2, 4]
            return dice.choice(close if about["type"] == "integer" else [*close, *(b + d for b in bounds for d in (-0.5, 0.5)), 1.0])
        case "boolean":
            return dice.choice((True, False, True, False, "true", 1))
        case "string":
            length = min(about.get("maxLength", 64), 100_000)
            return dice.choice([*TEXTS, "z" * length, "z" * (length + 1), now if isinstance(now, str) else "b", f"{now}x"])
        case "array":
            return [_near(_below(about, 0), None, dice, depth + 1) for _ in range(dice.randrange(3))] if depth < 4 else []
        case "object" if "properties" in about:
            names = [n for n in about["properties"] if n in about.get("required", ()) or dice.random() < 0.15]
            return {name: _near(about["properties"][name], None, dice, depth + 1) for name in names} if depth < 6 else {}
        case "object":
            return {dice.choice(TEXTS): _near(_below(about, "k"), None, dice, depth + 1) for _ in range(dice.randrange(3))}
    return _anything(dice)


def _anything(dice: random.Random, depth: int = 0) -> Any:
    """Any JSON value."""
    match dice.randrange(8 if depth < 3 else 6):
        case 0:
            return None
        case 1:
            return dice.random() < 0.5
        case 2 | 3:
            return dice.choice(NUMBERS)
        case 4 | 5:
            return dice.choice(TEXTS)
        case 6:
            return [_anything(dice, depth + 1) for _ in range(dice.randrange(3))]
    return {dice.choice(TEXTS): _anything(dice, depth + 1) for _ in range(dice.randrange(3))}
