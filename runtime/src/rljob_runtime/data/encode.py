"""Questions to token ids, in batches: the tokenizer border."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rljob_runtime.data.config import PromptFormat
from rljob_runtime.data.rows import Row
from rljob_runtime.errors import DataError
from rljob_runtime.records import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class PromptEncoder:
    """Applies the prompt format and tokenizes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_format: PromptFormat) -> None:
        """Raise DataError when a chat template is asked for and the tokenizer has none, or one that does not take a question."""
        if prompt_format.chat_template and not tokenizer.chat_template:
            name = tokenizer.name_or_path or type(tokenizer).__name__
            raise DataError(
                f"data: chat_template is true but the tokenizer {name!r} has no chat template; "
                f"set chat_template: false or use an instruction-tuned model"
            )
        self._tokenizer = tokenizer
        self._format = prompt_format
        self._text(Row(question="question", answer=""))

    def encode(self, rows: Sequence[Row]) -> list[tuple[str, IntArray]]:
        """Return (text, token ids) of each row's prompt, in order. Raises DataError where the chat template does not take its messages."""
        if not rows:
            return []
        texts = [self._text(row) for row in rows]
        # A chat template writes its own special tokens.
        encoded = self._tokenizer(texts, add_special_tokens=not self._format.chat_template, return_attention_mask=False)
        return [(text, np.array(ids, dtype=np.int32)) for text, ids in zip(texts, encoded["input_ids"], strict=True)]

    def _text(self, row: Row) -> str:
        if not self._format.chat_template:
            return self._format.fill(row.question)
        messages = [dict(message) for message in row.messages] or [{"role": "user", "content": self._format.fill(row.question)}]
        if self._format.system_prompt is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": self._format.system_prompt})
        try:
            rendered = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **self._format.template_parameters
            )
        except Exception as error:  # whatever a template raises
            raise DataError(self._refusal(messages, error)) from error
        if not isinstance(rendered, str):
            raise DataError(f"data: the tokenizer's chat template gave {type(rendered).__name__}, not text; fix the template")
        return rendered

    def _refusal(self, messages: Sequence[Mapping[str, str]], error: Exception) -> str:
        """What to say of messages that the chat template does not take."""
        roles = ", ".join(message["role"] for message in messages)
        if messages[0]["role"] != "system":
            remedy = "write prompts that it takes, or set spec.data.prompt.chatTemplate: false"
        elif self._format.system_prompt is not None:
            remedy = "if it takes no system message, remove spec.data.prompt.system and write its text into the questions"
        else:
            remedy = "if it takes no system message, write its text into the user's first"
        name = self._tokenizer.name_or_path or type(self._tokenizer).__name__
        said = str(error) or type(error).__name__
        return f"data: the chat template of the tokenizer {name!r} does not take the messages of a prompt ({roles}): {said}; {remedy}"
