"""RLJob's side: the code that the driver and the trainer call, from scores to gradients."""

from __future__ import annotations

import numpy as np
import torch

from bench.fidelity.cases import Case
from bench.fidelity.exchange import Array, Batch, Result
from rljob_api.vocabulary import Aggregation, ProximalPolicy
from rljob_runtime.losses.advantage import group_advantages
from rljob_runtime.losses.aggregate import token_weights
from rljob_runtime.losses.config import LossConfig
from rljob_runtime.losses.objective import LossInputs, objective
from rljob_runtime.losses.spans import span_index
from rljob_runtime.losses.value import clipped_value_loss
from rljob_runtime.losses.value_config import ValueLossConfig
from rljob_runtime.overlap.arrange import StepSamples
from rljob_runtime.overlap.rule import Rule
from rljob_runtime.overlap.rule_config import RuleConfig
from rljob_runtime.records import Prompt, RewardResult, Trajectory
from rljob_runtime.training.logprob import selected_logprobs

CHUNK_TOKENS = 16
"""Less than a batch has, so that the head works in several chunks."""


def run(case: Case, batch: Batch) -> Result:
    """Everything that the case asks for."""
    flat = _Flat(batch)
    result: Result = {}
    advantages = batch[f"{case.given}_advantages"]
    if case.trl_epsilon is not None:
        per_response = group_advantages(batch["scores"], batch["groups"], eps=case.trl_epsilon)
        advantages = result["advantages"] = per_response[:, None] * batch["mask"]
    elif case.rule is not None:
        outcome = Rule(case.rule).apply(flat.step(case.rule))
        advantages = result["advantages"] = flat.padded(outcome.advantages)
        if outcome.returns is not None:
            result["returns"] = flat.padded(outcome.returns)
    if case.loss is not None:
        result |= _policy(case.loss, flat, advantages)
    if case.value is not None:
        result |= _value(case.value, flat, result.get("returns", batch["returns"]))
    if case.head_temperature is not None:
        result |= _head(case.head_temperature, flat)
    return result


class _Flat:
    """The batch as the runtime has it: responses one after another, each behind a prompt of one token."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.lengths = (batch["lengths"] + 1).astype(np.int32)
        present = np.arange(batch["mask"].shape[1] + 1) < self.lengths[:, None]
        self._present = present
        self.mask = self.of("mask")
        self.trained = torch.from_numpy(np.flatnonzero(self.mask))

    def of(self, name: str) -> Array:
        """An array (S, R) as (T,), 0 for prompts and where nothing is trained."""
        rows = self.batch[name] * self.batch["mask"]
        return np.pad(rows, ((0, 0), (1, 0)))[self._present].astype(np.float32)

    def padded(self, values: Array) -> Array:
        """Back from (T,) to (S, R)."""
        rows = np.zeros(self._present.shape, dtype=np.float32)
        rows[self._present] = values
        return rows[:, 1:]

    def tensor(self, name: str) -> torch.Tensor:
        """The trained tokens of an array, shape (N,)."""
        return torch.from_numpy(self.of(name))[self.trained]

    def gradient(self, leaf: torch.Tensor) -> Array:
        """That of trained tokens (N,) at their places, shape (S, R)."""
        values = np.zeros_like(self.mask)
        values[self.trained.numpy()] = np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.numpy()
        return self.padded(values)

    def weights(self, aggregation: Aggregation, norm_tokens: int | None = None) -> torch.Tensor:
        """Aggregation weights of the trained tokens, shape (N,)."""
        rows = self.batch["mask"].sum(axis=1)
        return token_weights(
            torch.from_numpy(self.mask),
            torch.from_numpy(self.lengths),
            aggregation,
            global_tokens=int(rows.sum()),
            global_sequences=int((rows > 0).sum()),
            norm_tokens=norm_tokens,
        )[self.trained]

    def step(self, rule: RuleConfig) -> StepSamples:
        """What the learning rule is given."""
        scores, groups = self.batch["scores"], self.batch["groups"]
        return StepSamples(
            trajectories=tuple(
                _trajectory(row, int(group), float(score)) for row, (group, score) in enumerate(zip(groups, scores, strict=True))
            ),
            token_ids=np.zeros(self.mask.size, dtype=np.int32),
            lengths=self.lengths,
            prompt_lengths=(self.lengths - self.batch["mask"].sum(axis=1)).astype(np.int32),
            sample_of=np.arange(scores.size, dtype=np.int32),
            response_lengths=self.batch["mask"].sum(axis=1).astype(np.int32),
            response_mask=self.mask,
            behavior_logprobs=self.of("behavior"),
            staleness=np.zeros_like(self.mask),
            group_ids=groups.astype(np.int32),
            scores=scores,
            passed=scores > 0,
            truncated=np.zeros(scores.size, dtype=np.bool_),
            sources=("bench",) * scores.size,
            version=0,
            reference_logprobs=self.of("reference") if rule.measures_kl else None,
            proximal_logprobs=self.of("proximal"),
            values=self.of("old_values"),
        )


def _trajectory(row: int, group: int, score: float) -> Trajectory:
    prompt = Prompt(index=group, text="", token_ids=np.zeros(1, dtype=np.int32), answer="", source="bench")
    reward = RewardResult(sample_id=str(row), score=score, passed=score > 0)
    return Trajectory(group_id=group, sample_index=row, prompt=prompt, segments=(), finish_reason="stop", reward=reward)


def _policy(config: LossConfig, flat: _Flat, advantages: Array) -> Result:
    """Loss and gradients of one update."""
    weights = flat.weights(config.aggregation, config.norm_tokens)
    spans = span_index(flat.mask, flat.lengths).of(flat.trained.numpy())
    given = _Flat({**flat.batch, "advantages": advantages})
    inputs = LossInputs(
        behavior_logprobs=flat.tensor("behavior"),
        advantages=given.tensor("advantages"),
        weights=weights,
        policy_weights=weights,
        spans=spans,
        proximal_logprobs=flat.tensor("proximal") if config.proximal is ProximalPolicy.RECOMPUTE else None,
        reference_logprobs=flat.tensor("reference") if config.needs_reference else None,
    )
    logprobs = flat.tensor("logprobs").requires_grad_()
    entropy = flat.tensor("entropy").requires_grad_() if config.entropy_coefficient > 0 else None
    loss = objective(logprobs, inputs, config, kl_coefficient=config.kl_coefficient, entropy=entropy).loss
    loss.backward()
    result = {"loss": loss.detach().numpy(), "d_logprobs": flat.gradient(logprobs)}
    return result if entropy is None else {**result, "d_entropy": flat.gradient(entropy)}


def _value(config: ValueLossConfig, flat: _Flat, returns: Array) -> Result:
    """Value loss and gradient of one update of a critic."""
    goals = _Flat({**flat.batch, "goals": returns}).tensor("goals")
    values = flat.tensor("values").requires_grad_()
    terms = clipped_value_loss(values, flat.tensor("old_values"), goals, value_clip=config.value_clip)
    loss = torch.dot(terms.loss, flat.weights(Aggregation.TOKEN_MEAN))
    loss.backward()
    return {"value_loss": loss.detach().numpy(), "d_values": flat.gradient(values)}


def _head(temperature: float, flat: _Flat) -> Result:
    """Log-probs and entropies by the trainer's head, whose weight is the identity: hidden states are logits."""
    rows = torch.from_numpy(flat.batch["mask"]) > 0
    logits = torch.from_numpy(flat.batch["logits"]).clone().requires_grad_()
    targets = torch.from_numpy(flat.batch["tokens"])[rows]
    found = selected_logprobs(
        logits[rows], torch.eye(logits.shape[-1]), targets, temperature=temperature, chunk_tokens=CHUNK_TOKENS, with_entropy=True
    )
    logprobs, entropy = found[0], found[1]
    (logprobs @ flat.tensor("token_advantages") + entropy @ flat.tensor("returns")).backward()
    padded = [torch.zeros(rows.shape).masked_scatter(rows, values.detach()).numpy() for values in (logprobs, entropy)]
    assert logits.grad is not None
    return {"head_logprobs": padded[0], "head_entropy": padded[1], "d_logits": logits.grad.numpy()}
