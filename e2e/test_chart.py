"""The chart through helm: its own test. Upgrade and rollback: test_upgrade.py."""

from __future__ import annotations

from e2e.installation import RELEASE, Helm


def test_the_charts_own_test_passes(helm: Helm):
    assert "Succeeded" in helm("test", RELEASE, "--timeout=120s")
