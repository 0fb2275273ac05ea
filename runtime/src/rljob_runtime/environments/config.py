"""What an Environment worker runs: one entry of the spec each, and what they share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rljob_runtime.environments.codec import PromptSettings
from rljob_runtime.environments.endpoint.requests import JobSampling


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """What a class of the user's may do, in a process that has nothing else."""

    network: bool = False
    processes: bool = False
    """May start processes of its own; they end with its process."""
    read_paths: tuple[str, ...] = ()
    """To read besides Python, the system's libraries and the job file's folder."""
    memory_bytes: int = 8 << 30
    """Address space of a process."""
    disk_bytes: int = 8 << 30
    """Of all files that a process writes; one with more is killed."""
    max_processes: int = 64
    """Processes of this environment at the same time in one worker; episodes beyond ``max_processes * episodes_per_process`` wait."""
    episodes_per_process: int = 1
    """Episodes that share a process, whose calls follow each other there. Where one hangs, the others wait for its limit; where the
    process dies, they are played again up to where they were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessConfig:
    """A program that plays the episodes: an environment of type Harness."""

    command: tuple[str, ...]
    """Program and arguments."""
    working_folder: Path | None = None
    """Where it starts; None: the job file's folder, without one the episode's own."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of its environment, besides those that say where endpoint, task and reward file are."""
    tasks: Path | None = None
    """JSON Lines; an episode's seed chooses one."""
    reward: str | None = None
    """``module:function`` that gives the reward; None: the program's file."""
    sampling: JobSampling = field(default_factory=JobSampling)
    """How the job samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentConfig:
    """One environment."""

    name: str
    """Of the spec's entry."""
    type: str
    """A built-in environment (``builtin.BUILT_IN``), ``module:Class``, or ``Harness``."""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Of the built-in environment, or keyword arguments of the class."""
    prompt: PromptSettings = field(default_factory=PromptSettings)
    max_turns: int
    """Actions after which an episode is cut."""
    max_tokens_per_turn: int
    """Of one action."""
    max_episode_tokens: int
    """Of prompt, actions and observations together."""
    step_timeout_s: float = 60.0
    """Of one call of a class of the user's."""
    episode_timeout_s: float = 1800.0
    """Of an episode, generation included."""
    format_penalty: float = 0.0
    """Added to the reward of an action that the environment did not understand."""
    isolation: Isolation = field(default_factory=Isolation)
    harness: HarnessConfig | None = None
    """Of type Harness."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """All of one worker's."""

    environments: tuple[EnvironmentConfig, ...]
    tokenizer_path: str
    """Folder or Hub id of the policy's tokenizer."""
    trust_remote_code: bool = False
    job_folder: Path | None = None
    """Searched first for the user's classes."""
    log_dir: Path
    """Receives what the user's classes print, a file for each environment."""
    startup_timeout_s: float = 120.0
    """Until a class of the user's is imported and constructed."""
