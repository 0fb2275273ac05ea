"""From the spec's judges to the share of them that one reward process has. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rljob_api.planning.plan import Plan
from rljob_api.v1alpha1.components import Role
from rljob_api.v1alpha1.data import Reward
from rljob_api.v1alpha1.judges import Judge, RewardModel
from rljob_runtime.rewards.judging.config import Budget, JudgeConfig, Limits, ReaderConfig, Retries, RewardModelConfig

JUDGED_CALLS = 32
"""Calls that a reward worker answers at the same time where it waits for judges: a call is what was finished together, often one group."""
_MINUTE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """A reward process among all of the job's."""

    index: int = 0
    count: int = 1

    def of(self, total: int) -> int:
        """Its part of a whole number; the parts of all processes sum to it."""
        return total // self.count + (self.index < total % self.count)


def share_of(plan: Plan, component: str, rank: int) -> Share:
    """The share of a process of a Reward component."""
    index = 0
    for other in plan.with_role(Role.REWARD):
        if other.name == component:
            return Share(index=index + rank, count=sum(one.world_size for one in plan.with_role(Role.REWARD)))
        index += other.world_size
    raise ValueError(f"{component} is no Reward component of the plan")


def asked_config(asked: Judge | RewardModel, share: Share) -> JudgeConfig:
    """The model that a reward asks, as one reward process asks it."""
    endpoint = asked.endpoint
    common: dict[str, Any] = {
        "url": "" if endpoint is None else endpoint.url.rstrip("/"),
        "component": asked.component,
        "model": str(asked.component) if endpoint is None else endpoint.model,
        "api_key_env": None if endpoint is None else endpoint.api_key_env,
        "template": asked.template,
        "request_timeout_s": asked.request_timeout_seconds,
        "cache_entries": asked.cache_entries,
        **_bounds(asked, share),
    }
    if isinstance(asked, RewardModel):
        return RewardModelConfig(label=asked.label, activation=asked.activation, sampling=asked.request, **common)
    parser = asked.parser
    reader = ReaderConfig(
        pattern=parser.pattern,
        json_field=parser.field,
        function=parser.function,
        values=parser.values,
        minimum=parser.minimum,
        maximum=parser.maximum,
        otherwise=parser.otherwise,
    )
    return JudgeConfig(system=asked.system, sampling=asked.sampling, reader=reader, **common)


def _bounds(asked: Judge | RewardModel, share: Share) -> dict[str, Any]:
    """One process's part of what all may do together."""
    limits, retries, budget = asked.limits, asked.retries, asked.budget
    return {
        "limits": Limits(
            in_flight=share.of(limits.in_flight),
            requests_per_minute=None if limits.requests_per_minute is None else limits.requests_per_minute / share.count,
            tokens_per_minute=None if limits.tokens_per_minute is None else limits.tokens_per_minute / share.count,
        ),
        "retries": Retries(
            attempts=retries.attempts,
            min_backoff_s=retries.min_backoff_seconds,
            max_backoff_s=retries.max_backoff_seconds,
            failures_in_row=retries.failures_in_row,
        ),
        "budget": Budget(
            calls=None if budget.calls is None else share.of(budget.calls),
            tokens=None if budget.tokens is None else share.of(budget.tokens),
            on_exhausted=budget.on_exhausted,
        ),
    }


def longest_question_s(reward: Reward, *, processes: int, shown_tokens: int) -> float:
    """Seconds after which a question has its answer or has failed, its own pace included; 0 of a reward that asks nobody.

    ``shown_tokens`` are those of the longest prompt and response that fill the template.
    """
    judge = reward.asked
    if judge is None:
        return 0.0
    limits, asked = judge.limits, asked_config(judge, Share())
    tokens = shown_tokens + asked.max_answer_tokens + len(asked.system) + len(asked.template)
    pace_s = 0.0 if limits.requests_per_minute is None else _MINUTE_S * processes / limits.requests_per_minute
    pace_s += 0.0 if limits.tokens_per_minute is None else _MINUTE_S * processes * tokens / limits.tokens_per_minute
    return judge.retries.attempts * (judge.request_timeout_seconds + judge.retries.max_backoff_seconds + pace_s)
