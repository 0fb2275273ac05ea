"""What a reward is: frozen values, checked where they are made, cheap to send to a child process."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rljob_api.vocabulary import Extraction, RewardType
from rljob_runtime.errors import RewardSetupError

BUILT_IN_PARAMS: Mapping[RewardType, Mapping[str, type]] = {
    RewardType.TASK: {},
    RewardType.EXACT_MATCH: {"ignore_case": bool},
    RewardType.MATH_VERIFY: {"float_rounding": int, "numeric_precision": int, "strict": bool},
}
"""Parameters each built-in type takes; a Function takes whatever its signature allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardConfig:
    """One reward; a response's score is the weighted sum of all of them."""

    name: str
    """Unique within the job; key of ``RewardResult.parts``."""
    type: RewardType
    weight: float = 1.0
    timeout_s: float = 5.0
    """Limit for one evaluation; past it the scoring process is killed and this sample fails."""
    pass_threshold: float = 1.0
    """A response counts as solved when the first reward scores at least this."""
    extraction: Extraction = Extraction.WHOLE
    tag: str = "answer"
    """Tag name for ``Extraction.TAG``."""
    function: str | None = None
    """``module:function``, for ``RewardType.FUNCTION`` only; called with prompt, response, answer, metadata as keywords."""
    params: Mapping[str, object] = field(default_factory=dict)
    """Further settings of the type; for a Function further keyword arguments."""

    def __post_init__(self) -> None:
        """Raise RewardSetupError for values that cannot work or would be ignored."""
        where = f"reward {self.name!r}"
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise RewardSetupError(f"{where}: timeout_s is {self.timeout_s}; it must be a number of seconds above 0")
        for label, value in (("weight", self.weight), ("pass_threshold", self.pass_threshold)):
            if not math.isfinite(value):
                raise RewardSetupError(f"{where}: {label} is {value}; it must be a finite number")
        if self.tag != "answer" and self.extraction is not Extraction.TAG:
            raise RewardSetupError(
                f"{where}: tag {self.tag!r} is set but extraction is {self.extraction}; set extraction: Tag or remove tag"
            )
        if self.type is RewardType.FUNCTION:
            self._check_function(where)
        else:
            self._check_built_in(where)

    def _check_function(self, where: str) -> None:
        parts = (self.function or "").split(":")
        if len(parts) != 2 or not all(parts) or not all(p.isidentifier() for p in [*parts[0].split("."), parts[1]]):
            raise RewardSetupError(f"{where}: function is {self.function!r}; write it as module:function, for example my_rewards:score")

    def _check_built_in(self, where: str) -> None:
        if self.function is not None:
            raise RewardSetupError(
                f"{where}: function {self.function!r} is set but type is {self.type}; set type: Function or remove function"
            )
        valid = BUILT_IN_PARAMS[self.type]
        for key, value in self.params.items():
            if key not in valid:
                near = difflib.get_close_matches(key, valid, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"it takes: {', '.join(valid) or 'none'}"
                raise RewardSetupError(f"{where}: type {self.type} has no parameter {key!r}; {hint}")
            if type(value) is not valid[key]:
                raise RewardSetupError(f"{where}: parameter {key!r} is {value!r}; it must be a {valid[key].__name__}")


def check_rewards(configs: Sequence[RewardConfig]) -> None:
    """Raise RewardSetupError unless there is a reward and names are unique."""
    if not configs:
        raise RewardSetupError("rewards: none is given; add at least one entry to spec.rewards")
    names = [c.name for c in configs]
    double = sorted({n for n in names if names.count(n) > 1})
    if double:
        raise RewardSetupError(f"rewards: the name {double[0]!r} is used {names.count(double[0])} times; names must be unique")
