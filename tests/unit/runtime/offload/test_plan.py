"""Plans of switches: who leaves first, what overlaps, what cannot fit; no clock and no workers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from rljob_api.memory.model import Kind, Need, Phase, ProcessNeeds
from rljob_api.v1alpha1.components import ComponentOffload, OffloadPolicy
from rljob_api.v1alpha1.operations import Residency
from rljob_runtime.errors import NoRoomError
from rljob_runtime.offload.clients import Sizes, estimated, policies
from rljob_runtime.offload.plan import UNKNOWN_BYTES, Device, ProcessState, Switch, SwitchRequest, plan_switch
from rljob_runtime.offload.states import StateKind
from tests.support.arbiter_fakes import D0, D1, GRADS, KV, OPTIMIZER, OTHER, PARAMS

ALWAYS, NEVER = OffloadPolicy.ALWAYS, OffloadPolicy.NEVER


def process(client: str, sizes: Mapping[StateKind, int], on: str = "", devices: tuple[Device, ...] = (D0,), **more: Any) -> ProcessState:
    """``on``: kinds on the device by their first letters; KV cache and gradients are free to drop."""
    kinds = frozenset(kind for kind in sizes if kind.value[:2] in on.split())
    free = frozenset({KV, GRADS}) | more.pop("free", frozenset())
    return ProcessState(
        client=client, index=more.pop("index", 0), devices=devices, size_bytes=sizes, on_device=kinds, free_to_drop=free, **more
    )


def shown(switch: Switch) -> list[str]:
    """``-trainer optimizer +engine params``, one line per wave."""
    return [
        " ".join(
            [f"-{m.client}{m.index or ''} {'+'.join(m.kinds)}" for m in wave.offloads]
            + [f"+{m.client}{m.index or ''} {'+'.join(m.kinds)}" for m in wave.loads]
        )
        for wave in switch.waves
    ]


def test_an_engine_that_measures_its_device_leaves_before_anything_comes_there() -> None:
    engine = process("engine", {PARAMS: 2, KV: 6}, "pa kv", free=frozenset({PARAMS}), leaves_alone=True)
    reference = process("reference", {PARAMS: 3}, "pa")
    trainer = process("trainer", {PARAMS: 4, OPTIMIZER: 8}, "", devices=(D0,))
    both = frozenset({PARAMS, OPTIMIZER})
    request = SwitchRequest(client="trainer", what="x", load=both)
    assert shown(plan_switch({D0: 15}, [engine, reference, trainer], request)) == ["-engine kv_cache+params", "+trainer params+optimizer"]
    assert shown(plan_switch({D0: 14}, [engine, reference, trainer], request)) == [
        "-engine kv_cache+params",
        "-reference params +trainer params",
        "+trainer optimizer",
    ]
    elsewhere = process("trainer", {PARAMS: 4, OPTIMIZER: 8}, "", devices=(D1,))
    leaving = replace(engine, leaving=frozenset({PARAMS, KV}))
    assert shown(plan_switch({D0: 15, D1: 15}, [leaving, elsewhere], request)) == ["-engine kv_cache+params +trainer params+optimizer"]


def test_where_the_room_is_not_known_what_leaves_is_gone_before_anything_comes() -> None:
    leaving = frozenset({PARAMS, GRADS, OPTIMIZER})
    trainer = process("trainer", {PARAMS: 4, GRADS: 4, OPTIMIZER: 8}, "pa gr op", leaving=leaving)
    engine = process("engine", {PARAMS: 4, KV: 8}, "")
    request = SwitchRequest(client="engine", what="x", load=frozenset({PARAMS, KV}))
    waves = ["-trainer grads+optimizer+params", "+engine params+kv_cache"]
    assert shown(plan_switch({D0: UNKNOWN_BYTES}, [trainer, engine], request)) == waves
    assert shown(plan_switch({D0: 28}, [trainer, engine], request)) == ["-trainer grads+optimizer+params +engine params+kv_cache"]


FULL = {PARAMS: 4, GRADS: 4, OPTIMIZER: 8, KV: 6, OTHER: 1}


@pytest.mark.parametrize(
    ("needs", "left"),
    [
        (0, []),
        (1, ["-a kv_cache"]),
        (6, ["-a kv_cache"]),
        (7, ["-a kv_cache+grads"]),
        (11, ["-a kv_cache+grads+optimizer"]),
        (19, ["-a kv_cache+grads+optimizer", "-a params"]),
        (23, ["-a kv_cache+grads+optimizer", "-a params", "-a other"]),
    ],
)
def test_what_costs_nothing_leaves_first_then_optimizer_then_params(needs: int, left: list[str]) -> None:
    a = process("a", FULL, "pa gr op kv ot", last_used=1)
    b = process("b", {PARAMS: needs} if needs else {}, "")
    waves = shown(plan_switch({D0: 23}, [a, b], SwitchRequest(client="b", what="x", load=frozenset({PARAMS}))))
    assert [offloads for wave in waves if (offloads := wave.partition("+b")[0].strip())] == left
    assert not needs or waves[-1].endswith("+b params")


def test_copies_go_both_ways_at_once_where_room_allows() -> None:
    trainer = process("trainer", {PARAMS: 4, OPTIMIZER: 8}, "pa op")
    engine = process("engine", {PARAMS: 4, KV: 8}, "")
    request = SwitchRequest(client="engine", what="x", load=frozenset({PARAMS, KV}))
    assert shown(plan_switch({D0: 16}, [trainer, engine], request)) == ["-trainer optimizer +engine params", "+engine kv_cache"]
    assert shown(plan_switch({D0: 12}, [trainer, engine], request)) == [
        "-trainer optimizer",
        "-trainer params +engine params",
        "+engine kv_cache",
    ]


@pytest.mark.parametrize(
    ("processes", "left"),
    [
        pytest.param(
            [process("old", {PARAMS: 4}, "pa", last_used=1), process("new", {PARAMS: 4}, "pa", last_used=2)], "-old params", id="lru"
        ),
        pytest.param(
            [process("old", {PARAMS: 4}, "pa", last_used=1, queued=True), process("new", {PARAMS: 4}, "pa", last_used=2)],
            "-new params",
            id="who waits is needed soon",
        ),
        pytest.param(
            [process("engine", {PARAMS: 4}, "pa", last_used=9, free=frozenset({PARAMS})), process("new", {OPTIMIZER: 4}, "op")],
            "-engine params",
            id="what a sync writes anyway costs nothing",
        ),
        pytest.param(
            [process("old", {PARAMS: 1}, "pa", last_used=1), process("big", {PARAMS: 7}, "pa", last_used=2)],
            "-big params",
            id="what a larger one makes needless stays",
        ),
        pytest.param(
            [process("old", {PARAMS: 4}, "pa", stays={PARAMS: "in use"}), process("new", {PARAMS: 4}, "pa", last_used=2)],
            "-new params",
            id="what stays stays",
        ),
    ],
)
def test_who_leaves(processes: list[ProcessState], left: str) -> None:
    want = process("want", {PARAMS: 4}, "")
    switch = plan_switch({D0: 8}, [*processes, want], SwitchRequest(client="want", what="x", load=frozenset({PARAMS})))
    assert shown(switch) == [left, "+want params"]


def test_only_devices_that_are_full_give_up_something() -> None:
    trainers = [process("trainer", {OPTIMIZER: 6}, "op", (device,), index=i) for i, device in enumerate((D0, D1))]
    engine = process("engine", {PARAMS: 4}, "", (D0,))
    switch = plan_switch({D0: 8, D1: 8}, [*trainers, engine], SwitchRequest(client="engine", what="x", load=frozenset({PARAMS})))
    assert shown(switch) == ["-trainer optimizer", "+engine params"]


def test_work_needs_room_too() -> None:
    trainer = process("trainer", {PARAMS: 4}, "pa", working_bytes=5)
    other = process("other", {PARAMS: 4}, "pa")
    assert shown(plan_switch({D0: 13}, [trainer, other], SwitchRequest(client="trainer", what="x", works=True))) == []
    assert shown(plan_switch({D0: 12}, [trainer, other], SwitchRequest(client="trainer", what="x", works=True))) == ["-other params"]


def test_what_cannot_fit_is_reported_with_its_arithmetic() -> None:
    gib = 2**30
    processes = [
        process("trainer", {PARAMS: 4 * gib, OPTIMIZER: 8 * gib}, "pa", working_bytes=gib, fixed_bytes=gib),
        process("engine", {PARAMS: 2 * gib, KV: gib}, "pa kv", stays={PARAMS: "components[].offload.weight is Never"}, fixed_bytes=gib),
    ]
    request = SwitchRequest(client="trainer", what="train step 12", load=frozenset({PARAMS, OPTIMIZER}), works=True)
    with pytest.raises(NoRoomError) as caught:
        plan_switch({D0: 16 * gib}, processes, request)
    assert str(caught.value) == (
        "train step 12: trainer has no room. node 0 device 0 has 16.00 GiB, 17.00 GiB are needed: trainer params 4.00 GiB (asked for), "
        "trainer optimizer 8.00 GiB (asked for), trainer work 1.00 GiB, trainer process 1.00 GiB (always there), "
        "engine params 2.00 GiB (components[].offload.weight is Never), engine process 1.00 GiB (always there). "
        "Let more leave (components[].offload), spread the components over more devices, or make them smaller"
    )


def test_sizes_and_policies_come_from_the_estimate_and_the_spec() -> None:
    def need(kind: Kind, size: int) -> Need:
        return Need(kind=kind, name="x", formula="x", num_bytes=size)

    needs = ProcessNeeds(
        active=frozenset({Phase.TRAIN, Phase.OPTIMIZER_STEP}),
        states=(need(Kind.PROCESS, 1), need(Kind.WEIGHT, 4), need(Kind.OPTIMIZER, 8)),
        starting=(),
        working={
            Phase.TRAIN: (need(Kind.WORKSPACE, 5), need(Kind.GRAD, 6), need(Kind.WORKSPACE, 2)),
            Phase.OPTIMIZER_STEP: (need(Kind.GRAD, 4),),
        },
    )
    both = frozenset({PARAMS, OPTIMIZER})
    assert estimated(needs, both) == Sizes(size_bytes={PARAMS: 4, OPTIMIZER: 8}, fixed_bytes=1, working_bytes=13)
    assert estimated(needs, both - {OPTIMIZER}) == Sizes(size_bytes={PARAMS: 4}, fixed_bytes=1, working_bytes=13), "8 + 4 are less"
    assert policies(ComponentOffload(grad=ALWAYS), Residency.SWITCHING)[GRADS] is ALWAYS
    assert set(policies(ComponentOffload(grad=ALWAYS), Residency.RESIDENT).values()) == {NEVER}
