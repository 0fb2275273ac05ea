"""The file of ``rljob sweep``: a job and a matrix of values for some of its fields. Pure but for reading the files.

::

    job: quickstart.yaml                        # beside this file
    matrix:
      spec.training.learningRate: [1e-4, 4e-4]
      spec.components[actor_infer].engine.maxRunningRequests: [32, 64]
      spec.seed: [0, 1, 2]
    exclude:                                    # leave these out
    - {spec.training.learningRate: 1e-4, spec.seed: 2}

A point is one choice of a value for each path; its name is the job's and a digest of that choice, so that it stays when others are added.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljob_api.errors import FieldError, SpecInvalidError, did_you_mean, field_error
from rljob_api.naming import MAX_JOB_NAME
from rljob_api.reading import manifest, yaml_text
from rljob_api.rules.model import ConfigReader
from rljob_api.validation import CheckedJob, check
from rljob_runtime.commands.files import read_text

if TYPE_CHECKING:
    from rljob_api.memory import ShapeReader

KEYS = ("job", "matrix", "exclude")
DIGEST = 8
MAX_POINTS = 1000
_PATH = re.compile(r"spec(\.[A-Za-z][A-Za-z0-9]*(\[[A-Za-z0-9_.-]+\])?)+")
Json = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One job of a sweep."""

    name: str
    values: Mapping[str, Any]
    """By path of the matrix."""
    manifest: Json

    @property
    def words(self) -> str:
        """``learningRate 0.0001, seed 2``."""
        return ", ".join(f"{path.rpartition('.')[2]} {json.dumps(value)}" for path, value in self.values.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """A file that was read, all of whose points are valid."""

    name: str
    """Of the job."""
    job_file: Path
    points: tuple[Point, ...]
    checked: tuple[CheckedJob, ...]
    """One for each point."""


def read(path: Path, *, shape_of: ShapeReader, config_of: ConfigReader, queue: str | None = None) -> Sweep:
    """Read a sweep and check every point of it.

    Args:
        path: of the file.
        shape_of: says how large a model is.
        config_of: reads a model's config.json.
        queue: LocalQueue of every point; None: as the job has it.

    Raises:
        SpecInvalidError: with every problem of the file, else of the job and of all points.
        SetupError: a file cannot be read.
    """
    documents = yaml_text.load(read_text(path, "give the path of a sweep file (docs/compare.md)"))
    data = documents[0].data if len(documents) == 1 else None
    if not isinstance(data, dict):
        raise SpecInvalidError([_error("", None, "is not one YAML mapping", f"write the keys {', '.join(KEYS)}")])
    if problems := [*_shape_problems(data)]:
        raise SpecInvalidError(problems)
    job_file = path.parent / data["job"]
    text = read_text(job_file, f"`job` of {path} names it; write the path of a job file, relative to the folder of the sweep")
    base: Json = dict(manifest.read(text).data)
    if queue is not None:
        base = {**base, "spec": {**base.get("spec", {}), "queue": {**base.get("spec", {}).get("queue", {}), "name": queue}}}
    matrix, left_out = data["matrix"], data.get("exclude", [])
    problems = [error for name in matrix if (error := _missing(base, name)) is not None]
    if problems:
        raise SpecInvalidError(problems)
    points = [_point(base, values) for values in _choices(matrix) if not any(_matches(values, one) for one in left_out)]
    if not points:
        raise SpecInvalidError([_error("exclude", None, "leaves no point", "remove an entry")])
    checked = _checked(points, shape_of, config_of)
    return Sweep(name=str(base["metadata"]["name"]), job_file=job_file, points=tuple(points), checked=checked)


def _shape_problems(data: Mapping[str, Any]) -> Iterator[FieldError]:
    """What is wrong with the file itself."""
    if data.get("kind") == "RLJob":
        yield _error("kind", "RLJob", "is a job, and a sweep names one", "write a file with job: and matrix: (docs/compare.md)")
        return
    for key in data:
        if key not in KEYS:
            yield _error(str(key), None, "is not a key of a sweep", did_you_mean(str(key), KEYS) or f"it has {', '.join(KEYS)}")
    if not isinstance(data.get("job"), str):
        yield _error("job", data.get("job"), "is not the path of a job file", "write it relative to this file")
    matrix = data.get("matrix")
    if not isinstance(matrix, dict) or not matrix:
        yield _error("matrix", matrix, "is not a mapping of paths to lists of values", "write for example spec.seed: [0, 1, 2]")
        return
    for path, values in matrix.items():
        where = f"matrix.{path}"
        if not _PATH.fullmatch(str(path)):
            yield _error(
                where, None, "is not a path of a field", "write spec.training.steps, or spec.components[NAME].field for an entry of a list"
            )
        if not isinstance(values, list) or not values:
            yield _error(where, values, "is not a list of values", "write [1, 2]")
        elif len({json.dumps(value, sort_keys=True) for value in values}) < len(values):
            yield _error(where, values, "has a value twice", "remove one")
    lengths = [len(values) for values in matrix.values() if isinstance(values, list)]
    count = 1
    for length in lengths:
        count *= length
    if count > MAX_POINTS:
        yield _error("matrix", None, f"makes {count} points, at most {MAX_POINTS} are allowed", "remove values, or write several files")
    yield from _exclude_problems(data.get("exclude", []), matrix)


def _exclude_problems(entries: object, matrix: Mapping[str, Any]) -> Iterator[FieldError]:
    if not isinstance(entries, list):
        yield _error("exclude", entries, "is not a list of mappings of paths to values", "write [{spec.seed: 2}]")
        return
    for index, entry in enumerate(entries):
        where = f"exclude[{index}]"
        if not isinstance(entry, dict) or not entry:
            yield _error(where, entry, "is not a mapping of paths to values", "write {spec.seed: 2}")
            continue
        for path, value in entry.items():
            if path not in matrix:
                yield _error(f"{where}.{path}", value, "is not a path of the matrix", did_you_mean(str(path), matrix) or "use one of it")
            elif isinstance(matrix[path], list) and value not in matrix[path]:
                yield _error(f"{where}.{path}", value, f"is not a value of matrix.{path} {json.dumps(matrix[path])}", "use one of these")


def _error(path: str, value: object, problem: str, remedy: str) -> FieldError:
    return field_error(path, value, problem, remedy)


def _choices(matrix: Mapping[str, Sequence[Any]]) -> Iterator[Json]:
    for values in itertools.product(*matrix.values()):
        yield dict(zip(matrix, values, strict=True))


def _matches(values: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
    return all(values[path] == value for path, value in entry.items())


def _point(base: Json, values: Json) -> Point:
    made = copy.deepcopy(base)
    for path, value in values.items():
        _put(made, path, value)
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:DIGEST]
    name = f"{str(base['metadata']['name'])[: MAX_JOB_NAME - DIGEST - 1].rstrip('-')}-{digest}"
    made["metadata"] = {**made["metadata"], "name": name}
    return Point(name=name, values=values, manifest=made)


def _parts(path: str) -> list[tuple[str, str | None]]:
    """Keys of a path, each with the name of the entry that is chosen from its list."""
    found = re.findall(r"([A-Za-z][A-Za-z0-9]*)(?:\[([^\]]+)\])?", path)
    return [(key, entry or None) for key, entry in found]


def _missing(base: Json, path: str) -> FieldError | None:
    """The problem of a path that goes through what the job has not as a mapping, or an entry that is not there."""
    here: Any = base
    for key, entry in _parts(path)[:-1] if "]" != path[-1] else _parts(path):
        here = here.get(key) if isinstance(here, dict) else None
        if entry is not None:
            names = [item.get("name") for item in here if isinstance(item, dict)] if isinstance(here, list) else []
            if entry not in names:
                remedy = did_you_mean(entry, [str(name) for name in names]) or f"it has {', '.join(map(str, names)) or 'none'}"
                return _error(f"matrix.{path}", None, f"{key} has no entry called {entry}", remedy)
            here = next(item for item in here if isinstance(item, dict) and item.get("name") == entry)
        elif here is None:
            return None  # made with the value; validation knows the fields
        elif not isinstance(here, dict):
            return _error(
                f"matrix.{path}", None, f"{key} is a {type(here).__name__}", "name an entry of a list in brackets: components[NAME]"
            )
    return None


def _put(document: Json, path: str, value: object) -> None:
    here: Any = document
    parts = _parts(path)
    for key, entry in parts[:-1]:
        here = here.setdefault(key, {}) if entry is None else next(i for i in here[key] if i.get("name") == entry)
    key, entry = parts[-1]
    if entry is None:
        here[key] = copy.deepcopy(value)
        return
    index = next(i for i, item in enumerate(here[key]) if item.get("name") == entry)
    here[key][index] = copy.deepcopy(value)


def _checked(points: Sequence[Point], shape_of: ShapeReader, config_of: ConfigReader) -> tuple[CheckedJob, ...]:
    """Every point, checked; a problem that all have is reported once.

    Raises:
        SpecInvalidError: some are invalid.
    """
    checked: list[CheckedJob] = []
    found: dict[FieldError, list[Point]] = {}
    unchecked: str | None = None
    for point in points:
        try:
            checked.append(check(point.manifest, shape_of=shape_of, config_of=config_of))
        except SpecInvalidError as error:
            unchecked = unchecked or error.unchecked
            for problem in error.errors:
                found.setdefault(problem, []).append(point)
    if found:
        raise SpecInvalidError([_located(problem, having, len(points)) for problem, having in found.items()], unchecked)
    return tuple(checked)


def _located(problem: FieldError, having: Sequence[Point], count: int) -> FieldError:
    if len(having) == count:
        return problem
    more = f" and {len(having) - 1} more" if len(having) > 1 else ""
    where = f"point {having[0].name} ({having[0].words}){more}: {problem.path}"
    return FieldError(path=where, value=problem.value, problem=problem.problem, remedy=problem.remedy, line=None)
