"""The measuring client: a few verbs over HTTPS with a kubeconfig's client certificate, nothing cached, nothing retried."""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import yaml

T = TypeVar("T")
RLJOBS = "/apis/rljob.dev/v1alpha1/namespaces/{namespace}/rljobs"
RAYJOBS = "/apis/ray.io/v1/namespaces/{namespace}/rayjobs"
IN_FLIGHT = 16
"""Requests of the client at the same time."""
REQUEST_TIMEOUT_S = 60.0
LINE_BYTES = 4 * 2**20


class Api:
    """One API server; an async context manager."""

    def __init__(self, kubeconfig: Path) -> None:
        config = yaml.safe_load(kubeconfig.read_text())
        cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
        self._base = cluster["server"]
        self._ssl = ssl.create_default_context(cadata=base64.b64decode(cluster["certificate-authority-data"]).decode())
        with tempfile.NamedTemporaryFile("wb", suffix=".pem") as pem:
            pem.write(base64.b64decode(user["client-certificate-data"]) + base64.b64decode(user["client-key-data"]))
            pem.flush()
            self._ssl.load_cert_chain(pem.name)

    async def __aenter__(self) -> Api:
        connector = aiohttp.TCPConnector(ssl=self._ssl, limit=64)
        self._session = aiohttp.ClientSession(
            self._base, connector=connector, timeout=aiohttp.ClientTimeout(sock_read=None, total=None), read_bufsize=LINE_BYTES
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    async def call(self, method: str, path: str, body: object = None, content_type: str = "application/json") -> dict[str, Any]:
        """One request; the parsed answer.

        Raises:
            RuntimeError: any answer but a success.
        """
        status, answer = await self.answer(method, path, body, content_type)
        if status >= 300:
            raise RuntimeError(f"{method} {path}: {status} {json.dumps(answer)[:500]}")
        return answer

    async def answer(
        self, method: str, path: str, body: object = None, content_type: str = "application/json"
    ) -> tuple[int, dict[str, Any]]:
        """One request; HTTP status and parsed answer, whatever they are."""
        async with asyncio.timeout(REQUEST_TIMEOUT_S):
            data = None if body is None else json.dumps(body)
            async with self._session.request(method, path, data=data, headers={"Content-Type": content_type}) as answer:
                return answer.status, json.loads(await answer.text())

    async def create(self, collection: str, manifest: Mapping[str, Any]) -> dict[str, Any]:
        return await self.call("POST", collection, manifest)

    async def patch_status(self, path: str, status: Mapping[str, Any]) -> dict[str, Any]:
        return await self.call("PATCH", f"{path}/status", {"status": status}, "application/merge-patch+json")

    async def namespace(self, name: str) -> None:
        await self.create("/api/v1/namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})

    async def watch(self, collection: str, since: str) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Event type and object of every change after a resourceVersion."""
        query = {"watch": "true", "resourceVersion": since}
        async with self._session.get(collection, params=query) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                event = json.loads(line)
                yield event["type"], event["object"]

    async def version(self, collection: str) -> str:
        """The resourceVersion to watch from."""
        return str((await self.call("GET", f"{collection}?limit=1"))["metadata"]["resourceVersion"])


async def bounded(work: Iterable[Callable[[], Coroutine[Any, Any, T]]], in_flight: int = IN_FLIGHT) -> list[T]:
    """Run all, at most ``in_flight`` at the same time, started in order."""
    gate = asyncio.Semaphore(in_flight)

    async def one(start: Callable[[], Coroutine[Any, Any, T]]) -> T:
        async with gate:
            return await start()

    return await asyncio.gather(*(one(w) for w in work))
