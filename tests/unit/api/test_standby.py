"""Where processes wait to take the place of lost engines."""

import json
from typing import Any

import pytest

from rljob_api import planner
from rljob_api.planning.standby import standby_places
from tests.unit.api.manifests import spec

TRAINER = {"name": "actor_train", "role": "Trainer", "placement": {"nodeGroups": ["a"], "ranks": "0"}}


def places(ranks: str, *, groups: list[str], resource: str = "nvidia.com/gpu", **rollout: Any) -> tuple[tuple[str, int], ...]:
    """Of a job with two nodes of two devices each in group a, one in group b, and engines of one device."""
    nodes = [
        {"name": "a", "nodes": 2, "devicesPerNode": 2, "deviceResource": resource},
        {"name": "b", "devicesPerNode": 2, "deviceResource": resource},
    ]
    engines = {"name": "actor_infer", "role": "Rollout", "placement": {"nodeGroups": groups, "ranks": ranks}}
    made = spec(nodes, [TRAINER, engines])
    made = made.model_copy(update={"rollout": made.rollout.model_validate_json(json.dumps(rollout))})
    return standby_places(made, planner.plan(made))


@pytest.mark.parametrize(
    ("ranks", "groups", "expected"),
    [
        ("0", ["b"], (("actor_infer", 2),)),  # the only engine
        ("0-1", ["b"], ()),  # its responses go on at the other one
        ("0,3", ["a"], (("actor_infer", 0), ("actor_infer", 1))),  # shared devices: all wait while one is replaced
    ],
)
def test_a_process_waits_where_the_loss_of_an_engine_stops_generation(ranks: str, groups: list[str], expected: object) -> None:
    assert places(ranks, groups=groups) == expected


def test_by_itself_none_waits_beside_cpu_devices() -> None:
    assert places("0", groups=["b"], resource="cpu") == ()
    assert places("0-1", groups=["b"], resource="cpu", standbyProcesses="PerNode") == (("actor_infer", 2),)


def test_one_for_each_node_or_none_where_the_spec_says_so() -> None:
    assert places("all", groups=["a", "b"], standbyProcesses="PerNode") == tuple(("actor_infer", node) for node in range(3))
    assert places("0", groups=["b"], standbyProcesses="Never") == ()
    assert places("0", groups=["b"], maxEngineRestarts=0) == ()
