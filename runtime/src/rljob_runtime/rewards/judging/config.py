"""What a judge or a reward model is: frozen values, cheap to send to a scoring process; one reward process's share of the job's limits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rljob_api.vocabulary import BudgetEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderConfig:
    """How the judge's words become a score; exactly one of pattern, json_field and function is set."""

    pattern: str | None = None
    json_field: str | None = None
    function: str | None = None
    values: Mapping[str, float] = field(default_factory=dict)
    """Score by word; empty: the word is a number."""
    minimum: float | None = None
    maximum: float | None = None
    otherwise: float | None = None
    """Score where pattern or json_field find nothing of that kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How fast this process asks."""

    in_flight: int = 64
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Retries:
    """What happens when the endpoint does not answer."""

    attempts: int = 5
    """Requests for one question, the first one included."""
    min_backoff_s: float = 1.0
    max_backoff_s: float = 60.0
    failures_in_row: int = 100
    """Questions in a row without an answer after which the job fails."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What this process may spend."""

    calls: int | None = None
    tokens: int | None = None
    on_exhausted: BudgetEnd = BudgetEnd.FAIL


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """Engines of a component of the job, as judges; never sent to a scoring process."""

    urls: tuple[str, ...]
    """Base URL of each."""
    api_key: str = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What an endpoint says to one request."""

    text: str
    """Empty where it says nothing."""
    prompt_tokens: int
    completion_tokens: int
    silence: str = ""
    """Why there is no text, and what to do."""


@dataclass(frozen=True, kw_only=True)
class JudgeConfig:
    """The judge of one reward."""

    url: str = ""
    """Base URL of the endpoint, without a slash at its end; empty where a component of the job serves it."""
    component: str | None = None
    """Component that serves it."""
    model: str
    api_key_env: str | None = None
    """Environment variable of the reward worker; a scoring process has no such variable."""
    system: str = ""
    template: str
    """Format string of the user message: question, prompt, response, answer."""
    sampling: Mapping[str, object] = field(default_factory=dict)
    """Further fields of a request."""
    reader: ReaderConfig
    limits: Limits = Limits()
    retries: Retries = Retries()
    budget: Budget = Budget()
    request_timeout_s: float = 120.0
    cache_entries: int = 0

    @property
    def answers_with(self) -> str:
        """What an answer is called."""
        return "chat completion"

    def request_url(self, url: str) -> str:
        """Where a request goes, from a base URL."""
        return f"{url}/chat/completions"

    def read(self, answered: Any) -> Answer:
        """What an answer's JSON says; raises ValueError, TypeError, KeyError, IndexError or AttributeError where it is of another form."""
        choice = answered["choices"][0]
        text = choice["message"]["content"]
        ended = f"finish_reason {choice.get('finish_reason')}"
        silence = f"the judge said nothing ({ended}); raise max_tokens in judge.sampling where it is length"
        return _answer(answered, text if isinstance(text, str) else "", silence)

    @property
    def max_answer_tokens(self) -> int:
        """Tokens that an answer may have; 0 where the endpoint decides."""
        found = (self.sampling.get(name) for name in ("max_tokens", "max_completion_tokens"))
        return next((value for value in found if isinstance(value, int)), 0)

    def body(self, *, question: str, prompt: str, response: str, answer: str) -> bytes:
        """The JSON body of a request: equal for equal questions."""
        said = self.template.format(question=question, prompt=prompt, response=response, answer=answer)
        messages = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": said})
        return json.dumps({"model": self.model, "messages": messages, **self.sampling}).encode()


NUMBER = ReaderConfig(pattern=r"\S+")
"""Reads what a reward model says, which is its score alone."""


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig(JudgeConfig):
    """The reward model of one reward: asked as a judge is, but for one number, at vLLM's ``/classify``."""

    template: str = ""
    """Format string of the scored text; empty: a conversation of question and response, by the model's chat template."""
    reader: ReaderConfig = NUMBER
    label: int = 0
    """Which output is the score."""
    activation: bool = False

    @property
    def answers_with(self) -> str:
        """What an answer is called."""
        return "classification"

    def request_url(self, url: str) -> str:
        """Beside ``/v1``, as vLLM has it."""
        return f"{url.removesuffix('/v1')}/classify"

    def body(self, *, question: str, prompt: str, response: str, answer: str) -> bytes:
        """The JSON body of a request: equal for equal texts."""
        scored: dict[str, object]
        if self.template:
            scored = {"input": self.template.format(question=question, prompt=prompt, response=response, answer=answer)}
        else:
            said = (("user", question), ("assistant", response))
            scored = {"messages": [{"role": role, "content": content} for role, content in said]}
        return json.dumps({"model": self.model, **scored, "use_activation": self.activation, **self.sampling}).encode()

    def read(self, answered: Any) -> Answer:
        """The score as text."""
        outputs = answered["data"][0]["probs"]
        silence = f"the model has {len(outputs)} outputs and none with number {self.label}; write a smaller rewardModel.label"
        return _answer(answered, repr(float(outputs[self.label])) if self.label < len(outputs) else "", silence)


def _answer(answered: Any, text: str, silence: str) -> Answer:
    usage = answered.get("usage") or {}
    prompt, completion = (int(usage.get(f"{kind}_tokens") or 0) for kind in ("prompt", "completion"))
    return Answer(text=text, prompt_tokens=prompt, completion_tokens=completion, silence=silence)
