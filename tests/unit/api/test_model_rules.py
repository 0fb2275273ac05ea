"""What config.json says about whether a run would refuse a model, and that it is reported before a device is taken."""

import re
from pathlib import Path
from typing import Any

import pytest

from rljob_api.errors import SpecInvalidError
from rljob_api.rules.model import TENSOR_PARALLEL_MODELS, UNDIVIDED_MODELS
from rljob_api.v1alpha1.data import Model
from rljob_api.validation import check
from tests.integration.jobs import job
from tests.unit.api.model_configs import CONFIGS, QWEN25_05B

DENSE = {"model_type": "qwen3", "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072}


def problems(
    config: dict[str, Any] | None,
    lora: dict[str, Any] | None = None,
    own: dict[str, Any] | None = None,
    trusted: bool = False,
    attention: str = "sdpa",
    **spec: Any,
) -> list[str]:
    """``config`` of spec.model, ``own`` of models that components have."""
    document = job(Path("team/model"), steps=1, **spec)
    document["spec"]["model"] |= {"trustRemoteCode": trusted, "attention": attention}
    if lora is not None:
        document["spec"]["model"]["lora"] = lora
    try:
        check(document, config_of=lambda model: config if isinstance(model, Model) else own)
    except SpecInvalidError as error:
        return [str(problem) for problem in error.errors]
    return []


def four_devices(**sections: Any) -> dict[str, Any]:
    """A trainer on two devices, an engine on two."""
    components = [
        {"name": "actor_train", "role": "Trainer", "placement": {"ranks": "0-1"}},
        {"name": "actor_infer", "role": "Rollout", "placement": {"ranks": "2-3"}, **sections.pop("rollout_component", {})},
        {"name": "reward", "role": "Reward", "placement": {"workers": 1}},
    ]
    return {"nodeGroups": [{"name": "local", "devicesPerNode": 4, "deviceResource": "cpu"}], "components": components, **sections}


@pytest.mark.parametrize("name", CONFIGS)
def test_text_models_pass(name: str) -> None:
    assert problems(CONFIGS[name]) == []


def test_without_a_config_nothing_is_said() -> None:
    assert problems(None) == problems({}) == problems({"num_experts": "many", "text_config": []}) == []


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"model_type": "dots1", "n_routed_experts": 64},
        "model_type dots1 and n_routed_experts 64: of mixtures of experts deepseek_v2, deepseek_v3, glm4_moe, glm4_moe_lite, mixtral, "
        "qwen2_moe, qwen3_moe can be trained; use one",
    ),
    (
        {**CONFIGS["deepseek_v3"], "scoring_func": None},
        'model_type deepseek_v3 and scoring_func null: trainer and engines compute the same model with "sigmoid" only; write',
    ),
    ({**CONFIGS["deepseek_v3"], "topk_method": "greedy"}, 'deepseek_v3 and topk_method "greedy": trainer and engines'),
    ({**CONFIGS["deepseek_v3"], "rope_interleave": False}, "deepseek_v3 and rope_interleave false: trainer and engines"),
    ({**CONFIGS["deepseek_v2"], "norm_topk_prob": True}, "deepseek_v2 and norm_topk_prob true: trainer and engines"),
    (
        {"model_type": "vlm", "text_config": {"model_type": "t", "n_routed_experts": 64}},
        "model_type t and n_routed_experts 64: of mixtures",
    ),
    ({"model_type": "qwen2_5_vl", "vision_config": {}}, "model_type qwen2_5_vl and vision_config: a model that reads images"),
    ({"model_type": "qwen2_audio", "audio_config": {}}, "audio_config: a model that reads sound cannot be trained yet"),
    ({"model_type": "t5", "is_encoder_decoder": True}, "is_encoder_decoder true: only causal language models"),
    (
        {**DENSE, "quantization_config": {"quant_method": "fp8"}},
        "quant_method fp8: quantized weights cannot be trained; name the checkpoint",
    ),
    ({"model_type": "new", "logit_scale": 0.5}, "model_type new and logit_scale 0.5: what it does to logits after the head is not known"),
    ({"model_type": "granite", "logits_scaling": -1.0}, "model_type granite and logits_scaling -1.0: what it does"),
]


@pytest.mark.parametrize(("config", "said"), REFUSED)
def test_models_that_cannot_be_trained_are_named_with_what_shows_it(config: dict[str, Any], said: str) -> None:
    (problem,) = problems(config)
    assert problem.startswith('spec.model.path: "team/model": config.json has ')
    assert said in problem


def test_models_whose_logits_are_scaled_or_capped_pass_and_scores_are_capped_by_eager_attention_only() -> None:
    assert problems({"model_type": "granite", "logits_scaling": 8.0}) == problems({"model_type": "cohere", "logit_scale": 0.0625}) == []
    capped = {"model_type": "gemma2", "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}
    (refused,) = problems(capped)
    assert refused == 'spec.model.attention: "sdpa": config.json has attn_logit_softcapping 50.0, which sdpa does not compute; write eager'
    assert problems(capped, attention="eager") == []


def test_a_plan_is_made_all_the_same_and_says_what_a_run_would_refuse() -> None:
    made = check(job(Path("m"), steps=1), runnable=False, config_of=lambda model: {"model_type": "gpt_oss", "num_local_experts": 8})
    assert [problem.path for problem in made.not_yet] == ["spec.model.path"]


def test_tensor_parallelism_of_the_trainer_needs_a_known_class_and_divided_sizes() -> None:
    parallel = four_devices(training={"steps": 1, "tensorParallelSize": 2})
    assert problems(DENSE, **parallel) == []
    (unknown,) = problems(DENSE | {"model_type": "other"}, **parallel)
    assert unknown.startswith("spec.training.tensorParallelSize: 2: config.json has model_type other, whose layers cannot be divided (they")
    (bias,) = problems(DENSE | {"model_type": "phi"}, **parallel)
    assert "phi, whose layers cannot be divided (its head has a bias)" in bias
    (odd,) = problems(DENSE | {"num_key_value_heads": 5}, **parallel)
    assert odd == "spec.training.tensorParallelSize: 2: does not divide num_key_value_heads 5 of config.json; use 1 or 5"
    assert problems(DENSE | {"model_type": "other", "num_key_value_heads": 5}, **four_devices()) == []


def test_the_page_lists_types_that_tensor_parallelism_divides_and_those_that_it_does_not() -> None:
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
    section = page.partition("### Tensor parallelism")[2].partition("\n###")[0]
    divided, _, others = section.partition("Other causal language models")
    assert set(TENSOR_PARALLEL_MODELS) <= set(re.findall(r"\w+", divided))
    (dense,) = [line.split(" | ")[1].strip(" |") for line in others.splitlines() if line.startswith("| dense types")]
    assert set(dense.split(", ")) == UNDIVIDED_MODELS.keys()


def test_tensor_parallelism_of_mixtures_divides_heads_and_shared_experts() -> None:
    parallel = four_devices(training={"steps": 1, "tensorParallelSize": 2})
    for kind in ("deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite"):
        config = CONFIGS[kind] | {"num_key_value_heads": 4}
        assert problems(config, **parallel) == []
        (odd,) = problems(config | {"n_shared_experts": 3, "moe_intermediate_size": 25}, **parallel)
        said = "does not divide n_shared_experts times moe_intermediate_size 75 of config.json; use 1 or 3"
        assert odd == f"spec.training.tensorParallelSize: 2: {said}"
        grouped = problems(config | {"num_key_value_heads": 1}, **parallel)  # latent attention has keys and values for each head
        assert [problem.split(": ")[2] for problem in grouped] == (
            ["does not divide num_key_value_heads 1 of config.json; use 1"] if kind == "glm4_moe" else []
        )


def test_sequence_parallelism_needs_devices_that_divide_layers() -> None:
    assert problems(DENSE, **four_devices(training={"steps": 1, "tensorParallelSize": 2, "sequenceParallel": True})) == []
    (alone,) = problems(DENSE, **four_devices(training={"steps": 1, "sequenceParallel": True}))
    assert alone == (
        "spec.training.sequenceParallel: true: is set with training.tensorParallelSize 1, so there are no devices to divide tokens over; "
        "remove it, or set tensorParallelSize above 1"
    )


def test_sequences_are_divided_by_heads_where_every_layer_attends_to_all() -> None:
    divided = four_devices(training={"steps": 1, "contextParallelSize": 2})
    assert problems(DENSE, **divided) == problems(CONFIGS["qwen3_moe"], **divided) == []
    assert problems(DENSE | {"sliding_window": 64, "use_sliding_window": False}, **divided) == []
    for partial, said in (
        ({"sliding_window": 64}, "sliding_window 64"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types with"),
    ):
        (window,) = problems(DENSE | partial, **divided)
        assert window.startswith(f"spec.training.contextParallelSize: 2: config.json has {said}")
    (own,) = problems(DENSE | {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}}, trusted=True, **divided)
    assert own.startswith("spec.training.contextParallelSize: 2: config.json has auto_map")
    for rope in ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, {"rope_parameters": {"rope_type": "longrope"}}):
        (growing,) = problems(DENSE | rope, **divided)
        assert growing.startswith("spec.training.contextParallelSize: 2: config.json has rope_type")
    assert problems(DENSE | {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, **divided) == []
    (odd,) = problems(DENSE | {"num_attention_heads": 15, "num_key_value_heads": 5}, **divided)
    assert odd == "spec.training.contextParallelSize: 2: does not divide num_attention_heads 15 of config.json; use 1 or 3"
    both = four_devices(training={"steps": 1, "contextParallelSize": 2, "tensorParallelSize": 2})
    both["nodeGroups"][0]["devicesPerNode"] = 6
    both["components"][0]["placement"]["ranks"] = "2-5"
    both["components"][1]["placement"]["ranks"] = "0-1"
    (few,) = problems(DENSE | {"num_attention_heads": 6, "num_key_value_heads": 6}, **both)
    assert few == (
        "spec.training.contextParallelSize: 2: times tensorParallelSize 2 does not divide num_attention_heads 6 of config.json; use 1 or 3"
    )
    assert problems(DENSE | {"num_attention_heads": 4, "num_key_value_heads": 2}, **both) == []


def test_experts_are_divided_evenly() -> None:
    divided = four_devices(training={"steps": 1, "expertParallelSize": 2})
    for name in ("qwen3_moe", "qwen2_moe", "mixtral"):
        assert problems(CONFIGS[name], **divided) == []
    (odd,) = problems(CONFIGS["mixtral"] | {"num_local_experts": 9}, **divided)
    assert odd == "spec.training.expertParallelSize: 2: does not divide num_local_experts 9 of config.json; use 1 or 3"
    (dense,) = problems(DENSE, **divided)
    assert dense == (
        "spec.training.expertParallelSize: 2: config.json has model_type qwen3 without experts, so there is nothing to divide; "
        "remove it, or use a mixture of experts"
    )


def test_tensor_parallelism_of_an_engine_divides_the_heads() -> None:
    engine = {"engine": {"tensorParallelSize": 2}}
    assert problems(QWEN25_05B, **four_devices(rollout_component=engine)) == []
    (problem,) = problems(
        QWEN25_05B | {"num_attention_heads": 15, "num_key_value_heads": 3, "intermediate_size": 4800},
        **four_devices(rollout_component=engine),
    )
    said = "spec.components[1].engine.tensorParallelSize: 2: does not divide num_attention_heads 15 of config.json; use 1 or 3"
    assert problem == said


@pytest.mark.parametrize(
    ("size", "config", "said"),
    [
        (2, {"num_key_value_heads": 1}, None),  # each of the two devices has that head
        (
            2,
            {"num_key_value_heads": 3, "num_attention_heads": 6, "intermediate_size": 4800},
            "num_key_value_heads 3, and is no multiple of it, of config.json; use 1 or 3",
        ),
        (2, {"num_key_value_heads": 3, "num_attention_heads": 6, "kv_lora_rank": 512}, None),  # all heads share what is cached
        (2, {"intermediate_size": 4865}, "intermediate_size 4865 of config.json; use 1"),
        (2, {"intermediate_size": 4865, "num_experts": 4, "model_type": "qwen3_moe"}, None),  # all layers have experts
        (
            2,
            CONFIGS["deepseek_v3"] | {"moe_intermediate_size": 33, "n_shared_experts": 1},
            "n_shared_experts times moe_intermediate_size 33 of config.json; use 1",
        ),
    ],
)
def test_engines_also_divide_key_value_heads_and_mlps(size: int, config: dict[str, Any], said: str | None) -> None:
    document = four_devices(rollout_component={"engine": {"tensorParallelSize": size}})
    found = [problem for problem in problems(QWEN25_05B | config, **document) if "tensorParallelSize" in problem]
    assert found == ([] if said is None else [f"spec.components[1].engine.tensorParallelSize: {size}: does not divide {said}"])


def test_stages_of_an_engine_have_layers() -> None:
    engine = {"engine": {"pipelineParallelSize": 2}}
    assert problems(QWEN25_05B, **four_devices(rollout_component=engine)) == []
    (problem,) = problems(QWEN25_05B | {"num_hidden_layers": 1}, **four_devices(rollout_component=engine))
    assert problem.startswith("spec.components[1].engine.pipelineParallelSize: 2: is more than num_hidden_layers 1 of config.json")


def with_component(role: str, **more: Any) -> dict[str, Any]:
    """Two more devices, with a component on them."""
    spec = four_devices(algorithm={"kl": {"coefficient": 0.1}} if role == "Reference" else {"advantage": {"estimator": "GAE"}})
    spec["nodeGroups"][0]["devicesPerNode"] = 6
    spec["components"].append({"name": "other", "role": role, "placement": {"ranks": "4-5"}, **more})
    return spec


@pytest.mark.parametrize("role", ["Reference", "Critic"])
def test_tensor_parallelism_of_a_component_divides_its_layers(role: str) -> None:
    parallel = with_component(role, tensorParallelSize=2)
    assert problems(DENSE, **parallel) == []
    (odd,) = problems(DENSE | {"num_key_value_heads": 5}, **parallel)
    assert odd == "spec.components[3].tensorParallelSize: 2: does not divide num_key_value_heads 5 of config.json; use 1 or 5"
    (unknown,) = problems(DENSE | {"model_type": "other"}, **parallel)
    assert unknown.startswith("spec.components[3].tensorParallelSize: 2: config.json has model_type other, whose layers cannot be divided")


@pytest.mark.parametrize("role", ["Reference", "Critic"])
def test_sequences_and_experts_of_a_component_are_divided_by_its_own_sizes(role: str) -> None:
    context, experts = with_component(role, contextParallelSize=2), with_component(role, expertParallelSize=2)
    mixture = CONFIGS["mixtral"]
    assert problems(DENSE, **context) == problems(mixture, **context) == problems(mixture, **experts) == []
    (window,) = problems(DENSE | {"sliding_window": 64}, **context)
    assert window.startswith("spec.components[3].contextParallelSize: 2: config.json has sliding_window 64")
    (odd,) = problems(mixture | {"num_local_experts": 9}, **experts)
    assert odd == "spec.components[3].expertParallelSize: 2: does not divide num_local_experts 9 of config.json; use 1 or 3"
    (dense,) = problems(DENSE, **experts)
    assert dense.startswith("spec.components[3].expertParallelSize: 2: config.json has model_type qwen3 without experts")


def test_sequences_and_experts_of_a_teacher_are_those_of_its_own_model() -> None:
    teacher = with_component("Teacher", contextParallelSize=2, expertParallelSize=2, model={"path": "team/other", "trustRemoteCode": True})
    del teacher["algorithm"]
    assert problems(DENSE | {"sliding_window": 64}, own=CONFIGS["mixtral"], **teacher) == []
    context, experts = problems(DENSE, own=DENSE | {"auto_map": {"AutoModelForCausalLM": "modeling.Model"}}, **teacher)
    assert context.startswith("spec.components[3].contextParallelSize: 2: config.json has auto_map")
    assert experts.startswith("spec.components[3].expertParallelSize: 2: config.json has model_type qwen3 without experts")


def test_logits_of_a_teacher_are_those_of_its_own_model() -> None:
    teacher = with_component("Teacher", model={"path": "team/other"})
    del teacher["algorithm"]
    (cap,) = problems(DENSE, own={"model_type": "gemma2", "attn_logit_softcapping": 50.0}, **teacher)
    assert cap.startswith('spec.model.attention: "sdpa": config.json has attn_logit_softcapping 50.0')
    (scale,) = problems(DENSE, own=DENSE | {"logit_scale": 0.5}, **teacher)
    assert scale.startswith('spec.components[3].model.path: "team/other": config.json has model_type qwen3 and logit_scale 0.5')


def test_a_component_with_a_model_of_its_own_is_asked_about_that_one() -> None:
    odd, model = DENSE | {"num_key_value_heads": 5, "num_attention_heads": 15}, {"path": "team/other"}
    teacher = with_component("Teacher", tensorParallelSize=2, model=model)
    del teacher["algorithm"]
    assert problems(odd, own=DENSE, **teacher) == []
    wrong = problems(DENSE, own=odd, **teacher)
    assert [problem.split(" of config")[0] for problem in wrong] == [
        f"spec.components[3].tensorParallelSize: 2: does not divide {key}" for key in ("num_attention_heads 15", "num_key_value_heads 5")
    ]


def test_load_balancing_needs_a_mixture_and_a_coefficient() -> None:
    on: dict[str, Any] = {"training": {"steps": 1, "loadBalancing": {}}}
    assert problems(CONFIGS["mixtral"] | {"router_aux_loss_coef": 0.02}, **on) == []
    (missing,) = problems(CONFIGS["mixtral"], **on)
    assert missing.startswith("spec.training.loadBalancing.coefficient: ")
    assert "config.json has no router_aux_loss_coef" in missing
    assert problems(CONFIGS["mixtral"], training={"steps": 1, "loadBalancing": {"coefficient": 0.01}}) == []
    (dense,) = problems(DENSE, **on)
    assert dense.startswith("spec.training.loadBalancing: ")
    assert "without experts" in dense


def test_router_biases_are_moved_in_models_that_have_them() -> None:
    on: dict[str, Any] = {"training": {"steps": 1, "routerBiasUpdateRate": 0.001}}
    for name in ("deepseek_v3", "glm4_moe", "glm4_moe_lite"):
        assert problems(CONFIGS[name], **on) == []
    for config in (CONFIGS["qwen3_moe"], CONFIGS["deepseek_v2"], DENSE):
        (without,) = problems(config, **on)
        assert without.startswith("spec.training.routerBiasUpdateRate: 0.001: config.json has model_type ")
        assert "whose routers have no correction bias (those of deepseek_v3, glm4_moe, glm4_moe_lite have); remove it" in without
    (adapters,) = problems(None, lora={"rank": 2}, **on)
    assert adapters == (
        "spec.training.routerBiasUpdateRate: 0.001: moves biases of routers, and with model.lora only adapters are trained; remove it, or "
        "remove model.lora"
    )


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 2047, "max_position_embeddings": 9000}, 2047),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 2047}}, 2047),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 2047}, 2047),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 2048}}, None),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}, "max_position_embeddings": 2048}, None),
    ],
)
def test_rotations_that_one_long_sequence_changes_for_all_are_refused(rope: dict[str, Any], limit: int | None) -> None:
    asked: dict[str, Any] = {"rollout": {"promptsPerStep": 4, "samplesPerPrompt": 2, "maxPromptTokens": 512, "maxResponseTokens": 1536}}
    found = problems({**DENSE, **rope}, **asked)
    assert len(found) == (limit is not None)
    for problem in found:
        assert problem.startswith("spec.rollout.maxResponseTokens: 1536: makes sequences of 2048 tokens with maxPromptTokens 512")
        assert f"position_embeddings {limit}: one longer sequence would change the log-probs of all others of its micro-batch" in problem
        assert problem.endswith(f"lower them to {limit} together, or use another model")


def test_sequences_are_no_longer_than_the_models_positions() -> None:
    asked: dict[str, Any] = {"rollout": {"promptsPerStep": 4, "samplesPerPrompt": 2, "maxPromptTokens": 512, "maxResponseTokens": 1536}}
    assert problems({**DENSE, "max_position_embeddings": 2048}, **asked) == []
    (problem,) = problems({**DENSE, "max_position_embeddings": 2047}, **asked)
    assert problem.startswith("spec.rollout.maxResponseTokens: 1536: makes sequences of 2048 tokens with maxPromptTokens 512")
    assert "max_position_embeddings 2047" in problem
    for scaled in ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}):
        assert problems({**DENSE, "max_position_embeddings": 1024, **scaled}, **asked) == []
    assert len(problems({**DENSE, "max_position_embeddings": 1024, "rope_parameters": {"rope_type": "default"}}, **asked)) == 1


def test_layers_that_are_divided_or_have_experts_are_not_compiled() -> None:
    on: dict[str, Any] = {"training": {"steps": 1, "layerCompilation": "Enabled"}}
    assert problems(DENSE, **on) == []
    (mixture,) = problems(CONFIGS["mixtral"], **on)
    assert mixture.startswith('spec.training.layerCompilation: "Enabled": config.json has model_type mixtral, and layers with experts')
    on["training"]["tensorParallelSize"] = 2
    (divided,) = problems(DENSE, **four_devices(**on))
    assert divided.startswith('spec.training.layerCompilation: "Enabled": contradicts the tensorParallelSize 2 of ')


def test_router_replay_needs_a_mixture_and_engines_that_say_what_they_chose() -> None:
    on: dict[str, Any] = {"training": {"steps": 1, "routerReplay": "Engine"}}
    assert problems(CONFIGS["mixtral"], **on) == []
    (dense,) = problems(DENSE, **on)
    assert dense.startswith('spec.training.routerReplay: "Engine": config.json has model_type qwen3 without experts')

    def refused(engine: dict[str, Any], **group: Any) -> list[str]:
        document = four_devices(rollout_component={"engine": engine}, **on)
        document["nodeGroups"][0] |= group
        return problems(CONFIGS["qwen3_moe"], **document)

    (sglang,) = refused({"type": "SGLang", "prefixCaching": False})
    assert sglang.startswith('spec.components[1].engine.type: "SGLang": returns no routes')
    (tensor,) = refused({"tensorParallelSize": 2})
    assert tensor.startswith("spec.components[1].engine.tensorParallelSize: 2: contradicts training.routerReplay Engine: on CPU devices")
    (drafted,) = refused({"extraArgs": {"speculative_config": {"method": "ngram"}}})
    assert drafted.startswith("spec.components[1].engine.extraArgs.speculative_config: ")
    (own,) = refused({"extraArgs": {"enable_return_routed_experts": True}})
    assert own.endswith("is set by RLJob itself; write spec.training.routerReplay")
    gpus = {"deviceResource": "nvidia.com/gpu"}
    assert refused({"prefixCaching": False}) == refused({"tensorParallelSize": 2}, **gpus) == []
    (cached,) = refused({"prefixCaching": False}, **gpus)
    assert cached.startswith("spec.components[1].engine.prefixCaching: false: contradicts training.routerReplay Engine: on accelerators")


def test_adapters_of_a_mixture_are_merged_and_not_on_experts() -> None:
    lora: dict[str, Any] = {"rank": 8, "alpha": 16, "targetModules": ["q_proj", "up_proj"]}
    (experts,) = problems(CONFIGS["qwen3_moe"], lora=lora)
    assert experts.startswith('spec.model.lora.targetModules[1]: "up_proj": names layers of experts')
    assert problems(DENSE, lora=lora) == []
    lora = lora | {"targetModules": ["q_proj"]}
    (served,) = problems(CONFIGS["qwen3_moe"], lora=lora, weightSync={"adapters": "Served"})
    assert served.startswith('spec.weightSync.adapters: "Served": config.json has model_type qwen3_moe with experts')
    assert served.endswith("write Merged")


def test_layers_of_a_mixture_are_divided_but_for_its_experts() -> None:
    divided = four_devices(training={"steps": 1, "tensorParallelSize": 2, "expertParallelSize": 2})
    for name in ("qwen3_moe", "qwen2_moe", "mixtral"):
        assert problems(CONFIGS[name], **divided) == []
    assert problems(CONFIGS["mixtral"] | {"intermediate_size": 81}, **divided) == [], "the width of experts, which are whole"
    (shared,) = problems(CONFIGS["qwen2_moe"] | {"shared_expert_intermediate_size": 81}, **divided)
    assert shared.startswith("spec.training.tensorParallelSize: 2: does not divide shared_expert_intermediate_size 81 of config.json")
