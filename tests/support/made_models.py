"""Where models that take a minute to make stay from one session of tests to the next.

`rljob model tiny` gives the same files whenever code, libraries and seed are the same. The folder is named after a hash of them, so that a
change of any makes the models again; on a machine without the folder, as on any other, they are made by the tests that need them.

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

PACKAGE, MAKES = "rljob_runtime", "rljob_runtime.tiny"
WITHOUT_EFFECT = ("rljob_runtime.errors", "rljob_runtime.data.jsonl")
"""Imported by what makes models, and no model depends on them: an error ends the making, and prompts come from a task, not from a file."""
LIBRARIES = ("numpy", "reasoning_gym", "safetensors", "tokenizers", "torch", "transformers")


def kept_folder() -> Path:
    """In the user's caches; it may not exist yet."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "rljob-tests" / f"models-{fingerprint(sources())}"


def sources() -> dict[str, Path]:
    """Files by module: of the package that makes models, and of all that it imports other than by :data:`WITHOUT_EFFECT`."""
    graph = grimp.build_graph(PACKAGE, cache_dir=None)
    for module in WITHOUT_EFFECT:
        graph.remove_module(module)  # and what nothing else imports
    modules = graph.find_upstream_modules(MAKES, as_package=True) | graph.find_descendants(MAKES) | {MAKES}
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
