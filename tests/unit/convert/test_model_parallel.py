"""Placement of language-model training: modes, engines, weight-sync maps, several agents, and every check."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest

from rljob_api.errors import PlacementError
from rljob_api.placement.topology import ACCELERATOR, Node, NodeGroup, Topology, topology
from rljob_convert.conformance.sizes import model_parallel_sizes
from rljob_convert.placement.component import ComponentPlacement, PlacementMode
from rljob_convert.placement.model_parallel import (
    EngineSizes,
    ModelParallelComponentPlacement,
    ModelParallelEvalComponentPlacement,
    ModelParallelSizes,
    RolloutSyncMode,
    engine_stride,
)
from rljob_convert.placement.multi_agent import MultiAgentModelParallelComponentPlacement, MultiAgentModelParallelEvalComponentPlacement
from rljob_convert.placement.strategies import NodePlacementStrategy


def cluster(*accelerators: int, **groups: tuple[int, ...]) -> Topology:
    nodes = [Node(rank=rank, num_accelerators=count, accelerator_type="NV_GPU") for rank, count in enumerate(accelerators)]
    return topology(nodes, [NodeGroup(label=label, node_ranks=ranks, hardware_type=ACCELERATOR) for label, ranks in groups.items()])


def place(section: Mapping[str, object], there: Topology, **sizes: Any) -> ModelParallelComponentPlacement:
    return ModelParallelComponentPlacement(section, there, ModelParallelSizes(**sizes))


def where(placed: ComponentPlacement, component: str) -> str:
    return " ".join(
        f"n{each.cluster_node_rank}:{','.join(map(str, each.local_hardware_ranks))}" for each in placed.get_placement(component)
    )


def check_of(section: Mapping[str, object], there: Topology, **sizes: Any) -> str:
    with pytest.raises(PlacementError) as caught:
        place(section, there, **sizes)
    assert caught.value.remedy
    return caught.value.check


ALL = "actor,rollout,reward"


@pytest.mark.parametrize(
    ("accelerators", "ranks", "actor_tp", "rollout_tp", "engines"),
    [
        ((4,), "0-3", 4, 2, "n0:0,2 n0:1,3"),
        ((8,), "0-7", 8, 2, "n0:0,4 n0:1,5 n0:2,6 n0:3,7"),
        ((8, 8), "all", 8, 4, "n0:0,2,4,6 n0:1,3,5,7 n1:0,2,4,6 n1:1,3,5,7"),
        ((8,), "0-7", 2, 4, "n0:0,1,2,3 n0:4,5,6,7"),
        ((8,), "0-3", 2, 1, "n0:0 n0:1 n0:2 n0:3"),
    ],
)
def test_collocated_engines_lie_over_the_shards_of_the_actor(
    accelerators: tuple[int, ...], ranks: str, actor_tp: int, rollout_tp: int, engines: str
) -> None:
    placed = place({ALL: ranks}, cluster(*accelerators), actor_tp=actor_tp, rollout_tp=rollout_tp)
    assert placed.placement_mode is PlacementMode.COLLOCATED
    assert placed.rollout_sync_mode is RolloutSyncMode.COLLOCATED
    assert not placed.is_pipeline
    assert where(placed, "rollout") == engines
    assert len(placed.get_placement("actor")) == len(placed.get_placement("reward")) == placed.actor_world_size
    assert placed.rollout_dp_size == len(placed.get_placement("rollout"))


def test_disaggregated() -> None:
    section = {"actor": "0-1", "rollout": "2-5", "inference": "6-7", "reward": "2-5"}
    placed = place(section, cluster(8), actor_tp=2, rollout_tp=2)
    assert (placed.placement_mode, placed.rollout_sync_mode) == (PlacementMode.DISAGGREGATED, RolloutSyncMode.DISAGGREGATED)
    assert placed.has_dedicated_inference
    assert (where(placed, "actor"), where(placed, "rollout")) == ("n0:0 n0:1", "n0:2,3 n0:4,5")
    assert (where(placed, "inference"), where(placed, "reward")) == ("n0:6 n0:7", "n0:2 n0:3 n0:4 n0:5")
    assert (placed.actor_dp_size, placed.rollout_dp_size, placed.rollout_world_size) == (1, 2, 4)


def test_disaggregated_engines_include_their_pipeline_stages() -> None:
    placed = place({"actor": "0-3", "rollout": "4-7", "reward": "0"}, cluster(8), rollout_tp=2, rollout_pp=2)
    assert where(placed, "rollout") == "n0:4,5,6,7"
    with pytest.raises(PlacementError, match="pipeline") as caught:
        placed.weight_sync_map()
    assert caught.value.check == "D11"


def test_inference_is_known_under_the_names_rlinf_uses() -> None:
    alone = place({"actor": "0", "rollout": "1", "actor_inference": "2", "reward": "0"}, cluster(4))
    assert where(alone, "inference") == where(alone, "actor_inference") == "n0:2"
    section = {"actor": "0", "rollout": "1", "inference": "2", "critic_inference": "3", "reward": "0"}
    both = place(section, cluster(4))
    assert where(both, "actor_inference") == "n0:2"
    assert where(both, "critic_inference") == "n0:3"


AUTO = {"actor": "0-3", "rollout": "4-7", "inference": "8-9", "reward": "4-7"}


def test_auto_gives_the_actor_a_process_on_every_unit() -> None:
    placed = place(AUTO, cluster(10), actor_tp=4, rollout_tp=2, inference_tp=2, auto_scheduler=True)
    assert (placed.placement_mode, placed.rollout_sync_mode) == (PlacementMode.AUTO, RolloutSyncMode.DISAGGREGATED)
    assert where(placed, "actor") == " ".join(f"n0:{unit}" for unit in range(10))
    assert where(placed, "rollout") == "n0:4,5 n0:6,7"
    assert placed.actor_world_size == 4


def test_auto_with_pre_process_runs_engines_on_the_actors_units_too() -> None:
    section = {"actor": "0-3", "rollout": "4-7", "reward": "0"}
    placed = place(section, cluster(8), actor_tp=2, rollout_tp=2, auto_scheduler=True, use_pre_process_policy=True)
    assert where(placed, "rollout") == "n0:0,1 n0:2,3 n0:4,5 n0:6,7"
    assert placed.rollout_world_size == 8
    assert placed.weight_sync_map() == {
        0: ((0, 0), (2, 0)),
        1: ((0, 1), (2, 1)),
        2: ((1, 0), (3, 0)),
        3: ((1, 1), (3, 1)),
    }


@pytest.mark.parametrize(
    ("section", "units", "sizes", "expected"),
    [
        ({ALL: "0-3"}, 4, {"actor_tp": 4, "rollout_tp": 2}, {0: ((0, 0),), 1: ((1, 0),), 2: ((0, 1),), 3: ((1, 1),)}),
        ({ALL: "0-3"}, 4, {"rollout_tp": 2}, {0: ((0, 0),), 1: ((0, 1),), 2: ((1, 0),), 3: ((1, 1),)}),
        (
            {"actor": "0-1", "rollout": "2-5", "reward": "0"},
            6,
            {"actor_tp": 2, "rollout_tp": 2},
            {0: ((0, 0), (1, 0)), 1: ((0, 1), (1, 1))},
        ),
        (
            {"actor": "0-5", "rollout": "6-7", "reward": "0"},
            8,
            {},
            {0: ((0, 0),), 1: ((1, 0),), 2: (), 3: (), 4: (), 5: ()},
        ),
        (
            AUTO,
            10,
            {"actor_tp": 4, "rollout_tp": 2, "inference_tp": 2, "auto_scheduler": True},
            {0: ((0, 0),), 1: ((1, 0),), 2: ((0, 1),), 3: ((1, 1),)},
        ),
    ],
)
def test_weight_sync_maps(section: Mapping[str, object], units: int, sizes: dict[str, Any], expected: dict[int, Any]) -> None:
    assert place(section, cluster(units), **sizes).weight_sync_map() == expected


@pytest.mark.parametrize(
    ("section", "sizes"),
    [
        ({ALL: "0-7"}, {"actor_tp": 2, "rollout_tp": 4}),
        ({"actor": "0-3", "rollout": "4-7", "reward": "0"}, {"actor_tp": 1, "rollout_tp": 2}),
        ({"actor": "0-3", "rollout": "4-5", "reward": "0"}, {"actor_tp": 4, "rollout_tp": 2}),
        ({"actor": "0-3", "rollout": "4-9", "reward": "0"}, {"actor_tp": 4, "rollout_tp": 2}),
        ({"actor": "0-3", "rollout": "4-9", "reward": "0"}, {"actor_tp": 2, "rollout_tp": 1}),
    ],
)
def test_sizes_without_a_complete_map_are_reported(section: Mapping[str, object], sizes: dict[str, Any]) -> None:
    placed = place(section, cluster(10), **sizes)
    with pytest.raises(PlacementError) as caught:
        placed.weight_sync_map()
    assert caught.value.check == "D11"


@pytest.mark.parametrize("actor_tp", [1, 2, 4, 8])
@pytest.mark.parametrize("rollout_tp", [1, 2, 4])
@pytest.mark.parametrize("group", ["near,far", "far,near"])
def test_collocated_weights_stay_on_their_device(actor_tp: int, rollout_tp: int, group: str) -> None:
    section: Mapping[str, object] = {ALL: {"node_group": group, "placement": "all"}}
    placed = place(section, cluster(8, 8, near=(0,), far=(1,)), actor_tp=actor_tp, rollout_tp=rollout_tp)
    if 1 < actor_tp < rollout_tp:
        return
    actor, rollout = placed.get_placement("actor"), placed.get_placement("rollout")
    for rank, ((engine, shard),) in placed.weight_sync_map().items():
        assert actor[rank].cluster_node_rank == rollout[engine].cluster_node_rank
        assert actor[rank].local_hardware_ranks[0] == rollout[engine].local_hardware_ranks[shard]


@pytest.mark.parametrize(("actor", "rollout"), [(2, 4), (2, 8), (4, 4), (6, 2), (8, 4)])
@pytest.mark.parametrize("rollout_tp", [1, 2])
def test_disaggregated_maps_reach_every_engine_shard_once(actor: int, rollout: int, rollout_tp: int) -> None:
    section: Mapping[str, object] = {"actor": f"0-{actor - 1}", "rollout": f"{actor}-{actor + rollout - 1}", "reward": "0"}
    placed = place(section, cluster(16), actor_tp=2, rollout_tp=rollout_tp)
    reached = Counter(shard for shards in placed.weight_sync_map().values() for shard in shards)
    assert reached == Counter((engine, shard) for engine in range(rollout // rollout_tp) for shard in range(rollout_tp))


@pytest.mark.parametrize(("trainer_tp", "engine_size", "stride"), [(4, 2, 2), (8, 2, 4), (2, 4, 1), (4, 4, 1), (3, 1, 3)])
def test_engine_stride(trainer_tp: int, engine_size: int, stride: int) -> None:
    assert engine_stride(trainer_tp, engine_size) == stride


APART: dict[str, object] = {"actor": "0-1", "rollout": "2-5", "inference": "6-7", "reward": "0"}


@pytest.mark.parametrize(
    ("check", "section", "sizes"),
    [
        ("M1", {"rollout,reward": "0-3"}, {}),
        ("M1", {"actor,reward": "0-3"}, {}),
        ("M1", {"actor": "0-1", "rollout": "2-3"}, {}),
        ("M2", {"actor": "0-1,3", "rollout,reward": "4-7"}, {}),
        ("M2", {"actor": "0-1", "rollout,reward": "4,6"}, {}),
        ("M2", {"actor": "0-1", "rollout,reward": "2-3", "inference": "4,6"}, {}),
        ("M2", {"actor": "0-1", "rollout,reward": "2-3", "critic_inference": "4,6"}, {}),
        ("M2", {"actor": "0-1", "rollout,reward": "2-3", "critic": "4,6"}, {}),
        ("M3a", {ALL: "0-7"}, {"auto_scheduler": True}),
        ("M3b", {"rollout": "0-3", "actor": "4-7", "reward": "0"}, {"auto_scheduler": True}),
        ("M3b", {"actor": "0-2", "rollout": "4-7", "reward": "0"}, {"auto_scheduler": True}),
        ("M3b", {"actor": "0-2", "rollout": "3-6", "reward": "0"}, {"auto_scheduler": True}),
        ("M3c", {ALL: "0-3", "inference": "4-7"}, {}),
        ("M3c", {ALL: "0-3", "actor_inference": "4-7"}, {}),
        ("M3c", {ALL: "0-3", "critic_inference": "4-7"}, {}),
        ("M3d", APART, {"actor_tp": 2, "inference_tp": 4}),
        ("M3d", APART, {"recompute_logprobs": False}),
        ("M3d", {"actor": "0", "rollout": "1", "reward": "0", "critic_inference": "2"}, {"critic_tp": 2}),
        ("M3e", {"actor": "0-3", "rollout,reward": "2-5"}, {}),
        ("M3e", {"actor": "0-7", "rollout,reward": "0-3"}, {}),
        ("M3e", {"actor": "0-3", "rollout,reward": "4-5", "critic": "3-3"}, {}),
        ("M4", {ALL: "0-3"}, {"actor_tp": 8}),
        ("M4", {ALL: "0-3"}, {"rollout_tp": 8}),
        ("M4", {"actor": "0-3", "rollout,reward": "4-5"}, {"rollout_tp": 2, "rollout_pp": 2}),
        ("M5", {ALL: "0-5"}, {"actor_tp": 3, "rollout_tp": 2}),
        (
            "M5",
            {"actor": "0-2", "rollout": "3-7", "reward": "0"},
            {"rollout_tp": 2, "auto_scheduler": True, "use_pre_process_policy": True},
        ),
        ("B2", {"actor": "0-2", "rollout": "3-7", "reward": "0"}, {"rollout_tp": 2}),
        ("B2", {ALL: "0-5"}, {"actor_tp": 4, "rollout_tp": 2}),
        ("P4", {ALL: "0-8"}, {"actor_tp": 99}),
        ("D3", {ALL: "0-7:0-3"}, {}),
        ("D3", {"actor,reward": "0-7", "rollout": "0-7:0-1"}, {"rollout_tp": 2}),
        ("D3", {"actor,rollout": "0-3", "reward": "0-3:0-7"}, {}),
        ("D11", {"actor": "0-2", "rollout": "3-6", "reward": "0"}, {"actor_tp": 2}),
        ("D11", {"actor": "0-1", "rollout": "2-7", "reward": "0"}, {"rollout_tp": 4}),
        ("D11", {ALL: "0-3"}, {"rollout_tp": 2, "rollout_pp": 2}),
        ("D11", {"actor": "0-3", "rollout": "4-5", "inference": "6-7", "reward": "4"}, {"actor_tp": 4, "auto_scheduler": True}),
        ("D11", {"actor,rollout,reward": "0-3", "critic": "4-6"}, {"critic_tp": 2}),
        ("D14", {"actor": "0-1", "critic": "2-3", "rollout": "4-7", "reward": "0"}, {"auto_scheduler": True}),
        ("D15", {"actor": "0-3", "critic": "4-5", "rollout": "6-7", "critic_inference": "0-1", "reward": "0"}, {}),
        ("D15", {"actor": "0-3", "critic": "4-5", "rollout": "6-7", "inference": "4-5", "reward": "0"}, {}),
        ("D15", {"actor": "0-3", "rollout": "6-7", "inference": "4-5", "critic_inference": "5", "reward": "0"}, {}),
    ],
)
def test_every_check(check: str, section: Mapping[str, object], sizes: dict[str, Any]) -> None:
    assert check_of(section, cluster(8), **sizes) == check


def test_an_engine_lies_on_one_node() -> None:
    assert check_of({ALL: "7-8"}, cluster(8, 8), rollout_tp=2) == "B5"


def test_process_ranks_that_fit_the_sizes_are_taken() -> None:
    section: Mapping[str, object] = {"actor,reward": "0-7:0-7", "rollout": "0-7:0-3"}
    placed = place(section, cluster(8), actor_tp=4, rollout_tp=2)
    assert where(placed, "rollout") == "n0:0,2 n0:1,3 n0:4,6 n0:5,7"


def test_critic_and_reward_may_be_anywhere_when_collocated() -> None:
    placed = place({"actor,rollout": "0-3", "reward": "4-7", "critic": "2-5"}, cluster(8))
    assert placed.placement_mode is PlacementMode.COLLOCATED
    assert where(placed, "critic") == "n0:2 n0:3 n0:4 n0:5"


def test_reward_fills_gaps_as_in_rlinf() -> None:
    assert where(place({"actor,rollout": "0-3", "reward": "0,2"}, cluster(4)), "reward") == "n0:0 n0:1 n0:2"


def test_node_groups_are_honored() -> None:
    there = cluster(8, 8, near=(0,), far=(1,))
    placed = place({ALL: {"node_group": "far", "placement": "0-3"}}, there)
    assert where(placed, "actor") == where(placed, "rollout") == "n1:0 n1:1 n1:2 n1:3"
    same_ranks_elsewhere: Mapping[str, object] = {
        "actor,reward": {"node_group": "near", "placement": "0-3"},
        "rollout": {"node_group": "far", "placement": "0-3"},
    }
    assert place(same_ranks_elsewhere, there).placement_mode is PlacementMode.DISAGGREGATED
    same_units: dict[str, object] = {"actor,reward": {"node_group": "far", "placement": "0-3"}, "rollout": "8-11"}
    assert place(same_units, there).placement_mode is PlacementMode.COLLOCATED


def test_auto_counts_in_the_node_groups() -> None:
    there = cluster(8, 4, far=(1,))
    section: Mapping[str, object] = {
        name: {"node_group": "far", "placement": ranks} for name, ranks in (("actor", "0-1"), ("rollout,reward", "2-3"))
    }
    assert where(place(section, there, auto_scheduler=True), "actor") == "n1:0 n1:1 n1:2 n1:3"
    assert check_of({**section, "inference": "4"}, there, auto_scheduler=True) == "M3b"


def test_reward_without_accelerators_is_placed_on_nodes() -> None:
    placed = place({"actor,rollout": "0-3", "reward": {"node_group": "node", "placement": "0-1:0-3"}}, cluster(4, 4))
    assert isinstance(placed.get_strategy("reward"), NodePlacementStrategy)
    assert where(placed, "reward") == "n0: n0: n1: n1:"


def test_other_components_keep_their_rank_map() -> None:
    placed = place({ALL: "0-3", "env": "0-3:0-1"}, cluster(4))
    assert where(placed, "env") == "n0:0,1 n0:2,3"


def test_evaluation_needs_rollout_and_reward_only() -> None:
    sizes = ModelParallelSizes(actor_tp=8, rollout_tp=2)
    placed = ModelParallelEvalComponentPlacement({"rollout": "0-3", "reward": "0-3"}, cluster(4), sizes)
    assert placed.placement_mode is PlacementMode.COLLOCATED
    assert where(placed, "rollout") == "n0:0,1 n0:2,3"
    for check, section, units in (
        ("M1", {"rollout": "0-3"}, 4),
        ("M1", {"reward": "0-3"}, 4),
        ("M2", {"rollout": "0,2", "reward": "0"}, 4),
        ("M4", {"rollout,reward": "0"}, 4),
        ("B2", {"rollout,reward": "0-2"}, 4),
    ):
        with pytest.raises(PlacementError) as caught:
            ModelParallelEvalComponentPlacement(section, cluster(units), sizes)
        assert caught.value.check == check
    with pytest.raises(PlacementError) as caught:
        ModelParallelEvalComponentPlacement({"rollout,reward": "0-3"}, cluster(4), ModelParallelSizes(rollout_tp=2, rollout_pp=2))
    assert caught.value.check == "D11"


def agents(section: Mapping[str, object], units: int = 8, **sizes: Any) -> MultiAgentModelParallelComponentPlacement:
    return MultiAgentModelParallelComponentPlacement(section, cluster(units), ModelParallelSizes(**sizes))


def test_one_engine_set_for_several_agents() -> None:
    placed = agents({ALL: "0-7"}, actor_tp=2, rollout_tp=2)
    assert (placed.placement_mode, placed.rollout_sync_mode) == (PlacementMode.COLLOCATED, RolloutSyncMode.COLLOCATED)


def test_several_engine_sets_inside_the_actors_units() -> None:
    section: Mapping[str, object] = {"actor,reward": "0-7", "rollout": "0-3", "rollout_worker": "4-7"}
    placed = agents(section, actor_tp=2, rollout_tp=2, engines={"rollout_worker": EngineSizes(tp=2)})
    assert (placed.placement_mode, placed.rollout_sync_mode) == (PlacementMode.COLLOCATED, RolloutSyncMode.DISAGGREGATED)
    assert placed.weight_sync_map() == {rank: (((rank // 2, rank % 2),) if rank < 4 else ()) for rank in range(8)}
    assert where(placed, "rollout_worker") == "n0:4 n0:5 n0:6 n0:7"
    repacked = placed.repacked("rollout_worker").get_placement(placed.topology)
    assert [each.local_hardware_ranks for each in repacked] == [(4, 5), (6, 7)]
    assert placed.repacked("actor") is placed.get_strategy("actor")


@pytest.mark.parametrize("sizes", [EngineSizes(tp=3), EngineSizes(pp=3), EngineSizes(dp=3)])
def test_repacked_engines_must_fit_their_own_sizes(sizes: EngineSizes) -> None:
    placed = agents({ALL: "0-7", "planner": "4-7"}, rollout_tp=2, engines={"planner": sizes})
    with pytest.raises(PlacementError) as caught:
        placed.repacked("planner")
    assert caught.value.check == "B2"


def test_evaluation_with_several_agents_repacks_too() -> None:
    sizes = ModelParallelSizes(rollout_tp=2)
    placed = MultiAgentModelParallelEvalComponentPlacement({"rollout,reward": "0-3", "planner": "4-7"}, cluster(8), sizes)
    assert len(placed.repacked("planner").get_placement(placed.topology)) == 2


@pytest.mark.parametrize(
    ("check", "section"),
    [
        ("A1", {"actor": "0-7", "reward": "0-3", "rollout": "0-7"}),
        ("A1", {"actor": "0-3", "reward": "0,3", "rollout": "0-3"}),
        ("A2", {"actor,reward": "0-3", "rollout": "4-7"}),
        ("A2", {"actor,reward": "0-3", "rollout": "0-3", "rollout_b": "3-4"}),
        ("A3", {"actor,reward": "0-7", "rollout": "0-3", "planner": "4-7", "worker": "6-7"}),
        ("A3", {"actor,reward,rollout": "0-7", "a": "0,7", "b": "1-3", "c": "2"}),
        ("M3c", {"actor,reward,rollout": "0-7", "inference": "0-7"}),
    ],
)
def test_every_check_of_several_agents(check: str, section: Mapping[str, object]) -> None:
    with pytest.raises(PlacementError) as caught:
        agents(section)
    assert caught.value.check == check


def test_several_agents_may_leave_units_unused_and_interleave() -> None:
    placed = agents({"actor,reward": "0-7", "rollout": "0-3", "a": "0,2", "b": "1,3"})
    assert placed.components == ("actor", "reward", "rollout", "a", "b")


CONFIG: dict[str, Any] = {
    "cluster": {"component_placement": {ALL: "0-3", "planner, judge": "0"}, "auto_scheduler": True},
    "actor": {"model": {"tensor_model_parallel_size": 4, "context_parallel_size": 2, "pipeline_model_parallel_size": 3}},
    "rollout": {"tensor_parallel_size": 2, "pipeline_parallel_size": 5},
    "algorithm": {"recompute_logprobs": True},
}


def test_sizes_are_read_out_of_a_configuration() -> None:
    sizes = model_parallel_sizes(CONFIG)
    assert sizes == ModelParallelSizes(actor_tp=4, actor_cp=2, actor_pp=3, rollout_tp=2, rollout_pp=5, auto_scheduler=True)
    assert (sizes.actor_model, sizes.rollout_engine) == (24, 10)
    assert (sizes.inference_size, sizes.critic_inference_size) == ((4, 3), (1, 1))


def test_sections_that_are_there_are_read() -> None:
    sizes = model_parallel_sizes(
        CONFIG
        | {
            "actor_inference": {"model": {}},
            "critic": {"model": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4}},
            "critic_inference": {"model": {"pipeline_model_parallel_size": 1}},
            "judge": {"tensor_parallel_size": 2, "dp_size": 3},
            "elsewhere": {"tensor_parallel_size": "not read"},
        }
    )
    assert (sizes.inference_size, sizes.critic_inference_size) == ((1, 3), (2, 1))
    assert sizes.engines == {"judge": EngineSizes(tp=2, dp=3)}


def test_evaluation_has_no_actor() -> None:
    assert model_parallel_sizes({"rollout": {}}, evaluation=True) == ModelParallelSizes(recompute_logprobs=False)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"actor": None}, "actor is null, not a map"),
        ({"actor": {}}, "actor.model is missing"),
        ({"actor": {"model": []}}, "actor.model is a list"),
        ({"rollout": 3}, "rollout is 3"),
        ({"rollout": {"tensor_parallel_size": "2"}}, 'rollout.tensor_parallel_size is "2"'),
        ({"rollout": {"tensor_parallel_size": 0}}, "rollout.tensor_parallel_size is 0"),
        ({"rollout": {"tensor_parallel_size": None}}, "rollout.tensor_parallel_size is null"),
        ({"rollout": {"tensor_parallel_size": True}}, "rollout.tensor_parallel_size is true"),
        ({"rollout": {"tensor_parallel_size": 2.0}}, "rollout.tensor_parallel_size is 2.0"),
        ({"rollout": {"tensor_parallel_size": 10**5000}}, "out of range"),
        ({"rollout": {"tensor_parallel_size": -(10**5000)}}, "a very large number"),
        ({"inference": {}}, "inference.model is missing"),
        ({"cluster": {"auto_scheduler": "yes"}}, 'cluster.auto_scheduler is "yes"'),
        ({"algorithm": []}, "algorithm is a list"),
        ({"judge": 1}, "judge is 1"),
    ],
)
def test_wrong_configurations_are_placement_errors(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(PlacementError) as caught:
        model_parallel_sizes(CONFIG | change)
    assert caught.value.check == "M4"
    assert problem in caught.value.problem


@pytest.mark.parametrize("wrong", [{"actor_tp": 0}, {"rollout_pp": -1}, {"inference_tp": 10**9}])
def test_sizes_outside_their_bounds_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(PlacementError) as caught:
        ModelParallelSizes(**wrong)  # type: ignore[arg-type]
    assert caught.value.check == "M4"
