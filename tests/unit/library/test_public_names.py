"""The names and signatures of ``import rljob`` are a promise: a change of this golden file is a change for users."""

from __future__ import annotations

import enum
import inspect
import subprocess
import sys
import typing

import rljob
from tests.layout.tree import ROOT
from tests.support.golden import Golden

FOREIGN = ("RLJob", "SpecInvalidError", "RuntimeFault", "Interrupted", "CallbackError", "StateKind")
"""Described elsewhere: of the API's schema, the tree of errors, the vocabulary."""
INTERNAL = {"loop", "arbiter", "policies_of", "start_workers"}
"""What a Cluster has for its groups, and promises nobody."""


def lines_of(name: str) -> list[str]:
    thing = getattr(rljob, name)
    if name in FOREIGN:
        return [name]
    if inspect.isfunction(thing):
        return [f"{name}{inspect.signature(thing)}"]
    if issubclass(thing, enum.Enum):
        return [f"{name}.{member.name} = {member.value!r}" for member in thing]
    found = [f"{name}.{field}: {kind}" for field, kind in sorted(inspect.get_annotations(thing).items()) if not field.startswith("_")]
    made = inspect.signature(thing.__init__) if "__init__" in vars(thing) else ""
    for member, value in sorted(vars(thing).items()):
        if member.startswith("_") or member in INTERNAL:
            continue
        if isinstance(value, property):
            found.append(f"{name}.{member}: {inspect.signature(typing.cast(typing.Any, value.fget)).return_annotation}")
        elif inspect.isfunction(value):
            found.append(f"{name}.{member}{inspect.signature(value)}")
    return [f"class {name}{made}", *(f"    {line}" for line in found)]


def test_the_public_signatures_are_frozen(golden: Golden) -> None:
    assert sorted(rljob.__all__) == list(rljob.__all__), "sorted, so that a diff shows one line"
    text = "\n".join(line for name in rljob.__all__ for line in lines_of(name)) + "\n"
    assert golden.differences(ROOT / "tests" / "golden" / "python-api.txt", text) == ""


def test_everything_public_is_documented_and_typed() -> None:
    for name in rljob.__all__:
        thing = getattr(rljob, name)
        assert thing.__doc__, name
        for member, value in vars(thing).items() if inspect.isclass(thing) and thing.__module__.startswith("rljob_runtime.library") else ():
            if inspect.isfunction(value) and not member.startswith("_"):
                assert value.__doc__, f"{name}.{member}"
                parameters = [p for p in inspect.signature(value).parameters.values() if p.name != "self"]
                assert all(p.annotation is not inspect.Parameter.empty for p in parameters), f"{name}.{member}"


def test_importing_it_brings_no_tensors_along() -> None:
    code = "import sys, rljob; print(sorted({n.partition('.')[0] for n in sys.modules} & {'torch', 'ray', 'vllm', 'transformers'}))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
