"""What a model's ``config.json`` says about whether a run would refuse it, so that it is said before a device is taken.

The runtime refuses the same when it loads the model (``rljob_runtime.training.model``, ``.parallel``), where it has the real module.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal

from rljob_api.errors import FieldError
from rljob_api.errors import field_error as _error
from rljob_api.logits import ATTENTION_CAP, logit_form
from rljob_api.roles import TRAITS
from rljob_api.v1alpha1.components import ServedModel
from rljob_api.v1alpha1.data import Model
from rljob_api.v1alpha1.operations import AdapterSync
from rljob_api.v1alpha1.rljob import RLJobSpec
from rljob_api.vocabulary import LayerCompilation, RouterReplay

Config = Mapping[str, object]
ConfigReader = Callable[[Model | ServedModel], Config | None]
"""Finds a model's config.json; None where it is not at hand."""

TENSOR_PARALLEL_MODELS = (
    *("apertus", "arcee", "cohere", "cohere2", "cwm", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4"),
    *("gpt_neox", "granite", "helium", "hyperclovax", "jais2", "llama", "minicpm3", "ministral", "ministral3", "mistral", "olmo"),
    *("olmo2", "olmo3", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "starcoder2", "vaultgemma"),
)
"""``model_type`` of the dense models whose layers the trainer can divide, by their plans in transformers."""
UNDIVIDED_MODELS = {
    "gemma3n_text": "its layers mix several hidden states (AltUp) with low-rank layers that its plan leaves whole",
    "gemma4_text": "the heads of its layers have different sizes and numbers",
    "granite_swa": "its attention sinks are parameters of the attention itself",
    "hrm_text": "its layers belong to two modules that are computed in turns",
    "olmo_hybrid": "its layers of linear attention have convolutions and states that its plan leaves whole",
    "phi": "its head has a bias",
    "qwen3_5_text": "its layers of linear attention have convolutions and states that its plan leaves whole",
}
"""``model_type`` of dense models with a plan in transformers whose layers cannot be divided, and why."""
MIXTURE_MODELS = ("deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "mixtral", "qwen2_moe", "qwen3_moe")
"""``model_type`` of the mixtures of experts that can be trained. Of all of them tensor parallelism divides attention, dense MLPs and shared
experts; experts stay whole."""
_HEADS, _LATENT_HEADS = ("num_attention_heads", "num_key_value_heads"), ("num_attention_heads",)
_SHARED = ("n_shared_experts", "moe_intermediate_size")
_DIVIDED_SIZES: dict[str, tuple[str | tuple[str, str], ...]] = {
    "mixtral": _HEADS,
    "qwen2_moe": (*_HEADS, "intermediate_size", "shared_expert_intermediate_size"),
    "glm4_moe": (*_HEADS, "intermediate_size", _SHARED),
    "minicpm3": (*_LATENT_HEADS, "intermediate_size"),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), (*_LATENT_HEADS, "intermediate_size", _SHARED)),
}
"""Config keys, or two whose product it is, of the sizes that are divided, for types that differ from Llama."""
BIASED_MODELS = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
"""``model_type`` of those whose routers have a correction bias."""
ENGINE_KEYS: dict[str, dict[str, tuple[object, ...]]] = {
    "deepseek_v2": {"scoring_func": ("softmax", None), "norm_topk_prob": (False, None)},
    "deepseek_v3": {"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",), "rope_interleave": (True, None)},
}
"""By ``model_type``: keys that engines read and transformers' code does not, or the other way round, with the values of which both make
the same model; None: the key may be missing."""
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""How the families of mixtures call the number of experts of a layer."""
EXPERT_MODULES = frozenset({"gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3", "experts", "gate"})
"""Last names of an expert's layers, and of the router, in the types above."""
_MAX_PROPOSED = 64
"""Largest parallel size that a remedy names."""
AUX_LOSS_KEY = "router_aux_loss_coef"
"""Config key with the coefficient of the load-balancing loss."""
OTHER_SENSES = {"vision_config": "images", "audio_config": "sound", "speech_config": "sound", "video_config": "video"}
"""Sections of models that read more than text."""
_DENSE = "use a dense text model"


def model_problems(spec: RLJobSpec, config_of: ConfigReader) -> list[FieldError]:
    """Why a run with the models of these ``config.json`` would be refused.

    Args:
        spec: of the job.
        config_of: reads the file of ``spec.model``, or of a component's own model, as an object; keys that are missing or of another type
            say nothing.
    """
    config = config_of(spec.model)
    problems = [] if config is None else [problem for rule in RULES for problem in rule(spec, config, _decoder(config))]
    for index, component in enumerate(spec.components):
        own = None if component.model is None or not TRAITS[component.role].has_own_model else config_of(component.model)
        if own is not None:
            problems += _component_parallel(spec, index, own)
        if own is not None and component.model is not None and TRAITS[component.role].divides_layers:  # the trainer's code computes it
            problems += _logit_problems(spec, f"spec.components[{index}].model.path", component.model.path, _decoder(own))
            problems += _rope_problems(spec, _decoder(own), f"the config.json of spec.components[{index}].model")
    return problems


def can_divide(model_type: str) -> bool:
    """Whether the trainer's tensor parallelism divides the layers of models of a type."""
    return model_type in TENSOR_PARALLEL_MODELS or model_type in MIXTURE_MODELS


def divided_sizes(model_type: str, value_of: Callable[[str], object]) -> dict[str, int]:
    """What tensor parallelism divides in a model, by config keys; embedding and head stay whole where it does not divide them.

    Args:
        model_type: of the text model.
        value_of: the value of a config key; None without it, and then what needs it is left out.
    """
    sizes = {}
    for keys in _DIVIDED_SIZES.get(model_type, (*_HEADS, "intermediate_size")):
        factors = [value_of(key) for key in ((keys,) if isinstance(keys, str) else keys)]
        known = [factor for factor in factors if isinstance(factor, int) and not isinstance(factor, bool) and factor > 0]
        if len(known) == len(factors):
            sizes[keys if isinstance(keys, str) else " times ".join(keys)] = math.prod(known)
    return sizes


def parallel_path(spec: RLJobSpec, index: int, kind: Literal["tensor", "context", "expert"]) -> str:
    """The field that says over how many devices the layers, sequences or experts of a component without engine are divided."""
    in_training = TRAITS[spec.components[index].role].sized_by_training
    return f"{'spec.training' if in_training else f'spec.components[{index}]'}.{kind}ParallelSize"


def _decoder(config: Config) -> Config:
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def _mixture(spec: RLJobSpec, config: Config, decoder: Config) -> Iterator[FieldError]:
    key = _experts(decoder)
    if key is not None and _type(decoder) not in MIXTURE_MODELS:
        known = ", ".join(MIXTURE_MODELS)
        problem = (
            f"config.json has model_type {_type(decoder)} and {key} {_count(decoder, key)}: of mixtures of experts {known} can be trained"
        )
        yield _error("spec.model.path", spec.model.path, problem, f"use one of these types, or {_DENSE.removeprefix('use ')}")


def _engine_keys(spec: RLJobSpec, config: Config, decoder: Config) -> Iterator[FieldError]:
    """Trainer and engines would compute different models."""
    for key, allowed in ENGINE_KEYS.get(_type(decoder), {}).items():
        if decoder.get(key) not in allowed:
            wanted = json.dumps(allowed[0])
            problem = (
                f"config.json has model_type {_type(decoder)} and {key} {json.dumps(decoder.get(key), default=str)}: trainer and engines "
                f"compute the same model with {wanted} only"
            )
            yield _error("spec.model.path", spec.model.path, problem, f'write "{key}": {wanted} if weights were trained so, or {_DENSE}')


def _router_bias(spec: RLJobSpec, config: Config, decoder: Config) -> Iterator[FieldError]:
    rate = spec.training.router_bias_update_rate
    if rate > 0 and _type(decoder) not in BIASED_MODELS:
        known = ", ".join(BIASED_MODELS)
        problem = f"config.json has model_type {_type(decoder)}, whose routers have no correction bias (those of {known} have)"
        yield _error("spec.training.routerBiasUpdateRate", rate, problem, "remove it, or write training.loadBalancing for a mixture")


def _load_balancing(spec: RLJobSpec, config: Config, decoder: Config) -> Iterator[FieldError]:
    balancing, path = spec.training.load_balancing, "spec.training.loadBalancing"
    if balancing is None:
        return
    if _experts(decoder) is None:
        problem = f"config.json has model_type {_type(decoder)} without experts, so there are no routers to balance"
        yield _error(path, None, problem, "remove it, or use a mixture of experts")
    elif balancing.coefficient is None and not isinstance(decoder.get(AUX_LOSS_KEY), int | float):
        problem = f"config.json has no {AUX_LOSS_KEY}, which would be the coefficient"
        yield _error(f"{path}.coefficient", None, problem, "set it, for example to 0.001")


def _router_replay(spec: RLJobSpec, config: Config, decoder: Config) -> Iterator[FieldError]:
    if spec.training.router_replay is not RouterReplay.DISABLED and _experts(decoder) is None:
        problem = f"config.json has model_type {_type(decoder)} without experts, so there are no routers whose choices could be replayed"
        yield _error("spec.training.routerReplay", spec.training.router_replay, problem, "remove it, or use a mixture of experts")


def _layer_compilation(spec: RLJobSpec, config: Config, decoder: Config) -> Iterator[FieldError]:
    wanted = spec.training.layer_compilation
    if wanted is LayerCompilation.ENABLED and _experts(decoder) is not None:
        problem = f"config.json has model_type {_type(decoder)}, and layers with experts are not compiled"
        yield _error("spec.training.layerCompilation", wanted, problem, "use Auto")


def _adapted_experts(spec: RLJobSpec, config: Config, decoder: Config) -> Iterator[FieldError]:
    """Experts are one parameter per layer and no linear layers; adapters would be on the other layers of that name alone, or nowhere."""
    lora = spec.model.lora
    if lora is None or _experts(decoder) is None:
        return
    for index, name in enumerate(lora.target_modules):
        if name in EXPERT_MODULES:
            problem = f"names layers of experts (config.json has model_type {_type(decoder)}), which cannot have adapters"
            yield _error(
                f"spec.model.lora.targetModules[{index}]", name, problem, "name layers of the attention, such as q_proj and o_proj"
            )
    if spec.weight_sync.adapters is AdapterSync.SERVED:
        problem = f"config.json has model_type {_type(decoder)} with experts, and engines serve adapters of dense models only"
        yield _error("spec.weightSync.adapters", AdapterSync.SERVED.value, problem, "write Merged")


def _other_senses(spec: RLJobSpec, config: Config, decoder: Config) -> Iterator[FieldError]:
    key = next((k for k in OTHER_SENSES if isinstance(config.get(k), Mapping)), None)
    if key is not None:
        problem = f"config.json has model_type {_type(config)} and {key}: a model that reads {OTHER_SENSES[key]} cannot be trained yet"
        yield _error("spec.model.path", spec.model.path, problem, _DENSE)


def _not_causal(spec: RLJobSpec, config: Config, decoder: Config) -> Iterator[FieldError]:
    if config.get("is_encoder_decoder") is True:
        problem = f"config.json has model_type {_type(config)} and is_encoder_decoder true: only causal language models can be trained"
        yield _error("spec.model.path", spec.model.path, problem, _DENSE)


def _quantized(spec: RLJobSpec, config: Config, decoder: Config) -> Iterator[FieldError]:
    found = config.get("quantization_config")
    if isinstance(found, Mapping):
        problem = f"config.json has quantization_config with quant_method {found.get('quant_method')}: quantized weights cannot be trained"
        yield _error("spec.model.path", spec.model.path, problem, "name the checkpoint that it was made from, in bfloat16 or float32")


def _logits(spec: RLJobSpec, config: Config, decoder: Config) -> Iterator[FieldError]:
    yield from _logit_problems(spec, "spec.model.path", spec.model.path, decoder)


def _logit_problems(spec: RLJobSpec, path: str, model: str, decoder: Config) -> Iterator[FieldError]:
    """Why the trainer's code cannot compute log-probs of a model, which is named at ``path``."""
    key = logit_form(_type(decoder), decoder.get)
    if isinstance(key, str):
        problem = (
            f"config.json has model_type {_type(decoder)} and {key} {decoder[key]}: what it does to logits after the head is not known"
        )
        yield _error(path, model, problem, "use another model")
    cap = decoder.get(ATTENTION_CAP)
    if cap is not None and spec.model.attention == "sdpa":
        problem = f"config.json has {ATTENTION_CAP} {cap}, which sdpa does not compute"
        yield _error("spec.model.attention", spec.model.attention, problem, "write eager")


def _parallel(spec: RLJobSpec, config: Config, decoder: Config) -> Iterator[FieldError]:
    """Of the components that compute with ``spec.model``; those without a setting have size 1."""
    for index, component in enumerate(spec.components):
        if not TRAITS[component.role].has_own_model:
            yield from _component_parallel(spec, index, config)


def _component_parallel(spec: RLJobSpec, index: int, config: Config) -> Iterator[FieldError]:
    """Whether the sizes of a component divide the model of this ``config.json``."""
    component, decoder = spec.components[index], _decoder(config)
    if TRAITS[component.role].divides_layers:
        yield from _divided_layers(parallel_path(spec, index, "tensor"), spec.tensor_parallel_size(component), decoder)
        yield from _divided_sequences(spec, index, config)
        yield from _divided_experts(parallel_path(spec, index, "expert"), spec.expert_parallel_size(component), decoder)
    stages, layers = component.engine.pipeline_parallel_size if component.engine is not None else 1, _count(decoder, "num_hidden_layers")
    if layers is not None and stages > layers:
        problem = f"is more than num_hidden_layers {layers} of config.json, so that stages would have no layers"
        yield _error(f"spec.components[{index}].engine.pipelineParallelSize", stages, problem, f"use at most {layers}")
    if component.engine is not None:
        path = f"spec.components[{index}].engine.tensorParallelSize"
        yield from _divided_engine(path, component.engine.tensor_parallel_size, decoder)


def _divided_engine(path: str, tensor: int, decoder: Config) -> Iterator[FieldError]:
    """Engines divide heads and MLPs evenly; where there are more devices than key-value heads, they copy each of these as often.

    Source: ``Qwen2Attention`` and ``Qwen2MLP``, and those of other models alike, of vLLM 0.32 and SGLang.
    """
    problem = _undivided(tensor, decoder)
    if problem is None:
        return
    sizes = [size for size in range(1, _MAX_PROPOSED + 1) if _undivided(size, decoder) is None]
    near = [max(size for size in sizes if size < tensor), *[size for size in sizes if size > tensor][:1]]
    yield _error(path, tensor, f"does not divide {problem} of config.json", f"use {' or '.join(map(str, near))}")


def _undivided(tensor: int, decoder: Config) -> str | None:
    """What an engine of this size cannot divide, the first such size; None where it can divide all."""
    heads, shared = _count(decoder, "num_attention_heads"), _count(decoder, "num_key_value_heads")
    if heads is not None and heads % tensor:
        return f"num_attention_heads {heads}"
    if shared is not None and _count(decoder, "kv_lora_rank") is None and shared % tensor and tensor % shared:
        return f"num_key_value_heads {shared}, and is no multiple of it,"
    widths = divided_sizes(_type(decoder), decoder.get)
    is_mixture = _experts(decoder) is not None
    names = [name for name in widths if name not in _HEADS and (not is_mixture or _type(decoder) in _DIVIDED_SIZES)]
    return next((f"{name} {widths[name]}" for name in names if widths[name] % tensor), None)


def _divided_sequences(spec: RLJobSpec, index: int, config: Config) -> Iterator[FieldError]:
    """Attention is divided by heads, and computes packed rows, in which every layer attends to all earlier tokens."""
    component, decoder = spec.components[index], _decoder(config)
    size, tensor = spec.context_parallel_size(component), spec.tensor_parallel_size(component)
    if size == 1:
        return
    path, heads, model = parallel_path(spec, index, "context"), _count(decoder, "num_attention_heads"), component.model or spec.model
    if model.trust_remote_code and config.get("auto_map"):
        problem = "config.json has auto_map, and the model's own code does not divide sequences"
        yield _error(path, size, problem, "write 1, or trustRemoteCode: false of the model where transformers has the model type")
    if partial := _partial_attention(decoder):
        problem = f"config.json has {partial}: only models whose layers all attend to all earlier tokens can divide sequences"
        yield _error(path, size, problem, "write 1, or use another model")
    if found := _growing_rope(decoder):
        problem = f"config.json has rope_type {found[0]}, whose rotations follow the length of a row, of which a device would see its part"
        yield _error(path, size, problem, "write 1, or use another model")
    if heads is not None and heads % tensor == 0 and heads % (size * tensor):
        times = "" if tensor == 1 else f"times tensorParallelSize {tensor} "
        problem = f"{times}does not divide num_attention_heads {heads} of config.json"
        yield _error(path, size, problem, f"use {_divisors(heads // tensor, size)}")


def _divided_experts(path: str, size: int, decoder: Config) -> Iterator[FieldError]:
    """Every process of a group has as many experts of a layer as the others."""
    key = _experts(decoder)
    if size == 1:
        return
    if key is None:
        problem = f"config.json has model_type {_type(decoder)} without experts, so there is nothing to divide"
        yield _error(path, size, problem, "remove it, or use a mixture of experts")
        return
    experts = _count(decoder, key) or 0
    if experts % size:
        yield _error(path, size, f"does not divide {key} {experts} of config.json", f"use {_divisors(experts, size)}")


def _partial_attention(decoder: Config) -> str | None:
    """What says that a layer does not attend to all earlier tokens; None where all do."""
    kinds = decoder.get("layer_types")
    if isinstance(kinds, list):
        return next((f"layer_types with {kind}" for kind in kinds if kind != "full_attention"), None)
    window = decoder.get("sliding_window")
    return f"sliding_window {window}" if window is not None and decoder.get("use_sliding_window") is not False else None


def _growing_rope(decoder: Config) -> tuple[str, Config] | None:
    """The type of rotary positions that depend on the longest position of a forward pass, and its section; None for others."""
    for key in ("rope_parameters", "rope_scaling"):
        given = decoder.get(key)
        if isinstance(given, Mapping):
            rope = str(given.get("rope_type", given.get("type", "")))
            if "dynamic" in rope or rope == "longrope":
                return rope, given
    return None


def _divided_layers(path: str, tensor: int, decoder: Config) -> Iterator[FieldError]:
    if tensor == 1:
        return
    divisible = ", ".join((*TENSOR_PARALLEL_MODELS, *MIXTURE_MODELS))
    if not can_divide(_type(decoder)):
        why = UNDIVIDED_MODELS.get(_type(decoder))
        which = f"they can for {divisible}"
        problem = f"config.json has model_type {_type(decoder)}, whose layers cannot be divided ({which if why is None else why})"
        types = "these types" if why is None else f"the types {divisible}"
        yield _error(path, tensor, problem, f"write 1, or use a model of one of {types}")
        return
    for name, size in divided_sizes(_type(decoder), decoder.get).items():
        if size % tensor:
            yield _error(path, tensor, f"does not divide {name} {size} of config.json", f"use {_divisors(size, tensor)}")


def _experts(decoder: Config) -> str | None:
    """The key of the config that makes it a mixture; None for a dense model."""
    return next((k for k in EXPERT_COUNTS if (_count(decoder, k) or 0) > 1), None)


def _type(config: Config) -> str:
    return str(config.get("model_type"))


def _length(spec: RLJobSpec, config: Config, decoder: Config) -> Iterator[FieldError]:
    """Engines refuse sequences that the model's positions do not reach, unless positions are scaled or the config is overridden."""
    positions, rope = _count(decoder, "max_position_embeddings"), decoder.get("rope_parameters")
    is_scaled = bool(decoder.get("rope_scaling")) or (isinstance(rope, Mapping) and rope.get("rope_type", "default") != "default")
    changes = any("hf_overrides" in component.engine.extra_args for component in spec.components if component.engine is not None)
    longest = spec.rollout.max_prompt_tokens + spec.rollout.max_response_tokens
    if positions is not None and longest > positions and not is_scaled and not changes:
        yield _error(
            "spec.rollout.maxResponseTokens",
            spec.rollout.max_response_tokens,
            f"makes sequences of {longest} tokens with maxPromptTokens {spec.rollout.max_prompt_tokens}, and the model's config.json has "
            f"max_position_embeddings {positions}",
            "lower one of the two, or use a model for longer sequences",
        )


def _rotations(spec: RLJobSpec, config: Config, decoder: Config) -> Iterator[FieldError]:
    """What is computed by the trainer's code has the rotations of engines, whatever else is in a micro-batch."""
    if any(TRAITS[component.role].divides_layers and component.model is None for component in spec.components):
        yield from _rope_problems(spec, decoder, "the model's config.json")


def _rope_problems(spec: RLJobSpec, decoder: Config, whose: str) -> Iterator[FieldError]:
    """Transformers chooses these rotations by the longest sequence of a forward pass (``dynamic_rope_update``), vLLM once for all."""
    found = _growing_rope(decoder)
    if found is None:
        return
    rope, given = found
    key = "original_max_position_embeddings" if rope == "longrope" else "max_position_embeddings"
    limit = _count(given, key) or _count(decoder, key)
    longest = spec.rollout.max_prompt_tokens + spec.rollout.max_response_tokens
    if limit is not None and longest > limit:
        yield _error(
            "spec.rollout.maxResponseTokens",
            spec.rollout.max_response_tokens,
            f"makes sequences of {longest} tokens with maxPromptTokens {spec.rollout.max_prompt_tokens}, and {whose} has rope_type {rope} "
            f"with {key} {limit}: one longer sequence would change the log-probs of all others of its micro-batch",
            f"lower them to {limit} together, or use another model",
        )


def _count(config: Config, key: str) -> int | None:
    value = config.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _divisors(size: int, near: int) -> str:
    """The divisors of ``size`` on both sides of ``near``."""
    below = next(count for count in range(min(near, size), 0, -1) if size % count == 0)
    above = next((count for count in range(near + 1, min(size, _MAX_PROPOSED) + 1) if size % count == 0), None)
    return f"{below}" if above is None else f"{below} or {above}"


RULES: tuple[Callable[[RLJobSpec, Config, Config], Iterable[FieldError]], ...] = (
    _mixture,
    _engine_keys,
    _router_bias,
    _load_balancing,
    _router_replay,
    _layer_compilation,
    _adapted_experts,
    _other_senses,
    _not_causal,
    _quantized,
    _logits,
    _length,
    _rotations,
    _parallel,
)
"""Each independent of the others; gets the whole config and that of its text decoder."""
