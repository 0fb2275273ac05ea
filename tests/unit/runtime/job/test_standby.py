"""Standby processes of a job: with the settings of the engines whose place they take."""

from pathlib import Path
from typing import Any

import pytest

from rljob_api.validation import check
from rljob_runtime.cluster.protocol import WorkerSpec
from rljob_runtime.cluster.standby import Standby
from rljob_runtime.engine.registry import ENGINES
from rljob_runtime.job.launch import worker_specs
from rljob_runtime.job.standby import standby_processes
from tests.support.recipes import toy_engine
from tests.unit.api.manifests import manifest


class Starting:
    """Keeps what it was asked to start."""

    def __init__(self) -> None:
        self.asked: list[WorkerSpec] = []

    async def start_standby(self, spec: WorkerSpec, timeout_s: float) -> Any:
        self.asked.append(spec)
        raise NotImplementedError


def made(*, restarts: int = 3) -> tuple[dict[int, Standby], list[WorkerSpec], Starting]:
    """Of two engines on the second node of three devices."""
    document = manifest()
    document["spec"]["nodeGroups"] = [
        {"name": "train", "devicesPerNode": 1},
        {"name": "infer", "devicesPerNode": 3, "env": [{"name": "NCCL_DEBUG", "value": "INFO"}]},
    ]
    document["spec"]["components"][0]["placement"] = {"nodeGroups": ["train"], "ranks": "0"}
    document["spec"]["components"][1] |= {"placement": {"nodeGroups": ["infer"], "ranks": "1-2"}, "engine": {}}
    document["spec"]["rollout"] = {"maxEngineRestarts": restarts} | ({"standbyProcesses": "PerNode"} if restarts else {})
    checked = check(document)
    specs = worker_specs(checked.job.spec, checked.plan, checked.plan.component("actor_infer"), None, Path("logs"))
    cluster = Starting()
    return standby_processes(checked.job.spec, checked.plan, "actor_infer", specs, cluster, lambda line: None), specs, cluster


async def test_a_process_waits_with_the_settings_of_the_first_engine_of_its_node() -> None:
    found, specs, cluster = made()
    assert list(found) == [1]
    with pytest.raises(NotImplementedError):
        await found[1].run()
    (asked,) = cluster.asked
    assert asked.name == "actor_infer-standby-1"
    assert (asked.factory, asked.kwargs, asked.env) == (specs[0].factory, specs[0].kwargs, specs[0].env)
    assert (asked.node_rank, asked.cuda_devices, asked.env["NCCL_DEBUG"]) == (1, (1,), "INFO")


def test_none_where_no_engine_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert made(restarts=0)[0] == {}
    monkeypatch.setitem(ENGINES, next(iter(ENGINES)), f"{toy_engine().__name__}:ADAPTER")  # its loss ends the attempt
    assert made()[0] == {}
