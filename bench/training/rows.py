"""Batches of several kinds of lengths, and how the other sides pad them; numpy, no torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rljob_runtime.records import FloatArray, IntArray, TrainBatch

SAMPLES_PER_PROMPT = 8
PADDING = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Lengths of one batch; each prompt has :data:`SAMPLES_PER_PROMPT` responses."""

    name: str
    num_prompts: int
    prompt_tokens: int
    response_tokens: int
    """Of each response, or with ``spread`` of the longest that there may be."""
    spread: float = 0.0
    """0: equal lengths; else the standard deviation of their logarithm, around an eighth of the longest."""


CASES = (
    Case(name="short", num_prompts=16, prompt_tokens=20, response_tokens=12),
    Case(name="long", num_prompts=1, prompt_tokens=64, response_tokens=704),
    Case(name="mixed", num_prompts=4, prompt_tokens=32, response_tokens=704, spread=1.2),
)


def make_batch(case: Case, vocab_size: int, seed: int) -> TrainBatch:
    """Random tokens; one advantage per response, behavior log-probs near uniform, no token of padding."""
    rng = np.random.default_rng(seed)
    tokens, lengths, mask, advantages = [], [], [], []
    for _ in range(case.num_prompts):
        prompt = rng.integers(1, vocab_size, case.prompt_tokens)
        for size in response_lengths(case, rng).tolist():
            tokens += [prompt, rng.integers(1, vocab_size, size)]
            lengths.append(case.prompt_tokens + size)
            mask += [np.zeros(case.prompt_tokens), np.ones(size)]
            advantages.append(np.full(lengths[-1], rng.normal()))
    masks = np.concatenate(mask).astype(np.float32)
    noise = rng.normal(0.0, 0.05, masks.size)
    return TrainBatch(
        token_ids=np.concatenate(tokens).astype(np.int32),
        lengths=np.array(lengths, dtype=np.int32),
        response_mask=masks,
        behavior_logprobs=((noise - np.log(vocab_size)) * masks).astype(np.float32),
        advantages=(np.concatenate(advantages) * masks).astype(np.float32),
        global_tokens=int(masks.sum()),
        global_sequences=len(lengths),
        version=0,
    )


def response_lengths(case: Case, rng: np.random.Generator) -> IntArray:
    """Tokens of the responses to one prompt, shape (:data:`SAMPLES_PER_PROMPT`,)."""
    if case.spread == 0.0:
        return np.full(SAMPLES_PER_PROMPT, case.response_tokens, dtype=np.int32)
    sampled = rng.lognormal(np.log(case.response_tokens / 8), case.spread, SAMPLES_PER_PROMPT)
    return np.clip(sampled, 1, case.response_tokens).astype(np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedRows:
    """Sequences as TRL's trainer holds them: prompts padded left, responses padded right, each to the longest of the batch."""

    prompt_ids: IntArray
    """Shape (S, P)."""
    prompt_mask: IntArray
    """Shape (S, P): 1 at tokens."""
    response_ids: IntArray
    """Shape (S, R)."""
    response_mask: IntArray
    """Shape (S, R): 1 at tokens."""
    behavior_logprobs: FloatArray
    """Shape (S, R)."""
    advantages: FloatArray
    """Shape (S,)."""


def pad_both(batch: TrainBatch) -> PaddedRows:
    """The batch padded as TRL does it."""
    starts = np.cumsum(batch.lengths, dtype=np.int64) - batch.lengths
    responses = np.add.reduceat(batch.response_mask, starts).astype(np.int64)
    prompts = batch.lengths - responses
    left, right = int(prompts.max()), int(responses.max())
    column, place = np.arange(left) - (left - prompts[:, None]), np.arange(right)
    in_prompt, in_response = column >= 0, place < responses[:, None]
    prompt_at = np.where(in_prompt, starts[:, None] + column, 0)
    response_at = np.where(in_response, (starts + prompts)[:, None] + place, 0)
    return PaddedRows(
        prompt_ids=np.where(in_prompt, batch.token_ids[prompt_at], PADDING),
        prompt_mask=in_prompt.astype(np.int32),
        response_ids=np.where(in_response, batch.token_ids[response_at], PADDING),
        response_mask=in_response.astype(np.int32),
        behavior_logprobs=np.where(in_response, batch.behavior_logprobs[response_at], 0.0).astype(np.float32),
        advantages=batch.advantages[starts + prompts],
    )


def cut_in_order(lengths: IntArray, token_budget: int) -> list[slice]:
    """Runs of sequences, in the order they came, of which none pads to more than the budget; a longer sequence is alone."""
    runs, begin, longest = [], 0, 0
    for index, length in enumerate(lengths.tolist()):
        longest = max(longest, length)
        if index > begin and (index - begin + 1) * longest > token_budget:
            runs.append(slice(begin, index))
            begin, longest = index, length
    return [*runs, slice(begin, len(lengths))] if len(lengths) else []
