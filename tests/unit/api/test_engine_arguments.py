"""Arguments that go to an engine under its own names: which ones RLJob refuses, and what to write instead."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.crd.reference import index
from rljob_api.errors import SpecInvalidError
from rljob_api.rules.engine_arguments import OWN_ARGUMENTS, UNSAFE_ARGUMENTS
from rljob_api.v1alpha1 import RLJobSpec
from rljob_api.v1alpha1.components import EngineType
from rljob_api.validation import check
from tests.unit.api.manifests import manifest


def spec_with(arguments: dict[str, Any]) -> RLJobSpec:
    document = manifest()
    document["spec"]["components"][1]["engine"] = {"extraArgs": arguments}
    document["spec"]["rollout"] = {"maxPromptTokens": 100, "maxResponseTokens": 50}
    return check(document).job.spec


def test_arguments_of_the_engine_pass() -> None:
    arguments = {"block_size": 16, "max_model_len": 150, "hf_overrides": {"rope_theta": 1.0}, "allowed_media_domains": ["a"]}
    engine = spec_with(arguments).components[1].engine
    assert engine is not None
    assert engine.extra_args == arguments


@pytest.mark.parametrize("name", OWN_ARGUMENTS[EngineType.VLLM])
def test_what_rljob_sets_itself_is_refused_with_the_field_to_use(name: str) -> None:
    with pytest.raises(SpecInvalidError, match=rf"spec\.components\[1\]\.engine\.extraArgs\.{name}: 1: is set by RLJob itself; "):
        spec_with({name: 1})


@pytest.mark.parametrize("name", UNSAFE_ARGUMENTS)
def test_what_would_keep_updates_from_the_weights_is_refused(name: str) -> None:
    with pytest.raises(SpecInvalidError, match=rf"extraArgs\.{name}: 1: (rearranges experts|keeps weights|keeps KV cache).*; remove it"):
        spec_with({name: 1})
    spec_with({name: 0})


def test_weights_may_be_offloaded_where_updates_reach_them() -> None:
    spec_with({"offload_backend": "uva", "cpu_offload_gb": 4})
    with pytest.raises(SpecInvalidError, match='offload_backend: "prefetch": keeps weights in host memory'):
        spec_with({"offload_backend": "prefetch"})


def test_the_fields_to_use_exist() -> None:
    reported = [remedy.removeprefix("write ") for remedy in OWN_ARGUMENTS[EngineType.VLLM].values() if remedy.startswith("write ")]
    assert [path for path in reported if path.replace("engine.", "spec.components[].engine.") not in index() and path not in index()] == []


@pytest.mark.parametrize(
    ("value", "reported"), [(149, r"is less than rollout.maxPromptTokens \+ maxResponseTokens \(150\)"), ("8k", "is not a number")]
)
def test_a_limit_that_would_cut_responses_is_refused(value: object, reported: str) -> None:
    with pytest.raises(SpecInvalidError, match=reported):
        spec_with({"max_model_len": value})
