"""The quickstart learns, for three seeds: the same commands as `make run`, from making the model to the summary."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.integration.jobs import rljob
from tests.layout.tree import ROOT

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_reward_rises_from_at_most_035_to_at_least_085(seed: int, quickstart_models: Callable[[int], Path], tmp_path: Path) -> None:
    (tmp_path / "models").symlink_to(quickstart_models(seed))
    manifest = yaml.safe_load((ROOT / "examples" / "quickstart.yaml").read_text())
    manifest["spec"]["seed"] = seed
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(manifest))
    print(rljob("run", "job.yaml", cwd=tmp_path))
    summary = json.loads((tmp_path / "runs" / "quickstart" / "summary.json").read_text())
    print(json.dumps(summary, indent=1))
    assert summary["status"] == "succeeded"
    assert summary["reward_first"]["mean"] <= 0.35
    assert summary["reward_last"]["mean"] >= 0.85
