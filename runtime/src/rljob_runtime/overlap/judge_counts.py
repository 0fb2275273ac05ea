"""What judges were asked since the last step, by the reward that asked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from rljob_runtime.records import Judgement


@dataclass(slots=True, kw_only=True)
class _Counts:
    questions: int = 0
    calls: int = 0
    failures: int = 0
    remembered: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    answer_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class JudgeCounts:
    """Sums over judgements."""

    by_reward: dict[str, _Counts] = field(default_factory=dict)

    def add(self, judgements: Iterable[Judgement]) -> None:
        """Count the judgements of a response."""
        for judgement in judgements:
            counts = self.by_reward.setdefault(judgement.reward, _Counts())
            counts.questions += 1
            counts.calls += judgement.calls
            counts.failures += judgement.error is not None
            counts.remembered += judgement.error is None and judgement.calls == 0
            counts.prompt_tokens += judgement.prompt_tokens
            counts.completion_tokens += judgement.completion_tokens
            counts.answer_s += judgement.elapsed_s

    def metrics(self) -> dict[str, float]:
        """``judge/*``; empty where no judge was asked."""
        found: dict[str, float] = {}
        for reward, counts in self.by_reward.items():
            found |= {
                f"judge/questions/{reward}": float(counts.questions),
                f"judge/calls/{reward}": float(counts.calls),
                f"judge/failures/{reward}": float(counts.failures),
                f"judge/remembered/{reward}": float(counts.remembered),
                f"judge/prompt_tokens/{reward}": float(counts.prompt_tokens),
                f"judge/completion_tokens/{reward}": float(counts.completion_tokens),
                f"judge/answer_mean_s/{reward}": counts.answer_s / counts.questions,
            }
        return found
