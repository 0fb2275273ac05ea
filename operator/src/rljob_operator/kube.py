"""The Kubernetes API as plain JSON, through the official client. The only module that imports that client.

Only its connection, authentication and configuration are used (``call_api``); the generated models would double the time of every
request and decode kinds the operator never touches. Nothing is retried here: an answer becomes a value or an error of
:mod:`rljob_operator.errors`, and the work queue decides when to retry.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio import config as kube_config
from kubernetes.aio.client import ApiClient, Configuration
from pydantic_core import from_json

from rljob_operator.errors import (
    AlreadyExistsError,
    ConflictError,
    KubeError,
    NotFoundError,
    NotLeaderError,
    RejectedError,
    SettingsError,
    UnansweredError,
    UnavailableError,
)
from rljob_operator.model import Manifest
from rljob_operator.protocol import FIELD_MANAGER, Kind

REQUEST_TIMEOUT_S: Final = 10.0
"""Timeout of one read, including the connection."""
WRITE_TIMEOUT_S: Final = 35.0
"""Timeout of one write: the API server answers after 34 s at the latest, however long its webhooks take, each of them up to 30 s
(``requestTimeoutUpperBound`` in k8s.io/apiserver/pkg/endpoints/handlers/rest.go). A client that disconnects earlier cancels the write: an
object behind a webhook that hangs and may be ignored would never be stored, and the name of one that may not would not be reported."""
LATE_S: Final = 2.0
"""A write without an answer for so long probably waits for an admission webhook, and makes room for another request."""
MAX_LATE: Final = 96
"""Maximum number of such writes that make room: the reconciles of all workers of the queue and its slow lane, four writes each."""
CONNECT_TIMEOUT_S: Final = 10.0
"""Timeout of a connection."""
LEASE_TIMEOUT_S: Final = 4.0
"""Timeout of a request for the lease: one without an answer leaves time for another before it is lost."""
LIST_TIMEOUT_S: Final = 60.0
"""Timeout of one page of a list."""
PAGE_SIZE: Final = 100
"""Objects per page of a list: about 1 MB of RayJobs, 10 MB when decoded."""
JSON: Final = "application/json"
MERGE: Final = "application/merge-patch+json"
APPLY: Final = "application/apply-patch+yaml"

Observer = Callable[[str, str, int], None]
"""Called for every request with verb, kind and HTTP status (0: no answer)."""


class KubernetesClient:
    """The :class:`~rljob_operator.protocol.KubeClient` for a real cluster; create it with :meth:`connect`."""

    def __init__(
        self,
        configuration: Configuration,
        *,
        max_in_flight: int,
        observe: Observer,
        may_write: Callable[[], bool] = lambda: True,
        on_date: Callable[[str | None], None] = lambda date: None,
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        write_timeout_s: float = WRITE_TIMEOUT_S,
    ) -> None:
        """Use a complete configuration; ``max_in_flight`` bounds concurrent requests, those for the lease and late writes apart.

        ``may_write`` is asked right before a write is sent; the lease itself is always written. ``on_date`` gets the header ``Date`` of
        every answer.
        """
        configuration.connection_pool_maxsize = max_in_flight + MAX_LATE + 1
        # The API server sets no cookies, and a pod reaches it without a proxy: skip both look-ups on every request.
        session: dict[str, Any] = {"cookie_jar": aiohttp.DummyCookieJar()}
        if _in_cluster():
            session["trust_env"] = False
        configuration.client_session_kwargs = session
        self._api: Any = ApiClient(configuration)  # its methods have no types
        self._host = configuration.host
        self._slots = _Slots(max_in_flight)
        self._lease_slots = _Slots(1)
        self._observe = observe
        self._may_write = may_write
        self._on_date = on_date
        self._request_timeout_s = request_timeout_s
        self._write_timeout_s = write_timeout_s

    @classmethod
    async def connect(
        cls,
        *,
        max_in_flight: int,
        observe: Observer,
        may_write: Callable[[], bool] = lambda: True,
        on_date: Callable[[str | None], None] = lambda date: None,
    ) -> KubernetesClient:
        """Connect to the cluster this pod runs in, or else to the current context of the kubeconfig.

        In a pod the token file is reread every minute, because tokens rotate.

        Raises:
            SettingsError: neither exists, or it cannot be read.
        """
        configuration = Configuration()
        load: Any = kube_config  # its functions have no types
        try:
            if _in_cluster():
                load.load_incluster_config(client_configuration=configuration)
            else:
                await load.load_kube_config(client_configuration=configuration)
        except (kube_config.ConfigException, OSError) as error:
            raise SettingsError(
                f"cannot access a cluster: {error}; run the operator in a pod with a service account or set KUBECONFIG"
            ) from error
        return cls(configuration, max_in_flight=max_in_flight, observe=observe, may_write=may_write, on_date=on_date)

    async def create(self, manifest: Manifest) -> Manifest:
        """See :class:`~rljob_operator.protocol.KubeClient`."""
        kind = Kind(manifest["kind"])
        metadata = manifest["metadata"]
        # Strict: a field that the server does not know, such as a typo in podTemplate, is an error and does not vanish.
        path = f"{_path(kind, metadata['namespace'])}?fieldValidation=Strict"
        return await self._request("create", kind, "POST", path, metadata.get("name", ""), body=manifest)

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest:
        """See :class:`~rljob_operator.protocol.KubeClient`."""
        return await self._request("get", kind, "GET", f"{_path(kind, namespace)}/{name}", name)

    async def pages(
        self, kind: Kind, namespace: str | None, label_selector: str = "", *, field_selector: str = ""
    ) -> AsyncIterator[Manifest]:
        """See :class:`~rljob_operator.protocol.KubeClient`."""
        query = {"limit": str(PAGE_SIZE)}
        if label_selector:
            query["labelSelector"] = label_selector
        if field_selector:
            query["fieldSelector"] = field_selector
        while True:
            path = f"{_path(kind, namespace)}?{urlencode(query)}"
            page = await self._request("list", kind, "GET", path, "", timeout_s=LIST_TIMEOUT_S)
            yield page
            token = page["metadata"].get("continue")
            if not token:
                return
            query["continue"] = token

    async def patch_merge(self, kind: Kind, namespace: str, name: str, patch: Manifest) -> Manifest:
        """See :class:`~rljob_operator.protocol.KubeClient`."""
        path = f"{_path(kind, namespace)}/{name}"
        return await self._request("patch", kind, "PATCH", path, name, body=patch, content_type=MERGE)

    async def apply_status(self, manifest: Manifest) -> Manifest:
        """See :class:`~rljob_operator.protocol.KubeClient`."""
        kind = Kind(manifest["kind"])
        namespace, name = manifest["metadata"]["namespace"], manifest["metadata"]["name"]
        path = f"{_path(kind, namespace)}/{name}/status?fieldManager={FIELD_MANAGER}&force=true"
        return await self._request("apply_status", kind, "PATCH", path, name, body=manifest, content_type=APPLY)

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> Manifest | None:
        """See :class:`~rljob_operator.protocol.KubeClient`."""
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Background", "preconditions": {"uid": uid}}
        answer = await self._request("delete", kind, "DELETE", f"{_path(kind, namespace)}/{name}", name, body=options)
        # With a finalizer or a graceful deletion the answer is the object; otherwise it is gone and the answer is a Status.
        return answer if answer.get("kind") == kind and answer["metadata"].get("deletionTimestamp") else None

    async def schema_version(self) -> str:
        """See :class:`~rljob_operator.protocol.KubeClient`."""
        group_version = f"apis/{Kind.RLJOB.api_version}"
        paths = await self._request("schema_version", Kind.RLJOB, "GET", "/openapi/v3", "")
        try:
            return str(paths["paths"][group_version]["serverRelativeURL"])
        except (KeyError, TypeError) as error:
            raise NotFoundError("schema_version RLJob", 404, f"the API server publishes no schema of {group_version}") from error

    async def schema(self, version: str) -> Manifest:
        """See :class:`~rljob_operator.protocol.KubeClient`."""
        answer = await self._request("schema", Kind.RLJOB, "GET", version, "", timeout_s=LIST_TIMEOUT_S)
        try:
            (found,) = [s for s in answer["components"]["schemas"].values() if _describes(s, Kind.RLJOB)]
            return {"spec": found["properties"]["spec"], "status": found["properties"]["status"]}
        except (KeyError, TypeError, ValueError) as error:
            raise NotFoundError("schema RLJob", 404, f"{version} has no schema of one kind RLJob with a spec and a status") from error

    async def close(self) -> None:
        """See :class:`~rljob_operator.protocol.KubeClient`."""
        await self._api.close()

    async def _request(
        self,
        verb: str,
        kind: Kind,
        method: str,
        path: str,
        name: str,
        *,
        body: Manifest | None = None,
        content_type: str = JSON,
        timeout_s: float | None = None,
    ) -> Manifest:
        """Send one request and return its answer as JSON."""
        action = f"{verb} {kind} {name}".rstrip()
        is_lease = kind is Kind.LEASE
        timeout_s = self._timeout_s(method, is_lease=is_lease) if timeout_s is None else timeout_s
        headers = {"Content-Type": content_type, "Accept": JSON, "User-Agent": FIELD_MANAGER}
        status, is_sent = 0, False
        try:
            async with self._lease_slots.one() if is_lease else self._slots.one(is_write=method != "GET"):
                # Also rereads the token file when due.
                await self._api.update_params_for_auth(headers, [], ["BearerToken"], path, method, None)
                if method != "GET" and not is_lease and not self._may_write():
                    raise NotLeaderError(action, 0, "not sent, because this operator does not hold the lease")
                is_sent = True
                timeout = aiohttp.ClientTimeout(total=timeout_s, connect=min(timeout_s, CONNECT_TIMEOUT_S))
                response = await self._api.call_api(method, self._host + path, headers, body, _request_timeout=timeout)
                self._on_date(response.headers.get("Date"))
                data = await response.read()
                status = response.status
        except aiohttp.ConnectionTimeoutError as error:
            raise UnavailableError(action, 0, f"no connection to {self._host} in time: {error}") from error
        except TimeoutError as error:
            raise UnansweredError(action, 0, f"no answer from {self._host} within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise UnavailableError(action, 0, f"no connection to {self._host}: {error}") from error
        finally:
            if is_sent:
                self._observe(verb, kind, status)
        if status < 300:
            return _decode(action, status, data)
        raise _error(action, status, data, response.headers.get("Retry-After"))

    def _timeout_s(self, method: str, *, is_lease: bool) -> float:
        if is_lease:
            return LEASE_TIMEOUT_S
        return self._request_timeout_s if method == "GET" else self._write_timeout_s


class _Slots:
    """Bounds concurrent requests.

    A write that hangs in an admission webhook costs the API server next to nothing. Without room of their own, a few of them would hold up
    the requests for all other jobs.
    """

    def __init__(self, most: int) -> None:
        self._free = asyncio.Semaphore(most)
        self._num_late = 0

    @asynccontextmanager
    async def one(self, *, is_write: bool = False) -> AsyncIterator[None]:
        """A slot for one request; a write that is late gives it back early."""
        await self._free.acquire()
        is_late = False

        def give_back() -> None:
            nonlocal is_late
            if self._num_late < MAX_LATE:
                is_late = True
                self._num_late += 1
                self._free.release()

        timer = asyncio.get_running_loop().call_later(LATE_S, give_back) if is_write else None
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()
            if is_late:
                self._num_late -= 1
            else:
                self._free.release()


def _in_cluster() -> bool:
    return bool(os.environ.get("KUBERNETES_SERVICE_HOST"))


def _path(kind: Kind, namespace: str | None) -> str:
    """Path of a collection; without a namespace that of a cluster-scoped kind, or of all namespaces."""
    prefix = f"/apis/{kind.api_version}" if "/" in kind.api_version else f"/api/{kind.api_version}"
    return f"{prefix}/{kind.plural}" if not namespace else f"{prefix}/namespaces/{namespace}/{kind.plural}"


def _describes(schema: Manifest, kind: Kind) -> bool:
    """Whether a published schema is that of a kind."""
    return any(mark.get("kind") == kind for mark in schema.get("x-kubernetes-group-version-kind", ()))


def _decode(action: str, status: int, data: bytes) -> Manifest:
    try:
        answer: Any = from_json(data)  # twice as fast as the standard library's, which counts for lists of thousands
    except ValueError as error:
        raise UnavailableError(action, status, f"the answer is not JSON: {data[:200]!r}") from error
    if not isinstance(answer, dict):
        raise UnavailableError(action, status, f"the answer is not an object: {data[:200]!r}")
    return answer


def _error(action: str, status: int, data: bytes, retry_after: str | None) -> KubeError:
    """Map an answer to an error."""
    try:
        answer = json.loads(data)
        message, reason = str(answer["message"]), str(answer.get("reason", ""))
    except (ValueError, KeyError, TypeError, AttributeError):
        # A proxy in between, or the server's own short text for 429.
        message, reason = data[:500].decode(errors="replace").strip(), ""
    if status == 404:
        return NotFoundError(action, status, message)
    if status == 409:
        return (AlreadyExistsError if reason == "AlreadyExists" else ConflictError)(action, status, message)
    # 401: the token has just expired; the next request reads the new one. 408: the server timed out. 410: the list token has expired.
    if status in (401, 408, 410, 429) or status >= 500:
        return UnavailableError(action, status, message, _seconds(retry_after))
    return RejectedError(action, status, message)


def _seconds(retry_after: str | None) -> float | None:
    """Parse Retry-After, which Kubernetes gives in whole seconds."""
    return float(retry_after) if retry_after and retry_after.isdigit() else None
