"""Environments of agentic jobs: which tasks the policy acts in, over several turns, and what it reads and gets for it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated

from pydantic import Field

from rljob_api.v1alpha1.base import (
    ABSOLUTE_PATH_PATTERN,
    FreeForm,
    FunctionPath,
    Label,
    NonNegative,
    PathText,
    Positive,
    ScoreOrDrop,
    ShortText,
    SpecModel,
    Text,
)
from rljob_api.v1alpha1.conversations import ChatParameters, Parameters, ToolUseParameters
from rljob_api.v1alpha1.pods import EnvVar
from rljob_api.vocabulary import DROP, EnvironmentType, HarnessSampling, PromptHistory, PromptMemory

Symbols = Annotated[dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=256)]], Field(max_length=64)]
"""Texts by a key."""


class EnvironmentPrompt(SpecModel):
    """What the policy reads."""

    chat_template: bool = True
    """Make a conversation of it by the tokenizer's chat template; else the texts follow each other, with the end-of-sequence token
    behind each response."""
    system: Text = ""
    """System message; none when empty."""
    instruction: Text | None = None
    """Before the first observation; the environment's own when not set, none when empty."""
    turn: Text = "{observation}"
    """The user message of a turn; the first one comes after the environment's instruction. Filled in are {observation}, {turn_idx} from 1
    on, {actions_left}, {max_response_length} in tokens and {suffix} of the environment. With history Turn the instruction stands where
    {env_instruction} does, and {current_observation}, {history}, {history_length}, {step_count} and {current_step} are filled in, too."""
    history: PromptHistory = PromptHistory.KEEP
    """What a turn sees of those before."""
    memory_turns: Annotated[int, Field(ge=0, le=10_000)] = 0
    """With history Turn: so many turns before the current one may be in {history}."""
    memory: PromptMemory = PromptMemory.TURNS
    """With history Turn: what {history} has of them."""


class EnvironmentRewards(SpecModel):
    """What an episode gets besides the environment's own rewards."""

    format_penalty: Annotated[float, Field(ge=-1e6, le=0.0)] = 0.0
    """Added to the reward of a turn whose action the environment does not understand."""
    on_error: ScoreOrDrop = DROP
    """Score of an episode whose environment failed twice or ran past a limit of time, or Drop to leave the episode out."""


class Harness(SpecModel):
    """A program that plays episodes: it finds the policy at OPENAI_BASE_URL and its task at RLJOB_TASK; see docs/agents.md."""

    command: Annotated[tuple[Annotated[str, Field(max_length=4096)], ...], Field(min_length=1, max_length=256)]
    """Program and arguments, started for each episode without a shell."""
    working_folder: PathText | None = None
    """Folder in which it starts; when not set the job file's, in a cluster a temporary one."""
    env: Annotated[tuple[EnvVar, ...], Field(max_length=64)] = ()
    """Environment variables besides those that RLJob sets; it inherits none, and a Secret cannot be given to it."""
    tasks: PathText | None = None
    """JSON Lines file with a task in each line, of which the episode's seed chooses one; relative paths start at the working directory.
    When not set the seed is the task."""
    reward: FunctionPath | None = None
    """Function that gives the reward of an episode whose program ended well, from its task and what was said; when not set the program's
    own file."""
    sampling: HarnessSampling = HarnessSampling.REFUSE
    """What becomes of a call with another temperature, top_p, top_k, min_p or with a seed: training needs samples of one distribution."""


class Environment(SpecModel):
    """An environment of an agentic job."""

    name: Label
    """Unique name, shown in metrics."""
    type: Annotated[str, Field(min_length=1, max_length=256)]
    """FrozenLake, Sokoban, ReasoningGym, ToolUse, Chat, Harness for an agent program, or module:Class of an environment of your own, found
    in the job file's folder or on the Python path."""
    share: NonNegative = 1.0
    """Share of the training groups relative to the other environments; 0 plays it in validation alone."""
    validation_share: NonNegative = 0.0
    """Share of the validation prompts relative to the other environments; 0 plays it in training alone."""
    max_turns: Annotated[int, Field(ge=1, le=10_000)] = 20
    """Turns after which an episode ends; of a Harness calls that are answered."""
    max_tokens_per_turn: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Responses of one turn are cut here; when not set at rollout.maxResponseTokens."""
    step_timeout_seconds: Positive = 60.0
    """Limit for one reset or step of the environment; its process is killed then, and the episode tried once more with the same seed. Of a
    Harness the limit from a response to the program's next call or its end; the episode fails then."""
    episode_timeout_seconds: Positive = 1800.0
    """Limit for an episode from its reset on; it ends then with the rewards that it has, and the episode of a Harness fails."""
    prompt: EnvironmentPrompt = EnvironmentPrompt()
    """What the policy reads."""
    rewards: EnvironmentRewards = EnvironmentRewards()
    """What an episode gets besides the environment's rewards."""
    parameters: FreeForm = Field(default={})
    """Parameters of a built-in type, see docs/agents.md, or keyword arguments of the class."""
    harness: Harness | None = None
    """The program of type Harness."""
    network: bool = False
    """Let a class or program of your own, or functions and users of ToolUse and Chat, use the network; without it a program reaches the
    policy's endpoint alone."""
    processes: bool = False
    """Let a class of your own, or functions and users of ToolUse and Chat, start processes; they end with the environment's process."""
    read_paths: tuple[Annotated[str, Field(max_length=1024, pattern=ABSOLUTE_PATH_PATTERN)], ...] = Field(default=(), max_length=64)
    """Files and folders that code of your own may read besides Python, the system's libraries and the job file's folder."""
    memory_bytes: Annotated[int, Field(ge=1 << 28, le=1 << 44)] = 8 << 30
    """Address space of a process with code of your own."""
    disk_bytes: Annotated[int, Field(ge=1 << 20, le=1 << 44)] = 8 << 30
    """Disk space of all files that a process with code of your own writes; one with more is killed."""
    max_processes: Annotated[int, Field(ge=1, le=4096)] = 64
    """Processes that one worker has for a class or programs of your own, or for tools, users and scores of ToolUse and Chat; what is beyond
    waits."""
    episodes_per_process: Annotated[int, Field(ge=1, le=4096)] = 1
    """Episodes of a class of your own that share a process, one call after the other."""


class ActionParameters(Parameters):
    """What environments have in common that look for an action in a response."""

    action_pattern: Annotated[str, Field(min_length=1, max_length=1024)] = "<answer>(.*?)</answer>"
    """Regular expression with one group, the action, or two, the reasoning before it and the action; the first match counts."""
    special_token_list: Annotated[tuple[ShortText, ...], Field(max_length=64)] | None = None
    """Texts that are taken out of a response before."""


class GridParameters(ActionParameters):
    """What the grid games have in common."""

    max_steps: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Actions after which the game itself ends; Sokoban's own value is 20."""
    env_instruction: Text | None = None
    """The rules, before the meaning of the symbols and the actions."""
    grid_lookup: Symbols | None = None
    """Text of each kind of cell, by its number as text."""
    grid_vocab: Symbols | None = None
    """Meaning of each text, for the instruction."""
    action_lookup: Symbols | None = None
    """Name of each action, by its number as text; read without regard to case."""


class FrozenLakeParameters(GridParameters):
    """A lake to cross on a grid, start and goal anywhere; another map for each seed."""

    size: Annotated[int, Field(ge=2, le=64)] = 4
    """Rows and columns."""
    p: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    """Share of cells that are frozen, not holes."""
    is_slippery: bool = True
    """Whether a step goes to either side two times out of three."""
    map_seed: Annotated[int, Field(ge=0, le=2_147_483_647)] | None = None
    """Seed of one map for all episodes; not set: a map for each seed."""
    map_lookup: Annotated[dict[Annotated[str, Field(max_length=1)], int], Field(max_length=4)] | None = None
    """Number of the cells P, F (frozen), H (hole) and G (goal) in grid_lookup."""


class SokobanParameters(GridParameters):
    """A room with boxes to push onto targets; another one for each seed."""

    dim_room: tuple[Annotated[int, Field(ge=4, le=64)], Annotated[int, Field(ge=4, le=64)]] = (10, 10)
    """Rows and columns, walls with them."""
    num_boxes: Annotated[int, Field(ge=1, le=64)] = 4
    """Boxes, and targets."""
    search_depth: Annotated[int, Field(ge=2, le=100_000)] = 300
    """Moves that the search for a room looks ahead: the larger, the farther boxes can be from their targets."""
    num_gen_steps: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Length of the walk that clears the floor; when not set 1.7 times rows plus columns."""


class ReasoningGymParameters(ActionParameters):
    """A question of a reasoning-gym task, and as many attempts as allowed."""

    task: Annotated[str, Field(min_length=1, max_length=256)]
    """Name of the task, for example basic_arithmetic."""
    size: Annotated[int, Field(ge=1, le=100_000_000)] = 500
    """Entries; an episode's seed chooses one."""
    seed: Annotated[int, Field(ge=0, le=2_147_483_647)] = 42
    """Of the entries."""
    parameters: FreeForm = Field(default={})
    """Of the task."""
    max_attempts: Annotated[int, Field(ge=1, le=10_000)] = 1
    """Answers after which the episode ends."""
    pass_score: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Score from which on an answer is right and ends the episode."""
    retry_text: Text = "That is not right. Try again."
    """Observation after another answer."""


PARAMETERS: Mapping[EnvironmentType, type[Parameters]] = MappingProxyType(
    {
        EnvironmentType.FROZEN_LAKE: FrozenLakeParameters,
        EnvironmentType.SOKOBAN: SokobanParameters,
        EnvironmentType.REASONING_GYM: ReasoningGymParameters,
        EnvironmentType.TOOL_USE: ToolUseParameters,
        EnvironmentType.CHAT: ChatParameters,
    }
)
"""Parameters by built-in type that has some."""
