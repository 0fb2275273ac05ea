"""A real API server for a test session, and a namespace of its own for each test."""

import itertools
import os
from collections.abc import Iterator

import pytest

from e2e.cluster import build
from e2e.cluster.api_server import ApiServer
from e2e.cluster.crds import RLJOB_CRD
from e2e.cluster.errors import ClusterError
from e2e.cluster.versions import KUBERAY_CRDS, Mode
from e2e.objects import Objects
from tests.support.file_order import WITH_API_SERVER

__all__ = ["ApiServer", "api_server", "build_for", "namespace"]

# A CRD of KubeRay costs the server two seconds; RLJob makes RayJobs, and nothing here plays with services.
CRDS = ("rayclusters", "rayjobs")
FIXTURES = {"api_server", "helm"}
"""Fixtures that need programs of the cache."""

_numbers = itertools.count(1)
_running: list[ApiServer] = []
"""The session's API server, until it is stopped."""


@pytest.fixture(scope="session")
def api_server() -> Iterator[ApiServer]:
    """The session's API server, with the CRDs of RayCluster, RayJob and RLJob."""
    try:
        build.build(Mode.API)
    except ClusterError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"no API server: {error}")
    kuberay = [file for file in build.module_files(KUBERAY_CRDS) if any(file.stem == f"ray.io_{plural}" for plural in CRDS)]
    assert len(kuberay) == len(CRDS)
    with ApiServer(crd_files=[*kuberay, RLJOB_CRD]) as server:
        _running.append(server)
        yield server


def stop_unless_used(next_item: pytest.Item | None) -> None:
    """Stop the session's API server after the last of the files that use it, which follow each other: it computes while it idles."""
    if _running and next_item is not None and next_item.path.name not in WITH_API_SERVER:
        _running.pop().stop()


@pytest.fixture
def namespace(api_server: ApiServer) -> Iterator[str]:
    """A namespace nobody else uses; what is in it goes away with it."""
    name, objects = f"test-{next(_numbers)}", Objects(api_server.kubeconfig)
    objects.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}}, name)
    yield name
    objects.delete("namespace", name, name)


def build_for(session: pytest.Session) -> None:
    """Build the programs that a collected test needs, before the clock of any test runs: cold, that takes minutes."""
    if not any(FIXTURES & set(getattr(item, "fixturenames", ())) for item in session.items):
        return
    capture = session.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        try:
            build.build(Mode.API, lambda text: print(f"[cluster] {text}", flush=True))
        except ClusterError as error:
            print(f"[cluster] {error}", flush=True)  # the fixture decides what that means
