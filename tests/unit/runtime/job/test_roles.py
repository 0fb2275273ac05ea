"""The table of roles: total over what validation admits, consistent with the planner's half, and enough to start a job by."""

import pytest

from rljob_api.rules.supported import UNSUPPORTED
from rljob_api.v1alpha1.components import Role
from rljob_runtime.job.roles import ROLES, LeaseUnit
from rljob_runtime.offload.states import StateKind


def test_every_role_that_validation_admits_has_a_description() -> None:
    refused = {role for role in Role for row in UNSUPPORTED if row.path == "components[].role" and row.when(role.value)}
    assert set(ROLES) == set(Role) - refused


@pytest.mark.parametrize("role", ROLES)
def test_a_description_is_consistent(role: Role) -> None:
    description = ROLES[role]
    on_devices = description.lease is not LeaseUnit.NONE
    assert bool(description.state_kinds) == on_devices, "what computes on devices has state there"
    assert bool(description.phase) == on_devices, "a lease says what it is for"
    assert description.rederived_kinds <= description.state_kinds
    assert description.trains == (description.checkpoint_folder is not None), "what is trained is saved"
    assert description.scoring is None or on_devices
    assert description.process_group == (description.lease is LeaseUnit.COMPONENT), "collectives compute under one lease"
    assert "{step}" in description.phase or not on_devices


def test_what_components_with_leases_hold_is_released_before_engines_start() -> None:
    stages = {role: description.start_stage for role, description in ROLES.items()}
    holders = [role for role, d in ROLES.items() if d.lease is LeaseUnit.COMPONENT]
    engines = [role for role, d in ROLES.items() if StateKind.KV_CACHE in d.state_kinds]
    assert max(stages[role] for role in holders) < min(stages[role] for role in engines)


def test_checkpoint_folders_are_distinct() -> None:
    folders = [d.checkpoint_folder for d in ROLES.values() if d.checkpoint_folder is not None]
    assert len(folders) == len(set(folders))
