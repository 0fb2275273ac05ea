"""Forked workers of tests of jobs: a fork is the process that the interpreter would have started, or there is none."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.core.generated import runtime_env_agent_pb2 as pb

from rljob_runtime.cluster import idle_agent
from tests.support import forked_workers
from tests.support.forked_workers import launcher
from tests.support.pace import HANG_S, until

TELLS = """
import json, os, signal, sys
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "name": __name__, "file": __file__, "folder": os.getcwd(), "environment": dict(os.environ),
    "own_group": os.getpgid(0) == os.getpid(), "threads": len(os.listdir("/proc/self/task")), "input": sys.stdin.read(),
    "signals": {s.name: str(signal.getsignal(s)).split(" at ")[0] for s in signal.valid_signals() if s.__class__ is signal.Signals},
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "files": len(os.listdir("/proc/self/fd")),
    "niceness": os.nice(0), "oom": open("/proc/self/oom_score_adj").read(),
    "preloaded": "colorsys" in sys.modules,
}))
sys.stderr.write("an error")
sys.exit(7)
"""
WAITS = "print('here', flush=True)\nimport threading\nthreading.Event().wait()\n"
ENDED_BY = "import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n"

SERVED = """
import json, multiprocessing, sys
PRELOADED = "colorsys" in sys.modules
import colorsys

def child(end):
    end.send({"name": __name__, "argv": sys.argv, "preloaded": PRELOADED, "said": end.recv()})
    sys.exit(3)

if __name__ == "__main__":
    print(json.dumps({"argv": sys.argv, "name": __name__, "preloaded": PRELOADED, "replaced": colorsys.ONE_SIXTH}), flush=True)
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=child, args=(there,))
    process.start()
    there.close()
    here.send("through a pipe")
    answer = here.recv()
    process.join()
    print(json.dumps(answer | {"exit": process.exitcode}))
"""
Launch = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    """Starts a script as Ray's node starts a worker; with a manager of this test's own."""

    def launched(code: str, modules: tuple[str, ...] = ("colorsys",), **options: Any) -> subprocess.Popen[str]:
        script = tmp_path / "worker.py"
        script.write_text(code)
        worker = json.dumps({"modules": modules, "environment": {"TOKENIZERS_PARALLELISM": "false"}})
        context = json.dumps({"env_vars": {forked_workers.WORKER: worker}, "py_executable": sys.executable, "command_prefix": []})
        ray = ["--language=PYTHON", f"--serialized-runtime-env-context={context}"]
        command = [sys.executable, str(forked_workers.LAUNCHER), str(script), "--node=1", *ray, "--worker=2"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, text=True, **(pipes | options))

    (tmp_path / "manager").mkdir()
    with forked_workers.managed(tmp_path / "manager"):
        yield launched


def as_rays_node_does() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    os.nice(3)
    Path("/proc/self/oom_score_adj").write_text("1000")


def reported(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate("input", timeout=HANG_S)
    assert (process.returncode, err) == (7, "an error")
    answer: dict[str, Any] = json.loads(out)
    return answer


def test_a_fork_is_what_the_interpreter_would_have_started(launch: Launch, tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "more"), "OF_THIS_WORKER": "1", "OMP_NUM_THREADS": "1"}
    options: dict[str, Any] = {
        "cwd": tmp_path, "env": environment, "process_group": 0,
        "preexec_fn": as_rays_node_does,
    }  # fmt: skip
    first, second, third = (reported(launch(TELLS, **options)) for _ in range(3))
    assert [t.pop("preloaded") for t in (first, second, third)] == [False, True, True], "what comes once is not worth a process"
    assert first == second == third
    assert first["argv"][1:] == ["--node=1", "--worker=2"]
    assert first["environment"]["OF_THIS_WORKER"] == "1"
    assert first["own_group"]
    assert (first["niceness"], first["oom"].strip()) == (os.nice(0) + 3, "1000")
    assert first["blocked"] == [signal.SIGINT]
    other = reported(launch(TELLS, **options | {"env": environment | {"OMP_NUM_THREADS": "2"}}))
    assert not other["preloaded"], "forked from a process whose libraries had read another number of threads"
    unread = {"GOMP_SPINCOUNT": "1", "MKL_NUM_THREADS": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    alike = reported(launch(TELLS, **options | {"env": environment | unread}))
    assert alike["preloaded"], "a process of its own for variables that no import reads"
    assert alike["environment"].items() >= unread.items()


def test_a_variable_that_an_import_reads_after_all_is_named(tmp_path: Path) -> None:
    (tmp_path / "reads_early.py").write_text("import os\nos.environ.get('VLLM_USE_V2_MODEL_RUNNER')\n")
    folders = [str(forked_workers.HERE), str(tmp_path)]
    code = f"import sys; sys.path[:0] = {folders}; import preloaded; preloaded.preload(['reads_early'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 1
    assert "imports of ['reads_early'] read ['VLLM_USE_V2_MODEL_RUNNER']" in done.stderr


def test_scripts_of_tests_are_forked_as_well(launch: Launch, tmp_path: Path) -> None:
    """Those of trainer ranks; ``launch`` has the manager."""
    script = tmp_path / "script.py"
    script.write_text(TELLS)
    command = forked_workers.script_command(("colorsys",), script, "folder")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    found = [reported(subprocess.Popen(command, text=True, **pipes)) for _ in range(3)]
    assert [one["argv"] for one in found] == [[str(script), "folder"]] * 3
    assert [one["preloaded"] for one in found] == [False, True, True]


def test_servers_are_modules_and_what_they_spawn_is_forked_with_its_open_files(launch: Launch, tmp_path: Path) -> None:
    """As vLLM's server starts its engine: the child gets ends of pipes by number, and what its parent pickles."""
    (tmp_path / "served.py").write_text(SERVED)
    worker = {"modules": ["colorsys"], "environment": {}, "from_request": 1, "replaced": {"colorsys.ONE_SIXTH": [1, 6]}}
    command = [sys.executable, *launcher.launching(worker, "-m", "served", "--option")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=HANG_S)
    assert (done.returncode, done.stderr) == (0, "")
    server, child = (json.loads(line) for line in done.stdout.splitlines())
    assert server == {"argv": [str(tmp_path / "served.py"), "--option"], "name": "__main__", "preloaded": True, "replaced": [1, 6]}
    assert child == {"name": "__mp_main__", "argv": server["argv"], "preloaded": True, "exit": 3, "said": "through a pipe"}


def test_a_launcher_ends_as_its_fork_and_a_fork_with_its_launcher(launch: Launch) -> None:
    assert [launch(ENDED_BY).wait(HANG_S) for _ in range(2)] == [-signal.SIGTERM, -signal.SIGTERM]
    asked = launch(WAITS)
    assert asked.stdout is not None
    assert asked.stdout.readline() == "here\n"
    asked.terminate()
    assert asked.wait(HANG_S) == -signal.SIGTERM, "signals are passed on"
    killed = launch(WAITS)
    assert killed.stdout is not None
    assert killed.stdout.readline() == "here\n"
    killed.kill()
    assert killed.stdout.read() == "", "the fork held the other end, too"


@pytest.mark.parametrize("module", ["no_such_module", "ray"])
def test_where_nothing_can_be_forked_workers_start_as_ever(launch: Launch, module: str) -> None:
    assert [reported(launch(TELLS, ("colorsys", module)))["preloaded"] for _ in range(4)] == [False] * 4


def test_ray_is_given_environments_of_variables_and_others_are_refused(tmp_path: Path) -> None:
    options = [f"--session-dir={tmp_path}", "--node-id=n1", "--node-ip-address=127.0.0.1"]
    command = [sys.executable, "-I", "-S", str(forked_workers.HERE / "environments.py"), idle_agent.__file__, "Ray's own", *options]
    agent = subprocess.Popen(command, env=os.environ | {"RAY_RAYLET_PID": str(os.getpid())})
    port = tmp_path / "runtime_env_agent_port_n1"
    until("the agent listens", port.exists)

    def ask(method: str, message: Any) -> bytes:
        asking = http.client.HTTPConnection("127.0.0.1", int(port.read_text()), timeout=HANG_S)
        with contextlib.closing(asking):
            asking.request("POST", f"/{method}", message.SerializeToString())
            return asking.getresponse().read()

    def created(environment: dict[str, Any]) -> Any:
        request = pb.GetOrCreateRuntimeEnvRequest(serialized_runtime_env=json.dumps(environment), job_id=b"1", source_process="a test")
        return pb.GetOrCreateRuntimeEnvReply.FromString(ask("get_or_create_runtime_env", request))

    socket.create_connection(("127.0.0.1", int(port.read_text())), HANG_S).close()  # a request that was given up changes nothing
    variables = {"A": "x" * 300, "B": "ü"}
    made, refused = created({"env_vars": variables}), created({"pip": ["a-package"]})
    assert made.status == pb.AGENT_RPC_STATUS_OK
    assert json.loads(made.serialized_runtime_env_context) == {"env_vars": variables, "py_executable": sys.executable}
    assert refused.status == pb.AGENT_RPC_STATUS_FAILED
    assert "['pip']" in refused.error_message
    deleted = ask("delete_runtime_env_if_possible", pb.DeleteRuntimeEnvIfPossibleRequest())
    assert pb.DeleteRuntimeEnvIfPossibleReply.FromString(deleted).status == pb.AGENT_RPC_STATUS_OK
    agent.kill()
    agent.wait(HANG_S)


def test_forks_end_with_the_manager(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with forked_workers.managed(tmp_path / "other"):
        assert launch(ENDED_BY).wait(HANG_S) == -signal.SIGTERM
        waiting = launch(WAITS)
        assert waiting.stdout is not None
        assert waiting.stdout.readline() == "here\n"
    assert waiting.wait(HANG_S) == -signal.SIGKILL
    assert waiting.stdout.read() == ""
