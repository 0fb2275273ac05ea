"""The manifests of bench.specs, and what its judge leaves out as known."""

import json

import pytest

from bench.specs.judge import _as_json, _can_be_said
from bench.specs.mutants import mutants
from rljob_api.errors import FieldError


def test_the_same_seed_gives_the_same_manifests_and_they_are_json():
    first, again, other = (list(mutants(seed, 60)) for seed in (3, 3, 4))
    assert first == again != other
    assert len({json.dumps(document["spec"], sort_keys=True) for document in first}) > 40
    assert [document["metadata"]["name"] for document in first] == [f"m{index}" for index in range(60)]


@pytest.mark.parametrize(
    ("path", "can"),
    [
        ("spec.training.steps", True),
        ("spec.components[0].placement.ranks", True),
        ('spec.nodeGroups[0].nodeSelector[""]', False),
        ("spec.rewards[0].onError", False),
        ("spec.unknown", False),
    ],
)
def test_what_a_structural_schema_can_say(path: str, can: bool):
    assert _can_be_said(FieldError(path=path, problem="p", remedy="r")) is can


def test_what_the_api_server_makes_of_values():
    assert _as_json({"a": None, "b": [1.0, None, {"c": 2.5}]}) == {"b": [1, None, {"c": 2.5}]}
