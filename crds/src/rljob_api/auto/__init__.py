"""``placement.mode: Auto``: devices for the Trainer, Rollout and Reference, chosen by a cost model.

::

    spec ─> request.read (open roles, free devices) ─> candidates ─> cost of each ─> the best that fits ─> explicit placements

Pure and deterministic: :mod:`rljob_api.planner` begins with :func:`resolve`, so that the CLI, the operator and the driver
make the same choice. Only the best candidates are planned, and only where the spec says how much memory there is, or names a backend for
the weight sync that works in some placements only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rljob_api import memory
from rljob_api.auto.candidates import Candidate, Candidates, Kind
from rljob_api.auto.cost import Basis, Cost, CostModel, Use
from rljob_api.auto.request import Request, is_auto, read
from rljob_api.errors import FieldError, counted
from rljob_api.planning import sync_places
from rljob_api.planning.explicit import plan_or_errors as explicit_plan
from rljob_api.planning.plan import Plan
from rljob_api.roles import ROLE_OF_PHASE, AutoPhase
from rljob_api.v1alpha1.operations import Residency
from rljob_api.v1alpha1.rljob import RLJobSpec

__all__ = ["LAST_RESORT", "UNSAID", "Basis", "Candidate", "Choice", "Cost", "Kind", "Rejected", "Use", "choose", "is_auto", "resolve"]

LAST_RESORT = (
    "components would stay on the same devices, and the spec does not say whether they fit; set model.parameterCount and "
    "nodeGroups[].deviceMemory (on CPU resources.memory), or offload.residency: Switching"
)
"""Why sharing is not chosen by its cost."""
UNSAID = (
    "components would stay on the same devices, where model.parameterCount leaves activations, logits and caches unsaid; with those of a "
    "usual model of that size"
)
"""Why sharing is not chosen where the number of parameters alone would allow it."""
MAX_PLANNED = 64
"""Candidates that are planned to see whether they fit, at most."""
MAX_PLANNED_SIZE = 200_000
"""Nodes and processes of planned candidates together, after which no other is planned: bounds time on very large jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A candidate that cannot be taken, or what could not even become one."""

    candidate: Candidate | None
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was chosen, and what else there was."""

    request: Request
    basis: Basis
    chosen: Candidate
    runner_up: Candidate | None
    """The next best that fits; None when there is none."""
    candidates: tuple[Candidate, ...]
    """All that were evaluated, the preferred first; those in ``rejected`` are among them."""
    rejected: tuple[Rejected, ...]
    spec: RLJobSpec
    """With the chosen placements, all explicit."""
    doubt: str | None = None
    """Why the chosen placement may not fit, although no other is left; None where nothing speaks against it."""


def resolve(spec: RLJobSpec) -> RLJobSpec | list[FieldError]:
    """The spec with explicit placements, or why there is none; the same spec when no placement is Auto."""
    if not is_auto(spec):
        return spec
    choice = choose(spec, with_runner_up=False)
    return choice.spec if isinstance(choice, Choice) else choice


def choose(spec: RLJobSpec, *, with_runner_up: bool = True) -> Choice | list[FieldError]:
    """Choose placements and keep what the choice was made of, for people.

    Args:
        spec: with at least one placement whose mode is Auto.
        with_runner_up: look for the second best too, which may have to be planned.

    Raises:
        ValueError: no placement of ``spec`` is Auto.
    """
    if not is_auto(spec):
        raise ValueError("no placement of the spec has mode Auto")
    request = read(spec)
    if not isinstance(request, Request):
        return request
    model = CostModel(spec, request.engine, request.fastest)
    maker = Candidates(request, model)
    candidates = tuple(sorted(maker.all(), key=lambda candidate: candidate.preference))
    selection = _Selection(request)
    fitting = selection.fitting(candidates)
    chosen = next(fitting, None)
    if chosen is None:
        return [_no_choice(request, maker, selection.rejected)]
    runner_up = next(fitting, None) if with_runner_up else None
    if runner_up is not None and runner_up.position in selection.doubts:
        runner_up = None
    unproven = [Rejected(candidate=c, reason=LAST_RESORT) for c in candidates if c.is_last_resort]
    tight = [Rejected(candidate=None, reason=reason) for reason in maker.too_tight]
    return Choice(
        request=request,
        basis=model.basis,
        chosen=chosen,
        runner_up=runner_up,
        candidates=candidates,
        rejected=(*selection.rejected, *unproven, *tight),
        spec=explicit(request, chosen),
        doubt=LAST_RESORT if chosen.is_last_resort else selection.doubts.get(chosen.position),
    )


def explicit(request: Request, candidate: Candidate) -> RLJobSpec:
    """The spec with the placements of a candidate."""
    placements = candidate.placements(request)
    components = tuple(
        component.model_copy(update={"placement": placements[index]}) if index in placements else component
        for index, component in enumerate(request.spec.components)
    )
    return request.spec.model_copy(update={"components": components})


class _Selection:
    """Goes through candidates in order of preference and says which of them fit."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._size = sum(group.nodes for group in request.spec.node_groups)
        self._memory_known = any(group.device_memory or group.resources.memory_limit for group in request.spec.node_groups)
        self._num_planned = 0
        self._planned_size = 0
        self.rejected: list[Rejected] = []
        self.doubts: dict[int, str] = {}
        """By position of a candidate: why it may not fit although the number of parameters alone does not speak against it."""
        self._doubtful: list[Candidate] = []

    def fitting(self, candidates: Sequence[Candidate]) -> Iterator[Candidate]:
        """Candidates that fit. One with a smaller Trainer where a larger one did not fit comes after all others, doubtful ones last."""
        postponed: list[Candidate] = []
        for candidate in candidates:
            if any(_needs_no_less(candidate, other.candidate) for other in self.rejected if other.candidate is not None):
                postponed.append(candidate)
            elif self._fits(candidate):
                yield candidate
        for candidate in postponed:
            if self._fits(candidate):
                yield candidate
        yield from self._doubtful

    def _fits(self, candidate: Candidate) -> bool:
        if candidate.beside is None and not self._memory_known and not sync_places.depends_on_places(self._request.spec):
            return True  # by construction its devices exist
        if self._num_planned == MAX_PLANNED or self._planned_size > MAX_PLANNED_SIZE:
            return False
        self._num_planned += 1
        self._planned_size += self._size + candidate.num_devices
        spec = explicit(self._request, candidate)
        plan = explicit_plan(spec)
        problems = self._problems(spec, plan) if isinstance(plan, Plan) else plan
        if problems:
            self.rejected.append(Rejected(candidate=candidate, reason=f"{problems[0].path}: {problems[0].problem}"))
        doubt = self._doubt(candidate, spec, plan) if isinstance(plan, Plan) and not problems else None
        if doubt is not None:
            self._doubtful.append(candidate)
            self.doubts[candidate.position] = doubt
            self.rejected.append(Rejected(candidate=candidate, reason=doubt))
        return not problems and doubt is None

    def _problems(self, spec: RLJobSpec, plan: Plan) -> list[FieldError]:
        return [*memory.problems_of(spec, plan), *sync_places.problems(spec, plan)]

    def _doubt(self, candidate: Candidate, spec: RLJobSpec, plan: Plan) -> str | None:
        """What a usual model of so many parameters would lack where components stay on the same devices.

        The sizes of the real one are not known here, and its config.json may be readable only where the job runs.
        """
        parameters = spec.model.parameter_count
        if candidate.kind is not Kind.COLLOCATED or parameters is None or spec.offload.residency is not Residency.RESIDENT:
            return None
        estimate = memory.estimate(spec, plan, memory.usual_shape(parameters))
        found = [*memory.problems(estimate), *memory.tight(estimate)]
        return f"{found[0].path}: {UNSAID}: {found[0].problem}" if found else None


def _needs_no_less(candidate: Candidate, other: Candidate) -> bool:
    """Whether a candidate spreads the same states over no more devices of the same group."""
    if candidate.kind is not other.kind or candidate.beside != other.beside:
        return False
    trainer, other_trainer = candidate.shares.get(AutoPhase.TRAIN), other.shares.get(AutoPhase.TRAIN)
    same_group = not trainer or not other_trainer or trainer[0].group is other_trainer[0].group
    mine, theirs = candidate.use, other.use
    return same_group and mine.trainer_devices <= theirs.trainer_devices and mine.reference_devices <= theirs.reference_devices


def _no_choice(request: Request, maker: Candidates, rejected: Sequence[Rejected]) -> FieldError:
    """Why nothing can be chosen; said once, at the first open component."""
    index = min(request.auto.values())
    path, value = f"spec.components[{index}].placement.mode", '"Auto"'
    who = " and ".join(request.spec.components[i].name for i in sorted(request.auto.values()))
    if rejected:
        tried = f"{counted(len(rejected), 'placement')} {'was' if len(rejected) == 1 else 'were'} tried"
        problem = f"finds no placement of {who} that fits, {tried}; the best of them: {rejected[0].reason}"
        return FieldError(path=path, value=value, problem=problem, remedy="ask for more or larger devices, or reduce what is named there")
    free = ", ".join(f"{group.name} has {group.num_free}" for group in request.groups)
    needs = []
    if AutoPhase.TRAIN in request.auto:
        sizes, unit = maker.trainer_sizes, request.spec.training.device_unit
        needs.append(f"the {ROLE_OF_PHASE[AutoPhase.TRAIN]} {min(sizes, default=unit)} or more devices of one kind")
    if AutoPhase.GENERATE in request.auto:
        size = request.engine.num_devices
        needs.append(f"an engine {size} on one node" if size > 1 else "an engine 1")
    if AutoPhase.REFERENCE in request.auto:
        needs.append(f"the {ROLE_OF_PHASE[AutoPhase.REFERENCE]} {maker.reference_unit}")
    problem = f"finds no devices for {who}: {', '.join(needs)}; free are: {free or 'none'}"
    return FieldError(
        path=path, value=value, problem=problem, remedy="add nodes or devicesPerNode, use smaller parallel sizes, or free devices"
    )
