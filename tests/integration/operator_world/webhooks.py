"""Admission webhooks that do not do their part: nobody listens, they hang up, or they never answer."""

from __future__ import annotations

import base64
import contextlib
import socket
import ssl
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from rljob_operator import certificates
from tests.support.ports import free_port

GREETING_S = 5.0


def configuration(
    name: str,
    namespace: str,
    port: int,
    resource: str,
    *,
    policy: str,
    timeout_s: int = 10,
    labels: Mapping[str, str] | None = None,
    authority: bytes = b"",
) -> dict[str, Any]:
    """A ValidatingWebhookConfiguration for creates and updates, not of the status.

    Args:
        name: of the configuration; that of the webhook, which errors show, is ``<name>.example.com``.
        namespace: that it is asked about.
        port: of loopback.
        resource: ``rayjobs`` or ``rljobs``.
        policy: failurePolicy.
        timeout_s: how long the API server waits for it.
        labels: of the objects that it is asked about; None: all.
        authority: that the API server trusts, as PEM; empty: the system's.
    """
    group, version = {"rayjobs": ("ray.io", "v1"), "rljobs": ("rljob.dev", "v1alpha1")}[resource]
    hook: dict[str, Any] = {
        "name": f"{name}.example.com",
        "admissionReviewVersions": ["v1"],
        "failurePolicy": policy,
        "sideEffects": "None",
        "timeoutSeconds": timeout_s,
        "clientConfig": {"url": f"https://127.0.0.1:{port}/validate"},
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "rules": [{"apiGroups": [group], "apiVersions": [version], "operations": ["CREATE", "UPDATE"], "resources": [resource]}],
    }
    if authority:
        hook["clientConfig"]["caBundle"] = base64.b64encode(authority).decode()
    if labels is not None:
        hook["objectSelector"] = {"matchLabels": dict(labels)}
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": name},
        "webhooks": [hook],
    }


class Endpoint:
    """A port of loopback that takes connections and either closes them or greets by TLS and then never answers; counts them."""

    def __init__(self, *, hangs: bool) -> None:
        """``hangs``: never answer. Without a greeting the API server gives up after 10 s, whatever the webhook's timeout."""
        self.num_asked = 0
        self.authority = b""
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        if hangs:
            made = certificates.make(["127.0.0.1"], datetime.now(UTC))
            self.authority = made.authorities
            with tempfile.NamedTemporaryFile("wb", suffix=".pem") as pem:
                pem.write(made.certificate + made.key)
                pem.flush()
                self._tls.load_cert_chain(pem.name)
        self._hangs = hangs
        self._kept: Sequence[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Hang up on everybody."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()
        for connection in self._kept:
            connection.close()

    def _accept(self) -> None:
        kept: list[socket.socket] = []
        self._kept = kept
        with contextlib.suppress(OSError):  # closed
            while True:
                connection, _ = self._listener.accept()
                self.num_asked += 1
                connection.settimeout(GREETING_S)
                if not self._hangs:
                    connection.close()
                    continue
                with contextlib.suppress(OSError):  # the API server has given up
                    kept.append(self._tls.wrap_socket(connection, server_side=True))


@contextmanager
def endpoint(*, hangs: bool) -> Iterator[Endpoint]:
    """One for as long as a block of code."""
    made = Endpoint(hangs=hangs)
    try:
        yield made
    finally:
        made.close()


def dead_port() -> int:
    """A port that nobody listens on."""
    return free_port()
