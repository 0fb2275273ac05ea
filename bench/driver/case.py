"""``python -m bench.driver.case SIZE``: one case in a process of its own, measured; prints a JSON object."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from bench.driver.meter import MeasuredBuilder, Meter, rss_bytes
from bench.driver.pauses import MeteredSelector, Pause
from bench.driver.world import Engine, Prompts, RewardWorker, Size, TrainerRank
from rljob_api.v1alpha1.components import Role
from rljob_runtime.cluster.host import settle_driver
from rljob_runtime.job.learning_settings import engine_capacity
from rljob_runtime.loop.driver import Driver, LoopConfig
from rljob_runtime.loop.replacement import ReplacementLimits
from rljob_runtime.loop.supervisor import EngineSupervisor
from rljob_runtime.overlap.reward_router import RewardRouter
from rljob_runtime.records import Sampling
from rljob_runtime.report import Decode, FolderMode, PlainDisplay, Reporter, RunFolder, RunInfo
from tests.support.job_workers import make_job_workers
from tests.support.loop_parts import make_parts
from tests.support.rollouts import make_gate, make_scheduler

DEADLINE_S = 3600.0
NO_REPLACEMENT = ReplacementLimits(max_restarts=0, start_timeout_s=DEADLINE_S, weights_timeout_s=DEADLINE_S)


def decoder() -> Decode:
    """A job's decoder with the tiny tokenizer."""
    from rljob_runtime.tiny.tokenizer import build_tokenizer

    tokenizer = build_tokenizer(f"{word} {number}" for word in ("sum", "of", "numbers", "question", "answer") for number in range(100))
    return lambda responses: list(tokenizer.batch_decode(responses, skip_special_tokens=True))


class _NothingNoted(list[str]):
    """In the place of a list of all leases, which would grow with the run."""

    def append(self, line: str) -> None:
        """Nothing."""


async def _nothing_to_start(index: int, timeout_s: float) -> None:
    raise AssertionError(f"engine {index} is lost")


async def _nothing_to_end(index: int) -> None:
    raise AssertionError(f"engine {index} is lost")


async def drive(size: Size, meter: Meter, folder: Path) -> None:
    """Run the driver over scripted workers."""
    engines = [Engine(index, size.tokens) for index in range(size.engines)]
    rewards = [RewardWorker(f"reward-{index}") for index in range(size.reward_workers)]
    trainers = [TrainerRank(f"trainer-{rank}") for rank in range(size.trainer_ranks)]
    total_steps = size.steps + 1
    workers = make_job_workers(
        log=_NothingNoted(),
        trainer=trainers,
        rollout=engines,
        reward=rewards,
        ranks_per_share={Role.TRAINER: size.tensor_parallel},
    )
    scheduler = make_scheduler(
        engines,
        make_gate(size.prompts, size.ratio, total_steps),
        rollout={"samples_per_prompt": size.samples, "sampling": Sampling(max_tokens=2 * size.tokens)},
        fleet={"capacities": (engine_capacity(size.slots),) * size.engines, "stall_timeout_s": DEADLINE_S},
        prompts=Prompts(size.prompt_tokens),
        score=RewardRouter(rewards, DEADLINE_S).score,
    )
    config = LoopConfig(
        total_steps=total_steps,
        groups_per_step=size.prompts,
        step_timeout_s=DEADLINE_S,
        take_timeout_s=DEADLINE_S,
        checkpoint_every_steps=0,
        spec_fingerprint={"seed": "bench"},
    )
    info = RunInfo(job_name="bench", model="-", algorithm="-", devices="-", total_steps=total_steps, seed=0, spec_yaml="a: 1\n")
    display = PlainDisplay(io.StringIO(), clock=time.monotonic)
    with Reporter(RunFolder.open(folder / "run", FolderMode.NEW), info, display, packages={}) as reporter:
        supervisor = EngineSupervisor(engines, start=_nothing_to_start, end=_nothing_to_end, limits=NO_REPLACEMENT, notify=reporter.event)
        parts = make_parts(
            workers,
            scheduler,
            supervisor,
            reporter,
            buckets=1,
            batching={"num_ranks": size.trainer_ranks // size.tensor_parallel, "mini_batches": 4},
            builder=partial(MeasuredBuilder, meter),
            timeout_s=DEADLINE_S,
            decode=decoder(),
        )
        settle_driver()  # as a job does before its loop
        gc.callbacks.append(meter.collecting)
        await Driver(parts, config, start_step=0, stop=asyncio.Event()).run()
        meter.ended = True


def measure(size: Size) -> dict[str, Any]:
    """Run a case.

    Returns:
        Size and figures; those of the first step are left out of all but the memory.
    """
    meter = Meter()
    decoder()  # imports before the baseline
    gc.collect()
    before_bytes = rss_bytes()
    threading.Thread(target=meter.sample, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(MeteredSelector(meter.passed))) as runner:
            runner.run(drive(size, meter, Path(folder)))
    first, last = meter.marks[0], meter.marks[-1]
    wall_s, cpu_s, away_wall_s, away_cpu_s = (b - a for a, b in zip(first, last, strict=True))
    tokens = sum(meter.tokens[:-1])  # from one build's beginning to the last one's: builds of the first, responses of the next
    own_s, own_cpu_s = wall_s - away_wall_s, cpu_s - away_cpu_s
    return asdict(size) | {
        "tokens_per_s": tokens / own_s,
        "tokens_per_cpu_s": tokens / own_cpu_s,
        "responses_per_s": size.prompts * size.samples * (len(meter.tokens) - 1) / own_s,
        "cpu_ns_per_token": 1e9 * own_cpu_s / tokens,
        "cpu_us_per_response": 1e6 * own_cpu_s / (size.prompts * size.samples * (len(meter.tokens) - 1)),
        "build_cpu_ns_per_token": 1e9 * sum(meter.build_cpu_s[:-1]) / tokens,
        "bytes_per_token_in_flight": (meter.in_flight_bytes[0] - before_bytes) / meter.tokens[0],
        "bytes_per_token_peak": (meter.build_peak_bytes - before_bytes) / max(meter.tokens),
        "longest_pause": _shown(meter.longest),
        "longest_own_pause": _shown(meter.longest_own),
        "longest_collection_ms": 1e3 * meter.longest_collection_s,
        "passes": meter.passes,
        "passes_above_50_ms": meter.passes_above_50_ms,
        "own_passes_above_50_ms": meter.own_passes_above_50_ms,
        "rss_mib_at_step": [value / 2**20 for value in meter.rss_at_step[:: max(len(meter.rss_at_step) // 20, 1)]],
    }


def _shown(pause: Pause) -> dict[str, float]:
    """In milliseconds."""
    parts = {"": pause.wall_s, "work_": pause.work_s, "lock_": pause.lock_s, "stolen_": pause.stolen_s, "own_": pause.own_s}
    return {f"{name}ms": 1e3 * seconds for name, seconds in parts.items()}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(Size(**json.loads(sys.argv[1])))) + "\n")
