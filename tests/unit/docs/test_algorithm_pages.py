"""Tables, fields, recipes and snippets of docs/algorithms.md, docs/overlap.md and docs/critic.md are those of the spec."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from rljob_api.v1alpha1 import RLJobSpec
from rljob_api.v1alpha1.operations import UpdateMode
from rljob_api.v1alpha1.policy_loss import LOSS_SETTINGS, PolicyLossVariant
from rljob_api.validation import check
from rljob_api.vocabulary import (
    AdvantageEstimator,
    Aggregation,
    CorrectionLevel,
    GroupRouting,
    KLEstimator,
    KLPlacement,
    NormScope,
    ProximalPolicy,
)
from tests.layout.tree import ROOT
from tests.unit.api.manifests import manifest
from tests.unit.docs.test_pages import rows, section

ALGORITHMS, OVERLAP, CRITIC = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("algorithms", "overlap", "critic"))
OTHER_WORDS = {"overlap": ("From ROLL", "Tests and measurements"), "algorithms": ("Your own loss or estimator",)}
"""Sections whose quoted words are other frameworks', commands, or Python."""
PAGES = {"algorithms": ALGORITHMS, "overlap": OVERLAP, "critic": CRITIC}


def models(kind: Any) -> Iterator[type[BaseModel]]:
    """Models that an annotation names."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        yield kind
    for argument in typing.get_args(kind):
        yield from models(argument)


def paths(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every field and section of the spec by its keys."""
    for name, info in model.model_fields.items():
        path = (*prefix, str(info.alias or name))
        yield path
        for inner in models(info.annotation):
            yield from paths(inner, path)


PATHS = set(paths(RLJobSpec))


def is_field(name: str) -> bool:
    """Whether the spec has such a field: a whole path below spec or the end of one."""
    keys = tuple(name.removeprefix("spec.").split("."))
    return any(path[-len(keys) :] == keys for path in PATHS)


def table(page: str, first_cell: str) -> list[list[str]]:
    """Body rows of the table whose first column has this title."""
    found = re.search(rf"^\| {re.escape(first_cell)} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", page, re.MULTILINE)
    assert found, f"no table {first_cell!r}"
    return rows(found.group(1))


def quoted(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


def snippets(page: str) -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)


@pytest.mark.parametrize(
    ("page", "title", "members"),
    [
        (ALGORITHMS, "`advantage.estimator`", AdvantageEstimator),
        (ALGORITHMS, "`policyLoss.variant`", PolicyLossVariant),
        (ALGORITHMS, "`proximal`", ProximalPolicy),
        (OVERLAP, "`updateMode`", UpdateMode),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 40 else "",
)
def test_a_table_has_a_row_for_every_choice(page: str, title: str, members: type[StrEnum]) -> None:
    named = [name for cells in table(page, title) for name in quoted(cells[0])]
    assert sorted(named) == sorted(members)


@pytest.mark.parametrize(
    ("page", "sentence", "members"),
    [
        (ALGORITHMS, r"`policyLoss\.aggregation`: ([^.]*)\.", Aggregation),
        (ALGORITHMS, r"`level` sets what one ratio covers: ([^.]*)\.", CorrectionLevel),
        (ALGORITHMS, r"`reward\.scale` take ([^.]*)\.", NormScope),
        (OVERLAP, r"`rollout\.groupRouting` \| ([^|]*) \|", GroupRouting),
    ],
)
def test_a_sentence_names_every_choice(page: str, sentence: str, members: type[StrEnum]) -> None:
    found = re.search(sentence, page)
    assert found
    assert sorted(quoted(found.group(1))) == sorted(members)


@pytest.mark.parametrize(("key", "members"), [("estimator", KLEstimator), ("placement", KLPlacement)])
def test_choices_of_the_kl(key: str, members: type[StrEnum]) -> None:
    found = re.search(rf"`kl: \{{[^}}]*{key}: ([\w|]+)", ALGORITHMS)
    assert found
    assert sorted(found.group(1).split("|")) == sorted(members)


def test_the_own_fields_of_a_loss_are_those_that_others_refuse() -> None:
    for cells in table(ALGORITHMS, "`policyLoss.variant`"):
        (variant,) = quoted(cells[0])
        kind = LOSS_SETTINGS[PolicyLossVariant(variant)]
        assert set(quoted(cells[2])) == {str(info.alias) for info in kind.model_fields.values()}, variant


def test_defaults_are_those_of_the_spec() -> None:
    document = manifest()
    document["spec"]["overlap"] = {"asyncGenerationRatio": 1.0}
    spec = check(document).job.spec
    defaults = {
        "algorithms": {str(spec.algorithm.off_policy.proximal)},
        "overlap": {str(spec.overlap.update_mode)},
        "critic": set[str](),
    }
    assert {name: set(re.findall(r"^\| `(\w+)` \(default\)", page, re.MULTILINE)) for name, page in PAGES.items()} == defaults


@pytest.mark.parametrize("page", PAGES)
def test_every_field_that_is_named_exists(page: str) -> None:
    text = re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL)
    for title in OTHER_WORDS.get(page, ()):
        text = text.replace(section(text, title), "")
    named = set()
    for code in quoted(text):
        if not re.search(r"^rljob |[/=]|\.md$| x ", code):  # commands, metrics, files, formulas
            named |= set(re.findall(r"(?<![\w.-])(?<!: )([a-z]\w*(?:\.[a-z]\w*)*)(?=:|$|[,}])", code))
    assert {name for name in named if not is_field(name)} == set()
    assert len(named) >= 6


def test_the_word_for_word_fields_of_the_roll_table_exist() -> None:
    reported = {name for cells in table(OVERLAP, "ROLL") for code in quoted(cells[1]) for name in [code.split(":")[0]]}
    assert reported
    assert {name for name in reported if not is_field(name)} == set()


@pytest.mark.parametrize("page", ["overlap", "critic"])
def test_field_tables_name_fields(page: str) -> None:
    named = [code.split(":")[0] for cells in table(PAGES[page], "field") for code in quoted(cells[0])]
    assert len(named) >= 4
    assert [name for name in named if not is_field(name)] == []


def merged(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Maps into each other; anything else in place of what was there."""
    result = dict(base)
    for key, value in over.items():
        old = result.get(key)
        result[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return result


def with_role(spec: dict[str, Any], role: str) -> dict[str, Any]:
    return spec | {"components": [*spec["components"], {"name": role.lower(), "role": role, "placement": {"ranks": "0"}}]}


RECIPES: Mapping[str, dict[str, Any]] = {
    "GRPO": {},
    "Dr. GRPO": {"algorithm": {"advantage": {"normalizeStd": False}, "policyLoss": {"aggregation": "SeqMeanTokenSumNorm"}}},
    "DAPO": {
        "algorithm": {
            "policyLoss": {"clipHigh": 0.28},
            "reward": {"overlong": {"bufferTokens": 128}},
            "filters": {"truncated": True},
        },
        "rollout": {"groupFilter": {"minStd": 0}},
    },
    "REINFORCE++": {"algorithm": {"advantage": {"estimator": "ReinforcePlusPlus"}}},
    "GSPO": {
        "algorithm": {
            "policyLoss": {"variant": "GSPO", "aggregation": "SeqMeanTokenMean"},
            "offPolicy": {"proximal": "Recompute"},
        },
        "training": {"miniBatches": 4},
    },
    "PPO": {"algorithm": {"advantage": {"estimator": "GAE"}}},
    "LitePPO": {
        "algorithm": {
            "advantage": {"estimator": "Reinforce"},
            "reward": {"center": "Group", "scale": "Batch"},
            "policyLoss": {"aggregation": "TokenMean"},
        }
    },
}
"""Settings below spec by the name of the recipe."""


def leaves(settings: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from leaves(value, (*prefix, key))
        else:
            yield (*prefix, key), value


def reported(cell: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Keys and values that a row names; the value is None where a section or switch is named alone, keys are empty where a choice is."""
    for code in quoted(cell):
        if ":" in code:
            yield from leaves(nested(code))
        elif code[0].isupper():
            yield (), code
        else:
            yield tuple(code.split(".")), None


def nested(code: str) -> dict[str, Any]:
    """``a.b: {c: 1}`` as maps in maps."""
    ((path, value),) = yaml.load(code, yaml.CSafeLoader).items()
    for key in reversed(path.split(".")):
        value = {key: value}
    return dict(value)


def holds(path: tuple[str, ...], keys: tuple[str, ...]) -> bool:
    """Whether these keys follow each other in the path."""
    return any(path[i : i + len(keys)] == keys for i in range(len(path)))


def number(value: Any) -> Any:
    """YAML 1.1 reads 3e-4 as text; the manifest's reader does not."""
    return float(value) if isinstance(value, str) and re.fullmatch(r"\d+e-\d+", value) else value


@pytest.mark.parametrize("cells", table(ALGORITHMS, "name"), ids=lambda cells: cells[0])
def test_a_recipe_is_a_valid_job_with_the_settings_that_its_row_names(cells: list[str]) -> None:
    name, row = cells
    written = list(leaves(RECIPES[name]))
    left = [path for path, _ in written]
    for keys, value in reported(row):
        if not keys:
            fitting = [path for path, found in written if found == value]
        elif value is None:
            fitting = [path for path, found in written if found is not False and holds(path, keys)]
        else:
            fitting = [path for path, found in written if path[-len(keys) :] == keys and found == number(value)]
        assert fitting, f"{name}: the row names {keys or value}, the manifest has {written}"
        left = [path for path in left if path not in fitting]
    assert left == [], "the manifest has settings that the row does not name"
    document = manifest()
    document["spec"] = merged(document["spec"], RECIPES[name])
    if "Critic" in row:
        document["spec"] = with_role(document["spec"], "Critic")
    check(document)


def test_the_recipes_are_those_of_the_table() -> None:
    assert [cells[0] for cells in table(ALGORITHMS, "name")] == list(RECIPES)


def test_defaults_are_grpo_with_the_clipped_loss() -> None:
    algorithm = check(manifest()).job.spec.algorithm
    assert algorithm.advantage.estimator is AdvantageEstimator.GRPO
    assert algorithm.policy_loss.variant is PolicyLossVariant.PPO
    assert algorithm.off_policy.proximal is ProximalPolicy.BEHAVIOR


def job_with(snippet: str) -> dict[str, Any]:
    """A minimal job with a page's snippet, of a spec or of a section of its algorithm."""
    document = manifest()
    document["spec"]["rewards"] = [{"name": "answer", "type": "ExactMatch"}]  # for sources of any type
    parsed = yaml.load(snippet.replace("[...]", "[]"), yaml.CSafeLoader)
    settings = parsed.get("spec", parsed)
    if set(settings) <= {path[1] for path in PATHS if len(path) == 2 and path[0] == "algorithm"}:
        settings = {"algorithm": settings}
    if settings.get("data", {}).get("train") == []:
        del settings["data"]["train"]
    spec = merged(document["spec"], settings)
    if "components" in settings:  # devices for all of them, and judges
        spec["components"] = [*settings["components"], *document["spec"]["components"][2:]]
        spec["nodeGroups"][0]["devicesPerNode"] = 16
    return document | {"spec": spec}


@pytest.mark.parametrize(
    "snippet",
    [pytest.param(snippet, id=f"{name}-{number}") for name, page in PAGES.items() for number, snippet in enumerate(snippets(page))],
)
def test_a_snippet_is_part_of_a_valid_job(snippet: str) -> None:
    check(yaml.safe_dump(job_with(snippet)))


def test_each_page_has_a_snippet() -> None:
    assert {name: len(snippets(page)) for name, page in PAGES.items()} == {"algorithms": 2, "overlap": 3, "critic": 1}


def test_an_unknown_key_in_a_snippet_would_be_noticed() -> None:
    snippet = snippets(OVERLAP)[0].replace("maxStaleness", "maxStale")
    with pytest.raises(ValueError, match="maxStale"):
        check(yaml.safe_dump(job_with(snippet)))


def test_the_example_that_the_overlap_page_names_is_what_it_says() -> None:
    (name,) = set(re.findall(r"`rljob run (examples/[\w-]+\.yaml)`", OVERLAP))
    spec = check((ROOT / name).read_text()).job.spec
    assert spec.overlap.async_generation_ratio == 1
    assert len(spec.node_groups) == 2
    told_every = re.search(r"validation every (\d+) steps", OVERLAP)
    assert told_every
    assert spec.validation.every_steps == int(told_every.group(1))
