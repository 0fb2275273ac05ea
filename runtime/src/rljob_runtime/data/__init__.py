"""Prompts for a run: read or generated, formatted, tokenized, shuffled, mixed.

::

    SourceConfig (JSONL, Parquet, reasoning-gym task) -> rows -> PromptFormat + tokenizer -> PromptSource.next(n) -> Prompt

A row is a question, which the format's template surrounds, or a conversation (``messages``).
"""

from rljob_runtime.data.config import JsonlSource, ParquetSource, PromptFormat, ReasoningGymSource, SourceConfig
from rljob_runtime.data.source import PromptSource

__all__ = ["JsonlSource", "ParquetSource", "PromptFormat", "PromptSource", "ReasoningGymSource", "SourceConfig"]
