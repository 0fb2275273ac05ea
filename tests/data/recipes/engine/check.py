"""The engine of the recipe: chosen by its own name, planned, checked, and started by its adapter's settings."""

import asyncio
import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from rljob_api.errors import SpecInvalidError
from rljob_api.v1alpha1 import RLJob
from rljob_api.validation import CheckedJob, check
from rljob_runtime.cluster.inprocess import InProcessWorker
from rljob_runtime.cluster.protocol import WorkerSpec
from rljob_runtime.engine import registry
from rljob_runtime.errors import SetupError
from rljob_runtime.job import launch, learning_settings
from rljob_runtime.packed import unpack
from rljob_runtime.records import GenerationRequest, Sampling
from tests.support.records import ids
from tests.unit.api.manifests import manifest


def job_with(arguments: dict[str, Any], **engine: Any) -> CheckedJob:
    document = manifest()
    document["spec"]["components"][1]["engine"] = {"type": "Parrot", "maxRunningRequests": 7, "extraArgs": arguments, **engine}
    return check(document)


def problem_of(call: Any) -> str:
    with pytest.raises(SpecInvalidError) as refusal:
        call()
    return str(refusal.value)


def worker_of(job: CheckedJob) -> WorkerSpec:
    (worker,) = launch.worker_specs(job.job.spec, job.plan, job.plan.component("actor_infer"), None, Path("logs"))
    return worker


async def answer(worker: WorkerSpec) -> list[int]:
    module, name = worker.factory.split(":")
    engine = InProcessWorker(worker.name, getattr(import_module(module), name)(**worker.kwargs))
    sampling = Sampling(max_tokens=40, top_k=2, returns_mask=True)
    request = GenerationRequest(request_id="r", prompt_token_ids=ids(1), sampling=sampling, seed=0)
    await engine.call("submit", [request], timeout_s=10.0)
    (completion,) = unpack(await engine.call("collect", 10.0, timeout_s=10.0))
    engine.stop()
    assert completion.segment.sampling_mask is not None
    assert len(completion.segment.sampling_mask.counts) == len(completion.segment)
    return list(completion.segment.token_ids.tolist())


job = job_with({"letters": 5})
worker = worker_of(job)
assert (worker.factory, worker.concurrency) == ("rljob_runtime.engine.parrot:ParrotEngine", 2)
assert worker.env["PARROT_LETTERS"] == "5"
assert worker.env["OMP_NUM_THREADS"] != "99"  # what says where a worker runs goes over what an engine asks for
tokens = asyncio.run(answer(worker))
assert tokens, "no response"
assert set(tokens) <= set(range(5)), tokens

registry.check_engines(job.job.spec, on_this_python=True)
unknown = problem_of(lambda: registry.check_engines(job_with({"words": 3}).job.spec, on_this_python=True))
assert "spec.components[1].engine.extraArgs.words: 3: is unknown; remove it" in unknown, unknown
assert not learning_settings.rollout_config(job.job.spec, {"actor_infer": 1}).fleet.survives_engine_loss  # its restart policy

document = manifest()
document["spec"]["nodeGroups"][0]["nodes"] = 2
document["spec"]["components"][1] |= {"engine": {"type": "Parrot", "tensorParallelSize": 2}, "placement": {"deviceMapping": "[1, 2]"}}
split = problem_of(lambda: check(document))
assert "RLJob runs an engine as one process on one node" in split, split

document = manifest()
judge = {"name": "judge", "role": "Judge", "engine": {"type": "Parrot"}, "placement": {"ranks": "0"}, "model": {"path": "owner/judge"}}
document["spec"]["components"].append(judge)
spec = RLJob.model_validate_json(json.dumps(document)).spec
settings = {"on_cpu": True, "num_threads": 1, "log_file": Path("server.log"), "releases_devices": False}
with pytest.raises(SetupError, match=r"judge has the role Judge, and engine Parrot serves no judges; use engine\.type: VLLM"):
    registry.judge_worker(spec, spec.components[3], **settings)
