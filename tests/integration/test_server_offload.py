"""Real vLLM servers on CPU, of a judge and of a reward model, give their memory back and answer afterwards as before."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rljob_runtime.engine.vllm.server import ServerConfig, VllmServer
from rljob_runtime.errors import OffloadError
from rljob_runtime.offload.states import StateKind
from tests.integration.test_judged_run import CHAT_TEMPLATE, classifier
from tests.support.pace import HANG_S
from tests.support.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_servers")]

CACHE_BYTES = 32 << 20
KEY = "key-1"
WORDS = ["1+2=", "7+5=12", "Tell me more about the sum of 3 and 4."]


@pytest.fixture(params=["judge", "reward model"])
def server(request: pytest.FixtureRequest, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmServer]:
    classifies = request.param == "reward model"
    (tmp_path / "chat.jinja").write_text(CHAT_TEMPLATE)
    environment = {  # as server_settings sets it for such an engine
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    config = ServerConfig(
        name="served",
        model_path=str(classifier(model, tmp_path / "scorer")[0]) if classifies else str(model),
        dtype="float32",
        kv_cache_bytes=CACHE_BYTES,
        enforce_eager=True,
        classifies=classifies,
        releases=True,
        on_cpu=True,
        extra_args={"max_model_len": 128} | ({} if classifies else {"chat_template": str(tmp_path / "chat.jinja")}),
        log_file=tmp_path / "server.log",
    )
    worker = VllmServer(config)
    try:
        worker.serve("127.0.0.1", free_port(), KEY, 4 * HANG_S)
        yield worker
    finally:
        worker.close()


def asked(server: VllmServer, path: str, body: dict[str, Any], key: str = KEY) -> Any:
    url = server.served()[0].removesuffix("/v1")
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url + path, data=json.dumps(body).encode(), headers=headers, method="POST")
    with urllib.request.urlopen(request, timeout=HANG_S) as answer:
        return json.load(answer)


def answers(server: VllmServer) -> list[Any]:
    """What it says of some texts, with every number of it."""
    if server.config.classifies:
        return [asked(server, "/classify", {"model": "served", "input": text, "use_activation": False})["data"] for text in WORDS]
    sampling = {"temperature": 0.0, "max_tokens": 12, "min_tokens": 12, "logprobs": True}
    bodies = [{"model": "served", "messages": [{"role": "user", "content": text}], **sampling} for text in WORDS]
    return [asked(server, "/v1/chat/completions", body)["choices"] for body in bodies]


def test_it_leaves_comes_back_and_answers_as_before(server: VllmServer) -> None:
    expected = answers(server)
    for _ in range(2):
        off = server.offload([StateKind.PARAMS])
        assert off.freed_bytes == {StateKind.PARAMS: off.before.allocated_bytes}
        assert off.before.allocated_bytes > CACHE_BYTES
        assert (off.copied_bytes, off.after.allocated_bytes) == ({}, 0)
        assert off.before.host_rss_bytes - off.after.host_rss_bytes > 0.8 * CACHE_BYTES  # really gone
        assert server.offload([StateKind.PARAMS]).freed_bytes == {}
        on = server.load([StateKind.PARAMS])
        assert on.after.allocated_bytes == off.before.allocated_bytes
        assert on.undefined == frozenset()
        assert server.load([StateKind.PARAMS]).freed_bytes == {}
        assert answers(server) == expected
    for path in ("/collective_rpc", "/sleep", "/classify", "/v1/models"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            asked(server, path, {"method": "rljob_release"}, key="another")
    server.close()
    with pytest.raises(OffloadError, match="served: vLLM's server did not answer rljob_snapshot"):
        server.offload([StateKind.PARAMS])
