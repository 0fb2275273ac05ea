"""rljob plan --explain and --measured."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from rljob_api.reading import manifest as reader
from rljob_api.validation import check
from rljob_runtime.commands import measured
from rljob_runtime.commands.cli import app
from rljob_runtime.errors import RuntimeFault
from tests.support.golden import Golden
from tests.unit.api.manifests import manifest

ROOT = Path(__file__).parents[4]
GOLDEN = ROOT / "tests" / "golden" / "explain"
EXAMPLE = ROOT / "examples" / "auto-placement.yaml"
STEPS = ((9.0, 9.0, 9.0), (2.0, 1.0, 0.1), (4.0, 1.0, 0.3), (3.0, 1.0, 0.2))
"""Seconds of generation, training, sync; the first step is slow and does not count."""


@pytest.fixture(autouse=True)
def without_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The examples name models/tiny: what is printed must not depend on whether somebody made it."""
    monkeypatch.chdir(tmp_path)


def rljob(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "100"})


def unpadded(text: str) -> str:
    """Without the blanks that fill a terminal's lines."""
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def write_run(folder: Path, *, steps: tuple[tuple[float, float, float], ...] = STEPS, ratio: float = 0.0) -> Path:
    """A finished run on one device each; gives its summary."""
    summary: dict[str, Any] = dict.fromkeys(("failure", "reward_first", "reward_last", "reward_best", "pass_rate_last", "tokens_per_s"))
    summary |= dict.fromkeys(("validation_mean", "validation_pass_rate"))
    summary |= {"job_name": "case", "status": "succeeded", "steps": 4, "total_steps": 4, "total_s": 1.0, "startup_s": 1.0}
    summary |= {"training_s": 1.0, "tokens": 1, "weight_version": 4, "seed": 0, "packages": {}}
    rows = [
        {"step": i + 1, "version": i + 1, "wall_s": 1.0, "time/generate_s": generate, "time/train_s": train, "time/sync_s": sync}
        for i, (generate, train, sync) in enumerate(steps)
    ]
    document = manifest()
    document["spec"]["overlap"] = {"asyncGenerationRatio": ratio}
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "spec.yaml").write_text(yaml.safe_dump(document))
    return folder / "summary.json"


def as_data(job: Path) -> dict[str, Any]:
    """A manifest as the product reads it: 4e-4 is a number."""
    data = reader.read(job.read_text()).data
    assert isinstance(data, dict)
    return data


def write_job(path: Path, **changes: Any) -> Path:
    """The example with other sections of its spec."""
    document = as_data(EXAMPLE)
    document["spec"].update(changes)
    path.write_text(yaml.safe_dump(document))
    return path


def pasted(job: Path, block: str) -> dict[str, Any]:
    """The job with the printed placements in place of its own."""
    document = as_data(job)
    printed = {entry["name"]: entry["placement"] for entry in yaml.safe_load(block)["components"]}
    for component in document["spec"]["components"]:
        component["placement"] = printed.get(component["name"], component["placement"])
    return document


def test_the_example(golden: Golden) -> None:
    result = rljob("plan", str(EXAMPLE), "--explain")
    assert (result.exit_code, result.stderr) == (0, "")
    assert golden.differences(GOLDEN / "auto-placement.txt", unpadded(result.stdout)) == ""


def test_a_choice_with_measured_times(tmp_path: Path, golden: Golden) -> None:
    result = rljob("plan", str(EXAMPLE), "--explain", "--measured", str(write_run(tmp_path / "run")))
    assert (result.exit_code, result.stderr) == (0, "")
    assert golden.differences(GOLDEN / "measured.txt", unpadded(result.stdout)) == ""


def test_rejected_for_memory(tmp_path: Path, golden: Golden) -> None:
    """A reference, two groups, a model that needs several devices, one-step overlap."""
    groups = [{"name": name, "nodes": 2, "devicesPerNode": 8, "deviceMemory": "80Gi"} for name in ("a", "b")]
    components = [
        {"name": "train", "role": "Trainer", "placement": {"mode": "Auto"}},
        {"name": "infer", "role": "Rollout", "placement": {"mode": "Auto"}, "engine": {"tensorParallelSize": 4}},
        {"name": "ref", "role": "Reference", "placement": {"mode": "Auto", "nodeGroups": ["b"]}},
        {"name": "reward", "role": "Reward", "placement": {"workers": 1}},
    ]
    job = write_job(
        tmp_path / "job.yaml",
        nodeGroups=groups,
        components=components,
        model={"path": "m", "dtype": "bfloat16", "parameterCount": 16_000_000_000},
        algorithm={"kl": {"coefficient": 0.01}},
        overlap={"asyncGenerationRatio": 1},
        rollout={"promptsPerStep": 64, "samplesPerPrompt": 8, "maxPromptTokens": 512, "maxResponseTokens": 16384},
    )
    result = rljob("plan", str(job), "--explain")
    assert result.exit_code == 0
    assert "does not fit" in result.stdout
    stable = re.sub(r"(deviceMemory: device 0 of a needs) .*", r"\1 ..", result.stdout)
    assert golden.differences(GOLDEN / "memory.txt", unpadded(stable)) == ""
    assert check(pasted(job, rljob("plan", str(job), "--explain", "-o", "yaml").stdout), runnable=False).plan.component("ref").processes


def test_nothing_but_sharing(tmp_path: Path, golden: Golden) -> None:
    job = write_job(tmp_path / "job.yaml", nodeGroups=[{"name": "local", "devicesPerNode": 1, "deviceResource": "cpu"}])
    result = rljob("plan", str(job), "--explain")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert golden.differences(GOLDEN / "sharing.txt", unpadded(result.stdout)) == ""


def test_taking_turns(tmp_path: Path, golden: Golden) -> None:
    result = rljob("plan", str(write_job(tmp_path / "job.yaml", offload={"residency": "Switching"})), "--explain")
    assert (result.exit_code, result.stderr) == (0, "")
    assert golden.differences(GOLDEN / "switching.txt", unpadded(result.stdout)) == ""


def test_what_is_printed_can_be_pasted() -> None:
    block = rljob("plan", str(EXAMPLE), "--explain", "-o", "yaml").stdout
    assert block in rljob("plan", str(EXAMPLE), "--explain").stdout
    assert check(pasted(EXAMPLE, block)).plan == check(EXAMPLE.read_text()).plan


def test_for_tools() -> None:
    document = json.loads(rljob("plan", str(EXAMPLE), "--explain", "-o", "json").stdout)
    chosen = document["candidates"][document["chosen"]]
    assert chosen["placements"] == {"actor_train": {"ranks": "0-1"}, "actor_infer": {"ranks": "2"}}
    assert (chosen["rejected"], chosen["lastResort"], document["basis"]) == (None, False, "relative")
    costs = [candidate["cost"] for candidate in document["candidates"]]
    assert all(c["stepSeconds"] == pytest.approx(sum(c.values()) - c["stepSeconds"] - 2 * c["hiddenSeconds"], rel=1e-5) for c in costs)
    assert document["candidates"][document["runnerUp"]]["cost"]["stepSeconds"] >= chosen["cost"]["stepSeconds"]


def test_nothing_to_explain() -> None:
    quickstart = str(ROOT / "examples" / "quickstart.yaml")
    explained, timed = rljob("plan", quickstart, "--explain", "-o", "json"), rljob("plan", quickstart, "--measured", "summary.json")
    assert (explained.exit_code, timed.exit_code) == (2, 2)
    assert "Every placement is explicit" in rljob("plan", quickstart, "--explain").stdout
    assert "nothing was chosen, every placement is explicit" in explained.stderr
    assert "--measured: has no effect, no component has placement: {mode: Auto}" in timed.stderr


def test_memory_is_explained_with_its_arithmetic(tmp_path: Path) -> None:
    job = (ROOT / "examples" / "quickstart.yaml").read_text().replace("\n  model:\n", "\n  model:\n    parameterCount: 1000000\n", 1)
    (tmp_path / "job.yaml").write_text(job)
    shown = rljob("plan", str(tmp_path / "job.yaml"), "--explain").stdout
    assert "model: 1.00M parameters" in shown
    assert "AdamW m and v 7.6 MiB (1.00M x 8 B)" in shown


def test_measured_times_of_a_run(tmp_path: Path) -> None:
    """Medians without the first step; devices through the planner."""
    times = measured.read(write_run(tmp_path / "run"))
    assert times.model_dump() == {
        "rollout_devices": 1,
        "trainer_devices": 1,
        "generate_seconds": 3.0,
        "train_seconds": 1.0,
        "sync_seconds": 0.2,
    }
    only_one = measured.read(write_run(tmp_path / "short", steps=STEPS[:1]))
    assert (only_one.generate_seconds, only_one.sync_seconds) == (9.0, 9.0)


def test_measured_times_decide_the_plan_too(tmp_path: Path) -> None:
    summary = write_run(tmp_path / "run")
    plans = [json.loads(rljob("plan", str(EXAMPLE), *more, "-o", "json").stdout) for more in ((), ("--measured", str(summary)))]
    assert [plan["components"][0]["worldSize"] for plan in plans] == [2, 1]


def without(key: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        summary = json.loads((folder / "summary.json").read_text())
        del summary[key]
        (folder / "summary.json").write_text(json.dumps(summary))

    return change


def replaced(file: str, old: str, new: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / file).write_text((folder / file).read_text().replace(old, new))

    return change


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (lambda folder: (folder / "summary.json").unlink(), "summary.json: cannot be read"),
        (without("total_steps"), "summary.json: not a summary of this version: total_steps: Field required"),
        (lambda folder: (folder / "metrics.jsonl").unlink(), "metrics.jsonl: no step has time/generate_s"),
        (replaced("metrics.jsonl", "train_s", "other_s"), "metrics.jsonl: no step has time/train_s"),
        (replaced("metrics.jsonl", '"time/train_s": 1.0', '"time/train_s": 0'), "metrics.jsonl: time/train_s is 0 s in most steps"),
        (lambda folder: (folder / "spec.yaml").unlink(), "spec.yaml: cannot be read"),
        (replaced("spec.yaml", "Trainer", "Trainor"), "spec.yaml: is not the spec of a run: spec.components[0].role"),
        (replaced("spec.yaml", "asyncGenerationRatio: 0.0", "asyncGenerationRatio: 1.0"), "spec.yaml: overlap.asyncGenerationRatio is 1"),
    ],
)
def test_runs_that_say_nothing(tmp_path: Path, spoil: Callable[[Path], None], problem: str) -> None:
    summary = write_run(tmp_path / "run")
    spoil(summary.parent)
    with pytest.raises(RuntimeFault) as caught:
        measured.read(summary)
    assert problem in str(caught.value)
    result = rljob("plan", str(EXAMPLE), "--measured", str(summary))
    assert (result.exit_code, result.stdout) == (2, "")
    assert problem in result.stderr


def test_a_copied_run_folder_is_enough(tmp_path: Path) -> None:
    shutil.copytree(write_run(tmp_path / "run").parent, tmp_path / "elsewhere")
    assert measured.read(tmp_path / "elsewhere" / "summary.json") == measured.read(tmp_path / "run" / "summary.json")


@pytest.mark.parametrize(("devices", "words"), [(1, "and it may not fit: spec.nodeGroups[0].deviceMemory: "), (2, "Left out (1): ")])
def test_sharing_that_may_not_fit_is_explained(devices: int, words: str, tmp_path: Path) -> None:
    document = manifest()
    spec = document["spec"]
    spec["nodeGroups"][0] |= {"deviceResource": "nvidia.com/gpu", "devicesPerNode": devices, "deviceMemory": "28Gi"}
    spec["model"] |= {"parameterCount": 494_032_768, "dtype": "bfloat16"}
    spec["measured"] = {"rolloutDevices": 1, "trainerDevices": 1, "generateSeconds": 100, "trainSeconds": 100}
    for component in spec["components"][:2]:
        component["placement"] = {"mode": "Auto"}
    spec["components"][1]["engine"] = {"memoryFraction": 0.4}
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(document))
    text = rljob("plan", str(file), "--explain").stdout
    assert words in text
    assert "where model.parameterCount leaves activations, logits and caches unsaid; with those of a usual model of that size: " in text
    assert ("may not fit " in text) == (devices == 2), "in the table where another is chosen"
    found = json.loads(rljob("plan", str(file), "--explain", "-o", "json").stdout)
    chosen = found["candidates"][found["chosen"]]
    assert (chosen["rejected"], found["runnerUp"], bool(found["doubt"])) == (None, None, devices == 1)
