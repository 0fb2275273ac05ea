"""Questions to token ids, in batches: the tokenizer border."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from rljob_runtime.data.config import PromptFormat
from rljob_runtime.errors import DataError
from rljob_runtime.records import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptEncoder:
    """Applies the prompt format and tokenizes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_format: PromptFormat) -> None:
        """Raise DataError when a chat template is asked for and the tokenizer has none."""
        if prompt_format.chat_template and not tokenizer.chat_template:
            name = tokenizer.name_or_path or type(tokenizer).__name__
            raise DataError(
                f"data: chat_template is true but the tokenizer {name!r} has no chat template; "
                f"set chat_template: false or use an instruction-tuned model"
            )
        self._tokenizer = tokenizer
        self._format = prompt_format

    def encode(self, questions: Sequence[str]) -> list[tuple[str, IntArray]]:
        """Return (text, token ids) of each question, in order."""
        if not questions:
            return []
        texts = [self._text(question) for question in questions]
        # A chat template writes its own special tokens.
        encoded = self._tokenizer(texts, add_special_tokens=not self._format.chat_template, return_attention_mask=False)
        return [(text, np.array(ids, dtype=np.int32)) for text, ids in zip(texts, encoded["input_ids"], strict=True)]

    def _text(self, question: str) -> str:
        text = self._format.fill(question)
        if not self._format.chat_template:
            return text
        messages = [{"role": "user", "content": text}]
        if self._format.system_prompt is not None:
            messages.insert(0, {"role": "system", "content": self._format.system_prompt})
        rendered = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if not isinstance(rendered, str):
            raise DataError(f"data: the tokenizer's chat template gave {type(rendered).__name__}, not text; fix the template")
        return rendered
