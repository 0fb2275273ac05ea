"""Kubernetes timestamps: RFC 3339 in UTC, whole seconds."""

from __future__ import annotations

from datetime import UTC, datetime


def text(time: datetime) -> str:
    """Format a time, for example ``2026-01-31T12:00:00Z``; fractions of a second are truncated."""
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def parse(value: object) -> datetime | None:
    """Parse a timestamp, truncated to seconds; None if it is not a timestamp with a time zone."""
    if not isinstance(value, str):
        return None
    try:
        time = datetime.fromisoformat(value)
    except ValueError:
        return None
    return time.astimezone(UTC).replace(microsecond=0) if time.tzinfo is not None else None


def whole_seconds(time: datetime) -> datetime:
    """Truncate a time to seconds, as it will be read back from a status."""
    return time.replace(microsecond=0)
