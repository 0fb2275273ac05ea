"""The table of roles: one row for each, and what follows from it for several components of one role."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rljob_api import memory, planner, validation
from rljob_api.errors import SpecInvalidError
from rljob_api.planning.plan import PlacementMode, Plan
from rljob_api.roles import AUTO_ROLES, ROLE_OF_PHASE, TRAITS, AutoPhase, RunsOn
from rljob_api.v1alpha1 import RLJob, RLJobSpec
from rljob_api.v1alpha1.components import ComponentOffload, Role
from tests.unit.api.manifests import manifest

LIMITED = [role for role, traits in TRAITS.items() if traits.max_components is not None]
SMALL_AND_LARGE = [
    {"name": "small", "role": "Rollout", "placement": {"ranks": "1-2"}, "engine": {"tensorParallelSize": 1}},
    {"name": "large", "role": "Rollout", "placement": {"ranks": "3-6"}, "engine": {"tensorParallelSize": 2}},
]


def document(*components: dict[str, Any], devices: int = 8) -> dict[str, Any]:
    made = manifest()
    trainer, _, reward = made["spec"]["components"]
    made["spec"]["nodeGroups"][0]["devicesPerNode"] = devices
    made["spec"]["components"] = [trainer, *components, reward]
    return made


def spec_of(made: dict[str, Any]) -> RLJobSpec:
    return RLJob.model_validate_json(json.dumps(made)).spec


def planned(made: dict[str, Any]) -> Plan:
    return planner.plan(spec_of(made))


def test_every_role_has_a_row() -> None:
    assert set(TRAITS) == set(Role)


def test_every_phase_of_auto_has_one_role() -> None:
    assert set(ROLE_OF_PHASE) == set(AutoPhase)
    assert list(ROLE_OF_PHASE.values()) == list(AUTO_ROLES)
    assert {phase: phase is AutoPhase.GENERATE for phase in AutoPhase} == {p: TRAITS[r].has_engine for p, r in ROLE_OF_PHASE.items()}


def test_offload_fields_are_fields_of_the_manifest() -> None:
    known = ComponentOffload().model_dump(by_alias=True)
    assert {field for traits in TRAITS.values() for field in traits.offload_fields} <= set(known)


@pytest.mark.parametrize("role", Role)
def test_traits_agree_with_each_other(role: Role) -> None:
    traits = TRAITS[role]
    assert traits.holds_model is (traits.runs_on is RunsOn.DEVICES) is not traits.takes_workers
    assert bool(traits.offload_fields) is traits.holds_model
    assert not (traits.has_engine and traits.is_trained)
    assert not (traits.takes_parallel_sizes and traits.sized_by_training)
    assert traits.is_trained or not traits.publishes_weights
    assert traits.receives_weights is (role is Role.ROLLOUT)
    assert traits.max_components is None or traits.max_components >= traits.min_components
    assert (role in AUTO_ROLES) is traits.is_auto_placed


@pytest.mark.parametrize("role", Role)
def test_parallel_sizes_are_those_of_the_training_or_of_the_component(role: Role) -> None:
    """The methods of the spec are below the table, and name the role."""
    own = {"tensorParallelSize": 2, "contextParallelSize": 4, "expertParallelSize": 6} if TRAITS[role].takes_parallel_sizes else {}
    made = document({"name": "one", "role": role.value, "placement": {"ranks": "1"}, **own})
    made["spec"]["training"] = {"tensorParallelSize": 3, "contextParallelSize": 5, "expertParallelSize": 7}
    spec = spec_of(made)
    component = spec.components[1]
    sizes = spec.tensor_parallel_size(component), spec.context_parallel_size(component), spec.expert_parallel_size(component)
    assert sizes == ((3, 5, 7) if TRAITS[role].sized_by_training else (2, 4, 6) if own else (1, 1, 1))
    assert (sizes[0] > 1) is TRAITS[role].divides_layers
    if TRAITS[role].sized_by_training:
        assert spec.device_unit(component) == spec.training.device_unit


@pytest.mark.parametrize("role", LIMITED)
def test_more_components_than_a_role_has_are_refused(role: Role) -> None:
    own = {"model": {"path": "models/other"}} if TRAITS[role].has_own_model else {}
    extra = [{"name": f"more-{index}", "role": role.value, "placement": {"ranks": str(index + 2)}, **own} for index in range(2)]
    rollout = {"name": "engines", "role": "Rollout", "placement": {"ranks": "1"}}
    with pytest.raises(SpecInvalidError) as caught:
        validation.check(document(rollout, *extra))
    problems = [error for error in caught.value.errors if "a job has one" in error.problem]
    assert [error.problem for error in problems][-1:] == [
        f"a job has one {role}, {'actor_train' if role is Role.TRAINER else 'more-0'} already is it"
    ]


def test_several_reward_components_are_valid() -> None:
    rewards = [{"name": f"reward-{index}", "role": "Reward", "placement": {"workers": index + 1}} for index in range(2)]
    rollout = {"name": "engines", "role": "Rollout", "placement": {"ranks": "1"}}
    checked = validation.check(document(rollout, *rewards))
    assert [component.world_size for component in checked.plan.with_role(Role.REWARD)] == [1, 2, 1]


class TestTwoRollouts:
    """Engines of different sizes in one job."""

    def test_they_are_valid(self) -> None:
        checked = validation.check(document(*SMALL_AND_LARGE))
        assert [component.world_size for component in checked.plan.with_role(Role.ROLLOUT)] == [2, 2]

    def test_groups_go_together_to_one_of_all_engines(self) -> None:
        made = document(
            *(component | {"placement": {"ranks": ranks}} for component, ranks in zip(SMALL_AND_LARGE, ("1", "2-3"), strict=True))
        )
        made["spec"]["rollout"] = {"samplesPerPrompt": 4, "groupRouting": "Together"}
        assert validation.check(made).plan.mode is PlacementMode.DISAGGREGATED

    def test_one_of_them_can_be_left_to_the_planner(self) -> None:
        auto = {**SMALL_AND_LARGE[0], "placement": {"mode": "Auto"}}
        plan = validation.check(document(auto, SMALL_AND_LARGE[1])).plan
        chosen, given = plan.component("small").device_set(), plan.component("large").device_set()
        assert chosen
        assert chosen.isdisjoint(given | {0})

    def test_each_component_has_engines_of_its_size(self) -> None:
        plan = planned(document(*SMALL_AND_LARGE))
        assert [process.devices for process in plan.component("small").processes] == [(1,), (2,)]
        assert [process.devices for process in plan.component("large").processes] == [(3, 4), (5, 6)]
        assert plan.mode is PlacementMode.DISAGGREGATED

    @pytest.mark.parametrize(
        ("small", "large", "mode"),
        [("0", "1-2", PlacementMode.PARTIAL), ("1", "2-3", PlacementMode.DISAGGREGATED)],
    )
    def test_the_mode_counts_all_engines(self, small: str, large: str, mode: PlacementMode) -> None:
        components = [{**SMALL_AND_LARGE[0], "placement": {"ranks": small}}, {**SMALL_AND_LARGE[1], "placement": {"ranks": large}}]
        assert planned(document(*components)).mode is mode

    def test_memory_divides_the_responses_of_a_step_over_all_engines(self) -> None:
        def wanted(*components: dict[str, Any]) -> dict[str, int]:
            made = document(*components)
            made["spec"]["rollout"] = {"promptsPerStep": 30, "samplesPerPrompt": 2}
            spec = spec_of(made)
            estimate = memory.estimate(spec, planner.plan(spec), memory.shape_from_count(10**6))
            return {capacity.component: capacity.wanted_sequences for capacity in estimate.capacities}

        assert wanted(SMALL_AND_LARGE[0]) == {"small": 30}
        assert wanted(*SMALL_AND_LARGE) == {"small": 15, "large": 15}
