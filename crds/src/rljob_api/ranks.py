"""RLinf's rank maps: ``0-3``, ``all``, ``0,2,4-7`` and, with process ranks, ``0-3:0-7``.

::

    RANKMAP = [ PART ] { "," [ PART ] }      empty parts are skipped, at least one part is needed
    PART    = RES [ ":" PROC ]
    RES     = INT | INT "-" INT | "all"      "all" in any case
    PROC    = INT | INT "-" INT
    INT     = one to nine of 0-9             RLinf takes whatever Python's int() takes, such as +1, 1_0 or Arabic digits

Ranges are inclusive; spaces are allowed around every token. Later parts must lie above earlier ones.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rljob_api.errors import PlacementTextError, show

MAX_RANKS = 1_000_000
"""Ranks one text may select."""
_INT = re.compile(r"[0-9]{1,9}")
_EXAMPLES = 'write for example "0-3", "0,2,4-7" or "all"'


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
    """One part of a rank map."""

    resources: RankRange | None
    """Device ranks; None means all."""
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

    def resolve(self, num_available: int) -> Sequence[int]:
        """Device ranks in ascending order out of ``0 .. num_available - 1``.

        Raises:
            PlacementTextError: there is no device, a rank is out of range, given twice or not above the earlier parts,
                or more than :data:`MAX_RANKS` are selected.
        """
        if num_available == 0:
            raise PlacementTextError(
                "there are no devices to choose from", "set devicesPerNode of the node groups, or use workers for a CPU-only component"
            )
        ranks: list[int] = []
        for part in self.parts:
            first, last = (0, num_available - 1) if part.resources is None else (part.resources.start, part.resources.end)
            if last >= num_available:
                beyond = first if first >= num_available else last
                raise PlacementTextError(
                    f"device rank {beyond} does not exist, the {num_available} available ranks are 0-{num_available - 1}",
                    "use existing ranks, or ask for more nodes or devicesPerNode",
                )
            if ranks and first <= ranks[-1]:
                raise PlacementTextError(
                    f"part {show(str(part))} starts at rank {first}, but an earlier part already reached rank {ranks[-1]}",
                    "list every rank once, in ascending order",
                )
            if len(ranks) + last - first + 1 > MAX_RANKS:
                raise PlacementTextError(f"selects more than {MAX_RANKS} ranks", "use a smaller range")
            ranks.extend(range(first, last + 1))
        return ranks


def parse(text: str) -> RankMap:
    """Parse a rank map; bounds and order are checked later by :meth:`RankMap.resolve`.

    Raises:
        PlacementTextError: the text does not follow the grammar.
    """
    parts = tuple(_parse_part(part.strip()) for part in text.split(",") if part.strip())
    if not parts:
        raise PlacementTextError("selects no rank", _EXAMPLES)
    return RankMap(parts=parts)


def _parse_part(part: str) -> RankPart:
    pieces = [piece.strip() for piece in part.split(":")]
    if len(pieces) > 2:
        raise PlacementTextError(f"part {show(part)} has {len(pieces) - 1} colons", "write at most one, as in DEVICES:PROCESSES")
    resources = None if pieces[0].lower() == "all" else _parse_range(pieces[0], "device rank")
    if len(pieces) == 1:
        return RankPart(resources=resources)
    if pieces[1].lower() == "all":
        raise PlacementTextError(f'part {show(part)} has "all" after the colon', "write the process ranks as numbers, for example 0-7")
    return RankPart(resources=resources, processes=_parse_range(pieces[1], "process rank"))


def _parse_range(text: str, what: str) -> RankRange:
    bounds = [bound.strip() for bound in text.split("-")]
    if len(bounds) > 2 or not all(_INT.fullmatch(bound) for bound in bounds):
        raise PlacementTextError(f"{show(text)} is not a {what} or a range of them", _EXAMPLES)
    start, end = int(bounds[0]), int(bounds[-1])
    if start > end:
        raise PlacementTextError(f"range {show(text)} starts above its end", f'write "{end}-{start}"')
    return RankRange(start=start, end=end)
