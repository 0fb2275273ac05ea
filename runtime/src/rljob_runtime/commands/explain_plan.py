"""The output of ``rljob plan --explain``: the chosen placement, the runner-up, what each costs, and the lines to paste.

| output | content                                                                |
|--------|------------------------------------------------------------------------|
| table  | for people: reasons, a table of candidates, the placements as YAML     |
| yaml   | the placements alone                                                   |
| json   | the whole choice, every candidate with its cost terms                  |
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rljob_api.auto import UNSAID, Basis, Candidate, Choice, Kind, choose, is_auto
from rljob_api.errors import counted
from rljob_api.roles import AutoPhase
from rljob_api.v1alpha1 import RLJob
from rljob_api.v1alpha1.components import Placement
from rljob_api.validation import CheckedJob, check
from rljob_runtime.commands import measured
from rljob_runtime.errors import SetupError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MAX_ROWS = 8
"""Candidates that the table shows; JSON has all."""
MAX_REASONS = 5
"""Distinct reasons of rejection shown."""
MAX_RANKS = 24
"""Characters of a placement in the table."""
MAX_RANKS_TEXT = 4096
"""Characters that the schema allows for ranks."""
_PHASES = {"generate": "generate_s", "reference": "reference_s", "train": "train_s", "sync": "sync_s", "switch": "switch_s"}
_BASIS = {
    Basis.MEASURED: "{unit} of a step, from spec.measured; phases scale with devices.",
    Basis.ESTIMATED: "{unit} of a step, estimated from FLOPs and bytes; rljob plan --measured runs/NAME/summary.json is closer.",
    Basis.RELATIVE: "{unit} of a step per billion parameters: only ratios count. Set model.parameterCount, or give --measured.",
}


def with_measured(job: RLJob, summary: Path) -> CheckedJob:
    """The job, checked again with the phase times of an earlier run.

    Raises:
        RuntimeFault: the times cannot be read, or nothing is chosen by them.
        SpecInvalidError: the job is wrong with them.
    """
    if not is_auto(job.spec):
        raise SetupError("has no effect, no component has placement: {mode: Auto}; leave it out")
    document = job.model_dump(mode="json", by_alias=True, exclude_unset=True)
    document["spec"]["measured"] = measured.read(summary).model_dump(mode="json", by_alias=True)
    return check(document, runnable=False)


def choice_of(job: RLJob) -> Choice | None:
    """The choice for a job that has a plan; None when there was nothing to choose."""
    choice = choose(job.spec) if is_auto(job.spec) else None
    return choice if isinstance(choice, Choice) else None


def print_choice(choice: Choice, console: Console) -> None:
    """Everything for people."""
    for line in _sentences(choice):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print()
    console.print(_table(choice))
    console.print(
        _BASIS[choice.basis].format(unit="Milliseconds" if _in_ms(choice) else "Seconds"), highlight=False, markup=False, soft_wrap=True
    )
    for line in _rejections(choice):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    console.print("\nThe same, written out:\n", highlight=False)
    console.print(as_yaml(choice), highlight=False, markup=False, soft_wrap=True)


def as_yaml(choice: Choice) -> str:
    """The chosen placements, to paste into the components of the manifest."""
    from rljob_api.generate import to_yaml

    placements = choice.chosen.placements(choice.request)
    names = {index: choice.spec.components[index].name for index in sorted(placements)}
    entries = [{"name": name, "placement": _dumped(placements[index])} for index, name in names.items()]
    too_long = [name for index, name in names.items() if len(placements[index].ranks or "") > MAX_RANKS_TEXT]
    note = f"# ranks of {', '.join(too_long)} are longer than a manifest allows: leave mode: Auto\n" if too_long else ""
    return note + to_yaml({"components": entries}).rstrip("\n")


def as_json(choice: Choice) -> str:
    """The whole choice with every candidate, the preferred first."""
    reasons = {id(rejected.candidate): rejected.reason for rejected in choice.rejected if rejected.candidate not in (None, choice.chosen)}
    document = {
        "basis": choice.basis.value,
        "chosen": _position(choice, choice.chosen),
        "doubt": choice.doubt,
        "runnerUp": None if choice.runner_up is None else _position(choice, choice.runner_up),
        "candidates": [_as_data(choice, candidate, reasons.get(id(candidate))) for candidate in choice.candidates],
        "leftOut": [rejected.reason for rejected in choice.rejected if rejected.candidate is None],
    }
    return json.dumps(document, indent=2)


def _position(choice: Choice, candidate: Candidate) -> int:
    return next(index for index, other in enumerate(choice.candidates) if other is candidate)


def _as_data(choice: Choice, candidate: Candidate, rejected: str | None) -> dict[str, Any]:
    placements = candidate.placements(choice.request)
    return {
        "kind": candidate.kind.value,
        "lastResort": candidate.is_last_resort,
        "rejected": rejected,
        "placements": {choice.spec.components[index].name: _dumped(placements[index]) for index in sorted(placements)},
        "cost": {_camel(name): value for name, value in asdict(candidate.cost).items()},
    }


def _camel(name: str) -> str:
    return name.removesuffix("_s") + "Seconds"


def _dumped(placement: Placement) -> dict[str, Any]:
    return {key: value for key, value in placement.model_dump(mode="json", by_alias=True, exclude_defaults=True).items() if value}


def _sentences(choice: Choice) -> Iterator[str]:
    """What was chosen and why."""
    chosen, cost = choice.chosen, choice.chosen.cost
    where = "; ".join(_described(choice, chosen, phase) for phase in choice.request.auto)
    yield f"Chosen: {chosen.kind}, {where}."
    share = {name: getattr(cost, field) / cost.step_s for name, field in _PHASES.items()}
    longest = max(share, key=lambda name: share[name])
    unit = " per billion parameters" if choice.basis is Basis.RELATIVE else ""
    others = len(_eligible(choice))
    why = (
        f"Why: a step takes {_seconds(cost.step_s)}{unit}, {f'the least of {others} placements' if others > 1 else 'and nothing else fits'}"
    )
    why += f"; {longest} is the longest phase with {_seconds(getattr(cost, _PHASES[longest]))}"
    yield why + (f", {_seconds(cost.hidden_s)} of generation overlap with training." if cost.hidden_s else ".")
    if choice.runner_up is None:
        yield "Runner-up: none."
    else:
        where = "; ".join(_described(choice, choice.runner_up, phase) for phase in choice.request.auto)
        yield f"Runner-up: {choice.runner_up.kind}, {where}: {_compared(choice.chosen, choice.runner_up)}."
    if choice.doubt is not None:
        yield f"There are too few devices for any other, and it may not fit: {choice.doubt}."


def _eligible(choice: Choice) -> list[Candidate]:
    """Candidates that were not rejected."""
    rejected = {id(each.candidate) for each in choice.rejected if each.candidate is not choice.chosen}
    return [candidate for candidate in choice.candidates if id(candidate) not in rejected]


def _compared(chosen: Candidate, other: Candidate) -> str:
    mine, theirs = chosen.cost.step_s, other.cost.step_s
    if mine != theirs:
        return f"{_seconds(theirs)}, {abs(theirs / mine - 1):.1%} {'more' if theirs > mine else 'less'}"
    if chosen.shared_nodes < other.shared_nodes:
        return "as fast, but it does not split at a node boundary"
    return "as fast, but it takes more devices" if chosen.num_devices < other.num_devices else "as fast; the first of equals is taken"


def _described(choice: Choice, candidate: Candidate, phase: AutoPhase) -> str:
    """``actor_infer on 4-7 (2 engines of 2 devices)``."""
    index = choice.request.auto[phase]
    name, engine = choice.spec.components[index].name, choice.request.engine
    size = engine.num_devices
    if phase is AutoPhase.GENERATE and phase in candidate.shares:
        engines = sum(share.num_devices for share in candidate.shares[phase]) // size
        count = f"{_count(engines, 'engine')} of {_count(size, 'device')}"
    elif phase in candidate.shares:
        count = _count(sum(share.num_devices for share in candidate.shares[phase]), "device")
    else:
        count = "shared"
    return f"{name} on {_short(candidate.placements(choice.request)[index])} ({count})"


def _short(placement: Placement) -> str:
    text = placement.ranks or placement.device_mapping or ""
    text = text if len(text) <= MAX_RANKS else f"{text[: MAX_RANKS - 2]}.."
    return f"{','.join(placement.node_groups)}:{text}" if placement.node_groups else text


def _table(choice: Choice) -> Table:
    from rich import box
    from rich.table import Table

    names = [choice.spec.components[index].name for index in choice.request.auto.values()]
    phases = {name: field for name, field in _PHASES.items() if any(getattr(c.cost, field) for c in _shown(choice))}
    overlap = {"hidden": "hidden_s"} if any(candidate.cost.hidden_s for candidate in _shown(choice)) else {}
    scale = 1000 if _in_ms(choice) else 1
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for column in names:
        table.add_column(column, overflow="fold", min_width=min(len(column), 14))
    for column in (*phases, *overlap, "step"):
        table.add_column(column, justify="right", no_wrap=True)
    for candidate in _shown(choice):
        placements = candidate.placements(choice.request)
        where = [_short(placements[index]) for index in choice.request.auto.values()]
        numbers = [_number(scale * getattr(candidate.cost, field)) for field in (*phases.values(), *overlap.values(), "step_s")]
        table.add_row(_mark(choice, candidate), *where, *numbers)
    return table


def _shown(choice: Choice) -> Sequence[Candidate]:
    """The best ones, the chosen and the runner-up always, and the best collocated one."""
    must = {id(choice.chosen), id(choice.runner_up)}
    collocated = next((candidate for candidate in choice.candidates if candidate.kind is Kind.COLLOCATED), None)
    must.add(id(collocated))
    first = [c for index, c in enumerate(choice.candidates) if index < MAX_ROWS or id(c) in must]
    return sorted(first, key=lambda c: (c is not choice.chosen, c is not choice.runner_up))


def _mark(choice: Choice, candidate: Candidate) -> str:
    if candidate is choice.chosen:
        return "chosen"
    if candidate is choice.runner_up:
        return "runner-up"
    if candidate.is_last_resort or any(r.candidate is candidate and UNSAID in r.reason for r in choice.rejected):
        return "may not fit"
    return "does not fit" if any(rejected.candidate is candidate for rejected in choice.rejected) else ""


def _rejections(choice: Choice) -> Iterator[str]:
    """Reasons with how many candidates they concern."""
    counts = Counter(rejected.reason for rejected in choice.rejected if rejected.candidate is not choice.chosen)
    for reason, count in list(counts.items())[:MAX_REASONS]:
        yield f"Left out ({count}): {reason}."
    if len(counts) > MAX_REASONS:
        yield f"{counted(len(counts) - MAX_REASONS, 'more reason')}: --output json has all."


def _in_ms(choice: Choice) -> bool:
    """Whether the table counts milliseconds."""
    return choice.chosen.cost.step_s < 1


def _seconds(value: float) -> str:
    return f"{_number(value)} s" if value >= 1 else f"{_number(value * 1000)} ms"


def _number(value: float) -> str:
    """Three significant digits, more from a thousand on; a dash for nothing."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value else "-"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
