"""Examples for one machine run as they are shipped, for two or three steps.

Every row of docs/examples.md that is marked *CPU* is run here or by the file in :data:`ELSEWHERE`, which has more steps of it.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from rljob_api import validation
from rljob_api.planning.plan import Plan
from rljob_runtime.data.tokenizer import load_tokenizer
from rljob_runtime.tiny import TinySize
from rljob_runtime.tiny.model import tiny_model
from tests.integration.jobs import MIXTURE_METRICS, Running
from tests.layout.tree import ROOT

STEPS = 2
ELSEWHERE = {
    "evaluate": "test_run.py",
    "quickstart-collocated": "test_time_division.py",
    "quickstart": "test_quickstart.py",
    "distillation": "test_distilled_run.py",
    "domains": "test_domains.py",
    "frozen-lake": "test_lake_model.py",
}
"""Examples that other tests run, all of their steps or with what these tests need."""


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A run of an example that has succeeded."""

    run: Running
    plan: Plan
    model: Path
    """Folder of the policy that it began with."""

    @property
    def metrics(self) -> list[dict[str, float]]:
        return self.run.metrics()

    def workers(self, role: str) -> int:
        return sum(component.world_size for component in self.plan.components if component.role == role)


def lora(done: Finished) -> None:
    """Engines got merged weights, since the probe passed, of which only those of linear layers changed; nothing else scores the base."""
    before, after = (load_file(folder / "model.safetensors") for folder in (done.model, done.run.run_dir / "model"))
    changed = {name for name, tensor in before.items() if not torch.equal(tensor, after[name])}
    assert changed == {name for name in before if name.endswith("_proj.weight")}
    assert abs(done.metrics[0]["train/kl_loss"]) < 1e-6, "the policy starts as its base"
    assert done.metrics[-1]["train/kl_loss"] > 1e-6


def critic(done: Finished) -> None:
    """The critic trains alone for two steps, then with the policy."""
    assert all(m["critic/loss"] > 0 and m["critic/grad_norm"] > 0 for m in done.metrics)
    assert ["train/total_loss" in m for m in done.metrics] == [False, False, True]
    assert len({m["critic/value_mean"] for m in done.metrics}) == len(done.metrics), "its values do not change"


def mixture(done: Finished) -> None:
    """Experts are loaded unequally, and the loss against that is at least what equal loads have."""
    for m in done.metrics:
        assert m.keys() >= MIXTURE_METRICS
        assert m["train/load_balancing_loss"] >= 0.99
        assert m["train/expert_load_max"] > 1


def agent_program(done: Finished) -> None:
    """The program tries again after a wrong sum, and its calls are the turns that were trained."""
    for m in done.metrics:
        assert 1 < m["episode/turns_mean"] <= m["episode/turns_max"] == 2
        assert m["episode/info/sums/tries"] == m["episode/info/sums/calls"] == m["episode/turns_mean"]
        assert m["episode/errors"] + m["episode/timeouts"] == 0
        assert m["episode/info/sums/success"] == pytest.approx(m["episode/success"])
    assert max(m["staleness/max"] for m in done.metrics) <= 1


def auto_placement(done: Finished) -> None:
    """The planner used every device, and the run shows its choice."""
    trainer, engines = (done.plan.component(name).devices for name in ("actor_train", "actor_infer"))
    assert {*trainer, *engines} == {0, 1, 2}
    assert (len(trainer), len(engines)) == (done.workers("Trainer"), done.workers("Rollout"))


def rlvr_async(done: Finished) -> None:
    """Two ranks share each layer, on another node than the engine, which is at most one version behind."""
    assert {process.node_rank for process in done.plan.component("actor_train").processes} == {0}
    assert {process.node_rank for process in done.plan.component("actor_infer").processes} == {1}
    assert done.workers("Trainer") == 2
    assert [m["staleness/max"] for m in done.metrics] == [0, 1]
    validated = {m["validation/version"]: m["validation/prompts"] for m in done.metrics if "validation/version" in m}
    assert validated.keys() == {0, STEPS}, "before the first step and after the last"
    assert all(0 < prompts <= 64 for prompts in validated.values())


@dataclass(frozen=True, kw_only=True)
class Case:
    """What an example shows."""

    check: Callable[[Finished], None]
    steps: int = STEPS
    first_trained: int = 1
    """Step of the first update of the policy."""
    samples_per_prompt: int | None = None
    """Fewer than the example's, where each is a program that computes for a second; None: as shipped."""


CASES = {
    "lora": Case(check=lora),
    "critic": Case(check=critic, steps=3, first_trained=3),
    "quickstart-mixture": Case(check=mixture),
    "agent-program": Case(check=agent_program, samples_per_prompt=4),
    "auto-placement": Case(check=auto_placement),
    "rlvr-async": Case(check=rlvr_async),
}


def test_every_example_for_a_cpu_is_run() -> None:
    page = (ROOT / "docs" / "examples.md").read_text()
    listed = re.findall(r"^\| \[`([\w.-]+)\.yaml`\]\(\.\./examples/\1\.yaml\) \|[^|]*\| CPU \|", page, re.MULTILINE)
    assert sorted(listed) == sorted([*CASES, *ELSEWHERE])
    for example, file in ELSEWHERE.items():
        text = (Path(__file__).parent / file).read_text()
        assert re.search(rf'"{example}(\.yaml)?"|/{example}\.yaml', text), f"{file} does not run {example}"


def model_for(path: str, quickstart_models: Callable[[int], Path], folder: Path) -> Path:
    """The model that an example names: the one of the quickstart, or one of its size that has learned nothing."""
    learned = quickstart_models(0) / "tiny"
    if path == "models/tiny":
        return learned
    assert path == "models/mixture", f"no test makes {path}"
    tokenizer = load_tokenizer(str(learned), trust_remote_code=False)
    torch.manual_seed(0)
    tiny_model(TinySize.MIXTURE, tokenizer).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def start(example: str, case: Case, folder: Path) -> tuple[Running, Plan]:
    """Run an example of ``folder`` as ``case`` says, without the warm-up that its steps are too few for; all else is as it is shipped."""
    manifest: dict[str, Any] = yaml.safe_load((folder / f"{example}.yaml").read_text())
    manifest["spec"]["training"] |= {"steps": case.steps, "warmupSteps": 0}
    if case.samples_per_prompt is not None:
        manifest["spec"]["rollout"]["samplesPerPrompt"] = case.samples_per_prompt
    return Running(folder, manifest), validation.check(yaml.safe_dump(manifest)).plan


@pytest.mark.slow
@pytest.mark.parametrize("example", CASES)
def test_it_trains(example: str, quickstart_models: Callable[[int], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[example]
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    wanted = yaml.safe_load((ROOT / "examples" / f"{example}.yaml").read_text())["spec"]
    model = model_for(wanted["model"]["path"], quickstart_models, tmp_path / "made")
    link = tmp_path / wanted["model"]["path"]
    link.parent.mkdir()
    link.symlink_to(model)
    monkeypatch.chdir(tmp_path)

    run, plan = start(example, case, tmp_path / "examples")
    assert run.wait() == 0, run.output
    metrics, steps = run.metrics(), list(range(1, case.steps + 1))
    assert [m["step"] for m in metrics] == [m["sync/version"] for m in metrics] == steps
    assert all(math.isfinite(value) for m in metrics for value in m.values())
    assert all(m["sync/probe_max_abs_diff"] < 1e-4 for m in metrics)
    assert all(m["train/grad_norm"] > 0 and "train/total_loss" in m for m in metrics[case.first_trained - 1 :])
    sequences = wanted["rollout"]["promptsPerStep"] * (case.samples_per_prompt or wanted["rollout"]["samplesPerPrompt"])
    assert all(m["rollout/sequences"] == sequences for m in metrics)
    planned = {f"{component.name}-{process.rank}" for component in plan.components for process in component.processes}
    assert {log.stem for log in (run.run_dir / "logs").glob("*-*.log")} == planned
    assert run.summary()["status"] == "succeeded"
    case.check(Finished(run=run, plan=plan, model=model))
    assert run.left_behind() == []
