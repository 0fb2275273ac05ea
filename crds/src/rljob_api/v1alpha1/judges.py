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
    """A server: for a judge, OpenAI's chat completions API (vLLM, SGLang, or a provider); for a reward model, vLLM's /classify."""

    url: Annotated[str, Field(min_length=1, max_length=1024, pattern=URL_PATTERN)]
    """Base URL, for example https://judge.example.com/v1; <url>/chat/completions is called, for a reward model /classify next to /v1."""
    model: Annotated[str, Field(min_length=1, max_length=256)]
    """Name of the model on that server."""
    api_key_env: Annotated[str, Field(min_length=1, max_length=128, pattern=ENV_NAME_PATTERN)] | None = None
    """Environment variable with the API key: put the key into a Secret and reference it in nodeGroups[].env. By default no key is sent."""


class JudgeParser(SpecModel):
    """How the judge's answer becomes a score: set pattern, field, or function. Only the text after </think> is parsed."""

    pattern: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Python regular expression; its last match counts, or the group of that match if it has one."""
    field: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Field of the last JSON object in the text; dots separate nested fields."""
    function: FunctionPath | None = None
    """module:function of your own, called with the keywords judgement (the text), prompt, response, answer, metadata and the reward's
    parameters; returns what a Function reward returns."""
    values: dict[ShortText, Score] = Field(default={}, max_length=256)
    """Score of each word that pattern or field may find, ignoring case; without values, the result must be a number."""
    minimum: Score | None = None
    """Minimum score; a lower one is an error."""
    maximum: Score | None = None
    """Maximum score; a higher one is an error."""
    otherwise: Score | None = None
    """Score if the answer cannot be parsed; by default that is an error."""


class JudgeLimits(SpecModel):
    """Rate limits for all reward processes of the job together."""

    in_flight: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Maximum number of concurrent requests."""
    requests_per_minute: Positive | None = None
    """Requests per minute, including retries; no limit by default."""
    tokens_per_minute: Positive | None = None
    """Tokens per minute, of prompts and answers; until an answer has arrived, it counts as sampling.max_tokens."""


class JudgeRetries(SpecModel):
    """What happens when the endpoint is busy, fails, or exceeds the time limit."""

    attempts: Annotated[int, Field(ge=1, le=100)] = 5
    """Maximum number of requests for one question, including the first."""
    min_backoff_seconds: Positive = 1.0
    """Pause before the second request; it doubles with each further request and is shortened randomly by up to half. The endpoint's
    Retry-After replaces it."""
    max_backoff_seconds: Positive = 60.0
    """Longest pause."""
    failures_in_row: Annotated[int, Field(ge=1, le=1_000_000)] = 100
    """The job fails after this many consecutive questions without an answer in one reward process."""


class JudgeBudget(SpecModel):
    """What the judge may cost in one attempt of the job."""

    calls: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = None
    """Requests, including retries; unlimited by default."""
    tokens: Annotated[int, Field(ge=1, le=1_000_000_000_000)] | None = None
    """Tokens of prompts and answers as the endpoint counts them; requests in flight when it is spent are still answered."""
    on_exhausted: BudgetEnd = BudgetEnd.FAIL
    """What happens when the budget is spent."""


class Judge(SpecModel):
    """The judge of an LLMJudge reward."""

    endpoint: JudgeEndpoint | None = None
    """Server, if the model is served outside the job."""
    component: ComponentName | None = None
    """Component with role Judge that serves the model; set this or endpoint."""
    system: Template = ""
    """System message; none when empty."""
    template: Template
    """User message, with {question} from the data, {prompt} as given to the policy, {response} (the part that extraction finds), and
    {answer}; literal braces are {{ and }}."""
    sampling: FreeForm = Field(default={"temperature": 0.0, "max_tokens": 512})
    """Additional fields of the request, by the endpoint's names."""
    parser: JudgeParser
    """How its answer becomes a score."""
    limits: JudgeLimits = JudgeLimits()
    """Rate limits."""
    retries: JudgeRetries = JudgeRetries()
    """What happens when it does not answer."""
    budget: JudgeBudget = JudgeBudget()
    """Budget."""
    request_timeout_seconds: Positive = 120.0
    """Time limit for one request."""
    cache_entries: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Answers to identical questions that each reward process caches; 0 disables the cache."""


class RewardModel(SpecModel):
    """The model of a RewardModel reward."""

    endpoint: JudgeEndpoint | None = None
    """Server, if the model is served outside the job."""
    component: ComponentName | None = None
    """Component with role Judge that serves the model; set this or endpoint."""
    template: Template = ""
    """Text to score, with {question} from the data, {prompt} as given to the policy, {response} (the part that extraction finds), and
    {answer}; literal braces are {{ and }}. By default question and response in the model's own chat template."""
    label: Annotated[int, Field(ge=0, le=4095)] = 0
    """Which of the model's outputs is the score; most have one."""
    activation: bool = False
    """Score after the model's activation (sigmoid or softmax) instead of its raw output."""
    request: FreeForm = Field(default={})
    """Additional fields of the request, by the endpoint's names, such as truncate_prompt_tokens."""
    limits: JudgeLimits = JudgeLimits()
    """Rate limits; the server batches concurrent requests."""
    retries: JudgeRetries = JudgeRetries()
    """What happens when it does not answer."""
    budget: JudgeBudget = JudgeBudget()
    """Budget."""
    request_timeout_seconds: Positive = 60.0
    """Time limit for one request."""
    cache_entries: Annotated[int, Field(ge=0, le=10_000_000)] = 0
    """Scores of identical texts that each reward process caches; 0 disables the cache."""
