"""Fixtures of the integration tests."""

from pathlib import Path

import pytest
from filelock import FileLock

from tests.integration import kube_api
from tests.integration.jobs import untrained_model
from tests.integration.kube_api import api_server, namespace

__all__ = ["api_server", "namespace"]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The model of all small jobs; whichever of pytest's processes needs it first makes it, and nobody changes it."""
    base = tmp_path_factory.getbasetemp()
    shared = base if worker_id == "master" else base.parent  # the folder of all processes of this session
    with FileLock(shared / "model.lock"):
        return untrained_model(shared / "model")  # which finds the model that is there


def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.option.collectonly:
        kube_api.build_for(session)
