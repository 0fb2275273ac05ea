import json
from pathlib import Path

import pytest

from rljob_api import planner
from rljob_api.errors import SpecInvalidError
from rljob_api.planning.plan import PlacementMode
from rljob_api.v1alpha1 import RLJob
from rljob_api.v1alpha1.components import Role
from tests.unit.api.manifests import manifest, spec

GROUPS = [{"name": "a", "nodes": 2, "devicesPerNode": 4}, {"name": "cpus", "nodes": 1}, {"name": "b", "nodes": 1, "devicesPerNode": 2}]


def component(name: str, role: str, engine_size: int = 1, **placement: object) -> dict:
    result = {"name": name, "role": role, "placement": placement}
    return {**result, "engine": {"tensorParallelSize": engine_size}} if engine_size > 1 else result


def where(plan: planner.Plan, name: str) -> list[tuple[int, tuple[int, ...], int, int]]:
    return [(p.node_rank, p.local_devices, p.local_rank, p.local_world_size) for p in plan.component(name).processes]


def test_nodes_count_through_the_groups_in_written_order() -> None:
    plan = planner.plan(spec(GROUPS, [component("t", "Trainer", ranks="0")]))
    assert [(n.rank, n.group, n.index, n.first_device) for n in plan.nodes] == [
        (0, "a", 0, 0),
        (1, "a", 1, 4),
        (2, "cpus", 0, 8),
        (3, "b", 0, 8),
    ]


def test_one_trainer_process_per_device() -> None:
    plan = planner.plan(spec(GROUPS, [component("t", "Trainer", ranks="2-5")]))
    assert where(plan, "t") == [(0, (2,), 0, 2), (0, (3,), 1, 2), (1, (0,), 0, 2), (1, (1,), 1, 2)]
    assert plan.component("t").devices == (2, 3, 4, 5)


def test_engines_take_consecutive_devices() -> None:
    plan = planner.plan(spec(GROUPS, [component("r", "Rollout", 2, deviceMapping="list(range(0,8))", devicesPerWorker=2)]))
    assert where(plan, "r") == [(0, (0, 1), 0, 2), (0, (2, 3), 1, 2), (1, (0, 1), 0, 2), (1, (2, 3), 1, 2)]


def test_ranks_count_through_the_chosen_groups_only() -> None:
    plan = planner.plan(spec(GROUPS, [component("t", "Trainer", nodeGroups=["b"], ranks="all")]))
    assert where(plan, "t") == [(3, (0,), 0, 2), (3, (1,), 1, 2)]
    assert plan.component("t").devices == (8, 9)


def test_nodes_without_devices_are_skipped() -> None:
    plan = planner.plan(spec(GROUPS, [component("t", "Trainer", ranks="7-8")]))
    assert [p.node_rank for p in plan.component("t").processes] == [1, 3]


def test_ranks_count_in_the_written_order_of_groups_and_processes_by_node() -> None:
    plan = planner.plan(spec(GROUPS, [component("t", "Trainer", nodeGroups=["b", "a"], ranks="1-2")]))
    assert [(p.node_rank, p.devices) for p in plan.component("t").processes] == [(0, (0,)), (3, (9,))]
    mapped = planner.plan(spec(GROUPS, [component("t", "Trainer", nodeGroups=["b", "a"], deviceMapping="[1, 2]")]))
    assert [(p.node_rank, p.devices) for p in mapped.component("t").processes] == [(3, (9,)), (0, (0,))], "ROLL's lists keep their order"


ROBOTS = [
    {"name": "gpus", "nodes": 2, "devicesPerNode": 2},
    {
        "name": "arms",
        "nodes": 2,
        "devicesPerNode": 1,
        "hardware": {"type": "Franka", "configs": [{"nodeRank": 1, "parameters": {"ip": "198.18.0.1"}}, {"nodeRank": 1}]},
    },
]


@pytest.mark.parametrize(
    ("placement", "where"),
    [
        ({"nodeGroups": ["node"], "ranks": "0-1:0-3"}, [(0, (), ()), (0, (), ()), (1, (), ()), (1, (), ())]),
        ({"nodeGroups": ["arms"], "ranks": "0-1:0-3"}, [(3, (), (0,)), (3, (), (0,)), (3, (), (1,)), (3, (), (1,))]),
        ({"nodeGroups": ["arms"], "ranks": "0-1:0"}, [(3, (), (0, 1))]),
        ({"nodeGroups": ["gpus"], "ranks": "0-3:0-1"}, [(0, (0, 1), ()), (1, (2, 3), ())]),
        ({"nodeGroups": ["cluster"], "ranks": "4"}, [(2, (4,), ())]),
        ({"workers": 3, "nodeGroups": ["arms"]}, [(2, (), ()), (3, (), ()), (2, (), ())]),
    ],
)
def test_environments_run_on_nodes_robots_and_devices(placement: dict, where: list) -> None:
    plan = planner.plan(spec(ROBOTS, [component("env", "Environment", **placement)]))
    assert [(p.node_rank, p.devices, p.local_hardware) for p in plan.component("env").processes] == where


@pytest.mark.parametrize(
    ("size", "ranks", "devices"),
    [(1, "0:0-3", [(0,)] * 4), (2, "0-3:0-1", [(0, 1), (2, 3)]), (2, "0-1,4-5", [(0, 1), (4, 5)])],
)
def test_process_ranks_of_engines(size: int, ranks: str, devices: list) -> None:
    plan = planner.plan(spec(GROUPS, [component("r", "Rollout", size, ranks=ranks)]))
    assert [p.devices for p in plan.component("r").processes] == devices


def test_engines_on_the_trainers_devices_are_strided_to_sit_on_what_feeds_them() -> None:
    document = manifest()
    document["spec"]["nodeGroups"] = [{"name": "a", "nodes": 1, "devicesPerNode": 8}]
    document["spec"]["components"] = [component("r", "Rollout", 2, ranks="all"), component("t", "Trainer", ranks="all")]
    document["spec"]["training"] = {"tensorParallelSize": 8}
    job = RLJob.model_validate_json(json.dumps(document))
    assert [p.devices for p in planner.plan(job.spec).component("r").processes] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    document["spec"]["nodeGroups"] = [{"name": "a", "nodes": 2, "devicesPerNode": 4}]  # strided engines would span nodes
    job = RLJob.model_validate_json(json.dumps(document))
    assert [p.devices for p in planner.plan(job.spec).component("r").processes] == [(0, 1), (2, 3), (4, 5), (6, 7)]


@pytest.mark.parametrize(
    ("role", "placement", "message"),
    [
        ("Trainer", {"nodeGroups": ["gpus", "node"], "ranks": "0"}, "counted twice|count nodes"),
        ("Trainer", {"nodeGroups": ["arms"], "ranks": "0"}, "needs devices, but arms offers Frankas"),
        ("Trainer", {"nodeGroups": ["node"], "ranks": "0"}, "needs devices, but node offers nodes"),
        ("Trainer", {"nodeGroups": ["gpus", "gpus"], "ranks": "0"}, "named twice"),
        ("Trainer", {"nodeGroups": ["gpu"], "ranks": "0"}, "did you mean gpus"),
        ("Trainer", {"ranks": "0:0-1"}, "2 processes on device 0.*compute at the same time"),
        ("Trainer", {"ranks": "0-1:0"}, "gives process 0 2 devices, which differs from 1"),
        ("Trainer", {"ranks": "0-1:1-2"}, "process"),
        ("Environment", {"nodeGroups": ["arms"], "ranks": "2"}, "Franka"),
        ("Environment", {"nodeGroups": ["arms"], "ranks": "0-1:0,0-1:1"}, "Franka"),
    ],
)
def test_impossible_placements_are_named(role: str, placement: dict, message: str) -> None:
    with pytest.raises(SpecInvalidError, match=message):
        planner.plan(spec(ROBOTS, [component("x", role, **placement)]))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([{"name": "node"}], "is reserved"),
        ([{"name": "a", "nodes": 4096, "devicesPerNode": 1024}], "ask for 4194304 devices, more than 131072"),
        ([{"name": "a", "hardware": {"type": "Franka", "configs": [{"nodeRank": 1}]}}], "is not a node of a, which has 1"),
        ([{"name": "a", "hardware": {"type": "Franka", "configs": [{"nodeRank": 0}, {"nodeRank": 0}]}}], "is the same piece as"),
        ([{"name": "a", "hardware": {"type": "Accelerator"}}], "set devicesPerNode instead"),
        ([{"name": "a", "hardware": {"type": "Franka"}, "ignoreHardware": True}], "has no effect"),
    ],
)
def test_impossible_groups_are_named(groups: list, message: str) -> None:
    with pytest.raises(SpecInvalidError, match=message):
        planner.plan(spec(groups, [component("w", "Reward", workers=1)]))


def test_a_trainer_does_not_mix_makes_but_engines_may() -> None:
    groups = [
        {"name": "n", "devicesPerNode": 2},
        {"name": "m", "devicesPerNode": 2, "deviceResource": "amd.com/gpu"},
    ]
    with pytest.raises(SpecInvalidError, match=r"mixes nvidia.com/gpu \(node 0\) and amd.com/gpu \(node 1\)"):
        planner.plan(spec(groups, [component("t", "Trainer", ranks="all")]))
    plan = planner.plan(spec(groups, [component("r", "Rollout", ranks="all")]))
    assert plan.component("r").world_size == 4


def test_cpu_workers_go_round_the_nodes() -> None:
    plan = planner.plan(spec(GROUPS, [component("w", "Reward", workers=6)]))
    assert [p.node_rank for p in plan.component("w").processes] == [0, 1, 2, 3, 0, 1]
    assert where(plan, "w")[4] == (0, (), 1, 2)
    only = planner.plan(spec(GROUPS, [component("w", "Reward", nodeGroups=["cpus"], workers=2)]))
    assert [p.node_rank for p in only.component("w").processes] == [2, 2]


@pytest.mark.parametrize(
    ("trainer", "rollout", "mode"),
    [
        ("0-3", "0-3", PlacementMode.COLLOCATED),
        ("0-1", "2-3", PlacementMode.DISAGGREGATED),
        ("0-3", "2-5", PlacementMode.HYBRID),
        ("0-1", "0-3", PlacementMode.PARTIAL),
    ],
)
def test_mode(trainer: str, rollout: str, mode: PlacementMode) -> None:
    plan = planner.plan(spec(GROUPS, [component("t", "Trainer", ranks=trainer), component("r", "Rollout", ranks=rollout)]))
    assert plan.mode is mode


def test_sharing_is_mutual_and_named() -> None:
    components = [
        component("t", "Trainer", ranks="0-3"),
        component("r", "Rollout", ranks="3-5"),
        component("ref", "Reference", ranks="5"),
        component("w", "Reward", workers=1),
    ]
    plan = planner.plan(spec(GROUPS, components))
    assert [c.shares_devices_with for c in plan.components] == [("r",), ("t", "ref"), ("r",), ()]
    assert plan.with_role(Role.ROLLOUT)[0].name == "r"


@pytest.mark.parametrize(("engine", "can"), [("VLLM", "vLLM itself can span nodes"), ("SGLang", "SGLang itself can span nodes")])
def test_an_engine_across_nodes_names_both_and_the_reason(engine: str, can: str) -> None:
    rollout = component("r", "Rollout", 2, ranks="3-4")
    rollout["engine"]["type"] = engine
    with pytest.raises(SpecInvalidError, match=rf"node 0 \(a\[0\]\) and node 1 \(a\[1\]\).*one process on one node, although {can}"):
        planner.plan(spec(GROUPS, [rollout]))


def test_all_problems_at_once() -> None:
    components = [component("t", "Trainer", ranks="99"), component("t", "Rollout", deviceMapping="[-1]"), component("w", "Reward")]
    errors = planner.plan_or_errors(spec(GROUPS, components))
    assert isinstance(errors, list)
    assert [error.path for error in errors] == [
        "spec.components[1].name",
        "spec.components[0].placement.ranks",
        "spec.components[1].placement.deviceMapping",
        "spec.components[2].placement",
    ]


def test_golden_plan_of_the_quickstart() -> None:
    from rljob_api.validation import check
    from rljob_runtime.commands.show_plan import as_yaml

    root = Path(__file__).parents[3]
    text = as_yaml(check((root / "examples" / "quickstart.yaml").read_text()))
    assert text + "\n" == (root / "tests" / "golden" / "plan" / "quickstart.yaml").read_text()


def test_the_builder_is_valid() -> None:
    from rljob_api.validation import check

    assert check(manifest()).plan.mode is PlacementMode.DISAGGREGATED
