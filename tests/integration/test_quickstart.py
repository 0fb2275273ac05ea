"""The quickstart learns, for three seeds: the same commands as `make run`, from making the model to the summary."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def rljob(*arguments: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "rljob_runtime.commands.cli", *arguments], cwd=cwd, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_reward_rises_from_at_most_035_to_at_least_085(seed: int, tmp_path: Path) -> None:
    rljob("model", "tiny", "--out", "models/tiny", "--seed", str(seed), cwd=tmp_path)
    manifest = yaml.safe_load((ROOT / "examples" / "quickstart.yaml").read_text())
    manifest["spec"]["seed"] = seed
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(manifest))
    print(rljob("run", "job.yaml", cwd=tmp_path))
    summary = json.loads((tmp_path / "runs" / "quickstart" / "summary.json").read_text())
    print(json.dumps(summary, indent=1))
    assert summary["status"] == "succeeded"
    assert summary["reward_first"]["mean"] <= 0.35
    assert summary["reward_last"]["mean"] >= 0.85
