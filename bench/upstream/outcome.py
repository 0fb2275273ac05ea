"""What became of one example, and which work owns each reason that it does not run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from bench.upstream import corpus
from bench.upstream.corpus import Example
from rljob_api.errors import FieldError, SpecInvalidError
from rljob_api.validation import check
from rljob_convert import convert
from rljob_convert.conversion import Converted

AGENTS = "agents"
OUT = "not planned: images, sound, robots"
BROKEN = "upstream: takes in a file that is not there"
OPEN = "open"
_OWNERS = (
    (r"waits for (advantages of turns|episodes whose turns are prompts|engines that look for texts)", AGENTS),
    (r"into this configuration, which is not beside the first file", BROKEN),
)
_INDEX, _NUMBER = re.compile(r"\[[0-9]+\]"), re.compile(r"[0-9]+")
_JUDGE = re.compile(r"the judge's model has to be served")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One example."""

    example: Example
    refused: str | None = None
    """Why it is not converted."""
    problems: tuple[str, ...] = ()
    """What validation says, places without numbers."""
    judges: bool = False
    """Whether a judge scores whose model is to be served beside the job."""
    functions: int = 0
    """Rewards that are to be written."""
    is_planned: bool = False
    is_mixture: bool = False
    """Whether the model it trains is a mixture of experts."""
    crashed: str | None = None

    @property
    def is_valid(self) -> bool:
        """Whether it can run as it is."""
        return self.refused is None and self.crashed is None and not self.problems

    @property
    def owners(self) -> tuple[str, ...]:
        """Works that own the reasons that it does not run; ``open`` where no work does. None of an example that runs."""
        kind = self.example.kind
        if self.crashed is not None:
            return (OPEN,)
        if kind in corpus.OUT_OF_SCOPE:
            return (OUT,)
        found = {owner_of(problem) for problem in self.problems}
        found |= {owner_of(self.refused)} if self.refused is not None and kind not in (corpus.NOT_RL, corpus.NO_JOB) else set()
        if AGENTS in found:
            found -= {OPEN}  # an agents' job lacks what only its environments will say: prompts, rewards, groups
        return tuple(sorted(found))


def owner_of(problem: str) -> str:
    """The work that owns a problem."""
    return next((owner for pattern, owner in _OWNERS if re.search(pattern, problem)), OPEN)


def examine(example: Example, environment: Mapping[str, str]) -> Outcome:
    """Convert, validate and plan one example."""
    text = example.path.read_text(encoding="utf-8")
    try:
        converted = convert(example.framework, text, folder=Path(example.path.parent), environment=environment)
        problems = _problems(converted, runnable=True)
        planned = not _problems(converted, runnable=False)
    except SpecInvalidError as error:
        return Outcome(example=example, refused=str(error.errors[0]))
    except Exception as error:  # noqa: BLE001 what a crash is must stand in the table, and the other examples still run
        return Outcome(example=example, crashed=f"{type(error).__name__}: {error}")
    spec = converted.manifest["spec"]
    rewards = spec.get("rewards", ())
    return Outcome(
        example=example,
        problems=tuple(dict.fromkeys(_shown(problem) for problem in problems)),
        judges=any(_JUDGE.search(note.why) for note in converted.notes),
        functions=sum(reward["type"] == "Function" for reward in rewards),
        is_planned=planned,
        is_mixture=corpus.is_mixture(str(spec.get("model", {}).get("path"))),
    )


def _problems(converted: Converted, *, runnable: bool) -> tuple[FieldError, ...]:
    try:
        check(converted.manifest, runnable=runnable)
    except SpecInvalidError as error:
        return error.errors
    return ()


def _shown(problem: FieldError) -> str:
    """Without what differs from file to file."""
    return f"{_INDEX.sub('[]', problem.path)}: {_NUMBER.sub('N', str(problem.problem))}"
