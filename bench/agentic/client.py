"""Clients of the endpoint: ``python -m bench.agentic.client URL KEYS CALLS MAX_TOKENS``, so many calls in each episode.

KEYS are those of each client, separated by commas, clients by colons; a client has one episode after the other. Prints the seconds
of every call as JSON, but for the first one of each client.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import aiohttp

MESSAGES = [{"role": "user", "content": "What is 3 + 4? " * 8}]


async def _calls(http: aiohttp.ClientSession, url: str, keys: list[str], calls: int, max_tokens: int) -> list[float]:
    taken = []
    body = {"model": "policy", "messages": MESSAGES, "max_tokens": max_tokens}
    for key in [keys[0], *(key for key in keys for _ in range(calls))]:
        started = time.perf_counter()
        async with http.post(f"{url}/chat/completions", json=body, headers={"Authorization": f"Bearer {key}"}) as response:
            response.raise_for_status()
            await response.json()
        taken.append(time.perf_counter() - started)
    return taken[1:]


async def _main(url: str, clients: list[str], calls: int, max_tokens: int) -> list[float]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        return [
            s for taken in await asyncio.gather(*(_calls(http, url, keys.split(","), calls, max_tokens) for keys in clients)) for s in taken
        ]


if __name__ == "__main__":
    print(json.dumps(asyncio.run(_main(sys.argv[1], sys.argv[2].split(":"), int(sys.argv[3]), int(sys.argv[4])))))
