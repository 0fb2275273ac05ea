"""Processes run where the plan says, with the environment the plan says: asked of Ray and of the processes themselves."""

import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pytest

from rljob_api.planner import plan
from rljob_runtime.job import worker_settings
from tests.integration.placement_child import START_S, job
from tests.layout.tree import ROOT

GROUPS: list[dict[str, Any]] = [
    {"name": "small", "devicesPerNode": 2, "deviceResource": "cpu", "env": [{"name": "SITE", "value": "small"}]},
    {"name": "large", "devicesPerNode": 4, "env": [{"name": "SITE", "value": "large"}, {"name": "OWNER", "value": "group"}]},
    {
        "name": "arms",
        "devicesPerNode": 1,
        "hardware": {"type": "Franka", "configs": [{"nodeRank": 0, "parameters": {"ip": f"192.0.2.{n}"}} for n in (10, 11)]},
    },
    {"name": "cores"},
]
"""Nodes 0 to 3. The GPUs are Ray's word against nobody's: no process touches them."""
COMPONENTS: list[dict[str, Any]] = [
    {
        "name": "trainer",
        "role": "Trainer",
        "placement": {"nodeGroups": ["large"], "ranks": "all"},
        "env": [{"name": "OWNER", "value": "component"}],
    },
    {
        "name": "strided",
        "role": "Rollout",
        "placement": {"nodeGroups": ["large"], "ranks": "all"},
        "engine": {"tensorParallelSize": 2},
    },
    {"name": "shared", "role": "Rollout", "placement": {"nodeGroups": ["small"], "ranks": "0:0-1"}},
    {
        "name": "backwards",
        "role": "Rollout",
        "placement": {"nodeGroups": ["large", "small"], "ranks": "2-5:0-1"},
        "engine": {"tensorParallelSize": 2},
    },
    {"name": "scattered", "role": "Rollout", "placement": {"deviceMapping": "[5, 0]"}},
    {"name": "pairs", "role": "Rollout", "placement": {"deviceMapping": "[0, 1] + [2, 5]"}, "engine": {"tensorParallelSize": 2}},
    {"name": "by_node", "role": "Reward", "placement": {"nodeGroups": ["node"], "ranks": "1:0-1,3:2"}},
    {"name": "round", "role": "Reward", "placement": {"workers": 5}},
    {"name": "robots", "role": "Environment", "placement": {"nodeGroups": ["arms"], "ranks": "all"}},
]
EXPECTED: dict[str, list[tuple[int, str, str]]] = {
    "trainer": [(1, "0", "0"), (1, "1", "1"), (1, "2", "2"), (1, "3", "3")],
    "strided": [(1, "0,2", "0,2"), (1, "1,3", "1,3")],
    "shared": [(0, "0", ""), (0, "0", "")],
    "backwards": [(0, "0,1", ""), (1, "2,3", "2,3")],
    "scattered": [(1, "3", "3"), (0, "0", "")],
    "pairs": [(0, "0,1", ""), (1, "0,3", "0,3")],
    "by_node": [(1, "", ""), (1, "", ""), (3, "", "")],
    "round": [(0, "", ""), (1, "", ""), (2, "", ""), (3, "", ""), (0, "", "")],
    "robots": [(2, "0", ""), (2, "1", "")],
}
"""Node rank, LOCAL_HARDWARE_RANKS and CUDA_VISIBLE_DEVICES of every process, by rank."""


class Child:
    """A case of placement_child.py under way."""

    def __init__(
        self, case: str, folder: Path, *options: str, components: list[dict[str, Any]], groups: list[dict[str, Any]] | None = None
    ) -> None:
        folder.mkdir(exist_ok=True)
        self._errors = folder / f"{case}-{time.monotonic_ns()}.txt"
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        environment |= {
            "CUDA_VISIBLE_DEVICES": "0,1,2,3",
            "PYTHONPATH": str(ROOT),  # the probe, in the processes of all nodes
            "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        with self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.placement_child", case, str(folder), *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=ROOT,
                env=environment,
            )
        self.tell(json.dumps({"groups": groups or GROUPS, "components": components}))

    def tell(self, line: str = "") -> None:
        """Write one line to it."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Its next line; pytest's time limit bounds the wait."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"ended with {self.process.wait(START_S)} and no answer:\n{self._errors.read_text()}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Let it end by itself, which it must do without an error; after a failure it is ended."""
        try:
            if kind is None:
                self.process.communicate(timeout=START_S)
        finally:
            self.process.kill()
            self.process.communicate()
        if kind is None:
            assert self.process.returncode == 0, f"ended with {self.process.returncode}:\n{self._errors.read_text()}"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The four nodes, without a driver."""
    with Child("nodes", tmp_path_factory.mktemp("nodes"), components=COMPONENTS) as nodes:
        yield nodes.answer()["address"]


def probed(address: str, folder: Path, components: list[dict[str, Any]], groups: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """What a probe in place of every worker says, or why there is none."""
    with Child("probe", folder, address, components=components, groups=groups) as child:
        return child.answer()


def test_a_crash_of_a_child_fails_one_test_and_says_what_it_printed(tmp_path: Path) -> None:
    nobody = [{"name": "nobody", "role": "Nobody", "placement": {"ranks": "0"}}]
    with pytest.raises(AssertionError, match=r"(?s)ended with 1 and no answer:.*ValidationError"):
        probed("", tmp_path, nobody)


def test_every_process_is_where_the_plan_says_with_the_environment_the_plan_says(address: str, tmp_path: Path) -> None:
    wanted = job(GROUPS, COMPONENTS)
    planned = plan(wanted)
    found = probed(address, tmp_path, COMPONENTS)["workers"]
    reported: dict[str, list[tuple[int, str, str]]] = {}
    for component in planned.components:
        reported[component.name] = []
        for process, (node_rank, _, environment) in zip(component.processes, found[component.name], strict=True):
            promised = worker_settings.worker_env(wanted, planned, component, process)
            assert {name: environment.get(name) for name in promised} == promised
            assert (node_rank, environment["RLJOB_WORKER"]) == (process.node_rank, f"{component.name}-{process.rank}")
            reported[component.name].append((node_rank, environment["LOCAL_HARDWARE_RANKS"], environment["CUDA_VISIBLE_DEVICES"]))
            if component.name == "trainer":
                assert (environment["SITE"], environment["OWNER"]) == ("large", "component")
            if component.name == "robots":
                assert environment["RLJOB_HARDWARE"] == f'[{{"ip": "192.0.2.{10 + process.rank}"}}]'
    assert reported == EXPECTED


ON_LARGE = [{"name": "trainer", "role": "Trainer", "placement": {"nodeGroups": ["large"], "ranks": "0"}}]


def test_a_second_job_waits_for_the_devices_of_the_first_and_fails_at_its_deadline(address: str, tmp_path: Path) -> None:
    """One device of a node in use is the whole node in use: the jobs name devices, and might name the same."""
    with ExitStack() as children:

        def other(name: str, *timeout_s: str) -> Child:
            return children.enter_context(Child("hold", tmp_path / name, address, *timeout_s, components=ON_LARGE))

        with Child("hold", tmp_path / "first", address, components=ON_LARGE) as first:
            assert first.answer() == {"held": True}
            hasty, patient = other("hasty", "1"), other("patient", f"{START_S}")
            text = hasty.answer()["error"]
            assert text.startswith(
                "the devices were not free within the time that spec.startupDeadlineSeconds sets; wanted node 1 (large): {"
            )
            assert "Stop the job that holds them or raise the deadline" in text
            deadline = time.monotonic() + START_S
            waits = {"CREATED": 1, "PENDING": 1}
            states: dict[str, Any] = {}
            while states != waits and time.monotonic() < deadline:
                time.sleep(0.1)
                first.tell()
                states = first.answer()
            assert states == waits, "the second job waits"
            assert patient.process.poll() is None
        assert patient.answer() == {"held": True}


def test_only_a_worker_of_concurrency_1_runs_its_calls_in_the_order_of_their_starts(address: str, tmp_path: Path) -> None:
    """The trainer scores the probes and is then given its next step: scores of the weights after it would fail the run."""
    with Child("order", tmp_path, address, components=ON_LARGE) as child:
        assert child.answer() == {"orders": [["first", "second"], ["second", "first"]]}


def script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_workers_run_on_the_interpreter_of_their_component_else_of_their_group(address: str, tmp_path: Path) -> None:
    of_group, of_component = (
        script(tmp_path / f"the python of a {owner}", f'export INTERPRETER={owner}; exec "{sys.executable}" "$@"')
        for owner in ("group", "component")
    )
    groups = [group | ({"pythonInterpreter": str(of_group)} if group["name"] in ("large", "cores") else {}) for group in GROUPS]
    components = [
        *ON_LARGE,
        {"name": "robots", "role": "Environment", "placement": {"nodeGroups": ["arms"], "ranks": "0"}},
        {"name": "own", "role": "Reward", "placement": {"nodeGroups": ["cores"], "workers": 1}, "pythonInterpreter": str(of_component)},
    ]
    found = [worker for workers in probed(address, tmp_path, components, groups)["workers"].values() for worker in workers]
    assert [environment.get("INTERPRETER") for _, _, environment in found] == ["group", None, "component"]
    assert [node_rank for node_rank, _, _ in found] == [1, 2, 3]


def test_an_interpreter_that_cannot_run_workers_is_named_with_its_node_and_field(address: str, tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "python"
    broken = script(tmp_path / "broken", "echo 'libpython3.11.so.1.0: no such file' >&2; exit 127")
    bare = script(tmp_path / "bare", f'exec "{sys.executable}" -S "$@"')  # without site-packages
    groups = [group | ({"pythonInterpreter": str(broken)} if group["name"] == "large" else {}) for group in GROUPS]
    components = [
        *ON_LARGE,
        {"name": "lost", "role": "Reward", "placement": {"nodeGroups": ["cores"], "workers": 2}, "pythonInterpreter": str(missing)},
        {"name": "poor", "role": "Reward", "placement": {"nodeGroups": ["cores"], "workers": 1}, "pythonInterpreter": str(bare)},
    ]
    answer = probed(address, tmp_path, components, groups)
    assert answer["type"] == "SetupError", answer  # at the deadline it is a StartupDeadlineError
    text = answer["error"]
    lost, poor = "spec.components[1].pythonInterpreter", "spec.components[2].pythonInterpreter"
    on_large = f"{broken} on node 1 (group large) cannot run a worker (exit 127): libpython3.11.so.1.0: no such file"
    assert f"spec.nodeGroups[1].pythonInterpreter: {on_large}; " in text
    assert f"{lost}: {missing} on node 3 (group cores) does not exist" in text
    assert f"{poor}: {bare} on node 3 (group cores) cannot run a worker (exit 1): ModuleNotFoundError: No module named 'ray'" in text
    assert text.count(str(missing)) == 1, "two workers, one interpreter, one message"
