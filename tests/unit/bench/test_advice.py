"""Advice is followed in the manifest that gave it, and predicted stands beside measured."""

from __future__ import annotations

import pytest

from bench.advice.outcome import applied, first_applicable, markdown, values
from rljob_runtime.report.faster import Change

AHEAD = Change(what="overlap.asyncGenerationRatio 1", step_s=0.2, contended_s=0.29)
SPLIT = Change(what="overlap.asyncGenerationRatio 1, 1 device for training and 3 for generation", step_s=0.1)


def test_the_best_advice_that_is_one_field_is_followed() -> None:
    assert first_applicable([SPLIT, AHEAD]) == AHEAD
    assert first_applicable([SPLIT]) is None
    manifest = {"spec": {"overlap": {"updateMode": "Drain"}}}
    assert applied(manifest, AHEAD) == {"spec": {"overlap": {"updateMode": "Drain", "asyncGenerationRatio": 1}}}
    assert applied({"spec": {}}, Change(what="overlap.asyncGenerationRatio 1.5", step_s=1.0))["spec"]["overlap"] == {
        "asyncGenerationRatio": 1.5
    }
    assert manifest == {"spec": {"overlap": {"updateMode": "Drain"}}}
    with pytest.raises(ValueError, match="1 device for training"):
        applied(manifest, SPLIT)


def test_predicted_and_measured_stand_in_the_report() -> None:
    pair = {"before_s": 0.3, "predicted_s": 0.2, "contended_s": 0.3}
    found = values(AHEAD, [pair | {"after_s": seconds} for seconds in (0.25, 0.3, 0.2)])
    assert found["measured"] == pytest.approx([1.2, 1.0, 1.5])
    assert found["headline"] == (
        "overlap.asyncGenerationRatio 1: predicted 1.00 (all cores used by both phases) to 1.50 times as fast, measured 1.20"
    )
    machine = {"measured_at": "now", "processor": "P", "cores": 2, "memory_bytes": 2**30, "python": "3", "versions": {}}
    text = markdown(found | {"machine": machine, "load_before": 0.0, "steps": 60})
    assert "| 1 | 0.300 | 0.200 | 0.300 | 0.250 | 1.20 |" in text
    assert "Measured: 1.20 (1.00 to 1.50, 3 pairs); predicted: 1.50 (1.50 to 1.50, 3 pairs)." in text
