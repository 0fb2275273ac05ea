"""Fixtures of the integration tests."""

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from rljob_runtime.tiny import TinySummary, make_lake_model
from tests.integration import kube_api
from tests.integration.jobs import rljob, untrained_model
from tests.integration.kube_api import api_server, namespace
from tests.support import forked_workers, made_models

__all__ = ["api_server", "namespace"]


@pytest.fixture(scope="session")
def shared_folder(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder of all of pytest's processes in this session."""
    base = tmp_path_factory.getbasetemp()
    return base if worker_id == "master" else base.parent


@pytest.fixture(scope="session")
def model(shared_folder: Path) -> Path:
    """The model of all small jobs; whichever of pytest's processes needs it first makes it, and nobody changes it."""
    with FileLock(shared_folder / "model.lock"):
        return untrained_model(shared_folder / "model")  # which finds the model that is there


@pytest.fixture(scope="session")
def kept_models(shared_folder: Path) -> Callable[[str], Path]:
    """Where models that a module makes in minutes stay for later sessions of the same code, or for this one if that cannot be written."""

    def kept(makes: str) -> Path:
        folder = made_models.kept_folder(makes)
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
        return folder if os.access(folder, os.W_OK) else shared_folder

    return kept


@pytest.fixture(scope="session")
def quickstart_models(kept_models: Callable[[str], Path]) -> Callable[[int], Path]:
    """The ``models`` folder of `make run` for a seed, made by the same command; a minute of computing that several tests share."""
    kept = kept_models(made_models.MAKES_QUICKSTART)

    def made(seed: int) -> Path:
        folder = kept / f"quickstart-{seed}"
        folder.mkdir(exist_ok=True)
        with FileLock(kept / f"quickstart-{seed}.lock"):
            if not (folder / "models" / "tiny").exists():  # is there complete or not at all; the command would import torch to say so
                print(rljob("model", "tiny", "--out", "models/tiny", "--seed", str(seed), cwd=folder))
        return folder / "models"

    return made


@pytest.fixture(scope="session")
def lake_model(kept_models: Callable[[str], Path]) -> TinySummary:
    """The model of examples/frozen-lake.yaml as `rljob model tiny` makes it; minutes of computing that several tests share."""
    kept = kept_models(made_models.MAKES_LAKE)
    with FileLock(kept / "lake.lock"):
        return make_lake_model(kept / "lake" / "tiny-lake")  # which finds the model that is there


@pytest.fixture(scope="session")
def forked_servers() -> Iterator[None]:
    """vLLM's and SGLang's servers that the process of the test starts, from here on, start without imports."""
    with forked_workers.servers():
        yield


@pytest.fixture
def forked_shards() -> Iterator[None]:
    """Tensor- and pipeline-parallel engines in the process of the test start without imports."""
    with forked_workers.shards():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> Iterator[None]:
    """The API server ends after its last test."""
    yield
    kube_api.stop_unless_used(nextitem)


def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.option.collectonly:
        kube_api.build_for(session)
