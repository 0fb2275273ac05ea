"""What config.json says about whether a run would refuse a model, and that it is reported before a device is taken."""

from pathlib import Path
from typing import Any

import pytest

from rljob_api.errors import SpecInvalidError
from rljob_api.validation import check
from tests.integration.jobs import job
from tests.unit.api.model_configs import CONFIGS, QWEN25_05B

DENSE = {"model_type": "qwen3", "num_attention_heads": 16, "num_key_value_heads": 8, "intermediate_size": 3072}


def problems(config: dict[str, Any] | None, **spec: Any) -> list[str]:
    try:
        check(job(Path("team/model"), steps=1, **spec), config_of=lambda spec: config)
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


@pytest.mark.parametrize("name", [n for n, c in CONFIGS.items() if "moe" not in c["model_type"] and c["model_type"] != "mixtral"])
def test_dense_text_models_pass(name: str) -> None:
    assert problems(CONFIGS[name]) == []


def test_without_a_config_nothing_is_said() -> None:
    assert problems(None) == problems({}) == problems({"num_experts": "many", "text_config": []}) == []


REFUSED: list[tuple[dict[str, Any], str]] = [
    (CONFIGS["mixtral"], "model_type mixtral and num_local_experts 4: mixtures of experts cannot be trained yet; use a dense text model"),
    (CONFIGS["qwen3_moe"], "model_type qwen3_moe and num_experts 8: mixtures"),
    ({"model_type": "vlm", "text_config": {"model_type": "t", "n_routed_experts": 64}}, "model_type t and n_routed_experts 64: mixtures"),
    ({"model_type": "qwen2_5_vl", "vision_config": {}}, "model_type qwen2_5_vl and vision_config: a model that reads images"),
    ({"model_type": "qwen2_audio", "audio_config": {}}, "audio_config: a model that reads sound cannot be trained yet"),
    ({"model_type": "t5", "is_encoder_decoder": True}, "is_encoder_decoder true: only causal language models"),
    (
        {**DENSE, "quantization_config": {"quant_method": "fp8"}},
        "quant_method fp8: quantized weights cannot be trained; name the checkpoint",
    ),
    ({"model_type": "gemma2", "final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0: models that change logits"),
]


@pytest.mark.parametrize(("config", "said"), REFUSED)
def test_models_that_cannot_be_trained_are_named_with_what_shows_it(config: dict[str, Any], said: str) -> None:
    (problem,) = problems(config)
    assert problem.startswith('spec.model.path: "team/model": config.json has ')
    assert said in problem


def test_a_plan_is_made_all_the_same_and_says_what_a_run_would_refuse() -> None:
    made = check(job(Path("m"), steps=1), runnable=False, config_of=lambda spec: CONFIGS["mixtral"])
    assert [problem.path for problem in made.not_yet] == ["spec.model.path"]


def test_tensor_parallelism_of_the_trainer_needs_a_known_class_and_divided_sizes() -> None:
    parallel = four_devices(training={"steps": 1, "tensorParallelSize": 2})
    assert problems(DENSE, **parallel) == []
    (unknown,) = problems(DENSE | {"model_type": "olmo2"}, **parallel)
    assert unknown.startswith(
        "spec.training.tensorParallelSize: 2: config.json has model_type olmo2, whose layers the trainer cannot divide"
    )
    (odd,) = problems(DENSE | {"num_key_value_heads": 5}, **parallel)
    assert odd == "spec.training.tensorParallelSize: 2: does not divide num_key_value_heads 5 of config.json; use 1 or 5"
    assert problems(DENSE | {"model_type": "olmo2", "num_key_value_heads": 5}, **four_devices()) == []


def test_tensor_parallelism_of_an_engine_divides_the_heads() -> None:
    engine = {"engine": {"tensorParallelSize": 2}}
    assert problems(QWEN25_05B, **four_devices(rollout_component=engine)) == []
    (problem,) = problems(QWEN25_05B | {"num_attention_heads": 15}, **four_devices(rollout_component=engine))
    said = "spec.components[1].engine.tensorParallelSize: 2: does not divide num_attention_heads 15 of config.json; use 1 or 3"
    assert problem == said
