"""Prompts for a run: read or generated, formatted, tokenized, shuffled, mixed.

::

    SourceConfig (JSONL file, reasoning-gym task) -> rows -> PromptFormat + tokenizer -> PromptSource.next(n) -> Prompt

A row is a question, which the format's template surrounds, or a conversation (``messages``).
"""

from rljob_runtime.data.config import JsonlSource, PromptFormat, ReasoningGymSource, SourceConfig
from rljob_runtime.data.source import PromptSource

__all__ = ["JsonlSource", "PromptFormat", "PromptSource", "ReasoningGymSource", "SourceConfig"]
