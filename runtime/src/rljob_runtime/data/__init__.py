"""Prompts for a run: read or generated, formatted, tokenized, shuffled, mixed.

::

    SourceConfig (JSONL file, reasoning-gym task) -> rows (a question, or messages) -> PromptFormat + tokenizer -> PromptSource.next(n) -> Prompt
"""

from rljob_runtime.data.config import JsonlSource, PromptFormat, ReasoningGymSource, SourceConfig
from rljob_runtime.data.source import PromptSource

__all__ = ["JsonlSource", "PromptFormat", "PromptSource", "ReasoningGymSource", "SourceConfig"]
