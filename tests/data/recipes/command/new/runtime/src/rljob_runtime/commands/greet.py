"""``rljob greet``: the command of the recipe."""

from __future__ import annotations

from rljob_api.validation import CheckedJob


def greeting(checked: CheckedJob) -> str:
    """One line about a job."""
    return f"hello {checked.job.metadata.name}, {len(checked.plan.components)} components"
