"""Micro-batches want every wanted token once, stay within the budget, pad little or not at all, and share prompts where that is cheaper."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_runtime.training.microbatch import MicroBatch, PackedRow, filler, make_micro_batches
from rljob_runtime.training.packing import RowsPart, TreePart
from rljob_runtime.training.sharing import LayerCosts, micro_batch_cost, plan_rows

repeatable = settings(deadline=None, derandomize=True, max_examples=60)

batches = st.lists(st.integers(1, 12), min_size=0, max_size=25).flatmap(
    lambda lengths: st.tuples(st.just(lengths), st.lists(st.booleans(), min_size=sum(lengths), max_size=sum(lengths)), st.integers(1, 60))
)


def build(lengths: list[int], flags: list[bool]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    array = np.asarray(lengths, dtype=np.int32)
    wanted = np.asarray(flags, dtype=np.float32)
    wanted[np.cumsum(array) - array] = 0.0
    return np.arange(1, array.sum() + 1, dtype=np.int32), array, wanted


@repeatable
@given(batches)
def test_every_wanted_token_once_predicted_by_its_own_prefix(case: tuple[list[int], list[bool], int]) -> None:
    lengths, flags, budget = case
    tokens, array, wanted = build(lengths, flags)
    row_start = np.repeat(np.cumsum(array) - array, array)
    seen: list[int] = []
    for micro in make_micro_batches(tokens, array, wanted, budget):
        width = micro.input_ids.shape[1]
        for position, target, source in zip(micro.positions, micro.targets, micro.sources, strict=True):
            row, column = divmod(int(position), width)
            prefix = tokens[row_start[source] : source]
            assert micro.input_ids[row, : column + 1].tolist() == prefix.tolist()
            assert target == tokens[source]
        seen += micro.sources.tolist()
    assert sorted(seen) == np.flatnonzero(wanted).tolist()


@repeatable
@given(batches)
def test_budget_holds_unless_a_single_row_is_longer(case: tuple[list[int], list[bool], int]) -> None:
    lengths, flags, budget = case
    for micro in make_micro_batches(*build(lengths, flags), budget):
        assert micro.input_ids.size <= budget or micro.input_ids.shape[0] == 1


# Where rows are cut.
cut_costs = st.builds(
    LayerCosts,
    linear_flops=st.sampled_from([1.0, 64.0]),
    attention_flops=st.sampled_from([0.0, 0.3, 2.0]),
    overhead_tokens=st.sampled_from([0, 1, 8, 40, 256, 2048]),
)


def planned(lengths: list[int], budget: int, costs: LayerCosts) -> list[list[int]]:
    return [rows.tolist() for rows in plan_rows(np.asarray(lengths, dtype=np.int64), budget, costs)]


def cost_of(parts: list[list[int]], lengths: list[int], costs: LayerCosts) -> float:
    return sum(micro_batch_cost(len(part), max(lengths[row] for row in part), costs) for part in parts)


def fits(part: list[int], lengths: list[int], budget: int) -> bool:
    return len(part) == 1 or len(part) * max(lengths[row] for row in part) <= budget


def filled_to_the_budget(lengths: list[int], budget: int) -> list[list[int]]:
    """Widest first, as many rows as fit: the fewest micro-batches."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    parts: list[list[int]] = []
    for row in order:
        if parts and fits([*parts[-1], row], lengths, budget):
            parts[-1].append(row)
        else:
            parts.append([row])
    return parts


def partitions(rows: int) -> Iterator[list[list[int]]]:
    """All ways to put rows into parts, in any order."""
    if rows == 0:
        yield []
        return
    for parts in partitions(rows - 1):
        yield [*parts, [rows - 1]]
        for index in range(len(parts)):
            yield [*parts[:index], [*parts[index], rows - 1], *parts[index + 1 :]]


@repeatable
@given(st.lists(st.integers(1, 50), max_size=60), st.integers(1, 600), cut_costs)
def test_plan_is_a_partition_sorted_by_length_and_no_dearer_than_filling_up(lengths: list[int], budget: int, costs: LayerCosts) -> None:
    plan = planned(lengths, budget, costs)
    order = [row for rows in plan for row in rows]
    assert sorted(order) == list(range(len(lengths)))
    assert [lengths[row] for row in order] == sorted(lengths, reverse=True)
    assert all(plan)
    assert all(fits(part, lengths, budget) for part in plan)
    assert cost_of(plan, lengths, costs) <= cost_of(filled_to_the_budget(lengths, budget), lengths, costs) * (1 + 1e-12)


@repeatable
@given(st.lists(st.integers(1, 20), max_size=6), st.integers(1, 80), cut_costs)
def test_no_partition_costs_less(lengths: list[int], budget: int, costs: LayerCosts) -> None:
    allowed = [parts for parts in partitions(len(lengths)) if all(fits(part, lengths, budget) for part in parts)]
    cheapest = min(cost_of(parts, lengths, costs) for parts in allowed)
    assert cost_of(planned(lengths, budget, costs), lengths, costs) == pytest.approx(cheapest, rel=1e-12)


@repeatable
@given(st.lists(st.integers(1, 90), max_size=40), st.integers(1, 900) | st.just(10_000), cut_costs)
def test_no_cut_of_the_sorted_rows_costs_less(lengths: list[int], budget: int, costs: LayerCosts) -> None:
    ordered = sorted(lengths, reverse=True)
    least = [0.0]
    for end in range(1, len(ordered) + 1):
        begins = [b for b in range(end) if fits(list(range(b, end)), ordered, budget)]
        least.append(min(least[b] + micro_batch_cost(end - b, ordered[b], costs) for b in begins))
    assert cost_of(planned(lengths, budget, costs), lengths, costs) == pytest.approx(least[-1], rel=1e-12)


def test_a_heavy_tail_pads_little() -> None:
    quantiles = (np.arange(256) + 0.5) / 256
    lengths = (9 + np.clip(8 * (1 - quantiles) ** -0.95, 8, 256)).astype(int).tolist()  # a prompt, and Pareto's quantiles up to 256
    real = sum(lengths)
    filled = sum(len(part) * lengths[part[0]] for part in filled_to_the_budget(lengths, 16_384))
    plan = planned(lengths, 16_384, QUICKSTART)
    assert filled > 2 * real
    assert sum(len(part) * lengths[part[0]] for part in plan) < 1.3 * real
    assert len(plan) <= 10


def test_what_a_micro_batch_costs_by_itself_decides_how_many_there_are() -> None:
    lengths = [100] * 10 + [10] * 10
    for overhead, parts in ((1000, [20]), (800, [10, 10]), (256, [10, 10])):
        costs = LayerCosts(linear_flops=2.0, attention_flops=0.0, overhead_tokens=overhead)
        assert [len(part) for part in planned(lengths, 16_384, costs)] == parts


def test_rows_without_wanted_tokens_and_last_tokens_cost_nothing() -> None:
    for costs in (None, LINEAR):
        micro_batches = make_micro_batches(*build([3, 4, 5], [False] * 7 + [True] * 5), 100, costs)
        assert [m.input_ids.tolist() for m in micro_batches] == [[[8, 9, 10, 11]]]


def test_filler_is_one_token() -> None:
    assert filler().is_filler
    assert filler().input_ids.size == 1


def test_refuses_a_wanted_first_token() -> None:
    with pytest.raises(ValueError, match="first token of a sequence"):
        make_micro_batches(np.ones(3, np.int32), np.asarray([3], np.int32), np.ones(3, np.float32), 10)


def test_refuses_arrays_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"lengths sum to 4 but token_ids have shape \(3,\)"):
        make_micro_batches(np.ones(3, np.int32), np.asarray([4], np.int32), np.zeros(3, np.float32), 10)


# Common prompts. Costs with which sharing always gains, and with which it hardly ever does.
LINEAR = LayerCosts(linear_flops=1.0, attention_flops=0.0)
QUADRATIC = LayerCosts(linear_flops=0.01, attention_flops=1.0)
QUICKSTART = LayerCosts(linear_flops=2.0 * 328_000, attention_flops=4.0 * 128 * 2)

groups = st.tuples(
    st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(0, 5), min_size=1, max_size=5)), max_size=6),  # prompt, response lengths
    st.integers(1, 60),
    st.sampled_from([LINEAR, QUADRATIC, QUICKSTART, LayerCosts(linear_flops=3.0, attention_flops=0.4)]),
    st.randoms(use_true_random=False),
)
Groups = tuple[list[tuple[int, list[int]]], int, LayerCosts, random.Random]


def build_groups(case: Groups) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Groups with random prompts of few tokens (some equal, some a prefix of others), shuffled; some response tokens unwanted."""
    shape, _, _, rng = case
    sequences: list[tuple[list[int], list[int]]] = []
    for prompt_length, responses in shape:
        prompt = [rng.randrange(2) for _ in range(prompt_length)]
        for length in responses:
            mask = [1] + [rng.randrange(2) for _ in range(length - 1)] if length else []
            sequences.append((prompt + [rng.randrange(9) for _ in range(length)], [0] * prompt_length + mask))
    rng.shuffle(sequences)
    tokens = np.asarray([t for s, _ in sequences for t in s], np.int32)
    return tokens, np.asarray([len(s) for s, _ in sequences], np.int32), np.asarray([m for _, mask in sequences for m in mask], np.float32)


def visible(micro: MicroBatch, row: int, column: int) -> list[tuple[int, int]]:
    """(position, token) of all that a token sees, itself included, by the documented rule."""
    if micro.packed is None:
        return list(enumerate(micro.input_ids[row, : column + 1].tolist()))
    seen = [c for c in range(column + 1) if column < micro.packed.until[c]]
    return [(int(micro.packed.position_ids[0, c]), int(micro.input_ids[0, c])) for c in seen]


@repeatable
@given(groups)
def test_with_shared_prompts_every_wanted_token_once_predicted_by_its_own_prefix(case: Groups) -> None:
    tokens, lengths, wanted = build_groups(case)
    row_start = np.repeat(np.cumsum(lengths) - lengths, lengths)
    seen: list[int] = []
    for micro in make_micro_batches(tokens, lengths, wanted, case[1], case[2]):
        for position, target, source in zip(micro.positions, micro.targets, micro.sources, strict=True):
            row, column = divmod(int(position), micro.input_ids.shape[1])
            assert visible(micro, row, column) == list(enumerate(tokens[row_start[source] : source].tolist()))
            assert target == tokens[source]
        seen += micro.sources.tolist()
    assert sorted(seen) == np.flatnonzero(wanted).tolist()


@repeatable
@given(groups)
def test_budget_holds_with_shared_prompts_unless_a_single_sequence_is_longer(case: Groups) -> None:
    tokens, lengths, wanted = build_groups(case)
    row_of = np.repeat(np.arange(lengths.size), lengths)
    for micro in make_micro_batches(tokens, lengths, wanted, case[1], case[2]):
        assert micro.input_ids.size <= case[1] or np.unique(row_of[micro.sources]).size == 1


def parts_see(packed: PackedRow) -> np.ndarray:
    """Who sees whom, (width, width), by the parts of the attention."""
    sees = np.zeros((packed.until.size, packed.until.size), dtype=bool)
    begin = 0
    for part in packed.parts:
        places = begin + np.cumsum(part.lengths) - part.lengths
        for index, (place, length) in enumerate(zip(places.tolist(), part.lengths.tolist(), strict=True)):
            own = slice(place, place + length)
            if isinstance(part, TreePart):
                sees[own, own] = np.tri(length, dtype=bool)
                for other in part.ancestors[index]:
                    sees[own, places[other] : places[other] + part.lengths[other]] = True
            else:
                column = np.arange(place, place + length)
                until = packed.until[own] if part.masked else place + length
                sees[own, own] = (column <= column[:, None]) & (column[:, None] < until)
        begin += part.num_tokens
    assert begin == packed.until.size
    return sees


@repeatable
@given(groups, st.sampled_from([0.0, 5.0, 2000.0]))
def test_the_parts_of_the_attention_see_what_the_row_says(case: Groups, call_flops: float) -> None:
    tokens, lengths, wanted = build_groups(case)
    for micro in make_micro_batches(tokens, lengths, wanted, case[1], dataclasses.replace(case[2], call_flops=call_flops)):
        assert micro.packed is not None
        column = np.arange(micro.input_ids.size)
        expected = (column <= column[:, None]) & (column[:, None] < micro.packed.until)
        assert np.array_equal(parts_see(micro.packed), expected)


@repeatable
@given(groups)
def test_packed_rows_have_no_padding_and_trees_never_more_tokens(case: Groups) -> None:
    tokens, lengths, wanted = build_groups(case)
    alone = make_micro_batches(tokens, lengths, wanted, case[1], dataclasses.replace(case[2], may_share=False))
    places = np.flatnonzero(wanted)
    kept = [bool(((places >= end - n) & (places < end)).any()) for end, n in zip(np.cumsum(lengths), lengths, strict=True)]
    assert sum(m.input_ids.size for m in alone) == int((lengths[kept] - 1).sum())
    assert sum(m.input_ids.size for m in make_micro_batches(tokens, lengths, wanted, case[1], case[2])) <= sum(
        m.input_ids.size for m in alone
    )


def parts_of(*arguments: np.ndarray, costs: LayerCosts) -> list[RowsPart | TreePart]:
    (micro,) = make_micro_batches(*arguments, 10**6, costs)
    assert micro.packed is not None
    return list(micro.packed.parts)


def test_similar_lengths_are_one_call_of_the_attention_and_a_long_one_is_another() -> None:
    parts = parts_of(*build([301, 12, 11, 10], [True] * 334), costs=dataclasses.replace(QUICKSTART, call_flops=3e6))
    assert [part.lengths.tolist() for part in parts] == [[300], [11, 10, 9]]


def test_long_trees_branch_and_short_ones_have_a_mask() -> None:
    costs = dataclasses.replace(QUICKSTART, call_flops=3e6)
    (short,), (long,) = (parts_of(*group_of(prompt, 4, 8), costs=costs) for prompt in (12, 800))
    assert isinstance(short, RowsPart)
    assert short.masked
    assert isinstance(long, TreePart)
    assert long.lengths.tolist() == [800] + [3] * 8
    assert long.ancestors == ((), *[(0,)] * 8)


def group_of(prompt: int, response: int, samples: int, equal: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One prompt with equally long responses that differ from their first token on, or not at all."""
    tokens = np.tile(np.arange(prompt + response, dtype=np.int32), samples)
    if not equal:
        tokens[prompt :: prompt + response] += np.arange(samples, dtype=np.int32)
    mask = np.tile(np.r_[np.zeros(prompt), np.ones(response)], samples).astype(np.float32)
    return tokens, np.full(samples, prompt + response, np.int32), mask


def test_layout_of_the_documented_example() -> None:
    a, b, c, d, e, f, g, h, dot = range(1, 10)
    tokens = np.array([a, b, c, d, dot, a, b, f, dot, a, b, c, e, dot, g, h, dot], np.int32)
    wanted = np.array([0, 0, 1, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 1, 0, 0, 1], np.float32)
    (micro,) = make_micro_batches(tokens, np.array([5, 4, 5, 3], np.int32), wanted, 99, LINEAR)
    assert micro.packed is not None
    assert micro.input_ids.tolist() == [[a, b, c, d, e, f, g, h]]
    assert micro.packed.position_ids.tolist() == [[0, 1, 2, 3, 3, 2, 0, 1]]
    assert micro.packed.until.tolist() == [6, 6, 5, 4, 5, 6, 8, 8]
    assert micro.positions.tolist() == [1, 2, 3, 1, 5, 1, 2, 4, 7]
    assert micro.targets.tolist() == [c, d, dot, f, dot, c, e, dot, dot]


def test_equal_sequences_are_computed_once() -> None:
    tokens, lengths, wanted = group_of(4, 3, 5, equal=True)
    (micro,) = make_micro_batches(tokens, lengths, wanted, 99, LINEAR)
    assert micro.input_ids.tolist() == [tokens[:6].tolist()]
    assert micro.positions.tolist() == [3, 4, 5] * 5


def test_groups_share_their_prompt_where_that_is_cheaper() -> None:
    large = LayerCosts(linear_flops=2.0 * 358e6, attention_flops=4.0 * 896 * 24, call_flops=1.5e6 * 24)  # Qwen2.5-0.5B
    by_blocks = dataclasses.replace(large, call_flops=0.0, by_blocks=True)
    for prompt, response, costs, shared in (
        (9, 3, large, True),
        (500, 200, large, True),
        (50, 3000, large, False),  # a mask over long responses costs more than 7 short prompts
        (50, 3000, by_blocks, True),
    ):
        (micro,) = make_micro_batches(*group_of(prompt, response, 8), 10**6, costs)
        assert micro.input_ids.size == (prompt + 8 * (response - 1) if shared else 8 * (prompt + response - 1))
        assert micro.packed is not None
        assert bool(micro.packed.parts) is not costs.by_blocks


def test_groups_that_gain_share_beside_groups_that_do_not() -> None:
    (a, b, c), (d, e, f) = group_of(100, 2, 8), group_of(3, 600, 4)
    costs = LayerCosts(linear_flops=1.0, attention_flops=0.1, call_flops=1e9)
    (micro,) = make_micro_batches(np.r_[a, d + 7], np.r_[b, e], np.r_[c, f], 10**6, costs)
    assert micro.packed is not None
    assert [(part.lengths.tolist(), part.masked) for part in micro.packed.parts if isinstance(part, RowsPart)] == [
        ([108], True),
        ([602] * 4, False),
    ]


def test_a_model_that_may_not_share_packs_all_the_same_and_one_that_may_not_pack_pads() -> None:
    (a, b, c), (d, e, f) = group_of(40, 5, 4), group_of(40, 20, 4)
    arguments = np.r_[a, d + 100], np.r_[b, e], np.r_[c, f], 10**6
    (micro,) = make_micro_batches(*arguments, dataclasses.replace(LINEAR, may_share=False))
    assert micro.input_ids.shape == (1, 4 * 44 + 4 * 59)
    for attention, shapes in ((0.0, [(8, 59)]), (0.07, [(4, 59), (4, 44)])):
        costs = LayerCosts(linear_flops=1.0, attention_flops=attention, may_pack=False, may_share=False)
        assert [(m.packed, m.input_ids.shape) for m in make_micro_batches(*arguments, costs)] == [(None, shape) for shape in shapes]
    assert [(m.packed, m.input_ids.shape) for m in make_micro_batches(*arguments)] == [(None, (8, 59))]


def test_a_group_beyond_the_budget_is_cut_between_responses() -> None:
    micro_batches = make_micro_batches(*group_of(10, 5, 8), 20, LINEAR)
    assert [m.input_ids.shape for m in micro_batches] == [(1, 18)] * 4
