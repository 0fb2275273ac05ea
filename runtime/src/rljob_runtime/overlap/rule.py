"""The learning rule up to the loss: from a step's scores to what each token is trained towards; numpy, no torch.

Order, each stage only where it is asked for::

    scores - overlong penalty -> center, scale -> clip -> token rewards (- KL to the reference) -> estimator
    by turns: rewards of turns -> returns -> center, scale, or GiGPO's two terms -> clip -> token rewards (- KL)
    advantages of either (- log-ratio to the teacher) -> whiten -> clip

Samples that filters leave out count in the statistics of rewards, but not in those of advantages, which are over trained tokens.
Samples come in an order of their own (:mod:`~rljob_runtime.overlap.arrange`), so that results do not depend on who arrived first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rljob_api.vocabulary import AdvantageEstimator, EpisodeCount, KLPlacement, NormScope
from rljob_runtime.losses.advantage import group_advantages, leave_one_out
from rljob_runtime.losses.custom import StepRewards, custom_advantages, load_estimator
from rljob_runtime.losses.normalize import DoubleArray, Moments, moments_by, scaled, whitened
from rljob_runtime.losses.returns import discounted_sums, gae, gigpo_advantages, step_returns
from rljob_runtime.losses.rewards import (
    adapted_coefficient,
    difficulty_weights,
    distances_to_teacher,
    kl_estimates,
    length_weights,
    overlong_penalty,
)
from rljob_runtime.overlap.arrange import BoolArray, Number, StepSamples
from rljob_runtime.overlap.rule_config import RuleConfig
from rljob_runtime.overlap.turns import StepTurns, tokens_in_time, turns_of
from rljob_runtime.plugins import Function
from rljob_runtime.records import FloatArray, IntArray

SUMMED_AT_ONCE = 15_000
"""Numbers: 120 kB of doubles, a block that the allocator keeps; fresh pages for larger ones would cost four times as much as the sums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a step's samples are trained towards; T tokens and S samples as in the step."""

    advantages: FloatArray
    """Shape (T,): 0 where nothing is trained."""
    trained: FloatArray
    """Shape (T,): 1 where a sampled token is trained, else 0; the step's own mask where all are."""
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
            ValueError: the estimator is Custom and has no function.
            PluginError: a Custom estimator cannot be imported.
        """
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
                proximal one where its log-probs are there, else the behavior policy.

        Raises:
            ValueError: a forward pass is missing or a score is not finite.
        """
        config = self._config
        sampled = step.response_mask > 0
        metrics: dict[str, float] = {}
        kept = self._kept(step, metrics)
        trained = sampled if kept.all() else sampled & _each(kept[step.sample_of], step.lengths)
        if step.sampling_mask is not None:  # where tokens were possible that are not listed, the policy's log-prob is not known
            trained = trained & (step.sampling_mask.counts > 0)
        whole = trained is sampled
        counted = np.ones(int(step.response_lengths.sum()), dtype=np.bool_) if whole else trained[sampled]
        scores = self._scores(step, metrics)
        kl = self._kl(step, sampled, metrics)
        in_rewards = kl if config.kl_placement is KLPlacement.REWARD else None
        advantages: FloatArray | DoubleArray
        returns: DoubleArray | None
        if config.by_turn:
            advantages, returns = self._estimate_turns(step, turns_of(step.trajectories, scores - step.scores), in_rewards, metrics), None
        else:
            shaped, factors = self._shaped(scores, step.group_ids, step.sources, metrics)
            advantages, returns = self._estimate(step, shaped, factors, in_rewards, counted)
        distance = self._distance_to_teacher(step, sampled, metrics)
        if distance is not None and config.distillation_placement is KLPlacement.REWARD:
            advantages = advantages - config.distillation_coefficient * self._teacher_weights(step, sampled) * distance
        if config.whiten:
            advantages = whitened(advantages.astype(np.float64), counted)
        if config.advantage_clip is not None:
            advantages = advantages.astype(np.float64)  # the limit as it is written; in float32, 0.1 is above 0.1
            metrics["advantage/clip_fraction"] = _mean(np.abs(advantages[counted]) > config.advantage_clip)
            advantages = np.clip(advantages, -config.advantage_clip, config.advantage_clip)
        in_loss = config.kl_target is not None and config.kl_coefficient > 0 and config.kl_placement is KLPlacement.LOSS
        outcome = Outcome(
            advantages=_spread(advantages if whole else np.where(counted, advantages, 0.0), sampled),
            trained=step.response_mask if whole else trained.astype(np.float32),
            returns=None if returns is None else _spread(returns, sampled),
            sample_weights=self._weights(step, kept & (step.response_lengths > 0)),
            kl_coefficient=self._kl_coefficient if in_loss else None,
            metrics=metrics,
        )
        metrics |= _consumed_summary(advantages if whole else advantages[counted])
        self._adapt(step, None if kl is None else kl[_known(step, sampled)])
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

    def _scores(self, step: StepSamples, metrics: dict[str, float]) -> DoubleArray:
        """Scores of shape (S,) less the penalty for long responses."""
        config = self._config
        scores = step.scores.astype(np.float64)
        if not np.isfinite(scores).all():
            raise ValueError(f"score {scores[~np.isfinite(scores)][0]} is not finite; drop failed rewards before the rule is applied")
        if config.overlong_buffer_tokens is None:
            return scores
        taken = overlong_penalty(
            step.response_lengths,
            max_tokens=config.max_response_tokens,
            buffer_tokens=config.overlong_buffer_tokens,
            penalty=config.overlong_penalty,
        )
        metrics["reward/overlong_penalty_mean"] = _mean(taken)
        return np.asarray(scores - taken)

    def _shaped(
        self, values: DoubleArray, groups: IntArray, sources: Sequence[str], metrics: dict[str, float]
    ) -> tuple[DoubleArray, DoubleArray]:
        """Scores, or returns of turns, of shape (N,) after normalization and clip; ``groups`` and ``sources`` are those of each.

        And the factors by which scale and clip changed each, shape (N,): rewards of an episode's turns change with its score.
        """
        config, factors = self._config, np.ones_like(values)
        if not config.shapes_rewards:
            return values, factors
        if NormScope.RUNNING in {config.reward_center, config.reward_scale}:
            self._observe(values, sources)
        centered = values if config.reward_center is None else values - self._moments(config.reward_center, values, groups, sources)[0]
        if config.reward_scale is not None:
            std = self._moments(config.reward_scale, values, groups, sources)[1]
            centered, factors = scaled(centered, std), scaled(factors, std)
        clipped = self._clipped(centered, metrics)
        return clipped, factors * np.divide(clipped, centered, out=np.ones_like(clipped), where=centered != 0)

    def _clipped(self, values: DoubleArray, metrics: dict[str, float]) -> DoubleArray:
        """The last of shaping."""
        limit = self._config.reward_clip
        if limit is not None:
            metrics["reward/clip_fraction"] = _mean(np.abs(values) > limit)
            values = np.clip(values, -limit, limit)
        metrics["reward/shaped_mean"] = _mean(values)
        return values

    def _observe(self, values: DoubleArray, sources: Sequence[str]) -> None:
        """Take a step's values into the running statistics of their sources."""
        named = np.array(sources)
        for source in sorted(set(sources)):
            self._running[source] = self._running.get(source, Moments()).merged(Moments.of(values[named == source]))

    def _moments(self, scope: NormScope, values: DoubleArray, groups: IntArray, sources: Sequence[str]) -> tuple[DoubleArray, DoubleArray]:
        """Mean and standard deviation that apply to each value, shape (N,)."""
        match scope:
            case NormScope.GROUP:
                return moments_by(values, groups)
            case NormScope.BATCH:
                return moments_by(values, np.zeros(values.size, dtype=np.int32))
            case NormScope.RUNNING:
                running = [self._running[source] for source in sources]
                return np.array([m.mean for m in running]), np.array([m.std for m in running])

    def _kl(self, step: StepSamples, sampled: BoolArray, metrics: dict[str, float]) -> DoubleArray | None:
        """KL of each sampled token to the reference, where the rule needs it; 0 at tokens of which it is not known."""
        config = self._config
        if config.kl_coefficient > 0:
            metrics["train/kl_coefficient"] = self._kl_coefficient
        if not config.measures_kl:
            return None
        if step.reference_logprobs is None:
            raise ValueError(f"kl_coefficient is {config.kl_coefficient} but the step has no reference_logprobs; run the reference first")
        known = _known(step, sampled)
        kl = np.where(known, kl_estimates(_policy(step)[sampled], step.reference_logprobs[sampled], config.kl_estimator), 0.0)
        if config.kl_placement is KLPlacement.REWARD:
            metrics["train/kl_reward_mean"] = _mean(kl[known])
        return kl

    def _distance_to_teacher(self, step: StepSamples, sampled: BoolArray, metrics: dict[str, float]) -> DoubleArray | None:
        """Log-ratio of policy to teacher at each sampled token, in jobs with a teacher; 0 at tokens of which it is not known."""
        config = self._config
        if config.distillation_coefficient == 0:
            return None
        if step.teacher_logprobs is None:
            given = config.distillation_coefficient
            raise ValueError(f"distillation_coefficient is {given} but the step has no teacher_logprobs; run the teacher first")
        known = _known(step, sampled)
        distance = np.where(known, distances_to_teacher(_policy(step)[sampled], step.teacher_logprobs[sampled]), 0.0)
        metrics["distillation/kl"] = _mean(distance[known])
        return distance

    def _teacher_weights(self, step: StepSamples, sampled: BoolArray) -> DoubleArray | float:
        """How much the teacher of each sampled token counts; a number where all count alike."""
        named, others = self._config.teacher_weights, self._config.other_teacher_weight
        weights = np.array([named.get(tag, others) for tag in step.tags], dtype=np.float64)
        if (weights == weights[:1]).all():
            return float(weights[0]) if weights.size else others
        return _each(weights[step.sample_of], step.lengths)[sampled]

    def _estimate(
        self, step: StepSamples, scores: DoubleArray, factors: DoubleArray, kl: DoubleArray | None, counted: BoolArray
    ) -> tuple[FloatArray | DoubleArray, DoubleArray | None]:
        """Advantages and, with a critic, returns of the sampled tokens.

        Those of group estimators are float32: what the trainer is given of them, in half the memory.

        Group estimators see the sum of a response's token rewards, its KL included, as verl's do; others see each token's in the order of
        time, those of an episode's turns where they were earned, times ``factors``.
        """
        config, lengths = self._config, step.response_lengths
        time = tokens_in_time(step.trajectories)
        earned = _turn_rewards(step)
        turns = None if earned is None else _in_time(earned * _each(factors, lengths), time)
        penalty = None if kl is None else _in_time(self._kl_coefficient * kl, time)
        match config.estimator:
            case AdvantageEstimator.GRPO:
                advantages = group_advantages(_totals(scores, penalty, lengths), step.group_ids, normalize_std=config.normalize_std)
                return _each(advantages, lengths), None
            case AdvantageEstimator.RLOO:
                advantages = leave_one_out(_totals(scores, penalty, lengths), step.group_ids)
                return _each(advantages, lengths), None
            case AdvantageEstimator.REINFORCE:
                returns = discounted_sums(_token_rewards(scores, penalty, lengths, turns), lengths, config.gamma)
                return _as_written(returns, time), None
            case AdvantageEstimator.REINFORCE_PLUS_PLUS:  # arXiv 2501.03262: normalized over the tokens of the whole batch
                returns = discounted_sums(_token_rewards(scores, penalty, lengths, turns), lengths, config.gamma)
                return whitened(_as_written(returns, time), counted), None
            case AdvantageEstimator.GAE:
                if step.values is None:
                    raise ValueError("GAE needs values but the step has none; run the critic first")
                values, rewards = _in_time(step.values[step.response_mask > 0], time), _token_rewards(scores, penalty, lengths, turns)
                found, returns = gae(rewards, values, lengths, gamma=config.gamma, lambda_=config.lambda_)
                return _as_written(found, time), _as_written(returns, time)
            case AdvantageEstimator.CUSTOM:
                assert self._custom is not None
                given = StepRewards(
                    rewards=_totals(scores, penalty, lengths),
                    token_rewards=_token_rewards(scores, penalty, lengths, turns),
                    lengths=lengths,
                    group_ids=step.group_ids,
                )
                return _as_written(np.array(custom_advantages(self._custom, str(config.function), given, config.parameters)), time), None
            case _:
                raise AssertionError(f"{config.estimator} was refused before")

    def _estimate_turns(self, step: StepSamples, turns: StepTurns, kl: DoubleArray | None, metrics: dict[str, float]) -> DoubleArray:
        """Advantages of the sampled tokens where each turn has its own.

        All tokens of a turn share it, but for the KL, of which a token sees its own and those behind it in the turn, as in ROLL.
        """
        config, groups = self._config, step.group_ids[turns.samples]
        if config.estimator is AdvantageEstimator.STEP_REINFORCE:
            sources = [step.sources[sample] for sample in turns.samples]
            credit, _ = self._shaped(step_returns(turns.rewards, turns.samples, config.gamma), groups, sources, metrics)
        else:
            credit = gigpo_advantages(
                turns.rewards,
                turns.samples,
                groups,
                turns.states,
                gamma=config.gamma,
                episode_weight=config.episode_weight,
                turn_weight=config.turn_weight,
                per_turn=config.episode_count is EpisodeCount.PER_TURN,
                normalize_std=config.normalize_std,
            )
            credit = self._clipped(credit, metrics) if config.reward_clip is not None else credit
        credit, sizes = turns.as_written(credit), turns.as_written(turns.sizes)
        if kl is None:
            return _each(credit, sizes)
        return discounted_sums(_token_rewards(credit, self._kl_coefficient * kl, sizes), sizes, 1.0)

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
        """Move the coefficient for the next step; ``kl`` is of the tokens of which it is known."""
        config = self._config
        if config.kl_target is None or kl is None or not kl.size:
            return
        self._kl_coefficient = adapted_coefficient(
            self._kl_coefficient, kl=_mean(kl), target=config.kl_target, samples=len(step.trajectories), horizon=config.kl_horizon
        )


def _policy(step: StepSamples) -> FloatArray:
    """Log-probs of the policy that a step's samples are from, shape (T,): recomputed by the trainer where that was done."""
    return step.behavior_logprobs if step.proximal_logprobs is None else step.proximal_logprobs


def _known(step: StepSamples, sampled: BoolArray) -> BoolArray:
    """Which of the sampled tokens have the policy's log-prob, shape (sampled tokens,).

    Where more tokens were possible than the engine could list, its log-prob is over a set that nobody else knows: the difference to a
    log-prob over another set is no distance between two policies.
    """
    if step.sampling_mask is None:
        return np.ones(int(step.response_lengths.sum()), dtype=np.bool_)
    return np.asarray(step.sampling_mask.counts[sampled] > 0)


def _totals(scores: DoubleArray, penalty: DoubleArray | None, lengths: np.ndarray) -> DoubleArray:
    """Sum of each response's token rewards, shape (S,)."""
    if penalty is None:
        return scores
    return np.asarray(scores - np.bincount(_each(np.arange(scores.size), lengths), penalty, scores.size))


def _token_rewards(scores: DoubleArray, penalty: DoubleArray | None, lengths: np.ndarray, turns: DoubleArray | None = None) -> DoubleArray:
    """Shape (sampled tokens,): the score on each response's last token, less each token's penalty.

    In an episode, the rewards of its turns stand at the ends of their actions, and on the last token what shaping made of the score
    besides: the sum is the shaped score in any case.
    """
    rewards = np.zeros(int(lengths.sum())) if penalty is None else -penalty
    last = np.cumsum(lengths)[lengths > 0] - 1
    if turns is None:
        rewards[last] += scores[lengths > 0]
        return rewards
    earned = np.bincount(np.repeat(np.arange(scores.size), lengths), turns, scores.size)
    rewards[last] += (scores - earned)[lengths > 0]
    return np.asarray(rewards + turns)


def _turn_rewards(step: StepSamples) -> DoubleArray | None:
    """Rewards of actions at their last tokens, shape (sampled tokens,); None where no segment has one."""
    actions = [segment for t in step.trajectories for segment in t.segments if segment.sampled]
    if all(action.reward is None for action in actions):
        return None
    sizes = np.array([len(action) for action in actions])
    earned = np.array([action.reward or 0.0 for action in actions])
    rewards = np.zeros(int(sizes.sum()))
    rewards[np.cumsum(sizes)[sizes > 0] - 1] = earned[sizes > 0]
    return rewards


def _in_time(values: npt.NDArray[Number], time: npt.NDArray[np.int64] | None) -> npt.NDArray[Number]:
    """Values of sampled tokens as they are written, in the order of time."""
    return values if time is None else values[time]


def _as_written(values: npt.NDArray[Number], time: npt.NDArray[np.int64] | None) -> npt.NDArray[Number]:
    """The other way round."""
    if time is None:
        return values
    written = np.empty_like(values)
    written[time] = values
    return written


def _each(values: npt.NDArray[Number], lengths: np.ndarray) -> npt.NDArray[Number]:
    """``np.repeat`` written run by run: several times faster for long runs, and it lets other threads in."""
    result = np.empty(int(lengths.sum()), dtype=values.dtype)
    place = 0
    for value, size in zip(values.tolist(), lengths.tolist(), strict=True):
        result[place : place + size] = value
        place += size
    return result


def _spread(values: FloatArray | DoubleArray, sampled: BoolArray) -> FloatArray:
    """Values of sampled tokens at their places, shape (T,)."""
    result = np.zeros(sampled.size, dtype=np.float32)
    result[sampled] = values
    return result


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else 0.0


def _consumed_summary(advantages: FloatArray | DoubleArray) -> dict[str, float]:
    """Metrics of the trained tokens' advantages in double precision; 0 where none is trained."""
    some = advantages if advantages.size else np.zeros(1)
    mean = _sum(some) / some.size
    return {
        "advantage/mean": mean,
        "advantage/std": math.sqrt(_sum(some, around=mean) / some.size),
        "advantage/min": float(some.min()),
        "advantage/max": float(some.max()),
    }


def _sum(values: FloatArray | DoubleArray, around: float | None = None) -> float:
    """The sum of values, or of their squared distances from a number, in double precision and part by part.

    Halved as numpy's pairwise summation halves, so that the sum is, bit for bit, that of an array of doubles, without this array: it would
    be a step's largest one.
    """
    if values.size > SUMMED_AT_ONCE:
        half = values.size // 2
        half -= half % 8
        return _sum(values[:half], around) + _sum(values[half:], around)
    part = values.astype(np.float64)
    if around is not None:
        part -= around
        part *= part
    return float(part.sum())
