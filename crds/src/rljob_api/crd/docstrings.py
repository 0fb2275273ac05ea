"""Reads the docstrings below fields and enum members, which Python itself does not keep.

Used when a schema, a reference page or ``rljob explain`` is written; needs the package's source files.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys


@functools.cache
def _module_docs(module: str) -> dict[str, dict[str, str]]:
    """Class name -> attribute name -> docstring, for all top-level classes of a module."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: _attributes(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _attributes(node: ast.ClassDef) -> dict[str, str]:
    docs: dict[str, str] = {}
    for statement, following in zip(node.body, node.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign):
            target: ast.expr = statement.target
        elif isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target = statement.targets[0]
        else:
            continue
        is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
        if isinstance(target, ast.Name) and is_text and isinstance(following.value.value, str):  # type: ignore[attr-defined]
            docs[target.id] = inspect.cleandoc(following.value.value)  # type: ignore[attr-defined]
    return docs


def attribute_docs(cls: type) -> dict[str, str]:
    """Docstrings of the attributes that ``cls`` and its bases (of any module) define, by attribute name.

    Raises:
        OSError: the source of a module is not available.
    """
    docs: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if base.__module__.startswith("rljob_"):
            docs.update(_module_docs(base.__module__).get(base.__name__, {}))
    return docs
