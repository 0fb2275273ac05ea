"""Recipe: an engine, from its type in the manifest to a response of its worker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rljob_api.errors import SpecInvalidError
from rljob_api.planning.plan import Plan
from rljob_api.v1alpha1 import RLJobSpec
from rljob_api.v1alpha1.components import EngineType
from rljob_api.validation import check
from rljob_runtime.cluster.inprocess import InProcessWorker
from rljob_runtime.cluster.protocol import WorkerSpec
from rljob_runtime.engine import registry
from rljob_runtime.errors import SetupError
from rljob_runtime.job import launch, learning_settings
from rljob_runtime.packed import unpack
from rljob_runtime.records import GenerationRequest, Sampling
from tests.support.records import ids
from tests.unit.api.manifests import manifest
from tests.unit.recipes import toy_engine

KIND = EngineType.SGLANG
"""The type whose adapter the toy replaces."""


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.ENGINES, KIND, f"{toy_engine.__name__}:ADAPTER")


def job_with(arguments: dict[str, Any]) -> tuple[RLJobSpec, Plan]:
    document = manifest()
    document["spec"]["components"][1]["engine"] = {"type": str(KIND), "maxRunningRequests": 7, "extraArgs": arguments}
    checked = check(document, runnable=False)
    return checked.job.spec, checked.plan


def worker_of(arguments: dict[str, Any]) -> WorkerSpec:
    spec, plan = job_with(arguments)
    component = next(c for c in plan.components if c.name == "actor_infer")
    (worker,) = launch.worker_specs(spec, plan, component, None, Path("logs"))
    return worker


async def test_the_launch_starts_its_worker_and_it_answers() -> None:
    spec = worker_of({"letters": 5})
    assert spec.factory == f"{toy_engine.__name__}:ToyEngine"
    assert spec.concurrency == 2
    assert spec.env["TOY_LETTERS"] == "5"
    assert spec.env["OMP_NUM_THREADS"] != "99"  # what says where a worker runs goes over what an engine asks for
    worker = InProcessWorker(spec.name, toy_engine.ToyEngine(**spec.kwargs))
    sampling = Sampling(max_tokens=40, top_k=2, returns_mask=True)
    request = GenerationRequest(request_id="r", prompt_token_ids=ids(1), sampling=sampling, seed=0)
    await worker.call("submit", [request], timeout_s=10.0)
    (completion,) = unpack(await worker.call("collect", 10.0, timeout_s=10.0))
    worker.stop()
    assert completion.request_id == "r"
    segment = completion.segment
    assert set(segment.token_ids.tolist()) <= set(range(5))
    assert segment.sampling_mask is not None
    assert len(segment.sampling_mask.counts) == len(segment)


def test_the_restart_policy_reaches_the_fleet() -> None:
    spec, _ = job_with({})
    assert not learning_settings.rollout_config(spec, {"actor_infer": 1}).fleet.survives_engine_loss
    vllm = spec.model_copy(update={"components": tuple(c.model_copy(update={"engine": None}) for c in spec.components)})
    assert learning_settings.rollout_config(vllm, {"actor_infer": 1}).fleet.survives_engine_loss


def test_arguments_and_packages_are_checked_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, _ = job_with({"letters": 3})
    registry.check_engines(spec, on_this_python=True)
    with pytest.raises(SpecInvalidError, match=r"spec\.components\[1\]\.engine\.extraArgs\.words: 3: is unknown; remove it"):
        registry.check_engines(job_with({"words": 3})[0], on_this_python=True)
    monkeypatch.setattr(toy_engine, "ADAPTER", replace(toy_engine.ADAPTER, package="no_such_engine"))
    registry.check_engines(spec, on_this_python=False)
    with pytest.raises(SetupError, match=r"engine\.type SGLang: the Python package no_such_engine is not .*; install it"):
        registry.check_engines(spec, on_this_python=True)


def test_an_engine_that_cannot_release_its_devices_is_refused_where_it_would_have_to() -> None:
    spec, _ = job_with({})
    settings = {"on_cpu": True, "num_threads": 1}
    with pytest.raises(SetupError, match=r"actor_infer shares devices .* engine SGLang cannot take its weights and cache off"):
        registry.engine_worker(spec, spec.components[1], **settings, releases_devices=True)


def test_a_type_without_an_adapter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(registry.ENGINES, KIND)
    with pytest.raises(SetupError, match="SGLang has no adapter; this runtime has VLLM"):
        worker_of({})
