"""Sizes of latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): heads are projections of latents of a token."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentShape:
    """Of one layer; modules are named as in transformers (modeling_deepseek_v3)."""

    hidden_size: int
    heads: int
    query_rank: int
    """Of the latent of queries; 0 where these are projections of the hidden state."""
    kv_rank: int
    """Of the latent of keys and values."""
    nope_dim: int
    """Numbers of a head's queries and keys that are not rotated."""
    rope_dim: int
    """Those that are; keys of all heads have the same."""
    value_dim: int
    """Numbers of a head's values."""
    has_biases: bool = False
    """Of the projections to latents, and of the output."""

    @property
    def cached_numbers(self) -> int:
        """Per token: the latent of keys and values, and the rotated part of keys."""
        return self.kv_rank + self.rope_dim

    @property
    def linear_sizes(self) -> dict[str, tuple[int, int]]:
        """(inputs, outputs) of the linear layers by name."""
        query, ranks = self.heads * (self.nope_dim + self.rope_dim), self.query_rank
        hidden = self.hidden_size
        queries = {"q_a_proj": (hidden, ranks), "q_b_proj": (ranks, query)} if ranks else {"q_proj": (hidden, query)}
        return queries | {
            "kv_a_proj_with_mqa": (hidden, self.cached_numbers),
            "kv_b_proj": (self.kv_rank, self.heads * (self.nope_dim + self.value_dim)),
            "o_proj": (self.heads * self.value_dim, hidden),
        }

    @property
    def whole_parameters(self) -> int:
        """Parameters that make latents, of which every tensor-parallel process has a copy: down projections, their biases, two norms."""
        down = sum(a * b for name, (a, b) in self.linear_sizes.items() if "_a_proj" in name)
        return down + self.query_rank + self.kv_rank + (self.query_rank + self.cached_numbers if self.has_biases else 0)

    @property
    def parameters(self) -> int:
        """All of the attention."""
        divided = sum(a * b for name, (a, b) in self.linear_sizes.items() if "_a_proj" not in name)
        return self.whole_parameters + divided + (self.hidden_size if self.has_biases else 0)

    @property
    def norm_size(self) -> int:
        """Numbers of a token's latents, which have norms."""
        return self.query_rank + self.kv_rank

    @property
    def key_copy_size(self) -> int:
        """Numbers of a token's keys that autograd keeps as they were where values are a view of both."""
        return self.heads * self.nope_dim if self.value_dim >= self.nope_dim + self.rope_dim else 0
