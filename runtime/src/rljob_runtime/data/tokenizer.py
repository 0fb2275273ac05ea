"""Loads the tokenizer of the policy, without torch where the class is known.

``AutoTokenizer`` imports torch before it looks at a file, five seconds of processor time in a driver that computes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljob_api import collector
from rljob_runtime.errors import ModelError
from rljob_runtime.hub.source import INDEX, small_files
from rljob_runtime.records import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_QWEN_MODELS = ("qwen2", "qwen3")
_QWEN_CLASS = "Qwen2Tokenizer"
"""What ``AutoTokenizer`` returns for these model types if ``tokenizer_config.json`` names it too."""


def load_tokenizer(path: str, *, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or Hub id, of the class that ``AutoTokenizer`` chooses.

    Raises:
        ModelError: it cannot be loaded.
    """
    try:
        if _is_qwen(Path(path)):
            from transformers import Qwen2Tokenizer

            known: PreTrainedTokenizerBase = Qwen2Tokenizer.from_pretrained(path)
            return known
        from transformers import AutoTokenizer

        chosen: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(f"the tokenizer of {path} cannot be loaded: {error}; set spec.model.tokenizerPath if it lies elsewhere") from error
    return chosen


def import_ahead(path: str | None = None) -> None:
    """Import what :func:`load_tokenizer` needs of ``path``, or of any folder: all but a twentieth of what it takes.

    For moments at which a process only waits for others.
    """
    with collector.paused():
        if path is None or _is_qwen(Path(path)):
            from transformers import Qwen2Tokenizer  # noqa: F401
        else:
            from transformers import AutoTokenizer  # noqa: F401


def decode(tokenizer: PreTrainedTokenizerBase, responses: Sequence[IntArray]) -> list[str]:
    """Text of each response, without special tokens."""
    if not responses:  # of which a tokenizer would make one empty text
        return []
    return list(tokenizer.batch_decode([ids.tolist() for ids in responses], skip_special_tokens=True))


def tokenizer_files(folder: Path, *, code: bool) -> dict[str, bytes]:
    """What :func:`load_tokenizer` reads of a model's folder, by path in it; its Python files too if ``code``.

    Raises:
        ModelError: a file cannot be read.
    """
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    try:
        return {name: (folder / name).read_bytes() for name in small_files(names, code=code) if name != INDEX}
    except OSError as error:
        remedy = "make them readable for this user, or name another spec.model.tokenizerPath"
        raise ModelError(f"the tokenizer's file {error.filename} cannot be read: {error.strerror}; {remedy}") from error


def _is_qwen(folder: Path) -> bool:
    named, model = _json(folder / "tokenizer_config.json"), _json(folder / "config.json")
    return named.get("tokenizer_class") == _QWEN_CLASS and "auto_map" not in named and model.get("model_type") in _QWEN_MODELS


def _json(path: Path) -> dict[str, Any]:
    """The file's object; empty if there is none, and what is wrong with a file is for the loader to say."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
