"""How fast and how much a judge is asked: arithmetic over a clock that the caller reads."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.vocabulary import BudgetEnd
from rljob_runtime.rewards.judging.config import Budget


class BudgetSpentError(Exception):
    """Raised instead of a request beyond the budget; says what is spent."""


class Pace:
    """At most ``per_minute`` units in any minute, evenly: the generic cell rate algorithm (ITU-T I.371) without bursts.

    A unit is a request or a token. What costs n units moves the next one's time n / per_minute minutes on.
    """

    def __init__(self, per_minute: float) -> None:
        """``per_minute`` is above 0."""
        self._unit_s = 60.0 / per_minute
        self._free_s = 0.0
        """Time from which on the next one may begin."""

    def reserve(self, units: float, now_s: float) -> float:
        """Take a place behind all others; returns the seconds until it may begin."""
        begins_s = max(self._free_s, now_s)
        self._free_s = begins_s + units * self._unit_s
        return begins_s - now_s

    def correct(self, units: float) -> None:
        """What was reserved took so many units more, or fewer where negative."""
        self._free_s += units * self._unit_s


@dataclass(slots=True, kw_only=True)
class Spending:
    """What is spent of a budget."""

    budget: Budget
    calls: int = 0
    tokens: int = 0

    def check(self) -> None:
        """Raise BudgetSpentError if there is no request left."""
        if self.budget.calls is not None and self.calls >= self.budget.calls:
            raise BudgetSpentError(f"the budget of {self.budget.calls} calls of this reward process is spent")
        self.check_tokens()

    def check_tokens(self) -> None:
        """Raise BudgetSpentError if a request whose call is counted already may not be sent."""
        if self.budget.tokens is not None and self.tokens >= self.budget.tokens:
            raise BudgetSpentError(f"the budget of {self.budget.tokens} tokens of this reward process is spent: {self.tokens} were used")

    def take_call(self) -> None:
        """Count a request that will be sent, before anything else is waited for: nobody waits for a call that another one has.

        Raises:
            BudgetSpentError: there is none left.
        """
        self.check()
        self.calls += 1

    def give_call_back(self) -> None:
        """A request that was counted is not sent."""
        self.calls -= 1

    def used(self, tokens: int) -> bool:
        """Count tokens of an answer; whether there are none left."""
        self.tokens += tokens
        return self.budget.tokens is not None and self.tokens >= self.budget.tokens

    @property
    def fails_job(self) -> bool:
        """Whether the job fails when it is spent."""
        return self.budget.on_exhausted is BudgetEnd.FAIL
