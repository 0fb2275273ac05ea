"""Reward functions that are given as Python functions: into the job, and as files to the scoring processes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rljob_runtime.errors import PluginError, RewardSetupError
from rljob_runtime.library import pickled
from rljob_runtime.plugins import check_signature

RewardFunction = Callable[..., object]
"""``function(prompt, response, answer, metadata)``: a number, or a mapping of numbers with ``score``."""
Rewards = Mapping[str, RewardFunction] | Sequence[RewardFunction] | RewardFunction
FOLDER = "functions"
"""In the run folder."""


def named(rewards: Rewards | None) -> dict[str, RewardFunction]:
    """The functions by the name of their reward, which is their own where none is given.

    Raises:
        RewardSetupError: two have the same name, one has none, or one is no function.
    """
    if rewards is None:
        return {}
    if isinstance(rewards, Mapping):
        found = dict(rewards)
    else:
        functions = rewards if isinstance(rewards, Sequence) else [rewards]
        names = [_name_of(function) for function in functions]
        if double := sorted({name for name in names if names.count(name) > 1}):
            raise RewardSetupError(
                f"rewards: {names.count(double[0])} functions are called {double[0]!r}; give a dict of names to functions"
            )
        found = dict(zip(names, functions, strict=True))
    for name, function in found.items():
        if not callable(function):
            raise RewardSetupError(f"rewards[{name!r}] is a {type(function).__name__}; give a function")
    return found


def _name_of(function: RewardFunction) -> str:
    name = getattr(function, "__name__", "<lambda>")
    if not name.isidentifier():
        raise RewardSetupError(f"rewards: a function without a name of its own ({name}); give a dict of names to functions")
    return name.replace("_", "-").strip("-").lower()


def with_functions(manifest: Mapping[str, Any], functions: Mapping[str, RewardFunction], folder: Path) -> dict[str, Any]:
    """The manifest with a Function reward for each function, read from ``folder``; an entry of that name keeps its other fields.

    Raises:
        RewardSetupError: a function cannot be called as rewards are, with the ``parameters`` of its entry.
    """
    spec = dict(manifest.get("spec") or {})
    entries = [dict(entry) for entry in spec.get("rewards") or ()]
    for name, function in functions.items():
        entry = next((e for e in entries if e.get("name") == name), None)
        if entry is None:
            entries.append(entry := {"name": name})
        arguments = dict(entry.get("parameters") or {})
        _check_call(name, function, arguments)
        entry |= {
            "type": "Function",
            "function": pickled.SCORE,
            "parameters": {"file": str(file_of(folder, name)), "arguments": arguments},
            "readPaths": [*entry.get("readPaths", ()), str(folder.resolve())],
        }
    return {**manifest, "spec": {**spec, "rewards": entries}} if functions else dict(manifest)


def _check_call(name: str, function: RewardFunction, arguments: Mapping[str, Any]) -> None:
    keywords = {"prompt": "", "response": "", "answer": "", "metadata": {}, **arguments}
    try:
        check_signature(function, f"rewards[{name!r}]", (), keywords, f"the keywords {', '.join(keywords)}")
    except PluginError as error:
        raise RewardSetupError(str(error)) from error


def file_of(folder: Path, name: str) -> Path:
    """Where the function of a reward lies."""
    return folder.resolve() / f"{name}.pkl"


def write(functions: Mapping[str, RewardFunction], folder: Path) -> None:
    """Write the functions.

    Raises:
        RewardSetupError: a function refers to something that cannot be sent to another process, or the disk is full.
    """
    if functions:
        folder.mkdir(parents=True, exist_ok=True)
    for name, function in functions.items():
        try:
            file_of(folder, name).write_bytes(pickled.dumps(function))
        except (TypeError, ValueError, pickle.PicklingError) as error:
            raise RewardSetupError(
                f"rewards[{name!r}] cannot be sent to the scoring processes: {error}; make inside the function what it refers to"
            ) from error
        except OSError as error:
            raise RewardSetupError(
                f"{file_of(folder, name)}: cannot be written: {error.strerror}; make its folder writable for this user"
            ) from error
