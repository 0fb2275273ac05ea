"""One episode's side of the endpoint: its calls one after the other, joined, bounded by its deadline."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rljob_runtime.environments.endpoint.answers import Finished
from rljob_runtime.environments.endpoint.chat import Chat, Said, read_tools
from rljob_runtime.environments.endpoint.conversation import Conversation, Place
from rljob_runtime.environments.endpoint.requests import ApiError, ChatRequest, CompletionRequest
from rljob_runtime.environments.messages import EpisodeAction
from rljob_runtime.environments.outcome import Call, Read
from rljob_runtime.records import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_KEPT_ANSWERS = 8
"""Of an episode: a client that lost a response asks for it again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What all sessions share."""

    name: str
    """Of the policy, in ``/v1/models``."""
    tokenizer: PreTrainedTokenizerBase
    """The endpoint's own: it is used by one thread."""
    chat: Chat
    max_calls: int
    """Of an episode."""
    max_tokens_per_call: int
    max_sample_tokens: int
    """Of a sample: prompt and responses together."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without any that it does not name."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def encode_first(self, text: str) -> list[int]:
        """Token ids of a text that begins a prompt without a template."""
        return list(self.tokenizer.encode(text, add_special_tokens=True))

    def decode(self, ids: IntArray) -> str:
        """Their text as a program reads it: without special tokens."""
        return str(self.tokenizer.decode(ids.tolist(), skip_special_tokens=True))


@dataclass(slots=True, eq=False)
class Session:
    """An episode's; used by the endpoint's thread, but for its construction."""

    key: str
    model: Model
    deadline: float
    """On the monotonic clock, which is the event loop's."""
    post: Callable[[Call | Read], None]
    """Hands over what the worker is to know; any thread."""
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    conversation: Conversation = field(init=False)
    num_calls: int = 0
    num_refused: int = 0
    """Calls that were answered with an error."""
    said: list[dict[str, str | int]] = field(default_factory=list)
    """For reward functions: of each call its sample, the text that its prompt added, the response."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _pending: asyncio.Future[EpisodeAction] | None = None
    _over: bool = False
    _answers: dict[bytes, asyncio.Task[Finished]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Begin an empty conversation."""
        self.conversation = Conversation(self.model.encode, self.model.chat.close)

    def begin(self, request: ChatRequest | CompletionRequest, digest: bytes, *, is_retry: bool) -> asyncio.Task[Finished]:
        """Have a call answered; a client's repetition of a call gets that one's answer, whose tokens it would else never see."""
        if is_retry and (known := self._answers.get(digest)) is not None and not (known.done() and known.exception()):
            return known
        task = asyncio.get_running_loop().create_task(self._bounded(request))
        self._answers.pop(digest, None)
        self._answers[digest] = task
        while len(self._answers) > _KEPT_ANSWERS:
            del self._answers[next(iter(self._answers))]
        return task

    def answer(self, action: EpisodeAction) -> None:
        """What the engines sampled for the call at work."""
        if self._pending is not None and not self._pending.done():
            self._pending.set_result(action)

    def end(self) -> None:
        """The episode is over: no further call is answered."""
        self._over = True
        if self._pending is not None and not self._pending.done():
            self._pending.set_exception(_over())

    async def _bounded(self, request: ChatRequest | CompletionRequest) -> Finished:
        """One call; raises ApiError."""
        try:
            async with asyncio.timeout_at(self.deadline), self._lock:
                return await self._answered(request)
        except TimeoutError as error:
            self.num_refused += 1
            raise ApiError(410, "the episode's time (episodeTimeoutSeconds) is over", code="episode_over") from error
        except ApiError:
            self.num_refused += 1
            raise

    async def _answered(self, request: ChatRequest | CompletionRequest) -> Finished:
        if self._over:
            raise _over()
        if self.num_calls >= self.model.max_calls:
            message = f"the episode had its {self.model.max_calls} calls (maxTurns); end with what there is"
            raise ApiError(410, message, code="episode_over")
        place = self._place(request)
        room = self.model.max_sample_tokens - len(place.prompt_ids)
        if room < 1:
            raise ApiError(
                400,
                f"the prompt has {len(place.prompt_ids)} tokens; prompt and responses together may have {self.model.max_sample_tokens} "
                "(rollout.maxPromptTokens and maxResponseTokens)",
                code="context_length_exceeded",
            )
        wants_logprobs = request.logprobs is not None and request.logprobs is not False
        action = await self._ask(
            Call(
                key=self.key,
                token_ids=place.token_ids,
                branch=place.branch,
                max_tokens=min(self.model.max_tokens_per_call, room, request.limit or room),
                wants_logprobs=wants_logprobs,
                text=place.text,
            )
        )
        shown, kept, stop = self._cut(action.token_ids, request.stops)
        ids = action.token_ids[:kept]
        hidden = self.model.decode(ids)[len(shown) :] if stop else ""
        self.conversation.sampled(place, ids, shown, tuple(dict.fromkeys(text for text in (hidden, stop) if text)))
        self.said.append({"sample": place.branch, "prompt": place.text, "response": shown})
        self.post(Read(key=self.key, text=shown, kept_tokens=kept))
        return self._finished(request, place, action, shown, ids)

    def _place(self, request: ChatRequest | CompletionRequest) -> Place:
        if isinstance(request, ChatRequest):
            return self.conversation.place(self.model.chat.prompt(request))
        if isinstance(request.prompt, str):
            return self.conversation.place(request.prompt, self.model.encode_first)
        if unknown := [token for token in request.prompt if token >= len(self.model.tokenizer)]:
            raise ApiError(400, f"prompt: the tokenizer has no token {unknown[0]}", param="prompt")
        return self.conversation.place_ids(request.prompt, self.model.decode)

    async def _ask(self, call: Call) -> EpisodeAction:
        self.num_calls += 1
        self._pending = asyncio.get_running_loop().create_future()
        try:
            self.post(call)
            return await self._pending
        finally:
            self._pending = None

    def _cut(self, ids: IntArray, stops: tuple[str, ...]) -> tuple[str, int, str]:
        """The text before the first stop string, how many tokens there are up to its end, and which one it is; all and "" without one."""
        text = self.model.decode(ids)
        found = min(((place, stop) for stop in stops if (place := text.find(stop)) >= 0), default=None)
        if found is None:
            return text, len(ids), ""
        low, high = 1, len(ids)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if found[1] in self.model.decode(ids[:middle]) else (middle + 1, high)
        return text[: found[0]], low, found[1]

    def _finished(
        self, request: ChatRequest | CompletionRequest, place: Place, action: EpisodeAction, shown: str, ids: IntArray
    ) -> Finished:
        uses_tools = isinstance(request, ChatRequest) and request.tools and request.tool_choice != "none"
        logprobs = None if action.logprobs is None else action.logprobs[: len(ids)].tolist()
        return Finished(
            call_id=f"{'chatcmpl' if isinstance(request, ChatRequest) else 'cmpl'}-{secrets.token_hex(12)}",
            created_s=int(time.time()),
            model=self.model.name,
            said=read_tools(shown) if uses_tools else Said(content=shown),
            finish_reason="stop" if len(ids) < len(action.token_ids) else action.finish_reason,
            num_prompt=len(place.prompt_ids),
            token_ids=ids.tolist(),
            prompt_token_ids=place.prompt_ids.tolist() if request.return_token_ids else None,
            logprobs=logprobs,
            token_texts=() if logprobs is None else [str(self.model.tokenizer.decode([token])) for token in ids.tolist()],
        )


def _over() -> ApiError:
    return ApiError(410, "the episode is over", code="episode_over")
