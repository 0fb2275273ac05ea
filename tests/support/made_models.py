"""Where models that take a minute to make stay from one session of tests to the next.

`rljob model tiny` gives the same files whenever code, libraries and seed are the same. Each kind of model has a folder that is named after
a hash of them, so that a change of any makes its models again; on a machine without the folder, as on any other, the tests that need them
make them.

Making all of them computes for minutes, so a change that cannot change a model does not rename the folder: comments, docstrings and layout
of code, and the modules of :data:`WITHOUT_EFFECT`.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import platform
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import grimp
import torch

PACKAGE = "rljob_runtime"
MAKES_QUICKSTART, MAKES_LAKE = "rljob_runtime.tiny.model", "rljob_runtime.tiny.lake"
ENTRIES = ("rljob_runtime.tiny", "rljob_runtime.commands.model")
"""Through which tests have models made: their defaults count, not all that they import."""
WITHOUT_EFFECT = ("rljob_runtime.errors", "rljob_runtime.data.config", "rljob_runtime.data.jsonl")
"""Imported by what makes models, and no model depends on them: with an error there is none, and prompts come from a task."""
LIBRARIES = ("numpy", "reasoning_gym", "safetensors", "tokenizers", "torch", "transformers")


def kept_folder(makes: str) -> Path:
    """Of the models that this module makes, in the user's caches; it may not exist yet."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "rljob-tests" / f"models-{fingerprint(sources(makes))}"


def sources(makes: str) -> dict[str, Path]:
    """Files by module: of the one that makes models, all that it imports other than by :data:`WITHOUT_EFFECT`, and :data:`ENTRIES`."""
    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    for module in WITHOUT_EFFECT:
        graph.remove_module(module)  # and what nothing else imports
    modules = graph.find_upstream_modules(makes) | {makes, *ENTRIES}
    found = {module: find_spec(module) for module in modules}
    return {module: Path(spec.origin) for module, spec in found.items() if spec is not None and spec.origin is not None}


def fingerprint(files: dict[str, Path]) -> str:
    """Of the code in files, the libraries' versions, the interpreter's, and which instructions torch computes with."""
    described = {
        "files": {module: hashlib.sha256(_code(file).encode()).hexdigest() for module, file in files.items()},
        "libraries": {name: version(name) for name in LIBRARIES},
        "python": platform.python_version(),
        "instructions": [platform.machine(), torch.backends.cpu.get_cpu_capability()],
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


def _code(file: Path) -> str:
    """A module without comments, docstrings and places in the file."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            node.body = [entry for entry in node.body if not _is_text(entry)]
    return ast.dump(tree)


def _is_text(entry: ast.stmt) -> bool:
    """Whether it is a docstring, of a module, class, function or of the variable before it."""
    return isinstance(entry, ast.Expr) and isinstance(entry.value, ast.Constant) and isinstance(entry.value.value, str)
