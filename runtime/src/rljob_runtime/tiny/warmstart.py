"""Supervised warm start of the quickstart model: it learns the rule, then to doubt it.

Three phases on prompts with whole-number answers. *Rule*: right answers only, until greedy answers are nearly all right.
*Noise*: most answers replaced by a wrong one close by, so that sampling at temperature 1 solves a chosen share of prompts
while the right answer stays the most likely one. *Calibration*: a few short nudges with fewer or more wrong answers, only
while the measured share lies outside the aim; how firmly the rule was learned differs from seed to seed. The result is the
state in which reinforcement learning can show itself: there is reward to find in every group, and most is still to be gained.

Shape legend: ``N`` examples, ``L`` tokens of the longest prompt plus answer plus end-of-sequence, ``B`` examples of a batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from transformers import PreTrainedTokenizerBase, Qwen2ForCausalLM, Qwen3MoeForCausalLM

from rljob_runtime.tiny.muon import Muon

IGNORED_LABEL = -100
_EVAL_BATCH = 512
_CHECK_EVERY_STEPS = 25

TinyModel: TypeAlias = Qwen2ForCausalLM | Qwen3MoeForCausalLM
Progress = Callable[[str, float], None]
"""Called with a phase's name and the finished fraction (0 to 1) of the whole warm start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One prompt with its whole-number answer."""

    prompt: str
    answer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartConfig:
    """How long and how noisily to train."""

    max_rule_steps: int = 300
    """Optimizer steps of the first phase at most; it ends early at ``rule_accuracy``."""
    noise_steps: int = 100
    """Optimizer steps of the second phase."""
    rule_accuracy: float = 0.99
    """Share of right greedy answers that ends the first phase."""
    batch_size: int = 256
    """Examples per step."""
    learning_rate: float = 6e-3
    """Peak of the first phase, with a linear warm-up over 50 steps; a sixth of it in the second, a tenth in the third."""
    wrong_share: float = 0.7
    """Share of wrong answers in the second phase; sampling then solves about ``1 - wrong_share`` of the prompts."""
    aim: tuple[float, float] = (0.25, 0.35)
    """Share of prompts that sampling should solve; outside of it the third phase nudges, on the same kind of data."""
    calibration_rounds: int = 8
    """Nudges at most."""
    calibration_steps: int = 15
    """Optimizer steps per nudge."""
    wrong_offsets: tuple[int, ...] = (-20, -10, -3, -2, -1, 1, 2, 3, 10, 20)
    """What a wrong answer is off by, each equally likely; a negative result takes the opposite sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartReport:
    """What the warm start did."""

    rule_steps: int
    noise_steps: int
    """Steps of the second and third phase."""
    rule_accuracy: float
    """Share of right greedy answers at the end of the first phase."""
    final_loss: float
    """Mean negative log-likelihood per answer token, in nats, over the last step."""


class _Table:
    """All prompts tokenized once; builds label-masked batches for chosen answers."""

    def __init__(self, examples: Sequence[Example], tokenizer: PreTrainedTokenizerBase, offsets: Sequence[int]) -> None:
        self._prompts: list[list[int]] = tokenizer([e.prompt for e in examples])["input_ids"]
        self.answers = [e.answer for e in examples]
        reach = max((abs(o) for o in offsets), default=0)
        values = range(min(self.answers) - reach, max(self.answers) + reach + 1)
        self._answer_ids = {
            v: [*ids, tokenizer.eos_token_id] for v, ids in zip(values, tokenizer([str(v) for v in values])["input_ids"], strict=True)
        }
        self._pad = int(tokenizer.pad_token_id)

    def batch(self, rows: Sequence[int], answers: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (input ids, labels), both (B, L) int64, right-padded; labels are ignored outside the answer."""
        pairs = [(self._prompts[row], self._answer_ids[answer]) for row, answer in zip(rows, answers, strict=True)]
        width = max(len(p) + len(a) for p, a in pairs)
        ids = [p + a + [self._pad] * (width - len(p) - len(a)) for p, a in pairs]
        labels = [[IGNORED_LABEL] * len(p) + a + [IGNORED_LABEL] * (width - len(p) - len(a)) for p, a in pairs]
        return torch.tensor(ids), torch.tensor(labels)


def warm_start(
    model: TinyModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    config: WarmStartConfig,
    *,
    seed: int,
    progress: Progress | None = None,
) -> WarmStartReport:
    """Train ``model`` in place; the result is a function of the arguments (and of the number of torch threads)."""
    table = _Table(examples, tokenizer, config.wrong_offsets)
    generator = torch.Generator().manual_seed(seed)
    optimizers = make_optimizers(model)
    total = config.max_rule_steps + config.noise_steps + config.calibration_rounds * config.calibration_steps
    report = progress or (lambda _phase, _fraction: None)
    probe = [examples[i] for i in torch.randperm(len(examples), generator=generator)[:_EVAL_BATCH].tolist()]
    accuracy, loss, step = 0.0, math.nan, 0
    model.train()
    while step < config.max_rule_steps:
        rows = torch.randint(len(examples), (config.batch_size,), generator=generator).tolist()
        loss = train_step(model, optimizers, table.batch(rows, [table.answers[r] for r in rows]), _rule_rate(config, step))
        step += 1
        if step % _CHECK_EVERY_STEPS == 0:
            accuracy = pass_rate(model, tokenizer, probe, temperature=0.0, seed=seed)
            report("rule", step / total)
            if accuracy >= config.rule_accuracy:
                break

    def noisy_steps(count: int, wrong_share: float, rate: float, phase: str, done: int) -> float:
        loss = math.nan
        for number in range(count):
            rows = torch.randint(len(examples), (config.batch_size,), generator=generator).tolist()
            answers = _with_wrong_ones([table.answers[r] for r in rows], wrong_share, config.wrong_offsets, generator)
            loss = train_step(model, optimizers, table.batch(rows, answers), rate)
            report(phase, (done + number + 1) / total)
        return loss

    if config.noise_steps:
        loss = noisy_steps(config.noise_steps, config.wrong_share, config.learning_rate / 6, "noise", config.max_rule_steps)
    low, high = config.aim
    noise_steps = config.noise_steps
    for number in range(config.calibration_rounds):
        solved = pass_rate(model, tokenizer, probe, temperature=1.0, seed=seed + number)
        if low <= solved <= high:
            break
        share = config.wrong_share - 0.25 if solved < low else min(0.95, config.wrong_share + 0.15)
        done = config.max_rule_steps + config.noise_steps + number * config.calibration_steps
        loss = noisy_steps(config.calibration_steps, max(0.0, share), config.learning_rate / 10, "calibration", done)
        noise_steps += config.calibration_steps
    report("done", 1.0)
    model.eval()
    return WarmStartReport(rule_steps=step, noise_steps=noise_steps, rule_accuracy=accuracy, final_loss=loss)


@torch.no_grad()
def pass_rate(
    model: TinyModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    *,
    temperature: float,
    seed: int,
    max_new_tokens: int = 6,
) -> float:
    """Return the share of ``examples`` answered exactly right; temperature 0 means greedy, one sample per example otherwise.

    Samples from torch's global generator, whose state is put back afterwards.
    """
    was_training = model.training
    model.eval()
    solved = 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for start in range(0, len(examples), _EVAL_BATCH):
            part = examples[start : start + _EVAL_BATCH]
            inputs = tokenizer([e.prompt for e in part], padding=True, return_tensors="pt")
            generated = model.generate(
                input_ids=inputs["input_ids"],
                attention_mask=inputs["attention_mask"],
                max_new_tokens=max_new_tokens,
                do_sample=temperature > 0,
                temperature=temperature or None,
                top_k=0 if temperature > 0 else None,
                top_p=None,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
            )
            texts = tokenizer.batch_decode(generated[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            solved += sum(text == str(e.answer) for text, e in zip(texts, part, strict=True))
    model.train(was_training)
    return solved / len(examples)


def make_optimizers(model: TinyModel) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for the rest and routers: the rule is learned in about half the steps of AdamW alone."""
    matrices = [p for name, p in model.model.layers.named_parameters() if p.ndim >= 2 and not name.endswith("mlp.gate.weight")]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    return [
        Muon(matrices, weight_decay=0.01),
        torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.01),
    ]


def _rule_rate(config: WarmStartConfig, step: int) -> float:
    warm_up = min(1.0, (step + 1) / 50)
    return config.learning_rate * warm_up * (1 - 0.9 * step / config.max_rule_steps)


def train_step(
    model: TinyModel, optimizers: Sequence[torch.optim.Optimizer], batch: tuple[torch.Tensor, torch.Tensor], learning_rate: float
) -> float:
    """One AdamW step on (input ids, labels) of shape (B, L); returns the loss in nats per answer token."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate
        optimizer.zero_grad(set_to_none=True)
    ids, labels = batch
    # Right padding behind a causal model: no real token sees a pad, so no attention mask is needed.
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    target = labels[:, 1:]
    wanted = target != IGNORED_LABEL
    loss = torch.nn.functional.cross_entropy(model.lm_head(hidden[wanted]), target[wanted])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    return float(loss.detach())


def _with_wrong_ones(answers: Sequence[int], wrong_share: float, offsets: Sequence[int], generator: torch.Generator) -> list[int]:
    """Replace ``wrong_share`` of the answers by a wrong one close by."""
    wrong = torch.rand(len(answers), generator=generator) < wrong_share
    picks = torch.randint(len(offsets), (len(answers),), generator=generator).tolist()
    result = []
    for answer, is_wrong, pick in zip(answers, wrong.tolist(), picks, strict=True):
        offset = offsets[pick] if is_wrong else 0
        result.append(answer + offset if answer + offset >= 0 or answer < 0 else answer - offset)
    return result
