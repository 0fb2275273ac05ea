"""A random model of about ten million parameters whose response lengths have a heavy tail, by its weights alone.

Nothing outside the model decides when a response ends, so that every runtime that samples from it at temperature 1 gets
lengths from one and the same distribution. The last digit of the prompt chooses a route; on a route the tokens form a
Markov chain: six stages (so that no response is shorter than eight tokens), then a loop that ends with a fixed chance
per token. The chain lives in reserved dimensions of the residual stream, one per state:

* a token's embedding has ``_MARK`` in its state's dimension and random values in the free ones;
* no layer writes into reserved dimensions (those rows of ``o_proj`` and ``down_proj`` are 0);
* the head reads the state and gives each possible next token its log-odds, plus a little noise from the free dimensions.

All layers compute at full cost, and gradients reach every weight.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rljob_runtime.tiny.tokenizer import build_tokenizer

MIN_TOKENS = 8
MAX_TOKENS = 256
_STAGES = MIN_TOKENS - 2
_STAGE_TOKENS = 2
_LOOP_TOKENS = 12
_MARK = 4.0
_IMPOSSIBLE = -25.0
_WRITE_SCALE = 0.25
"""Of the layers' output weights: small, so that the final norm's divisor, and with it every chance, hardly varies."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """A class of prompts with its own chance to end."""

    digits: str
    """Last digits of the prompts on this route; digits are sampled uniformly."""
    mean_loop_tokens: float
    """One over the chance to end, per token from the eighth on."""


ROUTES = (
    Route(digits="012345", mean_loop_tokens=8.0),
    Route(digits="678", mean_loop_tokens=40.0),
    Route(digits="9", mean_loop_tokens=150.0),
)


def write_prompts(path: Path, count: int, seed: int) -> None:
    """Write ``count`` prompts as JSON lines with an answer that nothing reads."""
    rng = random.Random(seed)
    rows = [{"question": f"Take {rng.randrange(1000, 10_000)} on route {rng.randrange(10)}", "answer": ""} for _ in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_model(folder: Path, seed: int) -> int:
    """Write model and tokenizer into ``folder``; returns the number of parameters."""
    tokenizer = build_tokenizer([f"Take {d} on route {d}" for d in range(10)])
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=320,
        intermediate_size=896,
        num_hidden_layers=8,
        num_attention_heads=10,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        initializer_range=round(320**-0.5, 3),
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = Qwen2ForCausalLM(config).eval()
    _build_chain(model, tokenizer, seed)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "routes.json").write_text(json.dumps([asdict(r) for r in ROUTES], indent=2) + "\n")
    return sum(p.numel() for p in model.parameters())


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """One state of the chain."""

    tokens: tuple[int, ...]
    """Tokens that put the chain into this state."""
    following: tuple[int, ...]
    """Tokens that may come next, besides the end."""
    end_chance: float


def _states(tokenizer: PreTrainedTokenizerFast) -> list[_State]:
    plain = [i for i in range(len(tokenizer)) if _is_plain(tokenizer.decode([i]))]
    states = []
    for route in ROUTES:
        stages = [tuple(plain.pop() for _ in range(_STAGE_TOKENS)) for _ in range(_STAGES)]
        loop = tuple(plain.pop() for _ in range(_LOOP_TOKENS))
        digits = tuple(int(tokenizer.convert_tokens_to_ids(d)) for d in route.digits)
        chain = [digits, *stages, loop]
        states += [_State(tokens=a, following=b, end_chance=0.0) for a, b in itertools.pairwise(chain)]
        states.append(_State(tokens=loop, following=loop, end_chance=1.0 / route.mean_loop_tokens))
    return states


def _is_plain(text: str) -> bool:
    return len(text) == 1 and text.isascii() and text.isprintable() and not text.isdigit() and not text.isspace()


@torch.no_grad()
def _build_chain(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    states = _states(tokenizer)
    reserved = len(states)
    generator = torch.Generator().manual_seed(seed)
    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    embedding.copy_(torch.randn(embedding.shape, generator=generator))
    embedding[:, :reserved] = 0.0
    for dimension, state in enumerate(states):
        embedding[list(state.tokens), dimension] = _MARK
    for layer in model.model.layers:
        for writer in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
            writer *= _WRITE_SCALE
            writer[:reserved] = 0.0
    head.copy_(0.02 * torch.randn(head.shape, generator=generator))
    head[int(tokenizer.eos_token_id)] = 0.0
    head[:, :reserved] = _IMPOSSIBLE
    for dimension, state in enumerate(states):
        head[list(state.following), dimension] = 0.0
        if state.end_chance:
            odds = state.end_chance / (1.0 - state.end_chance) * len(state.following)
            head[int(tokenizer.eos_token_id), dimension] = math.log(odds)
    head[:, :reserved] /= _mark_after_norm(model, states, generator)


def _mark_after_norm(model: Qwen2ForCausalLM, states: Sequence[_State], generator: torch.Generator) -> float:
    """Value of a mark behind the final norm, averaged over a loop's tokens at positions like those of responses."""
    last = len(states) - 1
    picks = torch.randint(len(states[last].tokens), (16, 128), generator=generator)
    hidden = model.model(input_ids=torch.tensor(states[last].tokens)[picks]).last_hidden_state
    return float(hidden[:, 16:, last].mean())
