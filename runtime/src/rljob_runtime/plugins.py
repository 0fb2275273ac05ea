"""Functions and classes of the user's own, named in the spec as ``module:name``: found, imported, and their signature checked.

Rewards, policy losses, advantage estimators and the environments of agentic jobs come in this way. Modules are looked for beside
the job file first, then on the Python path; in a cluster there is no job file, and the image has them.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from rljob_runtime.errors import PluginError

Function = Callable[..., Any]


def load_function(reference: str, folder: str | None) -> Function:
    """Import a function; a module that is imported already is not imported again.

    Args:
        reference: ``module:function``.
        folder: searched before the Python path, which it joins.

    Raises:
        PluginError: there is no such module or function, importing fails, or it is an ``async`` function.
    """
    function: Function = _attribute(reference, folder, "function", inspect.isfunction)
    if inspect.iscoroutinefunction(function):
        raise PluginError(f"{reference} is an async function; it is called in a thread or process of its own, so make it a plain one")
    return function


def load_class(reference: str, folder: str | None, methods: Iterable[str], keywords: Mapping[str, object]) -> type[Any]:
    """Import a class that has some methods and can be constructed with some keyword arguments.

    Args:
        reference: ``module:Class``.
        folder: searched before the Python path, which it joins.
        methods: that it must have.
        keywords: arguments of its construction.

    Raises:
        PluginError: there is no such module or class, importing fails, a method is missing, or it does not take the arguments.
    """
    found = find_class(reference, folder, methods)
    check_signature(found, reference, (), keywords, f"the parameters {', '.join(keywords) or 'nothing'}")
    return found


def find_class(reference: str, folder: str | None, methods: Iterable[str]) -> type[Any]:
    """Import a class that has some methods, whatever it is constructed with; otherwise as ``load_class``."""
    found: type[Any] = _attribute(reference, folder, "class", inspect.isclass)
    missing = [method for method in methods if not callable(getattr(found, method, None))]
    if missing:
        raise PluginError(f"{reference} lacks {', '.join(missing)}; it must have {', '.join(methods)}")
    return found


def _attribute(reference: str, folder: str | None, what: str, is_one: Callable[[object], bool]) -> Any:
    """What a reference names in its module.

    Raises:
        PluginError: there is no such module, importing fails, or nothing of that name can be called.
    """
    module_name, _, name = reference.partition(":")
    if folder is not None and folder not in sys.path:
        sys.path.insert(0, folder)
    module = _import(module_name, folder)
    found = getattr(module, name, None)
    if not (callable(found) and (what != "class" or is_one(found))):
        own = sorted(n for n, v in vars(module).items() if is_one(v) and v.__module__ == module.__name__)
        near = difflib.get_close_matches(name, own, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise PluginError(
            f"module {module_name!r} ({module.__file__}) has no {what} {name!r}; {hint}it defines: {', '.join(own) or f'no {what}'}"
        )
    return found


def check_signature(function: Function, reference: str, positional: Iterable[str], keywords: Mapping[str, object], takes: str) -> None:
    """Refuse a function that cannot be called with these arguments.

    Args:
        function: what was loaded.
        reference: its name in the spec.
        positional: names of the positional arguments.
        keywords: keyword arguments.
        takes: what it must take, for the message.

    Raises:
        PluginError: it cannot.
    """
    try:
        inspect.signature(function).bind(*positional, **keywords)
    except TypeError as error:
        raise PluginError(f"{reference}{inspect.signature(function)} cannot be called: {error}; it must take {takes}") from error


def _import(module_name: str, folder: str | None) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except Exception as error:  # whatever a user's module raises while it is imported
        missing_itself = isinstance(error, ModuleNotFoundError) and error.name is not None and module_name.startswith(error.name)
        detail = f"{type(error).__name__}: {error}"
        if not missing_itself:
            raise PluginError(f"importing module {module_name!r} failed: {detail}; fix the module or install what it needs") from error
        files = sorted(p.stem for p in Path(folder).glob("*.py")) if folder is not None else []
        near = difflib.get_close_matches(module_name, files, n=1)
        hint = f"; nearest there: {near[0]}.py" if near else f"; Python files there: {', '.join(f + '.py' for f in files[:10]) or 'none'}"
        place = f" in {folder} and" if folder is not None else ""
        raise PluginError(f"no module {module_name!r}{place} on the Python path{hint if folder is not None else ''}") from error
