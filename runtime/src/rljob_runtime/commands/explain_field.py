"""``rljob explain``: a field by its path, as people write it, with indexes of lists or without ``spec``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping

from rljob_api.crd.reference import FieldDoc, index
from rljob_runtime.errors import SetupError

_ENTRY = re.compile(r"\[[^\]]*\]")
"""An entry of a list: ``[]``, ``[0]``, ``[name]``."""
_SENTENCE_END = re.compile(r"(?<=\.)\s+(?=[A-Z`])")


def lines(path: str) -> Iterator[str]:
    """What there is to know about a field, and the fields below it.

    Raises:
        SetupError: there is no such field; says which one may have been meant.
    """
    fields = {known.replace("[]", ""): doc for known, doc in index().items()}
    wanted = _ENTRY.sub("", path).strip().strip(".")
    if wanted not in fields and f"spec.{wanted}" in fields:
        wanted = f"spec.{wanted}"
    if wanted not in fields:
        raise SetupError(f"no field is called {path}; {_meant(wanted, fields)}")
    doc = fields[wanted]
    facts = [doc.type, *(["required"] if doc.is_required else []), *([f"default {doc.default}"] if doc.default else []), doc.bounds]
    yield f"{doc.path}  ({', '.join(fact for fact in facts if fact)})\n\n{doc.description}"
    if doc.choices:
        yield f"\nOne of: {', '.join(doc.choices)}"
    inside = _inside(wanted, fields)
    if inside:
        yield ""
    width = max((len(name) for name in inside), default=0)
    for name in inside:
        yield f"  {name:<{width}}  {_first_sentence(fields[f'{wanted}.{name}'].description)}"


def _first_sentence(description: str) -> str:
    """In one line, however the source breaks it."""
    return _SENTENCE_END.split(" ".join(description.split()), maxsplit=1)[0]


def _inside(section: str, fields: Mapping[str, FieldDoc]) -> list[str]:
    """Names of the fields directly below a section."""
    return [known.rpartition(".")[2] for known in fields if known.rpartition(".")[0] == section]


def _meant(wanted: str, fields: Mapping[str, FieldDoc]) -> str:
    """The field that was meant: a similar name beside it, the same name elsewhere, or what there is where the path ends."""
    first = wanted.partition(".")[0]
    if first not in fields and (near := difflib.get_close_matches(first.lower(), _inside("", fields), n=1, cutoff=0.6)):
        return f"did you mean {near[0]}{wanted[len(first) :]}?"
    if first not in fields and first != "spec":
        wanted = f"spec.{wanted}"
    section, _, key = wanted.rpartition(".")
    while section and section not in fields:
        section, _, key = section.rpartition(".")
    if section and not fields[section].is_section:
        kind = fields[section].type
        what = f"is a {kind}, whose keys are not the API's" if "map" in kind else f"has no fields below it: {kind}"
        return f"{fields[section].path} {what}; see rljob explain {section}"
    there = _inside(section, fields)
    if near := difflib.get_close_matches(key.replace("_", ""), there, n=1, cutoff=0.6):
        corrected = f"{section}.{near[0]}"
        below = f"{corrected}{wanted.removeprefix(f'{section}.{key}')}"
        return f"did you mean {fields[below if below in fields else corrected].path}?"
    last = wanted.rpartition(".")[2]
    if elsewhere := [doc.path for known, doc in fields.items() if known.rpartition(".")[2] == last]:
        return f"did you mean {' or '.join(elsewhere[:3])}?"
    near = difflib.get_close_matches(wanted, fields, n=1, cutoff=0.8)
    if near and not wanted.startswith(f"{near[0]}."):
        return f"did you mean {fields[near[0]].path}?"
    return f"{fields[section].path} has {', '.join(there)}" if section and section != "spec" else "start with rljob explain spec"
