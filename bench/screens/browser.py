"""A headless Chromium, driven over its DevTools protocol through a pipe: what a page writes to the console, asks for, and looks like."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ANSWER_TIMEOUT_S = 60.0
"""For an answer of the browser, and for a page until it is loaded."""
SETTLE_MS = 500
"""After loading: scripts lay out charts and take down what they replace."""
OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--allow-file-access-from-files", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-quic", "--remote-debugging-pipe",
)  # fmt: skip
COLORS_MS = 10_000
"""After loading, at most: until the page has the colors of the view."""
_FORGET = "try { localStorage.clear() } catch {}"
"""Before a page's own scripts: the site's theme keeps the colors of the view before, and would use them again."""
_OFFLINE = ("file:", "data:", "blob:", "about:", "chrome:")
_LOOK = (Path(__file__).parent / "look.js").read_text(encoding="utf-8")


class BrowserError(RuntimeError):
    """Raised when the browser ends, refuses a command or does not answer in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """How a page is looked at."""

    width_px: int
    height_px: int
    is_dark: bool

    def __str__(self) -> str:
        return f"{self.width_px}-{'dark' if self.is_dark else 'light'}"


class Browser:
    """One browser with one tab; a context manager that ends it."""

    def __init__(self, executable: Sequence[str], profile: Path) -> None:
        commands, answers = os.pipe(), os.pipe()
        # The browser reads commands from descriptor 3 and answers on 4; higher numbers first, so that the shell overwrites neither.
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (commands[0], answers[1])]
        command = [*executable, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs[0]} 4>&{theirs[1]}', "bash", *command],
            pass_fds=theirs,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (commands[0], answers[1], *theirs):
            os.close(end)
        self._to, self._from = commands[1], answers[0]
        self._buffer = b""
        self._last_id = 0
        self._events: list[dict[str, Any]] = []
        self._session: str | None = None

    def __enter__(self) -> Self:
        try:
            tab = self.send("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.send("Target.attachToTarget", targetId=tab, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                self.send(f"{domain}.enable")
            self.send("Page.addScriptToEvaluateOnNewDocument", source=_FORGET)
        except BrowserError:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.terminate()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for end in (self._to, self._from):
            os.close(end)

    @property
    def version(self) -> str:
        """Name and version."""
        return str(self.send("Browser.getVersion")["product"]).replace("HeadlessChrome/", "Chromium ").replace("Chrome/", "Chromium ")

    def look(self, page: Path, picture: Path, view: View) -> list[str]:
        """Open a page, take a picture, and return what is wrong with it.

        Raises:
            BrowserError: the page does not load.
        """
        size = {"width": view.width_px, "height": view.height_px, "deviceScaleFactor": 1, "mobile": False}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if view.is_dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self._events.clear()
        self.send("Page.navigate", url=page.resolve().as_uri())
        self._wait_for(lambda: any(event["method"] == "Page.loadEventFired" for event in self._events), f"{page.name} to load")
        found = self.evaluate(_LOOK.replace("SETTLE_MS", str(SETTLE_MS)).replace("COLORS_MS", str(COLORS_MS)))
        picture.write_bytes(base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"]))
        return [*reported(self._events), *seen(found)]

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page; a promise is waited for."""
        answer = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise BrowserError(f"a script of the measurement failed: {_exception(answer['exceptionDetails'])}")
        return answer["result"].get("value")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Carry out a command and return its result.

        Raises:
            BrowserError: it is refused or not answered.
        """
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": parameters, **({"sessionId": self._session} if self._session else {})}
        try:
            os.write(self._to, json.dumps(message).encode() + b"\0")
        except BrokenPipeError:
            raise BrowserError(f"the browser ended before {method}; is it a Chromium that starts as this user?") from None
        answers: list[dict[str, Any]] = []
        self._wait_for(lambda: bool(answers), f"an answer to {method}", answers)
        if "error" in answers[0]:
            raise BrowserError(f"{method}: {answers[0]['error'].get('message')}")
        return dict(answers[0].get("result", {}))

    def _wait_for(self, is_done: Callable[[], bool], what: str, answers: list[dict[str, Any]] | None = None) -> None:
        deadline_s = time.monotonic() + ANSWER_TIMEOUT_S
        while not is_done():
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline_s - time.monotonic()))
            if not ready or time.monotonic() > deadline_s:  # events of a busy page alone do not prolong it
                raise BrowserError(f"waited {ANSWER_TIMEOUT_S:.0f} s for {what}")
            read = os.read(self._from, 1 << 20)
            if not read:
                raise BrowserError(f"the browser ended while waiting for {what}; is it a Chromium that starts as this user?")
            *whole, self._buffer = (self._buffer + read).split(b"\0")
            for message in map(json.loads, whole):
                if "id" not in message:
                    self._events.append(message)
                elif answers is not None and message["id"] == self._last_id:
                    answers.append(message)


def reported(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """Errors on the console, uncaught exceptions, failed requests, and requests that leave this machine, among the browser's events."""
    found, urls = [], dict[str, str]()
    for event in events:
        method, about = event["method"], event["params"]
        if method == "Network.requestWillBeSent":
            urls[about["requestId"]] = about["request"]["url"]
            if not about["request"]["url"].startswith(_OFFLINE):
                found.append(f"asks another host: {about['request']['url']}")
        elif method == "Network.loadingFailed" and not about.get("canceled"):
            found.append(f"request failed: {urls.get(about['requestId'], '?')}: {about['errorText']}")
        elif method == "Network.responseReceived" and about["response"]["status"] >= 400:
            found.append(f"request failed: {about['response']['url']}: status {about['response']['status']}")
        elif method == "Runtime.consoleAPICalled" and about["type"] in ("error", "assert"):
            found.append(f"console: {' '.join(str(one.get('value', one.get('description'))) for one in about['args'])}")
        elif method == "Runtime.exceptionThrown":
            found.append(f"exception: {_exception(about['exceptionDetails'])}")
        elif method == "Log.entryAdded" and about["entry"]["level"] == "error" and about["entry"]["source"] != "network":
            found.append(f"console: {about['entry']['text']}")
    return list(dict.fromkeys(found))


def seen(found: Mapping[str, Any]) -> list[str]:
    """What the script on the page measured, as problems."""
    problems = []
    if found["width_px"] > found["window_px"]:
        problems.append(f"is {found['width_px']} pixels wide in a window of {found['window_px']}: {', '.join(found['widest'])}")
    if found["colors"]:
        problems.append("has the colors {} of the site instead of {}".format(*found["colors"]))
    problems += [f"contrast {faint['contrast']:.1f} of {faint['text']!r} ({faint['where']})" for faint in found["faint"]]
    return problems


def _exception(details: Mapping[str, Any]) -> str:
    return str(details.get("exception", {}).get("description") or details["text"]).partition("\n")[0]
