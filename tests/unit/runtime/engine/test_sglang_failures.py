"""An engine whose event loop meets a defect says so at once, with a server that only exists."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config

from rljob_runtime.engine.protocol import EngineConfig
from rljob_runtime.engine.sglang import engine as module
from rljob_runtime.engine.sglang.engine import SglangEngine
from rljob_runtime.errors import EngineDiedError
from rljob_runtime.records import GenerationRequest, Sampling
from tests.support.pace import HANG_S
from tests.support.records import ids


class Server:
    """Healthy, and asked for nothing."""

    url = "http://127.0.0.1:9"

    def __init__(self, *arguments: object) -> None:
        pass

    def wait_until_healthy(self, timeout_s: float) -> None:
        pass

    def close(self) -> None:
        pass


def defect(*arguments: object) -> Any:
    raise TypeError("a defect")


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SglangEngine]:
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    Qwen2Config(vocab_size=50, intermediate_size=64, **sizes).save_pretrained(tmp_path)
    monkeypatch.setattr(module, "sglang_python", lambda: tmp_path / "bin" / "python")
    monkeypatch.setattr(module, "SglangServer", Server)
    config = EngineConfig(model_path=str(tmp_path), max_model_len=32, kv_cache_bytes=1 << 20, threads=1, release="never")
    made = SglangEngine(config)
    yield made
    made.shutdown()


@pytest.mark.parametrize("method", ["add", "abort"])
def test_calls_that_nobody_waits_for(engine: SglangEngine, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.session, method, defect)
    if method == "add":
        engine.submit([GenerationRequest(request_id="a", prompt_token_ids=ids(1, 2), sampling=Sampling(max_tokens=2), seed=0)])
    else:
        engine.abort(["a"])
    with pytest.raises(EngineDiedError, match="the SGLang engine failed: TypeError: a defect"):
        engine.collect(HANG_S)


def test_calls_with_an_answer(engine: SglangEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.session, "score", defect)
    with pytest.raises(EngineDiedError, match="the SGLang engine failed: TypeError: a defect"):
        engine.score([(1, 2, 3)], HANG_S)
