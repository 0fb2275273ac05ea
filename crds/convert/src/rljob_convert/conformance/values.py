"""Reading plain data with the checks that RLinf's config classes share: fields known and present, rank texts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from rljob_api.errors import PlacementError, did_you_mean, show
from rljob_convert.conformance.limits import MAX_GROUP_NODES

_DECIMAL = re.compile(r"[0-9]+")
_MAX_DIGITS = 9
_EXAMPLE = 'write for example "0-3", "0,2,4-7" or "all"'


def section(value: object, where: str, check: str = "K3") -> Mapping[str, object]:
    """``value`` as a map.

    Raises:
        PlacementError: it is something else (``check``).
    """
    if not isinstance(value, Mapping):
        raise PlacementError(check, f"{where} is {show(value)}, not a map", "write keys and values")
    return value


def sequence(value: object, where: str, check: str) -> Sequence[object]:
    """``value`` as a list.

    Raises:
        PlacementError: it is something else (``check``).
    """
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise PlacementError(check, f"{where} is {show(value)}, not a list", "put a dash before every entry")
    return value


def check_fields(
    value: Mapping[str, object], where: str, *, required: Iterable[str], optional: Iterable[str], missing: str = "K3", unknown: str = "K3"
) -> None:
    """Check that all required fields are there and no other than known ones.

    Raises:
        PlacementError: one is missing (``missing``), or unknown (``unknown``).
    """
    required, optional = tuple(required), tuple(optional)
    for name in required:
        if name not in value:
            raise PlacementError(missing, f"{where} has no {name}", f"add {name}")
    known = {*required, *optional}
    for name in value:
        if name not in known:
            near = did_you_mean(str(name), known)
            raise PlacementError(
                unknown, f"{where} has an unknown field {show(name)}", near or f"remove it; known are {', '.join(sorted(known))}"
            )


def rank_list(value: object, available: Sequence[int] | None, what: str = "node") -> list[int]:
    """Ranks that a text such as ``0-3,5`` or ``all`` selects: ascending, without repetition; empty for an empty text.

    Bounds are those of the available ranks only, as in RLinf 0.3.0 (``parse_rank_config``): 1 is accepted where 0 and 2 exist.

    Raises:
        PlacementError: the text is malformed (P2, D9), a range descends (P3), a rank is out of bounds (P4), or ``all`` where nothing
            is available to choose from (P8).
    """
    if not isinstance(value, str) and (isinstance(value, bool) or not isinstance(value, int)):
        raise PlacementError("P2", f"{show(value)} is not a text with {what} ranks", _EXAMPLE)
    text = str(value)
    if text.lower() == "all":
        if available is None:
            raise PlacementError("P8", f'{what} ranks cannot be "all" here', "write them as numbers, for example 0-7")
        if len(available) > MAX_GROUP_NODES:
            raise PlacementError("P4", f'"all" selects more than {MAX_GROUP_NODES} {what} ranks', "use smaller ranges")
        return sorted(set(available))
    bounds = _bounds(available)
    parts = [_bounded(part.strip(), bounds, what) for part in text.split(",") if part.strip()]
    if sum(map(len, parts)) > MAX_GROUP_NODES:
        raise PlacementError("P4", f"{show(text)} selects more than {MAX_GROUP_NODES} {what} ranks", "use smaller ranges")
    return sorted(set(chain.from_iterable(parts)))


def _bounds(available: Sequence[int] | None) -> tuple[int, ...] | None:
    """First and last; empty when nothing is available, None when anything is."""
    if isinstance(available, range):
        return (available[0], available[-1]) if available else ()
    return None if available is None else ((min(available), max(available)) if available else ())


def _bounded(part: str, bounds: tuple[int, ...] | None, what: str) -> range:
    tokens = [token.strip() for token in part.split("-")]
    if len(tokens) > 2:
        raise PlacementError("P2", f"{show(part)} is neither a {what} rank nor a range of them", _EXAMPLE)
    start, end = _number(tokens[0], what), _number(tokens[-1], what)
    if start > end:
        raise PlacementError("P3", f"range {show(part)} starts above its end", f'write "{end}-{start}"')
    if bounds is not None:
        for rank in (start, end):
            if not bounds or not bounds[0] <= rank <= bounds[1]:
                there = f"{bounds[0]}-{bounds[1]}" if bounds else "none"
                raise PlacementError("P4", f"{what} rank {rank} does not exist, available are {there}", "use existing ranks")
    return range(start, end + 1)


def _number(token: str, what: str) -> int:
    if _DECIMAL.fullmatch(token):
        if len(token.lstrip("0")) > _MAX_DIGITS:
            raise PlacementError("P4", f"{what} rank {show(token)} has more than {_MAX_DIGITS} digits", "use existing ranks")
        return int(token)
    if len(token) <= _MAX_DIGITS:
        try:
            read = int(token)
        except ValueError:
            pass
        else:
            raise PlacementError("D9", f"{what} rank {show(token)} is the number {read} to some tools only", f'write "{read}"')
    raise PlacementError("P2", f"{show(token)} is not a {what} rank", _EXAMPLE)
