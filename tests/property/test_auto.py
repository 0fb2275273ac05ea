"""mode: Auto for any job: what is chosen can be planned, is the best of its candidates, and does not depend on the order of keys."""

import copy
import json
from typing import Any

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rljob_api import auto, planner
from rljob_api.planning.plan import Plan
from rljob_api.v1alpha1 import RLJob, RLJobSpec
from rljob_api.v1alpha1.components import Role
from tests.unit.api.manifests import manifest

NAMES = ["a", "b", "c"]
RESOURCES = ["nvidia.com/gpu", "amd.com/gpu", "cpu"]
# Made once: making such a strategy costs more than drawing from it.
first_resources = {count: st.sampled_from(RESOURCES[:count]) for count in (1, 2, 3)}
lists_of_names = {count: st.lists(st.sampled_from(NAMES[:count]), max_size=2, unique=True) for count in (1, 2, 3)}
lists_of_roles = st.sampled_from([("Trainer", "Rollout"), ("Trainer", "Rollout", "Reference")])
ranks = st.sampled_from(["0", "0-1", "1-3"])
tensor_parallel_sizes = st.sampled_from([1, 2, 3, 4])
sizes_of_ranks = st.sampled_from([{}, {}, {"tensorParallelSize": 2}, {"expertParallelSize": 2}, {"expertParallelSize": 3}])
mini_batches = st.sampled_from([1, 2])
prompts = st.sampled_from([2, 6, 32])
samples = st.sampled_from([1, 3, 8])
ratios = st.sampled_from([0.0, 0.25, 1.0, 2.0])
sync_seconds = st.sampled_from([0.0, 1.0])


@st.composite
def documents(draw: st.DrawFn) -> dict[str, Any]:
    """Jobs with open roles: groups of one to three resources, restricted choices, explicit neighbors, measured times or none."""
    groups = [
        {
            "name": name,
            "nodes": draw(st.integers(1, 3)),
            "devicesPerNode": draw(st.integers(0, 9)),
            "deviceResource": draw(first_resources[draw(st.integers(1, 3))]),
        }
        for name in NAMES[: draw(st.integers(1, 3))]
    ]
    names = lists_of_names[len(groups)]
    roles = draw(lists_of_roles)
    components: list[dict[str, Any]] = []
    for role in roles:
        explicit = draw(st.integers(0, 5)) == 0
        placement = {"ranks": draw(ranks)} if explicit else {"mode": "Auto", "nodeGroups": draw(names)}
        components.append({"name": role.lower(), "role": role, "placement": placement})
    components[1]["engine"] = {"tensorParallelSize": draw(tensor_parallel_sizes), "maxRunningRequests": draw(st.integers(1, 64))}
    document = manifest()
    document["spec"].update(nodeGroups=groups, components=components)
    document["spec"]["training"] = {
        **draw(sizes_of_ranks),
        "miniBatches": draw(mini_batches),
        "activationCheckpointing": draw(st.booleans()),
    }
    document["spec"]["rollout"] = {
        "promptsPerStep": draw(prompts),
        "samplesPerPrompt": draw(samples),
        "maxResponseTokens": draw(st.integers(1, 4096)),
    }
    document["spec"]["overlap"] = {"asyncGenerationRatio": draw(ratios)}
    if draw(st.booleans()):
        seconds = st.floats(0.01, 1000.0)
        document["spec"]["measured"] = {
            "rolloutDevices": draw(st.integers(1, 16)),
            "trainerDevices": draw(st.integers(1, 16)),
            "generateSeconds": draw(seconds),
            "trainSeconds": draw(seconds),
            "syncSeconds": draw(sync_seconds),
        }
    return document


def spec_of(document: dict[str, Any]) -> RLJobSpec:
    return RLJob.model_validate_json(json.dumps(document)).spec


def is_open(document: dict[str, Any]) -> bool:
    return auto.is_auto(spec_of(document))


jobs = documents().filter(is_open)


@given(jobs)
def test_whatever_is_resolved_is_planned(document: dict[str, Any]) -> None:
    """No error after a choice, engines on one node, roles apart unless nothing else exists, Trainer sizes that divide the batch."""
    spec = spec_of(document)
    choice = auto.choose(spec)
    assume(isinstance(choice, auto.Choice))
    assert isinstance(choice, auto.Choice)
    plan = planner.plan_or_errors(spec)
    assert isinstance(plan, Plan), plan
    assert plan == planner.plan(choice.spec)
    explicit = {c.name for c in spec.components if c.placement.mode == "Explicit"}
    if choice.chosen.kind is auto.Kind.DISAGGREGATED:
        for component in plan.components:
            assert component.name in explicit or not component.shares_devices_with
    for index, component in enumerate(plan.components):
        if component.name in explicit:
            assert spec.components[index].placement == choice.spec.components[index].placement
    (trainer,) = plan.with_role(Role.TRAINER)
    assert trainer.world_size == choice.chosen.use.trainer_devices
    if trainer.name not in explicit:
        samples = spec.rollout.prompts_per_step // spec.training.mini_batches * spec.rollout.samples_per_prompt
        assert trainer.world_size % spec.training.tensor_parallel_size == 0
        assert samples % (trainer.world_size // spec.training.tensor_parallel_size) == 0
    (rollout,) = plan.with_role(Role.ROLLOUT)
    if rollout.name not in explicit:
        assert rollout.world_size == choice.chosen.use.engines


@given(jobs)
def test_the_chosen_is_the_best_that_runs(document: dict[str, Any]) -> None:
    choice = auto.choose(spec_of(document))
    assume(isinstance(choice, auto.Choice))
    assert isinstance(choice, auto.Choice)
    rejected = {id(each.candidate) for each in choice.rejected}
    others = [c for c in choice.candidates if id(c) not in rejected]
    assert all(choice.chosen.cost.step_s <= other.cost.step_s for other in others) or choice.chosen.is_last_resort
    assert not choice.chosen.is_last_resort or all(c.is_last_resort for c in choice.candidates)
    assert all(c.cost.step_s > 0 for c in choice.candidates)


@given(jobs, st.randoms(use_true_random=False))
def test_pure_and_independent_of_key_order(document: dict[str, Any], order: Any) -> None:
    spec = spec_of(document)
    before = spec.model_dump_json()
    first = auto.resolve(spec)
    assert spec.model_dump_json() == before
    assert auto.resolve(spec) == first
    assert auto.resolve(spec_of(_shuffled(document, order))) == first


@given(jobs, st.sampled_from(["nodes", "devicesPerNode"]), st.integers(0, 2), st.integers(1, 4))
@settings(max_examples=300)
def test_more_devices_never_cost_more(document: dict[str, Any], field: str, which: int, more: int) -> None:
    """Among placements that run; without explicit neighbors, whose ranks would mean other devices."""
    assume(all(component["placement"].get("mode") for component in document["spec"]["components"]))
    smaller = auto.choose(spec_of(document))
    assume(isinstance(smaller, auto.Choice) and not smaller.chosen.is_last_resort)
    assert isinstance(smaller, auto.Choice)
    larger_document = copy.deepcopy(document)
    groups = larger_document["spec"]["nodeGroups"]
    grown = groups[which % len(groups)]
    assume(grown["devicesPerNode"] or grown["deviceResource"] != "nvidia.com/gpu")
    grown[field] += more
    larger = auto.choose(spec_of(larger_document))
    assert isinstance(larger, auto.Choice)
    assert larger.chosen.cost.step_s <= smaller.chosen.cost.step_s


def _shuffled(value: Any, order: Any) -> Any:
    if isinstance(value, dict):
        keys = list(value)
        order.shuffle(keys)
        return {key: _shuffled(value[key], order) for key in keys}
    return [_shuffled(item, order) for item in value] if isinstance(value, list) else value
