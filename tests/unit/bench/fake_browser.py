"""A browser for tests: answers on the DevTools pipe as Chromium does. Its first argument says what the pages do."""

from __future__ import annotations

import json
import os
import sys

PICTURE = "iVBORw0KGgo="
FINE = {"width_px": 390, "window_px": 390, "widest": [], "faint": [], "colors": []}
WIDE = FINE | {
    "width_px": 512,
    "widest": ["table.plan"],
    "faint": [{"text": "gray", "where": "td.note", "contrast": 1.24}],
    "colors": ["default", "slate"],
}


def events(behavior: str, url: str) -> list[tuple[str, dict]]:
    if behavior == "dies":
        sys.exit(1)
    found = [("Network.requestWillBeSent", {"requestId": "1", "request": {"url": url}})]
    if behavior == "wrong":
        found += [
            ("Network.requestWillBeSent", {"requestId": "2", "request": {"url": "file:///missing.js"}}),
            ("Network.loadingFailed", {"requestId": "2", "errorText": "net::ERR_FILE_NOT_FOUND"}),
            ("Network.requestWillBeSent", {"requestId": "3", "request": {"url": "https://cdn.example/a.css"}}),
            ("Log.entryAdded", {"entry": {"level": "error", "source": "network", "text": "the same again"}}),
            ("Runtime.consoleAPICalled", {"type": "error", "args": [{"value": "no data"}, {"value": 3}]}),
            ("Runtime.consoleAPICalled", {"type": "log", "args": [{"value": "fine"}]}),
            ("Runtime.exceptionThrown", {"exceptionDetails": {"text": "Uncaught", "exception": {"description": "TypeError: x\n at y"}}}),
        ]
    return [*found, ("Page.loadEventFired", {})]


def answer(behavior: str, message: dict) -> dict:
    results = {
        "Target.createTarget": {"targetId": "tab"},
        "Target.attachToTarget": {"sessionId": "session"},
        "Browser.getVersion": {"product": "HeadlessChrome/1.2"},
        "Page.captureScreenshot": {"data": PICTURE},
        "Runtime.evaluate": {"result": {"value": WIDE if behavior == "wrong" else FINE}},
    }
    if behavior == "refuses" and message["method"] == "Page.navigate":
        return {"error": {"message": "Cannot navigate"}}
    return {"result": results.get(message["method"], {})}


def main() -> None:
    behavior, buffer = sys.argv[1], b""
    while read := os.read(3, 1 << 16):
        *whole, buffer = (buffer + read).split(b"\0")
        for message in map(json.loads, whole):
            if behavior == "silent" and message["method"] == "Browser.getVersion":
                continue
            sent = [{"id": message["id"], **answer(behavior, message)}]
            if message["method"] == "Page.navigate":
                sent += [{"method": name, "params": about} for name, about in events(behavior, message["params"]["url"])]
            os.write(4, b"".join(json.dumps(one).encode() + b"\0" for one in sent))


if __name__ == "__main__":
    main()
