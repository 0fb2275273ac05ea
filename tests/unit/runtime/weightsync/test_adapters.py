"""Names and shapes of adapters on their way."""

from rljob_runtime.weightsync.adapters import fitting, layer_of, linear_layers
from rljob_runtime.weightsync.packing import plan_buckets

WEIGHTS = {
    "model.embed_tokens.weight": (60, 8),
    "model.layers.0.self_attn.q_proj.weight": (16, 8),
    "model.layers.0.self_attn.q_proj.bias": (16,),
    "model.layers.0.mlp.down_proj.weight": (8, 24),
    "model.layers.0.input_layernorm.weight": (8,),
}
Q, NORM = "model.layers.0.self_attn.q_proj", "model.layers.0.input_layernorm"


def test_the_layer_of_a_name() -> None:
    assert layer_of(f"{Q}.lora_A.weight") == layer_of(f"{Q}.lora_B.weight") == Q
    assert layer_of(f"{Q}.weight") is None


def test_only_matrices_of_decoder_layers_may_have_adapters() -> None:
    assert linear_layers(WEIGHTS) == ["down_proj", "q_proj"]


def test_one_adapter_of_a_layer_asks_for_the_other_and_unknown_layers_for_nothing() -> None:
    names = [f"{Q}.lora_A.weight", "other.lora_A.weight", f"{NORM}.lora_A.weight", f"{Q}.weight"]
    manifest = plan_buckets([(name, "float32", (2, 8)) for name in names], 10_000)
    assert fitting(manifest, WEIGHTS, rank=2) == {f"{Q}.lora_A.weight": (2, 8), f"{Q}.lora_B.weight": (16, 2)}
