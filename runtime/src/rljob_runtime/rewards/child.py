"""The scoring process: ``python -m rljob_runtime.rewards.child FD``, started by ``RewardPool`` only.

Protocol over the inherited socket ``FD``; every frame is a 4-byte little-endian length and a body:

* parent to child: first one pickled ``Setup``, then batches, each a pickled list of ``WireSample``.
* child to parent: first ``READY`` or ``FAILED`` plus text, then for each sample and reward one result frame, streamed as
  soon as it is known, so that the parent's clock sees each evaluation and a killed child loses only the one in work.

Results are packed numbers and JSON, not pickles: nothing a user's function prints or returns is ever unpickled by the parent.
Standard output and error are the pool's log. The process ends when the parent's end of the socket closes, even while a
user's function hangs.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import select
import socket
import struct
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass

from rljob_runtime.errors import RewardSetupError
from rljob_runtime.rewards.config import RewardConfig
from rljob_runtime.rewards.functions import RewardFunction, extract, load, to_scores

READY, FAILED = b"R", b"F"
LENGTH = struct.Struct("<I")
RESULT = struct.Struct("<IIBdd")
"""Sample position in the batch, reward position, 1 for success, score, elapsed seconds; then JSON: extra numbers or the error."""

WireSample = tuple[str, str, str, Mapping[str, object]]
"""(prompt text, response text, answer, metadata)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The first message."""

    configs: tuple[RewardConfig, ...]
    folder: str | None
    memory_limit_bytes: int | None


def main(argv: list[str]) -> int:
    """Serve until the parent closes the socket; returns the exit status."""
    connection = socket.socket(fileno=int(argv[0]))
    threading.Thread(target=_end_with_parent, args=(connection.fileno(),), daemon=True).start()
    reader = connection.makefile("rb")
    first = _read_frame(reader)
    if first is None:
        return 0
    setup: Setup = pickle.loads(first)
    try:
        functions = [load(config, setup.folder) for config in setup.configs]
    except RewardSetupError as error:
        _send(connection, FAILED + str(error).encode())
        return 1
    if setup.memory_limit_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (setup.memory_limit_bytes, setup.memory_limit_bytes))
    _send(connection, READY)
    while (frame := _read_frame(reader)) is not None:
        batch: list[WireSample] = pickle.loads(frame)
        for position, sample in enumerate(batch):
            _score_sample(connection, position, sample, setup.configs, functions)
    return 0


def _score_sample(
    connection: socket.socket, position: int, sample: WireSample, configs: tuple[RewardConfig, ...], functions: list[RewardFunction]
) -> None:
    prompt, response, answer, metadata = sample
    for number, (config, function) in enumerate(zip(configs, functions, strict=True)):
        started = time.perf_counter()
        try:
            part = extract(response, config)
            score, extra = (0.0, {}) if part is None else to_scores(function(prompt, part, answer, metadata))
        except BaseException as error:  # noqa: BLE001 - process border: whatever user code raises, sys.exit too, fails this sample only
            elapsed_s = time.perf_counter() - started
            _send(connection, RESULT.pack(position, number, 0, 0.0, elapsed_s) + json.dumps(_one_line(error)).encode())
            return
        elapsed_s = time.perf_counter() - started
        _send(connection, RESULT.pack(position, number, 1, score, elapsed_s) + (json.dumps(extra).encode() if extra else b""))


def _one_line(error: BaseException) -> str:
    """Return type, text and the innermost place outside this package, in at most 300 characters."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    package = os.path.dirname(__file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(package)]
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return text[: 300 - len(place)] + place


def _end_with_parent(fd: int) -> None:
    """Wait for the parent to close its end, then end this process whatever else runs in it."""
    poller = select.poll()
    poller.register(fd, 0)
    poller.poll()
    os._exit(0)


def _read_frame(reader: io.BufferedReader) -> bytes | None:
    """Return the next frame's body, None at the end of the stream."""
    read = reader.read
    head = read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    body: bytes = read(size)
    return body if len(body) == size else None


def _send(connection: socket.socket, body: bytes) -> None:
    connection.sendall(LENGTH.pack(len(body)) + body)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
