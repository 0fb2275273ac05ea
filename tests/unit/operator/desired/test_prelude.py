"""The line before Ray, run by a real bash as KubeRay and the kubelet hand it over."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rljob_api import naming
from rljob_api.validation import check
from tests.unit.operator.desired import kuberay
from tests.unit.operator.desired.builders import SOURCES, container, environment, groups, ray_job

FAKE_RAY = """#!/bin/bash
printf '%s\\n' "$@" > "$FAKE_OUT/args"
env > "$FAKE_OUT/env"
"""


def start(group: dict[str, Any], index: str | None, folder: Path, *, is_head: bool = False) -> tuple[subprocess.CompletedProcess, Path]:
    """Run the first container's command with a ``ray`` that writes down what it was given."""
    out = folder / f"{group.get('groupName', 'head')}-{index}"
    (out / "bin").mkdir(parents=True)
    fake = out / "bin" / "ray"
    fake.write_text(FAKE_RAY)
    fake.chmod(0o755)
    env = {name: value for name, value in environment(group).items() if isinstance(value, str)}
    env |= {"PATH": f"{out / 'bin'}:{os.environ['PATH']}", "FAKE_OUT": str(out)}
    if index is not None:
        env["RLJOB_REPLICA_INDEX"] = index
    line = kuberay.expand(kuberay.start_line(group, is_head=is_head), env)
    done = subprocess.run(["/bin/bash", "-c", "--", line], env=env, capture_output=True, text=True, check=False, timeout=20)
    return done, out


def given(out: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Flags and environment of the fake ``ray``."""
    flags = dict(line.removeprefix("--").split("=", 1) for line in (out / "args").read_text().splitlines() if "=" in line)
    return flags, dict(line.split("=", 1) for line in (out / "env").read_text().splitlines() if "=" in line)


@pytest.mark.parametrize("name", SOURCES)
def test_every_node_gets_the_rank_of_the_plan(name: str, tmp_path: Path) -> None:
    job = check(SOURCES[name].read_text())
    workers = {group["groupName"]: group for group in groups(ray_job(SOURCES[name].read_text()))[1:]}
    for node in job.plan.nodes:
        done, out = start(workers[node.group], str(node.index), tmp_path)
        assert done.returncode == 0, done.stderr
        flags, env = given(out)
        assert env[naming.ENV_NODE_RANK] == str(node.rank)
        assert json.loads(env["RAY_OVERRIDE_LABELS"]) == {naming.NODE_RANK_LABEL: str(node.rank)}
        offered = {"GPU": int(flags["num-gpus"]), **json.loads(flags.get("resources", "{}"))}
        assert offered.get(naming.ray_resource(node.device_resource), 0) == node.num_devices


@pytest.mark.parametrize("index", [None, "", "2", "-1", "1x", "a", "HOME"])
def test_without_a_usable_index_the_pod_ends_and_says_why(index: str | None, tmp_path: Path) -> None:
    train = groups(ray_job(SOURCES["gpus"].read_text()))[1]
    done, out = start(train, index, tmp_path)
    assert done.returncode == 1
    assert "label ray.io/worker-group-replica-index is missing or not below 2" in done.stderr
    assert not (out / "args").exists()


def test_the_head_has_no_rank(tmp_path: Path) -> None:
    head = groups(ray_job(SOURCES["gpus"].read_text()))[0]
    done, out = start(head, None, tmp_path, is_head=True)
    assert done.returncode == 0
    flags, env = given(out)
    assert naming.ENV_NODE_RANK not in env
    assert (flags["num-cpus"], flags["dashboard-host"]) == ("0", "0.0.0.0")


def test_labels_reach_ray(tmp_path: Path) -> None:
    done, out = start(groups(ray_job(SOURCES["gpus"].read_text()))[1], "0", tmp_path)
    assert done.returncode == 0
    assert given(out)[0]["labels"] == "team.example/tier=gold"


def test_the_label_comes_through_the_downward_api() -> None:
    train = groups(ray_job(SOURCES["gpus"].read_text()))[1]
    assert environment(train)["RLJOB_REPLICA_INDEX"] == {"fieldRef": {"fieldPath": "metadata.labels['ray.io/worker-group-replica-index']"}}
    assert "command" not in container(train)
