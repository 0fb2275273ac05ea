"""A proxy between operator and API server that answers with errors, delays, and cuts watches on demand.

Upstream is ``kubectl proxy`` (it authenticates), so that both hops are plain HTTP on loopback.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import aiohttp
import yaml
from aiohttp import web

from tests.support.pace import HANG_S
from tests.support.ports import free_port

Rule = Callable[[str, str], web.Response | None]
"""Method and path -> an answer instead of the API server's, or None."""
HOP_BY_HOP = {"transfer-encoding", "content-encoding", "content-length", "connection"}


def refusal(status: int, reason: str, retry_after_s: int | None = None) -> web.Response:
    """An error as the API server words it."""
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": status, "message": f"injected {status}"}
    headers = {"Retry-After": str(retry_after_s)} if retry_after_s else {}
    return web.Response(status=status, text=json.dumps(body), content_type="application/json", headers=headers)


class FaultyProxy:
    """Start with a kubectl binary and a kubeconfig; hand :attr:`kubeconfig` to the operator."""

    def __init__(self, kubectl: str, kubeconfig: Path, folder: Path) -> None:
        self.rule: Rule = lambda method, path: None
        self.watch_error: int | None = None
        """Code of the ERROR event with which every watch ends at once, or None."""
        self.delay_s = 0.0
        self.injected: Counter[int] = Counter()
        self.lists: Counter[str] = Counter()
        """Plural of a kind -> lists asked for."""
        self._upstream_port, self.port = free_port(), free_port()
        self._upstream = subprocess.Popen(
            [kubectl, f"--kubeconfig={kubeconfig}", "proxy", f"--port={self._upstream_port}"], stdout=subprocess.DEVNULL
        )
        self._watches: set[asyncio.Transport] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._started = threading.Event()
        self._thread.start()
        assert self._started.wait(HANG_S), "the proxy did not start"
        self._wait_for_upstream()
        self.kubeconfig = folder / "proxy-kubeconfig"
        self.kubeconfig.write_text(
            yaml.safe_dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "current-context": "proxy",
                    "clusters": [{"name": "proxy", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
                    "users": [{"name": "proxy", "user": {}}],
                    "contexts": [{"name": "proxy", "context": {"cluster": "proxy", "user": "proxy"}}],
                }
            )
        )

    def cut_watches(self) -> int:
        """Close the connections of all watches under way; returns how many."""
        done: asyncio.Future[int] = asyncio.run_coroutine_threadsafe(self._cut(), self._loop)  # type: ignore[assignment]
        return done.result(10)

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(HANG_S)
        asyncio.run_coroutine_threadsafe(self._session.close(), self._loop).result(HANG_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(HANG_S)
        self._upstream.terminate()
        self._upstream.wait(HANG_S)

    async def _cut(self) -> int:
        transports = list(self._watches)
        for transport in transports:
            transport.abort()
        return len(transports)

    def _wait_for_upstream(self) -> None:
        deadline = time.monotonic() + HANG_S
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self._upstream_port}/readyz", timeout=2):
                    return
            except (urllib.error.URLError, OSError):
                assert time.monotonic() < deadline, f"kubectl proxy did not answer within {HANG_S:.0f} s"
                time.sleep(0.05)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._listen())
        self._started.set()
        self._loop.run_forever()

    async def _listen(self) -> None:
        self._session = aiohttp.ClientSession(auto_decompress=False, timeout=aiohttp.ClientTimeout(total=None))
        app = web.Application(client_max_size=16 * 2**20)
        app.router.add_route("*", "/{path:.*}", self._handle)
        # Who hangs up ends its request, as with the API server itself: a write behind a webhook that hangs is not stored then.
        self._runner = web.AppRunner(app, shutdown_timeout=1, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        answer = self.rule(request.method, request.path)
        if answer is not None:
            self.injected[answer.status] += 1
            return answer
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        if request.method == "GET" and "watch" not in request.query:
            self.lists[request.path.rpartition("/")[2]] += 1
        if self.watch_error is not None and "watch" in request.query:
            self.injected[self.watch_error] += 1
            status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": self.watch_error, "message": "injected"}
            return web.Response(text=json.dumps({"type": "ERROR", "object": status}) + "\n", content_type="application/json")
        url = f"http://127.0.0.1:{self._upstream_port}{request.raw_path}"
        headers = {k: v for k, v in request.headers.items() if k.lower() not in HOP_BY_HOP | {"host"}}
        headers["Accept-Encoding"] = "identity"  # long lists come compressed otherwise, and what says so is hop by hop
        is_watch = "watch" in request.query
        try:
            body = await request.read() or None  # an empty body would get a content type that the API server refuses
        except ConnectionError:
            raise web.HTTPBadRequest(text="the client is gone") from None  # killed while it wrote
        async with self._session.request(request.method, url, headers=headers, data=body) as upstream:
            kept = {k: v for k, v in upstream.headers.items() if k.lower() not in HOP_BY_HOP}
            response = web.StreamResponse(status=upstream.status, headers=kept)
            transport = request.transport
            if is_watch and transport is not None:
                self._watches.add(transport)
            try:
                await response.prepare(request)
                async for chunk in upstream.content.iter_any():
                    await response.write(chunk)
                await response.write_eof()
            except ConnectionError:
                pass  # the operator hung up, or the watch was cut
            finally:
                if transport is not None:
                    self._watches.discard(transport)
            return response
