"""vLLM's server as a worker: its command line, when it is ready, and that it ends with its worker."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rljob_api.v1alpha1 import RLJob
from rljob_runtime.cluster.ports import held_port
from rljob_runtime.engine.vllm import server
from rljob_runtime.engine.vllm.server import ServerConfig, VllmServer
from rljob_runtime.engine.vllm.server_settings import vllm_server
from rljob_runtime.errors import ModelError
from tests.layout.tree import ROOT
from tests.support.ports import free_port
from tests.unit.api.manifests import manifest

WAIT_S = 60.0
_, SERVES = server.SERVER
"""The module, before a test replaces it."""


def config(folder: Path, model: str = "owner/judge") -> ServerConfig:
    return ServerConfig(
        name="grader",
        model_path=model,
        dtype="float32",
        kv_cache_bytes=1 << 20,
        enable_prefix_caching=False,
        enforce_eager=True,
        log_file=folder / "server.log",
    )


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SERVER", ("-m", "tests.support.fake_vllm_server"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


def test_arguments_are_those_of_vllm(tmp_path: Path) -> None:
    made = ServerConfig(
        name="grader",
        model_path="owner/judge",
        revision="main",
        trust_remote_code=True,
        tensor_parallel_size=2,
        extra_args={"max_model_len": 4096, "hf_overrides": {"a": 1}, "enable_chunked_prefill": False},
        log_file=tmp_path / "log",
    )
    words = " ".join(made.arguments("10.0.0.1", 8000))
    assert words == (
        "--model owner/judge --served-model-name grader --host 10.0.0.1 --port 8000 --revision main --trust-remote-code --dtype bfloat16 "
        "--tensor-parallel-size 2 --pipeline-parallel-size 1 "
        "--max-num-seqs 256 --gpu-memory-utilization 0.8 --enable-prefix-caching --seed 0 "
        "--middleware rljob_runtime.engine.vllm.server_guard.Guard "
        '--max-model-len 4096 --hf-overrides {"a": 1} --no-enable-chunked-prefill'
    )


def test_a_server_is_there_until_its_worker_closes(tmp_path: Path) -> None:
    worker, port = VllmServer(config(tmp_path)), held_port("127.0.0.1")
    with pytest.raises(RuntimeError, match="served was called before serve"):
        worker.served()
    worker.serve("127.0.0.1", port, "key-1", WAIT_S)
    assert worker.served() == (f"http://127.0.0.1:{port}/v1", "key-1")
    (pid,) = re.findall(r"pid (\d+)", (tmp_path / "server.log").read_text())
    assert is_alive(int(pid))
    worker.close()
    worker.close()
    wait_for_end(int(pid))


def test_a_server_that_ends_at_once_is_an_error_with_its_log(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"server for broken ended with exit code 1; (?s:.*)no such model; a key is there"):
        VllmServer(config(tmp_path, "broken")).serve("127.0.0.1", free_port(), "key-1", WAIT_S)


def test_a_server_ends_when_its_worker_is_killed(tmp_path: Path) -> None:
    """The pipe is all that connects them: closing it is what a kill does."""
    program = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(600)"
    child = [sys.executable, "-m", "rljob_runtime.engine.server_child", sys.executable, "-c", program]
    with subprocess.Popen(child, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        pid = int(running.stdout.readline().split()[1])
        running.stdin.close()
        assert running.wait(WAIT_S) == 0
    wait_for_end(pid)


@pytest.mark.parametrize("name", ["VLLM_USE_FLASHINFER_SAMPLER", "VLLM_ALLREDUCE_USE_FLASHINFER"])
@pytest.mark.parametrize(("set_to", "found"), [(None, "0"), ("1", "1")])
def test_a_judge_on_a_gpu_compiles_nothing_of_flashinfer_unless_it_is_set_to(
    name: str, set_to: str | None, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = manifest()
    made["spec"]["components"].append({"name": "judge", "role": "Judge", "placement": {"ranks": "0"}, "model": {"path": "owner/judge"}})
    spec = RLJob.model_validate_json(json.dumps(made)).spec
    monkeypatch.delenv(name, raising=False)
    if set_to is not None:
        monkeypatch.setenv(name, set_to)
    worker = vllm_server(spec, spec.components[-1], on_cpu=False, num_threads=1, log_file=tmp_path / "server.log")
    assert worker.env[name] == found


def test_the_process_of_its_engine_imports_nothing_of_the_server_again() -> None:
    """It is spawned, and Python imports the main module there under another name."""
    code = "import json, runpy, sys; runpy.run_module(sys.argv[1], run_name='__mp_main__'); print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code, SERVES], capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert not {"fastapi", "torch", "transformers", "vllm"} & set(json.loads(done.stdout))
