"""Admission webhooks that do not do their part: nobody listens, they hang up, or they never answer."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tests.support.ports import free_port


def configuration(
    name: str, namespace: str, port: int, resource: str, *, policy: str, timeout_s: int = 10, labels: Mapping[str, str] | None = None
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
    if labels is not None:
        hook["objectSelector"] = {"matchLabels": dict(labels)}
    return {
        "apiVersion": "admissionregistration.k8s.io/v1",
        "kind": "ValidatingWebhookConfiguration",
        "metadata": {"name": name},
        "webhooks": [hook],
    }


class Endpoint:
    """A port of loopback that takes connections and either closes them or keeps them without a word; counts them."""

    def __init__(self, *, hangs: bool) -> None:
        """``hangs``: keep them."""
        self.num_asked = 0
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
                if self._hangs:
                    kept.append(connection)
                else:
                    connection.close()


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
