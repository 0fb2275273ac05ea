"""What ``rljob plan`` prints below the picture."""

import io
from typing import Any

import pytest
from rich.console import Console

from rljob_api.validation import check
from rljob_runtime.commands.show_plan import print_standby
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
