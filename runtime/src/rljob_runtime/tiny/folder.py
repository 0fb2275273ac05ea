"""The folder of a tiny model, and the threads that one is made with: what the models of all tasks have in common."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen2ForCausalLM, Qwen2Tokenizer
from transformers.utils import logging as transformers_logging

from rljob_runtime.errors import ModelError
from rljob_runtime.tiny.settings import TINY_FILE, TinySummary

_MOST_THREADS = 2
"""More do not make a model this small sooner. Beside other work even two are slow, because they wait for each other in each operation."""


def existing(folder: Path, fingerprint: str) -> TinySummary | None:
    """Return the finished model of the same parameters, None for a free folder; ModelError when something else is there."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return None
    marker = folder / TINY_FILE
    if not folder.is_dir() or not marker.is_file():
        raise ModelError(f"tiny model: {folder} exists and was not made by this command; choose another folder or remove it")
    saved = json.loads(marker.read_text())
    if saved.get("fingerprint") != fingerprint:
        raise ModelError(
            f"tiny model: {folder} holds a tiny model made with other parameters (seed {saved.get('seed')}, task {saved.get('task')}); "
            f"choose another folder or remove it"
        )
    names = TinySummary.__dataclass_fields__
    return TinySummary(**{**{k: v for k, v in saved.items() if k in names}, "folder": folder, "reused": True})


def write(
    folder: Path,
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    summary: TinySummary,
    more: Mapping[str, object],
) -> None:
    """Write everything beside ``folder`` and rename: the folder is there complete or not at all. ``more`` stands in TINY_FILE, too."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        model.generation_config = GenerationConfig(
            bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
        )
        with _no_progress_bars():
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
        described = {k: v for k, v in asdict(summary).items() if k not in ("folder", "reused")}
        (partial / TINY_FILE).write_text(json.dumps(described | dict(more), indent=2) + "\n")
        partial.chmod(0o755)
        partial.replace(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """So many while it is open; None: 2, or fewer where torch has fewer."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or min(_MOST_THREADS, before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
