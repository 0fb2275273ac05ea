"""Model, data and rewards: what is learned from what."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from rljob_api.v1alpha1.base import (
    ABSOLUTE_PATH_PATTERN,
    FreeForm,
    FunctionPath,
    Label,
    PathText,
    Positive,
    ScoreOrDrop,
    ShortText,
    SpecModel,
    Text,
)
from rljob_api.v1alpha1.judges import Judge, RewardModel
from rljob_api.vocabulary import DROP, Extraction, RewardType


class DType(StrEnum):
    """Floating-point type of weights and computation."""

    FLOAT32 = "float32"
    """Exact; recommended for CPU devices."""
    BFLOAT16 = "bfloat16"
    """Half the memory, the range of float32."""
    FLOAT16 = "float16"
    """Half the memory, for engines on accelerators without bfloat16; not for training."""


def _trainable(value: object) -> object:
    """Anything but float16, in which small gradients vanish unless the loss is scaled."""
    if value == DType.FLOAT16.value:
        raise PydanticCustomError("float16_training", "is not a type that is trained in")
    return value


TrainedDType = Annotated[Literal[DType.FLOAT32, DType.BFLOAT16], BeforeValidator(_trainable)]
"""Type that a model is trained in."""


class Lora(SpecModel):
    """Low-rank adapters: train these instead of the full weights."""

    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """Rank of the update matrices."""
    alpha: Positive = 32.0
    """Scale: updates are multiplied by alpha / rank."""
    target_modules: tuple[ShortText, ...] = Field(default=(), max_length=64)
    """Module names that get an adapter; empty means all linear layers."""


class Model(SpecModel):
    """The policy to train."""

    path: PathText
    """A local Hugging Face folder (relative paths start at the working directory) or a Hub id owner/name, which every node downloads once
    before any worker starts."""
    revision: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Branch, tag or commit of a model on the Hub; its default branch when not set. A run keeps the commit it started with."""
    tokenizer_path: PathText | None = None
    """Tokenizer folder or Hub id, if it is not the model's."""
    tokenizer_revision: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Branch, tag or commit of a tokenizer on the Hub; its default branch when not set. A run keeps the commit it started with."""
    dtype: TrainedDType = DType.BFLOAT16
    """Type of the computation and of the engine's weights; the trainer keeps float32 master weights. bfloat16 has the range of float32 in
    half the memory; float32 is exact and recommended for CPU devices. Only engines can use float16 (engine.dtype)."""
    trust_remote_code: bool = False
    """Run Python code that is part of the model's files."""
    attention: ShortText = "sdpa"
    """Attention implementation of the trainer, by its Transformers name."""
    lora: Lora | None = None
    """Train adapters instead of all weights."""
    parameter_count: Annotated[int, Field(ge=1, le=100_000_000_000_000)] | None = None
    """Number of parameters, for the memory estimate if the model's config.json is not available, as in the operator."""


class DataSourceType(StrEnum):
    """Where prompts come from."""

    REASONING_GYM = "ReasoningGym"
    """Procedural, verified tasks of the reasoning-gym package."""
    JSONL = "JSONL"
    """A file with one JSON object per line."""
    PARQUET = "Parquet"
    """A Parquet file, or a folder of them."""


class ReasoningGym(SpecModel):
    """A reasoning-gym task."""

    task: ShortText
    """Name of the task, for example basic_arithmetic."""
    size: Annotated[int, Field(ge=1, le=100_000_000)] = 10_000
    """How many entries to sample before an epoch ends."""
    parameters: FreeForm = Field(default={})
    """Parameters of the task."""


class Jsonl(SpecModel):
    """A JSON-lines file."""

    path: PathText
    """The file; relative paths start at the working directory."""
    prompt_field: ShortText = "question"
    """Field with the question: text, or, with data.prompt.chatTemplate, a list of messages with role and content."""
    answer_field: ShortText = "answer"
    """Field with the reference answer; a field within others has their names in front, joined by dots (reward_model.ground_truth). Empty
    when no reward needs one."""
    tag_field: ShortText | None = None
    """Field with the entry's tag, which selects rewards; by default the tag is the name of the data source."""


class Parquet(Jsonl):
    """A Parquet file, or a folder whose *.parquet files are read in the order of their names."""

    path: PathText
    """The file or folder; relative paths start at the working directory."""


class DataSource(SpecModel):
    """One source of prompts; the field named after the type has its settings."""

    name: Label
    """Unique name, shown with the prompts' rewards."""
    type: DataSourceType
    """Where the prompts come from."""
    weight: Positive = 1.0
    """Share of the prompts relative to the other sources."""
    reasoning_gym: ReasoningGym | None = None
    """Settings of a ReasoningGym source."""
    jsonl: Jsonl | None = None
    """Settings of a JSONL source."""
    parquet: Parquet | None = None
    """Settings of a Parquet source."""

    @property
    def is_tagged(self) -> bool:
        """Whether its rows say the tags of their prompts, instead of its name."""
        return self.file is not None and self.file.tag_field is not None

    @property
    def file(self) -> Jsonl | None:
        """Settings of a source that is read from files."""
        return self.jsonl or self.parquet


class PromptFormat(SpecModel):
    """How a question becomes the text the model sees."""

    chat_template: bool = False
    """Use the tokenizer's chat template instead of the plain template."""
    system: Text = ""
    """System message for the chat template, for prompts without one of their own."""
    template_parameters: FreeForm = Field(default={})
    """Further arguments of the chat template, such as enable_thinking: false for Qwen3."""
    template: Text = "{question}"
    """Plain text around {question}."""


class Data(SpecModel):
    """Prompts."""

    train: tuple[DataSource, ...] = Field(default=(), max_length=64)
    """Sources of training prompts; at least one, unless training.steps is 0 or the job is agentic."""
    validation: tuple[DataSource, ...] = Field(default=(), max_length=64)
    """Sources of validation prompts."""
    prompt: PromptFormat = PromptFormat()
    """Format of all prompts."""


class Reward(SpecModel):
    """One reward; a sample's score is the weighted sum of the rewards that apply to its prompt's tag."""

    name: Label
    """Unique name, shown in metrics."""
    type: RewardType
    """How it scores a response."""
    sources: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = Field(default=(), max_length=256)
    """Tags of the prompts it scores: names of data sources, or values of jsonl.tagField; empty means all prompts."""
    weight: Annotated[float, Field(ge=-1e6, le=1e6)] = 1.0
    """Factor in the sum."""
    extraction: Extraction = Extraction.WHOLE
    """Part of the response that is scored; a Function always gets the whole response."""
    function: FunctionPath | None = None
    """module:function of a Function reward, importable from the job file's folder or the environment."""
    parameters: FreeForm = Field(default={})
    """Settings of a built-in type, or further keyword arguments of a Function or of a judge's parser.function."""
    judge: Judge | None = None
    """The judge of an LLMJudge reward."""
    reward_model: RewardModel | None = None
    """The model of a RewardModel reward."""
    timeout_seconds: Positive = 5.0
    """Time limit for one sample; a sample that exceeds it is retried once in a new process, then onTimeout applies. For an LLMJudge it is
    the limit for parsing the answer."""
    on_timeout: ScoreOrDrop | None = None
    """Score of a response on which the reward exceeded its limit twice, or Drop to drop the sample; 0 by default. Required with a negative
    weight."""
    on_error: ScoreOrDrop = DROP
    """Score of a response on which the reward failed, or Drop to drop the sample."""
    pass_threshold: Annotated[float, Field(ge=-1e6, le=1e6)] = 1.0
    """A response passes if its score by the first applicable reward is at least this."""
    network: bool = False
    """Let a Function use the network."""
    processes: bool = False
    """Let a Function start processes; they end with the scoring process."""
    read_paths: tuple[Annotated[str, Field(max_length=1024, pattern=ABSOLUTE_PATH_PATTERN)], ...] = Field(default=(), max_length=64)
    """Files and folders that a Function may read, in addition to Python, system libraries, and the job file's folder."""
    memory_bytes: Annotated[int, Field(ge=1 << 28, le=1 << 44)] = 8 << 30
    """Address space of the process that computes it; for rewards that share a process, the largest value applies."""
    disk_bytes: Annotated[int, Field(ge=1 << 20, le=1 << 44)] = 8 << 30
    """Total size of the files that the process may write; if it exceeds this it is killed, and onError applies. For rewards that share a
    process, the largest value applies."""

    @property
    def asked(self) -> Judge | RewardModel | None:
        """The model that the reward asks, if it asks one."""
        return self.judge or self.reward_model
