"""Reads and writes objects of the API server over one connection, for scenarios and integration tests: each kubectl computes 60 ms."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from urllib3.exceptions import HTTPError

TIMEOUT_S = 180.0
"""Bound of an answer that comes soon or never."""
NOT_FOUND = 404
CORE = ("configmaps", "events", "namespaces", "pods", "secrets", "serviceaccounts", "services")
GROUPS = {
    "apps/v1": ("deployments",),
    "coordination.k8s.io/v1": ("leases",),
    "networking.k8s.io/v1": ("networkpolicies",),
    "policy/v1": ("poddisruptionbudgets",),
    "ray.io/v1": ("rayclusters", "rayjobs"),
    "rbac.authorization.k8s.io/v1": ("clusterrolebindings", "clusterroles", "rolebindings", "roles"),
    "rljob.dev/v1alpha1": ("rljobs",),
}
WITHOUT_NAMESPACE = ("clusterrolebindings", "clusterroles", "namespaces")
"""Kinds that are read or written, as the API server's paths have them."""
FOLDERS = {kind: "api/v1" for kind in CORE} | {kind: f"apis/{group}" for group, kinds in GROUPS.items() for kind in kinds}


class KubectlError(AssertionError):
    """Raised when kubectl fails, or the API server refuses; the message has the answer."""


class NotThereError(KubectlError):
    """Raised when there is no such object."""


class AlreadyExistsError(KubectlError):
    """Raised when there is an object of that name."""


class Objects:
    """Those of the API server of one kubeconfig."""

    def __init__(self, kubeconfig: Path) -> None:
        self._api: client.ApiClient = config.new_client_from_config(str(kubeconfig))

    def get(self, kind: str, name: str, namespace: str) -> dict[str, Any]:
        """One object.

        Raises:
            NotThereError: there is none.
            KubectlError: the server does not answer, or refuses.
        """
        return self._request("GET", f"{path(kind, namespace)}/{name}")

    def items(self, kind: str, selector: str, namespace: str) -> list[dict[str, Any]]:
        """Objects of a kind with the labels that the selector wants; all where it is empty.

        Raises:
            KubectlError: the server does not answer, or refuses.
        """
        query = "?" + urlencode({"labelSelector": selector}) if selector else ""
        found = self._request("GET", path(kind, namespace) + query)
        return [{"kind": found["kind"].removesuffix("List"), **item} for item in found["items"]]

    def create(self, document: Mapping[str, Any], namespace: str, *, dry_run: bool = False) -> dict[str, Any]:
        """The object as the server stores it, or would: an unknown or repeated field is refused, as kubectl has it.

        Raises:
            KubectlError: the server does not answer, or refuses; the message has its words.
        """
        query = {"fieldValidation": "Strict"} | ({"dryRun": "All"} if dry_run else {})
        return self._request("POST", f"{path(document['kind'], namespace)}?{urlencode(query)}", document)

    def merge(self, kind: str, name: str, change: Mapping[str, Any], namespace: str, subresource: str = "") -> None:
        """Change an object, or its status where that is the subresource, by a merge patch.

        Raises:
            NotThereError: there is none.
            KubectlError: the server does not answer, or refuses; the message has its words.
        """
        place = f"{path(kind, namespace)}/{name}" + (f"/{subresource}" if subresource else "")
        self._request("PATCH", place, change, "application/merge-patch+json")

    def delete(self, kind: str, name: str, namespace: str, *, grace_s: int | None = None) -> None:
        """Delete an object, after ``grace_s`` seconds or its own; this does not wait until it is gone.

        Raises:
            NotThereError: there is none.
            KubectlError: the server does not answer, or refuses.
        """
        options = {} if grace_s is None else {"gracePeriodSeconds": grace_s}
        self._request("DELETE", f"{path(kind, namespace)}/{name}", {"apiVersion": "v1", "kind": "DeleteOptions", **options})

    def _request(self, method: str, place: str, body: Mapping[str, Any] | None = None, content: str = "application/json") -> dict[str, Any]:
        headers = {"Accept": "application/json"} | ({} if body is None else {"Content-Type": content})
        self._api.update_params_for_auth(headers, [], ["BearerToken"], place, method, body)
        url = f"{self._api.configuration.host}/{place}"
        try:
            response = self._api.call_api(method, url, headers, body, _request_timeout=TIMEOUT_S)
            data = response.read()
        except (ApiException, HTTPError, OSError) as error:
            raise KubectlError(f"{method} {place}: {error}") from error
        if response.status >= 400:
            kind, words = _refusal(response.status, data)
            raise kind(f"{method} {place}: {response.status}: {words}")
        return dict(json.loads(data))


def _refusal(code: int, data: bytes) -> tuple[type[KubectlError], str]:
    """What a refusal is, and its words."""
    text = data.decode(errors="replace")
    kind = NotThereError if code == NOT_FOUND else KubectlError
    try:
        status = json.loads(text)
        return AlreadyExistsError if status["reason"] == "AlreadyExists" else kind, str(status["message"])
    except (ValueError, TypeError, KeyError):  # not of the API server itself
        return kind, text[:1000]


def path(kind: str, namespace: str) -> str:
    """Where objects of a kind are, whose name may be singular and capitalized, as for kubectl."""
    word = kind.lower()
    plural = next((form for form in (word, f"{word}s", f"{word.removesuffix('y')}ies") if form in FOLDERS), None)
    if plural is None:
        raise KubectlError(f"{kind!r} is none of the kinds known here: {', '.join(sorted(FOLDERS))}; add it to e2e/objects.py")
    return f"{FOLDERS[plural]}/{plural}" if plural in WITHOUT_NAMESPACE else f"{FOLDERS[plural]}/namespaces/{namespace}/{plural}"
