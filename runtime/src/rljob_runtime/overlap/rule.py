"""The learning rule up to the loss: from a step's scores to what each token is trained towards; numpy, no torch.

Order, each stage only where it is asked for::

    scores - overlong penalty -> centre, scale -> clip -> token rewards (- KL to the reference) -> estimator -> whiten -> clip

Samples that filters leave out count in the statistics of rewards, but not in those of advantages, which are over trained tokens.
Samples come in an order of their own (:mod:`~rljob_runtime.overlap.arrange`), so that results do not depend on who arrived first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from rljob_api.vocabulary import AdvantageEstimator, KLPlacement, NormScope
from rljob_runtime.losses.advantage import group_advantages, leave_one_out
from rljob_runtime.losses.custom import StepRewards, custom_advantages, load_estimator
from rljob_runtime.losses.normalize import DoubleArray, Moments, moments_by, scaled, whitened
from rljob_runtime.losses.returns import discounted_sums, gae
from rljob_runtime.losses.rewards import adapted_coefficient, difficulty_weights, kl_estimates, length_weights, overlong_penalty
from rljob_runtime.overlap.arrange import BoolArray, StepSamples
from rljob_runtime.overlap.rule_config import RuleConfig
from rljob_runtime.plugins import Function
from rljob_runtime.records import FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a step's samples are trained towards; T tokens and S samples as in the step."""

    advantages: FloatArray
    """Shape (T,): 0 where nothing is trained."""
    trained: FloatArray
    """Shape (T,): 1 where a sampled token is trained, else 0."""
    returns: FloatArray | None = None
    """Shape (T,) with a critic: what the value of each sampled token should have been, else 0."""
    sample_weights: FloatArray | None = None
    """Shape (S,): factors on policy losses, mean 1 over the samples that are trained; None: all 1."""
    kl_coefficient: float | None = None
    """Weight of the loss's KL term in this step where it adapts; None: as configured."""
    metrics: dict[str, float]


class Rule:
    """Applies a rule step by step; keeps running statistics of scores and the KL coefficient."""

    def __init__(self, config: RuleConfig) -> None:
        """Start with no statistics.

        Raises:
            ValueError: the estimator works on steps of episodes, which single responses do not have.
            PluginError: a Custom estimator cannot be imported.
        """
        if config.estimator in {AdvantageEstimator.GIGPO, AdvantageEstimator.STEP_REINFORCE}:
            raise ValueError(f"{config.estimator} needs the steps of episodes, but samples are single responses; choose another estimator")
        self._custom: Function | None = None
        if config.estimator is AdvantageEstimator.CUSTOM:
            if config.function is None:
                raise ValueError("estimator is Custom with function None; name it as module:function")
            self._custom = load_estimator(config.function, config.parameters, config.job_folder)
        self._config = config
        self._running: dict[str, Moments] = {}
        self._kl_coefficient = config.kl_coefficient

    def state(self) -> dict[str, Any]:
        """What a resumed run needs, fit for JSON."""
        running = {source: asdict(self._running[source]) for source in sorted(self._running)}
        return {"kl_coefficient": self._kl_coefficient, "running_rewards": running}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state` gave; the coefficient only where it adapts.

        Raises:
            ValueError: the mapping is not one of those.
        """
        try:
            coefficient = float(state["kl_coefficient"])
            running = {
                str(source): Moments(count=int(kept["count"]), mean=float(kept["mean"]), m2=float(kept["m2"]))
                for source, kept in state["running_rewards"].items()
            }
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(f"state of the learning rule: {error!r} in {dict(state)!r}; restore what state() returned") from error
        if not math.isfinite(coefficient) or not all(math.isfinite(m.mean) and math.isfinite(m.m2) for m in running.values()):
            raise ValueError(f"state of the learning rule holds numbers that are not finite: {dict(state)!r}; use an older checkpoint")
        self._running = running
        if self._config.kl_target is not None:
            self._kl_coefficient = coefficient

    def apply(self, step: StepSamples) -> Outcome:
        """Compute a step's advantages and advance the state.

        Args:
            step: with reference log-probs where the rule measures the KL, with values for GAE. The policy that sampled tokens is the
                proximal one where its log-probs are there, else the behaviour policy.

        Raises:
            ValueError: a forward pass is missing or a score is not finite.
        """
        config = self._config
        sampled = step.response_mask > 0
        metrics: dict[str, float] = {}
        kept = self._kept(step, metrics)
        trained = sampled & np.repeat(kept, step.lengths)
        if step.sampling_mask is not None:  # where tokens were possible that are not listed, the policy's log-prob is not known
            trained &= step.sampling_mask.counts > 0
        counted = trained[sampled]
        scores = self._shaped(step, metrics)
        kl = self._kl(step, sampled, metrics)
        advantages, returns = self._estimate(step, scores, kl if config.kl_placement is KLPlacement.REWARD else None, counted)
        if config.whiten:
            advantages = whitened(advantages, counted)
        if config.advantage_clip is not None:
            metrics["advantage/clip_fraction"] = _mean(np.abs(advantages[counted]) > config.advantage_clip)
            advantages = np.clip(advantages, -config.advantage_clip, config.advantage_clip)
        metrics |= _summary(advantages[counted])
        in_loss = config.kl_target is not None and config.kl_coefficient > 0 and config.kl_placement is KLPlacement.LOSS
        outcome = Outcome(
            advantages=_spread(np.where(counted, advantages, 0.0), sampled),
            trained=trained.astype(np.float32),
            returns=None if returns is None else _spread(returns, sampled),
            sample_weights=self._weights(step, kept & (step.response_lengths > 0)),
            kl_coefficient=self._kl_coefficient if in_loss else None,
            metrics=metrics,
        )
        self._adapt(step, kl)
        return outcome

    def _kept(self, step: StepSamples, metrics: dict[str, float]) -> BoolArray:
        """Shape (S,): samples that filters leave in."""
        config = self._config
        kept = np.ones(len(step.trajectories), dtype=np.bool_)
        if not config.filters:
            return kept
        if config.drop_truncated:
            kept &= ~step.truncated
        exact = np.array([t.reward.score for t in step.trajectories], dtype=np.float64)  # in float32, 0.1 is above 0.1
        mean, _ = moments_by(exact, step.group_ids)
        if config.min_group_mean is not None:
            kept &= mean > config.min_group_mean
        if config.max_group_mean is not None:
            kept &= mean < config.max_group_mean
        if config.max_failed_tokens is not None:
            kept &= step.passed | (step.response_lengths < config.max_failed_tokens)
        metrics["train/masked_samples_fraction"] = 1.0 - _mean(kept)
        return kept

    def _shaped(self, step: StepSamples, metrics: dict[str, float]) -> DoubleArray:
        """Scores of shape (S,) after penalty, normalization and clip."""
        config = self._config
        scores = step.scores.astype(np.float64)
        if not np.isfinite(scores).all():
            raise ValueError(f"score {scores[~np.isfinite(scores)][0]} is not finite; drop failed rewards before the rule is applied")
        if not config.shapes_rewards:
            return scores
        if config.overlong_buffer_tokens is not None:
            taken = overlong_penalty(
                step.response_lengths,
                max_tokens=config.max_response_tokens,
                buffer_tokens=config.overlong_buffer_tokens,
                penalty=config.overlong_penalty,
            )
            metrics["reward/overlong_penalty_mean"] = _mean(taken)
            scores = scores - taken
        if NormScope.RUNNING in {config.reward_center, config.reward_scale}:
            self._observe(step, scores)
        centred = scores if config.reward_center is None else scores - self._moments(config.reward_center, step, scores)[0]
        result = centred if config.reward_scale is None else scaled(centred, self._moments(config.reward_scale, step, scores)[1])
        if config.reward_clip is not None:
            metrics["reward/clip_fraction"] = _mean(np.abs(result) > config.reward_clip)
            result = np.clip(result, -config.reward_clip, config.reward_clip)
        metrics["reward/shaped_mean"] = _mean(result)
        return result

    def _observe(self, step: StepSamples, scores: DoubleArray) -> None:
        """Take the step's scores into the running statistics of their sources."""
        sources = np.array(step.sources)
        for source in sorted(set(step.sources)):
            self._running[source] = self._running.get(source, Moments()).merged(Moments.of(scores[sources == source]))

    def _moments(self, scope: NormScope, step: StepSamples, scores: DoubleArray) -> tuple[DoubleArray, DoubleArray]:
        """Mean and standard deviation that apply to each sample, shape (S,)."""
        match scope:
            case NormScope.GROUP:
                return moments_by(scores, step.group_ids)
            case NormScope.BATCH:
                return moments_by(scores, np.zeros(scores.size, dtype=np.int32))
            case NormScope.RUNNING:
                running = [self._running[source] for source in step.sources]
                return np.array([m.mean for m in running]), np.array([m.std for m in running])

    def _kl(self, step: StepSamples, sampled: BoolArray, metrics: dict[str, float]) -> DoubleArray | None:
        """KL of each sampled token to the reference, where the rule needs it."""
        config = self._config
        if config.kl_coefficient > 0:
            metrics["train/kl_coefficient"] = self._kl_coefficient
        if not config.measures_kl:
            return None
        if step.reference_logprobs is None:
            raise ValueError(f"kl_coefficient is {config.kl_coefficient} but the step has no reference_logprobs; run the reference first")
        policy = step.behaviour_logprobs if step.proximal_logprobs is None else step.proximal_logprobs
        kl = kl_estimates(policy[sampled], step.reference_logprobs[sampled], config.kl_estimator)
        if config.kl_placement is KLPlacement.REWARD:
            metrics["train/kl_reward_mean"] = _mean(kl)
        return kl

    def _estimate(
        self, step: StepSamples, scores: DoubleArray, kl: DoubleArray | None, counted: BoolArray
    ) -> tuple[DoubleArray, DoubleArray | None]:
        """Advantages and, with a critic, returns of the sampled tokens.

        Group estimators see the sum of a response's token rewards, its KL included, as verl's do; others see each token's.
        """
        config, lengths = self._config, step.response_lengths
        penalty = None if kl is None else self._kl_coefficient * kl
        match config.estimator:
            case AdvantageEstimator.GRPO:
                advantages = group_advantages(_totals(scores, penalty, lengths), step.group_ids, normalize_std=config.normalize_std)
                return np.repeat(advantages.astype(np.float64), lengths), None
            case AdvantageEstimator.RLOO:
                advantages = leave_one_out(_totals(scores, penalty, lengths), step.group_ids)
                return np.repeat(advantages.astype(np.float64), lengths), None
            case AdvantageEstimator.REINFORCE:
                return discounted_sums(_token_rewards(scores, penalty, lengths), lengths, config.gamma), None
            case AdvantageEstimator.REINFORCE_PLUS_PLUS:  # arXiv 2501.03262: normalized over the tokens of the whole batch
                returns = discounted_sums(_token_rewards(scores, penalty, lengths), lengths, config.gamma)
                return whitened(returns, counted), None
            case AdvantageEstimator.GAE:
                if step.values is None:
                    raise ValueError("GAE needs values but the step has none; run the critic first")
                values = step.values[step.response_mask > 0]
                return gae(_token_rewards(scores, penalty, lengths), values, lengths, gamma=config.gamma, lambda_=config.lambda_)
            case AdvantageEstimator.CUSTOM:
                assert self._custom is not None
                given = StepRewards(
                    rewards=_totals(scores, penalty, lengths),
                    token_rewards=_token_rewards(scores, penalty, lengths),
                    lengths=lengths,
                    group_ids=step.group_ids,
                )
                return custom_advantages(self._custom, str(config.function), given, config.parameters), None
            case _:
                raise AssertionError(f"{config.estimator} was refused before")

    def _weights(self, step: StepSamples, kept: BoolArray) -> FloatArray | None:
        """Shape (S,): product of the weights asked for, with mean 1 over the samples that are trained."""
        config = self._config
        if not (config.weight_by_difficulty or config.weight_by_length):
            return None
        weights = np.ones(len(step.trajectories))
        if config.weight_by_difficulty:
            weights *= difficulty_weights(step.passed, step.group_ids)
        if config.weight_by_length:
            weights *= length_weights(step.response_lengths)
        if kept.any():
            weights /= weights[kept].mean()
        return weights.astype(np.float32)

    def _adapt(self, step: StepSamples, kl: DoubleArray | None) -> None:
        """Move the coefficient for the next step."""
        config = self._config
        if config.kl_target is None or kl is None or not kl.size:
            return
        self._kl_coefficient = adapted_coefficient(
            self._kl_coefficient, kl=_mean(kl), target=config.kl_target, samples=len(step.trajectories), horizon=config.kl_horizon
        )


def _totals(scores: DoubleArray, penalty: DoubleArray | None, lengths: np.ndarray) -> DoubleArray:
    """Sum of each response's token rewards, shape (S,)."""
    if penalty is None:
        return scores
    return np.asarray(scores - np.bincount(np.repeat(np.arange(scores.size), lengths), penalty, scores.size))


def _token_rewards(scores: DoubleArray, penalty: DoubleArray | None, lengths: np.ndarray) -> DoubleArray:
    """Shape (sampled tokens,): the score on each response's last token, less each token's penalty."""
    rewards = np.zeros(int(lengths.sum())) if penalty is None else -penalty
    rewards[np.cumsum(lengths)[lengths > 0] - 1] += scores[lengths > 0]
    return rewards


def _spread(values: DoubleArray, sampled: BoolArray) -> FloatArray:
    """Values of sampled tokens at their places, shape (T,)."""
    result = np.zeros(sampled.size, dtype=np.float32)
    result[sampled] = values
    return result


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else 0.0


def _summary(advantages: DoubleArray) -> dict[str, float]:
    """Metrics of the trained tokens' advantages; 0 where none is trained."""
    some = advantages if advantages.size else np.zeros(1)
    return {
        "advantage/mean": float(some.mean()),
        "advantage/std": float(some.std()),
        "advantage/min": float(some.min()),
        "advantage/max": float(some.max()),
    }
