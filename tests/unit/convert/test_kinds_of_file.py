"""What is no RL job is refused, and the message says what it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_api.errors import SpecInvalidError
from rljob_convert import convert
from tests.unit.convert.test_cli import rljob

NO_JOBS = [
    ("roll", "exp_name: a\npretrain: a/b\nsft_train: {device_mapping: '[0]'}", "supervised fine-tuning"),
    ("roll", "exp_name: a\npretrain: a/b\nactor_train: {}\nchosen_key: chosen\nrejected_key: rejected", "DPO"),
    ("roll", "student_pretrain: a/b\nstudent: {}\nteacher: {}", "distillation"),
    ("roll", "services: {roll: {image: x}}", "docker-compose"),
    ("roll", "max_tokens_per_step: 64\ncustom_env: {Sokoban: {}}", "describes no job: it has max_tokens_per_step, custom_env"),
    ("rlinf", "runner: {task_type: sft}\nactor: {}", "supervised training of a policy, a reward model or a value model"),
    ("rlinf", "runner: {task_type: offline}\nactor: {}", "offline training on recorded data"),
    ("rlinf", "runner: {task_type: guess}\nactor: {}", "is not a task of RLinf"),
    ("rlinf", "runner: {task_type: embodied}\ncluster: {num_nodes: 1}\nenv: {}", "makes this file a job of robots or simulators, which"),
    (
        "rlinf",
        "runner: {task_type: embodied_eval}\nrollout: {model: {model_type: openvla_oft}}\nenv: {eval: {env_type: libero}}",
        'runner.task_type: "embodied_eval": makes this file a job of robots or simulators (model openvla_oft, environment libero), which',
    ),
    (
        "rlinf",
        "runner: {task_type: embodied}\nactor: {model: {model_type: sd3}}\nenv: {train: {env_type: diffusion}}",
        "makes this file RL of a generator of images or videos (model sd3, environment diffusion), which RLJob does not run",
    ),
    (
        "rlinf",
        "actor: {model: {model_type: '${rollout.model.model_type}'}}\nrollout: {model: {model_type: openpi}}",
        'actor.model.model_type: "openpi": makes this file a job of robots',
    ),
    ("rlinf", "actor: {}\nenv: {train: {simulator_type: maniskill}}", "robots, simulators, vision-language-action models and generators"),
    ("rlinf", "advantage: {model: {}}\ndata: {}\ndistributed: {}", "describes no job"),
    ("rlinf", "qkv_fprop: {method: ring}", "describes no job"),
    ("rlinf", "services: {ray: {image: x}}", "docker-compose"),
]


@pytest.mark.parametrize(("framework", "text", "message"), NO_JOBS)
def test_it_is_refused(framework: str, text: str, message: str) -> None:
    with pytest.raises(SpecInvalidError) as caught:
        convert(framework, text)
    assert message in str(caught.value.errors[0])


def test_the_command_fails_and_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "job.yaml"
    result = rljob("--from", "roll", "-", "--out", str(out), stdin="exp_name: a\nsft_train: {}")
    assert result.exit_code == 2
    assert "supervised fine-tuning (SFT), no RL job" in result.stderr
    assert not out.exists()


def test_the_command_takes_in_the_files_beside(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text("pretrain: models/tiny")
    (tmp_path / "job.yaml").write_text("defaults: [base]\nexp_name: a")
    result = rljob("--from", "roll", str(tmp_path / "job.yaml"))
    assert result.exit_code == 0
    assert "path: models/tiny" in result.stdout
