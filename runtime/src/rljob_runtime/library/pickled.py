"""Functions and classes of a notebook or script, which no other process can import: shipped as bytes, with their module's globals.

Loaded by the name of a function of this module: ``score`` in a scoring process, ``construct`` in a worker's. Imports nothing heavy.
"""

from __future__ import annotations

import functools
import pickle
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import cloudpickle

from rljob_runtime.library.worker import WorkerPlace, place_of_next

SCORE = f"{__name__}:score"
CONSTRUCT = f"{__name__}:construct"


def dumps(thing: Any) -> bytes:
    """A function or class as bytes that hold its code, and that of its module as far as it uses it; other modules are imported there.

    Raises:
        TypeError, pickle.PicklingError: it refers to something that cannot be pickled, such as an open file.
    """
    module = sys.modules.get(thing.__module__)
    if module is None or module.__name__ == "__main__" or _is_installed(module.__name__):
        return cloudpickle.dumps(thing)
    cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(thing)
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _is_installed(module: str) -> bool:
    """Whether every process can import the module: it is of an installed package or of Python."""
    root = module.partition(".")[0]
    found = getattr(sys.modules.get(root), "__file__", None)
    return (
        root in sys.stdlib_module_names
        or root in ("rljob", "rljob_runtime")
        or (found is not None and "site-packages" in Path(found).parts)
    )


@functools.cache
def _loaded(file: str) -> Callable[..., object]:
    return pickle.loads(Path(file).read_bytes())


def score(
    *,
    prompt: str,
    response: str,
    answer: str,
    metadata: Mapping[str, object],
    file: str,
    arguments: Mapping[str, Any] = MappingProxyType({}),
) -> object:
    """The reward function in ``file``, called with further ``arguments``."""
    return _loaded(file)(prompt=prompt, response=response, answer=answer, metadata=metadata, **arguments)


def prepare(*, file: str, arguments: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Import what the function needs before its time limit runs; takes what :func:`score` does."""
    _loaded(file)


score.prepare = prepare  # type: ignore[attr-defined]


def construct(*, pickled: bytes, args: tuple[Any, ...], kwargs: Mapping[str, Any], place: WorkerPlace) -> object:
    """An instance of the class in ``pickled``, at its place."""
    token = place_of_next.set(place)
    try:
        return pickle.loads(pickled)(*args, **kwargs)
    finally:
        place_of_next.reset(token)
