"""The table of defaults is the spec's: our column is what a job gets that sets nothing but what its row says."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from rljob_api.v1alpha1 import RLJobSpec
from rljob_api.v1alpha1.policy_loss import LOSS_SETTINGS
from rljob_api.validation import check
from tests.layout.tree import ROOT
from tests.unit.api.manifests import manifest
from tests.unit.docs.test_algorithm_pages import quoted, rows, with_role

PAGE = (ROOT / "docs" / "defaults.md").read_text()
TABLES = [row for row in rows("\n".join(line for line in PAGE.splitlines() if line.startswith("| `"))) if row]
SECTIONS = {"variant": "policyLoss", "estimator": "advantage"}


def spec_with(settings: str) -> RLJobSpec:
    """A minimal job with one setting as in the second column."""
    document = manifest()
    spec = document["spec"]
    for key, value in (yaml.load(settings, yaml.CSafeLoader) or {}).items():
        if key in SECTIONS:
            spec["algorithm"] = {SECTIONS[key]: {key: value}}
        else:
            spec["overlap" if key == "asyncGenerationRatio" else "rollout"] = {key: value}
        if value == "GAE":
            document["spec"] = with_role(spec, "Critic")
    return check(document).job.spec


def value_at(section: Any, path: str) -> Any:
    document = section.model_dump(mode="json", by_alias=True)
    for key in path.split("."):
        document = document[key]
    return document


def read(cell: str) -> Any:
    """The value that a cell of our column writes."""
    if cell == "not set":
        return None
    (text,) = quoted(cell)
    return float(text) if "e-" in text else yaml.load(text, yaml.CSafeLoader)


@pytest.mark.parametrize("cells", TABLES, ids=lambda cells: f"{quoted(cells[0])[0]} {cells[1]}".strip())
def test_our_column_is_what_the_spec_resolves_to(cells: list[str]) -> None:
    (path,) = quoted(cells[0])
    assert value_at(spec_with(cells[1]), path) == read(cells[2])
    assert len(cells) == 7


def test_a_row_where_others_differ_says_why() -> None:
    for field, _, ours, *others, why in TABLES:
        numbers = {str(read(ours)).lower().removesuffix(".0")} | {other for other in others if other.replace(".", "").isdigit()}
        assert why or len(numbers) == 1, field


def test_every_setting_of_a_compared_loss_and_every_field_that_is_resolved_has_a_row() -> None:
    """The page compares with other frameworks: a loss that none of them has need not be there, but is there as a whole or not at all."""
    named = {(quoted(cells[0])[0].rpartition(".")[2], cells[1]) for cells in TABLES}
    compared = {with_ for _, with_ in named}
    assert {f"variant: {variant}" for variant in ("GSPO", "TIS", "CISPO", "TOPR", "Kimi15")} <= compared
    for variant, kind in LOSS_SETTINGS.items():
        with_ = "" if variant == "PPO" else f"variant: {variant}"
        for info in kind.model_fields.values() if with_ in compared else ():
            assert (str(info.alias), with_) in named
    assert {"whiten", "updateMode", "topK"} <= {name for name, with_ in named if with_}
