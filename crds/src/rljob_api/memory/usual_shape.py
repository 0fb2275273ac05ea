"""The decoder that a model of so many parameters usually has, where nothing but their number is known.

Only for a choice that must leave room for what a count does not say: activations, logits, gathered layers. Proportions are on the side of
more memory: the published dense models of 0.5 to 72 billion parameters (Qwen 2.5 and 3, Llama 3) have a layer for every 37 to 128 of their
width, of which activations grow with layers x width, and vocabularies of 128 to 152 thousand entries.
"""

from __future__ import annotations

from bisect import bisect_right

from rljob_api.memory.shape import DecoderShape, ModelShape

WIDTH_PER_LAYER = 48
HEAD_DIM = 64
VOCABULARY = 152_064
"""Of Qwen 2.5; small models have at most a third of their parameters in the embedding."""
MAX_WIDTH = 1 << 20


def usual_shape(parameters: int) -> ModelShape:
    """A dense decoder of the Llama family with about so many parameters; these are counted as given."""
    widths = range(HEAD_DIM, MAX_WIDTH, HEAD_DIM)
    width = widths[max(bisect_right(widths, parameters, key=lambda one: _parameters(one, parameters)) - 1, 0)]
    return ModelShape(parameters=parameters, decoder=_decoder(width, parameters))


def _parameters(width: int, parameters: int) -> int:
    """Of the whole decoder of that width."""
    decoder = _decoder(width, parameters)
    return decoder.num_layers * decoder.layer_parameters + decoder.root_parameters


def _decoder(width: int, parameters: int) -> DecoderShape:
    heads = width // HEAD_DIM
    kv_heads = max(heads // 4, 1)
    attention = 2 * width * width + 2 * width * kv_heads * HEAD_DIM
    return DecoderShape(
        hidden_size=width,
        num_layers=max(width // WIDTH_PER_LAYER, 1),
        num_attention_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=HEAD_DIM,
        intermediate_size=4 * width,
        vocab_size=max(min(VOCABULARY, parameters // (3 * width)), 1),
        tied_embeddings=True,
        layer_parameters=attention + 3 * width * 4 * width + 2 * width,
    )
