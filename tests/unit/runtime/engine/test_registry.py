"""Engines by their type: what their adapters decide, and what is refused before anything starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rljob_api.errors import SpecInvalidError
from rljob_api.v1alpha1 import RLJob, RLJobSpec
from rljob_api.v1alpha1.components import EngineType
from rljob_api.validation import check
from rljob_runtime.engine import registry
from rljob_runtime.errors import SetupError
from rljob_runtime.job import learning_settings
from tests.support import recipes
from tests.unit.api.manifests import manifest

toy_engine = recipes.toy_engine()
KIND = EngineType.SGLANG
"""The type whose adapter the toy replaces."""


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.ENGINES, KIND, f"{toy_engine.__name__}:ADAPTER")


def job_with(arguments: dict[str, Any]) -> RLJobSpec:
    document = manifest()
    document["spec"]["components"][1]["engine"] = {"type": str(KIND), "maxRunningRequests": 7, "extraArgs": arguments}
    return check(document, runnable=False).job.spec


def test_the_restart_policy_reaches_the_fleet() -> None:
    spec = job_with({})
    assert not learning_settings.rollout_config(spec, {"actor_infer": 1}).fleet.survives_engine_loss
    vllm = spec.model_copy(update={"components": tuple(c.model_copy(update={"engine": None}) for c in spec.components)})
    assert learning_settings.rollout_config(vllm, {"actor_infer": 1}).fleet.survives_engine_loss


def test_arguments_and_packages_are_checked_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = job_with({"letters": 3})
    registry.check_engines(spec, on_this_python=True)
    with pytest.raises(SpecInvalidError, match=r"spec\.components\[1\]\.engine\.extraArgs\.words: 3: is unknown; remove it"):
        registry.check_engines(job_with({"words": 3}), on_this_python=True)
    monkeypatch.setattr(toy_engine, "ADAPTER", replace(toy_engine.ADAPTER, package="no_such_engine"))
    registry.check_engines(spec, on_this_python=False)
    with pytest.raises(SetupError, match=r"engine\.type SGLang: the Python package no_such_engine is not .*; install it"):
        registry.check_engines(spec, on_this_python=True)


def test_an_engine_that_cannot_release_its_devices_is_refused_where_it_would_have_to() -> None:
    spec = job_with({})
    settings = {"on_cpu": True, "num_threads": 1}
    with pytest.raises(SetupError, match=r"actor_infer shares devices .* engine SGLang cannot take its weights and cache off"):
        registry.engine_worker(spec, spec.components[1], **settings, releases_devices=True)


def test_a_type_without_an_adapter_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(registry.ENGINES, KIND)
    with pytest.raises(SetupError, match="SGLang has no adapter; this runtime has VLLM"):
        registry.check_engines(job_with({}), on_this_python=False)


def test_a_judge_needs_an_engine_that_serves_judges() -> None:
    document = manifest()
    judge = {"name": "judge", "role": "Judge", "placement": {"ranks": "0"}, "model": {"path": "owner/judge"}}
    document["spec"]["components"].append(judge | {"engine": {"type": str(KIND)}})
    spec = RLJob.model_validate_json(json.dumps(document)).spec
    settings = {"on_cpu": True, "num_threads": 1, "log_file": Path("server.log"), "releases_devices": False}
    with pytest.raises(SetupError, match=r"judge has the role Judge, and engine SGLang serves no judges; use engine\.type: VLLM"):
        registry.judge_worker(spec, spec.components[3], **settings)
    served = spec.components[3].model_copy(update={"engine": None})
    spec = spec.model_copy(update={"components": (*spec.components[:3], served)})
    assert registry.judge_worker(spec, served, **settings).factory == "rljob_runtime.engine.vllm.server:VllmServer"
