"""What ``rljob plan`` prints below the picture."""

import io
import re
from typing import Any

import pytest
from rich.console import Console

from rljob_api.validation import check
from rljob_runtime.commands.show_plan import print_standby, print_transport
from tests.unit.api.manifests import manifest


@pytest.mark.parametrize(
    ("rollout", "reported"),
    [({}, ""), ({"standbyProcesses": "PerNode"}, "Standby: actor_infer on node 0: a standby process on each")],
)
def test_standby_processes_and_their_memory_are_shown(rollout: dict[str, Any], reported: str) -> None:
    document = manifest()
    document["spec"]["rollout"] = rollout
    shown = io.StringIO()
    print_standby(check(document), Console(file=shown, width=200))
    assert shown.getvalue().strip().startswith(reported)
    assert ("about 1 GiB of host memory each" in shown.getvalue()) is bool(reported)


ONE_EACH, TWO_OF_A_NODE = "2,4,6", "2-3,4,6"


@pytest.mark.parametrize(
    ("rollout", "backend", "reported"),
    [
        (ONE_EACH, "Auto", "TCP (selected by weightSync.backend Auto); it is tested when the run starts, and ObjectStore used if"),
        (ONE_EACH, "ObjectStore", "ObjectStore (weightSync.backend). The weights leave the sender's node 3 times, .* send them once.$"),
        (TWO_OF_A_NODE, "Auto", "TCP (selected by weightSync.backend Auto); it is tested when the run starts, and ObjectStore used if"),
        ("2-3", "Auto", "ObjectStore (selected by weightSync.backend Auto).$"),
    ],
)
def test_the_transport_is_shown_with_what_the_other_one_would_save_and_cost(rollout: str, backend: str, reported: str) -> None:
    document = manifest()
    document["spec"]["nodeGroups"] = [{"name": "a", "nodes": 4, "devicesPerNode": 2, "deviceType": "CPU"}]
    document["spec"]["components"] = [
        {"name": "actor_train", "role": "Trainer", "placement": {"ranks": "0"}},
        {"name": "actor_infer", "role": "Rollout", "placement": {"ranks": rollout}},
        {"name": "reward", "role": "Reward", "placement": {"workers": 1}},
    ]
    document["spec"]["weightSync"] = {"backend": backend}
    shown = io.StringIO()
    print_transport(check(document), Console(file=shown, width=200))
    pattern = reported.replace("(", r"\(").replace(")", r"\)")
    assert re.match(f"Transport of weights: {pattern}", shown.getvalue().strip())
