"""All ways to place the open roles that are worth a look.

::

    Trainer   from each unlike group on (it goes on in groups of the same resource), in each size that divides the mini-batch
    Reference beside the Trainer, or from one of the unlike groups on; one size per octave
    Rollout   engines on all the rest of one resource, or of the Trainer's node, before or after the Reference

That is O(divisors of the mini-batch) candidates per group, each in O(log nodes). Sizes depend on the batch, never on the number
of devices: with more devices there are more candidates and none is lost, so the best cost never rises.

Collocated candidates put all open roles on the same devices: on as many as the Trainer can use.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from rljob_api.auto.cost import Cost, CostModel, Use
from rljob_api.auto.request import Request
from rljob_api.auto.supply import Cursors, FreeGroup, Shares, available, node_span, rank_text, take
from rljob_api.roles import ROLE_OF_PHASE, AutoPhase
from rljob_api.v1alpha1.components import Placement

MAX_SIZES = 64
"""Trainer sizes tried, one per sixth of an octave when there are more; fewer beside a Reference or with many unlike groups."""
MAX_RESOURCES = 3
"""Kinds of devices tried for the Rollout besides the Trainer's."""
MANY_GROUPS = 4
"""Groups tried for the Reference besides the Trainer's; with more groups than this, sizes are tried more coarsely."""


class Kind(StrEnum):
    """How a candidate uses devices."""

    DISAGGREGATED = "disaggregated"
    """Every role has devices of its own."""
    COLLOCATED = "collocated"
    """All open roles are on the same devices: they stay or switch, as offload.residency says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to place the open roles."""

    kind: Kind
    shares: dict[AutoPhase, Shares]
    """What the open role of each phase takes; absent where it goes on the devices of :attr:`beside`."""
    beside: int | None = None
    """Component whose placement the open roles copy."""
    use: Use
    cost: Cost
    shared_nodes: int
    """Nodes on which two roles meet, collocated ones aside."""
    room_is_known: bool
    """Whether the job says so, see :attr:`Request.room_is_known`."""
    position: int
    """In the order of enumeration, which decides between equals."""

    @property
    def is_last_resort(self) -> bool:
        """Whether components stay on the same devices and nobody says that they fit: taken where nothing else exists."""
        return self.kind is Kind.COLLOCATED and not self.room_is_known

    @property
    def num_devices(self) -> int:
        """Devices of all roles, shared ones once."""
        taken = [sum(share.num_devices for share in shares) for shares in self.shares.values()]
        return max(taken, default=0) if self.kind is Kind.COLLOCATED else sum(taken)

    @property
    def preference(self) -> tuple[bool, float, int, int, int]:
        """Smaller is better: no last resort, cheap, split at node boundaries, few devices, early."""
        return self.is_last_resort, self.cost.step_s, self.shared_nodes, self.num_devices, self.position

    def placements(self, request: Request) -> dict[int, Placement]:
        """Explicit placements by component index; node groups are named where the job has several."""
        found: dict[int, Placement] = {}
        for phase, index in request.auto.items():
            if phase in self.shares:
                groups, text = rank_text(self.shares[phase])
                # Not validated: the text of a large job may be longer than what people may write.
                fields = {"node_groups": groups if len(request.spec.node_groups) > 1 else (), "ranks": text}
                found[index] = Placement().model_copy(update=fields)
            elif self.beside is not None:
                found[index] = request.spec.components[self.beside].placement.model_copy(update={"devices_per_worker": None})
        return found


class Candidates:
    """Makes the candidates of one request."""

    def __init__(self, request: Request, model: CostModel) -> None:
        """``model``: their costs."""
        self._request = request
        self._model = model
        self._spec = request.spec
        self._size = request.engine.num_devices
        self._count = 0
        self.trainer_sizes = self._trainer_sizes()
        """Numbers of Trainer devices that validation accepts: those of one share times a divisor of the mini-batch's samples."""
        reference = request.auto.get(AutoPhase.REFERENCE)
        self.reference_unit = 1 if reference is None else self._spec.device_unit(self._spec.components[reference])
        """Devices of the smallest Reference, as its parallel sizes say."""
        self._reference_sizes = [self.reference_unit * n for n in _thinned(divisors(model.sequences), 0.5 if self._is_large() else 1)]
        self.too_tight: list[str] = []
        """Trainer sizes that leave no room for the rest, in words."""

    def all(self) -> Iterator[Candidate]:
        """Every candidate once; an open role always has devices."""
        seen: set[tuple[Shares, ...]] = set()
        for trainer, after in self._trainers({}):
            found = False
            for reference, rollout in self._others(trainer, after):
                found = True
                key = (trainer, reference, rollout)
                if key not in seen:
                    seen.add(key)
                    yield self._candidate(trainer, reference, rollout)
            if not found:
                self.too_tight.append(self._what_is_missing(trainer))
        yield from self._collocated()
        yield from self._copied()

    def _trainer_sizes(self) -> list[int]:
        share, rollout = self._spec.training.devices_per_share, self._spec.rollout
        samples = max(rollout.prompts_per_step // self._spec.training.mini_batches, 1) * rollout.samples_per_prompt
        most = sum(group.num_devices for group in self._request.groups)
        sizes = [size for size in divisors(samples) if share * size % self._spec.training.device_unit == 0]
        thin = _thinned(sizes, self._steps_per_octave()) if len(sizes) > MAX_SIZES or self._is_large() else sizes
        return [share * size for size in thin if share * size <= most]

    def _is_large(self) -> bool:
        """Whether there are many unlike groups to start from; it must not depend on how many devices they have."""
        return len(self._request.allowed.get(AutoPhase.TRAIN, ())) > MANY_GROUPS and AutoPhase.REFERENCE in self._request.auto

    def _steps_per_octave(self) -> int:
        if self._is_large():
            return 1
        return 2 if AutoPhase.REFERENCE in self._request.auto else 6

    def _trainers(self, cursors: Cursors) -> Iterator[tuple[Shares, Cursors]]:
        """What the Trainer takes, and what is taken then; nothing where it is placed already."""
        groups = self._request.allowed.get(AutoPhase.TRAIN)
        if groups is None:
            yield (), cursors
            return
        unit = self._spec.training.device_unit
        for start in self._unlike(groups):
            order = _from(groups, start)
            chunk = _whole(unit, order)
            for size in self.trainer_sizes:
                taken = take(cursors, order, chunk, size // chunk)
                if taken is None:
                    break
                if taken[0][0].group is order[0]:  # else another start gives the same
                    yield taken

    def _references(self, trainer: Shares, cursors: Cursors) -> Iterator[tuple[Shares, Cursors]]:
        groups = self._request.allowed.get(AutoPhase.REFERENCE)
        if groups is None:
            yield (), cursors
            return
        chunk = _whole(self.reference_unit, groups)
        for start in self._reference_starts(trainer, groups):
            for size in self._reference_sizes:
                taken = take(cursors, _from(groups, start), chunk, size // chunk)
                if taken is None:
                    break
                yield taken

    def _unlike(self, groups: Sequence[FreeGroup]) -> list[int]:
        """Groups to start from: one of those that are the same in size, resource and in who may use them."""
        allowed = self._request.allowed.values()
        first: dict[tuple[object, ...], int] = {}
        for index, group in enumerate(groups):
            who = tuple(group in others for others in allowed)
            first.setdefault((group.resource, group.num_free, group.num_devices, group.devices_per_node, group.largest_node, who), index)
        return list(first.values())

    def _reference_starts(self, trainer: Shares, groups: Sequence[FreeGroup]) -> list[int]:
        """Beside the Trainer, and in unlike groups, those first that the Rollout cannot use, then the largest."""
        beside = [groups.index(share.group) for share in trainer[-1:] if share.group in groups]
        rollout = self._request.allowed.get(AutoPhase.GENERATE, ())
        unlike = sorted(self._unlike(groups), key=lambda index: (groups[index] in rollout, -groups[index].num_free, index))
        return list(dict.fromkeys([*beside, *unlike[:MANY_GROUPS]]))

    def _others(self, trainer: Shares, cursors: Cursors) -> Iterator[tuple[Shares, Shares]]:
        """What Reference and Rollout may take beside a Trainer; nothing where they are placed already."""
        groups = self._request.allowed.get(AutoPhase.GENERATE)
        beside = self._on_the_node(trainer, cursors) if groups is not None else None
        if beside is not None:
            for reference, _ in self._references(trainer, beside[1]):
                yield reference, beside[0]
        for reference, after in self._references(trainer, cursors):
            if groups is None:
                yield reference, ()
                continue
            for same in self._rollout_groups(trainer, groups):
                engines = min(available(after, same, self._size), self._model.sequences)
                taken = take(after, same, self._size, engines)
                if engines and taken is not None:
                    yield reference, taken[0]
            beside = self._on_the_node(trainer, after)
            if beside is not None:
                yield reference, beside[0]

    def _rollout_groups(self, trainer: Shares, groups: Sequence[FreeGroup]) -> list[list[FreeGroup]]:
        """Groups of one resource each: the Trainer's, and those with room for most engines, times speed."""
        by_resource: dict[str, list[FreeGroup]] = {}
        for group in groups:
            by_resource.setdefault(group.resource, []).append(group)

        def worth(resource: str) -> float:
            return self._request.speed(resource) * available({}, by_resource[resource], self._size)

        own = [share.group.resource for share in trainer[:1] if share.group.resource in by_resource]
        best = sorted(by_resource, key=worth, reverse=True)[:MAX_RESOURCES]
        return [by_resource[resource] for resource in dict.fromkeys([*own, *best])]

    def _on_the_node(self, trainer: Shares, cursors: Cursors) -> tuple[Shares, Cursors] | None:
        """Engines on the rest of the Trainer's node, where it has only one: weights then never cross the network."""
        if len(node_span(trainer)) != 1 or trainer[0].group not in self._request.allowed[AutoPhase.GENERATE]:
            return None
        group = trainer[0].group
        at = cursors[group.index]
        if group.first_node + at.node not in node_span(trainer):
            return None  # the Reference took the rest
        engines = min(group.room_on_node(at, self._size), self._model.sequences)
        return take(cursors, [group], self._size, engines) if engines else None

    def _candidate(self, trainer: Shares, reference: Shares, rollout: Shares) -> Candidate:
        found = {AutoPhase.TRAIN: trainer, AutoPhase.GENERATE: rollout, AutoPhase.REFERENCE: reference}
        shares = {phase: taken for phase, taken in found.items() if taken}
        use = self._use(shares)
        spans = [node_span(taken) for taken in shares.values()]
        meeting = sum(len(a & b) for i, a in enumerate(spans) for b in spans[:i])
        return self._numbered(Kind.DISAGGREGATED, shares, use, shared_nodes=meeting)

    def _numbered(
        self, kind: Kind, shares: dict[AutoPhase, Shares], use: Use, *, shared_nodes: int = 0, beside: int | None = None
    ) -> Candidate:
        self._count += 1
        cost = self._model.cost(use)
        return Candidate(
            kind=kind,
            shares=shares,
            beside=beside,
            use=use,
            cost=cost,
            shared_nodes=shared_nodes,
            room_is_known=self._request.room_is_known,
            position=self._count,
        )

    def _use(self, shares: dict[AutoPhase, Shares], *, is_shared: bool = False) -> Use:
        devices, speeds, nodes = {}, {}, {}
        for phase in AutoPhase:
            fixed, taken = self._request.fixed.get(phase), shares.get(phase, ())
            devices[phase] = sum(share.num_devices for share in taken) + (fixed.num_devices if fixed else 0)
            resource = taken[0].group.resource if taken else fixed.resource if fixed else ""
            speeds[phase] = self._request.speed(resource)
            nodes[phase] = node_span(taken) | (fixed.nodes if fixed else frozenset())
        engines = sum(share.num_devices for share in shares.get(AutoPhase.GENERATE, ())) // self._size
        fixed_rollout = self._request.fixed.get(AutoPhase.GENERATE)
        return Use(
            trainer_devices=max(devices[AutoPhase.TRAIN], 1),
            engines=max(engines + (fixed_rollout.num_processes if fixed_rollout else 0), 1),
            reference_devices=devices[AutoPhase.REFERENCE],
            trainer_speed=speeds[AutoPhase.TRAIN],
            rollout_speed=speeds[AutoPhase.GENERATE],
            reference_speed=speeds[AutoPhase.REFERENCE],
            trainer_spans_nodes=len(nodes[AutoPhase.TRAIN]) > 1,
            sync_spans_nodes=len(nodes[AutoPhase.TRAIN] | nodes[AutoPhase.GENERATE]) > 1,
            shares_devices=is_shared,
        )

    def _collocated(self) -> Iterator[Candidate]:
        """All open roles on the same devices, where Trainer and Rollout are both open."""
        allowed = self._request.allowed
        if AutoPhase.TRAIN not in allowed or AutoPhase.GENERATE not in allowed:
            return
        common = [group for group in allowed[AutoPhase.TRAIN] if all(group in groups for groups in allowed.values())]
        for resource in dict.fromkeys(group.resource for group in common):
            groups = [group for group in common if group.resource == resource]
            unit = self._spec.training.device_unit
            chunk = math.lcm(self._size, _whole(unit, groups), _whole(self.reference_unit, groups))
            for size in reversed(self.trainer_sizes):
                taken = take({}, groups, chunk, size // chunk) if size % math.lcm(chunk, self.reference_unit) == 0 else None
                if taken is not None:
                    shares = dict.fromkeys(self._request.auto, taken[0])
                    yield self._numbered(Kind.COLLOCATED, shares, self._use(shares, is_shared=True))
                    break

    def _copied(self) -> Iterator[Candidate]:
        """All open roles on the devices of an explicit Trainer or Rollout."""
        for phase in (AutoPhase.TRAIN, AutoPhase.GENERATE):
            fixed = self._request.fixed.get(phase)
            if fixed is None or (AutoPhase.TRAIN in self._request.auto and fixed.num_devices not in self.trainer_sizes):
                continue
            if fixed.num_devices % self.reference_unit:
                continue
            speed = self._request.speed(fixed.resource)
            use = Use(
                trainer_devices=fixed.num_devices,
                engines=max(fixed.num_devices // self._size, 1),
                reference_devices=fixed.num_devices if AutoPhase.REFERENCE in self._request.auto else 0,
                trainer_speed=speed,
                rollout_speed=speed,
                reference_speed=speed,
                trainer_spans_nodes=len(fixed.nodes) > 1,
                sync_spans_nodes=len(fixed.nodes) > 1,
                shares_devices=True,
            )
            yield self._numbered(Kind.COLLOCATED, {}, use, beside=fixed.index)

    def _what_is_missing(self, trainer: Shares) -> str:
        size = sum(share.num_devices for share in trainer)
        engine = f"an engine of {self._size} devices on one node" if self._size > 1 else "an engine"
        needs = [engine] if AutoPhase.GENERATE in self._request.auto else []
        needs += [f"the {ROLE_OF_PHASE[AutoPhase.REFERENCE]}"] if AutoPhase.REFERENCE in self._request.auto else []
        devices = f"{size} {ROLE_OF_PHASE[AutoPhase.TRAIN]} device{'' if size == 1 else 's'}"
        who = f"{devices} from {trainer[0].group.name} on" if trainer else "explicit placements"
        return f"no room for {' and '.join(needs)} beside {who}"


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return low + [number // n for n in reversed(low) if n * n != number]


def _thinned(sizes: Sequence[int], per_octave: float) -> list[int]:
    """The smallest size of each step on a logarithmic scale."""
    first: dict[int, int] = {}
    for size in sizes:
        first.setdefault(math.floor(math.log2(size) * per_octave), size)
    return list(first.values())


def _whole(unit: int, groups: Sequence[FreeGroup]) -> int:
    """What stays on one node: devices that share layers and sequences, or a device where these are more than any node has."""
    return unit if unit <= max(group.largest_node for group in groups) else 1


def _from(groups: Sequence[FreeGroup], start: int) -> list[FreeGroup]:
    """``groups[start]`` and those of the same resource, round from there."""
    return [group for group in (*groups[start:], *groups[:start]) if group.resource == groups[start].resource]
