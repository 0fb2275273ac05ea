"""What a call asks for: the bodies of OpenAI's API as far as they are carried out; all else is refused by name.

Sources: OpenAI's API reference (chat completions, completions, errors); vLLM's names for ``top_k``, ``min_p``, ``chat_template_kwargs`` and
``return_token_ids``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

MAX_STOPS = 4


class ApiError(Exception):
    """Raised when a call cannot be carried out; becomes OpenAI's error object."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        """Name the HTTP status, and the parameter that is at fault where one is."""
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """The response's JSON."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSampling:
    """How the job samples, whatever a call asks for: the ratios of the policy loss are of this distribution."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    replaces: bool = False
    """Whether a call that asks for other sampling is served with the job's; else it is refused."""


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class StreamOptions(_Body):
    """Of a streamed response."""

    include_usage: bool = False


class _Call(_Body):
    """What both kinds of call have; None is what is left out."""

    model: str | None = None
    """Any name: there is one policy."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    """A label of the caller's; nothing depends on it."""
    return_token_ids: bool = False

    @property
    def stops(self) -> tuple[str, ...]:
        """Texts that end the response."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class ResponseFormat(_Body):
    """Of the response; only text can be had."""

    type: str


class FunctionDefinition(_Body):
    """A function that the policy may call."""

    name: Annotated[str, Field(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Body):
    """A tool that the policy may call."""

    type: Literal["function"]
    function: FunctionDefinition


class ChatRequest(_Call):
    """``POST /v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def limit(self) -> int | None:
        """Tokens of the response."""
        given = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return min(given, default=None)


class CompletionRequest(_Call):
    """``POST /v1/completions``."""

    prompt: str | list[Annotated[int, Field(ge=0)]]
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    logprobs: int | None = None

    @property
    def limit(self) -> int | None:
        """Tokens of the response."""
        return self.max_tokens


def parse(kind: type[ChatRequest] | type[CompletionRequest], body: object, sampling: JobSampling) -> ChatRequest | CompletionRequest:
    """A call's body.

    Raises:
        ApiError: it has a parameter that is unknown or not carried out, or another sampling than the job's; the message names all.
    """
    request = _validated(kind, body)
    refused = [*_refused(request), *([] if sampling.replaces else _other_sampling(request, sampling))]
    if refused:
        raise ApiError(400, "; ".join(why for _, why in refused), param=refused[0][0], code="unsupported_value")
    return request


def _validated(kind: type[ChatRequest] | type[CompletionRequest], body: object) -> ChatRequest | CompletionRequest:
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        unknown = [_name(item) for item in problems if item["type"] == "extra_forbidden"]
        if unknown:
            raise ApiError(400, f"unsupported parameter: {', '.join(unknown)}", param=unknown[0], code="unsupported_parameter") from error
        detail = "; ".join(f"{_name(item)}: {item['msg']}" for item in problems)
        raise ApiError(400, detail, param=_name(problems[0]), code="invalid_value") from error


def _refused(request: ChatRequest | CompletionRequest) -> list[tuple[str, str]]:
    """Known parameters with values that are not carried out, and why."""
    found: dict[str, str] = {}
    if request.n not in (None, 1):
        found["n"] = f"n is {request.n}: one response a call; call again for another"
    for name in ("presence_penalty", "frequency_penalty", "logit_bias"):
        if getattr(request, name):
            found[name] = f"{name} changes the distribution that is trained, and is not supported"
    if len(request.stops) > MAX_STOPS or not all(request.stops):
        found["stop"] = f"stop has {len(request.stops)} texts; at most {MAX_STOPS}, none of them empty"
    if request.stream_options is not None and not request.stream:
        found["stream_options"] = "stream_options is for stream: true"
    found |= _refused_chat(request) if isinstance(request, ChatRequest) else _refused_completion(request)
    return list(found.items())


def _refused_chat(request: ChatRequest) -> dict[str, str]:
    found: dict[str, str] = {}
    if request.response_format is not None and request.response_format.type != "text":
        found["response_format"] = f"response_format {request.response_format.type} is not supported, only text"
    if request.tool_choice not in (None, "auto", "none"):
        found["tool_choice"] = "tool_choice may be auto or none: a forced call is not the policy's choice"
    if request.parallel_tool_calls is False:
        found["parallel_tool_calls"] = "parallel_tool_calls false is not supported: the policy writes as many calls as it likes"
    if request.top_logprobs:
        found["top_logprobs"] = f"top_logprobs is {request.top_logprobs}: log-probs are those of the sampled tokens alone"
    return found


def _refused_completion(request: CompletionRequest) -> dict[str, str]:
    found: dict[str, str] = {}
    if request.echo:
        found["echo"] = "echo is not supported"
    if request.suffix:
        found["suffix"] = "suffix is not supported"
    if request.best_of not in (None, 1):
        found["best_of"] = f"best_of is {request.best_of}: one response a call"
    if request.logprobs:
        found["logprobs"] = f"logprobs is {request.logprobs}: log-probs are those of the sampled tokens alone; use 0"
    if not request.prompt:
        found["prompt"] = "prompt is empty"
    return found


def _other_sampling(request: ChatRequest | CompletionRequest, sampling: JobSampling) -> list[tuple[str, str]]:
    wanted: Mapping[str, float] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
    }
    remedy = "leave it out, or set harness.sampling: Job in the environment to have the job's used"
    found = []
    for name, own in wanted.items():
        given = getattr(request, name)
        if given is not None and given != own and not (name == "top_k" and given <= 0 and own == 0):
            found.append((name, f"{name} is {given:g}, and the job samples with {own:g}; {remedy}"))
    if request.seed is not None:
        found.append(("seed", f"seed is {request.seed}, and the job gives each response a seed of its own; {remedy}"))
    return found


def _name(item: Any) -> str:
    """Where in the body a problem of pydantic's is; variants of a union are no part of it."""
    parts = [str(part) for part in item["loc"] if not str(part).startswith(("list[", "constrained", "str", "dict["))]
    return ".".join(parts) or "body"
