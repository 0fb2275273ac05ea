"""Reads a Dockerfile as far as needed to know which files a target is made from, so that an unchanged image is not built again."""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster.errors import ClusterError

_FROM_STAGE = re.compile(r"(?:--from=|[,=]from=)([^\s,]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage."""

    name: str
    """Its name, or its number as text."""
    text: str
    """All its instructions."""
    uses: frozenset[str]
    """Stages, or images, that it begins with or copies from."""
    sources: tuple[str, ...]
    """Paths that it copies from the build context."""


def instructions(text: str) -> Iterator[str]:
    """The instructions of a Dockerfile, continued lines joined, comments left out."""
    pending = ""
    for line in text.splitlines():
        if line.lstrip().startswith("#") or (not line.strip() and not pending):
            continue
        pending += line.rstrip().removesuffix("\\") + " "
        if not line.rstrip().endswith("\\"):
            yield " ".join(pending.split())
            pending = ""
    if pending.strip():
        yield " ".join(pending.split())


def stages(text: str) -> dict[str, Stage]:
    """The stages by name. Instructions before the first one (ARG) belong to every stage."""
    result: dict[str, Stage] = {}
    common: list[str] = []
    current: list[str] | None = None
    name = ""

    def finish() -> None:
        if current is not None:
            result[name] = _stage(name, common, current)

    for instruction in instructions(text):
        if instruction.upper().startswith("FROM "):
            finish()
            words = instruction.split()
            name = words[-1] if len(words) > 2 and words[-2].upper() == "AS" else str(len(result))
            current = [instruction]
        elif current is None:
            common.append(instruction)
        else:
            current.append(instruction)
    finish()
    return result


def _stage(name: str, common: list[str], own: list[str]) -> Stage:
    uses: set[str] = set()
    sources: list[str] = []
    for instruction in own:
        keyword, _, rest = instruction.partition(" ")
        if keyword.upper() == "FROM":
            uses.add(next(word for word in rest.split() if not word.startswith("--")))
            continue
        from_stages = _FROM_STAGE.findall(instruction) if keyword.upper() in ("COPY", "RUN") else []
        uses.update(from_stages)
        if keyword.upper() in ("COPY", "ADD") and not from_stages:
            sources += _paths(rest)[:-1]
    return Stage(name=name, text="\n".join([*common, *own]), uses=frozenset(uses), sources=tuple(sources))


def _paths(rest: str) -> list[str]:
    """Sources and destination of a COPY, in its plain or its JSON form."""
    flags = 0
    words = rest.split()
    while flags < len(words) and words[flags].startswith("--"):
        flags += 1
    plain = " ".join(words[flags:])
    return [str(path) for path in json.loads(plain)] if plain.startswith("[") else shlex.split(plain)


def needed(all_stages: dict[str, Stage], target: str) -> list[Stage]:
    """The target and every stage it is made from, by name.

    Raises:
        ClusterError: there is no such target.
    """
    if target not in all_stages:
        raise ClusterError(f"the Dockerfile has no target {target!r}; it has {', '.join(all_stages)}")
    pending, found = [target], set()
    while pending:
        name = pending.pop()
        if name in all_stages and name not in found:
            found.add(name)
            pending += all_stages[name].uses
    return [all_stages[name] for name in sorted(found)]


def context_files(root: Path, sources: list[str], ignore: str) -> list[Path]:
    """Files of the build context below these sources, sorted.

    Args:
        root: the build context.
        sources: paths as in COPY; a pattern is expanded.
        ignore: text of the .dockerignore; its ``**/`` lines are left out, the rest decides only what may be copied at all.

    Raises:
        ClusterError: a source does not exist.
    """
    patterns = [line.strip().removeprefix("**/") for line in ignore.splitlines() if line.startswith("**/")]
    files: set[Path] = set()
    for source in sources:
        matches = sorted(root.glob(source)) if set(source) & set("*?[") else [root / source]
        for match in matches:
            if not match.exists():
                raise ClusterError(f"the Dockerfile copies {source}, and there is no {match}")
            files.update([match] if match.is_file() else (path for path in match.rglob("*") if path.is_file()))
    return sorted(
        file for file in files if not any(fnmatch.fnmatch(p, pattern) for p in file.relative_to(root).parts for pattern in patterns)
    )
