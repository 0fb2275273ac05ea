"""RLinf's rank maps: ``0-3``, ``all``, ``0,2,4-7`` and, with process ranks, ``0-3:0-7``.

::

    RANKMAP = [ PART ] { "," [ PART ] }      empty parts are skipped, at least one part is needed
    PART    = RES [ ":" PROC ]
    RES     = INT | INT "-" INT | "all"      "all" in any case
    PROC    = INT | INT "-" INT
    INT     = one to nine of 0-9             RLinf takes whatever Python's int() takes, such as +1, 1_0 or Arabic digits

    text ── evaluate(units available) ──> Evaluation: units and processes of every part ── processes() ──> units of every process

Ranges are inclusive; spaces are allowed around every token. Later parts must lie above earlier ones; process ranks count from
0 without gaps and may be left out: then a part has a process per unit. R units and P processes of a part: with R >= P every
process has R/P consecutive units, else P/R consecutive processes share a unit.

Checks run part by part in RLinf 0.3.0's order, so that the first violated one is what RLinf reports. What RLinf takes and
RLJob does not (D7: processes that do not start at 0; D9: odd numbers) is refused after them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rljob_api.errors import PlacementError, counted, show
from rljob_api.placement.assignment import available_ranks, check_amount

_INT = re.compile(r"[0-9]{1,9}")
_EXAMPLES = 'write for example "0-3", "0,2,4-7" or "all"'
_PROCESS_EXAMPLE = "write the process ranks as numbers, for example 0-7"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRange:
    """Ranks ``start`` .. ``end``, both included."""

    start: int
    end: int

    def __str__(self) -> str:
        """``3`` or ``0-3``."""
        return str(self.start) if self.start == self.end else f"{self.start}-{self.end}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """One part of a rank map as it is written."""

    resources: RankRange | None
    """Unit ranks; None means all."""
    processes: RankRange | None = None
    """Process ranks after a colon."""

    def __str__(self) -> str:
        """The part as it is written."""
        resources = "all" if self.resources is None else str(self.resources)
        return resources if self.processes is None else f"{resources}:{self.processes}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMap:
    """A parsed rank map; :func:`parse` makes it, ``str`` writes it in canonical form."""

    parts: tuple[RankPart, ...]

    def __str__(self) -> str:
        """Canonical text: no spaces, no empty parts; parses to an equal map."""
        return ",".join(str(part) for part in self.parts)

    @property
    def has_process_ranks(self) -> bool:
        """Whether any part gives process ranks."""
        return any(part.processes is not None for part in self.parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluatedPart:
    """One part against the units there are."""

    units: range
    """Unit ranks, at least one."""
    processes: range
    """Process ranks, at least one; more than units, or a number that divides that of the units."""
    gives_processes: bool
    """Whether the process ranks are written, not derived."""

    @property
    def is_uneven(self) -> bool:
        """Whether some units have one process more than others."""
        return len(self.processes) > len(self.units) and len(self.processes) % len(self.units) > 0

    def split(self) -> Iterator[range]:
        """Units of every process of this part; where its units do not divide the processes, the first units have one more."""
        num_units, num_processes = len(self.units), len(self.processes)
        if num_units >= num_processes:
            size = num_units // num_processes
            for first in range(0, num_units, size):
                yield self.units[first : first + size]
        else:
            share, further = divmod(num_processes, num_units)
            for index, unit in enumerate(self.units):
                alone = range(unit, unit + 1)
                for _ in range(share + (index < further)):
                    yield alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """A rank map that RLinf takes; :func:`evaluate` makes it."""

    parts: tuple[EvaluatedPart, ...]
    """At least one; units ascend, process ranks follow each other."""
    refused: PlacementError | None
    """Why RLJob does not take it all the same (D7, D9)."""

    @property
    def num_units(self) -> int:
        """Units of all parts."""
        return sum(len(part.units) for part in self.parts)

    @property
    def num_processes(self) -> int:
        """Processes of all parts."""
        return sum(len(part.processes) for part in self.parts)

    @property
    def gives_processes(self) -> bool:
        """Whether any part gives process ranks."""
        return any(part.gives_processes for part in self.parts)

    def split(self) -> list[range]:
        """Units of every process, in process order."""
        return [units for part in self.parts for units in part.split()]


def processes(text: str, num_available: int, unit_name: str = "accelerator") -> list[range]:
    """Units of every process, in process order.

    Args:
        text: the rank map.
        num_available: available unit ranks are ``0 .. num_available - 1``.
        unit_name: what a unit is, for messages.

    Raises:
        PlacementError: P1 to P14, S2, D7 or D9; too many processes or units (S2).
    """
    return checked(text, num_available, unit_name).split()


def checked(text: str, num_available: int, unit_name: str = "accelerator") -> Evaluation:
    """The same without listing the processes: O(length of the text).

    Raises:
        PlacementError: as :func:`processes`.
    """
    evaluation = evaluate(text, num_available, unit_name)
    if evaluation.refused is not None:
        raise evaluation.refused
    return evaluation


def evaluate(text: str, num_available: int, unit_name: str = "accelerator") -> Evaluation:
    """Check a rank map against the units there are, without listing them: O(length of the text).

    Raises:
        PlacementError: as :func:`processes`, without D7 and D9, which :attr:`Evaluation.refused` has.
    """
    evaluator = _Evaluator(num_available, unit_name)
    for part in _part_texts(text):
        evaluator.add(part)
    return evaluator.result()


def parse(text: str) -> RankMap:
    """Parse a rank map without knowing which units there are.

    Raises:
        PlacementError: the text does not follow the grammar (P1 to P3, P5, P8 to P10, S2, D9).
    """
    parts: list[RankPart] = []
    for part in _part_texts(text):
        resource_text, process_text = _pieces(part)
        resources = _resources(part, resource_text)
        written = None if process_text is None else _process_range(part, process_text)
        for each in (resources, written):
            if each is not None and each.odd:
                raise _odd_number(each.odd)
        parts.append(RankPart(resources=resources.ranks if resources else None, processes=written.ranks if written else None))
    if not parts:
        raise _nothing()
    return RankMap(parts=tuple(parts))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Written:
    """A range as read."""

    ranks: RankRange
    odd: str | None
    """The text of a number that only Python's int() takes."""


class _Evaluator:
    """Takes the parts of one rank map in order."""

    def __init__(self, num_available: int, unit_name: str) -> None:
        self._num_available = num_available
        self._unit_name = unit_name
        self._parts: list[EvaluatedPart] = []
        self._odd: str | None = None

    def add(self, part: str) -> None:
        resource_text, process_text = _pieces(part)
        resources = _resources(part, resource_text)
        units = range(self._num_available) if resources is None else self._existing(resources.ranks)
        if not units:
            raise PlacementError(
                "P5",
                f"part {show(part)} selects no {self._unit_name}, there are none",
                "choose a node group that has some, or place on nodes",
            )
        self._check_units_follow(part, units)
        written = None if process_text is None else _process_range(part, process_text)
        following = self._parts[-1].processes.stop if self._parts else 0
        if written is None:
            ranks = range(following, following + len(units))
        else:
            ranks = range(written.ranks.start, written.ranks.end + 1)
            self._check_processes_follow(part, ranks)
        if len(units) % len(ranks) and len(ranks) < len(units):
            raise PlacementError(
                "P14",
                f"part {show(part)} has {counted(len(units), f'{self._unit_name} rank')}, which its {len(ranks)} processes do not divide",
                "give every process as many units",
            )
        for each in (resources, written):
            if self._odd is None and each is not None:
                self._odd = each.odd
        self._parts.append(EvaluatedPart(units=units, processes=ranks, gives_processes=written is not None))

    def result(self) -> Evaluation:
        if not self._parts:
            raise _nothing()
        first = self._parts[0].processes.start
        refused = None
        if self._odd is not None:
            refused = _odd_number(self._odd)
        elif first:
            refused = PlacementError("D7", f"process ranks start at {first}", "let the first process have rank 0")
        evaluation = Evaluation(parts=tuple(self._parts), refused=refused)
        check_amount(evaluation.num_processes, evaluation.num_units, self._unit_name)
        return evaluation

    def _existing(self, ranks: RankRange) -> range:
        if ranks.end >= self._num_available:
            beyond = ranks.start if ranks.start >= self._num_available else ranks.end
            there = "there are none" if not self._num_available else available_ranks(self._num_available)
            raise PlacementError(
                "P4",
                f"{self._unit_name} rank {beyond} does not exist, {there}",
                "use existing ranks, or ask for more nodes or devices per node",
            )
        return range(ranks.start, ranks.end + 1)

    def _check_units_follow(self, part: str, units: range) -> None:
        if not self._parts or units.start >= self._parts[-1].units.stop:
            return
        if any(units.start < other.units.stop and other.units.start < units.stop for other in self._parts):
            raise PlacementError("P6", f"part {show(part)} repeats {self._unit_name} ranks of an earlier part", "list every rank once")
        raise PlacementError(
            "P7",
            f"part {show(part)} starts at {self._unit_name} rank {units.start}, "
            f"but an earlier part already reached rank {self._parts[-1].units[-1]}",
            "list the ranks in ascending order",
        )

    def _check_processes_follow(self, part: str, ranks: range) -> None:
        if not self._parts:
            return
        first, following = self._parts[0].processes.start, self._parts[-1].processes.stop
        if ranks.start < following and ranks.stop > first:
            raise PlacementError(
                "P11", f"part {show(part)} repeats process ranks of an earlier part", f"continue with process rank {following}"
            )
        if ranks.start != following:
            raise PlacementError(
                "P12",
                f"part {show(part)} starts at process rank {ranks.start}, the next one is {following}",
                f"continue with process rank {following}",
            )


def _part_texts(text: str) -> Iterator[str]:
    return (part.strip() for part in text.split(",") if part.strip())


def _pieces(part: str) -> tuple[str, str | None]:
    """The texts before and after the colon."""
    pieces = part.split(":", 2)
    if len(pieces) > 2:
        raise PlacementError("P1", f"part {show(part)} has {part.count(':')} colons", "write at most one, as in 0-3:0-7")
    return pieces[0].strip(), pieces[1].strip() if len(pieces) == 2 else None


def _resources(part: str, text: str) -> _Written | None:
    """Unit ranks; None means all."""
    if text.lower() == "all":
        return None
    if not text:
        raise PlacementError("P5", f"part {show(part)} selects nothing before the colon", _EXAMPLES)
    return _range(text, "rank", "P2", "P3", _EXAMPLES)


def _process_range(part: str, text: str) -> _Written:
    if text.lower() == "all":
        raise PlacementError("P8", f'part {show(part)} has "all" after the colon', _PROCESS_EXAMPLE)
    if not text:
        raise PlacementError("P10", f"part {show(part)} has nothing after the colon", _PROCESS_EXAMPLE)
    return _range(text, "process rank", "P9", "P9", _PROCESS_EXAMPLE)


def _range(text: str, what: str, format_check: str, order_check: str, example: str) -> _Written:
    bounds = [bound.strip() for bound in text.split("-", 2)]
    try:
        numbers = [int(bound) for bound in bounds]
    except ValueError:
        numbers = []
    if not 1 <= len(numbers) <= 2:
        raise PlacementError(format_check, f"{show(text)} is not a {what} or a range of them", example)
    start, end = numbers[0], numbers[-1]
    if start > end:
        raise PlacementError(order_check, f"range {show(text)} starts above its end", "write the lower rank first")
    odd = next((bound for bound in bounds if not _INT.fullmatch(bound)), None)
    return _Written(ranks=RankRange(start=start, end=end), odd=odd)


def _odd_number(text: str) -> PlacementError:
    return PlacementError("D9", f"{show(text)} is not a rank of plain digits", "write one to nine of the digits 0-9")


def _nothing() -> PlacementError:
    return PlacementError("S2", "selects no rank", _EXAMPLES)
