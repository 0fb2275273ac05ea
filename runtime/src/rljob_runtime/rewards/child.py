"""The scoring process: ``python -m rljob_runtime.rewards.child FD``, started by ``ScoringProcess`` only.

Protocol over the inherited socket ``FD``; every frame is a 4-byte little-endian length and a body:

* parent to child: first one pickled ``Setup``, then batches, each a pickled pair of a nonce and a list of ``WireItem``.
* child to parent: first ``READY`` or ``FAILED`` plus text, then for each sample and reward one result frame, streamed as
  soon as it is known, so that the parent's clock sees each evaluation and a killed child loses only the one in work. Each
  carries the nonce of its batch: without it nothing that code writes to the socket is a result, and no result of an
  earlier batch is one of a later batch. It does not stop code that searches the interpreter for the nonce, as code in
  the process of its reward can; a model's code runs elsewhere (``CodeRunner``).

Results are packed numbers and JSON, not pickles: nothing a user's function prints or returns is ever unpickled by the parent.
Standard output and error are the pool's log. The process ends when the parent's end of the socket closes, even while a
user's function hangs.
"""

from __future__ import annotations

import json
import os
import pickle
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
from rljob_runtime.rewards.code_runner import CodeRunner, end_group, read_exactly
from rljob_runtime.rewards.config import Isolation, RewardConfig
from rljob_runtime.rewards.functions import RewardFunction, extract, load, to_scores
from rljob_runtime.sandbox import Limits, confine

READY, FAILED = b"R", b"F"
LENGTH = struct.Struct("<I")
NONCE_BYTES = 16
RESULT = struct.Struct(f"<{NONCE_BYTES}sIIBdd")
"""Nonce of the batch, sample position in it, reward position, 1 for success, score, elapsed seconds; then JSON: extra numbers or error."""

WireItem = tuple[tuple[str, str, str, Mapping[str, object]], tuple[int, ...]]
"""((prompt text, response text, answer, metadata), positions of the rewards to compute)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The first message."""

    configs: tuple[RewardConfig, ...]
    folder: str | None
    memory_bytes: int
    isolation: Isolation


@dataclass(frozen=True, slots=True)
class _Reply:
    """Where the results of one sample go."""

    connection: socket.socket
    nonce: bytes
    position: int

    def send(self, number: int, *, ok: bool, score: float, elapsed_s: float, rest: str | Mapping[str, float]) -> None:
        head = RESULT.pack(self.nonce, self.position, number, ok, score, elapsed_s)
        _send(self.connection, head + (json.dumps(rest).encode() if rest else b""))


def main(argv: list[str]) -> int:
    """Serve until the parent closes the socket; returns the exit status."""
    connection = socket.socket(fileno=int(argv[0]))
    first = _read_frame(connection)
    if first is None:
        return 0
    setup: Setup = pickle.loads(first)
    isolation = setup.isolation
    # Before anything foreign is imported, and before there is a second thread, which would stay outside.
    try:
        active = confine(
            Limits(
                read_paths=(*([setup.folder] if setup.folder else ()), *isolation.read_paths),
                write_paths=(os.getcwd(),),
                network=isolation.network,
                processes=isolation.processes or isolation.runs_code,
                memory_bytes=setup.memory_bytes,
            )
        )
    except OSError as error:
        _send(connection, FAILED + f"rewards: this machine has no sandbox for them: {error}; seccomp filters are needed".encode())
        return 1
    # Where code runs, this process stays single-threaded to fork; it looks at the connection while it waits.
    runner = CodeRunner(connection.fileno()) if isolation.runs_code else None
    if runner is None:
        threading.Thread(target=_end_with_parent, args=(connection.fileno(),), daemon=True).start()
    try:
        functions = [load(config, setup.folder, runner) for config in setup.configs]
    except RewardSetupError as error:
        _send(connection, FAILED + str(error).encode())
        return 1
    _send(connection, READY + str(active).encode())
    while (frame := _read_frame(connection)) is not None:
        batch: list[WireItem]
        nonce, batch = pickle.loads(frame)
        for position, item in enumerate(batch):
            _score_item(_Reply(connection, nonce, position), item, setup.configs, functions)
    return 0


def _score_item(reply: _Reply, item: WireItem, configs: tuple[RewardConfig, ...], functions: list[RewardFunction]) -> None:
    (prompt, response, answer, metadata), todo = item
    for number in todo:
        config, function = configs[number], functions[number]
        started = time.perf_counter()
        try:
            part = extract(response, config)
            score, extra = (0.0, {}) if part is None else to_scores(function(prompt, part, answer, metadata))
        except BaseException as error:  # noqa: BLE001 - process border: whatever user code raises, sys.exit too, fails this sample only
            elapsed_s = time.perf_counter() - started
            reply.send(number, ok=False, score=0.0, elapsed_s=elapsed_s, rest=_one_line(error))
            if config.on_error is None:
                return
            continue
        elapsed_s = time.perf_counter() - started
        reply.send(number, ok=True, score=score, elapsed_s=elapsed_s, rest=extra)


def _one_line(error: BaseException) -> str:
    """Return type, text and the innermost place outside this package, in at most 300 characters."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    package = os.path.dirname(__file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(package)]
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    return text[: 300 - len(place)] + place


def _end_with_parent(fd: int) -> None:
    """Wait for the parent to close its end, then end this process, whatever else runs in it, and all it started."""
    poller = select.poll()
    poller.register(fd, 0)
    poller.poll()
    end_group()


def _read_frame(connection: socket.socket) -> bytes | None:
    """Return the next frame's body, None at the end of the stream."""
    head = read_exactly(connection.fileno(), LENGTH.size)
    return None if head is None else read_exactly(connection.fileno(), LENGTH.unpack(head)[0])


def _send(connection: socket.socket, body: bytes) -> None:
    connection.sendall(LENGTH.pack(len(body)) + body)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
