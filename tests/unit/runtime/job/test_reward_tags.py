"""Before any worker starts: every tag of the data has a reward, and a Function takes its parameters."""

from pathlib import Path

import pytest

from rljob_api.validation import check
from rljob_runtime.errors import RewardSetupError
from rljob_runtime.job import launch, worker_settings
from rljob_runtime.job.judge_settings import Share

ROOT = Path(__file__).parents[4]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "sources: [even]",
            "sources: [odd]",
            r"the tag 'even' of data source 'file' has no reward \(sources of the rewards: sums, plus, odd\)",
        ),
        ("{digits: 3}", "{digit: 3}", "missing a required argument: 'digits'"),
    ],
)
def test_preflight_names_what_is_missing(old: str, new: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (tmp_path / "config.json").write_text("{}")
    text = (ROOT / "examples" / "domains.yaml").read_text().replace("path: models/tiny", f"path: {tmp_path}")
    assert old in text
    with pytest.raises(RewardSetupError, match=message):
        launch.preflight(check(text.replace(old, new)).job.spec, ROOT / "examples")


def test_every_field_of_a_reward_reaches_its_process() -> None:
    spec = check((ROOT / "examples" / "domains.yaml").read_text()).job.spec
    task, _, even = (worker_settings.reward_config(reward, Share()) for reward in spec.rewards)
    assert (task.sources, task.on_timeout, task.on_error) == (("sums",), 0.0, None)
    assert (even.function, even.params, even.on_error, even.timeout_s) == ("domains_rewards:even", {"digits": 3}, 0.0, 2.0)
    changed = spec.rewards[2].model_copy(
        update={
            "network": True, "processes": True, "read_paths": ("/data",), "memory_bytes": 1 << 30, "disk_bytes": 1 << 26,
            "on_timeout": "Drop",
        }
    )  # fmt: skip
    loose = worker_settings.reward_config(changed, Share())
    assert (loose.network, loose.processes, loose.read_paths, loose.memory_bytes, loose.disk_bytes, loose.on_timeout) == (
        True,
        True,
        ("/data",),
        1 << 30,
        1 << 26,
        None,
    )
    assert loose.isolation != even.isolation == task.isolation
