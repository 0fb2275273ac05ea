"""A fake of the Hugging Face Hub on loopback: models that are folders, over the part of its protocol that the client uses to download.

Strict: whatever the real one would not answer is a 404, and every request is kept. Repositories: whole, gated (files need the token
:data:`TOKEN`, the listing does not), or missing (401 without a word whether it is private, as the real one says).
"""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

TOKEN = "hf_right"


@dataclass(frozen=True)
class Request:
    """One request that was answered."""

    method: str
    path: str
    range: str | None
    status: int
    sent_bytes: int


@dataclass
class Repository:
    """A model on the fake: one commit, which ``main`` and ``revisions`` name."""

    folder: Path
    gated: bool = False
    revisions: tuple[str, ...] = ("main",)

    @property
    def files(self) -> dict[str, Path]:
        return {str(path.relative_to(self.folder)): path for path in sorted(self.folder.rglob("*")) if path.is_file()}

    @property
    def commit(self) -> str:
        return hashlib.sha1("".join(f"{name}{path.stat().st_size}" for name, path in self.files.items()).encode()).hexdigest()

    def etag(self, name: str) -> str:
        """Of the content, by the hash that the real one uses for its kind."""
        data = self.files[name].read_bytes()
        return hashlib.sha256(data).hexdigest() if self.is_large(name) else hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()

    @staticmethod
    def is_large(name: str) -> bool:
        """Whether it lies in large-file storage, to which the Hub redirects."""
        return name.endswith((".safetensors", ".bin"))


@dataclass
class FakeHub:
    """What is on it, and what it was asked."""

    repositories: dict[str, Repository] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    break_after_bytes: dict[str, int] = field(default_factory=dict)
    """By content hash: the first download of it breaks after so many bytes, once for each download that starts at 0."""
    down: bool = False
    """Every answer is 503."""
    url: str = ""

    @property
    def cdn_url(self) -> str:
        """The same server by another name: the client must not send its token there."""
        return self.url.replace("127.0.0.1", "localhost")

    def add(self, name: str, folder: Path, **settings: object) -> Repository:
        self.repositories[name] = Repository(folder, **settings)  # type: ignore[arg-type]
        return self.repositories[name]

    def downloads(self, suffix: str = "") -> list[Request]:
        """Requests that sent content of large files, or of files whose name ends so."""
        return [r for r in self.requests if r.method == "GET" and (r.path.endswith(suffix) if suffix else r.path.startswith("/cdn/"))]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        self._route()

    def do_HEAD(self) -> None:
        self._route()

    def _route(self) -> None:
        parts = [unquote(part) for part in urlsplit(self.path).path.strip("/").split("/")]
        if self.hub.down:
            self._answer(503)
        elif parts[:2] == ["api", "models"] and len(parts) in (4, 6) and self.command == "GET":
            self._info("/".join(parts[2:4]), parts[5] if parts[4:5] == ["revision"] else "main")
        elif len(parts) >= 5 and parts[2] == "resolve":
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        elif parts[0] == "cdn" and len(parts) == 2 and self.command == "GET":
            self._content(parts[1])
        else:
            self._answer(404)

    def _repository(self, name: str, revision: str) -> Repository | None:
        repository = self.hub.repositories.get(name)
        if repository is None:
            self._answer(401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
            return None
        if revision not in (*repository.revisions, repository.commit):
            self._answer(404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": f"Invalid rev id: {revision}"})
            return None
        return repository

    def _info(self, name: str, revision: str) -> None:
        repository = self._repository(name, revision)
        if repository is None:
            return
        sized = "blobs" in parse_qs(urlsplit(self.path).query)
        siblings = [{"rfilename": n, **({"size": p.stat().st_size} if sized else {})} for n, p in repository.files.items()]
        body = {"_id": "0", "id": name, "sha": repository.commit, "siblings": siblings, "gated": "auto" if repository.gated else False}
        self._answer(200, {"Content-Type": "application/json"}, json.dumps(body).encode())

    def _resolve(self, name: str, revision: str, file: str) -> None:
        repository = self._repository(name, revision)
        if repository is None:
            return
        authorization = self.headers.get("Authorization")
        if repository.gated and authorization != f"Bearer {TOKEN}":
            status = 401 if authorization is None else 403
            self._answer(status, {"X-Error-Code": "GatedRepo", "X-Error-Message": f"Access to model {name} is restricted."})
            return
        commit = {"X-Repo-Commit": repository.commit}
        path = repository.files.get(file)
        if path is None:
            self._answer(404, {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"} | commit)
            return
        etag, size = repository.etag(file), path.stat().st_size
        if repository.is_large(file):
            linked = {"X-Linked-Etag": f'"{etag}"', "X-Linked-Size": str(size), "Location": f"{self.hub.cdn_url}/cdn/{etag}"}
            self._answer(302, commit | linked)
        else:
            self._answer(200, commit | {"ETag": f'"{etag}"'}, path.read_bytes())

    def _content(self, etag: str) -> None:
        if self.headers.get("Authorization") is not None:
            self._answer(400)
            return
        found = [r.files[n] for r in self.hub.repositories.values() for n in r.files if r.is_large(n) and r.etag(n) == etag]
        if not found:
            self._answer(404)
            return
        data, asked = found[0].read_bytes(), self.headers.get("Range")
        if asked is None:
            self._answer(200, {"ETag": f'"{etag}"', "Accept-Ranges": "bytes"}, data, stop_after=self.hub.break_after_bytes.pop(etag, None))
            return
        first = int(asked.removeprefix("bytes=").removesuffix("-"))
        assert first < len(data), f"{asked} of {len(data)} bytes"
        self._answer(206, {"ETag": f'"{etag}"', "Content-Range": f"bytes {first}-{len(data) - 1}/{len(data)}"}, data[first:])

    def _answer(self, status: int, headers: dict[str, str] | None = None, body: bytes = b"", stop_after: int | None = None) -> None:
        sent = body if stop_after is None else body[:stop_after]
        is_get = self.command == "GET"
        self.hub.requests.append(
            Request(self.command, urlsplit(self.path).path, self.headers.get("Range"), status, len(sent) if is_get else 0)
        )
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if is_get:
            self.wfile.write(sent)
        if stop_after is not None:
            self.close_connection = True


@contextmanager
def serving() -> Iterator[FakeHub]:
    """A fake Hub that answers until the block ends."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
