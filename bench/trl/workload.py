"""The workloads, as RLJob manifests, and what both sides are given: a model folder and a list of tokenized prompts.

The manifest is the only description: the TRL side reads batch size, learning rate, sampling and loss from it too.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from bench.trl import lengths
from rljob_api.v1alpha1 import RLJob
from rljob_api.validation import check
from rljob_runtime.data.source import PromptSource
from rljob_runtime.job import worker_settings
from rljob_runtime.tiny import make_tiny_model

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart.yaml"
SEED = 0
TRAJECTORIES_ALL = 1024
"""As many trajectories as the manifest can ask for: more than one step has."""

REWARD_SOURCE = '''"""A cheap deterministic reward that differs within almost every group."""


def score(prompt: str, response: str, answer: str, metadata: dict) -> float:
    """Return a checksum of the response between 0 and 1."""
    return sum(response.encode()) % 97 / 96
'''


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is compared."""

    key: str
    title: str
    warmup_steps: int
    """Left out of every figure."""
    steps: int
    """Measured, by default."""
    repeats: int
    """By default."""
    aim: float
    """The ratio hoped for in each pair of runs; the report says whether it was reached."""
    async_ratio: float = 0.0
    """``overlap.asyncGenerationRatio`` of RLJob's side; TRL's trainer has nothing like it."""
    response_tokens: int | None = None
    """At most so many, from the model of :mod:`bench.trl.lengths`; None: the quickstart with its own model."""
    lora_rank: int | None = None
    """Train adapters of this rank on all linear layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A workload made ready in a folder."""

    workload: Workload
    job_file: Path
    prompts_file: Path
    num_parameters: int
    vocab_size: int
    total_steps: int
    """Warm-up included."""


QUICK = Workload(key="i", title="quickstart: 0.3 M parameters, two-digit sums", warmup_steps=10, steps=30, repeats=3, aim=1.0)
OVERLAPPED = Workload(
    key="i-ratio1",
    title="the quickstart again, RLJob with overlap.asyncGenerationRatio 1",
    warmup_steps=10,
    steps=30,
    repeats=3,
    aim=1.5,
    async_ratio=1.0,
)
HEAVY = Workload(
    key="ii",
    title="9 M parameters, responses of 8 to 256 tokens with a heavy tail",
    warmup_steps=1,
    steps=2,
    repeats=3,
    aim=1.5,
    response_tokens=lengths.MAX_TOKENS,
)
ADAPTERS = Workload(
    key="iii",
    title="LoRA adapters on the same model, responses of 8 to 64 tokens",
    warmup_steps=1,
    steps=3,
    repeats=3,
    aim=1.0,
    response_tokens=64,
    lora_rank=16,
)
WORKLOADS = (QUICK, OVERLAPPED, HEAVY, ADAPTERS)


def prepare(workload: Workload, folder: Path, *, steps: int, tiny_model: Path, seed: int = SEED) -> Prepared:
    """Make model, manifest and prompts of a workload.

    ``steps`` are the measured ones; the quickstart's model is made in ``tiny_model`` unless it is there already. ``seed`` is the job's: of
    prompts and samples, not of the model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    total = workload.warmup_steps + steps
    manifest: dict[str, Any] = yaml.safe_load(QUICKSTART.read_text())
    if workload.response_tokens is not None:
        num_parameters = _heavy(manifest["spec"], folder, total, workload.response_tokens)
        if workload.lora_rank is not None:
            manifest["spec"]["model"]["lora"] = {"rank": workload.lora_rank}
    else:
        num_parameters = _quick(manifest["spec"], tiny_model)
    _for_timing(manifest, workload, total, seed)
    job_file = folder / "job.yaml"
    job_file.write_text(yaml.safe_dump(manifest, sort_keys=False))
    job = check(job_file.read_text()).job
    prompts_file = folder / "prompts.jsonl"
    vocab_size = _write_prompts(job, prompts_file, total * job.spec.rollout.prompts_per_step)
    return Prepared(
        workload=workload,
        job_file=job_file,
        prompts_file=prompts_file,
        num_parameters=num_parameters,
        vocab_size=vocab_size,
        total_steps=total,
    )


def _quick(spec: dict[str, Any], tiny_model: Path) -> int:
    """The quickstart as it is shipped, with its own model."""
    summary = make_tiny_model(tiny_model)
    spec["model"]["path"] = str(tiny_model)
    return summary.num_parameters


def _heavy(spec: dict[str, Any], folder: Path, total: int, response_tokens: int) -> int:
    """The quickstart's machines, another model, and lengths that do not drift: the learning rate is next to nothing."""
    num_parameters = lengths.make_model(folder / "model", SEED)
    prompts = folder / "questions.jsonl"
    lengths.write_prompts(prompts, total * spec["rollout"]["promptsPerStep"], SEED)
    (folder / "bench_reward.py").write_text(REWARD_SOURCE)
    spec["model"]["path"] = str(folder / "model")
    spec["data"] = {"train": [{"name": "routes", "type": "JSONL", "jsonl": {"path": str(prompts)}}]}
    spec["rewards"] = [{"name": "checksum", "type": "Function", "function": "bench_reward:score"}]
    spec["rollout"] |= {"maxResponseTokens": response_tokens}
    spec["training"] |= {"learningRate": 1e-7, "warmupSteps": 0, "schedule": "Constant"}
    return num_parameters


def _for_timing(manifest: dict[str, Any], workload: Workload, total: int, seed: int) -> None:
    """What all workloads change for a measurement: nothing of the work itself."""
    manifest["metadata"]["name"] = f"bench-trl-{workload.key}"
    spec = manifest["spec"]
    spec["seed"] = seed
    spec["training"]["steps"] = total
    spec["checkpoint"] = {"everySteps": 0}
    if workload.async_ratio:
        spec["overlap"] = {"asyncGenerationRatio": workload.async_ratio}
    shows_lengths = workload.response_tokens is not None
    spec["report"] = {"trajectoriesEverySteps": 1, "trajectoriesPerStep": TRAJECTORIES_ALL} if shows_lengths else {}


def _write_prompts(job: RLJob, path: Path, count: int) -> int:
    """Write the prompts that a run of ``job`` will see, in its order; returns the size of the vocabulary."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(job.spec.model.path)
    source = PromptSource(
        [worker_settings.source_config(s, job.spec) for s in job.spec.data.train],
        tokenizer,
        seed=job.spec.seed,
        max_prompt_tokens=job.spec.rollout.max_prompt_tokens,
        prompt_format=worker_settings.prompt_format(job.spec),
    )
    prompts = source.next(count)
    path.write_text("".join(json.dumps({**asdict(p), "token_ids": p.token_ids.tolist()}, default=str) + "\n" for p in prompts))
    return len(tokenizer)
