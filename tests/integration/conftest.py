"""Fixtures of the integration tests."""

import pytest

from tests.integration import kube_api
from tests.integration.kube_api import api_server, namespace

__all__ = ["api_server", "namespace"]


def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.option.collectonly:
        kube_api.build_for(session)
