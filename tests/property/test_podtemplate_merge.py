"""Merging pod templates: any base, any overlay."""

import copy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.rules.pod_template import LIST_KEYS
from rljob_operator.desired.merge import REPLACED_ENTRIES, merge
from rljob_operator.desired.prelude import literal
from tests.unit.operator.desired.kuberay import expand

SCALARS = st.integers(0, 3) | st.sampled_from(["a", "b"]) | st.booleans()
NAMES = st.sampled_from(["x", "y", "z"])


def entries(field: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[dict[str, Any]]]:
    """A list of objects with different keys, as validation guarantees."""
    key = LIST_KEYS[field]
    return st.dictionaries(NAMES, st.dictionaries(st.sampled_from("pq"), values, max_size=2), max_size=3).map(
        lambda found: [{key: name, **rest} for name, rest in found.items()]
    )


def templates(leaves: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects that mix maps, keyed lists, plain lists, tolerations and scalars."""
    plain = st.lists(SCALARS, max_size=2)
    tolerations = st.lists(st.dictionaries(st.sampled_from(["key", "effect"]), st.sampled_from("ab"), max_size=2), max_size=2)

    def level(below: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        fields: dict[str, st.SearchStrategy[Any]] = {field: entries(field, below) for field in LIST_KEYS}
        return st.fixed_dictionaries({}, optional={**fields, "plain": plain, "tolerations": tolerations, "map": below, "other": leaves})

    return level(st.recursive(leaves, level, max_leaves=3))


BASES = templates(SCALARS)
OVERLAYS = templates(SCALARS | st.none())


@given(BASES, OVERLAYS)
@settings(max_examples=150)
def test_laws_of_merging(base: dict[str, Any], overlay: dict[str, Any]) -> None:
    """All laws of each example, because making one costs ten times what checking all of them does."""
    merging_nothing_changes_nothing(base)
    merging_twice_is_merging_once(base, overlay)
    what_is_there_keeps_its_order_and_what_is_new_follows(base, overlay)
    keys_that_the_overlay_does_not_name_stay(base, overlay)
    inputs_stay_as_they_are_and_are_not_shared(base, overlay)


def merging_nothing_changes_nothing(base: dict[str, Any]) -> None:
    assert merge(base, {}) == base
    assert merge({}, base) == base


def merging_twice_is_merging_once(base: dict[str, Any], overlay: dict[str, Any]) -> None:
    once = merge(base, overlay)
    assert merge(once, overlay) == once


def inputs_stay_as_they_are_and_are_not_shared(base: dict[str, Any], overlay: dict[str, Any]) -> None:
    kept = copy.deepcopy((base, overlay))
    result = merge(base, overlay)
    scramble(result)
    assert (base, overlay) == kept


def scramble(value: Any) -> None:
    if isinstance(value, dict):
        for child in value.values():
            scramble(child)
        value["scrambled"] = True
    elif isinstance(value, list):
        for child in value:
            scramble(child)
        value.append("scrambled")


def what_is_there_keeps_its_order_and_what_is_new_follows(base: dict[str, Any], overlay: dict[str, Any]) -> None:
    result = merge(base, overlay)
    for field, key in LIST_KEYS.items():
        if isinstance(overlay.get(field), list) and field in overlay:
            before = [item[key] for item in base.get(field, [])]
            added = [item[key] for item in overlay[field]]
            assert [item[key] for item in result[field]] == [*before, *(name for name in added if name not in before)]
            replaced = {item[key]: item for item in overlay[field]}
            untouched = [item for item in result[field] if item[key] not in replaced]
            assert untouched == [item for item in base.get(field, []) if item[key] not in replaced]
            if field in REPLACED_ENTRIES:
                assert all(merge({}, item) in result[field] for item in overlay[field])


def keys_that_the_overlay_does_not_name_stay(base: dict[str, Any], overlay: dict[str, Any]) -> None:
    result = merge(base, overlay)
    assert {key: value for key, value in result.items() if key not in overlay} == {k: v for k, v in base.items() if k not in overlay}
    assert not [key for key, value in overlay.items() if value is None and key in result]


@given(st.text(alphabet="$()ABa ", max_size=12), st.dictionaries(st.sampled_from(["A", "B", "AB", ""]), st.just("expanded")))
def test_literal_text_survives_the_kubelet(text: str, env: dict[str, str]) -> None:
    assert expand(literal(text), env) == text
