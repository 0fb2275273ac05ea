"""Pictures of plans: golden texts, and what holds for every plan."""

import itertools
import re
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.placement.topology import ACCELERATOR
from rljob_api.planning.plan import PlacementMode, Plan
from rljob_api.planning.sync_routes import Transport, sync_plan_of
from rljob_api.v1alpha1.components import Role
from rljob_api.v1alpha1.operations import SyncBackend
from rljob_runtime.plan_view import Grid, Section, grid_of, page, picture, place, plain, routes_of, svg
from rljob_runtime.plan_view.layout import blocks
from rljob_runtime.plan_view.palette import PALETTE
from rljob_runtime.plan_view.routes import MAX_ENDS, flow
from tests.support.golden import Golden
from tests.unit.runtime.plan_view.plan_cases import CASES, Case, Spot, component, gpus, large, nodes, plan_of, with_routes

GOLDEN = Path(__file__).parents[3] / "golden" / "plan_view"
SVG = "{http://www.w3.org/2000/svg}"
MAX_BYTES = 300_000


def rendered(name: str, kind: str) -> str:
    case = CASES[name]()
    grid = grid_of(case.plan)
    if kind.endswith(".txt"):
        return plain(picture(grid, int(kind.removesuffix(".txt")), case.routes))
    if kind == "svg":
        return svg(grid, name, case.routes)
    memory = Section(title="Memory per device", columns=("component", "phase", "GiB"), rows=(("<actor>", "train", "61.2 of 80"),))
    return page(grid, name, "one sentence", case.routes, (memory,))


@pytest.mark.parametrize(("name", "kind"), list(itertools.product(CASES, ("80.txt", "120.txt", "svg", "html"))))
def test_the_picture_is_the_golden_one(name: str, kind: str, golden: Golden) -> None:
    assert golden.differences(GOLDEN / f"{name}.{kind}", rendered(name, kind)) == ""


def test_no_golden_file_without_a_case() -> None:
    assert {path.name.split(".")[0] for path in GOLDEN.iterdir()} == set(CASES)


# What holds for every plan.


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Some groups, some components anywhere on them, in any order, with repetitions."""
    groups = [
        (f"g{index}", draw(st.integers(1, 7)), draw(st.sampled_from((0, 1, 2, 8, 20, 70))), draw(st.sampled_from(((), (("Franka", 3),)))))
        for index in range(draw(st.integers(1, 3)))
    ]
    of = nodes(*groups)
    random = Random(draw(st.integers(0, 2**32)))
    in_order = draw(st.booleans())
    components = []
    for index, role in enumerate(draw(st.lists(st.sampled_from(Role), min_size=1, max_size=10))):
        spots: list[Spot] = []
        size = random.choice((1, 1, 2, 4))
        for node in of:
            if random.random() < 0.2:
                spots += [(node.rank, None, ())] * random.randint(1, 3)
            if node.hardware and random.random() < 0.3:
                spots.append((node.rank, "Franka", (random.randrange(3),)))
            if node.num_devices >= size and random.random() < 0.7:
                stride = random.choice((1, node.num_devices // size))
                last = node.num_devices - (size - 1) * stride
                spots += [gpus(node.rank, *range(d, d + size * stride, stride)) for d in range(random.randrange(last), last)]
        if not in_order:
            random.shuffle(spots)
        components.append(component(f"component_number_{index}"[: random.randint(11, 40)] + str(index), role, of, spots))
    return plan_of(of, random.choice(list(PlacementMode)), *components)


@given(plans(), st.integers(40, 200))
@settings(max_examples=80, deadline=None)
def test_any_plan(plan: Plan, width: int) -> None:
    grid = grid_of(plan)
    assert_complete(plan, grid)
    lines = plain(picture(grid, width)).splitlines()
    assert max(map(len, lines)) <= width
    assert_sound(svg(grid, "any"))


def assert_complete(plan: Plan, grid: Grid) -> None:
    """Expanding the folds gives back every process of the plan once, and all nodes."""
    expected = Counter((i, p.rank, p.node_rank, *place(p)) for i, c in enumerate(plan.components) for p in c.processes)
    found = Counter((s.component, s.rank, s.node_rank, s.kind, s.places) for s in grid.expand())
    assert found == expected
    shown_nodes = Counter(node for group in grid.groups for fold in group.folds for node in fold.nodes)
    assert shown_nodes == Counter(node.rank for node in plan.nodes)
    used = {device for c in plan.components for device in c.devices}
    assert sum(group.num_devices - group.num_free for group in grid.groups) == len(used)


def assert_sound(text: str) -> None:
    """Well-formed, ids once, small, everything inside the picture, and every band's text inside its band."""
    root = ElementTree.fromstring(text)
    ids = [element.get("id") for element in root.iter() if element.get("id")]
    assert len(ids) == len(set(ids))
    assert len(text.encode()) < MAX_BYTES
    assert [child.tag for child in root][:2] == [f"{SVG}title", f"{SVG}desc"]
    assert set(root.get("aria-labelledby", "").split()) <= set(ids)
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(ids)
    width, height = float(root.get("width", 0)), float(root.get("height", 0))
    for rect in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(rect.get(key, 0)) for key in ("x", "y", "width", "height"))
        assert w > 0
        assert h > 0
        assert 0 <= x <= x + w <= width
        assert 0 <= y <= y + h <= height
    for group in root.iter(f"{SVG}g"):
        rect, label = group.find(f"{SVG}rect"), group.find(f"{SVG}text")
        assert rect is not None
        assert label is not None
        if label.get("class", "").startswith("pv-m"):
            assert len(label.text or "") * 7.4 <= float(rect.get("width", 0))


@pytest.mark.parametrize("name", CASES)
def test_the_cases_hold_what_any_plan_holds(name: str) -> None:
    case = CASES[name]()
    assert_complete(case.plan, grid_of(case.plan))
    for width in (40, 80, 120):
        assert max(map(len, rendered(name, f"{width}.txt").splitlines())) <= width
    assert_sound(rendered(name, "svg"))


@pytest.mark.parametrize("name", CASES)
def test_bands_show_every_process_of_the_drawn_nodes(name: str) -> None:
    plan = CASES[name]().plan
    for block in blocks(grid_of(plan), 10_000):
        for panel in block.panels:
            shown = {(c, rank) for c, bands in panel.bands.items() for band in bands for rank in band.ranks}
            there = {(c, p.rank) for c, planned in enumerate(plan.components) for p in planned.processes if p.node_rank == panel.node_rank}
            assert shown == there


def test_hover_titles_say_which_process_uses_which_device() -> None:
    text = rendered("disaggregated-4-4", "svg")
    assert "<title>actor_infer 1 on node 0, devices 6-7</title>" in text
    assert "<title>reward 0-3 on node 0: 4 CPU processes</title>" in text


def test_folding_is_exact_about_ranks() -> None:
    grid = grid_of(large(64, 8).plan)
    assert [(fold.nodes, fold.rank_steps) for group in grid.groups for fold in group.folds] == [
        (range(0, 32), {0: 8, 2: 8, 3: 1}),
        (range(32, 64), {1: 2, 3: 1}),
    ]


def test_alternating_nodes_fold_into_two() -> None:
    of = nodes(("alt", 40, 2, ()))
    trainer = component("train", Role.TRAINER, of, [gpus(n, d) for n in range(0, 40, 2) for d in range(2)])
    rollout = component("infer", Role.ROLLOUT, of, [gpus(n, 0, 1) for n in range(1, 40, 2)])
    plan = plan_of(of, PlacementMode.DISAGGREGATED, trainer, rollout)
    assert [fold.nodes for fold in grid_of(plan).groups[0].folds] == [range(0, 40, 2), range(1, 40, 2)]
    assert "nodes 2, 4 .. 38: same pattern, process ranks +2 per node" in plain(picture(grid_of(plan), 80))


def test_names_from_a_job_are_escaped() -> None:
    of = nodes(('<g&">', 1, 1, (("<arm>", 1),)), resource="a<b")
    plan = plan_of(of, PlacementMode.DISAGGREGATED, component("<c>", Role.TRAINER, of, [gpus(0, 0), (0, "<arm>", (0,))]))
    text = page(grid_of(plan), "<job>", "<lead>")
    assert "<c>" not in text
    assert "<arm>" not in text
    assert "&lt;job&gt;" in text
    ElementTree.fromstring(svg(grid_of(plan), "<job>"))


# Large plans.


def irregular(num_nodes: int = 1_250) -> Case:
    of = nodes(("mess", num_nodes, 8, ()))
    spots = [gpus(node, device) for node in range(num_nodes) for device in range(8)]
    Random(0).shuffle(spots)
    half = len(spots) // 2
    trainer = component("actor", Role.TRAINER, of, spots[:half])
    return with_routes(plan_of(of, PlacementMode.DISAGGREGATED, trainer, component("rollout", Role.ROLLOUT, of, spots[half:])))


def crowded() -> Case:
    of = nodes(*((f"group{index}", 30, 64, (("Franka", 60),)) for index in range(16)))
    components = [
        component(f"a_name_of_forty_characters_as_allowed_{index:03}", Role.REWARD, of, [gpus(n, (n + index) % 64) for n in range(480)])
        for index in range(64)
    ]
    return Case(plan_of(of, PlacementMode.HYBRID, *components))


@pytest.mark.parametrize("make", [lambda: large(1_250, 8), irregular, crowded], ids=["regular", "irregular", "crowded"])
def test_ten_thousand_devices_make_a_small_picture(make: Callable[[], Case]) -> None:
    case = make()
    grid = grid_of(case.plan)
    assert_complete(case.plan, grid)
    assert_sound(svg(grid, "large", case.routes))
    assert len(page(grid, "large", "", case.routes).encode()) < 2 * MAX_BYTES
    lines = plain(picture(grid, 100, case.routes)).splitlines()
    assert max(map(len, lines)) <= 100
    assert len(lines) < 400


def test_a_regular_large_plan_is_as_short_as_a_small_one() -> None:
    small, big = (large(count, 8) for count in (64, 1_250))
    small_text, big_text = (plain(picture(grid_of(case.plan), 120, case.routes)) for case in (small, big))
    assert big_text.count("\n") == small_text.count("\n")


def test_what_is_left_out_is_counted() -> None:
    grid = grid_of(irregular(100).plan)
    panels = blocks(grid, 200)[0]
    assert panels.notes == (f"{100 - len(panels.panels)} more nodes in other patterns; --output json lists every process",)


def test_time_and_memory_grow_with_the_plan() -> None:
    seconds = []
    for num_nodes in (512, 2_048):
        case = large(num_nodes, 8)
        started = time.process_time()
        tracemalloc.start()
        grid = grid_of(case.plan)
        svg(grid, "x", case.routes)
        plain(picture(grid, 80, case.routes))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        seconds.append(time.process_time() - started)
        assert peak < 100_000_000
    assert seconds[1] < 12 * seconds[0] + 0.5


# Sync routes.


def test_pieces_between_the_same_processes_are_one_route() -> None:
    of = nodes(("g", 1, 4, ()))
    trainer = component("t", Role.TRAINER, of, [gpus(0, 0)])
    rollout = component("r", Role.ROLLOUT, of, [gpus(0, 0, 1), gpus(0, 2, 3)])
    routes = routes_of(sync_plan_of(SyncBackend.NCCL, trainer, rollout, tensor_parallel_size=2), "t", "r")
    assert [(route.source, route.target, route.transport, route.num_pieces) for route in routes] == [
        (("t", 0), ("r", 0), Transport.SAME_DEVICE, 1),
        (("t", 0), ("r", 0), Transport.SAME_NODE, 1),
        (("t", 0), ("r", 1), Transport.SAME_NODE, 2),
    ]


@given(st.integers(1, 6), st.integers(1, 6), st.sampled_from((1, 2, 4)), st.sampled_from(list(SyncBackend)))
@settings(max_examples=40, deadline=None)
def test_bundling_keeps_every_route(train_nodes: int, infer_nodes: int, size: int, backend: SyncBackend) -> None:
    of = nodes(("g", max(train_nodes, infer_nodes), 4, ()))
    trainer = component("t", Role.TRAINER, of, [gpus(n, d) for n in range(train_nodes) for d in range(4)])
    rollout = component("r", Role.ROLLOUT, of, [gpus(n, *range(d, d + size)) for n in range(infer_nodes) for d in range(0, 4, size)])
    plan = plan_of(of, PlacementMode.HYBRID, trainer, rollout)
    sync = sync_plan_of(SyncBackend.NCCL if backend is SyncBackend.IPC else backend, trainer, rollout, tensor_parallel_size=size)
    bundled = flow(grid_of(plan), routes_of(sync, "t", "r"))
    assert Counter(dict(bundled.totals_of())) == Counter(route.transport for route in sync.routes())
    assert len(bundled.sources) <= MAX_ENDS
    assert len(bundled.targets) <= MAX_ENDS
    assert sorted(rank for end in bundled.targets for rank in end.ranks) == list(range(rollout.world_size))
    assert {rank for end in bundled.sources for rank in end.ranks} == {route.source_rank for route in sync.routes()}


# Colors.


def luminance(color: str) -> float:
    """Relative luminance as in WCAG 2.2."""
    channels = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("index", range(len(PALETTE)))
def test_text_on_a_band_can_be_read(index: int) -> None:
    bright, dark = sorted((luminance(PALETTE[index].fill), luminance(PALETTE[index].ink)), reverse=True)
    assert (bright + 0.05) / (dark + 0.05) >= 4.5


def test_accelerators_are_called_devices() -> None:
    assert ACCELERATOR not in rendered("groups-robots", "html")
