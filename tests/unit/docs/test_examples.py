"""Every example is a valid job: types, rules between fields, placement."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from rljob_api import validation
from rljob_api.reading import manifest
from tests.layout.tree import ROOT
from tests.unit.docs.test_pages import rows

EXAMPLES = sorted((ROOT / "examples").glob("**/*.yaml"))
JOBS = [
    pytest.param(path, document["metadata"]["name"], id=f"{path.relative_to(ROOT / 'examples')}:{document['metadata']['name']}")
    for path in EXAMPLES
    for document in yaml.load_all(path.read_text(), yaml.CSafeLoader)
    if document["kind"] == "RLJob"
]


@pytest.mark.parametrize(("path", "name"), JOBS)
def test_the_example_is_valid(path: Path, name: str):
    assert validation.check(path.read_text(), name=name).plan.nodes


def test_every_example_holds_one_job_under_a_name_of_its_own():
    names = [parameter.values[1] for parameter in JOBS]
    assert len(names) == len(EXAMPLES) == len(set(names))


def test_the_secret_for_gated_models_has_one_key():
    """Jobs take it alone or all of a Secret's keys as variables, so the key is the variable's name."""
    texts = {path: path.read_text() for path in (*EXAMPLES, *(ROOT / "docs").rglob("*.md"))}
    keys = {
        (path.name, key)
        for path, text in texts.items()
        for key in re.findall(r"generic hub --from-literal=(\w+)=|secretKeyRef: \{name: hub, key: (\w+)\}", text)
    }
    assert {key for _, pair in keys for key in pair if key} == {"HF_TOKEN"}, keys


def test_the_index_lists_every_example_with_its_devices():
    page = ROOT / "docs" / "examples.md"
    listed = {}
    for cells in rows(page.read_text())[1:]:
        found = re.fullmatch(r"\[`(.*)`\]\(\.\./examples/(.*)\)", cells[0])
        assert found
        assert found[2].rpartition("/")[2] == found[1]
        listed[found[2]] = int(cells[1])
    plans = {str(path.relative_to(ROOT / "examples")): validation.check(path.read_text()).plan for path in EXAMPLES}
    assert listed == {name: sum(node.num_devices for node in plan.nodes) for name, plan in plans.items()}
    assert max(listed.values()) == 64


SCALED = {
    "nodeGroups", "components", "model.path", "model.dtype", "data.train", "data.prompt", "rewards",
    "rollout.promptsPerStep", "rollout.maxPromptTokens", "rollout.maxResponseTokens", "rollout.temperature", "rollout.topP", "rollout.topK",
    "training.steps", "training.learningRate", "training.warmupSteps", "training.microBatchTokens", "seed",
}  # fmt: skip
"""Fields of ROLL's configuration that are smaller, or of the tiny model's task, in the example."""
ADDED = {
    "algorithm.advantage",
    "algorithm.policyLoss",
    "algorithm.reward",
    "algorithm.filters",
    "data.validation",
    "validation.everySteps",
    "validation.maxPrompts",
}
"""What the example shows besides: a baseline, whitening, the dual clip, cut responses left out, validation."""


def test_the_asynchronous_example_is_rolls_own_configuration_scaled():
    texts = [(ROOT / path).read_text() for path in ("tests/golden/convert/roll-rlvr-async.yaml", "examples/rlvr-async.yaml")]
    old, new = (manifest.to_job(manifest.read(text)).spec.model_dump(mode="json", by_alias=True) for text in texts)
    differing = set()
    for section, value in old.items():
        if isinstance(value, dict) and isinstance(new[section], dict):
            differing |= {f"{section}.{field}" for field in value if value[field] != new[section][field]}
        elif value != new[section]:
            differing.add(section)
    assert differing == SCALED | ADDED
    assert [c["role"] for c in old["components"]] == [c["role"] for c in new["components"]]
    assert new["overlap"]["asyncGenerationRatio"] == 1
    assert new["training"]["tensorParallelSize"] == 2
    groups = {c.role: {new["nodeGroups"][p.node_rank]["name"] for p in c.processes} for c in validation.check(texts[1]).plan.components[:2]}
    assert sorted(groups.values(), key=str) == [{"infer"}, {"train"}]
