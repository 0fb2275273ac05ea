"""What a reward is: frozen values, checked where they are made, cheap to send to a child process."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rljob_api.vocabulary import REWARD_PARAMETERS, Extraction, RewardType
from rljob_runtime.errors import RewardSetupError
from rljob_runtime.rewards.judging.config import JudgeConfig

ASKING = (RewardType.LLM_JUDGE, RewardType.REWARD_MODEL)
"""Types that ask a model which is served somewhere."""


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Isolation:
    """What a scoring process may do; rewards of equal isolation share processes."""

    runs_code: bool = False
    """Starts processes for code that the model wrote, never runs foreign code itself."""
    network: bool = False
    processes: bool = False
    read_paths: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """One reward; a response's score is the weighted sum of those that apply to its tag."""

    name: str
    """Unique within the job; key of ``RewardResult.parts``."""
    type: RewardType
    sources: tuple[str, ...] = ()
    """Tags that it scores; empty: all."""
    weight: float = 1.0
    timeout_s: float = 5.0
    """Limit for one evaluation; past it the scoring process is killed and the sample tried once more in a fresh one."""
    on_timeout: float | None = 0.0
    """Score when it ran past the limit twice; None: the sample fails."""
    on_error: float | None = None
    """Score when it failed in any other way; None: the sample fails."""
    pass_threshold: float = 1.0
    """A response counts as solved when the first reward of its tag scores at least this."""
    extraction: Extraction = Extraction.WHOLE
    tag: str = "answer"
    """Tag name for ``Extraction.TAG``."""
    function: str | None = None
    """``module:function``, for ``RewardType.FUNCTION`` only; called with prompt, response, answer, metadata as keywords."""
    params: Mapping[str, object] = field(default_factory=dict)
    """Further settings of the type; for a Function, or a function that reads a judge's words, further keyword arguments."""
    judge: JudgeConfig | None = None
    """Who is asked, for the types in :data:`ASKING` only."""
    network: bool = False
    processes: bool = False
    read_paths: tuple[str, ...] = ()
    """What a Function may have besides the sandbox of all rewards."""
    memory_bytes: int = 8 << 30
    """Address space of the scoring process."""
    disk_bytes: int = 8 << 30
    """Of all files that the scoring process writes; one with more is killed."""

    def __post_init__(self) -> None:
        """Raise RewardSetupError for values that cannot work or would be ignored."""
        where = f"reward {self.name!r}"
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise RewardSetupError(f"{where}: timeout_s is {self.timeout_s}; it must be a number of seconds above 0")
        numbers = {"weight": self.weight, "pass_threshold": self.pass_threshold, "on_error": self.on_error, "on_timeout": self.on_timeout}
        for label, value in numbers.items():
            if value is not None and not math.isfinite(value):
                raise RewardSetupError(f"{where}: {label} is {value}; it must be a finite number")
        if self.tag != "answer" and self.extraction is not Extraction.TAG:
            raise RewardSetupError(
                f"{where}: tag {self.tag!r} is set but extraction is {self.extraction}; set extraction: Tag or remove tag"
            )
        if (self.type in ASKING) != (self.judge is not None):
            raise RewardSetupError(f"{where}: the type is {self.type}; {' and '.join(ASKING)} need a judge, the others have none")
        if self.type is RewardType.FUNCTION:
            self._check_function(where)
        else:
            self._check_built_in(where)

    @property
    def isolation(self) -> Isolation:
        """What its scoring process may do."""
        if self.type is RewardType.CODE:
            return Isolation(runs_code=True)
        return Isolation(network=self.network, processes=self.processes, read_paths=tuple(sorted(self.read_paths)))

    @property
    def has_function(self) -> bool:
        """Whether it calls a function of the user's own."""
        return self.function is not None or (self.judge is not None and self.judge.reader.function is not None)

    def applies_to(self, tag: str) -> bool:
        """Whether it scores prompts of this tag."""
        return not self.sources or tag in self.sources

    def _check_function(self, where: str) -> None:
        parts = (self.function or "").split(":")
        if len(parts) != 2 or not all(parts) or not all(p.isidentifier() for p in [*parts[0].split("."), parts[1]]):
            raise RewardSetupError(f"{where}: function is {self.function!r}; write it as module:function, for example my_rewards:score")

    def _check_built_in(self, where: str) -> None:
        if self.function is not None:
            raise RewardSetupError(
                f"{where}: function {self.function!r} is set but type is {self.type}; set type: Function or remove function"
            )
        if self.network or self.processes or self.read_paths:
            raise RewardSetupError(
                f"{where}: network, processes and read_paths are for type Function, the type is {self.type}; remove them"
            )
        if self.judge is not None:  # parameters are those of the function that reads its words
            return
        valid = REWARD_PARAMETERS[self.type]
        for key, value in self.params.items():
            if key not in valid:
                near = difflib.get_close_matches(key, valid, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"it takes: {', '.join(valid) or 'none'}"
                raise RewardSetupError(f"{where}: type {self.type} has no parameter {key!r}; {hint}")
            if type(value) not in valid[key]:
                names = " or ".join(kind.__name__ for kind in valid[key])
                raise RewardSetupError(f"{where}: parameter {key!r} is {value!r}; it must be a {names}")


def check_rewards(configs: Sequence[RewardConfig]) -> None:
    """Raise RewardSetupError unless there is a reward and names are unique."""
    if not configs:
        raise RewardSetupError("rewards: none is given; add at least one entry to spec.rewards")
    names = [c.name for c in configs]
    double = sorted({n for n in names if names.count(n) > 1})
    if double:
        raise RewardSetupError(f"rewards: the name {double[0]!r} is used {names.count(double[0])} times; names must be unique")


def check_tags(configs: Sequence[RewardConfig], tags: Mapping[str, str]) -> None:
    """Compare the tags of the data with those of the rewards.

    Args:
        configs: all rewards.
        tags: where each tag of the data is from, in words.

    Raises:
        RewardSetupError: a tag has no reward.
    """
    for tag, place in sorted(tags.items()):
        if not any(config.applies_to(tag) for config in configs):
            known = ", ".join(dict.fromkeys(source for config in configs for source in config.sources))
            raise RewardSetupError(
                f"rewards: the tag {tag!r} of {place} has no reward (sources of the rewards: {known}); "
                "add the tag to the `sources` of a reward, or a reward without `sources`"
            )
