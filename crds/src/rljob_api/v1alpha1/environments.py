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
    """Format the episode as a conversation with the tokenizer's chat template; otherwise texts are concatenated, with the end-of-sequence
    token after each response."""
    system: Text = ""
    """System message; none when empty."""
    instruction: Text | None = None
    """Text before the first observation; by default the environment's own, none if empty."""
    turn: Text = "{observation}"
    """The user message of a turn; the first one follows the environment's instruction. Placeholders: {observation}, {turn_idx} (from 1),
    {actions_left}, {max_response_length} (in tokens), and {suffix} of the environment. With history Turn also {env_instruction} for the
    instruction, {current_observation}, {history}, {history_length}, {step_count}, and {current_step}."""
    history: PromptHistory = PromptHistory.KEEP
    """What a turn shows of earlier turns."""
    memory_turns: Annotated[int, Field(ge=0, le=10_000)] = 0
    """With history Turn: maximum number of earlier turns in {history}."""
    memory: PromptMemory = PromptMemory.TURNS
    """With history Turn: what {history} contains of each."""


class EnvironmentRewards(SpecModel):
    """What an episode gets besides the environment's own rewards."""

    format_penalty: Annotated[float, Field(ge=-1e6, le=0.0)] = 0.0
    """Added to the reward of a turn whose action the environment cannot parse."""
    on_error: ScoreOrDrop = DROP
    """Score of an episode whose environment failed twice or exceeded a time limit, or Drop to drop the episode."""


class Harness(SpecModel):
    """A program that plays episodes: it finds the policy at OPENAI_BASE_URL and its task at RLJOB_TASK; see docs/agents.md."""

    command: Annotated[tuple[Annotated[str, Field(max_length=4096)], ...], Field(min_length=1, max_length=256)]
    """Program and arguments, started for each episode without a shell."""
    working_folder: PathText | None = None
    """Working directory; by default the job file's folder, on a cluster a temporary one."""
    env: Annotated[tuple[EnvVar, ...], Field(max_length=64)] = ()
    """Environment variables in addition to those that RLJob sets; none are inherited, and Secrets are not supported."""
    tasks: PathText | None = None
    """JSON Lines file with one task per line; the episode's seed selects one. Relative paths start at the working directory. Without a
    file, the seed is the task."""
    reward: FunctionPath | None = None
    """Function that computes the reward of an episode whose program exited with code 0, from its task and its calls; by default the program
    writes the reward to a file."""
    sampling: HarnessSampling = HarnessSampling.REFUSE
    """Calls with a different temperature, top_p, top_k, or min_p, or with a seed: training needs samples from one distribution."""


class Environment(SpecModel):
    """An environment of an agentic job."""

    name: Label
    """Unique name, shown in metrics."""
    type: Annotated[str, Field(min_length=1, max_length=256)]
    """FrozenLake, Sokoban, ReasoningGym, ToolUse, Chat, Harness for an agent program, or module:Class for your own environment, found in
    the job file's folder or on the Python path."""
    share: NonNegative = 1.0
    """Share of the training groups relative to the other environments; 0: only in validation."""
    validation_share: NonNegative = 0.0
    """Share of the validation prompts relative to the other environments; 0: only in training."""
    max_turns: Annotated[int, Field(ge=1, le=10_000)] = 20
    """Turns after which an episode ends; for a Harness, the number of calls that are answered."""
    max_tokens_per_turn: Annotated[int, Field(ge=1, le=10_000_000)] | None = None
    """Maximum length of a turn's response; rollout.maxResponseTokens by default."""
    step_timeout_seconds: Positive = 60.0
    """Time limit for one reset or step of the environment; then its process is killed, and the episode is retried once with the same seed.
    For a Harness, the limit from a response to the program's next call or exit; then the episode fails."""
    episode_timeout_seconds: Positive = 1800.0
    """Time limit for an episode from its reset; then it ends with the rewards that it has, and an episode of a Harness fails."""
    prompt: EnvironmentPrompt = EnvironmentPrompt()
    """What the policy reads."""
    rewards: EnvironmentRewards = EnvironmentRewards()
    """What an episode gets besides the environment's rewards."""
    parameters: FreeForm = Field(default={})
    """Parameters of a built-in type (see docs/agents.md), or keyword arguments of the class."""
    harness: Harness | None = None
    """The program of type Harness."""
    network: bool = False
    """Let your own class or program, or functions and users of ToolUse and Chat, use the network; otherwise a program reaches only the
    policy's endpoint."""
    processes: bool = False
    """Let your own class, or functions and users of ToolUse and Chat, start processes; they end with the environment's process."""
    read_paths: tuple[Annotated[str, Field(max_length=1024, pattern=ABSOLUTE_PATH_PATTERN)], ...] = Field(default=(), max_length=64)
    """Files and folders that your code may read, in addition to Python, system libraries, and the job file's folder."""
    memory_bytes: Annotated[int, Field(ge=1 << 28, le=1 << 44)] = 8 << 30
    """Address space of a process that runs your code."""
    disk_bytes: Annotated[int, Field(ge=1 << 20, le=1 << 44)] = 8 << 30
    """Total size of the files that a process with your code may write; if it exceeds this it is killed."""
    max_processes: Annotated[int, Field(ge=1, le=4096)] = 64
    """Maximum number of processes of one worker for your class or programs, or for tools, users, and scores of ToolUse and Chat; more calls
    wait."""
    episodes_per_process: Annotated[int, Field(ge=1, le=4096)] = 1
    """Episodes of your own class that share a process, one call at a time."""


class ActionParameters(Parameters):
    """Common parameters of environments that extract an action from a response."""

    action_pattern: Annotated[str, Field(min_length=1, max_length=1024)] = "<answer>(.*?)</answer>"
    """Regular expression with one group, the action, or two, the reasoning before it and the action; the first match counts."""
    special_token_list: Annotated[tuple[ShortText, ...], Field(max_length=64)] | None = None
    """Strings that are removed from a response first."""


class GridParameters(ActionParameters):
    """Common parameters of the grid games."""

    max_steps: Annotated[int, Field(ge=1, le=10_000)] | None = None
    """Actions after which the game itself ends; 20 by default in Sokoban."""
    env_instruction: Text | None = None
    """The rules, before the meaning of the symbols and the actions."""
    grid_lookup: Symbols | None = None
    """Text of each kind of cell, by its number as text."""
    grid_vocab: Symbols | None = None
    """Meaning of each text, for the instruction."""
    action_lookup: Symbols | None = None
    """Name of each action, by its number as text; case is ignored."""


class FrozenLakeParameters(GridParameters):
    """A lake to cross on a grid, start and goal anywhere; another map for each seed."""

    size: Annotated[int, Field(ge=2, le=64)] = 4
    """Rows and columns."""
    p: Annotated[float, Field(gt=0.0, le=1.0)] = 0.8
    """Share of cells that are frozen, not holes."""
    is_slippery: bool = True
    """Whether a step goes to either side two times out of three."""
    map_seed: Annotated[int, Field(ge=0, le=2_147_483_647)] | None = None
    """Seed of one map for all episodes; by default each seed has its own map."""
    map_lookup: Annotated[dict[Annotated[str, Field(max_length=1)], int], Field(max_length=4)] | None = None
    """Number of the cells P, F (frozen), H (hole) and G (goal) in grid_lookup."""


class SokobanParameters(GridParameters):
    """A room with boxes to push onto targets; another one for each seed."""

    dim_room: tuple[Annotated[int, Field(ge=4, le=64)], Annotated[int, Field(ge=4, le=64)]] = (10, 10)
    """Rows and columns, including walls."""
    num_boxes: Annotated[int, Field(ge=1, le=64)] = 4
    """Boxes, and targets."""
    search_depth: Annotated[int, Field(ge=2, le=100_000)] = 300
    """Moves that the search for a room looks ahead: the larger, the farther boxes can be from their targets."""
    num_gen_steps: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Length of the walk that clears the floor; by default 1.7 times rows plus columns."""


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
    """An answer with at least this score is correct and ends the episode."""
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
