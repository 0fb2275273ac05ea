"""Sync routes: RLinf's own map where it has one, what each backend does, texts, and what is refused."""

import dataclasses
import json

import pytest

from rljob_api.errors import PlacementError
from rljob_api.planner import plan
from rljob_api.planning.sync_routes import (
    EngineLayout,
    SyncDevice,
    SyncPlan,
    TrainerLayout,
    Transport,
    chosen_backend,
    chosen_senders,
    sync_plan,
    sync_plan_of,
)
from rljob_api.rules import weight_sync
from rljob_api.v1alpha1 import RLJob, RLJobSpec
from rljob_api.v1alpha1.operations import SyncBackend
from rljob_api.validation import check
from tests.layout.tree import ROOT
from tests.unit.api.manifests import manifest

SHARD_BACKENDS = [SyncBackend.NCCL, SyncBackend.IPC]


def trainer(devices: range, tensor: int = 1, per_node: int = 8) -> TrainerLayout:
    return TrainerLayout(ranks=tuple(SyncDevice(d // per_node, d) for d in devices), tensor_parallel_size=tensor)


def engines(*devices: tuple[int, ...], tensor: int, pipeline: int = 1, per_node: int = 8) -> EngineLayout:
    placed = tuple(tuple(SyncDevice(d // per_node, d) for d in engine) for engine in devices)
    return EngineLayout(engines=placed, tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)


def strided(num_devices: int, atp: int, rtp: int) -> list[tuple[int, ...]]:
    """Devices of RLinf's collocated engines: P(rtp, stride) of rlinf 0.3.0's ModelParallelComponentPlacement."""
    stride = max(1, atp // rtp)
    blocks = range(0, num_devices, rtp * stride)
    return [tuple(block + k + i * stride for i in range(rtp)) for block in blocks for k in range(stride)]


def pairs(routed: SyncPlan, transport: Transport | None = None) -> dict[int, list[tuple[int, int]]]:
    """(engine, shard) that each rank feeds."""
    result: dict[int, list[tuple[int, int]]] = {}
    for route in routed.routes():
        if transport is None or route.transport is transport:
            result.setdefault(route.source_rank, []).append((route.engine, route.engine_shard or 0))
    return result


@pytest.mark.parametrize("backend", SHARD_BACKENDS)
@pytest.mark.parametrize(
    ("num_devices", "atp", "rtp"),
    [(4, 4, 2), (8, 8, 2), (16, 8, 4), (8, 1, 1), (8, 1, 2), (8, 1, 8), (8, 2, 2), (8, 4, 1), (16, 4, 2), (16, 8, 8)],
)
def test_collocated_routes_on_a_device_are_rlinfs_map(backend: SyncBackend, num_devices: int, atp: int, rtp: int) -> None:
    routed = sync_plan(backend, trainer(range(num_devices), atp), engines(*strided(num_devices, atp, rtp), tensor=rtp))
    m = atp // rtp
    expected = {r: [((r // atp) * m + r % atp % m, r % atp // m) if atp > 1 else (r // rtp, r % rtp)] for r in range(num_devices)}
    assert pairs(routed, Transport.SAME_DEVICE) == expected
    assert routed.figures.network == 0
    assert routed.figures.same_device == (1 / m if m > 1 else 1)
    for route in routed.routes():  # what RLinf's all-gather moves: between the ranks of one group of m
        place = routed.engines.engines[route.engine][route.engine_shard or 0]
        assert route.source_rank % atp // max(m, 1) == place.device % atp // max(m, 1)


def test_collocated_table_literally() -> None:
    routed = sync_plan(SyncBackend.IPC, trainer(range(4), 4), engines((0, 2), (1, 3), tensor=2))
    assert pairs(routed, Transport.SAME_DEVICE) == {0: [(0, 0)], 1: [(1, 0)], 2: [(0, 1)], 3: [(1, 1)]}


@pytest.mark.parametrize(
    ("actor", "atp", "rollout", "rtp", "expected"),
    [
        (range(2), 2, range(2, 6), 2, {0: [(0, 0), (1, 0)], 1: [(0, 1), (1, 1)]}),
        (range(6), 1, range(6, 8), 1, {0: [(0, 0)], 1: [(1, 0)]}),
        (range(4), 2, range(8), 2, {0: [(0, 0), (2, 0)], 1: [(0, 1), (2, 1)], 2: [(1, 0), (3, 0)], 3: [(1, 1), (3, 1)]}),
        (range(4), 2, range(4, 8), 2, {0: [(0, 0)], 1: [(0, 1)], 2: [(1, 0)], 3: [(1, 1)]}),
        (range(8), 4, range(8, 16), 4, {r: [(r // 4, r % 4)] for r in range(8)}),
    ],
)
def test_rlinfs_other_maps(actor: range, atp: int, rollout: range, rtp: int, expected: dict[int, list[tuple[int, int]]]) -> None:
    cut = [tuple(rollout[i : i + rtp]) for i in range(0, len(rollout), rtp)]
    assert pairs(sync_plan(SyncBackend.NCCL, trainer(actor, atp), engines(*cut, tensor=rtp))) == expected


def test_what_rlinf_leaves_out_or_divides_by_zero() -> None:
    unmapped = sync_plan(SyncBackend.NCCL, trainer(range(4), 2), engines(*((d,) for d in range(8, 14)), tensor=1))
    assert {route.engine for route in unmapped.routes()} == set(range(6))
    wider = sync_plan(SyncBackend.IPC, trainer(range(4), 2), engines((0, 1, 2, 3), tensor=4))
    assert [(r.source_rank, r.engine_shard, r.transport) for r in wider.routes()] == [
        (0, 0, Transport.SAME_DEVICE),
        (0, 1, Transport.SAME_NODE),  # device 1 has shard 1, the engine's shard 1 is in shard 0
        (1, 2, Transport.SAME_NODE),
        (3, 3, Transport.SAME_DEVICE),
    ]


def test_sizes_without_common_divisor_are_cut_in_atoms() -> None:
    routed = sync_plan(SyncBackend.NCCL, trainer(range(3), 3), engines((8, 9), tensor=2))
    assert [(r.source_rank, r.engine_shard, r.first_atom, r.end_atom) for r in routed.routes()] == [
        (0, 0, 0, 2),
        (1, 0, 2, 3),
        (1, 1, 3, 4),
        (2, 1, 4, 6),
    ]
    assert routed.num_atoms == 6


def test_pipeline_stages_weigh_their_layers_and_share_the_work() -> None:
    routed = sync_plan(SyncBackend.NCCL, trainer(range(2)), engines((8, 9), tensor=1, pipeline=2))
    assert [(r.source_rank, r.stage, r.share) for r in routed.routes()] == [(0, 0, 0.5), (1, 1, 0.5)]
    assert (routed.figures.busiest_share, routed.figures.ideal_share) == (0.5, 0.5)


def test_a_nearer_source_comes_first_whatever_it_has_sent() -> None:
    routed = sync_plan(SyncBackend.NCCL, trainer(range(6, 10)), engines(*((d,) for d in (0, 1, 2, 16, 17, 8)), tensor=1))
    assert [(r.source_rank, r.transport) for r in routed.routes()] == [
        (0, Transport.SAME_NODE),
        (1, Transport.SAME_NODE),
        (0, Transport.SAME_NODE),
        (0, Transport.NETWORK),
        (1, Transport.NETWORK),
        (2, Transport.SAME_DEVICE),
    ]


def test_equal_indexes_on_two_nodes_are_two_devices() -> None:
    layout = EngineLayout(engines=((SyncDevice(1, 0),), (SyncDevice(0, 0),)))
    routed = sync_plan(SyncBackend.NCCL, TrainerLayout(ranks=(SyncDevice(0, 0),)), layout)
    assert [r.transport for r in routed.routes()] == [Transport.NETWORK, Transport.SAME_DEVICE]


def test_object_store_sends_everything_from_rank_0_and_one_copy_to_a_node() -> None:
    layout = engines((0, 1), (16, 17), (18, 19), (8, 9), tensor=2)
    routed = sync_plan(SyncBackend.OBJECT_STORE, trainer(range(6, 10)), layout)
    near, far, copy = Transport.SAME_NODE, Transport.NETWORK, Transport.NODE_COPY
    assert [(r.source_rank, r.engine, r.engine_shard, r.stage, r.share, r.transport) for r in routed.routes()] == [
        (0, engine, None, None, 1.0, transport) for engine, transport in enumerate([near, far, copy, far])
    ]
    figures = routed.figures
    assert (figures.same_device, figures.same_node, figures.network) == (0, 0.5, 0.5)
    assert (figures.busiest_rank, figures.busiest_share, figures.ideal_share) == (0, 1.0, 0.25)


def test_several_senders_share_whole_tensors_out_and_each_sends_its_part_once_to_a_node() -> None:
    layout = engines((0, 1), (16, 17), (18, 19), (8, 9), tensor=2)
    routed = sync_plan(SyncBackend.OBJECT_STORE, trainer(range(6, 10)), layout, senders=(0, 2))
    near, far, copy = Transport.SAME_NODE, Transport.NETWORK, Transport.NODE_COPY
    found = {(r.source_rank, r.engine): (r.share, r.transport) for r in routed.routes()}
    assert {key: transport for key, (_, transport) in found.items()} == {
        **{(0, engine): transport for engine, transport in enumerate([near, far, copy, far])},
        **{(2, engine): transport for engine, transport in enumerate([far, far, copy, near])},
    }
    assert {share for share, _ in found.values()} == {0.5}
    assert (routed.figures.network, routed.figures.busiest_share) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("nodes", "sync", "senders"),
    [
        (1, {}, (0,)),
        (1, {"senders": "Every"}, (0, 1, 2, 3)),
        (1, {"senders": "PerNode"}, (0,)),
        (2, {}, (0,)),
        (2, {"senders": "PerNode"}, (0, 2)),
        (2, {"senders": "Every"}, (0, 1, 2, 3)),
    ],
)
def test_rank_0_sends_or_one_rank_of_each_node_or_all(nodes: int, sync: dict[str, str], senders: tuple[int, ...]) -> None:
    document = manifest()
    document["spec"]["nodeGroups"] = [{"name": "a", "nodes": nodes, "devicesPerNode": 4 // nodes}, {"name": "b", "devicesPerNode": 1}]
    document["spec"]["components"] = [
        {"name": "actor_train", "role": "Trainer", "placement": {"nodeGroups": ["a"], "ranks": "0-3"}},
        {"name": "actor_infer", "role": "Rollout", "placement": {"nodeGroups": ["b"], "ranks": "0"}},
        {"name": "reward", "role": "Reward", "placement": {"workers": 1}},
    ]
    document["spec"]["weightSync"] = sync
    spec = RLJob.model_validate_json(json.dumps(document)).spec
    assert chosen_senders(spec, plan(spec)) == senders


def test_shared_memory_has_senders_of_its_node_alone() -> None:
    document = manifest()
    document["spec"]["nodeGroups"] = [{"name": "a", "nodes": 2, "devicesPerNode": 3, "deviceType": "CPU"}]
    document["spec"]["components"] = [
        {"name": "actor_train", "role": "Trainer", "placement": {"ranks": "0-3"}},
        {"name": "actor_infer", "role": "Rollout", "placement": {"ranks": "2"}},
        {"name": "reward", "role": "Reward", "placement": {"workers": 1}},
    ]
    for sync, senders in (({"senders": "PerNode"}, (0,)), ({"senders": "Every"}, (0, 1, 2))):
        document["spec"]["weightSync"] = sync
        spec = RLJob.model_validate_json(json.dumps(document)).spec
        assert chosen_backend(spec, plan(spec)) is SyncBackend.SHARED_MEMORY
        assert chosen_senders(spec, plan(spec)) == senders


def spec_of(trainer: str, rollout: str, group: dict[str, object], **fields: object) -> RLJobSpec:
    document = manifest()
    document["spec"]["nodeGroups"] = [{"name": "a", **group}]
    engine = {"type": "SGLang"} if fields.pop("sglang", False) else {}
    if fields.get("adapters") == "Served":
        document["spec"].setdefault("model", {})["lora"] = {}
    document["spec"]["components"] = [
        {"name": "actor_train", "role": "Trainer", "placement": {"ranks": trainer}},
        {"name": "actor_infer", "role": "Rollout", "placement": {"ranks": rollout}, "engine": engine},
        {"name": "reward", "role": "Reward", "placement": {"workers": 1}},
    ]
    document["spec"]["weightSync"] = fields
    return RLJob.model_validate_json(json.dumps(document)).spec


def problems_of(spec: RLJobSpec) -> list[str]:
    """What the rules about the weight sync that need a plan find."""
    placed = plan(spec)
    return [str(problem) for rule in weight_sync.PLAN_RULES for problem in rule(spec, placed)]


FOUR = {"devicesPerNode": 4}
ON_CPU = {"devicesPerNode": 4, "deviceType": "CPU"}


@pytest.mark.parametrize(
    ("trainer", "rollout", "group", "fields", "chosen"),
    [
        ("0-3", "0-3", FOUR, {}, SyncBackend.IPC),
        ("0-3", "2-3", FOUR, {}, SyncBackend.IPC),
        ("0-1", "0-3", FOUR, {}, SyncBackend.SHARED_MEMORY),
        ("0-3", "0-3", FOUR, {"backend": "IPC"}, SyncBackend.IPC),
        ("0-3", "0-3", FOUR, {"backend": "SharedMemory"}, SyncBackend.SHARED_MEMORY),
        ("0-3", "0-3", FOUR, {"delta": {}}, SyncBackend.SHARED_MEMORY),
        ("0-3", "0-3", FOUR, {"sglang": True}, SyncBackend.OBJECT_STORE),
        ("0-3", "0-3", ON_CPU, {}, SyncBackend.SHARED_MEMORY),
        ("0-1", "2-3", FOUR, {}, SyncBackend.SHARED_MEMORY),
        ("0-1", "2-3", FOUR, {"backend": "NCCL"}, SyncBackend.NCCL),
        ("0-3", "2-3", FOUR, {"senders": "Every"}, SyncBackend.SHARED_MEMORY),
        ("0-1", "2-3", FOUR, {"sglang": True}, SyncBackend.OBJECT_STORE),
    ],
)
def test_auto_reads_on_the_devices_where_a_trainer_rank_is_on_all_of_the_engines(
    trainer: str, rollout: str, group: dict[str, object], fields: dict[str, object], chosen: SyncBackend
) -> None:
    spec = spec_of(trainer, rollout, group, **fields)
    assert chosen_backend(spec, plan(spec)) is chosen


@pytest.mark.parametrize(
    ("backend", "trainer", "rollout", "group", "fields", "problems"),
    [
        ("NCCL", "0-1", "2-3", FOUR, {}, []),
        ("TCP", "0-1", "2-3", ON_CPU, {"sglang": True, "delta": {}}, []),
        ("IPC", "0-3", "0-3", ON_CPU, {}, []),
        ("NCCL", "0-1", "2-3", ON_CPU, {}, ["connects CUDA devices, and trainer or engines compute on others; write Auto, or TCP"]),
        ("NCCL", "0-1", "0-3", FOUR, {}, ["engines are on their devices 0 as well; write Auto, IPC where"]),
        ("NCCL", "0-1", "2-3", FOUR, {"delta": {}}, []),
        ("IPC", "0-3", "0-3", FOUR, {"delta": {}}, []),
        ("NCCL", "0-1", "2-3", FOUR, {"sglang": True}, ["SGLang, takes a whole update; write Auto, TCP or ObjectStore"]),
        ("IPC", "0-1", "0-3", FOUR, {}, ["2 of 4 have devices without one, engine 2 first; place the trainer on all devices"]),
        ("IPC", "0-3", "0-3", FOUR, {"senders": "Every"}, ["has no effect with IPC: every rank hands its buckets"]),
    ],
)
def test_what_no_transport_between_devices_reaches_is_refused(
    backend: str, trainer: str, rollout: str, group: dict[str, object], fields: dict[str, object], problems: list[str]
) -> None:
    spec = spec_of(trainer, rollout, group, backend=backend, **fields)
    found = problems_of(spec)
    assert len(found) == len(problems)
    assert all(text in problem for text, problem in zip(problems, found, strict=True)), found


@pytest.mark.parametrize(
    ("rollout", "fields", "chosen"),
    [
        ("1-2", {}, SyncBackend.OBJECT_STORE),  # one other node, to which both send once
        ("2,4", {}, SyncBackend.TCP),
        ("1,2,4,6", {}, SyncBackend.TCP),  # one of them on the trainer's node
        ("2,4", {"delta": {}, "senders": "PerNode"}, SyncBackend.TCP),
        ("2,4", {"sglang": True}, SyncBackend.TCP),
        ("2-5", {}, SyncBackend.TCP),  # two engines of a node, which share its copy
        ("2-3", {}, SyncBackend.OBJECT_STORE),
        ("1-2,4,6", {"backend": "ObjectStore"}, SyncBackend.OBJECT_STORE),
        ("2,4", {"adapters": "Served"}, SyncBackend.OBJECT_STORE),
    ],
)
def test_auto_is_a_chain_where_it_sends_less(rollout: str, fields: dict[str, object], chosen: SyncBackend) -> None:
    for kind in ({}, {"deviceType": "CPU"}):
        spec = spec_of("0", rollout, {"nodes": 4, "devicesPerNode": 2, **kind}, **fields)
        assert chosen_backend(spec, plan(spec)) is chosen
        assert chosen_senders(spec, plan(spec)) == (0,)


@pytest.mark.parametrize(("nodes", "chosen"), [(1, SyncBackend.SHARED_MEMORY), (2, SyncBackend.OBJECT_STORE)])
def test_auto_is_shared_memory_where_one_node_has_it_all(nodes: int, chosen: SyncBackend) -> None:
    document = manifest()
    document["spec"]["nodeGroups"] = [{"name": "a", "nodes": nodes, "devicesPerNode": 4 // nodes, "deviceType": "CPU"}]
    document["spec"]["components"] = [
        {"name": "actor_train", "role": "Trainer", "placement": {"ranks": "0-1"}},
        {"name": "actor_infer", "role": "Rollout", "placement": {"ranks": "2-3"}},
        {"name": "reward", "role": "Reward", "placement": {"workers": 1}},
    ]
    placed = plan(RLJob.model_validate_json(json.dumps(document)).spec)
    assert chosen_backend(RLJob.model_validate_json(json.dumps(document)).spec, placed) is chosen
    document["spec"]["weightSync"] = {"backend": "ObjectStore"}
    assert chosen_backend(RLJob.model_validate_json(json.dumps(document)).spec, placed) is SyncBackend.OBJECT_STORE
    document["spec"]["weightSync"] = {"backend": "SharedMemory"}
    problems = problems_of(RLJob.model_validate_json(json.dumps(document)).spec)
    expected = 'spec.weightSync.backend: "SharedMemory": needs one node: the trainer\'s rank 0 is on node 0, engines are also on node 1; '
    assert problems == ([] if nodes == 1 else [expected + "write Auto or ObjectStore, or place all engines on the node of rank 0"])


def test_sglang_gets_its_weights_through_the_object_store() -> None:
    document = manifest()
    document["spec"]["components"][1]["engine"] = {"type": "SGLang"}
    spec = RLJob.model_validate_json(json.dumps(document)).spec
    assert chosen_backend(spec, plan(spec)) is SyncBackend.OBJECT_STORE
    document["spec"]["weightSync"] = {"backend": "SharedMemory"}
    spec = RLJob.model_validate_json(json.dumps(document)).spec
    assert problems_of(spec) == [
        'spec.weightSync.backend: "SharedMemory": hands weights over bucket by bucket, '
        "and actor_infer's engine, SGLang, takes a whole update; write Auto or ObjectStore"
    ]


def test_trainer_of_odd_size_is_refused() -> None:
    with pytest.raises(PlacementError, match="the trainer has 8 ranks, not a multiple of its tensor parallel size 3; change") as caught:
        trainer(range(8), 3)
    assert caught.value.check == "D11"
    with pytest.raises(PlacementError, match="has 0 ranks"):
        trainer(range(0))


def test_engine_of_another_size_is_refused() -> None:
    message = r"engine 1 has 3 devices, but tensor parallel size 2 \* pipeline parallel size 2 needs 4; change"
    with pytest.raises(PlacementError, match=message) as caught:
        engines((0, 1, 2, 3), (4, 5, 6), tensor=2, pipeline=2)
    assert caught.value.check == "D11"
    with pytest.raises(PlacementError, match="weights go to 0 engines"):
        engines(tensor=1)


def test_ipc_across_nodes_is_refused() -> None:
    message = "2 of 3 engines need weights .* engine 1 on node 1 would need rank 0 on node 0; place the trainer on every node"
    with pytest.raises(PlacementError, match=message) as caught:
        sync_plan(SyncBackend.IPC, trainer(range(4)), engines((5,), (8,), (16,), tensor=1))
    assert caught.value.check == "D11"


def test_a_plan_of_the_planner_has_routes() -> None:
    document = manifest()
    document["spec"]["nodeGroups"] = [{"name": "a", "nodes": 1, "devicesPerNode": 4}]
    document["spec"]["components"] = [
        {"name": "actor", "role": "Trainer", "placement": {"ranks": "0-1"}},
        {"name": "rollout", "role": "Rollout", "placement": {"ranks": "2-3"}, "engine": {"tensorParallelSize": 2}},
    ]
    planned = plan(RLJob.model_validate_json(json.dumps(document)).spec)
    actor, rollout = planned.component("actor"), planned.component("rollout")
    found = sync_plan_of(SyncBackend.NCCL, actor, rollout, trainer_tensor_parallel_size=1, tensor_parallel_size=2)
    assert [(r.source_rank, r.source.device, r.engine_shard, r.transport) for r in found.routes()] == [
        (0, 0, 0, Transport.SAME_NODE),
        (1, 1, 1, Transport.SAME_NODE),
    ]
    with pytest.raises(PlacementError, match="engine 0 has 2 devices"):
        sync_plan_of(SyncBackend.NCCL, actor, rollout)
    bare = dataclasses.replace(actor, processes=tuple(p._replace(devices=()) for p in actor.processes))
    with pytest.raises(PlacementError, match="trainer rank 0 has 0 devices, it needs 1"):
        sync_plan_of(SyncBackend.NCCL, bare, rollout, tensor_parallel_size=2)


def test_a_job_that_only_validates_has_no_sync_to_choose_a_transport_for() -> None:
    spec = check((ROOT / "examples" / "evaluate.yaml").read_text()).job.spec
    assert chosen_backend(spec, plan(spec)) is SyncBackend.OBJECT_STORE
