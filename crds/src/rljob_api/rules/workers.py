"""Rules about nodes and workers: robots, labels, interpreters, variables that the system sets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from rljob_api import paths
from rljob_api.errors import FieldError
from rljob_api.errors import field_error as _error
from rljob_api.naming import RESERVED_ENV_PREFIX, RESERVED_LABEL_PREFIXES, RESERVED_LABELS
from rljob_api.planning import environment
from rljob_api.rules.pods import environments
from rljob_api.v1alpha1.rljob import RLJobSpec


def _place_variables(spec: RLJobSpec) -> Iterator[FieldError]:
    """What says where a process runs is not for users to set, see :mod:`rljob_api.planning.environment`."""
    for path, env in environments(spec):
        for index, variable in enumerate(env):
            # RLJOB_* is reserved everywhere, by pods; the head runs no worker.
            if variable.name in environment.VARIABLES and not variable.name.startswith(RESERVED_ENV_PREFIX) and path != "spec.head.env":
                problem = "says where a worker runs, and is set by the system"
                yield _error(f"{path}[{index}].name", variable.name, problem, "remove it, the placement decides")


def _interpreters(spec: RLJobSpec) -> Iterator[FieldError]:
    owners = [(f"spec.nodeGroups[{index}]", group.python_interpreter) for index, group in enumerate(spec.node_groups)]
    owners += [(f"spec.components[{index}]", component.python_interpreter) for index, component in enumerate(spec.components)]
    for path, interpreter in owners:
        if interpreter is not None and not interpreter.startswith("/"):
            problem = "is not an absolute path, and workers start in folders of Ray's choice"
            yield _error(f"{path}.pythonInterpreter", interpreter, problem, "write it out, for example /opt/robots/bin/python")


def _hardware(spec: RLJobSpec) -> Iterator[FieldError]:
    for index, group in enumerate(spec.node_groups):
        if group.hardware is None:
            continue
        path = ("spec", "nodeGroups", index, "hardware", "configs")
        if not group.hardware.configs:
            problem = f"lists no {group.hardware.type}, so nothing can be placed on this group"
            yield _error(paths.join(path), None, problem, "add one entry per piece, or remove hardware")
        for position, config in enumerate(group.hardware.configs):
            yield from _finite((*path, position, "parameters"), config.parameters)


def _finite(parts: paths.Parts, value: object) -> Iterator[FieldError]:
    """Workers get parameters as JSON, which has no word for these numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        yield _error(paths.join(parts), str(value), "cannot be written as JSON", "use a finite number, or a text")
    children = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from _finite((*parts, key), child)


def _labels(spec: RLJobSpec) -> Iterator[FieldError]:
    for index, group in enumerate(spec.node_groups):
        for key, value in group.labels.items():
            prefix = next((prefix for prefix in RESERVED_LABEL_PREFIXES if key.startswith(prefix)), None)
            if prefix is not None:
                path = paths.join(("spec", "nodeGroups", index, "labels", key))
                yield _error(path, value, f"labels that start with {prefix} are set by the system", "use a prefix of your own")
            elif key in RESERVED_LABELS:
                path = paths.join(("spec", "nodeGroups", index, "labels", key))
                yield _error(path, value, "is a label that KubeRay sets", "use a prefix of your own")


RULES: tuple[Callable[[RLJobSpec], Iterable[FieldError]], ...] = (
    _place_variables,
    _interpreters,
    _hardware,
    _labels,
)
"""Rules between fields, each independent of the others."""
