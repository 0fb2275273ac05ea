"""A small Qwen2 tokenizer trained on the spot, in which every digit is its own token.

Qwen2's own way of cutting text is used unchanged: whatever class a tool picks for a folder of model type ``qwen2``
(transformers and engines ignore a foreign class named there), the tokens come out the same. It is byte-level, so that any
text, a template or a system prompt too, encodes and decodes to itself (in Unicode form NFC), while the task's own words
still become one token each.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from tokenizers import pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|endoftext|>"

_PLAIN_CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def build_tokenizer(texts: Iterable[str], *, vocab_size: int = 384) -> Qwen2Tokenizer:
    """Train a tokenizer on the words of ``texts``.

    ``vocab_size`` is an upper bound in tokens: 3 special ones, 256 bytes, the rest words. The chat template passes
    message contents through unchanged, so that a chat-formatted prompt stays one that the warm start has seen.
    """
    special = {"unk_token": EOS, "eos_token": EOS, "pad_token": PAD, "bos_token": BOS}
    untrained = Qwen2Tokenizer(vocab={PAD: 0, BOS: 1, EOS: 2}, merges=[], **special)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Sorted and unique: the trained vocabulary depends on the set of texts only.
    untrained.backend_tokenizer.train_from_iterator(sorted(set(texts)), trainer)
    learned = json.loads(untrained.backend_tokenizer.to_str())["model"]
    merges = [tuple(pair) for pair in learned["merges"]]
    tokenizer = Qwen2Tokenizer(vocab=learned["vocab"], merges=merges, padding_side="left", **special)
    tokenizer.chat_template = _PLAIN_CHAT
    return tokenizer
