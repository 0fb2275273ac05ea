"""Drivers and Ray workers of tests forked from processes that have imported torch, transformers and vLLM already.

An engine's process computes for 6 seconds before it does anything, nearly all of it imports; a trainer's for 4, a driver's for 3. Every
job of every integration test starts some, so that imports were more than half of what these tests compute. Here a *preloaded* process
imports once and forks a worker in milliseconds:

- :mod:`.launcher` is what Ray's node starts as a worker's process. It asks for a fork, passes its arguments, working folder, environment,
  signal mask and standard files on, and stays for as long as the fork lives: who kills it kills the fork, its exit status is the fork's.
  Whatever goes wrong before the fork exists, it becomes the ordinary worker's process instead, which only takes longer.
- :mod:`.manager` is one process for the whole session of pytest. It has one preloaded process for each kind of worker and each set of
  those variables that the libraries read when they are imported; the first worker of a set starts as it does for users.
- :mod:`.environments` answers in the place of Ray's agent of runtime environments, through which the launcher learns what it starts.
- :mod:`.preloaded` imports, makes sure that it has no second thread, and forks. Ray is not imported before the fork.

:func:`script_command` does the same for a script of a test, such as those that fork trainer ranks, and for drivers, :func:`servers` for the
servers of vLLM and SGLang. What a fork spawns by multiprocessing, the engine of a server or the shards of an engine, is a fork of the same
preloaded process (:mod:`.spawned`).

:func:`use` makes the embedded clusters of a process do so, and the jobs of a process on such clusters. Tests of `rljob run` use it unless
they ask for a start as users have it (``tests.integration.jobs.Running``). Always started as users' are the quickstart of one seed, SGLang
in ``test_sglang_run.py``, and all of ``e2e``, such as the judge's server in ``e2e/test_scores.py``.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import psutil

from tests.support.forked_workers import launcher
from tests.support.pace import HANG_S

SOCKET = launcher.SOCKET
"""Environment: where the manager listens; not set, every worker is started as users' are."""
WORKER = launcher.WORKER
"""Environment of a worker's launcher, given by Ray, as JSON: modules that are imported before the fork, and its own variables. It may name
attributes of modules that the fork has other values of (``replaced``), and the first request that is worth a process (``from_request``)."""
AHEAD = "RAY_prestart_worker_first_driver"
"""Environment of Ray's nodes: a worker for each core before any is asked for. Forks come as fast, and none of them can be such a worker."""
ENGINE = (
    "setproctitle",
    "rljob_runtime.engine.vllm.engine",
    "rljob_runtime.engine.vllm.preparing",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen2",
)
TRAINER = (
    "rljob_runtime.training.worker",
    "rljob_runtime.training.critic",
    "rljob_runtime.engine.sglang.engine",
    "transformers.models.qwen2.modeling_qwen2",
)
RANKS = (
    *TRAINER,
    "pytest",
    "safetensors.torch",
    *(f"transformers.models.{kind}.modeling_{kind}" for kind in ("llama", "qwen3", "qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3")),
)
"""What scripts of test files that fork trainer ranks import in any case."""
LIGHT = (
    "rljob_runtime.rewards.worker",
    "rljob_runtime.environments.worker",
    "transformers.models.qwen2.tokenization_qwen2",
    "rljob_runtime.commands.cli_jobs",
    "rljob_runtime.entry.local_run",
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "reasoning_gym",
    "rljob_runtime.engine.vllm.server",
    "tensorboard.summary.writer.event_file_writer",
)
"""Drivers, reward and environment workers: the process they share is smaller than two."""
SERVER = (
    *ENGINE,
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "rljob_runtime.engine.vllm.server_guard",
    "rljob_runtime.engine.vllm.server_memory",
)
"""Both processes of vLLM's server."""
SGLANG = (
    "setproctitle",
    "sglang.launch_server",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.scheduler",
    "sglang.srt.models.qwen2",
)
"""All three processes of SGLang's server, in its interpreter."""
MODULES = {
    "rljob_runtime.engine.vllm.engine:VllmEngine": ENGINE,
    "tests.integration.broken_engine:FaultyEngine": ENGINE,
    "tests.integration.broken_engine:SkippingEngine": ENGINE,
    "tests.integration.counting_engine:CountingEngine": ENGINE,
    "rljob_runtime.training.worker:PolicyWorker": TRAINER,
    "rljob_runtime.training.critic:CriticWorker": TRAINER,
    "rljob_runtime.rewards.worker:RewardWorker": LIGHT,
    "rljob_runtime.environments.worker:EnvironmentWorker": LIGHT,
    "rljob_runtime.engine.vllm.server:VllmServer": LIGHT,
    "rljob_runtime.engine.sglang.engine:SglangEngine": TRAINER,
}
"""What a worker of this factory imports in any case; others are started as users' are."""
SERVERS = {
    "rljob_runtime.engine.vllm.server:VllmServer": "rljob_runtime.engine.vllm.server.SERVER",
    "rljob_runtime.engine.sglang.engine:SglangEngine": "rljob_runtime.engine.sglang.server.SERVER",
}
"""By a worker's factory: what says how its server is started."""
HERE = Path(__file__).parent
LAUNCHER = HERE / "launcher.py"


def script_command(modules: tuple[str, ...], script: Path, *arguments: str) -> list[str]:
    """The command line of a script: a fork of a process with ``modules`` where there is one, else what the interpreter starts."""
    worker = {"modules": modules, "environment": {}, "without_torch": modules is LIGHT}
    return [sys.executable, *launcher.launching(worker, str(script), *arguments)]


def server_commands() -> dict[str, list[str]]:
    """By attribute of a module: other values of it, with which servers are started as forks, all of their processes."""
    vllm = {"modules": SERVER, "environment": {}, "from_request": 1}
    sglang = {"modules": SGLANG, "environment": {}, "from_request": 1}
    return {
        "rljob_runtime.engine.vllm.server.SERVER": launcher.launching(vllm, "-m", "rljob_runtime.engine.vllm.serve"),
        "rljob_runtime.engine.sglang.server.SERVER": launcher.launching(sglang, "-m", "sglang.launch_server"),
    }


def family(pid: int) -> list[psutil.Process]:
    """A process and all that descend from it, those that launchers stand for among them; raises psutil.NoSuchProcess."""
    first = psutil.Process(pid)
    name = first.name()
    of_fork = family(int(name.removeprefix(launcher.FORK))) if name.startswith(launcher.FORK) else []
    return [first, *of_fork, *(found for child in first.children() for found in family(child.pid))]


@contextlib.contextmanager
def servers() -> Iterator[None]:
    """Servers that this process starts meanwhile are forks, all of their processes; not to be nested."""
    with contextlib.ExitStack() as patched:
        for name, value in {**server_commands(), "rljob_runtime.engine.sglang.server.family": family}.items():
            patched.enter_context(mock.patch(name, value))
        yield


@contextlib.contextmanager
def shards() -> Iterator[None]:
    """Shards of vLLM engines that this process starts meanwhile are forks."""
    with mock.patch("multiprocessing.spawn.get_command_line", launcher.spawning({"modules": ENGINE, "environment": {}, "from_request": 1})):
        yield


@contextlib.contextmanager
def managed(folder: Path) -> Iterator[None]:
    """A manager until the end of the block, which also ends when this process does; ``folder`` keeps its socket and its log."""
    command = [sys.executable, str(HERE / "manager.py"), str(folder / "socket")]
    with (folder / "log").open("ab") as log:
        manager = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, cwd="/", start_new_session=True)
    assert manager.stdout is not None
    assert manager.stdout.readline() == b"ready\n", f"the manager of forked workers did not start: {(folder / 'log').read_text()}"
    outer = os.environ.get(SOCKET)
    os.environ[SOCKET] = str(folder / "socket")
    try:
        yield
    finally:
        os.environ.pop(SOCKET)
        if outer is not None:
            os.environ[SOCKET] = outer
        manager.communicate(timeout=HANG_S)


def use() -> None:
    """Clusters that this process embeds from now on start their workers so; nothing without a manager."""
    if SOCKET not in os.environ:
        return
    from ray._private.ray_constants import PROCESS_TYPE_RUNTIME_ENV_AGENT
    from ray.cluster_utils import Cluster

    from rljob_runtime.cluster import embedded, idle_agent
    from rljob_runtime.cluster.protocol import WorkerSpec
    from rljob_runtime.cluster.ray_cluster import RayCluster

    class ForkingProcesses(Cluster):  # type: ignore[misc]  # Ray's helper has no types
        def add_node(self, wait: bool = True, **arguments: Any) -> Any:
            return super().add_node(wait, setup_worker_path=str(LAUNCHER), **arguments)

    def runtime_env(cluster: RayCluster, spec: WorkerSpec) -> dict[str, Any] | None:
        modules = MODULES.get(spec.factory)
        if modules is None or spec.interpreter is not None:
            return plain_runtime_env(cluster, spec)
        worker: dict[str, Any] = {"modules": modules, "environment": dict(spec.env), "without_torch": modules is LIGHT}
        if spec.factory in SERVERS:
            worker |= {"replaced": {SERVERS[spec.factory]: server_commands()[SERVERS[spec.factory]]}, "from_request": 1}
        return {"env_vars": {WORKER: json.dumps(worker)}}

    os.environ[AHEAD] = "0"  # what no worker here takes
    embedded.AGENTS[PROCESS_TYPE_RUNTIME_ENV_AGENT] = (str(HERE / "environments.py"), idle_agent.__file__)
    plain_runtime_env = RayCluster.runtime_env
    embedded.RayProcesses = ForkingProcesses  # type: ignore[misc]
    RayCluster.runtime_env = runtime_env  # type: ignore[method-assign]
