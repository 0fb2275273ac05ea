"""Notes when which object first showed something; fed by one watch."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from bench.operator.api import Api

Shows = Callable[[dict[str, Any]], str | None]
"""What an object shows, as a word, or None."""


class Watcher:
    """``async with``: watches a collection; :meth:`wait` until so many objects have shown a word."""

    def __init__(self, api: Api, collection: str, shows: Shows) -> None:
        self._api = api
        self._collection = collection
        self._shows = shows
        self.seen_s: dict[str, dict[str, float]] = {}
        """Word -> object name -> monotonic seconds of the first event that showed it."""
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Watcher:
        since = await self._api.version(self._collection)
        self._task = asyncio.create_task(self._follow(since))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def wait(self, word: str, count: int, timeout_s: float) -> dict[str, float]:
        """Name -> seconds once ``count`` objects have shown the word.

        Raises:
            TimeoutError: fewer within ``timeout_s``.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while len(self.seen_s.get(word, {})) < count:
                    self._changed.clear()
                    if self._task.done():
                        self._task.result()
                    await self._changed.wait()
        except TimeoutError:
            raise TimeoutError(
                f"{len(self.seen_s.get(word, {}))} of {count} objects of {self._collection} showed {word!r} within {timeout_s:.0f} s"
            ) from None
        return self.seen_s[word]

    async def _follow(self, since: str) -> None:
        while True:
            async for kind, item in self._api.watch(self._collection, since):
                if kind == "ERROR":
                    break
                if kind != "DELETED":
                    self._note(item)
            # The server ends the watch of a client that falls behind it; a list has what was missed, at most a little late.
            listed = await self._api.call("GET", self._collection)
            since = str(listed["metadata"]["resourceVersion"])
            for item in listed["items"]:
                self._note(item)

    def _note(self, item: dict[str, Any]) -> None:
        word = self._shows(item)
        if word is not None:
            self.seen_s.setdefault(word, {}).setdefault(item["metadata"]["name"], time.monotonic())
            self._changed.set()


def exists(item: dict[str, Any]) -> str:
    """Any object shows that it exists."""
    return "exists"


def summary(item: dict[str, Any]) -> str | None:
    """The reason of the Succeeded condition: what kubectl get shows as STATUS."""
    for condition in item.get("status", {}).get("conditions", []):
        if condition["type"] == "Succeeded":
            return str(condition["reason"])
    return None
