"""mode: Auto: what is chosen, why, and what is refused."""

import itertools
import json
from typing import Any

import pytest

from rljob_api import auto, memory, planner, validation
from rljob_api.auto.candidates import Candidates
from rljob_api.auto.cost import CostModel
from rljob_api.auto.request import Request, read
from rljob_api.auto.supply import START, FreeGroup
from rljob_api.errors import FieldError
from rljob_api.planning.plan import PlacementMode, Plan
from rljob_api.v1alpha1 import RLJob, RLJobSpec
from rljob_api.v1alpha1.components import PlacementChoice, Role
from tests.support.cost import within
from tests.unit.api.manifests import manifest
from tests.unit.api.model_configs import LLAMA_70B, QWEN25_05B, QWEN25_7B

Document = dict[str, Any]


def group(name: str, nodes: int, devices: int, **more: object) -> Document:
    return {"name": name, "nodes": nodes, "devicesPerNode": devices, **more}


def open_roles(engine: int = 1, *, reference: bool = False) -> list[Document]:
    roles: list[Document] = [
        {"name": "train", "role": "Trainer", "placement": {"mode": "Auto"}},
        {"name": "infer", "role": "Rollout", "placement": {"mode": "Auto"}, "engine": {"tensorParallelSize": engine}},
    ]
    return [*roles, {"name": "ref", "role": "Reference", "placement": {"mode": "Auto"}}] if reference else roles


def job(groups: list[Document], components: list[Document], **sections: Any) -> Document:
    document = manifest()
    document["spec"].update(nodeGroups=groups, components=[*components, {"name": "reward", "role": "Reward", "placement": {"workers": 1}}])
    if any(component["role"] == "Reference" for component in components):
        document["spec"]["algorithm"] = {"kl": {"coefficient": 0.01}}
    for name, section in sections.items():
        document["spec"][name] = {**document["spec"].get(name, {}), **section} if isinstance(section, dict) else section
    return document


def spec_of(document: Document) -> RLJobSpec:
    return RLJob.model_validate_json(json.dumps(document)).spec


def chosen(document: Document) -> auto.Choice:
    choice = auto.choose(spec_of(document))
    assert isinstance(choice, auto.Choice), choice
    return choice


def refused(document: Document) -> list[FieldError]:
    result = auto.resolve(spec_of(document))
    assert isinstance(result, list), result
    assert planner.plan_or_errors(spec_of(document)) == result
    return result


def where(spec: RLJobSpec) -> dict[str, str]:
    placements = {c.name: c.placement for c in spec.components if c.role is not Role.REWARD}
    return {name: ":".join(filter(None, [",".join(p.node_groups), p.ranks or p.device_mapping])) for name, p in placements.items()}


LONG_ANSWERS = {"maxPromptTokens": 256, "maxResponseTokens": 2048, "promptsPerStep": 128, "samplesPerPrompt": 8}
"""1024 samples of 2048 tokens: 1024 is what Trainer sizes divide."""
TIMES = {"rolloutDevices": 4, "trainerDevices": 4, "generateSeconds": 60, "trainSeconds": 60, "syncSeconds": 2}


# What is chosen -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "components", "expected"),
    [
        pytest.param([group("a", 1, 2)], open_roles(), {"train": "0", "infer": "1"}, id="2"),
        pytest.param([group("a", 1, 8)], open_roles(), {"train": "0-3", "infer": "4-7"}, id="8"),
        pytest.param([group("a", 1, 8)], open_roles(2), {"train": "0-3", "infer": "4-7"}, id="8 tp2"),
        pytest.param([group("a", 1, 8)], open_roles(4), {"train": "0-3", "infer": "4-7"}, id="8 tp4"),
        pytest.param([group("a", 2, 8)], open_roles(2), {"train": "0-7", "infer": "8-15"}, id="2x8 tp2"),
        pytest.param([group("a", 2, 8)], open_roles(4), {"train": "0-7", "infer": "8-15"}, id="2x8 tp4"),
        pytest.param([group("a", 2, 8)], open_roles(8), {"train": "0-7", "infer": "8-15"}, id="2x8 tp8"),
        pytest.param([group("a", 3, 8)], open_roles(8), {"train": "0-7", "infer": "8-23"}, id="3x8 tp8"),
    ],
)
def test_the_split(groups: list[Document], components: list[Document], expected: dict[str, str]) -> None:
    document = job(groups, components, measured=TIMES, rollout=LONG_ANSWERS)
    assert where(chosen(document).spec) == expected
    assert validation.check(document, runnable=False).plan.mode is PlacementMode.DISAGGREGATED


def test_two_kinds_of_devices() -> None:
    """The Trainer exchanges tensors and stays on one kind; so do the engines."""
    kinds = [group("a", 1, 4, deviceResource="nvidia.com/gpu"), group("b", 1, 4, deviceResource="amd.com/gpu")]
    choice = chosen(job(kinds, open_roles(2), measured=TIMES))
    assert where(choice.spec) == {"train": "a:0-3", "infer": "b:0-3"}
    assert choice.runner_up is not None
    runner_up = {index: (p.node_groups, p.ranks) for index, p in choice.runner_up.placements(choice.request).items()}
    assert runner_up == {0: (("b",), "0-3"), 1: (("a",), "0-3")}  # the other way round, as fast
    for candidate in choice.candidates:
        for shares in candidate.shares.values():
            assert len({share.group.resource for share in shares}) == 1


def test_accelerators_are_not_left_to_processors() -> None:
    groups = [group("processors", 4, 8, deviceResource="cpu"), group("gpus", 1, 8)]
    for measured in ({}, {"measured": TIMES}):
        placed = where(chosen(job(groups, open_roles(), **measured)).spec)
        assert all(text.startswith("gpus:") for text in placed.values())


def test_equal_groups_may_be_crossed() -> None:
    document = job([group("a", 1, 2), group("b", 1, 6)], open_roles(4), measured=TIMES)
    assert where(chosen(document).spec)["infer"] == "b:2-5"
    assert where(chosen(document).spec)["train"] == "a,b:0-3"


def test_the_reference_gets_devices_of_its_own() -> None:
    choice = chosen(job([group("a", 2, 8)], open_roles(4, reference=True), measured={**TIMES, "trainSeconds": 100}))
    plan = planner.plan(choice.spec)
    taken = [set(component.devices) for component in plan.components]
    assert all(not a & b for a, b in itertools.combinations(taken, 2))
    assert choice.chosen.cost.reference_s > 0
    assert len(plan.component("ref").devices) < len(plan.component("train").devices)  # a third of the work


@pytest.mark.parametrize(
    ("sections", "sizes"),
    [
        ({"measured": TIMES}, {"tensorParallelSize": 4}),
        ({}, {"tensorParallelSize": 4}),
        ({}, {"tensorParallelSize": 2, "contextParallelSize": 2}),
        ({}, {"contextParallelSize": 2, "expertParallelSize": 4}),
    ],
)
def test_a_reference_has_whole_parallel_groups(sections: Document, sizes: Document) -> None:
    roles = open_roles(4, reference=True)
    roles[-1] |= sizes
    plan = planner.plan(chosen(job([group("a", 3, 8)], roles, **sections)).spec)
    processes = plan.component("ref").processes
    assert processes
    assert len(processes) % 4 == 0
    for first in range(0, len(processes), 4):
        assert len({process.node_rank for process in processes[first : first + 4]}) == 1, "no group crosses a node"


def test_a_reference_that_fits_nowhere_is_named_with_its_size() -> None:
    roles = open_roles(reference=True)
    roles[-1]["tensorParallelSize"] = 8
    (problem,) = refused(job([group("a", 1, 4)], roles))
    assert "the Reference 8" in problem.problem


def test_node_groups_restrict_the_choice() -> None:
    components = open_roles()
    components[0]["placement"]["nodeGroups"] = ["b"]
    components[1]["placement"]["nodeGroups"] = ["a", "c"]
    groups = [group("a", 1, 2), group("b", 1, 4), group("c", 1, 2), group("robots", 1, 4, ignoreHardware=True)]
    assert where(chosen(job(groups, components)).spec) == {"train": "b:0-3", "infer": "a,c:0-3"}


def test_explicit_neighbors_keep_their_devices() -> None:
    components = [*open_roles(2), {"name": "other", "role": "Reference", "placement": {"ranks": "1-2"}}]
    spec = chosen(job([group("a", 1, 8)], components, measured=TIMES)).spec
    assert where(spec) == {"train": "0,3", "infer": "4-7", "other": "1-2"}
    plan = planner.plan(spec)
    assert plan.component("other").devices == (1, 2)
    assert not any(component.shares_devices_with for component in plan.components)


@pytest.mark.parametrize("role", ["Trainer", "Rollout"])
def test_one_open_role_beside_explicit_ones(role: str) -> None:
    components = open_roles(2)
    index = 0 if role == "Trainer" else 1
    components[1 - index]["placement"] = {"ranks": "4-7"}
    assert list(where(chosen(job([group("a", 1, 8)], components)).spec).values())[index] == "0-3"


def test_tensor_parallel_groups_of_the_trainer_stay_on_a_node() -> None:
    spec = chosen(job([group("a", 3, 3)], open_roles(), training={"tensorParallelSize": 2}, measured={**TIMES, "generateSeconds": 1})).spec
    assert where(spec) == {"train": "0-1,3-4", "infer": "5-8"}  # 2 stays free: nobody can use it beside a group of two


def test_groups_of_the_trainer_that_divide_experts_are_whole_and_stay_on_a_node() -> None:
    spec = chosen(job([group("a", 3, 3)], open_roles(), training={"expertParallelSize": 2}, measured={**TIMES, "generateSeconds": 1})).spec
    assert where(spec) == {"train": "0-1,3-4", "infer": "5-8"}
    (error,) = refused(job([group("a", 1, 4)], open_roles(), training={"expertParallelSize": 8}))[:1]
    assert "the Trainer 8 or more devices of one kind" in error.problem


def test_identity_without_auto() -> None:
    spec = spec_of(manifest())
    assert auto.resolve(spec) is spec
    with pytest.raises(ValueError, match="no placement"):
        auto.choose(spec)


def test_the_choice_is_explicit_and_can_be_written_down() -> None:
    document = job([group("a", 2, 8)], open_roles(4))
    resolved = auto.resolve(spec_of(document))
    assert isinstance(resolved, RLJobSpec)
    assert all(component.placement.mode is PlacementChoice.EXPLICIT for component in resolved.components)
    document["spec"] = json.loads(resolved.model_dump_json(by_alias=True, exclude_none=True))
    assert validation.check(document).plan == planner.plan(resolved)


# Why ----------------------------------------------------------------------------------------------------------------


def test_measured_times_move_the_split() -> None:
    """8 devices, times of 4 + 4: whatever takes longer gets more devices."""
    sizes = {}
    for generate, train in ((10, 200), (60, 60), (400, 10)):
        times = {**TIMES, "generateSeconds": generate, "trainSeconds": train}
        choice = chosen(job([group("a", 1, 8)], open_roles(), measured=times))
        assert choice.basis is auto.Basis.MEASURED
        sizes[generate] = choice.chosen.use.trainer_devices
    assert sizes[10] == 4  # 8 would leave nothing for engines, and 5 to 7 do not divide 256 samples
    assert sizes[60] == 4
    assert sizes[400] == 1


@pytest.mark.parametrize(
    ("ratio", "step", "hidden"),
    [(0.0, 60 + 60 + 2, 0), (0.5, 60 + 60 + 2 - 30, 30), (1.0, 60 + 2, 60), (4.0, 60 + 2, 60)],
)
def test_overlap(ratio: float, step: float, hidden: float) -> None:
    """0 is the sum, 1 and more the longer of both and the sync, a share between them hides that share of the generation."""
    cost = chosen(job([group("a", 1, 8)], open_roles(), measured=TIMES, overlap={"asyncGenerationRatio": ratio})).chosen.cost
    assert (cost.step_s, cost.hidden_s) == (step, hidden)


def test_terms_of_an_estimate() -> None:
    """One device each: 6 P T FLOPs at 40 % of 989 TFLOP/s, a token per reading of the weights, a sync at 20 GB/s."""
    rollout = {"promptsPerStep": 1, "samplesPerPrompt": 2, "maxPromptTokens": 100, "maxResponseTokens": 900}
    sections: Document = {"rollout": rollout, "model": {"dtype": "bfloat16", "parameterCount": 10**9}}
    choice = chosen(job([group("a", 1, 2)], open_roles(), **sections))
    cost = choice.chosen.cost
    assert choice.basis is auto.Basis.ESTIMATED
    assert cost.train_s == pytest.approx(6 * 1e9 * 2000 / (0.4 * 989e12))
    assert cost.generate_s == pytest.approx(2 * 1e9 * 100 / (0.4 * 989e12) + 900 * 2e9 / (0.6 * 3.35e12))
    assert cost.sync_s == pytest.approx(0.1)
    recomputed = chosen(job([group("a", 1, 2)], open_roles(), **sections, training={"activationCheckpointing": True})).chosen.cost
    assert recomputed.train_s == pytest.approx(cost.train_s * 8 / 6)


def test_engines_beyond_the_sequences_do_not_help() -> None:
    rollout = {"promptsPerStep": 2, "samplesPerPrompt": 2, "maxPromptTokens": 16, "maxResponseTokens": 16}
    choice = chosen(job([group("a", 4, 8)], open_roles(), rollout=rollout))
    assert all(candidate.use.engines <= 4 for candidate in choice.candidates)


def test_a_split_at_a_node_boundary_is_preferred_among_equals() -> None:
    """Trainer on a or on four devices of b: both leave two engines, but only the first splits between nodes."""
    times = {**TIMES, "trainerDevices": 8, "rolloutDevices": 8}
    choice = chosen(job([group("a", 1, 4), group("b", 1, 8)], open_roles(4), measured=times, training={"tensorParallelSize": 4}))
    assert where(choice.spec) == {"train": "a:0-3", "infer": "b:0-7"}
    assert choice.chosen.shared_nodes == 0
    equal = [c for c in choice.candidates if c.cost.step_s == choice.chosen.cost.step_s]
    assert any(c.shared_nodes for c in equal)


# Sharing ------------------------------------------------------------------------------------------------------------


CHEAP_TO_SHARE: Document = {"measured": {**TIMES, "trainSeconds": 100, "generateSeconds": 100}}


def test_sharing_is_shown_and_not_chosen_where_nobody_says_that_it_fits() -> None:
    document = job([group("a", 1, 2)], open_roles(), **CHEAP_TO_SHARE)
    choice = chosen(document)
    collocated = [c for c in choice.candidates if c.kind is auto.Kind.COLLOCATED]
    assert choice.chosen.kind is auto.Kind.DISAGGREGATED
    assert [c.cost.step_s < choice.chosen.cost.step_s for c in collocated] == [True]
    assert [r.reason for r in choice.rejected if r.candidate is collocated[0]] == [auto.LAST_RESORT]


def test_sharing_is_chosen_where_components_switch() -> None:
    document = job([group("a", 1, 2)], open_roles(), **CHEAP_TO_SHARE, offload={"residency": "Switching"})
    choice = chosen(document)
    assert choice.chosen.kind is auto.Kind.COLLOCATED
    assert choice.chosen.cost.switch_s > 0
    assert validation.check(document).plan.mode is PlacementMode.COLLOCATED


@pytest.mark.parametrize(("fraction", "kind"), [(0.3, auto.Kind.COLLOCATED), (0.9, auto.Kind.DISAGGREGATED)])
def test_residents_share_where_their_sum_fits(fraction: float, kind: auto.Kind) -> None:
    """1 B parameters: 16 GB to train on one device of 80 GiB, beside an engine that takes a share of it."""
    roles = open_roles()
    roles[1]["engine"] = {"memoryFraction": fraction}
    model = {"path": "m", "dtype": "bfloat16", "parameterCount": 10**9}
    document = job([group("a", 1, 2, deviceMemory="80Gi")], roles, model=model, **CHEAP_TO_SHARE)
    choice = chosen(document)
    assert choice.chosen.kind is kind
    assert choice.chosen.cost.switch_s == 0
    assert validation.check(document).plan.mode.lower() == kind


def half_a_billion(memory_text: str, devices: int) -> Document:
    """Qwen 2.5 0.5B, of which the spec says the number of parameters alone; sharing is cheap, and 0.4 of a device is the engine's."""
    roles = open_roles()
    roles[1]["engine"] = {"memoryFraction": 0.4}
    model = {"path": "m", "dtype": "bfloat16", "parameterCount": memory.shape_from_config(QWEN25_05B).parameters}
    return job([group("a", 1, devices, deviceMemory=memory_text)], roles, model=model, **CHEAP_TO_SHARE)


@pytest.mark.parametrize(("memory_text", "kind"), [("28Gi", auto.Kind.DISAGGREGATED), ("64Gi", auto.Kind.COLLOCATED)])
def test_sharing_leaves_room_for_what_a_number_of_parameters_does_not_say(memory_text: str, kind: auto.Kind) -> None:
    """Activations of 24 layers are 14.8 GiB beside 9 of states and 11 of the engine: the real config.json refuses what the count allows."""
    document = half_a_billion(memory_text, 2)
    choice = chosen(document)
    assert (choice.chosen.kind, choice.doubt) == (kind, None)
    assert validation.check(document, runnable=False, shape_of=lambda _: memory.shape_from_config(QWEN25_05B)).plan
    doubted = [r for r in choice.rejected if auto.UNSAID in r.reason]
    assert [r.candidate is not None and r.candidate.kind for r in doubted] == [auto.Kind.COLLOCATED] * (kind is not auto.Kind.COLLOCATED)
    assert all("spec.nodeGroups[0].deviceMemory: " in r.reason and " x 21 layers" in r.reason for r in doubted)


def test_sharing_that_may_not_fit_is_chosen_where_nothing_else_exists_and_says_so() -> None:
    choice = chosen(half_a_billion("28Gi", 1))
    assert choice.chosen.kind is auto.Kind.COLLOCATED
    assert choice.doubt is not None
    assert auto.UNSAID in choice.doubt
    assert chosen(half_a_billion("64Gi", 1)).doubt is None


@pytest.mark.parametrize("config", [QWEN25_05B, QWEN25_7B, LLAMA_70B], ids=["0.5B", "7B", "70B"])
def test_a_usual_model_needs_about_what_real_ones_do(config: Document) -> None:
    roles = open_roles()
    for role in roles:
        role["placement"] = {"ranks": "0-7"}
    roles[1]["engine"] = {"memoryFraction": 0.3}
    spec = spec_of(job([group("a", 1, 8, deviceMemory="80Gi")], roles, model={"path": "m", "dtype": "bfloat16"}))
    plan, real = planner.plan(spec), memory.shape_from_config(config)

    def peak(shape: memory.ModelShape) -> int:
        return max(pool.peak.num_bytes for pool in memory.estimate(spec, plan, shape).pools if pool.kind is memory.PoolKind.DEVICE)

    assert 0.9 < peak(memory.usual_shape(real.parameters)) / peak(real) < 1.25
    assert peak(memory.shape_from_count(real.parameters)) / peak(real) < 0.7, "what is left out is what this is for"


@pytest.mark.parametrize("parameters", [1, 1000, 10**5, 10**8, 10**14])
def test_a_usual_model_of_any_size(parameters: int) -> None:
    shape = memory.usual_shape(parameters)
    assert shape.parameters == parameters
    assert shape.decoder is not None
    counted = shape.decoder.num_layers * shape.decoder.layer_parameters + shape.decoder.root_parameters
    assert counted <= max(parameters, 70_000), "64 wide is the smallest"


def test_sharing_where_nothing_else_exists() -> None:
    document = job([group("a", 1, 1)], open_roles())
    assert where(chosen(document).spec) == {"train": "0", "infer": "0"}
    assert chosen(document).chosen.is_last_resort
    assert validation.check(document).plan.mode is PlacementMode.COLLOCATED


def test_sharing_with_an_explicit_component() -> None:
    components = open_roles(2)
    components[0]["placement"] = {"deviceMapping": "list(range(0,4))", "devicesPerWorker": 1}
    assert where(chosen(job([group("a", 1, 4)], components)).spec)["infer"] == "list(range(0,4))"
    components = open_roles(2)
    components[1]["placement"] = {"ranks": "all"}
    assert where(chosen(job([group("a", 1, 4)], components)).spec)["train"] == "all"


# Memory -------------------------------------------------------------------------------------------------------------


def test_what_does_not_fit_is_rejected_with_its_arithmetic() -> None:
    """7 B parameters train in 7e9 x (4 + 8 + 4) bytes: one or two devices of 80 GiB are too few, however fast that would be."""
    times = {**TIMES, "generateSeconds": 4000, "trainSeconds": 1}
    sections: Document = {"measured": times, "model": {"path": "m", "dtype": "bfloat16", "parameterCount": 7 * 10**9}}
    roomy = chosen(job([group("a", 1, 8)], open_roles(), **sections))
    choice = chosen(job([group("a", 1, 8, deviceMemory="80Gi")], open_roles(), **sections))
    assert roomy.chosen.use.trainer_devices < choice.chosen.use.trainer_devices
    too_large = [r for r in choice.rejected if r.candidate is not None and r.candidate.kind is auto.Kind.DISAGGREGATED]
    assert too_large
    assert "deviceMemory" in too_large[0].reason
    assert validation.check(job([group("a", 1, 8, deviceMemory="80Gi")], open_roles(), **sections), runnable=False)


def test_nothing_fits() -> None:
    sections: Document = {"model": {"path": "m", "dtype": "bfloat16", "parameterCount": 70 * 10**9}}
    (error,) = refused(job([group("a", 1, 8, deviceMemory="16Gi")], open_roles(), **sections))
    assert error.path == "spec.components[0].placement.mode"
    assert "finds no placement of train and infer that fits" in error.problem
    assert "deviceMemory" in error.problem


def test_only_few_candidates_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = 0
    original = planner.plan_or_errors

    def counted(spec: RLJobSpec) -> Plan | list[FieldError]:
        nonlocal planned
        planned += 1
        return original(spec)

    monkeypatch.setattr(planner, "plan_or_errors", counted)
    sections: Document = {"model": {"path": "m", "dtype": "bfloat16", "parameterCount": 7 * 10**9}}
    document = job([group(f"g{i}", 16 + i, 8, deviceMemory="80Gi") for i in range(8)], open_roles(reference=True), **sections)
    choice = chosen(document)
    assert len(choice.candidates) > 500
    assert planned <= auto.MAX_PLANNED
    assert planned < 20


# RLinf 0.3.0, toolkits/auto_placement: never a last stage of one device; ignores node edges, memory, communication -----------------------


def test_a_trainer_of_one_device_is_possible() -> None:
    choice = chosen(job([group("a", 1, 8)], open_roles(), measured={**TIMES, "generateSeconds": 1000, "trainSeconds": 1}))
    assert choice.chosen.use.trainer_devices == 1
    assert choice.chosen.use.engines == 7


@pytest.mark.parametrize("size", [2, 4, 8])
def test_engines_respect_node_edges(size: int) -> None:
    choice = chosen(job([group("a", 2, 9)], open_roles(size)))
    for process in planner.plan(choice.spec).component("infer").processes:
        assert len({device // 9 for device in process.devices}) == 1
        assert len(process.devices) == size


def test_communication_counts() -> None:
    """The same 8 + 8 devices: on two nodes weights cross the network, on one they do not."""
    one = chosen(job([group("a", 1, 16)], open_roles(8))).chosen.cost
    two = chosen(job([group("a", 2, 8)], open_roles(8))).chosen.cost
    assert one.sync_s < two.sync_s
    training = {"miniBatches": 4}
    spread, close = (chosen(job([group("a", nodes, 8 // nodes)], open_roles(2), training=training)) for nodes in (4, 1))
    assert min(train_seconds(spread, 4)) > max(train_seconds(close, 4))  # shards of four devices are exchanged over the network


def train_seconds(choice: auto.Choice, devices: int) -> list[float]:
    """Of all candidates whose Trainer has so many devices of its own."""
    return [c.cost.train_s for c in choice.candidates if c.use.trainer_devices == devices and not c.use.shares_devices]


# What is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "component", "path", "problem"),
    [
        (0, {"placement": {"mode": "Auto", "ranks": "0"}}, "placement.mode", "contradicts ranks, which the planner would choose"),
        (
            1,
            {"placement": {"mode": "Auto", "deviceMapping": "[0]", "devicesPerWorker": 1}},
            "placement.mode",
            "deviceMapping and devicesPerW",
        ),
        (0, {"placement": {"mode": "Auto", "nodeGroups": ["b"]}}, "placement.nodeGroups", 'no node group is called "b", there are a, cpus'),
        (0, {"placement": {"mode": "Auto", "nodeGroups": ["node"]}}, "placement.nodeGroups", "node counts nodes"),
        (0, {"placement": {"mode": "Auto", "nodeGroups": ["a", "a"]}}, "placement.nodeGroups", '"a" names devices twice'),
        (0, {"placement": {"mode": "Auto", "nodeGroups": ["a", "cpus"]}}, "placement.nodeGroups", '"cpus" has none to choose'),
        (2, {"placement": {"mode": "Auto"}}, "placement.mode", "not for a Reward"),
        (2, {"role": "Rollout", "placement": {"mode": "Auto"}}, "placement.mode", "is given to a second Rollout"),
        (2, {"placement": {"ranks": "9"}}, "placement.ranks", "rank 9 does not exist"),
    ],
)
def test_misuse(index: int, component: Document, path: str, problem: str) -> None:
    document = job([group("a", 1, 4), group("cpus", 1, 0)], open_roles())
    document["spec"]["components"][index].update(component)
    (error,) = refused(document)
    assert error.path == f"spec.components[{index}].{path}"
    assert problem in error.problem


@pytest.mark.parametrize(
    ("groups", "engine", "training", "problem"),
    [
        ([group("a", 4, 2)], 4, {}, "an engine 4 on one node; free are: a has 8"),
        ([group("a", 1, 4)], 1, {"tensorParallelSize": 8}, "the Trainer 8 or more devices of one kind, an engine 1; free are: a has 4"),
        ([group("cpus", 2, 0)], 1, {}, "but the job has none to choose"),
    ],
)
def test_impossible(groups: list[Document], engine: int, training: Document, problem: str) -> None:
    errors = refused(job(groups, open_roles(engine), training=training))
    assert all(problem in error.problem for error in errors)
    assert errors[0].path.startswith("spec.components[0].placement")


def test_all_problems_at_once_in_the_order_of_the_spec() -> None:
    document = job([group("a", 1, 4), group("a", 1, 4)], open_roles())
    document["spec"]["components"][0]["placement"]["ranks"] = "0"
    document["spec"]["components"][2]["placement"] = {"ranks": "99"}
    errors = planner.plan_or_errors(spec_of(document))
    assert isinstance(errors, list)
    assert [error.path for error in errors] == [
        "spec.nodeGroups[1].name",
        "spec.components[0].placement.mode",
        "spec.components[2].placement.ranks",
    ]


# Size ---------------------------------------------------------------------------------------------------------------


def test_a_hundred_thousand_devices_are_chosen_among_at_once() -> None:
    document = job([group("a", 4096, 24)], open_roles(8, reference=True), rollout={"promptsPerStep": 8192, "samplesPerPrompt": 16})
    spec = spec_of(document)
    with within(1):
        choice = auto.choose(spec)
    assert isinstance(choice, auto.Choice)
    assert choice.chosen.num_devices > 50_000


def test_sizes_of_a_batch_with_many_divisors_are_thinned() -> None:
    document = job([group("a", 1024, 8)], open_roles(), rollout={"promptsPerStep": 720720, "samplesPerPrompt": 4})
    request = read(spec_of(document))
    assert isinstance(request, Request)
    sizes = Candidates(request, CostModel(request.spec, request.engine)).trainer_sizes
    assert sizes[:4] == [1, 2, 3, 4]
    assert len(sizes) <= 6 * 13 + 1
    assert all(720720 * 4 % size == 0 for size in sizes)


def test_free_devices_in_chunks() -> None:
    group_ = FreeGroup(index=0, name="a", first_node=5, nodes=3, devices_per_node=4, resource="cpu", taken={1: frozenset({0, 2})})
    assert (group_.num_devices, group_.num_free, group_.largest_node) == (12, 10, 4)
    assert [group_.capacity(START, chunk) for chunk in (1, 2, 3, 4, 5)] == [10, 5, 2, 2, 0]
    at = group_.after(START, 3, 1)
    assert (at, group_.capacity(at, 1), group_.capacity(at, 2)) == ((0, 3), 7, 3)
    assert list(group_.runs(at, 1, 4)) == [(3, 3), (5, 5), (7, 7), (8, 8)]
    assert list(group_.runs(START, 3, 2)) == [(0, 2), (8, 10)]
    end = group_.after(START, 1, 10)
    assert (group_.capacity(end, 1), group_.room_on_node(end, 1)) == (0, 0)


@pytest.mark.parametrize(
    ("backend", "kind"),
    [("NCCL", PlacementMode.DISAGGREGATED), ("SharedMemory", PlacementMode.COLLOCATED), ("IPC", PlacementMode.COLLOCATED)],
)
def test_the_way_of_the_weights_limits_the_choice(backend: str, kind: PlacementMode) -> None:
    """NCCL cannot connect a device with itself, shared memory ends at the node, and IPC needs a trainer rank on every engine's device."""
    nodes = 2 if backend == "NCCL" else 1
    document = job([group("a", nodes, 8)], open_roles(), weightSync={"backend": backend}, offload={"residency": "Switching"})
    spec = chosen(document).spec
    plan = planner.plan(spec)
    assert plan.mode is kind
    assert validation.check(document)


def test_a_way_of_the_weights_that_no_placement_has_is_named() -> None:
    document = job([group("a", 1, 1)], open_roles(), weightSync={"backend": "NCCL"}, offload={"residency": "Switching"})
    (problem,) = refused(document)
    assert problem.problem.endswith("engines are on their devices 0 as well")
    assert "spec.weightSync.backend" in problem.problem
