"""Peaks of memory of training steps beside what ``rljob plan`` estimates; each configuration in processes of its own.

``python -m bench.training.memory CASE RANKS RANK PORT FOLDER`` is one rank. Peaks are those of torch's tensors (its profiler notes every
allocation), so that neither the interpreter nor the allocator's leftovers hide an error of the estimate.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, PretrainedConfig, Qwen3Config, Qwen3MoeConfig

from bench.gpu_check.peak import peak_bytes
from bench.measure import free_port
from rljob_api.memory import Kind, Phase, process_needs, shape_from_config
from rljob_api.v1alpha1.components import Role
from rljob_api.validation import check
from rljob_api.vocabulary import OptimizerStateDType
from rljob_runtime.records import TrainBatch
from rljob_runtime.training.config import LoraConfig, PolicyConfig
from rljob_runtime.training.parallel import local_tensor
from rljob_runtime.training.worker import PolicyWorker

VOCAB = 4096
SEQUENCE_TOKENS = 128
SEQUENCES = 8
"""Of each rank in one update: two micro-batches."""
SAMPLES_PER_PROMPT = 2
TOKEN_BUDGET = 384
"""Two prompts with their responses: a prompt is computed once, and of each response all but its last token, which predicts nothing."""
LORA_RANK = 8
CHILD_TIMEOUT_S = 240.0
SIZES: dict[str, Any] = {
    **{"vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8, "num_attention_heads": 8},
    **{"num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 1024, "tie_word_embeddings": False},
}
MIXTURE: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
LATENT: dict[str, Any] = {
    **{"num_key_value_heads": 8, "q_lora_rank": 96, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32},
    **{"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "n_shared_experts": 1, "first_k_dense_replace": 1},
    **{"n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "head_dim": 16},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCase:
    """One configuration of the trainer."""

    mixture: bool = False
    latent: bool = False
    """DeepSeek-V3: a mixture with latent attention."""
    lora: bool = False
    checkpointing: bool = False
    each: bool = False
    """``training.gradientReduction: EachMicroBatch``, else LastMicroBatch."""
    state_dtype: OptimizerStateDType = OptimizerStateDType.FLOAT32
    experts: int = 1
    """``training.expertParallelSize``."""

    def model(self) -> PretrainedConfig:
        """What is trained."""
        if self.latent:
            return DeepseekV3Config(**SIZES | LATENT)
        return Qwen3MoeConfig(**SIZES, **MIXTURE) if self.mixture else Qwen3Config(**SIZES)


CASES: Mapping[str, MemoryCase] = {
    "dense, LastMicroBatch": MemoryCase(),
    "dense, EachMicroBatch": MemoryCase(each=True),
    "dense, EachMicroBatch, activation checkpointing": MemoryCase(each=True, checkpointing=True),
    "dense, EachMicroBatch, bfloat16 moments": MemoryCase(each=True, state_dtype=OptimizerStateDType.BFLOAT16),
    "mixture, LastMicroBatch": MemoryCase(mixture=True),
    "mixture, EachMicroBatch": MemoryCase(mixture=True, each=True),
    "mixture, LastMicroBatch, experts divided": MemoryCase(mixture=True, experts=2),
    "mixture, EachMicroBatch, experts divided": MemoryCase(mixture=True, each=True, experts=2),
    "LoRA, LastMicroBatch": MemoryCase(lora=True),
    "LoRA, EachMicroBatch": MemoryCase(lora=True, each=True),
    "latent attention, EachMicroBatch": MemoryCase(latent=True, each=True),
    "latent attention, LoRA, EachMicroBatch": MemoryCase(latent=True, lora=True, each=True),
}
RANKS = (1, 2)


def measure(folder: Path, tell: Callable[[str], None]) -> list[dict[str, Any]]:
    """Peak of rank 0 and its estimate, for every case on one rank and on two."""
    found = []
    for name, case in CASES.items():
        path = folder / case.model().model_type
        if not path.exists():
            AutoModelForCausalLM.from_config(case.model()).save_pretrained(path)
        for ranks in RANKS[case.experts - 1 :]:
            tell(f"memory: {name}, {ranks} ranks")
            thought = estimated_bytes(case, ranks)
            found.append({"case": name, "ranks": ranks, "estimated": thought, "measured": measured(name, ranks, path)})
    return found


def measured(name: str, ranks: int, path: Path) -> dict[str, int]:
    """Bytes of rank 0: between two steps, and at the peak of one.

    Raises:
        subprocess.SubprocessError: a rank failed, or took too long.
    """
    port = str(free_port())
    command = [sys.executable, "-m", "bench.training.memory", name, str(ranks)]
    others = [subprocess.Popen([*command, str(rank), port, str(path)], stdout=subprocess.DEVNULL) for rank in range(1, ranks)]
    try:
        done = subprocess.run([*command, "0", port, str(path)], check=True, timeout=CHILD_TIMEOUT_S, stdout=subprocess.PIPE, text=True)
        for other in others:
            other.wait(CHILD_TIMEOUT_S)
    finally:
        for other in others:
            other.kill()
    values: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return values


def estimated_bytes(case: MemoryCase, ranks: int) -> dict[str, int]:
    """The same of ``rljob plan``, without the process itself.

    Raises:
        SpecInvalidError: the job of these sizes is not valid.
    """
    shape = shape_from_config(json.loads(case.model().to_json_string(use_diff=False)))
    checked = check(_job(case, ranks), runnable=False, shape_of=lambda _spec: shape)
    (trainer,) = checked.plan.with_role(Role.TRAINER)
    needs = process_needs(checked.job.spec, checked.plan, shape)(trainer, trainer.processes[0])
    states = sum(need.num_bytes for need in needs.states if need.kind is not Kind.PROCESS)
    working = {phase: sum(n.num_bytes for n in needs.working.get(phase, ())) for phase in (Phase.TRAIN, Phase.OPTIMIZER_STEP)}
    terms = {need.name: need.num_bytes for need in needs.working.get(Phase.TRAIN, ())}
    return {"state_bytes": states, "peak_bytes": states + max(working.values()), "terms": terms}  # type: ignore[dict-item]


def _job(case: MemoryCase, ranks: int) -> dict[str, Any]:
    half = SEQUENCE_TOKENS // 2
    adapters = {"lora": {"rank": LORA_RANK}} if case.lora else {}
    return {
        "apiVersion": "rljob.dev/v1alpha1",
        "kind": "RLJob",
        "metadata": {"name": "bench-training"},
        "spec": {
            "nodeGroups": [{"name": "here", "nodes": 1, "devicesPerNode": ranks + 1, "deviceResource": "cpu"}],
            "components": [
                {"name": "trainer", "role": "Trainer", "placement": {"ranks": f"0-{ranks - 1}" if ranks > 1 else "0"}},
                {"name": "engine", "role": "Rollout", "placement": {"ranks": str(ranks)}},
                {"name": "reward", "role": "Reward", "placement": {"workers": 1}},
            ],
            "model": {"path": "models/none", "dtype": "float32", **adapters},
            "data": {"train": [{"name": "none", "type": "JSONL", "jsonl": {"path": "prompts.jsonl"}}]},
            "rewards": [{"name": "none", "type": "Function", "function": "rewards:none"}],
            "rollout": {
                **{"promptsPerStep": ranks * SEQUENCES // SAMPLES_PER_PROMPT, "samplesPerPrompt": SAMPLES_PER_PROMPT},
                **{"maxPromptTokens": half, "maxResponseTokens": half},
            },
            "training": {
                "steps": 1,
                "microBatchTokens": TOKEN_BUDGET,
                "logprobChunkTokens": 128,
                "activationCheckpointing": case.checkpointing,
                "gradientReduction": "EachMicroBatch" if case.each else "LastMicroBatch",
                "optimizerStateDtype": case.state_dtype.value,
                "expertParallelSize": case.experts,
            },
        },
    }


def full_batch(rank: int, ranks: int) -> TrainBatch:
    """Sequences of full length, :data:`SAMPLES_PER_PROMPT` after each prompt and with nothing else in common: what the estimate assumes."""
    rng = np.random.default_rng(rank)
    half, total = SEQUENCE_TOKENS // 2, SEQUENCES * SEQUENCE_TOKENS
    prompts = np.repeat(rng.integers(0, VOCAB, (SEQUENCES // SAMPLES_PER_PROMPT, half)), SAMPLES_PER_PROMPT, axis=0)
    responses = rng.integers(0, VOCAB, (SEQUENCES, half))
    mask = np.tile(np.repeat(np.array([0, 1], dtype=np.float32), half), SEQUENCES)
    return TrainBatch(
        token_ids=np.concatenate([prompts, responses], axis=1).reshape(-1).astype(np.int32),
        lengths=np.full(SEQUENCES, SEQUENCE_TOKENS, dtype=np.int32),
        response_mask=mask,
        behavior_logprobs=-np.log(VOCAB).astype(np.float32) * mask,
        advantages=rng.normal(size=total).astype(np.float32) * mask,
        global_tokens=ranks * int(mask.sum()),
        global_sequences=ranks * SEQUENCES,
        version=0,
    )


def run_rank(name: str, ranks: int, rank: int, port: int, path: Path) -> dict[str, int]:
    """Two steps of one rank; the second is measured."""
    case = CASES[name]
    config = PolicyConfig(
        model_path=str(path),
        token_budget=TOKEN_BUDGET,
        logprob_chunk_tokens=128,
        activation_checkpointing=case.checkpointing,
        reduces_each_micro_batch=case.each,
        optimizer_state_dtype=case.state_dtype,
        expert_parallel_size=case.experts,
        lora=LoraConfig(rank=LORA_RANK, alpha=16.0) if case.lora else None,
    )
    worker = PolicyWorker(config, rank, ranks)
    worker.setup("127.0.0.1", port, timeout_s=CHILD_TIMEOUT_S)
    try:
        batch = full_batch(rank, ranks)
        worker.train_step([batch], step=0)
        there = _held_bytes(worker)
        peak = peak_bytes(torch.device("cpu"), lambda: worker.train_step([batch], step=1), there)
        return {"state_bytes": there, "peak_bytes": peak}
    finally:
        worker.shutdown()


def _held_bytes(worker: PolicyWorker) -> int:
    """Weights and moments of this rank."""
    optimizer = worker.ready.optimizer
    assert optimizer is not None
    weights = sum(local_tensor(p.detach()).nbytes for p in worker.model.parameters())
    return weights + sum(local_tensor(t).nbytes for state in optimizer.state.values() for n, t in state.items() if n != "step")


if __name__ == "__main__":
    name, ranks, rank, port, path = sys.argv[1:]
    sys.stdout.write(json.dumps(run_rank(name, int(ranks), int(rank), int(port), Path(path))) + "\n")
