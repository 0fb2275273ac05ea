"""A model on a Hub, pinned to a commit, and which of its files a job needs. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

WEIGHTS = ".safetensors"
INDEX = "model.safetensors.index.json"
"""Says which file has which weight, where there are several."""
SINGLE = "model.safetensors"
"""All weights, where there is no :data:`INDEX`."""
SMALL_FILES = (".json", ".model", ".txt", ".jinja")
"""Configuration, tokenizer, chat templates."""
CODE = ".py"
TEMPLATES = "additional_chat_templates/"
"""The one folder that is read; others hold the same weights in other formats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """A file of a repository."""

    path: str
    size_bytes: int | None
    """None where only the cache was asked, which does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubModel:
    """What to download of a repository; equal on all nodes."""

    repo: str
    """``owner/name``."""
    commit: str
    """40 hexadecimal digits: a branch that moves meanwhile changes nothing."""
    files: tuple[HubFile, ...]

    @property
    def size_bytes(self) -> int | None:
        """Of all files; None where one is not known."""
        sizes = [file.size_bytes for file in self.files]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def without_weights(self) -> HubModel:
        """What the driver reads: configuration and tokenizer."""
        small = tuple(file for file in self.files if not file.path.endswith(WEIGHTS))
        return HubModel(repo=self.repo, commit=self.commit, files=small)


def is_hub_id(path: str) -> bool:
    """Whether a path of the spec can only be meant as a Hub id: no folder here, and neither absolute nor deeper than ``owner/name``."""
    folder = Path(path)
    return not (folder.exists() or folder.is_absolute() or path.startswith(".") or path.count("/") > 1)


def small_files(names: Iterable[str], *, code: bool) -> list[str]:
    """Configuration and tokenizer files among the names of a repository, with its Python files if ``code``."""
    suffixes = (*SMALL_FILES, CODE) if code else SMALL_FILES
    return [
        name
        for name in names
        if name.endswith(suffixes) and not name.endswith(".bin.index.json") and "/" not in name.removeprefix(TEMPLATES)
    ]
