"""The memory estimate: numbers worked out by hand, real models on the meta device, what torch really holds, and texts."""

import json
from pathlib import Path
from typing import Any

import pytest

from rljob_api import memory, planner
from rljob_api.errors import FieldError, ModelShapeError
from rljob_api.memory.situations import situations
from rljob_api.memory.units import GIB, show_bytes, show_count
from rljob_api.planning.plan import Plan
from rljob_api.v1alpha1 import RLJob, RLJobSpec
from rljob_api.vocabulary import GradientReduction
from tests.support.cost import within
from tests.support.golden import Golden
from tests.unit.api.manifests import manifest
from tests.unit.api.model_configs import CONFIGS, LLAMA_70B, QWEN25_05B, QWEN25_7B, SMALL

GOLDEN = Path(__file__).parents[2] / "golden" / "memory"


def job(**changes: Any) -> RLJobSpec:
    """One trainer and one rollout on two CPU devices, with sections of the spec replaced or, where both are maps, updated."""
    document = manifest()
    for key, value in changes.items():
        old = document["spec"].get(key)
        document["spec"][key] = {**old, **value} if isinstance(old, dict) and isinstance(value, dict) else value
    return RLJob.model_validate_json(json.dumps(document)).spec


def planned(spec: RLJobSpec) -> Plan:
    result = planner.plan_or_errors(spec)
    assert isinstance(result, Plan), result
    return result


def estimated(spec: RLJobSpec, config: dict[str, Any]) -> memory.MemoryEstimate:
    return memory.estimate(spec, planned(spec), memory.shape_from_config(config))


def config_r(**changes: Any) -> RLJobSpec:
    """Qwen2.5-7B on 16 + 8 devices of 80 GiB, as the documented RLVR config of ROLL has it."""
    sections: dict[str, Any] = {
        "nodeGroups": [{"name": "a800", "nodes": 3, "devicesPerNode": 8, "deviceMemory": "80Gi", "resources": {"memory": "512Gi"}}],
        "components": [
            {"name": "actor_train", "role": "Trainer", "placement": {"deviceMapping": "list(range(0,16))"}},
            {
                "name": "actor_infer",
                "role": "Rollout",
                "placement": {"deviceMapping": "list(range(16,24))"},
                "engine": {"memoryFraction": 0.85},
            },
            {"name": "reward", "role": "Reward", "placement": {"workers": 8}},
        ],
        "model": {"dtype": "bfloat16"},
        "rollout": {"promptsPerStep": 64, "samplesPerPrompt": 8, "maxPromptTokens": 2048, "maxResponseTokens": 8192},
        "training": {"activationCheckpointing": True},
    }
    return job(**{**sections, **changes})


def term(pool: memory.PoolEstimate, phase: memory.Phase, name: str) -> int:
    """Bytes of the terms of that name."""
    found = [t.num_bytes for p in pool.phases if p.phase is phase for t in p.terms if t.need.name == name]
    assert found, f"no {name} in {phase}"
    return sum(found)


def pool_of(estimate: memory.MemoryEstimate, kind: memory.PoolKind, first: int) -> memory.PoolEstimate:
    return next(pool for pool in estimate.pools if (pool.kind, pool.first) == (kind, first))


# Parameters, those of the largest layer, the width that one token passes, and experts; the first two are transformers' own counts.
SHAPES = {
    "llama": (193_472, 43_136, 160, 0),
    "llama with biases": (163_200, 43_712, 160, 0),
    "llama with its own head size": (230_336, 55_424, 160, 0),
    "mistral": (193_472, 43_136, 160, 0),
    "qwen2": (193_856, 43_264, 160, 0),
    "qwen2.5 0.5B": (494_032_768, 14_912_384, 4_864, 0),
    "qwen2.5 7B": (7_615_616_512, 233_057_792, 18_944, 0),
    "llama 70B": (70_553_706_496, 855_654_400, 28_672, 0),
    "qwen3": (198_528, 55_488, 160, 0),
    "qwen3 with biases": (231_488, 55_808, 160, 0),
    "mixtral": (470_720, 135_552, 320, 4),
    "qwen3_moe": (230_528, 55_488, 160, 0),
    "qwen3_moe, all sparse": (361_088, 99_008, 96, 8),
    "qwen2_moe": (317_888, 105_280, 192, 8),
    "deepseek_v2": (326_664, 108_184, 192, 8),
    "deepseek_v3": (246_724, 96_044, 160, 8),
    "glm4_moe": (299_424, 96_032, 160, 8),
    "glm4_moe_lite": (316_704, 101_792, 160, 8),
    "the quickstart's model": (304_640, 147_968, 256, 0),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_shape_of_a_config(name: str) -> None:
    """The integration tests compare with the real models."""
    shape = memory.shape_from_config(CONFIGS[name])
    decoder = shape.decoder
    assert decoder is not None
    assert (shape.parameters, decoder.layer_parameters, decoder.intermediate_size, decoder.num_experts) == SHAPES[name]


def test_latent_attention_caches_one_vector_per_token_on_every_device() -> None:
    decoder = memory.shape_from_config(CONFIGS["deepseek_v3"]).decoder
    assert decoder is not None
    assert (decoder.cached_numbers(2), decoder.head_dim, decoder.num_kv_heads) == (24 + 8, 16 + 8, 4)
    for tensor in (1, 2):
        actor, infer, reward = (component.model_dump(by_alias=True, mode="json", exclude_unset=True) for component in config_r().components)
        infer["placement"]["devicesPerWorker"], infer["engine"]["tensorParallelSize"] = tensor, tensor
        found = estimated(config_r(components=[actor, infer, reward]), CONFIGS["deepseek_v3"]).capacities
        assert {cache.bytes_per_token for cache in found} == {3 * (24 + 8) * 2}  # layers, bfloat16


def test_a_config_that_cannot_be_counted_says_why() -> None:
    with pytest.raises(ModelShapeError, match=r'model_type "gpt2", known are deepseek_v2, .*parameterCount'):
        memory.shape_from_config({"model_type": "gpt2"})
    with pytest.raises(ModelShapeError, match='hidden_size "64", which is not a whole number'):
        memory.shape_from_config({"model_type": "llama", **SMALL, "hidden_size": "64"})
    with pytest.raises(ModelShapeError, match="vocab_size null"):
        memory.shape_from_config({"model_type": "llama", **SMALL, "vocab_size": None})


def test_texts_of_quantities() -> None:
    assert [show_bytes(n) for n in (0, 1023, 1024, 3 * 2**20, 80 * GIB)] == ["0 B", "1023 B", "1.0 KiB", "3.0 MiB", "80.00 GiB"]
    assert [show_count(n) for n in (999, 1000, 16_384, 494_032_768, 7_615_616_512)] == ["999", "1.00k", "16.4k", "494M", "7.62B"]


def test_trainer_of_7b_on_16_devices_by_hand() -> None:
    estimate = estimated(config_r(), QWEN25_7B)
    device = pool_of(estimate, memory.PoolKind.DEVICE, 1)
    parameters, embedding = 7_615_616_512, 152_064 * 3584
    assert estimate.shape is not None
    assert estimate.shape.parameters == parameters
    train = memory.Phase.TRAIN
    assert term(device, train, "float32 weights") == parameters // 16 * 4
    assert term(device, train, "AdamW m and v") == parameters // 16 * 8
    assert term(device, memory.Phase.OPTIMIZER_STEP, "gradients") == parameters // 16 * 4
    # 64 x 8 samples / 16 processes x 10240 tokens are many micro-batches of 16384
    assert term(device, train, "whole gradients of several micro-batches") == parameters * 4
    layer = 2 * 3584 * 3584 + 2 * 3584 * 512 + 3584 + 2 * 512 + 3 * 3584 * 18944 + 2 * 3584
    # at the head, where logits are; the last layer's weights are on their way
    assert term(device, train, "gathered weights") == (2 * embedding + 3584 + layer) * 2
    # of compiled layers, in bfloat16: input and output of two norms, queries and output, keys and values, and 3 tensors of the MLP; a
    # log-sum-exp per head, two root mean squares
    per_token = 2 * 4 * 3584 + 8 + 2 * 2 * (3584 + 512) + 3 * 2 * 18944 + 4 * 28
    assert term(device, train, "activations") == 16_384 * (28 * 3584 * 2 + per_token)
    assert term(device, train, "logits of a chunk") == 1024 * 152_064 * 8
    assert (device.count, device.limit_bytes, device.peak.phase) == (15, 80 * GIB, train)


def test_engine_of_7b_by_hand() -> None:
    estimate = estimated(config_r(), QWEN25_7B)
    engine = pool_of(estimate, memory.PoolKind.DEVICE, 16)
    weights, reserve, process = 7_615_616_512 * 2, 16_384 * 3 * (3584 + 18944) * 2 + 256 * 152_064 * 12, GIB // 2 + GIB
    (cache,) = estimate.capacities
    assert cache.kv_bytes == int(0.85 * 80 * GIB) - weights - reserve - process
    assert cache.bytes_per_token == 2 * 28 * 4 * 128 * 2
    assert cache.tokens == cache.kv_bytes // (57_344 * 16) * 16
    assert cache.full_sequences == cache.tokens // 10_240 == 91
    assert {phase.num_bytes for phase in engine.phases if phase.phase is memory.Phase.GENERATE} == {int(0.85 * 80 * GIB)}
    assert memory.problems(estimate) == []


def test_config_a_fits_on_8_devices() -> None:
    spec = job(
        nodeGroups=[{"name": "gpu", "devicesPerNode": 8, "deviceMemory": "80Gi"}],
        components=[
            {"name": "actor_train", "role": "Trainer", "placement": {"deviceMapping": "list(range(0,4))"}},
            {"name": "actor_infer", "role": "Rollout", "placement": {"deviceMapping": "list(range(4,8))"}},
            {"name": "reward", "role": "Reward", "placement": {"workers": 1}},
        ],
        model={"dtype": "bfloat16"},
        rollout={"promptsPerStep": 128, "samplesPerPrompt": 8, "maxPromptTokens": 8064, "maxResponseTokens": 128},
        training={"activationCheckpointing": True},
    )
    estimate = estimated(spec, QWEN25_05B)
    trainer = pool_of(estimate, memory.PoolKind.DEVICE, 0)
    assert estimate.shape is not None
    assert estimate.shape.parameters == 494_032_768
    assert term(trainer, memory.Phase.TRAIN, "float32 weights") == 494_032_768 // 4 * 4
    assert (memory.problems(estimate), memory.warnings(estimate)) == ([], [])


def test_layers_that_are_not_compiled_keep_more() -> None:
    estimate = estimated(config_r(training={"layerCompilation": "Disabled", "activationCheckpointing": True}), QWEN25_7B)
    device = pool_of(estimate, memory.PoolKind.DEVICE, 1)
    # of two norms a float32 input, and in bfloat16 their output and normalized input, and of the MLP also the activated half
    per_token = 2 * 8 * 3584 + 8 + 2 * 2 * (3584 + 512) + 4 * 2 * 18944 + 4 * 28
    assert term(device, memory.Phase.TRAIN, "activations") == 16_384 * (28 * 3584 * 2 + per_token)


def test_activations_are_what_makes_7b_without_checkpointing_impossible() -> None:
    (problem,) = memory.problems(estimated(config_r(training={"activationCheckpointing": False}), QWEN25_7B))
    assert problem.path == "spec.nodeGroups[0].deviceMemory"
    assert "activations 67.86 GiB (16.4k tokens x 28 layers x 158,840 B)" in problem.problem
    assert "; 15 more of a800 are too small as well" in problem.problem
    assert "training.activationCheckpointing: true" in problem.remedy


def too_big() -> RLJobSpec:
    return job(
        nodeGroups=[{"name": "small", "devicesPerNode": 8, "deviceMemory": "24Gi", "resources": {"memory": "256Gi"}}],
        components=[
            {"name": "actor_train", "role": "Trainer", "placement": {"ranks": "0-3"}},
            {"name": "actor_infer", "role": "Rollout", "placement": {"ranks": "4-7"}, "engine": {"tensorParallelSize": 4}},
            {"name": "reward", "role": "Reward", "placement": {"workers": 1}},
        ],
        model={"dtype": "bfloat16"},
    )


def shared(**engine: Any) -> RLJobSpec:
    """7B, trainer, reference and engines on the same 16 devices."""
    return config_r(
        components=[
            {"name": "actor_train", "role": "Trainer", "placement": {"ranks": "0-15"}},
            {"name": "actor_infer", "role": "Rollout", "placement": {"ranks": "0-15"}, "engine": {"memoryFraction": 0.5, **engine}},
            {"name": "reference", "role": "Reference", "placement": {"ranks": "0-15"}},
            {"name": "reward", "role": "Reward", "placement": {"workers": 8}},
        ],
    )


def test_engines_in_fp8_hold_half_of_the_layers_and_with_an_fp8_cache_twice_the_tokens() -> None:
    def engine(**arguments: str) -> tuple[dict[str, int], memory.KVCapacity]:
        found = estimated(shared(kvCacheBytes=2**30, extraArgs=arguments), QWEN25_7B)
        terms = [t for p in pool_of(found, memory.PoolKind.DEVICE, 1).phases if p.phase is memory.Phase.GENERATE for t in p.terms]
        return {t.need.name: t.num_bytes for t in terms if t.component == "actor_infer"}, found.capacities[0]

    outside = 2 * 152_064 * 3584 + 3584  # embedding, head and the last norm
    assert engine()[0]["bfloat16 weights"] == 7_615_616_512 * 2
    assert engine(quantization="fp8")[0]["fp8 weights"] == 7_615_616_512 + outside
    assert engine(quantization="fp8")[1].bytes_per_token == engine()[1].bytes_per_token
    assert engine(kv_cache_dtype="fp8")[1].bytes_per_token * 2 == engine()[1].bytes_per_token


def switching() -> RLJobSpec:
    return shared().model_copy(update={"offload": job(offload={"residency": "Switching"}).offload})


CASES = {
    "config-r": (config_r, QWEN25_7B),
    "shared-resident": (shared, QWEN25_7B),
    "shared-switching": (switching, QWEN25_7B),
    "too-big": (too_big, LLAMA_70B),
    "too-big-by-count": (too_big, None),
    "quickstart": (job, CONFIGS["the quickstart's model"]),
}


@pytest.mark.parametrize("name", CASES)
def test_the_text_is_the_golden_one(name: str, golden: Golden) -> None:
    make, config = CASES[name]
    spec = make()
    shape = memory.shape_from_count(70_553_706_496) if config is None else memory.shape_from_config(config)
    estimate = memory.estimate(spec, planned(spec), shape)
    problems, warnings = memory.problems(estimate), memory.warnings(estimate)
    text = memory.as_text(estimate) + "".join(f"problem: {p}\n" for p in problems) + "".join(f"warning: {w}\n" for w in warnings)
    assert golden.differences(GOLDEN / f"{name}.txt", text) == ""


def test_no_text_without_a_case() -> None:
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(CASES)


def test_70b_on_8_small_devices_is_refused_everywhere() -> None:
    problems = memory.problems(estimated(too_big(), LLAMA_70B))
    assert [p.path for p in problems] == [
        "spec.nodeGroups[0].deviceMemory",
        "spec.nodeGroups[0].resources.memory",
        "spec.components[1].engine",
    ]
    assert "float32 weights 65.71 GiB (70.6B x 4 B / 4)" in problems[0].problem
    assert memory.problems_of(too_big(), planned(too_big()), None) == []


def test_the_count_alone_refuses_what_cannot_fit_whatever_the_layers_are() -> None:
    spec = too_big().model_copy(update={"model": job(model={"parameterCount": 70_000_000_000}).model})
    assert next(p.path for p in memory.problems_of(spec, planned(spec), None)) == "spec.nodeGroups[0].deviceMemory"


def qwen3_32b(**training: Any) -> RLJobSpec:
    """32B on 16 devices of 80 GiB without tensor parallelism, engines beside it."""
    return config_r(training={"activationCheckpointing": True, **training})


QWEN3_32B = {
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
}


def test_whole_gradients_that_do_not_fit_are_reduced_on_each_micro_batch() -> None:
    parameters, train = 32_762_123_264, memory.Phase.TRAIN
    devices = {}
    for asked in ("Auto", "LastMicroBatch", "EachMicroBatch"):
        estimate = estimated(qwen3_32b(gradientReduction=asked), QWEN3_32B)
        devices[asked] = pool_of(estimate, memory.PoolKind.DEVICE, 0)
        problems = [p for p in memory.problems(estimate) if p.path.endswith("deviceMemory")]
        assert bool(problems) is (asked == "LastMicroBatch")
        assert all("use training.gradientReduction: EachMicroBatch" in p.remedy for p in problems)
        assert ("training.gradientReduction: Auto is EachMicroBatch here" in "".join(estimate.notes)) is (asked == "Auto")
    assert term(devices["LastMicroBatch"], train, "whole gradients of several micro-batches") == parameters * 4
    assert term(devices["EachMicroBatch"], train, "gradients") == -(-parameters // 16) * 4
    assert devices["Auto"] == devices["EachMicroBatch"]


def test_gradients_that_fit_or_of_unknown_size_are_reduced_once() -> None:
    spec, plan = config_r(), planned(config_r())
    last, each = GradientReduction.LAST_MICRO_BATCH, GradientReduction.EACH_MICRO_BATCH
    assert memory.chosen_reduction(spec, plan, memory.shape_from_config(QWEN25_7B)) is last
    assert memory.chosen_reduction(spec, plan, None) is last
    assert memory.chosen_reduction(qwen3_32b(), plan, memory.shape_from_config(QWEN3_32B)) is each
    assert memory.chosen_reduction(qwen3_32b(gradientReduction="EachMicroBatch"), plan, None) is each
    tiny = qwen3_32b(miniBatches=64)  # one micro-batch an update is not whole anywhere; what is left too large is something else
    assert memory.chosen_reduction(tiny, plan, memory.shape_from_count(10**12)) is last


def test_switching_holds_one_component_at_a_time() -> None:
    resident, switched = estimated(shared(memoryFraction=0.54), QWEN25_7B), estimated(switching(), QWEN25_7B)
    assert memory.warnings(resident)
    assert not memory.problems(switched) + memory.warnings(switched)
    device = pool_of(switched, memory.PoolKind.DEVICE, 1)
    training = {
        t.component for p in device.phases if p.phase is memory.Phase.TRAIN for t in p.terms if t.need.kind is not memory.Kind.PROCESS
    }
    assert training == {"actor_train"}


def test_what_may_never_leave_stays_while_others_compute() -> None:
    components = [
        {"name": "actor_train", "role": "Trainer", "placement": {"ranks": "0-15"}, "offload": {"optimizer": "Never"}},
        {"name": "actor_infer", "role": "Rollout", "placement": {"ranks": "0-15"}},
        {"name": "reward", "role": "Reward", "placement": {"workers": 8}},
    ]
    spec = config_r(components=components, offload={"residency": "Switching"})
    device = pool_of(estimated(spec, QWEN25_7B), memory.PoolKind.DEVICE, 1)
    assert term(device, memory.Phase.GENERATE, "AdamW m and v") == 7_615_616_512 // 16 * 8


def trainer_offload(**policies: str) -> RLJobSpec:
    """7B, trainer and engines on the same 16 devices, switching."""
    return config_r(
        components=[
            {"name": "actor_train", "role": "Trainer", "placement": {"ranks": "0-15"}, "offload": policies},
            {"name": "actor_infer", "role": "Rollout", "placement": {"ranks": "0-15"}},
            {"name": "reward", "role": "Reward", "placement": {"workers": 8}},
        ],
        offload={"residency": "Switching"},
    )


@pytest.mark.parametrize(
    ("policy", "phases"),
    [
        ("Auto", {"train", "optimizer step"}),
        ("Always", {"optimizer step"}),
        ("Never", {"start-up", "generate", "train", "optimizer step", "weight sync"}),
    ],
)
def test_when_the_optimizer_is_on_a_shared_device(policy: str, phases: set[str]) -> None:
    device = pool_of(estimated(trainer_offload(optimizer=policy), QWEN25_7B), memory.PoolKind.DEVICE, 1)
    assert {p.phase for p in device.phases if any(t.need.kind is memory.Kind.OPTIMIZER for t in p.terms)} == phases


@pytest.mark.parametrize(
    ("policies", "per_parameter"), [({}, 12), ({"weight": "Never"}, 8), ({"optimizer": "Never"}, 4), ({"weight": "Always"}, 12)]
)
def test_state_that_leaves_a_device_needs_room_on_its_node(policies: dict[str, str], per_parameter: int) -> None:
    """Eight of sixteen trainer processes are on a node; engines copy nothing."""
    node = pool_of(estimated(trainer_offload(**policies), QWEN25_7B), memory.PoolKind.NODE, 1)
    (train,) = [p for p in node.phases if p.phase is memory.Phase.TRAIN]
    kept = sum(t.num_bytes for t in train.terms if t.need.name.endswith("in host memory"))
    assert kept == 8 * -(-7_615_616_512 // 16) * per_parameter
    assert {t.component for t in train.terms} == {"actor_train"}


@pytest.mark.parametrize(("more_bytes", "problems"), [(-1, ["spec.offload.hostMemoryBytes"]), (0, [])])
def test_host_memory_for_offloaded_state_has_to_suffice(more_bytes: int, problems: list[str]) -> None:
    needed = 8 * -(-7_615_616_512 // 16) * 12
    spec = trainer_offload()
    offload = spec.offload.model_copy(update={"host_memory_bytes": needed + more_bytes})
    found = memory.problems(estimated(spec.model_copy(update={"offload": offload}), QWEN25_7B))
    assert [problem.path for problem in found] == problems
    assert all(f"raise it to {needed} or more" in problem.remedy for problem in found)


def test_policies_that_switch_start_together_before_engines_do() -> None:
    """Trainer and reference load at once; engines find the devices empty but for the processes."""
    device = pool_of(estimated(switching(), QWEN25_7B), memory.PoolKind.DEVICE, 1)
    start = next(p for p in device.phases if p.phase is memory.Phase.START_UP)
    kinds = {(t.component, t.need.kind) for t in start.terms}
    assert {kind for component, kind in kinds if component != "actor_infer"} == {memory.Kind.PROCESS}
    small = shared(kvCacheBytes=2**20, enforceEager=True, tensorParallelSize=8)
    small = small.model_copy(update={"offload": switching().offload})
    device = pool_of(memory.estimate(small, planned(small), memory.shape_from_count(7 * 10**10)), memory.PoolKind.DEVICE, 1)
    start = next(p for p in device.phases if p.phase is memory.Phase.START_UP)
    assert {t.component for t in start.terms if t.need.kind is memory.Kind.WEIGHT} == {"actor_train", "reference"}


def test_engines_that_want_more_than_a_device_need_no_model() -> None:
    spec = config_r(
        components=[
            {"name": "actor_train", "role": "Trainer", "placement": {"ranks": "0"}},
            {"name": "fast", "role": "Rollout", "placement": {"ranks": "1-8"}, "engine": {"memoryFraction": 0.5}},
            {"name": "slow", "role": "Rollout", "placement": {"ranks": "8-9"}, "engine": {"memoryFraction": 0.6}},
            {"name": "reward", "role": "Reward", "placement": {"workers": 1}},
        ]
    )
    (problem,) = memory.problems_of(spec, planned(spec), None)
    assert (problem.path, problem.value) == ("spec.components[2].engine.memoryFraction", "0.6")
    assert problem.problem == "engines on device 8 take fast 0.5 + slow 0.6 = 1.1 of its memory, more than there is"


def test_many_engines_on_one_device_are_summed_up() -> None:
    spec = config_r(
        components=[
            {"name": "actor_train", "role": "Trainer", "placement": {"ranks": "0"}},
            {"name": "many", "role": "Rollout", "placement": {"ranks": "1-2:0-20"}, "engine": {"memoryFraction": 0.25}},
            {"name": "reward", "role": "Reward", "placement": {"workers": 1}},
        ]
    )
    (problem,) = memory.problems_of(spec, planned(spec), None)
    eight = " + ".join(["many 0.25"] * 8)
    assert problem.problem == f"engines on device 1 take {eight} + 3 more = 2.75 of its memory, more than there is"
    on_devices, on_nodes = situations(planned(spec), {})
    assert [(s.first, s.count, s.residents) for s in on_devices] == [
        (0, 1, (((0, True), 1),)),
        (1, 1, (((1, False), 11),)),
        (2, 1, (((1, False), 10),)),
    ]
    assert [(s.first, s.count, s.residents) for s in on_nodes] == [(0, 1, (((0, True), 1), ((1, False), 21)))]


def test_a_cache_without_room_for_one_request_is_refused_and_a_crowded_one_warned_of() -> None:
    def caches(kv_bytes: int) -> tuple[list[FieldError], list[FieldError]]:
        components = manifest()["spec"]["components"]
        components[1]["engine"] = {"kvCacheBytes": kv_bytes}
        estimate = estimated(job(components=components), CONFIGS["the quickstart's model"])
        return memory.problems(estimate), memory.warnings(estimate)

    # 2 layers x (key + value) x 2 heads x 32 x 4 B = 1024 B a token, 2048 tokens in blocks of 128
    per_request = 2048 * 1024
    problems, warnings = caches(per_request - 1)
    assert [p.path for p in problems] == ["spec.components[1].engine"]
    assert (
        "which holds 1,920 tokens of 1,024 B, but one request may have maxPromptTokens + maxResponseTokens = 2,048" in problems[0].problem
    )
    assert warnings == []
    problems, warnings = caches(per_request)
    assert problems == []
    assert "256 requests of 1,536 tokens" in warnings[0].problem
    assert caches(256 * 1536 * 1024) == ([], [])


def test_devices_that_only_count_share_the_memory_of_their_node() -> None:
    group = {"name": "local", "devicesPerNode": 2, "deviceResource": "cpu"}

    def with_memory(quantity: str) -> memory.MemoryEstimate:
        return estimated(job(nodeGroups=[{**group, "resources": {"memory": quantity}}]), CONFIGS["the quickstart's model"])

    (pool,) = with_memory("64Gi").pools
    assert pool.kind is memory.PoolKind.NODE
    assert {t.component for t in pool.peak.terms} == {"actor_train", "actor_infer"}
    assert memory.problems(with_memory("64Gi")) == []
    (problem,) = memory.problems(with_memory("1Gi"))
    assert (problem.path, problem.value) == ("spec.nodeGroups[0].resources.memory", '"1Gi"')
    budget = estimated(job(nodeGroups=[{**group, "deviceMemory": "100Mi"}]), CONFIGS["the quickstart's model"])
    assert [p.path for p in memory.problems(budget)] == ["spec.nodeGroups[0].deviceMemory"]


def test_a_limit_that_is_not_given_is_not_checked() -> None:
    spec = config_r(nodeGroups=[{"name": "a800", "nodes": 3, "devicesPerNode": 8}])
    estimate = estimated(spec, LLAMA_70B)
    assert memory.problems(estimate) == []
    assert estimate.pools
    assert any("deviceMemory is not set" in note for note in estimate.notes)


def test_a_tight_device_is_a_warning() -> None:
    training = {"activationCheckpointing": True, "gradientReduction": "LastMicroBatch"}
    limit = pool_of(estimated(config_r(training=training), QWEN25_7B), memory.PoolKind.DEVICE, 0).peak.num_bytes
    groups = [
        {"name": "train", "nodes": 2, "devicesPerNode": 8, "deviceMemory": str(limit * 100 // 95)},
        {"name": "infer", "devicesPerNode": 8, "deviceMemory": "80Gi"},
    ]
    estimate = estimated(config_r(nodeGroups=groups, training=training), QWEN25_7B)
    assert memory.problems(estimate) == []
    (warning,) = memory.warnings(estimate)
    assert warning.path == "spec.nodeGroups[0].deviceMemory"
    assert "which is 95%" in warning.problem


def test_the_document_is_plain_data_that_adds_up() -> None:
    document = json.loads(json.dumps(memory.as_document(estimated(shared(), QWEN25_7B))))
    assert document["parameters"] == 7_615_616_512
    for pool in document["pools"]:
        for phase in pool["phases"]:
            assert phase["bytes"] == sum(t["bytes"] for t in phase["terms"])
        assert pool["peakBytes"] == max(phase["bytes"] for phase in pool["phases"])


def test_many_devices_take_little_time_and_text() -> None:
    spec = job(
        nodeGroups=[{"name": "big", "nodes": 1024, "devicesPerNode": 24, "deviceMemory": "80Gi"}],
        components=[
            {"name": "actor_train", "role": "Trainer", "placement": {"ranks": "all"}},
            {"name": "actor_infer", "role": "Rollout", "placement": {"ranks": "all"}},
            {"name": "reward", "role": "Reward", "placement": {"workers": 1}},
        ],
        model={"dtype": "bfloat16"},
    )
    plan, shape = planned(spec), memory.shape_from_config(QWEN25_7B)
    with within(0.5):
        estimate = memory.estimate(spec, plan, shape)
    assert sum(pool.count for pool in estimate.pools if pool.kind is memory.PoolKind.DEVICE) == 24_576
    assert len(memory.as_text(estimate)) < 5000
