"""What of a model decides how much memory it takes; read from the ``config.json`` of a Hugging Face checkpoint.

Counts are exact for decoders of the Llama family: rotary positions, RMS norms, gated MLPs or mixtures of them; and for the latent
attention of DeepSeek-V2 and V3 (arXiv 2405.04434, section 2.1). They follow transformers' own modules (modeling_llama, modeling_qwen2,
modeling_qwen3, modeling_mixtral, modeling_deepseek_v3, ... of transformers 5), which a test builds and counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rljob_api.errors import ModelShapeError, show
from rljob_api.memory.latent import LatentShape
from rljob_api.memory.units import ceil_div

MAX_SIZE = 10**12
"""Upper bound of every size in a config."""
MAX_INT8_EXPERTS = 128
"""Numbers of so many experts are 1 byte each, see ``rljob_runtime.routes.route_dtype``."""
LATENT_TYPES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
"""``model_type`` of those whose keys and values are projections of one latent vector per token."""
MODEL_TYPES = (*LATENT_TYPES, "glm4_moe", "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
"""``model_type`` of the configs that can be read."""
SHARED_TYPES = (*LATENT_TYPES, "glm4_moe")
"""``model_type`` of mixtures with shared experts as wide as ``n_shared_experts`` others, behind some dense layers."""
_FIRST_DENSE = {"deepseek_v2": 0, "deepseek_v3": 3, "glm4_moe": 1}
"""Dense layers of these types where a config.json does not say, by their configuration classes."""
_REMEDY = "set spec.model.parameterCount, which gives a coarser estimate"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Sizes of a decoder; parameters are counted, not bytes."""

    hidden_size: int
    num_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    """Of queries and keys, or of values where these have more (latent attention)."""
    intermediate_size: int
    """Width of the MLP that one token passes: of its experts together in a mixture."""
    vocab_size: int
    tied_embeddings: bool
    layer_parameters: int
    """Parameters of the largest layer."""
    qk_norm: bool = False
    """Whether queries and keys are normalized per head."""
    num_experts: int = 0
    """Experts of a mixture layer; 0 for a dense model."""
    experts_per_token: int = 0
    """Those that one token passes, without a shared one."""
    gates_shared_experts: bool = False
    """Whether the output of an MLP that all tokens pass beside the experts is multiplied by a gate (Qwen2-MoE); others add it alone."""
    shared_size: int = 0
    """Width of that MLP; 0 without one."""
    expert_parameters: int = 0
    """Parameters of the experts of all layers, without routers and shared ones."""
    layer_expert_parameters: int = 0
    """The same of the largest layer."""
    num_dense_layers: int = 0
    """Layers of a mixture that have an MLP instead of experts."""
    dense_size: int = 0
    """Width of that MLP; 0 where no layer has one."""
    latent: LatentShape | None = None
    """Of latent attention; None with another, whose projections follow from the widths."""
    output_copy_size: int = 0
    """Numbers of a token's attention outputs that exist twice, because rotated queries are concatenated; 0 where others are."""

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the input embedding, which is also the size of the head."""
        return self.vocab_size * self.hidden_size

    @property
    def root_parameters(self) -> int:
        """Parameters outside the layers: embedding, head unless tied, final norm."""
        return self.embedding_parameters * (1 if self.tied_embeddings else 2) + self.hidden_size

    @property
    def route_bytes(self) -> int:
        """Of the numbers of the experts that one token passes in all layers, as ``rljob_runtime.routes`` has them; 0 for a dense model."""
        return self.num_layers * self.experts_per_token * (1 if self.num_experts <= MAX_INT8_EXPERTS else 2)

    @property
    def routed_size(self) -> int:
        """Width of the experts that one token passes together; 0 for a dense model."""
        experts = self.num_experts * (self.num_layers - self.num_dense_layers)
        return self.experts_per_token * self.expert_parameters // (3 * self.hidden_size * experts) if experts else 0

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together; values have the same, or are padded to it."""
        return self.num_kv_heads * self.head_dim

    @property
    def attention_parameters(self) -> int:
        """Parameters of a layer's attention, without norms and biases where it is not latent."""
        return 2 * self.hidden_size * (self.query_size + self.kv_size) if self.latent is None else self.latent.parameters

    @property
    def whole_parameters(self) -> int:
        """Parameters of a layer's projections that tensor parallelism does not divide."""
        return 0 if self.latent is None else self.latent.whole_parameters

    def cached_numbers(self, devices: int) -> int:
        """What each of the tensor-parallel devices of an engine caches of a token in a layer.

        Heads are repeated where there are fewer than devices, and so are latents.
        """
        return 2 * ceil_div(self.num_kv_heads, devices) * self.head_dim if self.latent is None else self.latent.cached_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """How large a model is."""

    parameters: int
    """Parameters of the whole model, tied weights once."""
    decoder: DecoderShape | None = None
    """Its sizes; None where only the count is known, and then what depends on them is left out of an estimate."""


def shape_from_count(parameter_count: int) -> ModelShape:
    """The shape of a model of which only the number of parameters is known."""
    return ModelShape(parameters=parameter_count)


def shape_from_config(config: Mapping[str, object]) -> ModelShape:
    """The shape of the decoder that a ``config.json`` describes.

    Raises:
        ModelShapeError: the model is of a type that cannot be counted, or a size is missing or is no positive whole number.
    """
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ModelShapeError(f"config.json has model_type {show(model_type)}, known are {', '.join(MODEL_TYPES)}; {_REMEDY}")
    hidden, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    num_layers, vocab = _size(config, "num_hidden_layers"), _size(config, "vocab_size")
    latent = _latent(config, hidden, heads) if model_type in LATENT_TYPES else None
    if latent is not None:
        kv_heads, head_dim = heads, max(latent.nope_dim + latent.rope_dim, latent.value_dim)
        attention = latent.parameters
    else:
        head_dim, kv_heads = _size(config, "head_dim", max(1, hidden // heads)), _size(config, "num_key_value_heads", heads)
        attention = _attention_parameters(config, str(model_type), hidden, heads * head_dim, kv_heads * head_dim, head_dim)
    num_sparse = _num_sparse_layers(config, str(model_type), num_layers)
    dense_mlp, dense_width = _dense_mlp(config, hidden)
    sparse_mlp, sparse_width, num_experts, in_experts = _sparse_mlp(config, str(model_type), hidden) if num_sparse else (0, 0, 0, 0)
    dense_layer, sparse_layer = attention + 2 * hidden + dense_mlp, attention + 2 * hidden + sparse_mlp
    decoder = DecoderShape(
        hidden_size=hidden,
        num_layers=num_layers,
        num_attention_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=max(sparse_width, dense_width if num_sparse < num_layers else 0),
        vocab_size=vocab,
        tied_embeddings=config.get("tie_word_embeddings") is True,
        layer_parameters=max(sparse_layer if num_sparse else 0, dense_layer if num_sparse < num_layers else 0),
        qk_norm=_normalizes_heads(config, str(model_type)),
        num_experts=num_experts,
        experts_per_token=_size(config, "num_experts_per_tok") if num_sparse else 0,
        gates_shared_experts=num_sparse > 0 and model_type == "qwen2_moe",
        shared_size=_shared_width(config, str(model_type)) if num_sparse else 0,
        expert_parameters=num_sparse * in_experts,
        layer_expert_parameters=in_experts if num_sparse == num_layers or sparse_layer > dense_layer else 0,
        num_dense_layers=num_layers - num_sparse if num_sparse else 0,
        dense_size=dense_width if num_sparse < num_layers else 0,
        latent=latent,
        output_copy_size=latent.heads * latent.value_dim if latent else heads * head_dim if model_type == "glm4_moe" else 0,
    )
    in_layers = num_sparse * sparse_layer + (num_layers - num_sparse) * dense_layer
    return ModelShape(parameters=in_layers + decoder.root_parameters, decoder=decoder)


def _attention_parameters(config: Mapping[str, object], model_type: str, hidden: int, query: int, kv: int, head_dim: int) -> int:
    """Four projections, their biases, and the norms of queries and keys of Qwen3 and some GLM-4-MoE."""
    matrices = hidden * (query + 2 * kv) + query * hidden
    if model_type.startswith("qwen2"):  # always, and none on the output
        return matrices + query + 2 * kv
    if config.get("attention_bias") is True and model_type in ("llama", "qwen3", "qwen3_moe"):
        matrices += query + 2 * kv + hidden
    if config.get("attention_bias") is True and model_type == "glm4_moe":  # none on the output
        matrices += query + 2 * kv
    return matrices + (2 * head_dim if _normalizes_heads(config, model_type) else 0)


def _normalizes_heads(config: Mapping[str, object], model_type: str) -> bool:
    return model_type.startswith("qwen3") or (model_type == "glm4_moe" and config.get("use_qk_norm") is True)


def _latent(config: Mapping[str, object], hidden: int, heads: int) -> LatentShape:
    return LatentShape(
        hidden_size=hidden,
        heads=heads,
        query_rank=0 if config.get("q_lora_rank") is None else _size(config, "q_lora_rank"),
        kv_rank=_size(config, "kv_lora_rank"),
        nope_dim=_size(config, "qk_nope_head_dim"),
        rope_dim=_size(config, "qk_rope_head_dim"),
        value_dim=_size(config, "v_head_dim"),
        has_biases=config.get("attention_bias") is True,
    )


def _dense_mlp(config: Mapping[str, object], hidden: int) -> tuple[int, int]:
    """(parameters, width) of a gated MLP."""
    width = _size(config, "intermediate_size")
    biases = 2 * width + hidden if config.get("mlp_bias") is True and config.get("model_type") in ("llama", "deepseek_v2") else 0
    return 3 * hidden * width + biases, width


def _sparse_mlp(config: Mapping[str, object], model_type: str, hidden: int) -> tuple[int, int, int, int]:
    """(parameters, width one token passes, experts, parameters of these) of a mixture with its router and its shared experts."""
    key = "num_experts" if "num_experts" in config else "num_local_experts"  # transformers 5 writes the latter for all Qwen
    if model_type in SHARED_TYPES:
        key = "n_routed_experts"
    experts, active = _size(config, key), _size(config, "num_experts_per_tok")
    width = _size(config, "intermediate_size" if model_type == "mixtral" else "moe_intermediate_size")
    in_experts, shared = experts * 3 * hidden * width, _shared_width(config, model_type)
    parameters = in_experts + experts * hidden + 3 * hidden * shared
    if model_type == "qwen2_moe":  # the gate
        parameters += hidden
    if config.get("mlp_bias") is True and model_type == "deepseek_v2":
        parameters += 2 * shared + hidden
    return parameters, active * width + shared, experts, in_experts


def _shared_width(config: Mapping[str, object], model_type: str) -> int:
    """Width of what all tokens pass beside the experts; 0 without."""
    if model_type == "qwen2_moe":
        return _size(config, "shared_expert_intermediate_size")
    return _size(config, "moe_intermediate_size") * _size(config, "n_shared_experts") if model_type in SHARED_TYPES else 0


def _num_sparse_layers(config: Mapping[str, object], model_type: str, num_layers: int) -> int:
    """Layers that are mixtures.

    Every ``decoder_sparse_step``-th but those of ``mlp_only_layers``; all in Mixtral; all behind the first dense ones in DeepSeek and GLM.
    """
    if model_type == "mixtral":
        return num_layers
    if model_type == "glm4_moe_lite":
        kinds = config.get("mlp_layer_types")
        return kinds.count("sparse") if isinstance(kinds, list) else num_layers - 1
    if model_type in SHARED_TYPES:
        dense = config.get("first_k_dense_replace", _FIRST_DENSE[model_type])
        return num_layers - min(dense, num_layers) if isinstance(dense, int) and dense > 0 else num_layers
    if not model_type.endswith("_moe"):
        return 0
    step = _size(config, "decoder_sparse_step", 1)
    only = config.get("mlp_only_layers")
    given = only if isinstance(only, list) else []
    excepted = {layer for layer in given if isinstance(layer, int) and 0 <= layer < num_layers and (layer + 1) % step == 0}
    return num_layers // step - len(excepted)


def _size(config: Mapping[str, object], key: str, default: int | None = None) -> int:
    """A positive whole number of the config; ``default`` where it is absent or null."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_SIZE:
        raise ModelShapeError(f"config.json has {key} {show(value)}, which is not a whole number from 1 to {MAX_SIZE}; {_REMEDY}")
    return value
