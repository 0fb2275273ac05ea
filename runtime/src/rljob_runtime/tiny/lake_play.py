"""Plays many episodes of FrozenLake with a model that is still in this process, without an engine.

All rows share one key-value cache, in which every token is computed once: what a turn appends comes behind what there is, rows that have
less to append are padded, and padding is masked for ever after.

Shape legend: ``E`` episodes that are still played, ``W`` most tokens that any of them appends, ``C`` places in the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedTokenizerBase, Qwen2ForCausalLM

from rljob_runtime.environments.codec import Codec
from rljob_runtime.tiny.lake_corpus import MAX_RESPONSE, PROMPT, Episode, best_actions, response


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What came of some episodes."""

    success: float
    """Share that reached the goal."""
    best: float
    """Share of actions that lead there on a shortest way."""
    valid: float
    """Share of responses that name an action."""


@torch.no_grad()
def play(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, seeds: Sequence[int], *, temperature: float, seed: int) -> Played:
    """Play an episode of each of ``seeds``.

    Args:
        model: that acts; it is put back into the mode, training or not, that it was in.
        tokenizer: its own.
        seeds: of maps.
        temperature: of sampling; 0 takes the most likely tokens.
        seed: of sampling.
    """
    was_training = model.training
    model.eval()
    codec, generator = Codec(tokenizer, PROMPT), torch.Generator().manual_seed(seed)
    episodes = [Episode(codec) for _ in seeds]
    for episode, number in zip(episodes, seeds, strict=True):
        episode.begin(number)
    rows, open_ones = _Rows(model, len(episodes), int(tokenizer.pad_token_id)), episodes
    best = valid = turns = 0
    while open_ones:
        sampled = _respond(rows, open_ones, int(tokenizer.eos_token_id), temperature, generator)
        for episode, ids in zip(open_ones, sampled, strict=True):
            text = tokenizer.decode(ids, skip_special_tokens=True)
            turns += 1
            best += any(text == response(action) for action in best_actions(episode.observation))
            valid += episode.act(ids, text, learned=False)
        rows.keep([row for row, episode in enumerate(open_ones) if not episode.done])
        open_ones = [episode for episode in open_ones if not episode.done]
    model.train(was_training)
    return Played(success=sum(episode.success for episode in episodes) / len(episodes), best=best / turns, valid=valid / turns)


def _respond(rows: _Rows, episodes: Sequence[Episode], end: int, temperature: float, generator: torch.Generator) -> list[list[int]]:
    """The token ids of a response of each episode, its end included where one was sampled."""
    sampled: list[list[int]] = [[] for _ in episodes]
    logits = rows.append([episode.ids[known:] for episode, known in zip(episodes, rows.known, strict=True)])
    for _ in range(MAX_RESPONSE):
        chosen = _choose(logits, temperature, generator)
        tokens = [token if end not in ids else None for token, ids in zip(chosen, sampled, strict=True)]
        for ids, token in zip(sampled, tokens, strict=True):
            ids += [] if token is None else [token]
        if all(end in ids for ids in sampled):
            break
        logits = rows.append([[] if token is None else [token] for token in tokens])
    return sampled


def _choose(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> list[int]:
    """A token id of each row of ``logits``, shape (E, vocabulary)."""
    if not temperature:
        return logits.argmax(-1).tolist()
    return torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)[:, 0].tolist()


class _Rows:
    """The cache, and how much of each episode is in it."""

    def __init__(self, model: Qwen2ForCausalLM, count: int, pad: int) -> None:
        self.known = [0] * count
        """Tokens of each episode in the cache."""
        self._model, self._pad = model, pad
        self._cache = DynamicCache(config=model.config)
        self._mask = torch.zeros((count, 0), dtype=torch.int64)
        """Shape (E, C): 0 for padding."""

    def append(self, tokens: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits, shape (E, vocabulary), behind the new tokens of each row; of no use where a row has none."""
        width = max(map(len, tokens))
        ids = torch.tensor([[self._pad] * (width - len(new)) + list(new) for new in tokens])
        mask = torch.tensor([[0] * (width - len(new)) + [1] * len(new) for new in tokens])
        places = torch.tensor(self.known)[:, None] + mask.cumsum(-1) - 1
        self._mask = torch.cat([self._mask, mask], -1)
        hidden = self._model.model(
            input_ids=ids, attention_mask=self._mask, position_ids=places.clamp(min=0), past_key_values=self._cache, use_cache=True
        ).last_hidden_state
        self.known = [known + len(new) for known, new in zip(self.known, tokens, strict=True)]
        return self._model.lm_head(hidden[:, -1])

    def keep(self, rows: Sequence[int]) -> None:
        """Give up all rows but these."""
        if not rows:
            return
        kept = torch.tensor(rows)
        self._cache.batch_select_indices(kept)
        self._mask = self._mask[kept]
        self.known = [self.known[row] for row in rows]
