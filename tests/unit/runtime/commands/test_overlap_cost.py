"""``rljob plan`` says what a weight sync costs the responses that run meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from rljob_api.validation import check
from rljob_runtime.commands.overlap_cost import overlap_cost
from tests.unit.api.manifests import manifest


def cost(overlap: dict[str, Any], engine: dict[str, Any] | None = None) -> str | None:
    document = manifest()
    document["spec"] |= {
        "overlap": overlap,
        "rollout": {"promptsPerStep": 8, "samplesPerPrompt": 4, "extraPrompts": 1, "maxPromptTokens": 100, "maxResponseTokens": 900},
    }
    for component in document["spec"]["components"]:
        if component["role"] == "Rollout" and engine is not None:
            component["engine"] = engine
    checked = check(document)
    return overlap_cost(checked.job.spec, checked.plan)


@pytest.mark.parametrize(
    ("overlap", "mode", "reported"),
    [
        ({"asyncGenerationRatio": 1.0}, "Interrupt", "KV cache of up to 36,000 tokens (36 responses); InFlight recomputes none"),
        ({"asyncGenerationRatio": 0.5}, "Interrupt", "up to 20,000 tokens (20 responses)"),
        ({"asyncGenerationRatio": 1.0, "updateMode": "Drain"}, "Drain", "waits for the longest response, up to 900 tokens"),
        (
            {"asyncGenerationRatio": 1.0, "updateMode": "InFlight"},
            "InFlight",
            "nothing; up to 36 of them continue with the cache of older weights",
        ),
    ],
)
def test_the_mode_that_holds_and_its_cost(overlap: dict[str, Any], mode: str, reported: str) -> None:
    found = cost(overlap)
    assert found is not None
    assert found.startswith(f"updateMode {mode}: each weight sync ")
    assert reported in found


def test_no_more_responses_run_than_engines_have_places_for() -> None:
    found = cost({"asyncGenerationRatio": 1.0}, {"maxRunningRequests": 10})
    assert found is not None
    assert "up to 10,000 tokens (10 responses)" in found


def test_nothing_is_reported_where_nothing_runs_ahead() -> None:
    assert cost({}) is None
