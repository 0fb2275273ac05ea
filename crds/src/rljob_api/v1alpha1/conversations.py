"""Parameters of the environments that are conversations: ToolUse and Chat. Tasks, tools, users and what scores an answer."""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from rljob_api.v1alpha1.base import FUNCTION_PATTERN, FreeForm, FunctionPath, PathText, ShortText, Text
from rljob_api.vocabulary import REWARD_PARAMETERS, CallFormat, Extraction, RewardType, ToolType

SCRIPT, MODEL = "Script", "Model"
"""Users of a chat besides classes: the task's own turns, and a language model."""
_Seconds = Annotated[float, Field(gt=0.0, le=3600.0)]
_NAME_PATTERN = r"^[A-Za-z_][A-Za-z0-9_-]*$"
_OF_TYPE: dict[str, tuple[ToolType, ...]] = {
    "memory_bytes": (ToolType.PYTHON,),
    "corpus": (ToolType.SEARCH,),
    "text_field": (ToolType.SEARCH,),
    "top_k": (ToolType.SEARCH,),
    "function": (ToolType.FUNCTION,),
    "parameters": (ToolType.FUNCTION,),
    "timeout_s": (ToolType.PYTHON, ToolType.FUNCTION),
}


class Parameters(BaseModel):
    """Parameters of a built-in environment (``environments[].parameters``). None means the environment's own default."""

    model_config = ConfigDict(allow_inf_nan=False, extra="forbid", frozen=True, strict=True)


class Scoring(Parameters):
    """What scores an answer; fields are those of ``rewards[]``."""

    type: RewardType
    """One of the types of rewards[]."""
    extraction: Extraction = Extraction.WHOLE
    """Part of the answer that is scored; a Function gets the whole answer."""
    tag: Annotated[str, Field(min_length=1, max_length=64, pattern=r"^\w+$")] = "answer"
    """Name of the tag, for extraction Tag."""
    function: FunctionPath | None = None
    """module:function of type Function, called with prompt, response, answer, metadata (with ``messages``, the whole conversation) and
    parameters."""
    parameters: FreeForm = Field(default={})
    """Settings of the type, or keyword arguments of the function."""
    timeout_s: _Seconds = 10.0
    """Time limit for one answer; if it is exceeded, the score is 0."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.type in (RewardType.LLM_JUDGE, RewardType.REWARD_MODEL):
            raise ValueError(
                f"type {self.type} scores responses of rewards[] alone; ask the model from a class of your own (docs/agents.md)"
            )
        if (self.type is RewardType.FUNCTION) != (self.function is not None):
            raise ValueError(f"type {self.type} with function {self.function}: type Function needs one, the others have none")
        if self.tag != "answer" and self.extraction is not Extraction.TAG:
            raise ValueError(f"tag {self.tag} has no effect with extraction {self.extraction}; remove it, or write extraction: Tag")
        known = REWARD_PARAMETERS.get(self.type)
        for name, value in self.parameters.items() if known is not None else ():
            if name not in known:  # type: ignore[operator]
                raise ValueError(f"type {self.type} has no parameter {name}; it takes {', '.join(known or ()) or 'none'}")
            if type(value) not in known[name]:  # type: ignore[index]
                raise ValueError(f"parameter {name} of type {self.type} cannot be {value!r}")
        return self


class ConversationParameters(Parameters):
    """What ToolUse and Chat have in common: a task for each seed, and what scores its answer."""

    path: PathText | None = None
    """JSONL file with a task on each line; fields besides prompt and answer are its metadata. A relative path is below the folder in which
    the job was started."""
    prompt_field: ShortText = "question"
    """Field of the prompt."""
    answer_field: ShortText | None = "answer"
    """Field of the reference answer; null if scoring needs none."""
    task: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Name of a reasoning-gym task instead of a file."""
    size: Annotated[int, Field(ge=1, le=100_000_000)] = 500
    """Entries of the reasoning-gym task."""
    seed: Annotated[int, Field(ge=0, le=2_147_483_647)] = 42
    """Of those entries."""
    parameters: FreeForm = Field(default={})
    """Of the reasoning-gym task."""
    reward: Scoring | None = None
    """What scores the answer."""

    @property
    def has_own_code(self) -> bool:
        """Whether something of the user's own is run."""
        return self.reward is not None and self.reward.function is not None

    @model_validator(mode="after")
    def _check_tasks(self) -> Self:
        if (self.path is None) == (self.task is None):
            raise ValueError("tasks come from either path, a JSONL file, or task, the name of a reasoning-gym task; give one of them")
        if self.task is None and {"size", "seed", "parameters"} & self.model_fields_set:
            raise ValueError("size, seed and parameters are those of a reasoning-gym task; remove them, or give task instead of path")
        if self.path is None and {"prompt_field", "answer_field"} & self.model_fields_set:
            raise ValueError("prompt_field and answer_field are those of a file; remove them, or give path instead of task")
        if self.reward is not None and self.reward.type is RewardType.TASK and self.task is None:
            raise ValueError("reward type Task scores entries of reasoning-gym; write another type, or give task instead of path")
        return self


class Tool(Parameters):
    """A tool of ToolUse."""

    type: ToolType
    name: Annotated[str, Field(max_length=64, pattern=_NAME_PATTERN)] | None = None
    """Name by which the policy calls it; by default the type in lower case, or the function's own name."""
    description: Text | None = None
    """Description for the policy."""
    timeout_s: _Seconds = 5.0
    """Time limit for one call of Python or Function; if it is exceeded, the result says so."""
    memory_bytes: Annotated[int, Field(ge=1 << 27, le=1 << 40)] = 1 << 30
    """Address space of one program of Python."""
    corpus: PathText | None = None
    """JSONL file that Search finds passages in, one on each line."""
    text_field: ShortText = "text"
    """Field of a passage's text."""
    top_k: Annotated[int, Field(ge=1, le=100)] = 3
    """Passages that Search returns."""
    function: FunctionPath | None = None
    """module:function of type Function, called with the arguments as keywords."""
    parameters: FreeForm | None = None
    """JSON Schema of the function's arguments."""

    @property
    def called(self) -> str:
        """The name that the policy calls it by."""
        return self.name or (self.function.partition(":")[2] if self.function else self.type.lower())

    @model_validator(mode="after")
    def _check(self) -> Self:
        for field, types in _OF_TYPE.items():
            if field in self.model_fields_set and self.type not in types:
                raise ValueError(f"{field} belongs to type {' and '.join(types)}, the type is {self.type}; remove it")
        if self.type is ToolType.SEARCH and self.corpus is None:
            raise ValueError("type Search lacks its corpus; write the path of a JSONL file of passages")
        if self.type is ToolType.FUNCTION and (self.function is None or not self.parameters or not self.description):
            raise ValueError("type Function lacks some of function, description and parameters; give all, parameters as JSON Schema")
        if self.parameters is not None and self.parameters.get("type") != "object":
            raise ValueError("parameters are no JSON Schema of an object; write {type: object, properties: {...}}")
        return self


class ToolUseParameters(ConversationParameters):
    """A question that is answered with the help of tools; a response without a call is the answer."""

    tools: Annotated[tuple[Tool, ...], Field(max_length=32)]
    """Available tools."""
    call_format: CallFormat = CallFormat.TOOL_CALL
    """How it is called."""
    max_calls: Annotated[int, Field(ge=1, le=10_000)] = 10
    """Maximum number of calls that are executed; the result of any further call says that none is left."""
    max_result_characters: Annotated[int, Field(ge=1, le=1_000_000)] = 4096
    """Longer results are cut in the middle."""

    @property
    def has_own_code(self) -> bool:
        """Whether something of the user's own is run."""
        return super().has_own_code or any(tool.type is ToolType.FUNCTION for tool in self.tools)

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        if not self.tools:
            raise ValueError("tools is empty; name some, or write type: Chat for questions without tools")
        names = [tool.called for tool in self.tools]
        if double := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two tools are named {double[0]}; give one of them another name")
        functions = [tool.called for tool in self.tools if tool.type is ToolType.FUNCTION]
        if self.call_format is CallFormat.TAGS and functions:
            raise ValueError(f"call_format Tags has one text as argument, and {functions[0]} is a Function; write call_format: ToolCall")
        if self.reward is None:
            raise ValueError("reward is missing, and nothing would score the answer; add for example {type: MathRule}")
        return self


class ChatParameters(ConversationParameters):
    """A conversation with a user, whose first message is the task's prompt."""

    user: Annotated[str, Field(min_length=1, max_length=256)] = SCRIPT
    """Script: further messages of a task are in turns_field. module:Class: your own user."""
    user_parameters: FreeForm = Field(default={})
    """Keyword arguments of that class."""
    turns_field: ShortText = "turns"
    """Field with the further messages of the user, a list of texts; a task without it is a single question."""

    @property
    def has_own_code(self) -> bool:
        """Whether something of the user's own is run."""
        return super().has_own_code or self.user != SCRIPT

    @model_validator(mode="after")
    def _check_user(self) -> Self:
        if self.user == MODEL:
            raise ValueError(
                "a language model as user is not supported yet; write a module:Class that asks an endpoint of yours, with network: true"
            )
        if self.user != SCRIPT and not re.fullmatch(FUNCTION_PATTERN, self.user):
            raise ValueError(f"user {self.user} is neither Script nor module:Class")
        if self.user == SCRIPT and self.user_parameters:
            raise ValueError("user_parameters are those of a class, and user is Script; remove them")
        if self.user != SCRIPT and "turns_field" in self.model_fields_set:
            raise ValueError(f"turns_field is that of user Script, and user is {self.user}; remove it")
        if self.user == SCRIPT and self.reward is None:
            raise ValueError("reward is missing, and nothing would score a scripted chat; add for example {type: ExactMatch}")
        return self
