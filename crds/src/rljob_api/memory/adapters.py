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
    sizes = _linear_sizes(decoder)
    named = set(lora.target_modules)
    # a module that is not known here may be any of them
    chosen = named if named and named <= set(sizes) else set(sizes)
    return decoder.num_layers * lora.rank * sum(sum(sizes[name]) for name in chosen)


def sent_parameters(spec: RLJobSpec, shape: ModelShape) -> int:
    """Parameters that a weight sync brings; all where the sizes of adapters are not known."""
    return (adapter_parameters(spec, shape) if serves_adapters(spec) else 0) or shape.parameters


def _linear_sizes(decoder: DecoderShape) -> dict[str, tuple[int, int]]:
    """(inputs, outputs) of the linear layers of one decoder layer, by their names in transformers.

    Of a mixture those of a layer with experts, which have none, and latent attention as one of the same widths.
    """
    hidden, query, kv = decoder.hidden_size, decoder.query_size, decoder.kv_size
    inner = decoder.shared_size if decoder.num_experts else decoder.intermediate_size
    attention = {"q_proj": (hidden, query), "k_proj": (hidden, kv), "v_proj": (hidden, kv), "o_proj": (query, hidden)}
    if not inner:
        return attention
    gate = {"shared_expert_gate": (hidden, 1)} if decoder.gates_shared_experts else {}
    return (
        attention
        | gate
        | {
            "gate_proj": (hidden, inner),
            "up_proj": (hidden, inner),
            "down_proj": (inner, hidden),
        }
    )
