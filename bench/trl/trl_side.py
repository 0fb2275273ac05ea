"""One process of TRL: ``python -m bench.trl.trl_side TASK.json OUT.json``.

Runs GRPOTrainer under the task's settings and writes what it measured. Prompts, rewards and all that decides the amount of
work come from the RLJob manifest.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rljob_api.v1alpha1 import RLJobSpec
from rljob_api.v1alpha1.policy_loss import PPOLoss
from rljob_api.validation import check
from rljob_runtime.job import worker_settings
from rljob_runtime.job.judge_settings import Share
from rljob_runtime.rewards import functions

STEP_MARK = "step done: "
"""Begins a line of output at the end of each step, for the parent's progress bar."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What may be chosen freely on TRL's side: none of it changes what is computed."""

    threads: int = 2
    micro_batch: int = 256
    """Sequences of one forward and backward pass."""
    generation: str = "generate"
    """``generate`` (Transformers), ``continuous`` (Transformers' continuous batching) or ``vllm`` (in the same process)."""


@dataclass(slots=True, kw_only=True)
class Clock:
    """Where the time of each step went, in seconds."""

    step_ends_s: list[float] = field(default_factory=list)
    generate_s: list[float] = field(default_factory=list)
    reward_s: list[float] = field(default_factory=list)
    reward_mean: list[float] = field(default_factory=list)
    lengths: list[list[int]] = field(default_factory=list)
    prompt_ids: list[list[int]] | None = None
    """Of the first batch."""


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer that notes the time around generation and rewards; two clock readings each, nothing else changes."""

    clock: Clock

    def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
        started_s = time.perf_counter()
        result = super()._generate_single_turn(prompt_ids, *args, **kwargs)
        self.clock.generate_s.append(time.perf_counter() - started_s)
        self.clock.lengths.append([len(ids) for ids in result[0]])
        if self.clock.prompt_ids is None:
            self.clock.prompt_ids = [list(ids) for ids in prompt_ids]
        return result

    def _calculate_rewards(self, *args: Any, **kwargs: Any) -> Any:
        started_s = time.perf_counter()
        result = super()._calculate_rewards(*args, **kwargs)
        self.clock.reward_s.append(time.perf_counter() - started_s)
        self.clock.reward_mean.append(float(result.sum(dim=-1).mean()))
        return result


class StepEnds(TrainerCallback):
    """Notes when training begins and when each step ends."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def on_train_begin(self, *_args: Any, **_kwargs: Any) -> None:
        self._clock.step_ends_s.append(time.perf_counter())

    def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
        self._clock.step_ends_s.append(time.perf_counter())
        sys.stderr.write(f"{STEP_MARK}{len(self._clock.step_ends_s) - 1}\n")


def make_reward(spec: RLJobSpec, job_folder: Path) -> Any:
    """The manifest's first reward, by the code that RLJob's reward workers run, as TRL calls it."""
    config = worker_settings.reward_config(spec.rewards[0], Share())
    score = functions.load(config, str(job_folder))

    def reward(prompts: list[str], completions: list[str], answer: list[str], metadata: list[str], **_: Any) -> list[float]:
        scores = []
        for prompt, completion, wanted, extra in zip(prompts, completions, answer, metadata, strict=True):
            text = completion if config.function else functions.extract(completion, config)
            scores.append(0.0 if text is None else functions.to_scores(score(prompt, text, wanted, json.loads(extra)))[0])
        return scores

    return reward


def _adapters(spec: RLJobSpec) -> LoraConfig | None:
    """PEFT's description of the manifest's adapters."""
    lora = spec.model.lora
    if lora is None:
        return None
    assert lora.alpha == int(lora.alpha), f"PEFT takes whole numbers, lora.alpha is {lora.alpha}"
    targets = list(lora.target_modules) or "all-linear"
    return LoraConfig(r=lora.rank, lora_alpha=int(lora.alpha), lora_dropout=0.0, target_modules=targets, task_type="CAUSAL_LM")


def make_trainer(
    spec: RLJobSpec, job_folder: Path, rows: list[dict[str, Any]], settings: Settings, steps: int, out_folder: Path
) -> TimedTrainer:
    """A trainer that does the manifest's work: GRPO with standard deviation, clipped ratio, mean over tokens, no KL."""
    rollout, training = spec.rollout, spec.training
    loss = spec.algorithm.policy_loss.settings
    assert isinstance(loss, PPOLoss), f"{loss} has no counterpart in the comparison"
    batch = rollout.prompts_per_step * rollout.samples_per_prompt
    tokenizer = AutoTokenizer.from_pretrained(spec.model.path, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(spec.model.path, dtype=torch.float32)
    config = GRPOConfig(
        output_dir=str(out_folder),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_steps=steps,
        per_device_train_batch_size=settings.micro_batch,
        gradient_accumulation_steps=batch // settings.micro_batch,
        num_generations=rollout.samples_per_prompt,
        num_iterations=training.epochs,
        max_completion_length=rollout.max_response_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        shuffle_dataset=False,
        beta=spec.algorithm.kl.coefficient,
        epsilon=loss.clip_low,
        epsilon_high=loss.clip_high,
        delta=loss.dual_clip or None,
        loss_type="dapo",
        scale_rewards="group" if spec.algorithm.advantage.normalize_std else "none",
        learning_rate=training.learning_rate,
        lr_scheduler_type={"Constant": "constant_with_warmup", "Linear": "linear", "Cosine": "cosine"}[training.schedule.value],
        warmup_steps=training.warmup_steps,
        adam_beta1=training.beta1,
        adam_beta2=training.beta2,
        adam_epsilon=training.epsilon,
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        dataloader_num_workers=0,
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        seed=spec.seed,
        use_vllm=settings.generation == "vllm",
        vllm_mode="colocate",
        vllm_max_model_length=rollout.max_prompt_tokens + rollout.max_response_tokens,
        use_transformers_continuous_batching=settings.generation == "continuous",
    )
    data = Dataset.from_list([{"prompt": r["text"], "answer": r["answer"], "metadata": json.dumps(r["metadata"])} for r in rows])
    clock = Clock()
    trainer = TimedTrainer(
        model=model,
        args=config,
        train_dataset=data,
        processing_class=tokenizer,
        reward_funcs=make_reward(spec, job_folder),
        callbacks=[StepEnds(clock)],
        peft_config=_adapters(spec),
    )
    trainer.clock = clock
    return trainer


def run(spec: RLJobSpec, job_folder: Path, rows: list[dict[str, Any]], settings: Settings, steps: int, out_folder: Path) -> dict[str, Any]:
    """Train ``steps`` steps; returns seconds by step and part, and what was generated.

    Raises:
        ValueError: TRL tokenized the prompts otherwise than RLJob, or made another number of steps or batches.
    """
    torch.set_num_threads(settings.threads)
    trainer = make_trainer(spec, job_folder, rows, settings, steps, out_folder)
    trainer.train()
    clock = trainer.clock
    per_step = spec.rollout.prompts_per_step
    wanted = [r["token_ids"] for r in rows[:per_step] for _ in range(spec.rollout.samples_per_prompt)]
    if clock.prompt_ids != wanted:
        raise ValueError(f"TRL's first batch starts with {(clock.prompt_ids or [])[:1]}, RLJob's with {wanted[:1]}: the prompts differ")
    if len(clock.step_ends_s) != steps + 1 or len(clock.generate_s) != steps:
        raise ValueError(f"TRL made {len(clock.step_ends_s) - 1} updates and {len(clock.generate_s)} batches, wanted {steps} of each")
    return {
        "settings": asdict(settings),
        "step_s": [b - a for a, b in zip(clock.step_ends_s[:-1], clock.step_ends_s[1:], strict=True)],
        "generate_s": clock.generate_s,
        "reward_s": clock.reward_s,
        "reward_mean": clock.reward_mean,
        "lengths": clock.lengths,
    }


def main() -> None:
    """Read the task, run it, write what was measured."""
    task = json.loads(Path(sys.argv[1]).read_text())
    job_file = Path(task["job_file"])
    spec = check(job_file.read_text()).job.spec
    rows = [json.loads(line) for line in Path(task["prompts_file"]).read_text().splitlines()]
    outcome = run(spec, job_file.parent, rows, Settings(**task["settings"]), task["steps"], Path(task["out_folder"]))
    Path(sys.argv[2]).write_text(json.dumps(outcome))


if __name__ == "__main__":
    main()
