"""Where a job's model comes from: folders stay, Hub models become local folders of each node, a resumed run keeps its commit."""

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from rljob_api import memory
from rljob_api.v1alpha1 import RLJobSpec
from rljob_api.validation import check
from rljob_runtime.cluster.protocol import WorkerSpec
from rljob_runtime.errors import DeadlineError, ModelError, StartupDeadlineError
from rljob_runtime.hub.source import HubFile, HubModel
from rljob_runtime.job import launch, models
from rljob_runtime.job.model_shape import read_config
from rljob_runtime.job.models import ModelSources
from tests.integration.jobs import job
from tests.unit.api.test_memory import QWEN3_32B, planned, qwen3_32b

COMMIT = "a" * 40
SOURCES = ModelSources(
    models=(HubModel(repo="team/tiny", commit=COMMIT, files=(HubFile(path="model.safetensors", size_bytes=4096),)),),
    here={"team/tiny": "/driver/tiny"},
)
GROUPS = [
    {"name": "train", "devicesPerNode": 1, "deviceResource": "cpu", "env": [{"name": "HF_HOME", "value": "/big"}]},
    {"name": "infer", "devicesPerNode": 1, "deviceResource": "cpu"},
]
CHECKED = check(job(Path("team/tiny"), steps=1, nodeGroups=GROUPS))
SPEC, PLAN = CHECKED.job.spec, CHECKED.plan


class Call:
    """A call whose answer is known, or that never answers."""

    def __init__(self, answer: Callable[[], Any] | None) -> None:
        self._answer = answer

    async def result(self, timeout_s: float) -> Any:
        if self._answer is None:
            await asyncio.Event().wait()
            raise DeadlineError("never")
        return self._answer()


class Fetcher:
    """A downloader of a fake cluster."""

    log_file = "log"

    def __init__(self, spec: WorkerSpec, fetched: Callable[[], Any] | None) -> None:
        self.name, self.spec, self._fetched = spec.name, spec, fetched

    def start(self, method: str, *args: Any) -> Call:
        assert method == "fetch"
        return Call(self._fetched)

    async def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        assert method == "received_bytes"
        return 1024


class Nodes:
    """A cluster that starts only downloaders; ``fetched`` by rank says what becomes of each."""

    def __init__(self, fetched: dict[int, Callable[[], Any] | None]) -> None:
        self.started: list[Fetcher] = []
        self.ended: list[str] = []
        self._fetched = fetched

    async def start_workers(self, specs: Sequence[WorkerSpec], timeout_s: float) -> list[Any]:
        self.started = [Fetcher(spec, self._fetched[spec.node_rank]) for spec in specs]
        return list(self.started)

    def end_workers(self, workers: Sequence[Any]) -> None:
        self.ended += [worker.name for worker in workers]


def download(nodes: Nodes, timeout_s: float = 5.0) -> Any:
    said: list[str] = []
    return asyncio.run(models.download(SOURCES, SPEC, PLAN, nodes, timeout_s, said.append))  # type: ignore[arg-type]


def test_every_worker_gets_the_folder_of_its_own_node_and_the_spec_stays_as_it_is() -> None:
    nodes = Nodes({rank: lambda rank=rank: {"team/tiny": f"/node{rank}/tiny"} for rank in (0, 1)})  # type: ignore[misc]
    folders = download(nodes)
    assert [worker.spec.env.get("HF_HOME") for worker in nodes.started] == ["/big", None]
    assert nodes.ended == ["download-0", "download-1"]
    specs = [s for c in PLAN.components for s in launch.worker_specs(SPEC, PLAN, c, None, Path("logs"), folders)]
    seen = {s.name: s.kwargs["config"].model_path for s in specs if "config" in s.kwargs}
    assert seen == {"actor_train-0": "/node0/tiny", "actor_infer-0": "/node1/tiny"}
    assert SPEC.model.path == "team/tiny"
    assert models.with_folders(SPEC, SOURCES.here).model.path == "/driver/tiny"


def test_trainers_reduce_gradients_as_the_memory_estimate_says() -> None:
    spec, shape = qwen3_32b(), memory.shape_from_config(QWEN3_32B)
    plan = planned(spec)
    trainer = plan.component("actor_train")
    for known, each in ((shape, True), (None, False)):
        configs = [worker.kwargs["config"] for worker in launch.worker_specs(spec, plan, trainer, None, Path("logs"), shape=known)]
        assert {config.reduces_each_micro_batch for config in configs} == {each}


def test_a_node_that_cannot_download_is_named_and_nothing_is_left_running() -> None:
    def refuse() -> None:
        raise ModelError("no room")

    nodes = Nodes({0: None, 1: refuse})
    with pytest.raises(ModelError, match=re.escape("node 1 (infer): no room")):
        download(nodes)
    assert len(nodes.ended) == 2


def test_a_download_that_takes_too_long_says_how_far_which_node_is() -> None:
    nodes = Nodes({0: lambda: {"team/tiny": "/x"}, 1: None})
    said = r"downloading team/tiny \(aaaaaaaaaaaa\): node 1 \(infer\) 1.0 KiB of 4.0 KiB after 0 s \(spec.startupDeadlineSeconds\)"
    with pytest.raises(StartupDeadlineError, match=said):
        download(nodes, timeout_s=0.05)


def test_folders_are_not_downloaded_and_have_no_revision(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert models.locate(spec_of(tmp_path), {}).models == ()
    with pytest.raises(ModelError, match=r"spec.model.revision 'v1': spec.model.path .* is a folder here, which has no revisions"):
        models.locate(spec_of(tmp_path, revision="v1"), {})
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    with pytest.raises(ModelError, match=r"spec.model.tokenizerRevision 'v1': spec.model.tokenizerPath .* is a folder here"):
        models.locate(spec_of(tmp_path, tokenizerPath=str(tokenizer), tokenizerRevision="v1"), {})
    with pytest.raises(ModelError, match=r"no such folder in .* mount the volume"):
        models.locate(spec_of(tmp_path / "none"), {})


def spec_of(path: Path, **model: Any) -> RLJobSpec:
    manifest = job(path, steps=1)
    manifest["spec"]["model"] |= model
    return check(manifest).job.spec


def test_a_resumed_run_keeps_each_commit_until_another_revision_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []

    def resolve(repo: str, revision: str | None, **settings: Any) -> tuple[HubModel, Path]:
        asked.append(revision)
        commits = {"team/tiny": COMMIT, "team/words": "b" * 40}
        return HubModel(repo=repo, commit=commits[repo], files=()), Path("/driver") / repo

    monkeypatch.setattr(models, "resolve", resolve)
    assert models.recorded(tmp_path, SPEC) == {}
    models.record(tmp_path, SPEC, models.locate(SPEC, {}))
    models.locate(SPEC, models.recorded(tmp_path, SPEC))
    other = spec_of(Path("team/tiny"), revision="v2")
    models.locate(other, models.recorded(tmp_path, other))
    assert asked == [None, COMMIT, "v2"]

    asked.clear()
    first, second = (
        spec_of(Path("team/tiny"), tokenizerPath="team/words", tokenizerRevision=revision, revision="v2") for revision in ("t1", "t2")
    )
    models.record(tmp_path, first, models.locate(first, {}))
    models.locate(first, models.recorded(tmp_path, first))
    located = models.locate(second, models.recorded(tmp_path, second))
    assert asked == ["v2", "t1", COMMIT, "b" * 40, COMMIT, "t2"]
    assert models.with_folders(second, located.here).model.tokenizer_path == "/driver/team/words"


def test_the_config_of_a_cached_model_is_read_without_asking_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert read_config(SPEC.model) is None
    place = tmp_path / "models--team--tiny"
    (place / "snapshots" / COMMIT).mkdir(parents=True)
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text(COMMIT)
    (place / "snapshots" / COMMIT / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    assert read_config(SPEC.model) == {"model_type": "qwen2"}
    assert read_config(spec_of(Path("team/tiny"), revision="v2").model) is None


def test_a_teacher_is_downloaded_where_it_runs_and_nowhere_else() -> None:
    components = [
        {"name": "actor_train", "role": "Trainer", "placement": {"nodeGroups": ["train"], "ranks": "0"}},
        {"name": "actor_infer", "role": "Rollout", "placement": {"nodeGroups": ["train"], "ranks": "0"}},
        {"name": "teacher", "role": "Teacher", "placement": {"nodeGroups": ["infer"], "ranks": "0"}, "model": {"path": "team/large"}},
    ]
    checked = check(job(Path("team/tiny"), steps=1, nodeGroups=GROUPS, components=components, rewards=[]))
    large = HubModel(repo="team/large", commit=COMMIT, files=())
    sources = ModelSources(models=(*SOURCES.models, large), here={"team/tiny": "/driver/tiny", "team/large": "/driver/large"})
    nodes = Nodes({0: lambda: {"team/tiny": "/node0/tiny"}, 1: lambda: {"team/large": "/node1/large"}})
    folders = asyncio.run(models.download(sources, checked.job.spec, checked.plan, nodes, 5.0, lambda line: None))  # type: ignore[arg-type]
    assert [[model.repo for model in worker.spec.kwargs["models"]] for worker in nodes.started] == [["team/tiny"], ["team/large"]]
    specs = [
        s for c in checked.plan.components for s in launch.worker_specs(checked.job.spec, checked.plan, c, None, Path("logs"), folders)
    ]
    assert {s.name: s.kwargs["config"].model_path for s in specs if "config" in s.kwargs}["teacher-0"] == "/node1/large"
