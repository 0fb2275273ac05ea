"""The user pages agree with the code where a test can check it: reasons, permissions, options, links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rljob_api.crd.schema import MUTABLE_SPEC_FIELDS
from rljob_api.v1alpha1.conditions import ConditionType
from rljob_api.v1alpha1.nodes import NodeGroup
from rljob_api.v1alpha1.rljob import RLJobSpec
from rljob_api.vocabulary import Reason
from tests.layout.tree import ROOT
from tests.support.chart import options, rules, values
from tests.support.snippets import PAGES

DOCS = ROOT / "docs"
INSTALL, KUBERNETES, TROUBLESHOOTING = ((DOCS / f"{name}.md").read_text() for name in ("install", "kubernetes", "troubleshooting"))


def section(text: str, title: str) -> str:
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#+ |\Z)", text, re.DOTALL | re.MULTILINE)
    assert found, f"no section {title!r}"
    return found.group(1)


def rows(text: str) -> list[list[str]]:
    """Cells of the body rows of all tables."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if not re.fullmatch(r"[|\s:-]+", line)]


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_is_explained(reason: Reason):
    assert f"`{reason}`" in TROUBLESHOOTING


def test_every_failure_has_a_row_with_whether_it_is_retried():
    listed = {cells[0].strip("`"): cells[1] for cells in rows(section(TROUBLESHOOTING, "The job failed"))[1:]}
    retried = {name: answer for name, answer in listed.items() if name in set(Reason)}
    assert retried == {name: "yes" if Reason(name).is_machine_failure else "no" for name in retried}
    assert {str(reason) for reason in Reason if reason.is_machine_failure} <= set(retried)


def test_the_conditions_are_all_there():
    assert [cells[0].strip("`") for cells in rows(section(KUBERNETES, "Conditions"))[1:]] == [str(kind) for kind in ConditionType]


def test_what_may_change_after_creation():
    text = re.sub(r"\s+", " ", section(KUBERNETES, "Deadlines and cleanup"))
    sentence = re.search(r"([^.|]*) are mutable", text)
    assert sentence
    assert set(re.findall(r"`(\w+)`", sentence.group(1))) == set(MUTABLE_SPEC_FIELDS)


def test_the_fields_of_a_node_group_exist():
    known = {field.alias or name for name, field in NodeGroup.model_fields.items()}
    named = {
        name.split(".")[0]
        for cells in rows(section(KUBERNETES, "From node groups to pods"))[1:]
        for name in re.findall(r"`([\w.]+)`", cells[0])
    }
    assert named
    assert named <= known
    of_all = {name for cells in rows(section(KUBERNETES, "Fields for all pods"))[1:] for name in re.findall(r"`([\w.]+)`", cells[0])}
    assert of_all
    assert of_all <= {field.alias or name for name, field in RLJobSpec.model_fields.items()}


def test_the_rights_of_the_operator():
    said = {}
    for cells in rows(section(INSTALL, "Security"))[1:]:
        for resource in re.findall(r"`([\w/]+)`", cells[0]):
            said[resource] = set(cells[1].split(", "))
    assert said == {resource: set(rule["verbs"]) for rule in rules() for resource in rule["resources"]}


def test_the_options_that_are_named_exist():
    known = {name for option in options(values()) for name in (option, *option.split(".")[:1])}
    named = {
        m
        for page in (INSTALL, TROUBLESHOOTING)
        for m in re.findall(
            r"(?:--set(?:-string)? '?|`)((?:image|runtime|watch|kuberay|jobs|operator|networkPolicy|serviceMonitor)\.[\w.]+)", page
        )
    }
    assert len(named) > 8
    assert {n for n in named if n not in known} == set()


def test_the_health_check_for_argo_cd_asks_for_conditions_that_exist():
    named = set(re.findall(r'condition\.type == "(\w+)"', section(INSTALL, "Argo CD and Flux")))
    assert {"Succeeded", "Failed"} <= named <= set(ConditionType)


def anchors(path: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(target)
    assert broken == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_of_commands_exist(page: Path):
    named = set(re.findall(r"(?:-f |install rljob |upgrade rljob )((?:examples|helm)/[\w./-]+)", page.read_text()))
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []
