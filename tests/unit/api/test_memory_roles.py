"""The memory estimate of critics, of adapters, of moments and of routes: by hand for Qwen2.5-7B, whose head is not tied."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rljob_api import memory, planner
from rljob_api.errors import SpecInvalidError
from rljob_api.planning.plan import Plan
from rljob_api.v1alpha1 import RLJob, RLJobSpec
from rljob_api.v1alpha1.nodes import NodeGroup
from rljob_api.validation import check
from tests.unit.api.manifests import manifest
from tests.unit.api.model_configs import CONFIGS, QWEN25_7B

PARAMETERS, HEAD, LAYER = 7_615_616_512, 152_064 * 3584, 233_057_792
HIDDEN, QUERY, KV, INNER, LAYERS = 3584, 3584, 512, 18_944, 28
CRITIC = {"name": "critic", "role": "Critic", "placement": {"ranks": "2-3"}}
REFERENCE = {"name": "reference", "role": "Reference", "placement": {"ranks": "2-3"}}
TRAIN, TRAIN_CRITIC = memory.Phase.TRAIN, memory.Phase.TRAIN_CRITIC


def planned_job(*components: dict[str, Any], **sections: Any) -> tuple[RLJobSpec, Plan]:
    """A job on six devices of 80 GiB: a Trainer on 0 and 1, engines on 4 and 5, further components."""
    document = manifest()
    spec = document["spec"]
    spec["nodeGroups"] = [{"name": "gpu", "devicesPerNode": 6, "deviceMemory": "80Gi"}]
    spec["components"][0]["placement"]["ranks"] = "0-1"
    spec["components"][1]["placement"]["ranks"] = "4-5"
    spec["components"] += components
    spec["training"] = {"activationCheckpointing": True}
    for key, value in sections.items():
        spec[key] = {**spec.get(key, {}), **value}
    spec["model"]["dtype"] = "bfloat16"
    parsed = RLJob.model_validate_json(json.dumps(document)).spec
    plan = planner.plan_or_errors(parsed)
    assert isinstance(plan, Plan), plan
    return parsed, plan


def estimated(*components: dict[str, Any], vocab_size: int = 152_064, **sections: Any) -> memory.MemoryEstimate:
    """Of :func:`planned_job`."""
    spec, plan = planned_job(*components, **sections)
    return memory.estimate(spec, plan, memory.shape_from_config({**QWEN25_7B, "vocab_size": vocab_size}))


def device(estimate: memory.MemoryEstimate, first: int) -> memory.PoolEstimate:
    return next(pool for pool in estimate.pools if pool.kind is memory.PoolKind.DEVICE and pool.first == first)


def terms(pool: memory.PoolEstimate, phase: memory.Phase, component: str) -> dict[str, int]:
    (found,) = [one for one in pool.phases if one.phase is phase]
    return {term.need.name: term.num_bytes for term in found.terms if term.component == component}


def test_a_critic_trains_the_layers_and_has_no_logits() -> None:
    pool = device(estimated(CRITIC), 2)
    training, body = terms(pool, TRAIN_CRITIC, "critic"), PARAMETERS - HEAD
    assert training["float32 weights"] == body // 2 * 4
    assert training["AdamW m and v"] == body // 2 * 8
    assert training["gathered weights"] == (HEAD + HIDDEN + 2 * LAYER) * 2
    assert terms(pool, memory.Phase.CRITIC_STEP, "critic")["gradients"] == body // 2 * 4
    assert not {"logits of a chunk", "gradient of the head", "weight buckets"} & set(training)
    assert {one.phase for one in pool.phases} == {memory.Phase.START_UP, TRAIN_CRITIC, memory.Phase.CRITIC_STEP}


def test_tensor_parallel_processes_have_each_what_makes_latents() -> None:
    config = CONFIGS["deepseek_v3"] | {"num_key_value_heads": 4}
    spec, plan = planned_job(training={"tensorParallelSize": 2})
    shape = memory.shape_from_config(config)
    found = terms(device(memory.estimate(spec, plan, shape), 0), TRAIN, "actor_train")
    latents = 64 * (20 + 24 + 8) + 20 + 24  # two projections and two norms
    assert found["float32 weights"] == (shape.parameters + 3 * latents) // 2 * 4
    assert found["gathered weights"] == (shape.parameters + shape.decoder.expert_parameters + 3 * latents) // 2 * 2  # type: ignore[union-attr]


def test_a_critics_own_token_budget_bounds_its_activations_alone() -> None:
    smaller = {"advantage": {"estimator": "GAE"}, "critic": {"microBatchTokens": 4096}}
    shared, own = estimated(CRITIC), estimated(CRITIC, algorithm=smaller)
    activations = [terms(device(e, 2), TRAIN_CRITIC, "critic")["activations"] for e in (shared, own)]
    assert activations[0] == 4 * activations[1]  # 16384 tokens is the default
    assert terms(device(shared, 0), TRAIN, "actor_train") == terms(device(own, 0), TRAIN, "actor_train")
    (pool,) = [one for one in device(own, 2).phases if one.phase is TRAIN_CRITIC]
    remedies = {term.need.name: term.need.remedy for term in pool.terms}
    assert remedies["activations"] == "a smaller algorithm.critic.microBatchTokens"


def test_tensor_parallelism_of_the_trainer_divides_nobody_else() -> None:
    estimate = estimated(CRITIC, training={"tensorParallelSize": 2})
    assert terms(device(estimate, 2), TRAIN_CRITIC, "critic")["gathered weights"] == (HEAD + HIDDEN + 2 * LAYER) * 2
    trainer = terms(device(estimate, 0), TRAIN, "actor_train")
    assert trainer["gathered weights"] == (2 * HEAD + HIDDEN) * 2 // 2  # the head is the fullest moment
    # two processes divide the vocabulary of 152064, and a layer's inner channels
    assert trainer["gradient of the head"] == HEAD // 2 * 6
    many = estimated(CRITIC, training={"tensorParallelSize": 2, "microBatchTokens": 131_072})  # then a layer's backward is
    trainer = terms(device(many, 0), TRAIN, "actor_train")
    assert trainer["gathered weights"] == (2 * HEAD + HIDDEN + LAYER) * 2 // 2  # without data parallelism nothing is gathered ahead
    assert trainer["gradients flowing through a layer"] % (2 * (HIDDEN + INNER // 2) * 2) == 0


def test_context_parallelism_of_the_trainer_divides_its_activations_alone() -> None:
    long = {"maxPromptTokens": 1024, "maxResponseTokens": 32_768 - 1024}
    estimates = [estimated(CRITIC, training={"contextParallelSize": size}, rollout=long) for size in (1, 2)]
    whole, shared = (terms(device(estimate, 0), TRAIN, "actor_train") for estimate in estimates)
    assert {name for name in whole if whole[name] != shared[name]} >= {"activations", "last hidden states"}
    assert whole["last hidden states"] == 2 * shared["last hidden states"]
    assert whole["float32 weights"] == shared["float32 weights"]
    assert whole["gathered weights"] == shared["gathered weights"]
    critics = [terms(device(estimate, 2), TRAIN_CRITIC, "critic") for estimate in estimates]
    assert critics[0] == critics[1]


def test_expert_parallelism_of_the_trainer_divides_gathered_experts_and_whole_gradients() -> None:
    config = json.loads(json.dumps(CONFIGS["qwen3_moe, all sparse"])) | {"num_experts": 64, "moe_intermediate_size": 4096}
    shape = memory.shape_from_config(config)
    found = []
    for size in (1, 2):
        spec, plan = planned_job(CRITIC, training={"expertParallelSize": size, "microBatchTokens": 4096})
        estimate = memory.estimate(spec, plan, shape)
        found.append((terms(device(estimate, 0), TRAIN, "actor_train"), terms(device(estimate, 2), TRAIN_CRITIC, "critic")))
    (whole, critic), (divided, same) = found
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    layer = 64 * 3 * hidden * 4096
    assert critic == same
    assert whole["float32 weights"] == divided["float32 weights"]
    assert whole["AdamW m and v"] == divided["AdamW m and v"]
    name = "whole gradients of several micro-batches"
    assert whole[name] - divided[name] == layers * layer // 2 * 4
    assert whole["gathered weights"] - divided["gathered weights"] == min(2, layers) * layer // 2 * 2
    flowing, tokens = "gradients flowing through a layer", 4096
    exchanged = 2 * config["num_experts_per_tok"] * hidden * 2
    assert divided[flowing] - whole[flowing] == tokens * exchanged


def test_tensor_parallelism_of_a_mixture_leaves_experts_whole_and_divides_their_rows() -> None:
    config = json.loads(json.dumps(CONFIGS["qwen3_moe, all sparse"])) | {"num_experts": 64, "moe_intermediate_size": 4096}
    shape, hidden, layers = memory.shape_from_config(config), config["hidden_size"], config["num_hidden_layers"]
    found = []
    for tensor, experts in ((1, 1), (2, 1), (2, 2)):
        sizes = {"tensorParallelSize": tensor, "expertParallelSize": experts}
        spec, plan = planned_job(CRITIC, training={**sizes, "microBatchTokens": 4096})
        found.append(terms(device(memory.estimate(spec, plan, shape), 0), TRAIN, "actor_train"))
    whole, divided, both = found
    assert whole["float32 weights"] == divided["float32 weights"] == both["float32 weights"], "over as many processes"
    of_layers = layers * 64 * 3 * hidden * 4096
    dense = shape.parameters - of_layers
    name = "whole gradients of several micro-batches"
    assert [one[name] for one in found] == [4 * (dense + of_layers), 4 * (dense // 2 + of_layers), 4 * (dense // 2 + of_layers // 2)]
    rows = 2 * config["num_experts_per_tok"] * hidden * 2 // 2
    flowing = "gradients flowing through a layer"
    assert both[flowing] - divided[flowing] == 4096 * rows
    assert divided["activations"] < 0.7 * whole["activations"]


def test_a_critic_divides_its_activations_by_a_context_parallel_size_of_its_own() -> None:
    long = {"maxPromptTokens": 1024, "maxResponseTokens": 32_768 - 1024}
    estimates = [estimated({**CRITIC, **size}, rollout=long) for size in ({}, {"contextParallelSize": 2})]
    whole, shared = (terms(device(estimate, 2), TRAIN_CRITIC, "critic") for estimate in estimates)
    assert 0.5 * whole["activations"] <= shared["activations"] < 0.55 * whole["activations"], "outputs of the attention exist twice"
    assert whole["gathered weights"] == shared["gathered weights"]
    trainers = [terms(device(estimate, 0), TRAIN, "actor_train") for estimate in estimates]
    assert trainers[0] == trainers[1]
    remedies = [
        {term.need.name: term.need.remedy for one in device(e, 2).phases if one.phase is TRAIN_CRITIC for term in one.terms}
        for e in estimates
    ]
    assert remedies[0]["activations"].endswith(", a larger contextParallelSize of that component")
    assert "contextParallelSize" not in remedies[1]["activations"], "two processes hold a sequence"


def test_expert_parallelism_of_other_roles_divides_the_experts_that_they_gather() -> None:
    config = json.loads(json.dumps(CONFIGS["qwen3_moe, all sparse"])) | {"num_experts": 64, "moe_intermediate_size": 4096}
    shape, hidden, layers = memory.shape_from_config(config), config["hidden_size"], config["num_hidden_layers"]
    of_layer = 64 * 3 * hidden * 4096 * 2
    for role, phase, name in ((CRITIC, TRAIN_CRITIC, "critic"), (REFERENCE, memory.Phase.SCORE, "reference")):
        found = []
        for size in (1, 2):
            spec, plan = planned_job({**role, "expertParallelSize": size}, training={"microBatchTokens": 4096})
            found.append(terms(device(memory.estimate(spec, plan, shape), 2), phase, name))
        whole, divided = found
        assert whole["gathered weights"] - divided["gathered weights"] == min(2, layers) * of_layer // 2
    rows = config["num_experts_per_tok"] * hidden * 2
    assert divided["one layer's activations"] - whole["one layer's activations"] == 4096 * rows, "on their way back"


def test_a_critic_divides_its_layers_by_a_size_of_its_own() -> None:
    pools = [device(estimated({**CRITIC, **size}), 2) for size in ({}, {"tensorParallelSize": 2})]
    whole, divided = (terms(pool, TRAIN_CRITIC, "critic") for pool in pools)
    assert divided["float32 weights"] == whole["float32 weights"], "over as many processes"
    assert divided["gathered weights"] == (HEAD + HIDDEN + LAYER) * 2 // 2  # without data parallelism nothing is gathered ahead
    assert divided["activations"] < whole["activations"]
    assert not {"logits of a chunk", "gradient of the head"} & set(divided)


def test_a_reference_divides_its_layers_by_a_size_of_its_own() -> None:
    kl = {"kl": {"coefficient": 0.1}}
    found = terms(device(estimated({**REFERENCE, "tensorParallelSize": 2}, algorithm=kl), 2), memory.Phase.SCORE, "reference")
    assert found["gathered weights"] == (2 * HEAD + HIDDEN + 2 * LAYER) * 2 // 2
    assert found["bfloat16 weights"] == PARAMETERS // 2 * 2
    whole = terms(device(estimated(REFERENCE, algorithm=kl), 2), memory.Phase.SCORE, "reference")
    assert found["logits of a chunk"] * 2 == whole["logits of a chunk"]


def test_a_reference_divides_its_sequences_by_a_size_of_its_own() -> None:
    long, kl = {"maxPromptTokens": 1024, "maxResponseTokens": 32_768 - 1024}, {"kl": {"coefficient": 0.1}}
    pools = [device(estimated({**REFERENCE, **size}, algorithm=kl, rollout=long), 2) for size in ({}, {"contextParallelSize": 2})]
    whole, shared = (terms(pool, memory.Phase.SCORE, "reference") for pool in pools)
    assert whole["last hidden states"] == 2 * shared["last hidden states"]
    assert whole["bfloat16 weights"] == shared["bfloat16 weights"]


def test_a_reference_is_whole_on_each_process() -> None:
    kl = {"kl": {"coefficient": 0.1}}
    score, sizes = memory.Phase.SCORE, []
    for tensor in (1, 2):
        pool = device(estimated(REFERENCE, algorithm=kl, training={"tensorParallelSize": tensor}), 2)
        sizes.append(terms(pool, score, "reference"))
    assert sizes[0]["gathered weights"] == (2 * HEAD + HIDDEN + 2 * LAYER) * 2
    assert sizes[0]["bfloat16 weights"] == PARAMETERS // 2 * 2
    assert sizes[0] == sizes[1]


def test_logits_are_divided_over_the_vocabulary() -> None:
    estimate = estimated(training={"tensorParallelSize": 2})
    divided = terms(device(estimate, 0), TRAIN, "actor_train")["logits of a chunk"]
    whole = terms(device(estimated(), 0), TRAIN, "actor_train")["logits of a chunk"]
    assert divided * 2 == whole
    odd = terms(device(estimated(vocab_size=152_063, training={"tensorParallelSize": 2}), 0), TRAIN, "actor_train")
    assert odd["logits of a chunk"] * 152_064 == whole * 152_063
    assert odd["gradient of the head"] == 152_063 * HIDDEN * 6


def test_a_critic_on_the_trainers_devices_takes_turns_with_it() -> None:
    beside = {**CRITIC, "placement": {"ranks": "0-1"}}
    alone = device(estimated(CRITIC), 0)
    switching = device(estimated(beside, offload={"residency": "Switching"}), 0)
    resident = device(estimated(beside), 0)
    assert terms(switching, TRAIN, "actor_train") == terms(alone, TRAIN, "actor_train")
    assert set(terms(switching, TRAIN, "critic")) == {"CUDA context and NCCL"}
    assert {"float32 weights", "AdamW m and v"} < set(terms(resident, TRAIN, "critic"))
    assert resident.peak.num_bytes > switching.peak.num_bytes


def test_an_optimizer_that_comes_for_its_step_alone_is_there_for_the_critics_too() -> None:
    beside = {**CRITIC, "placement": {"ranks": "0-1"}, "offload": {"optimizer": "Always"}}
    pool = device(estimated(beside, offload={"residency": "Switching"}), 0)
    assert "AdamW m and v" not in terms(pool, TRAIN_CRITIC, "critic")
    assert "AdamW m and v" in terms(pool, memory.Phase.CRITIC_STEP, "critic")


def test_adapters_leave_the_weights_frozen_in_the_dtype_of_the_computation() -> None:
    pool = device(estimated(model={"lora": {"rank": 8}}), 0)
    sizes = [HIDDEN + QUERY, 2 * (HIDDEN + KV), QUERY + HIDDEN, 3 * (HIDDEN + INNER)]
    adapters = LAYERS * 8 * sum(sizes)
    training = terms(pool, TRAIN, "actor_train")
    assert training["bfloat16 weights"] == PARAMETERS // 2 * 2
    assert training["float32 adapters"] == adapters // 2 * 4
    assert training["AdamW m and v of adapters"] == adapters // 2 * 8
    # many micro-batches are added up before they are exchanged
    assert training["gradients of adapters"] == adapters * 4
    assert training["merged weight"] == HIDDEN * INNER * 6
    assert not {"float32 weights", "AdamW m and v", "gradient of the head"} & set(training)


def test_moments_in_bfloat16_are_half_and_come_by_stretches() -> None:
    half = {"optimizerStateDtype": "bfloat16"}
    estimate = estimated(CRITIC, training=half)
    whole = estimated(CRITIC)
    assert terms(device(estimate, 0), TRAIN, "actor_train")["AdamW m and v"] == PARAMETERS // 2 * 4
    assert terms(device(estimate, 2), TRAIN_CRITIC, "critic")["AdamW m and v"] == (PARAMETERS - HEAD) // 2 * 4
    stepped = terms(device(estimate, 0), memory.Phase.OPTIMIZER_STEP, "actor_train")
    assert stepped["moments being stepped"] == 2**23 * 2 * 8
    assert stepped.keys() - {"moments being stepped"} == terms(device(whole, 0), memory.Phase.OPTIMIZER_STEP, "actor_train").keys()
    few = estimated(model={"lora": {"rank": 8, "targetModules": ["q_proj"]}}, training=half)
    adapters = LAYERS * 8 * (HIDDEN + QUERY)
    stepped = terms(device(few, 0), memory.Phase.OPTIMIZER_STEP, "actor_train")
    assert stepped["AdamW m and v of adapters"] == adapters // 2 * 4
    assert stepped["moments being stepped"] == adapters // 2 * 16, "no more than there is"


def test_adapters_of_some_layers_and_the_models_that_have_none() -> None:
    model = {"lora": {"rank": 8, "targetModules": ["q_proj", "v_proj"]}}
    estimate = estimated(CRITIC, model=model)
    few = LAYERS * 8 * (HIDDEN + QUERY + HIDDEN + KV)
    assert terms(device(estimate, 0), TRAIN, "actor_train")["float32 adapters"] == few // 2 * 4
    assert terms(device(estimate, 2), TRAIN_CRITIC, "critic")["float32 weights"] == (PARAMETERS - HEAD) // 2 * 4


def test_served_adapters_travel_alone_and_lie_padded_in_the_engine() -> None:
    def at_sync(**weight_sync: str) -> dict[str, int]:
        estimate, sync = estimated(model={"lora": {"rank": 12}}, weightSync=weight_sync), memory.Phase.WEIGHT_SYNC
        return terms(device(estimate, 0), sync, "actor_train") | terms(device(estimate, 4), sync, "actor_infer")

    sizes = [HIDDEN + QUERY, 2 * (HIDDEN + KV), QUERY + HIDDEN, 3 * (HIDDEN + INNER)]
    merged, served = at_sync(), at_sync(adapters="Served")
    assert "adapters" not in merged
    assert served["adapters"] == LAYERS * 16 * sum(sizes) * 2
    assert served["weight buckets"] < merged["weight buckets"]


@pytest.mark.parametrize(
    ("weight_sync", "kept", "buckets", "on_host"),
    [
        ({"backend": "NCCL"}, (PARAMETERS * 2, 0), (3, 0), 0),
        ({"backend": "NCCL", "senders": "Every"}, (PARAMETERS, PARAMETERS), (3, 3), 0),
        ({"backend": "IPC"}, (PARAMETERS * 2, PARAMETERS * 2), (2, 2), 0),
        ({"backend": "TCP"}, (0, 0), (3, 0), PARAMETERS * 2),
        ({"backend": "TCP", "senders": "Every"}, (0, 0), (3, 3), PARAMETERS * 2),
    ],
)
def test_senders_of_changes_keep_what_they_sent_on_their_devices_or_beside_them(
    weight_sync: dict[str, Any], kept: tuple[int, int], buckets: tuple[int, int], on_host: int
) -> None:
    """At all times; and buckets more while they compare, see ``SyncNeeds.buffers``."""
    whole, sparse = estimated(weightSync=weight_sync), estimated(weightSync={**weight_sync, "delta": {}})
    for rank, expected in enumerate(kept):
        for phase in (TRAIN, memory.Phase.WEIGHT_SYNC):
            found = terms(device(sparse, rank), phase, "actor_train")
            assert found.get("weights as last sent", 0) == expected
        more = found["weight buckets"] - terms(device(whole, rank), memory.Phase.WEIGHT_SYNC, "actor_train")["weight buckets"]
        assert more == buckets[rank] * HEAD * 2  # the embedding is the largest bucket
    nodes = [pool for pool in sparse.pools if pool.kind is memory.PoolKind.NODE]
    of_sync = [phase for pool in nodes for phase in pool.phases if phase.phase is memory.Phase.WEIGHT_SYNC]
    kept_there = [term.num_bytes for phase in of_sync for term in phase.terms if term.need.name == "weights as last sent"]
    assert sum(kept_there) == on_host


def test_on_cpu_what_was_sent_is_in_the_senders_own_memory() -> None:
    spec, plan = planned_job(weightSync={"backend": "TCP", "delta": {}})
    group = {"name": "gpu", "devicesPerNode": 6, "deviceMemory": "80Gi", "deviceResource": "cpu"}
    spec = spec.model_copy(update={"node_groups": (NodeGroup.model_validate(group),)})
    estimate = memory.estimate(spec, plan, memory.shape_from_config(QWEN25_7B))
    assert terms(device(estimate, 0), memory.Phase.WEIGHT_SYNC, "actor_train")["weights as last sent"] == PARAMETERS * 2


SMALL = {**QWEN25_7B, "num_hidden_layers": 4}
JUDGE, SCORE = memory.Phase.JUDGE, memory.Phase.SCORE


def judge(name: str, ranks: str, **model: Any) -> dict[str, Any]:
    return {"name": name, "role": "Judge", "placement": {"ranks": ranks}, "model": {"path": name, **model}}


def served(*components: dict[str, Any], shapes: dict[str, memory.ModelShape] | None = None, **sections: Any) -> memory.MemoryEstimate:
    """As :func:`estimated`, with the sizes of components' own models."""
    spec, plan = planned_job(*components, **sections)
    return memory.estimate(spec, plan, memory.shape_from_config(QWEN25_7B), shapes)


def test_a_judge_has_the_weights_of_its_own_model_and_an_engines_cache() -> None:
    small = memory.shape_from_config(SMALL)
    pool = device(served(judge("grader", "2"), shapes={"grader": small}), 2)
    found = terms(pool, JUDGE, "grader")
    assert found["bfloat16 weights"] == 2 * small.parameters
    assert found["KV cache"] == 64 * 2**30 - sum(size for name, size in found.items() if name != "KV cache")
    assert {one.phase for one in pool.phases} == {memory.Phase.START_UP, JUDGE}, "no update of the policy's weights comes to it"


def test_a_judge_of_unknown_size_is_named_with_the_field_that_would_say_it() -> None:
    unknown, declared = served(judge("grader", "2")), served(judge("grader", "2", parameterCount=10**9))
    (note,) = [note for note in unknown.notes if "grader" in note]
    assert note.endswith("set spec.components[3].model.parameterCount")
    assert not any("grader" in note for note in declared.notes)
    assert terms(device(declared, 2), JUDGE, "grader")["bfloat16 weights"] == 2 * 10**9


def test_judges_that_leave_their_device_score_one_after_the_other_and_keep_their_weights_in_host_memory() -> None:
    small, large = memory.shape_from_config(SMALL), memory.shape_from_config(QWEN25_7B)
    both = (judge("large", "0"), judge("small", "0"))
    found = served(*both, shapes={"large": large, "small": small}, offload={"residency": "Switching"})
    assert not memory.problems(found)
    pool = device(found, 0)
    assert {"bfloat16 weights", "KV cache"} < set(terms(pool, JUDGE, "large"))
    assert set(terms(pool, JUDGE, "small")) == {"CUDA context, graphs"}
    assert set(terms(pool, JUDGE, "actor_train")) == {"CUDA context and NCCL"}
    host = next(one for one in found.pools if one.kind is memory.PoolKind.NODE)
    kept = terms(host, memory.Phase.WEIGHT_SYNC, "large")
    assert kept == {"bfloat16 weights in host memory": 2 * large.parameters}


def test_a_judge_that_stays_shares_the_memory_with_the_engine_of_its_device() -> None:
    problem, overfull = memory.problems(served(judge("grader", "4", parameterCount=10**9)))
    assert overfull.path == "spec.nodeGroups[0].deviceMemory"
    assert problem.problem == "engines on device 4 take actor_infer 0.8 + grader 0.8 = 1.6 of its memory, more than there is"
    assert problem.path == "spec.components[3].engine.memoryFraction"


def test_a_teacher_is_a_reference_with_another_model() -> None:
    teacher = {"name": "teacher", "role": "Teacher", "placement": {"ranks": "2-3"}, "model": {"path": "larger"}}
    shape = memory.shape_from_config({**QWEN25_7B, "num_hidden_layers": 56})
    found = terms(device(served(teacher, shapes={"teacher": shape}), 2), SCORE, "teacher")
    assert found["bfloat16 weights"] == shape.parameters // 2 * 2
    assert found["gathered weights"] == (2 * HEAD + HIDDEN + 2 * LAYER) * 2


def test_a_judge_too_large_for_its_device_is_refused_before_it_starts() -> None:
    refused = [
        problem for problem in memory.problems(served(judge("grader", "2", parameterCount=72 * 10**9))) if "grader" in problem.problem
    ]
    assert [problem.path for problem in refused] == ["spec.nodeGroups[0].deviceMemory"]
    assert "a larger engine.tensorParallelSize" in refused[0].remedy


def test_a_checkpoint_that_is_written_beside_training_takes_a_copy_of_what_is_trained() -> None:
    """12 bytes a trained parameter over all processes, in host memory; of adapters theirs alone."""
    name = "checkpoint while it is written"

    def saved(**sections: Any) -> dict[str, int]:
        (node,) = [one for one in estimated(**sections).pools if one.kind is memory.PoolKind.NODE]
        found = terms(node, memory.Phase.WEIGHT_SYNC, "actor_train")
        return {kind: size for kind, size in found.items() if kind == name}

    assert saved() == {name: 2 * (PARAMETERS // 2 * 12)}
    assert saved(checkpoint={"asynchronous": False}) == {name: 2 * 4 * (HEAD // 2 * 4)}, "four tensors at a time"
    assert 0 < saved(model={"lora": {"rank": 8}})[name] < PARAMETERS


@pytest.mark.parametrize("device_resource", ["nvidia.com/gpu", "cpu"])
def test_routes_of_experts_lie_in_the_memory_of_the_trainers_node(device_resource: str) -> None:
    """On accelerators of the node, not of the device; a critic's routers are its own."""
    group = {"name": "gpu", "devicesPerNode": 6, "deviceMemory": "80Gi", "deviceResource": device_resource}
    spec, plan = planned_job(CRITIC, training={"routerReplay": "Engine"}, rollout={"promptsPerStep": 10, "samplesPerPrompt": 3})
    spec = spec.model_copy(update={"node_groups": (NodeGroup.model_validate(group),)})
    mixture = CONFIGS["qwen3_moe, all sparse"]
    estimate = memory.estimate(spec, plan, memory.shape_from_config(mixture))
    (node,) = [pool for pool in estimate.pools if pool.kind is memory.PoolKind.NODE]
    tokens = 15 * (1024 + 1024)  # of each of two processes
    found = {phase.phase: [term for term in phase.terms if term.need.name == "routes of a step"] for phase in node.phases}
    assert [(term.component, term.num_bytes) for term in found[TRAIN]] == [("actor_train", 2 * 2 * tokens * 3 * 2)]
    assert not any(terms for phase, terms in found.items() if phase is not TRAIN)
    assert "routes of a step" not in terms(device(estimate, 0), TRAIN, "actor_train")
    assert any("training.routerReplay: the head's driver has up to 360.0 KiB of routes" in note for note in estimate.notes)
    many = memory.shape_from_config({**mixture, "num_experts": 129})
    (node,) = [pool for pool in memory.estimate(spec, plan, many).pools if pool.kind is memory.PoolKind.NODE]
    assert sum(term.num_bytes for phase in node.phases for term in phase.terms if term.need.name == "routes of a step") == 8 * tokens * 6


@pytest.mark.parametrize(
    ("judge", "residency", "refused"),
    [
        pytest.param({"memoryFraction": 0.21}, "Resident", True, id="too much together"),
        pytest.param({"memoryFraction": 0.2}, "Resident", False, id="exactly the whole"),
        pytest.param({"memoryFraction": 0.21}, "Switching", False, id="the judge makes room"),
        pytest.param({"kvCacheBytes": 1 << 30}, "Resident", False, id="a judge with a cache of its own size"),
    ],
)
def test_engines_on_one_device_are_compared_without_sizes(judge: dict[str, object], residency: str, refused: bool) -> None:
    document = manifest()
    spec = document["spec"]
    spec["nodeGroups"][0]["deviceResource"] = "nvidia.com/gpu"
    place = {"role": "Judge", "placement": {"ranks": "1"}, "model": {"path": "owner/judge"}, "engine": judge}
    spec["components"].append({"name": "grader", **place})
    spec["rewards"] = [
        {"name": "graded", "type": "LLMJudge", "judge": {"component": "grader", "template": "{response}", "parser": {"field": "score"}}}
    ]
    spec["offload"] = {"residency": residency}
    if not refused:
        assert check(document)
        return
    with pytest.raises(SpecInvalidError) as caught:
        check(document)
    (problem,) = caught.value.errors
    assert problem.path == "spec.components[3].engine.memoryFraction"
    assert "actor_infer 0.8 + grader 0.21 = 1.01 of its memory" in problem.problem


@pytest.mark.parametrize("backend", ["TCP", "ObjectStore"])
def test_engines_of_a_node_share_an_update(backend: str) -> None:
    """In memory that with TCP stays between two syncs."""
    found = estimated(weightSync={"backend": backend})
    node = next(pool for pool in found.pools if pool.kind is memory.PoolKind.NODE)
    assert terms(node, memory.Phase.WEIGHT_SYNC, "weight sync") == {"weights in shared memory": 2 * PARAMETERS}
    phases = {one.phase for one in node.phases if any(term.component == "weight sync" for term in one.terms)}
    assert (memory.Phase.GENERATE in phases) == (backend == "TCP")


@pytest.mark.parametrize("backend", ["NCCL", "IPC"])
def test_an_update_between_devices_takes_no_memory_of_a_node(backend: str) -> None:
    phases = [phase for pool in estimated(weightSync={"backend": backend}).pools for phase in pool.phases]
    assert not [term for phase in phases for term in phase.terms if term.component == "weight sync"]
