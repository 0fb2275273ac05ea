"""Sizes of low-rank adapters."""

from __future__ import annotations

from rljob_api.adapters import serves_adapters
from rljob_api.memory.shape import DecoderShape, ModelShape
from rljob_api.v1alpha1.rljob import RLJobSpec


def adapter_parameters(spec: RLJobSpec, shape: ModelShape) -> int:
    """Parameters of all adapters of the policy; experts have none. 0 where sizes are not known."""
    decoder, lora = shape.decoder, spec.model.lora
    if decoder is None or lora is None:
        return 0
    kinds = _linear_sizes(decoder)
    known, named = {name for _, sizes in kinds for name in sizes}, set(lora.target_modules)
    # a module that is not known here may be any of them
    chosen = named if named and named <= known else known
    return lora.rank * sum(layers * sum(sum(size) for name, size in sizes.items() if name in chosen) for layers, sizes in kinds)


def sent_parameters(spec: RLJobSpec, shape: ModelShape) -> int:
    """Parameters that a weight sync brings; all where the sizes of adapters are not known."""
    return (adapter_parameters(spec, shape) if serves_adapters(spec) else 0) or shape.parameters


def _linear_sizes(decoder: DecoderShape) -> list[tuple[int, dict[str, tuple[int, int]]]]:
    """Of each kind of layers how many there are, and (inputs, outputs) of its linear layers by their names in transformers.

    Layers of a mixture have those of its shared experts and none of its experts, others those of an MLP.
    """
    hidden, query, kv = decoder.hidden_size, decoder.query_size, decoder.kv_size
    attention = {"q_proj": (hidden, query), "k_proj": (hidden, kv), "v_proj": (hidden, kv), "o_proj": (query, hidden)}
    if decoder.latent is not None:
        attention = decoder.latent.linear_sizes
    gate = {"shared_expert_gate": (hidden, 1)} if decoder.gates_shared_experts else {}
    dense = decoder.num_dense_layers if decoder.num_experts else decoder.num_layers
    return [
        (dense, attention | _mlp(hidden, decoder.dense_size)),
        (decoder.num_layers - dense, attention | gate | _mlp(hidden, decoder.shared_size)),
    ]


def _mlp(hidden: int, inner: int) -> dict[str, tuple[int, int]]:
    return {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)} if inner else {}
