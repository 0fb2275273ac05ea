"""The quickstart learns, for three seeds: the same commands as `make run`, from making the model to the summary.

The processes of one seed start as users' do.
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.integration.jobs import Running
from tests.layout.tree import ROOT

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_reward_rises_from_at_most_035_to_at_least_085(
    seed: int, quickstart_models: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").symlink_to(quickstart_models(seed))
    manifest = yaml.safe_load((ROOT / "examples" / "quickstart.yaml").read_text())
    manifest["spec"]["seed"] = seed
    run = Running(tmp_path, manifest, as_users=seed == 0)
    assert run.wait() == 0, run.output
    summary = run.summary()
    print(json.dumps(summary, indent=1))
    assert summary["status"] == "succeeded"
    assert summary["reward_first"]["mean"] <= 0.35
    assert summary["reward_last"]["mean"] >= 0.85
