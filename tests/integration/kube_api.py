"""A real API server for a test session, and a namespace of its own for each test."""

import base64
import http.client
import itertools
import json
import os
import ssl
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from e2e.cluster import build
from e2e.cluster.api_server import ApiServer
from e2e.cluster.crds import RLJOB_CRD
from e2e.cluster.errors import ClusterError
from e2e.cluster.versions import KUBERAY_CRDS, Mode
from tests.support.pace import HANG_S

__all__ = ["ApiServer", "api_server", "build_for", "namespace"]

# A CRD of KubeRay costs the server two seconds; RLJob makes RayJobs, and nothing here plays with services.
CRDS = ("rayclusters", "rayjobs")
FIXTURES = {"api_server", "helm"}
"""Fixtures that need programs of the cache."""

_numbers = itertools.count(1)

KINDS = {
    "rljob": ("apis/rljob.dev/v1alpha1", "rljobs"),
    "rayjob": ("apis/ray.io/v1", "rayjobs"),
    "lease": ("apis/coordination.k8s.io/v1", "leases"),
    "serviceaccount": ("api/v1", "serviceaccounts"),
    "role": ("apis/rbac.authorization.k8s.io/v1", "roles"),
    "rolebinding": ("apis/rbac.authorization.k8s.io/v1", "rolebindings"),
    "networkpolicy": ("apis/networking.k8s.io/v1", "networkpolicies"),
}
"""Kinds that tests read: group and version, plural."""


class Reader:
    """Reads objects as administrator, over one connection: tests ask until something is there, and each kubectl computes 60 ms."""

    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        trusted = ssl.create_default_context(cadata=base64.b64decode(cluster["certificate-authority-data"]).decode())
        with tempfile.NamedTemporaryFile("wb", suffix=".pem") as pem:
            pem.write(base64.b64decode(user["client-certificate-data"]) + base64.b64decode(user["client-key-data"]))
            pem.flush()
            trusted.load_cert_chain(pem.name)
        self._connection = http.client.HTTPSConnection(urlsplit(cluster["server"]).netloc, context=trusted, timeout=HANG_S)

    def get(self, namespace: str, kind: str, name: str) -> dict[str, Any] | None:
        """An object of one of :data:`KINDS`; None where there is none."""
        group, plural = KINDS[kind]
        return self._read(f"/{group}/namespaces/{namespace}/{plural}/{name}")

    def list(self, namespace: str, plural: str, selector: str) -> list[dict[str, Any]]:
        """Objects of a kind whose labels the selector wants."""
        (group,) = (group for group, of_kind in KINDS.values() if of_kind == plural)
        found = self._read(f"/{group}/namespaces/{namespace}/{plural}?labelSelector={selector}")
        assert found is not None, f"the server has no {plural}"
        kind = found["kind"].removesuffix("List")
        return [{"kind": kind, **item} for item in found["items"]]

    def _read(self, path: str) -> dict[str, Any] | None:
        try:
            status, text = self._asked(path)
        except ConnectionError:  # the server has closed it meanwhile
            self._connection.close()
            status, text = self._asked(path)
        assert status in (200, 404), f"{path}: {status} {text[:500]!r}"
        found: dict[str, Any] = json.loads(text)
        return found if status == 200 else None

    def _asked(self, path: str) -> tuple[int, bytes]:
        self._connection.request("GET", path)
        answer = self._connection.getresponse()
        return answer.status, answer.read()


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
        yield server


@pytest.fixture
def namespace(api_server: ApiServer) -> Iterator[str]:
    """A namespace nobody else uses; what is in it goes away with it."""
    name = f"test-{next(_numbers)}"
    api_server.kubectl("create", "namespace", name)
    yield name
    api_server.kubectl("delete", "namespace", name, "--wait=false")


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
