"""Judges and reward models: models that score responses, what they are asked and what they may cost."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rljob_api.v1alpha1.base import (
    ENV_NAME_PATTERN,
    URL_PATTERN,
    ComponentName,
    FreeForm,
    FunctionPath,
    Positive,
    Score,
    ShortText,
    SpecModel,
)
from rljob_api.vocabulary import BudgetEnd

Template = Annotated[str, Field(max_length=32_768)]


class JudgeEndpoint(SpecModel):
    """A server that speaks OpenAI's chat completions, for a judge: vLLM, SGLang, or a provider; for a reward model vLLM's /classify."""

    url: Annotated[str, Field(min_length=1, max_length=1024, pattern=URL_PATTERN)]
    """Base URL, for example https://judge.example.com/v1; <url>/chat/completions is called, of a reward model /classify beside /v1."""
    model: Annotated[str, Field(min_length=1, max_length=256)]
    """Name of the model there."""
    api_key_env: Annotated[str, Field(min_length=1, max_length=128, pattern=ENV_NAME_PATTERN)] | None = None
    """Environment variable that holds the API key: put it into a Secret and name that in nodeGroups[].env. No key is sent when not set."""


class JudgeParser(SpecModel):
    """How the judge's words become a score: give pattern, or field, or function. What follows </think> counts."""

    pattern: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Python regular expression; its last match counts, there its group where it has one."""
    field: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Field of the last JSON object in the text, with dots for fields of fields."""
    function: FunctionPath | None = None
    """module:function of your own, called with the keywords judgement (the text), prompt, response, answer, metadata and the reward's
    parameters; returns what a Function reward returns."""
    values: dict[ShortText, Score] = Field(default={}, max_length=256)
    """Score of each word that pattern or field may find, whatever its case; without values it has to be a number."""
    minimum: Score | None = None
    """Least score that the judge may give; a lower one is an error."""
    maximum: Score | None = None
    """Greatest score that the judge may give; a higher one is an error."""
    otherwise: Score | None = None
    """Score where pattern or field find nothing of that kind; an error when not set."""


class JudgeLimits(SpecModel):
    """How fast the judge is asked, by all reward processes of the job together."""

    in_flight: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Requests at the same time."""
    requests_per_minute: Positive | None = None
    """Requests a minute, retries included; no limit when not set."""
    tokens_per_minute: Positive | None = None
    """Tokens a minute, of prompts and answers; what an answer will have is taken as sampling.max_tokens until it is there."""


class JudgeRetries(SpecModel):
    """What happens when the endpoint is busy, fails or is late."""

    attempts: Annotated[int, Field(ge=1, le=100)] = 5
    """Requests for one question at most, the first one included."""
    min_backoff_seconds: Positive = 1.0
    """Pause before the second request; each further one is twice as long, with up to half of it left out at random. The endpoint's
    Retry-After replaces it."""
    max_backoff_seconds: Positive = 60.0
    """Longest pause."""
    failures_in_row: Annotated[int, Field(ge=1, le=1_000_000)] = 100
    """Questions in a row that got no answer in one reward process, after which the job fails."""


class JudgeBudget(SpecModel):
    """What the judge may cost in one attempt of the job."""

    calls: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = None
    """Requests, retries included; any number when not set."""
    tokens: Annotated[int, Field(ge=1, le=1_000_000_000_000)] | None = None
    """Tokens of prompts and answers as the endpoint counts them; requests in flight when it is spent are still answered."""
    on_exhausted: BudgetEnd = BudgetEnd.FAIL
    """What happens then."""


class Judge(SpecModel):
    """The judge of an LLMJudge reward."""

    endpoint: JudgeEndpoint | None = None
    """Who is asked, where it is served outside the job."""
    component: ComponentName | None = None
    """Component with role Judge that is asked; give this or endpoint."""
    system: Template = ""
    """System message; none when empty."""
    template: Template
    """User message: {question} as the data has it, {prompt} as the policy was given it, {response} (what extraction finds of it) and
    {answer}; literal braces are {{ and }}."""
    sampling: FreeForm = Field(default={"temperature": 0.0, "max_tokens": 512})
    """Further fields of the request, by the endpoint's names."""
    parser: JudgeParser
    """How its words become a score."""
    limits: JudgeLimits = JudgeLimits()
    """How fast it is asked."""
    retries: JudgeRetries = JudgeRetries()
    """What happens when it does not answer."""
    budget: JudgeBudget = JudgeBudget()
    """What it may cost."""
    request_timeout_seconds: Positive = 120.0
    """Limit for one request."""
    cache_entries: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Answers that each reward process remembers for equal questions; 0 asks every time."""


class RewardModel(SpecModel):
    """The model of a RewardModel reward."""

    endpoint: JudgeEndpoint | None = None
    """Who is asked, where it is served outside the job."""
    component: ComponentName | None = None
    """Component with role Judge that is asked; give this or endpoint."""
    template: Template = ""
    """Text that is scored: {question} as the data has it, {prompt} as the policy was given it, {response} (what extraction finds of it) and
    {answer}; literal braces are {{ and }}. When empty, a conversation of question and response by the model's own chat template."""
    label: Annotated[int, Field(ge=0, le=4095)] = 0
    """Which of the model's outputs is the score; most have one."""
    activation: bool = False
    """Score after the model's activation (sigmoid or softmax) instead of its raw output."""
    request: FreeForm = Field(default={})
    """Further fields of the request, by the endpoint's names, such as truncate_prompt_tokens."""
    limits: JudgeLimits = JudgeLimits()
    """How fast it is asked; a server batches what is in flight."""
    retries: JudgeRetries = JudgeRetries()
    """What happens when it does not answer."""
    budget: JudgeBudget = JudgeBudget()
    """What it may cost."""
    request_timeout_seconds: Positive = 60.0
    """Limit for one request."""
    cache_entries: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Scores that each reward process remembers for equal texts; 0 asks every time."""
