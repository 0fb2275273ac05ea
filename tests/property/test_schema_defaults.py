"""Whatever a user leaves out, the API server and the models fill in the same."""

import copy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rljob_api.crd import schema
from rljob_api.reading import manifest as manifests
from tests.unit.api.manifests import manifest
from tests.unit.api.structural import RESOLVED, beyond, with_defaults

FULL = with_defaults(schema.job_schema(), manifest())
FULL["spec"]["components"][1]["engine"] = {}
FULL["spec"]["model"]["lora"] = {}
FULL["spec"]["rollout"]["groupFilter"] = {"minStd": 0.0}
FULL["spec"]["algorithm"]["reward"]["overlong"] = {"bufferTokens": 8}
FULL["spec"]["algorithm"]["offPolicy"] = {"weight": {}, "masks": [{}, {"level": "Sequence"}]}
FULL["spec"]["queue"] = {"name": "q"}
FULL["spec"]["storage"] = {"claimName": "c"}
FULL["spec"]["head"]["env"] = [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]
FULL["spec"]["nodeGroups"][0]["hardware"] = {"type": "Franka", "configs": [{"nodeRank": 0}]}
FULL["spec"]["environments"] = [{"name": "lake", "type": "FrozenLake"}]
FULL["spec"]["data"]["validation"] = [{"name": "file", "type": "JSONL", "jsonl": {"path": "a"}}]


@st.composite
def partial(draw: st.DrawFn, node: dict[str, Any], value: Any) -> Any:
    """``value`` with any subset of its optional parts left out."""
    if isinstance(value, dict) and "properties" in node:
        return {
            key: draw(partial(node["properties"][key], item)) if key in node["properties"] else item
            for key, item in value.items()
            if key in node.get("required", ()) or key in ("apiVersion", "kind") or draw(st.booleans())
        }
    if isinstance(value, list) and "items" in node:
        return [draw(partial(node["items"], item)) for item in value]
    return copy.deepcopy(value)


@given(partial(schema.job_schema(), FULL))
def test_server_and_models_default_alike(document: dict[str, Any]) -> None:
    job = manifests.to_job(manifests.Document(data=document))
    stored, dumped = with_defaults(schema.job_schema(), document), job.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert {path: keys - RESOLVED.get(path, set()) for path, keys in beyond(dumped, stored)} == {path: set() for path in RESOLVED}
