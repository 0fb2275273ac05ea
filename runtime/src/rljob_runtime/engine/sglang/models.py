"""Which of SGLang's models a server need not import: by default each of its processes imports all of them, 250 modules."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

DISABLED = "SGLANG_DISABLED_MODEL_ARCHS"
"""SGLang's variable: modules of its package of models that it does not look for classes in, separated by commas."""
OWN_PACKAGE = "SGLANG_EXTERNAL_MODEL_PACKAGE"
"""SGLang's variable: a package of the user's, whose classes replace SGLang's. SGLang leaves modules of the same names out of it, too."""
_MODELS = "lib/python3.*/site-packages/sglang/srt/models"
_REGISTERED = "EntryClass"
"""What a module calls the class, or the list of classes, that it registers; set at its end."""
_FINDS_OTHERS = "ModelRegistry"
"""In a module whose classes, and those derived from them in others (Mistral 3 from LLaVA), have parts that are looked up by name."""
_IMPORTED = re.compile(r"from (?:sglang\.srt\.models)?\.(\w+) import")
_OF_OTHER_CLASSES = ("speculative", "model_impl", "json_model_override_args")
"""Beginnings of arguments with which the server loads other classes than the model's."""


def unused_models(python: Path, architectures: Sequence[str], extra_args: Mapping[str, Any]) -> dict[str, str]:
    """The variable that leaves out all but the model's class; nothing where it is set already, or the server may need another.

    Args:
        python: interpreter of the server, in an environment of its own.
        architectures: of the model's configuration.
        extra_args: arguments of the server beside RLJob's.
    """
    if DISABLED in os.environ or os.environ.get(OWN_PACKAGE) or any(name.startswith(_OF_OTHER_CLASSES) for name in extra_args):
        return {}
    texts = {path.stem: path.read_text() for folder in python.parent.parent.glob(_MODELS) for path in folder.glob("[!_]*.py")}
    used = {name for name, text in texts.items() if any(_registers(text, architecture) for architecture in architectures)}
    known = all(any(_registers(texts[name], architecture) for name in used) for architecture in architectures)
    if not used or not known or any(_FINDS_OTHERS in texts[name] for name in _with_imported(used, texts)):
        return {}
    return {DISABLED: ",".join(sorted(texts.keys() - used))}


def _with_imported(modules: Iterable[str], texts: Mapping[str, str]) -> set[str]:
    """Modules, and those that they import from the package of models."""
    found, new = set[str](), set(modules)
    while new:
        found |= new
        new = {name for module in new for name in _IMPORTED.findall(texts[module]) if name in texts} - found
    return found


def _registers(text: str, architecture: str) -> bool:
    """Whether a module registers that class, or the one that SGLang takes for it where weights are quantized."""
    _, found, registered = text.rpartition(_REGISTERED)
    return bool(found) and re.search(rf"\b(Quant)?{re.escape(architecture)}\b", registered) is not None
