"""Small real jobs for the end-to-end tests: a model without a warm start, few steps, the public command line."""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml

from rljob_runtime.tiny.model import make
from rljob_runtime.tiny.warmstart import WarmStartConfig
from tests.layout.tree import ROOT
from tests.support import forked_workers
from tests.support.pace import HANG_S

LOOK_S = 0.1
SILENCE_S = 500.0
"""Bound of a wait for a job's next line of output: there is one for each part of its start and for each step. It ends a job that hangs."""
COMMAND_TIMEOUT_S = 2700.0
"""Bound of a command that computes for a minute or two, on a slow machine and beside other tests for twenty."""
SWITCH_METRICS = {
    "offload/bytes",
    "offload/gb_per_s",
    "offload/waits_s",
    "memory/device_peak_bytes",
    "memory/host_rss_bytes",
    "memory/pinned_bytes",
    "time/offload_s",
    "time/load_s",
}
"""Metrics of runs whose components take turns on a device, and of no others."""
VALIDATION_METRICS = {
    "time/validate_s",
    "validation/mean",
    "validation/pass_rate",
    "validation/mean_tokens",
    "validation/truncated_fraction",
    "validation/prompts",
    "validation/version",
    "validation/tokens",
    "validation/errors",
}
RULE_METRICS = {
    "reward/shaped_mean",
    "reward/clip_fraction",
    "reward/overlong_penalty_mean",
    "advantage/clip_fraction",
    "train/masked_samples_fraction",
    "train/kl_coefficient",
    "train/kl_reward_mean",
    "train/entropy",
    "train/correction_weight_mean",
    "train/correction_weight_clipped_fraction",
    "train/correction_masked_fraction",
    "train/effective_sample_size",
    "distillation/kl",
    "distillation/loss",
    "critic/loss",
    "critic/value_mean",
    "critic/return_mean",
    "critic/explained_variance",
    "critic/clip_fraction",
    "critic/grad_norm",
    "critic/learning_rate",
}
"""Of runs whose learning rule has the options that these tell of; ``test_overlap_run.py`` has one with all of them."""
MASK_METRICS = {
    "rollout/mask_bytes",
    "rollout/possible_tokens_mean",
    "rollout/possible_tokens_max",
    "rollout/possible_unknown_fraction",
}
"""Of runs with ``topP``, ``topK`` or ``minP``; ``test_run.py`` has one."""
EPISODE_METRICS = {
    "episode/success",
    "episode/turns_mean",
    "episode/turns_max",
    "episode/tokens_mean",
    "episode/environment_s",
    "episode/invalid_actions_fraction",
    "episode/errors",
    "episode/timeouts",
    "episode/restarts",
    "episode/cancelled",
    "validation/turns_mean",
    "validation/turns_max",
    "validation/environment_s",
    "validation/invalid_actions_fraction",
}
"""Of agentic runs; ``test_episodes_run.py`` has one."""
MIXTURE_METRICS = {"train/load_balancing_loss", "train/expert_load_max"}
"""Of mixtures of experts."""
RARE_METRICS = {
    "train/layer_expert_load_max",
    "train/router_bias_max",
    "time/optimizer_load_s",
    "time/optimizer_offload_s",
    "time/engine_pause_s",
    "train/skipped_updates",
    "rollout/groups_recovered",
    "rollout/route_bytes",
    "rollout/history_tokens_kept",
    "rollout/history_tokens_moved",
    "engine/replaced",
    "engine/replacement_s",
    "environment/replaced",
    "environment/replacement_s",
    *VALIDATION_METRICS,
    *RULE_METRICS,
    *MASK_METRICS,
    *MIXTURE_METRICS,
    *EPISODE_METRICS,
}
"""Of runs that move the optimizer's state around its step, whose trainer takes a part of the engines' devices, that validate, that sample
from a part of the vocabulary, whose model is a mixture, or whose rule has options; ``train/skipped_updates`` where everything was left out,
``rollout/groups_recovered`` after a restart, ``rollout/route_bytes`` with router replay,
``rollout/history_tokens_*`` where an engine had tokens of a request cached,
``engine/*`` where an engine was lost, ``environment/*`` where an environment worker was."""
FORKING = f"""
import sys
sys.path.append({str(ROOT)!r})
from tests.support import forked_workers
sys.path.pop()
forked_workers.use()
"""
CLI = """
from rljob_runtime.commands.cli import main
main()
"""
WITH_ADAPTER = """
from rljob_api.v1alpha1.components import EngineType
from rljob_runtime.engine.registry import ENGINES
ENGINES[EngineType.VLLM] = "{}"
"""
LENGTH_REWARD = '''
"""A reward that any model can raise: how many digits the answer has."""

import itertools
import time
from pathlib import Path

HOLD = Path(__file__).with_name("hold")
HELD_AFTER = 32
CALLS = itertools.count(1)


def score(prompt, response, answer, metadata):
    return sum(c.isdigit() for c in response) / 8


def slow_score(prompt, response, answer, metadata):
    time.sleep(0.05)  # a step takes most of a second, so that it can be interrupted
    return score(prompt, response, answer, metadata)


def held_score(prompt, response, answer, metadata):
    late = next(CALLS) > HELD_AFTER  # the first steps are not held
    if late and HOLD.exists():
        print("held", flush=True)  # a reward may write nothing but its log
    while late and HOLD.exists():
        time.sleep(0.01)
    return score(prompt, response, answer, metadata)
'''


def rljob(*arguments: str, cwd: Path) -> str:
    """Run the command line until it ends well; what it printed."""
    command = [sys.executable, "-m", "rljob_runtime.commands.cli", *arguments]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def untrained_model(folder: Path) -> Path:
    """A model in ``folder`` that has learned nothing yet."""
    config = WarmStartConfig(max_rule_steps=2, noise_steps=1, batch_size=8)
    make(folder, config=config, target_pass=(0.0, 1.0), num_threads=1)
    return folder


def shortened(example: str, model: Path, *, steps: int, **spec: Any) -> dict[str, Any]:
    """An example with few steps, small batches and a reward that an untrained model can raise; ``spec`` replaces whole sections."""
    manifest: dict[str, Any] = yaml.safe_load((ROOT / "examples" / f"{example}.yaml").read_text())
    wanted = manifest["spec"]
    wanted["model"]["path"] = str(model)
    wanted["rewards"] = [{"name": "digits", "type": "Function", "function": "length_reward:score"}]
    wanted["rollout"] |= {"promptsPerStep": 4, "samplesPerPrompt": 4}
    wanted["training"] |= {"steps": steps, "learningRate": 1e-3, "warmupSteps": 0}
    manifest["spec"] = wanted | spec
    return manifest


def job(model: Path, *, steps: int, **spec: Any) -> dict[str, Any]:
    """A manifest as a dict; ``spec`` replaces whole sections."""
    sums = {
        "min_terms": 2,
        "max_terms": 2,
        "min_digits": 2,
        "max_digits": 2,
        "operators": ["+"],
        "allow_parentheses": False,
        "allow_negation": False,
        "format_style": "simple",
    }
    base: dict[str, Any] = {
        "nodeGroups": [{"name": "local", "devicesPerNode": 2, "deviceResource": "cpu"}],
        "components": [
            {"name": "actor_train", "role": "Trainer", "placement": {"ranks": "0"}, "threadsPerWorker": 1},
            {"name": "actor_infer", "role": "Rollout", "placement": {"ranks": "1"}, "threadsPerWorker": 1},
            {"name": "reward", "role": "Reward", "placement": {"workers": 1}},
        ],
        "model": {"path": str(model), "dtype": "float32"},
        "data": {"train": [{"name": "sums", "type": "ReasoningGym", "reasoningGym": {"task": "basic_arithmetic", "parameters": sums}}]},
        "rewards": [{"name": "digits", "type": "Function", "function": "length_reward:score"}],
        "rollout": {"promptsPerStep": 4, "samplesPerPrompt": 4, "maxPromptTokens": 64, "maxResponseTokens": 8},
        "training": {"steps": steps, "learningRate": 1e-3},
        "checkpoint": {"everySteps": 2},
        "report": {"trajectoriesEverySteps": 1, "trajectoriesPerStep": 2},
    }
    manifest = {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "small"}, "spec": base | spec}
    return manifest


class Watched:
    """A process that was started, and what it writes."""

    process: subprocess.Popen[bytes]
    output_file: Path

    @property
    def output(self) -> str:
        return self.output_file.read_text()

    def until(self, what: str, true: Callable[[], bool], within_s: float | None = None) -> None:
        """Wait for a state that only files show, while the process writes to its output, however slow the machine is; or for so long.

        Raises:
            AssertionError: the process ended before, or the deadline has passed.
        """
        size, started_s = -1, time.monotonic()
        silent_s = started_s
        while True:
            has_ended = self.process.poll() is not None
            if true():
                return
            assert not has_ended, f"ended before {what}:\n{self.output}"
            now_s = time.monotonic()
            if self.output_file.stat().st_size != size:
                size, silent_s = self.output_file.stat().st_size, now_s
            assert within_s is not None or now_s < silent_s + SILENCE_S, f"no line in {SILENCE_S:.0f} s before {what}:\n{self.output}"
            limit_s = within_s or COMMAND_TIMEOUT_S
            assert now_s < started_s + limit_s, f"{what} not within {limit_s:.0f} s:\n{self.output}"
            if not has_ended:
                self._pause()

    def _pause(self) -> None:
        """For :data:`LOOK_S`, or until the process ends; ``Popen.wait`` would look for that seventy times a second."""
        ends = os.pidfd_open(self.process.pid)
        try:
            select.select([ends], [], [], LOOK_S)
        finally:
            os.close(ends)

    def wait(self, within_s: float | None = None) -> int:
        """The exit status, likewise."""
        self.until("the end", lambda: self.process.returncode is not None, within_s)
        return int(self.process.returncode)


class Running(Watched):
    """One ``rljob run`` in a process group of its own, as a shell would start it."""

    def __init__(
        self,
        folder: Path,
        manifest: dict[str, Any],
        *options: str,
        adapter: str = "",
        as_users: bool = False,
        signaled: bool = False,
        before: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """Start it.

        Args:
            folder: its working folder.
            manifest: the job.
            options: of ``rljob run``.
            adapter: ``module:name`` of the one that takes vLLM's place.
            as_users: none of tests.support.forked_workers.
            signaled: the test interrupts or kills the driver or looks for its children, so that it is no fork, but its workers are.
            before: Python that the driver runs first.
            environment: variables of all its processes.
        """
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.manifest = manifest
        (folder / "length_reward.py").write_text(LENGTH_REWARD)
        (folder / "job.yaml").write_text(yaml.safe_dump(manifest))
        self.run_dir = folder / "run"
        self.output_file = folder / "output.txt"
        self._is_fork = not (as_users or signaled)
        self.started_s = time.time()
        """When the command was started, in seconds since the epoch."""
        program = before + (WITH_ADAPTER.format(adapter) if adapter else "")
        options = ("run", str(folder / "job.yaml"), "--run-dir", str(self.run_dir), *options)
        with self.output_file.open("w") as output:
            self.process = subprocess.Popen(
                _command(folder, program, options, as_users=as_users, forked=self._is_fork),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=os.environ | {"COLUMNS": "100"} | ({"PYTHONPATH": _with_root()} if program else {}) | dict(environment or {}),
            )

    def metrics(self) -> list[dict[str, float]]:
        return self.rows("metrics.jsonl")

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Of a file of the run folder with one JSON object a line."""
        path = self.run_dir / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return found

    def interrupt(self) -> None:
        """What Ctrl-C does: SIGINT to the whole foreground group."""
        assert not self._is_fork, "its group is another one"
        os.killpg(self.process.pid, signal.SIGINT)

    def kill(self) -> None:
        """What the loss of the machine does: nobody can finish anything, the driver first."""
        assert not self._is_fork, "its children are not those of the process started here"
        started = psutil.Process(self.process.pid).children(recursive=True)
        self.process.kill()
        self.process.wait()
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(started, timeout=HANG_S)

    def log(self, worker: str) -> str:
        """What a worker has written so far; empty before it starts."""
        path = self.run_dir / "logs" / f"{worker}.log"
        return path.read_text() if path.exists() else ""

    def worker_pid(self, name: str) -> int:
        """Process id of a worker, from the first line of its log."""
        first = self.log(name).split("\n", 1)[0]
        return int(first.split("pid ")[1].split()[0])

    def left_behind(self) -> list[str]:
        """Processes the run started that are still there."""
        left = []
        for process in psutil.process_iter(["pid", "cmdline", "create_time", "environ"]):
            command = " ".join(process.info["cmdline"] or [])
            ours = process.info["create_time"] >= self.started_s - 1 and str(self.run_dir) in command + str(process.info["environ"] or {})
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                left.append(command)
        return left


def _with_root() -> str:
    """Python's path with this tree before what is on it."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


def _command(folder: Path, before: str, arguments: tuple[str, ...], *, as_users: bool, forked: bool) -> list[str]:
    """`rljob` as users start it, or after other Python, or with forked workers, itself a fork or not."""
    if as_users and not before:
        return [sys.executable, "-m", "rljob_runtime.commands.cli", *arguments]
    program = ("" if as_users else FORKING) + before + CLI
    if not forked:
        return [sys.executable, "-c", program, *arguments]
    script = folder / "driver" / "rljob"  # in a folder of its own, which becomes the first of Python's path
    script.parent.mkdir(exist_ok=True)
    script.write_text(program)
    return forked_workers.script_command(forked_workers.LIGHT, script, *arguments)


CLUSTER_HOST = f"""{FORKING}
import asyncio, dataclasses, json, sys
from pathlib import Path
from rljob_api.validation import check
from rljob_runtime.cluster.embedded import EmbeddedCluster

manifest, log_dir, left_out = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
plan = check(manifest.read_text()).plan
there = dataclasses.replace(plan, nodes=tuple(n for n in plan.nodes if n.rank not in left_out))
groups = {{n.group for n in plan.nodes}}
cluster = EmbeddedCluster(log_dir, dict.fromkeys(groups, 2), {{group: {{}} for group in groups}})
print(cluster.start_processes(there), flush=True)
sys.stdin.read()
asyncio.run(cluster.stop())
"""
"""Starts the nodes of a manifest's plan, some left out, prints the address, and ends them when its standard input is closed."""


class RayNodes:
    """What KubeRay would have started, without a driver; the first node is the head, too."""

    def __init__(self, manifest: Path, folder: Path, left_out: tuple[int, ...] = ()) -> None:
        environment = os.environ | {"RAY_ADDRESS": ""}
        self._process = subprocess.Popen(
            [sys.executable, "-c", CLUSTER_HOST, str(manifest), str(folder), json.dumps(left_out)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        assert self.address, "the Ray nodes did not start"

    def __enter__(self) -> "RayNodes":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate(timeout=HANG_S)


IN_CLUSTER = f"""{FORKING}
from rljob_runtime.entry.kubernetes import main
raise SystemExit(main())
"""


class Driving(Watched):
    """The driver as KubeRay runs it on the head, with the environment that the operator gives it; its workers are forks."""

    def __init__(self, folder: Path, address: str, attempt: int = 1, shared: str = "1", steps_file: str = "job.yaml") -> None:
        self.run_dir = folder / "run"
        self.state_folder = folder / "state"
        self.output_file = folder / f"output-{attempt}-{time.monotonic_ns()}.txt"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("KUBERNETES_")}
        environment |= {
            "RAY_ADDRESS": address,
            "RLJOB_NAMESPACE": "default",
            "RLJOB_NAME": "small",
            "RLJOB_ATTEMPT": str(attempt),
            "RLJOB_RUN_FOLDER": str(self.run_dir),
            "RLJOB_STORAGE_SHARED": shared,
        }
        options = ["--spec-file", str(folder / steps_file), "--state-folder", str(self.state_folder)]
        with self.output_file.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", IN_CLUSTER, *options],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def metrics(self) -> list[dict[str, float]]:
        path = self.run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
