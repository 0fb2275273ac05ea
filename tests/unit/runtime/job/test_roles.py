"""The table of roles: total over what validation admits, consistent with the planner's half, and enough to start a job by."""

from pathlib import Path
from typing import Any

import pytest

from rljob_api.errors import SpecInvalidError
from rljob_api.v1alpha1.components import Role
from rljob_api.validation import check
from rljob_runtime.job import device_sharing, launch, learning_settings
from rljob_runtime.job.assemble import transport_settings
from rljob_runtime.job.roles import ROLES, LeaseUnit
from rljob_runtime.offload.states import StateKind
from tests.unit.api.manifests import manifest


def test_every_role_has_a_description() -> None:
    assert set(ROLES) == set(Role)


@pytest.mark.parametrize("role", ROLES)
def test_a_description_is_consistent(role: Role) -> None:
    description = ROLES[role]
    on_devices = description.lease is not LeaseUnit.NONE
    assert bool(description.state_kinds) == on_devices, "what computes on devices has state there"
    assert bool(description.phase) == on_devices, "a lease says what it is for"
    assert description.rederived_kinds <= description.state_kinds
    assert description.trains == (description.checkpoint_folder is not None), "what is trained is saved"
    assert not description.scorings or on_devices
    collective = description.lease is LeaseUnit.COMPONENT and not description.serves
    assert description.process_group == collective, "collectives compute under one lease"
    assert "{step}" in description.phase or not on_devices


def test_what_components_with_leases_hold_is_released_before_engines_start() -> None:
    stages = {role: description.start_stage for role, description in ROLES.items()}
    holders = [role for role, d in ROLES.items() if d.lease is LeaseUnit.COMPONENT]
    engines = [role for role, d in ROLES.items() if StateKind.KV_CACHE in d.state_kinds]
    assert max(stages[role] for role in holders) < min(stages[role] for role in engines)


def test_checkpoint_folders_are_distinct() -> None:
    folders = [d.checkpoint_folder for d in ROLES.values() if d.checkpoint_folder is not None]
    assert len(folders) == len(set(folders))


def scorings(*components: dict[str, Any], **sections: Any) -> list[tuple[Role, str, str]]:
    """Passes over a step's samples by who makes them."""
    document = manifest()
    document["spec"]["nodeGroups"][0]["devicesPerNode"] = 3
    document["spec"]["components"] += components
    document["spec"]["model"] |= sections.pop("model", {})
    spec = check(document | {"spec": document["spec"] | sections}).job.spec
    return [(c.role, scoring.method, scoring.result) for c in spec.components for scoring in ROLES[c.role].scorings_in(spec)]


@pytest.mark.parametrize(
    "component",
    [
        {"role": "Reference"},
        {"role": "Critic"},
        {"role": "Teacher", "model": {"path": "models/other"}},
    ],
    ids=lambda component: str(component["role"]),
)
@pytest.mark.parametrize(
    ("own", "together"),
    [
        ({"tensorParallelSize": 2}, 2),
        ({"tensorParallelSize": 2, "contextParallelSize": 2}, 4),
        ({"contextParallelSize": 2, "expertParallelSize": 4}, 2),
    ],
)
def test_work_is_divided_by_the_components_own_sizes(component: dict[str, Any], own: dict[str, Any], together: int, tmp_path: Path) -> None:
    document = manifest()
    document["spec"]["nodeGroups"][0]["devicesPerNode"] = 6
    other = {"name": "other", "placement": {"ranks": "2-5"}, **own} | component
    document["spec"]["components"].append(other)
    checks = {"Reference": {"kl": {"coefficient": 0.1}}, "Critic": {"advantage": {"estimator": "GAE"}}}
    document["spec"]["algorithm"] = checks.get(component["role"], {})
    checked = check(document)
    spec, plan = checked.job.spec, checked.plan
    planned = {c.name: launch.worker_specs(spec, plan, c, tmp_path, tmp_path) for c in plan.components}
    configs = {name: [one.kwargs["config"] for one in planned[name]] for name in ("actor_train", "other")}
    for kind in ("tensor", "context", "expert"):
        sizes = {name: [getattr(one, f"{kind}_parallel_size") for one in found] for name, found in configs.items()}
        assert sizes == {"actor_train": [1], "other": [own.get(f"{kind}ParallelSize", 1)] * 4}
    running: dict[str, Any] = {name: [None] * len(specs) for name, specs in planned.items()}
    made = launch.job_workers(spec, plan, running, device_sharing.DeviceLeases(arbiter=None, clients={}))
    assert [c.ranks_per_share for c in made.components if c.role in (Role.TRAINER, component["role"])] == [1, together]


def test_a_transport_knows_the_nodes_of_senders_and_engines() -> None:
    """The chain of the TCP transport goes along them."""
    document = manifest()
    document["spec"]["nodeGroups"][0] |= {"nodes": 3, "devicesPerNode": 2}
    trainer, rollout = document["spec"]["components"][:2]
    trainer["placement"], rollout["placement"] = {"ranks": "2-3"}, {"ranks": "0-1,4-5"}
    document["spec"]["weightSync"] = {"backend": "TCP"}
    checked = check(document)
    spec, plan = checked.job.spec, checked.plan
    running: dict[str, Any] = {component.name: [None] * component.world_size for component in plan.components}
    made = launch.job_workers(spec, plan, running, device_sharing.DeviceLeases(arbiter=None, clients={}))
    settings = transport_settings(spec, made, None)
    engines = tuple(process.node_rank for process in plan.with_role(Role.ROLLOUT)[0].processes)
    assert sorted(engines) == [0, 0, 2, 2]
    assert (settings.engine_nodes, settings.sender_nodes) == (engines, {0: 1, 1: 1})


def test_teachers_are_given_their_prompts(tmp_path: Path) -> None:
    document = manifest()
    data = document["spec"]["data"]["train"]
    data.append(data[0] | {"name": "more"})
    for name, more in (("algebra", {"teaches": {"sources": ["sums"], "weight": 2}}), ("others", {})):
        placed: dict[str, Any] = {"name": name, "role": "Teacher", "placement": {"ranks": "0"}, "model": {"path": f"models/{name}"}}
        document["spec"]["components"].append(placed | more)
    checked = check(document)
    spec, plan = checked.job.spec, checked.plan
    running: dict[str, Any] = {component.name: [None] * component.world_size for component in plan.components}
    made = launch.job_workers(spec, plan, running, device_sharing.DeviceLeases(arbiter=None, clients={}))
    first, second = made.with_role(Role.TEACHER)
    tags = ("sums", "more", "sums")
    assert (made.scored_by(first, tags), made.scored_by(second, tags)) == ([True, False, True], [False, True, False])
    (trainer,) = made.with_role(Role.TRAINER)
    assert made.scored_by(trainer, tags) == [True] * 3
    rule = learning_settings.rule_config(spec)
    assert (rule.teacher_weights, rule.other_teacher_weight) == ({"sums": 2.0}, 1.0)
    configs = {c.name: launch.worker_specs(spec, plan, c, tmp_path, tmp_path)[0].kwargs["config"] for c in plan.with_role(Role.TEACHER)}
    assert {name: config.model_path for name, config in configs.items()} == {"algebra": "models/algebra", "others": "models/others"}


def test_adapters_answer_for_a_reference_that_no_component_holds() -> None:
    lora, penalized = {"lora": {"rank": 4}}, {"kl": {"coefficient": 0.5}}
    recomputed = penalized | {"offPolicy": {"proximal": "Recompute"}}
    reference = {"name": "reference", "role": "Reference", "placement": {"ranks": "2"}}
    base = (Role.TRAINER, "compute_base_logprobs", "reference_logprobs")
    proximal = (Role.TRAINER, "compute_logprobs", "proximal_logprobs")
    assert scorings(model=lora) == []
    assert scorings(model=lora, algorithm=penalized) == [base]
    assert scorings(model=lora, algorithm=recomputed, training={"miniBatches": 2}) == [base, proximal]
    assert scorings(reference, model=lora, algorithm=penalized) == [(Role.REFERENCE, "compute_logprobs", "reference_logprobs")]
    with pytest.raises(SpecInvalidError, match=r"add a component with role: Reference, or train adapters \(model.lora\)"):
        scorings(algorithm=penalized)
