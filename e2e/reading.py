"""Reads objects of the API server over one connection, for scenarios and integration tests: they poll, and each kubectl computes 60 ms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

TIMEOUT_S = 180.0
"""Bound of an answer that comes soon or never."""
NOT_FOUND = 404
CORE = ("configmaps", "events", "pods", "secrets", "serviceaccounts", "services")
GROUPS = {
    "apps/v1": ("deployments",),
    "coordination.k8s.io/v1": ("leases",),
    "networking.k8s.io/v1": ("networkpolicies",),
    "policy/v1": ("poddisruptionbudgets",),
    "ray.io/v1": ("rayclusters", "rayjobs"),
    "rbac.authorization.k8s.io/v1": ("clusterrolebindings", "clusterroles", "rolebindings", "roles"),
    "rljob.dev/v1alpha1": ("rljobs",),
}
WITHOUT_NAMESPACE = ("clusterrolebindings", "clusterroles")
"""Kinds that are read, as the API server's paths have them."""
FOLDERS = {kind: "api/v1" for kind in CORE} | {kind: f"apis/{group}" for group, kinds in GROUPS.items() for kind in kinds}


class KubectlError(AssertionError):
    """Raised when kubectl fails, or the API server refuses; the message has the answer."""


class NotThereError(KubectlError):
    """Raised when there is no such object."""


class Reader:
    """The API server of one kubeconfig."""

    def __init__(self, kubeconfig: Path) -> None:
        self._api: client.ApiClient = config.new_client_from_config(str(kubeconfig))

    def get(self, kind: str, name: str, namespace: str) -> dict[str, Any]:
        """One object.

        Raises:
            NotThereError: there is none.
            KubectlError: the server does not answer, or refuses.
        """
        return self._read(f"{path(kind, namespace)}/{name}")

    def items(self, kind: str, selector: str, namespace: str) -> list[dict[str, Any]]:
        """Objects of a kind with the labels that the selector wants; all where it is empty.

        Raises:
            KubectlError: the server does not answer, or refuses.
        """
        query = "?" + urlencode({"labelSelector": selector}) if selector else ""
        found = self._read(path(kind, namespace) + query)
        return [{"kind": found["kind"].removesuffix("List"), **item} for item in found["items"]]

    def _read(self, place: str) -> dict[str, Any]:
        headers = {"Accept": "application/json"}
        self._api.update_params_for_auth(headers, [], ["BearerToken"], place, "GET", None)
        try:
            response = self._api.call_api("GET", f"{self._api.configuration.host}/{place}", headers, _request_timeout=TIMEOUT_S)
            data = response.read()
        except (ApiException, HTTPError, OSError) as error:
            raise KubectlError(f"GET {place}: {error}") from error
        if response.status >= 400:
            kind = NotThereError if response.status == NOT_FOUND else KubectlError
            raise kind(f"GET {place}: {response.status}: {data.decode(errors='replace')[:1000]}")
        return dict(json.loads(data))


def path(kind: str, namespace: str) -> str:
    """Where objects of a kind are, whose name may be singular and capitalized, as for kubectl."""
    word = kind.lower()
    plural = next((form for form in (word, f"{word}s", f"{word.removesuffix('y')}ies") if form in FOLDERS), None)
    if plural is None:
        raise KubectlError(f"{kind!r} is none of the kinds that are read here: {', '.join(sorted(FOLDERS))}; add it to e2e/reading.py")
    return f"{FOLDERS[plural]}/{plural}" if plural in WITHOUT_NAMESPACE else f"{FOLDERS[plural]}/namespaces/{namespace}/{plural}"
