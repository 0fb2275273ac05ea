"""What autograd keeps of a decoder layer, per token of a packed row: the tensors of transformers' layers, counted one by one.

How attention goes over a row decides how often keys and values exist. FlexAttention on CUDA takes them as they are. On the CPU
(``rljob_runtime.training.attention``) so does a causal row, but sequences with a common prompt are one tree, whose branches gather keys
and values of all that they see, repeat them to the number of heads, and have a mask; short trees are a row under one mask.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum, auto

from rljob_api.memory.shape import DecoderShape
from rljob_api.memory.units import ceil_div

FLOAT32_BYTES = 4
INDEX_BYTES = 8
CPU_CALL_FLOPS = 1.5e6
"""``rljob_runtime.training.sharing.CPU_CALL_FLOPS``: what a call of the attention costs per layer."""


class Attending(Enum):
    """How attention goes over a row."""

    DIRECT = auto()
    """Keys and values as they are."""
    MASKED = auto()
    """A tree under one mask: keys and values repeated to all heads, a row of the mask for each token."""
    BRANCHES = auto()
    """A tree branch by branch."""
    EAGER = auto()
    """Keys and values repeated to all heads, and float32 scores of all pairs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeSizes:
    """Full-length sequences after one prompt that stand in one tree."""

    prompt_tokens: int
    response_tokens: int
    samples: int
    """1: sequences that share nothing."""

    @property
    def tokens(self) -> int:
        """Of the tree: the prompt once."""
        return self.prompt_tokens + self.samples * self.response_tokens

    @property
    def seen_tokens(self) -> int:
        """Keys of all responses, each with its prompt's."""
        return self.samples * (self.prompt_tokens + self.response_tokens)

    @property
    def masked_pairs(self) -> int:
        """Pairs of query and key in the masks of all responses."""
        return self.response_tokens * self.seen_tokens


def cpu_attending(decoder: DecoderShape, tree: TreeSizes) -> Attending:
    """What ``rljob_runtime.training.sharing`` finds cheapest on the CPU for such a tree, in operations of a layer's forward pass."""
    if tree.samples == 1:
        return Attending.DIRECT
    pair = 4.0 * decoder.query_size
    token = 2.0 * (decoder.attention_parameters + 3 * decoder.hidden_size * decoder.intermediate_size)
    branches = pair * (tree.masked_pairs + tree.prompt_tokens**2 / 2) + CPU_CALL_FLOPS * (tree.samples + 1)
    masked = pair * tree.tokens**2
    full = tree.prompt_tokens + tree.response_tokens
    alone = tree.samples * (token * full + pair * full**2 / 2)
    if token * tree.tokens + min(branches, masked) >= alone:
        return Attending.DIRECT
    return Attending.BRANCHES if branches <= masked else Attending.MASKED


def layer_bytes_per_token(
    decoder: DecoderShape,
    tree: TreeSizes,
    attending: Attending,
    *,
    number: int,
    trains_all: bool,
    tensor: int,
    token_parts: int = 1,
    context: int = 1,
    compiled: bool = False,
) -> int:
    """Bytes of a layer.

    * two norms: float32 input, output, and where the norm is trained its normalized input; two root mean squares;
    * queries and keys that are normalized (Qwen3): the same without the output, which the attention has;
    * the attention, see :func:`_attention_bytes`;
    * the MLP: both halves, the activated one and the product; of a mixture also each expert's input and output, and the router's
      probabilities, weights and four orders of tokens; of a shared expert that has a gate its output and the number that this multiplies.
      Frozen experts keep neither their input nor the product, and the block not its input unless shared experts are adapted.

    Compiled layers (``rljob_runtime.training.compiling``) keep input and output of the norms, both halves of the MLP and their product, and
    of normalized queries and keys their input; the rest is computed again within kernels of the backward pass.

    With tensor parallelism all but the norms is divided, with sequence parallelism these too but for their outputs, which attention and MLP
    keep of all tokens. The block of a mixture keeps its input of a process's own tokens, and shared experts theirs of all tokens.
    Latents are whole on each process, of all tokens.
    With context parallelism a process has fewer tokens, and of each the same, but see :func:`_attention_bytes`.

    Args:
        decoder: sizes of the model.
        tree: what stands in a row.
        attending: how attention goes over it.
        number: bytes of a number of the computation.
        trains_all: whether all parameters have gradients; otherwise adapters of linear layers alone, and norms and experts are frozen.
        tensor: tensor parallel size.
        token_parts: processes that divide the tokens between attention and MLP.
        context: context parallel size.
        compiled: whether the layers are compiled.
    """
    if compiled:
        own = number * (4 * decoder.hidden_size + 3 * decoder.intermediate_size) + 2 * FLOAT32_BYTES
        if decoder.qk_norm:
            own += number * (decoder.query_size + decoder.kv_size)
            own += FLOAT32_BYTES * (decoder.num_attention_heads + decoder.num_kv_heads)
        return own + _attention_bytes(decoder, tree, attending, number, context)
    normalized = number if trains_all else 0
    norms = ceil_div(2 * (FLOAT32_BYTES + normalized) * decoder.hidden_size + 8, token_parts) + number * decoder.hidden_size
    norms += number * (_mixture_input(decoder, tensor, trains_all=trains_all) if decoder.num_experts else decoder.hidden_size)
    inner = _attention_bytes(decoder, tree, attending, number, context) + 4 * number * decoder.intermediate_size
    if decoder.qk_norm:
        inner += (FLOAT32_BYTES + normalized) * (decoder.query_size + decoder.kv_size) + 8 * decoder.num_attention_heads
    if decoder.num_experts:
        routed = decoder.experts_per_token
        inner += 2 * number * routed * decoder.hidden_size
        inner -= 0 if trains_all else number * (routed * decoder.hidden_size + decoder.routed_size)
        inner += FLOAT32_BYTES * (decoder.num_experts + routed) + 4 * INDEX_BYTES * routed
    if decoder.gates_shared_experts:
        inner += number * (decoder.hidden_size + 1)
    return norms + _latent_bytes(decoder, number, trains_all=trains_all) + ceil_div(inner, tensor)


def _mixture_input(decoder: DecoderShape, tensor: int, *, trains_all: bool) -> int:
    """Numbers of the input of a mixture's block, whose tokens tensor parallelism divides; shared experts have that of all tokens."""
    shared = decoder.hidden_size if decoder.shared_size else 0
    if tensor == 1:
        return decoder.hidden_size if trains_all else shared
    return (ceil_div(decoder.hidden_size, tensor) if trains_all else 0) + shared


def _latent_bytes(decoder: DecoderShape, number: int, *, trains_all: bool) -> int:
    """Of latents the float32 input of their norms, its output, and where norms are trained their normalized input; the rotated keys."""
    latent = decoder.latent
    if latent is None:
        return 0
    kept = FLOAT32_BYTES + number + (number if trains_all else 0)
    return kept * latent.norm_size + number * latent.rope_dim


def exchanged_numbers(decoder: DecoderShape, experts: int) -> int:
    """Numbers of a token's rows that are on their way to experts, or back, with expert parallelism of that size."""
    return decoder.experts_per_token * decoder.hidden_size if experts > 1 else 0


def _attention_bytes(decoder: DecoderShape, tree: TreeSizes, attending: Attending, number: int, context: int) -> int:
    """Queries, keys, values, output, a float32 log-sum-exp per head, and keys that latent attention keeps as they were.

    Branch by branch keys and values are those of the prompt and, repeated, those that each response sees, with a mask in numbers of the
    computation; outputs exist as branches and as the row that they make.

    With context parallelism a process has this of all tokens, of so many times fewer heads, which is as much per token of its own. Masks
    have no heads. Keys and values are repeated to a head for each process where there are fewer. Outputs exist before and after they
    change places; those of branches do anyway.
    """
    query, kv, heads = decoder.query_size, decoder.kv_size * _repeats(decoder, context), decoder.num_attention_heads
    copied, keys = number * decoder.output_copy_size, 0 if decoder.latent is None else number * decoder.latent.key_copy_size
    exchanged = (number * query if context > 1 else copied) + keys
    seen = kv if kv == context * decoder.head_dim else query  # of one head: repeated keys and values are a view of it
    if attending is Attending.DIRECT:
        return number * (2 * query + 2 * kv) + exchanged + FLOAT32_BYTES * heads
    if attending is Attending.BRANCHES:
        of_tree = 2 * kv * tree.prompt_tokens + 2 * seen * tree.seen_tokens + context * tree.masked_pairs
        return number * (3 * query + ceil_div(of_tree, tree.tokens)) + FLOAT32_BYTES * heads + keys
    repeated = number * (2 * query + 2 * seen) + exchanged + FLOAT32_BYTES * heads
    if attending is Attending.MASKED:
        return repeated + number * context * tree.tokens
    rounded = number if number != FLOAT32_BYTES else 0
    return repeated + (FLOAT32_BYTES + rounded) * heads * (tree.prompt_tokens + tree.response_tokens)


def _repeats(decoder: DecoderShape, context: int) -> int:
    """How often context parallelism repeats heads of keys and values, see ``rljob_runtime.training.context_parallel``."""
    return context // math.gcd(context, decoder.num_kv_heads)
