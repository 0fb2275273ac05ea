"""A model on a fake Hub, with nothing in any cache: from its files on the server to a trained step, on two nodes."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tests.integration.jobs import Running, job
from tests.support.fake_hub import serving

pytestmark = pytest.mark.slow

REPO = "team/tiny"


def test_a_hub_model_on_a_cold_cache_trains_on_two_nodes(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [
        {"name": n, "devicesPerNode": 1, "deviceResource": "cpu", "env": [{"name": "HF_HOME", "value": str(tmp_path / n)}]}
        for n in ("train", "infer")
    ]
    wanted = job(Path(REPO), steps=1, nodeGroups=groups)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "driver"))
    with serving() as hub:
        commit = hub.add(REPO, model).commit
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        run = Running(tmp_path / "job", wanted)
        assert run.wait() == 0, run.output
    assert len(run.metrics()) == 1
    assert run.summary()["model_commit"] == commit
    assert json.loads((run.run_dir / "models.json").read_text())["commits"] == {REPO: commit}
    weights = {place: list((tmp_path / place).rglob("*.safetensors")) for place in ("driver", "train", "infer")}
    assert {place: len(files) for place, files in weights.items()} == {"driver": 0, "train": 1, "infer": 1}
    assert len(hub.downloads()) == 2
    asked = Counter(r.path for r in hub.requests if r.method == "HEAD")
    assert max(asked.values()) <= 3, f"the driver and each node ask once, workers never: {asked}"
    assert run.left_behind() == []
