"""Times as Kubernetes writes them: RFC 3339 in UTC, whole seconds."""

from __future__ import annotations

from datetime import UTC, datetime


def text(time: datetime) -> str:
    """For example ``2026-01-31T12:00:00Z``; fractions of a second are cut off."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse(value: object) -> datetime | None:
    """The time that a text says, without fractions of a second; None when it is no time with a zone."""
    if not isinstance(value, str):
        return None
    try:
        time = datetime.fromisoformat(value)
    except ValueError:
        return None
    return time.astimezone(UTC).replace(microsecond=0) if time.tzinfo is not None else None


def whole_seconds(time: datetime) -> datetime:
    """The same time without fractions, as it will be read back from a status."""
    return time.replace(microsecond=0)
