"""What the image knows of vLLM's model classes gets where vLLM looks for it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rljob_runtime.engine.protocol import EngineConfig
from rljob_runtime.engine.vllm import engine
from rljob_runtime.engine.vllm.model_infos import FOLDER_VARIABLE, seed


def test_files_that_the_cache_lacks_are_copied_and_others_are_kept(tmp_path: Path) -> None:
    known, cache = tmp_path / "known", tmp_path / "home" / "vllm" / "modelinfos"
    known.mkdir()
    cache.mkdir(parents=True)
    (known / "a.json").write_text("of the image")
    (known / "b.json").write_text("of the image")
    (cache / "b.json").write_text("of an earlier start")
    environment = {FOLDER_VARIABLE: str(known), "XDG_CACHE_HOME": str(tmp_path / "home")}
    for _ in range(2):
        seed(environment)
        assert {path.name: path.read_text() for path in cache.iterdir()} == {"a.json": "of the image", "b.json": "of an earlier start"}
    seed(environment | {"VLLM_CACHE_ROOT": str(tmp_path / "other")})
    assert (tmp_path / "other" / "modelinfos" / "b.json").read_text() == "of the image"


def test_without_an_image_nothing_is_made(tmp_path: Path) -> None:
    seed({"XDG_CACHE_HOME": str(tmp_path)})
    assert list(tmp_path.iterdir()) == []


def test_an_engine_starts_without_them_where_the_cache_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a file").write_text("")
    (tmp_path / "known").mkdir()
    seed({FOLDER_VARIABLE: str(tmp_path / "known"), "VLLM_CACHE_ROOT": str(tmp_path / "a file")})
    assert "a file/modelinfos cannot be written" in caplog.text


def test_an_engine_that_is_prepared_ahead_takes_them_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on devices that it shares: vLLM looks for the class of the model then, and not at the start."""
    calls: list[str] = []
    monkeypatch.setattr(engine, "environment_problems", lambda config: [])
    monkeypatch.setattr("rljob_runtime.engine.vllm.model_infos.seed", lambda: calls.append("seed"))
    preparing = SimpleNamespace(prepare=lambda config: calls.append("prepare"))
    monkeypatch.setitem(sys.modules, "rljob_runtime.engine.vllm.preparing", preparing)
    engine.VllmEngine.prepare(EngineConfig(model_path="model", max_model_len=64))
    assert calls == ["seed", "prepare"]
