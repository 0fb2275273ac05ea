"""``python -m bench.driver.ray_step``: one data-parallel step through real Ray actors, each stage beside a bare copy of its bytes.

::

    2 engines ── collect, 8 responses a message ──> driver: unpack, arrange, rule ── batches, put ──> 2 trainer ranks, which read all of it

Engines and trainers are scripted and answer at once; messages, records and what the driver does are a job's. Prints a JSON object.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import ray

from bench.driver.world import LOGPROBS, TOKENS
from rljob_runtime.cluster.host import WorkerHost, settle_driver
from rljob_runtime.cluster.protocol import Worker, gather_all
from rljob_runtime.cluster.ray_cluster import CALLS, WATCH, RayWorker
from rljob_runtime.loop.sharing import sent, size_bytes
from rljob_runtime.overlap.arrange import arrange
from rljob_runtime.overlap.batching import Batches, BatchingConfig, split, train_batches
from rljob_runtime.overlap.buffer import Group
from rljob_runtime.overlap.rule import Rule
from rljob_runtime.overlap.rule_config import RuleConfig
from rljob_runtime.packed import CompletionBatch, pack, unpack
from rljob_runtime.records import Completion, Prompt, RewardResult, Segment, TrainBatch, Trajectory, VersionSpan

PROMPTS, SAMPLES, TOKENS_EACH, PROMPT_TOKENS = 16, 16, 16_384, 256
ENGINES, TRAINERS, MESSAGE = 2, 2, 8
REPEATS = 7
"""The first two are not counted."""
STORE_BYTES = 1 << 30
TIMEOUT_S = 120.0


class Engine:
    """Returns responses of ``TOKENS_EACH`` tokens."""

    def collect(self, names: Sequence[str]) -> CompletionBatch:
        """One message."""
        spans = (VersionSpan(start=0, end=TOKENS_EACH, version=0),)
        tokens, logprobs = TOKENS[:TOKENS_EACH], LOGPROBS[:TOKENS_EACH]
        segment = Segment(token_ids=tokens, sampled=True, logprobs=logprobs, version_spans=spans)
        return pack([Completion(request_id=name, segment=segment, finish_reason="stop") for name in names])


class TrainerRank:
    """Reads its batches."""

    def train_step(self, batches: Sequence[TrainBatch], step: int) -> dict[str, float]:
        """Sums every array once; also says how many of them are not views of Ray's shared memory."""
        arrays = [a for batch in batches for f in fields(batch) if isinstance(a := getattr(batch, f.name), np.ndarray)]
        return {
            "sum": float(sum(float(a.sum(dtype=np.float64)) for a in arrays)),
            "bytes": float(sum(a.nbytes for a in arrays)),
            "copied": float(sum(a.nbytes for a in arrays if a.flags.writeable)),
        }


@dataclass(slots=True)
class Stage:
    """What one stage took, and what it wrote."""

    seconds: float
    written_bytes: int
    """Of arrays that it had to write, each copy counted."""


def start_workers(folder: Path) -> tuple[list[RayWorker], list[RayWorker]]:
    """Engines and trainer ranks, each in a process."""
    host = ray.remote(concurrency_groups={CALLS: 1, WATCH: 1})(WorkerHost)

    def start(kind: str, count: int) -> list[RayWorker]:
        names = [f"{kind}-{index}" for index in range(count)]
        logs = [str(folder / f"{name}.log") for name in names]
        factory = f"bench.driver.ray_step:{kind}"
        return [RayWorker(n, log, host.options(num_cpus=0).remote(n, factory, {}, {}, log)) for n, log in zip(names, logs, strict=True)]

    return start("Engine", ENGINES), start("TrainerRank", TRAINERS)


async def collect(engines: Sequence[Worker]) -> list[Completion]:
    """All responses of a step, as engines return them."""
    names = [f"{prompt}/{sample}" for prompt in range(PROMPTS) for sample in range(SAMPLES)]
    shares = [names[index :: len(engines)] for index in range(len(engines))]

    async def of_engine(engine: Worker, wanted: Sequence[str]) -> list[Completion]:
        found = []
        for first in range(0, len(wanted), MESSAGE):
            found += unpack(await engine.call("collect", wanted[first : first + MESSAGE], timeout_s=TIMEOUT_S))
        return found

    parts = await asyncio.gather(*(of_engine(engine, share) for engine, share in zip(engines, shares, strict=True)))
    return [completion for part in parts for completion in part]


def build(completions: Sequence[Completion], rule: Rule) -> Batches:
    """What the trainer ranks train, not written out yet."""
    prompt = Prompt(index=0, text="", token_ids=TOKENS[:PROMPT_TOKENS], answer="", source="scripted")
    by_group: dict[int, list[Trajectory]] = {}
    for completion in completions:
        group_id, sample = map(int, completion.request_id.split("/"))
        trajectory = Trajectory(
            group_id=group_id,
            sample_index=sample,
            prompt=prompt,
            segments=(completion.segment,),
            finish_reason=completion.finish_reason,
            reward=RewardResult(sample_id=completion.request_id, score=float(sample % 2)),
        )
        by_group.setdefault(group_id, []).append(trajectory)
    groups = [Group(group_id=group_id, trajectories=tuple(found), failed_samples=0) for group_id, found in by_group.items()]
    config = BatchingConfig(num_ranks=TRAINERS, mini_batches=1, epochs=1, temperature=1.0)
    step = arrange(groups, 0)
    return train_batches(step, split(step, config), rule.apply(step), config)


async def one_step(engines: Sequence[Worker], trainers: Sequence[Worker]) -> dict[str, Stage]:
    """All stages of a step.

    Raises:
        RuntimeError: what a trainer read is not what was sent, or a message was copied on its way in.
    """
    marks = [time.perf_counter()]
    completions = await collect(engines)
    marks.append(time.perf_counter())
    received = sum(c.segment.token_ids.nbytes + c.segment.logprobs.nbytes for c in completions)
    batches = await asyncio.to_thread(build, completions, Rule(RuleConfig(max_response_tokens=2 * TOKENS_EACH)))
    marks.append(time.perf_counter())
    shares = await asyncio.to_thread(lambda: [sent(trainer, batches.of_rank(rank)) for rank, trainer in enumerate(trainers)])
    marks.append(time.perf_counter())
    answers = await gather_all([t.start("train_step", share, 0) for t, share in zip(trainers, shares, strict=True)], TIMEOUT_S)
    marks.append(time.perf_counter())
    sent_bytes = sum(size_bytes(share) for share in batches.by_rank)
    expected = sum(TrainerRank().train_step(share, 0)["sum"] for share in batches.by_rank)
    if any(c.segment.token_ids.flags.writeable for c in completions) or any(answer["copied"] for answer in answers):
        raise RuntimeError("a received array is no view of Ray's shared memory; the counts of copies in this file are wrong")
    if sum(answer["sum"] for answer in answers) != expected:
        raise RuntimeError(f"trainers read arrays that sum to {[a['sum'] for a in answers]}, sent were {expected}")
    seconds = [b - a for a, b in pairwise(marks)]
    return {
        "engines pack, Ray stores, the driver maps": Stage(seconds[0], 2 * received),
        "the driver arranges samples and applies the rule": Stage(seconds[1], sent_bytes),
        "the driver writes batches, Ray stores them, rank by rank": Stage(seconds[2], 2 * sent_bytes),
        "trainers map and read them": Stage(seconds[3], 0),
    }


def seconds_of_copy(size: int) -> float:
    """Of a bare copy of so many bytes between arrays that are there, in one thread; the median of several."""
    source, target = np.ones(size, dtype=np.uint8), np.zeros(size, dtype=np.uint8)
    return statistics.median(_timed(lambda: np.copyto(target, source)) for _ in range(REPEATS))


def _timed(work: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


async def measure(folder: Path) -> dict[str, Any]:
    """Medians over the repetitions."""
    engines, trainers = start_workers(folder)
    for worker in (*engines, *trainers):
        await worker.started(TIMEOUT_S)
    settle_driver()
    found = [await one_step(engines, trainers) for _ in range(REPEATS)][2:]
    stages = []
    for name, first in found[0].items():
        seconds = statistics.median(step[name].seconds for step in found)
        copy_s = seconds_of_copy(first.written_bytes) if first.written_bytes else 0.0
        stages.append({"stage": name, "seconds": seconds, "written_bytes": first.written_bytes, "copy_s": copy_s})
    tokens = PROMPTS * SAMPLES * TOKENS_EACH
    return {"prompts": PROMPTS, "samples": SAMPLES, "tokens": TOKENS_EACH, "step_tokens": tokens, "stages": stages}


def main() -> int:
    """Returns the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        ray.init(address="local", num_cpus=2, object_store_memory=STORE_BYTES, include_dashboard=False, log_to_driver=False)
        try:
            found = asyncio.run(measure(Path(folder)))
        finally:
            ray.shutdown()
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
