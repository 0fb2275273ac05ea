"""Between texts and token ids: the prompt of an episode, what is appended after a response, the text of an action.

::

    first prompt        system, instruction, first observation, generation prompt
    ids sampled         ............................................... response [its close token]
    appended                                                            [close token] boundary, observation, generation prompt

Named invariant EXACT: sampled ids are decoded for the environment and never encoded again; what is appended depends on the response only
in whether its last id already closes it. Where turns have prompts of their own, each is like a first one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from string import Formatter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from rljob_api.vocabulary import CallFormat
from rljob_runtime.environments import turn_prompts
from rljob_runtime.environments.protocol import Turn
from rljob_runtime.environments.templates import Message, TemplateClass, classify, suffix, user_message
from rljob_runtime.environments.tool_calls import CLOSE, OPEN, Tool, describes_calls, prompt_part, prompt_part_tags
from rljob_runtime.environments.turn_prompts import Memory, PastTurn
from rljob_runtime.errors import EnvironmentSetupError
from rljob_runtime.records import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TURN_FIELDS = ("observation", "turn_idx", "suffix", "actions_left", "max_response_length")
"""What a turn's template may name, in braces; ROLL's names."""
_KEPT_TEXTS, _KEPT_CHARACTERS = 4096, 4096
"""How many texts a codec keeps the token ids of, and how long they are at most: some 50 MB."""
_PROBES = ("north", " spaced out \n", "two\nlines")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSettings:
    """What the policy reads besides observations."""

    chat_template: bool = True
    """Whether the tokenizer's chat template is used; False: the texts alone, a response ending with the end-of-sequence token."""
    system: str = ""
    """The system message; empty: none."""
    instruction: str | None = None
    """In front of the first observation, with a new line between; None: the environment's own, empty: none."""
    turn: str = "{observation}"
    """Text of each user message, with fields of ``TURN_FIELDS``."""
    memory: Memory | None = None
    """Where each turn is a prompt of its own: what it shows of those before it, in further fields of ``turn``. None: each turn is appended
    to what there was."""
    template_parameters: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template, such as ``enable_thinking``."""
    tools: tuple[Tool, ...] = ()
    """What the policy may call; results then follow responses."""
    call_format: CallFormat = CallFormat.TOOL_CALL
    """How it calls them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where in an episode an observation is read."""

    turn: int
    """Number of actions taken."""
    actions_left: int
    max_tokens: int
    """Of the next response."""


class Codec:
    """The tokenizer and template of one environment; used by one thread."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, settings: PromptSettings) -> None:
        """Find out what the template does; raises EnvironmentSetupError where it cannot serve."""
        self._tokenizer, self._settings = tokenizer, settings
        self._check(tokenizer, settings)
        self._tool_role, self._described = "tool", list[dict[str, Any]]()
        self._described, self._tools_text = self._describe_tools()
        system = "\n\n".join(part for part in (settings.system, self._tools_text) if part and settings.chat_template)
        self._opening: list[Message] = [{"role": "system", "content": system}] if system else []
        self._frames: dict[str, _Frame | None] = {}
        # All members of a group read the same first prompt, and most observations more than once.
        self._kept = lru_cache(_KEPT_TEXTS)(self._tokenized)
        special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
        self._spoken = (
            {i: token for i, token in zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True) if token in (OPEN, CLOSE)}
            if settings.tools
            else {}
        )
        if settings.chat_template:
            try:
                self._tool_role = self._role_of_tools()
                self.template_class = classify(self._render, self._opening, self._tool_message if settings.tools else user_message)
                behind = suffix(self._render, self._opening, [user_message("question")])
            except Exception as error:  # whatever a template raises
                raise EnvironmentSetupError(
                    f"prompt: the chat template of {_name(tokenizer)} does not take a conversation of system, user and assistant messages: "
                    f"{error}; set prompt.chatTemplate: false or use another model"
                ) from error
            boundary = self._encode(behind.partition("question")[0])
            self.close_token_id: int | None = next((token for token in boundary if token in special), None)
        else:
            self.template_class = TemplateClass.PLAIN
            self.close_token_id = tokenizer.eos_token_id

    def first_prompt(self, turn: Turn, place: Place) -> IntArray:
        """Token ids, shape (n,), of everything before the first response."""
        instruction = self._instruction(turn)
        return self._prompt((f"{instruction}\n" if instruction else "") + self._fill(turn, place))

    def own_prompt(self, first: Turn, turn: Turn, place: Place, past: Sequence[PastTurn]) -> IntArray:
        """Token ids, shape (n,), of everything before a response where each turn is a prompt of its own.

        Args:
            first: what the reset led to, for its instruction.
            turn: what the last action led to.
            place: of the response.
            past: the last turns, as many as the memory has.
        """
        memory, instruction = self._settings.memory, self._instruction(first)
        assert memory is not None
        more = turn_prompts.fields(memory, past, instruction=instruction, observation=turn.observation, taken=place.turn)
        return self._prompt(self._fill(turn, place, more))

    def _instruction(self, first: Turn) -> str:
        return first.instruction if self._settings.instruction is None else self._settings.instruction

    def _prompt(self, text: str) -> IntArray:
        if not self._settings.chat_template:
            text = f"{self._tools_text}\n\n{text}" if self._tools_text else text
            return np.asarray(self._encode(text, begins=True), dtype=np.int32)
        return np.asarray(self._encode(self._render([*self._opening, {"role": "user", "content": text}])), dtype=np.int32)

    def continuation(self, last_token_id: int | None, turn: Turn, place: Place) -> IntArray:
        """Token ids, shape (n,), from the end of a response to the beginning of the next.

        Args:
            last_token_id: the last id that was sampled; None where the response is empty.
            turn: what the action led to.
            place: of the next response.
        """
        contents = (turn.results or (turn.observation,)) if turn.role == "tool" else (self._fill(turn, place),)
        if not self._settings.chat_template:
            ids = [] if self.close_token_id is None else [self.close_token_id]
            ids += self._encode("\n".join(contents))
        else:
            ids = self._encode(self._suffix(turn.role, contents))
        if self.close_token_id is not None and last_token_id == self.close_token_id:
            ids = ids[ids.index(self.close_token_id) + 1 :]
        return np.asarray(ids, dtype=np.int32)

    def text(self, token_ids: IntArray) -> str:
        """What was sampled, shape (n,), as an environment reads it: without special tokens other than those of tool calls."""
        pieces, start = [], 0
        ids = token_ids.tolist()
        for place, token in enumerate(ids):
            if token in self._spoken:
                pieces += [self._decoded(ids[start:place]), self._spoken[token]]
                start = place + 1
        return "".join([*pieces, self._decoded(ids[start:])])

    def _decoded(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _describe_tools(self) -> tuple[list[dict[str, Any]], str]:
        """What the template gets as its tools, or the text that describes them in its place."""
        tools = self._settings.tools
        if not tools:
            return [], ""
        if self._settings.call_format is CallFormat.TAGS:
            return [], prompt_part_tags(tools)
        described = [tool.described() for tool in tools]
        if self._settings.chat_template:
            with contextlib.suppress(Exception):  # a template that takes no tools may raise anything
                shown = self._render([user_message("question")], described)
                # Templates with calls of another form would teach what nobody reads.
                if describes_calls(shown) and all(tool.name in shown for tool in tools):
                    return described, ""
        return [], prompt_part(tools)

    def _role_of_tools(self) -> str:
        """``tool``, or ``user`` where the template takes no such message."""
        with contextlib.suppress(Exception):  # whatever a template raises
            if "CONTENT" in suffix(self._render, self._opening, [{"role": "tool", "content": "CONTENT"}]):
                return "tool"
        return "user"

    def _tool_message(self, content: str) -> Message:
        if self._tool_role == "tool":
            return {"role": "tool", "content": content}
        return user_message(f"<tool_response>\n{content}\n</tool_response>")

    def _fill(self, turn: Turn, place: Place, more: Mapping[str, str | int] = MappingProxyType({})) -> str:
        return self._settings.turn.format(
            observation=turn.observation,
            turn_idx=place.turn + 1,
            suffix=turn.suffix,
            actions_left=place.actions_left,
            max_response_length=place.max_tokens,
            **more,
        )

    def _suffix(self, role: str, contents: Sequence[str]) -> str:
        message = self._tool_message if role == "tool" else user_message
        if len(contents) > 1 and self._tool_role == "tool":
            return suffix(self._render, self._opening, [message(content) for content in contents])
        if len(contents) > 1:  # users do not speak twice in a row
            joined = "\n".join(message(content)["content"] for content in contents)
            return suffix(self._render, self._opening, [user_message(joined)])
        if role not in self._frames:
            self._frames[role] = _find_frame(lambda text: suffix(self._render, self._opening, [message(text)]))
        frame, (content,) = self._frames[role], contents
        if frame is None:
            return suffix(self._render, self._opening, [message(content)])
        return frame.before + (content.strip() if frame.strips else content) + frame.after

    def _render(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
        described = list(tools or self._described)
        return str(
            self._tokenizer.apply_chat_template(
                list(messages),
                tokenize=False,
                add_generation_prompt=True,
                **({"tools": described} if described else {}),
                **self._settings.template_parameters,
            )
        )

    def _encode(self, text: str, *, begins: bool = False) -> list[int]:
        """A list of the caller's own; only where it begins a prompt without a template with the tokenizer's special tokens around it."""
        return list((self._kept if len(text) <= _KEPT_CHARACTERS else self._tokenized)(text, begins))

    def _tokenized(self, text: str, begins: bool) -> tuple[int, ...]:
        text = text.encode(errors="replace").decode()  # half a surrogate pair, as JSON may have it, cannot be encoded
        if begins:
            return tuple(self._tokenizer.encode(text, add_special_tokens=True))
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is not None:  # a third of the time
            return tuple(backend.encode(text, add_special_tokens=False).ids)
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))

    @staticmethod
    def _check(tokenizer: PreTrainedTokenizerBase, settings: PromptSettings) -> None:
        """Refuse settings that cannot be met.

        Raises:
            EnvironmentSetupError: they cannot.
        """
        if settings.chat_template and not tokenizer.chat_template:
            raise EnvironmentSetupError(
                f"prompt: chatTemplate is true but the tokenizer {_name(tokenizer)} has no chat template; "
                f"set chatTemplate: false or use an instruction-tuned model"
            )
        if not settings.chat_template and settings.system:
            raise EnvironmentSetupError("prompt: system is set but chatTemplate is false, so it would never be used; remove one of them")
        try:
            named = {name for _, name, _, _ in Formatter().parse(settings.turn) if name is not None}
        except ValueError as error:
            raise EnvironmentSetupError(f"prompt.turn is not a template: {error}; write {{{{ for a brace") from error
        known = TURN_FIELDS if settings.memory is None else (*TURN_FIELDS, *turn_prompts.FIELDS)
        if unknown := sorted(named - set(known)):
            raise EnvironmentSetupError(f"prompt.turn names {', '.join(unknown)}; it may name {', '.join(known)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """What a template puts around a message's content."""

    before: str
    after: str
    strips: bool
    """Whether white space around the content goes."""


def _find_frame(suffix_of: Callable[[str], str]) -> _Frame | None:
    """The frame that explains some contents; None where the template does more, and has to be asked each time."""
    before, found, after = suffix_of("CONTENT").partition("CONTENT")
    for strips in (False, True):
        frame = _Frame(before=before, after=after, strips=strips)
        if found and all(suffix_of(probe) == before + (probe.strip() if strips else probe) + after for probe in _PROBES):
            return frame
    return None


def _name(tokenizer: PreTrainedTokenizerBase) -> str:
    return repr(tokenizer.name_or_path or type(tokenizer).__name__)
