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
import socket
import struct
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rljob_runtime.errors import RewardSetupError
from rljob_runtime.rewards.code_runner import CodeRunner
from rljob_runtime.rewards.config import Isolation, RewardConfig
from rljob_runtime.rewards.functions import extract, load, to_scores
from rljob_runtime.rewards.judging.words import load_reader
from rljob_runtime.sandbox import Limits
from rljob_runtime.sandbox.child import RefusedError, bound_log, confined, main, say_ready
from rljob_runtime.sandbox.faults import one_line
from rljob_runtime.sandbox.frames import read_frame, send_frame

MAX_LOG_BYTES = 8 << 20
"""Of what reward functions print."""

NONCE_BYTES = 16
RESULT = struct.Struct(f"<{NONCE_BYTES}sIIBdd")
"""Nonce of the batch, sample position in it, reward position, 1 for success, score, elapsed seconds; then JSON: extra numbers or error."""

WireItem = tuple[tuple[str, str, str, Mapping[str, object]], tuple[int, ...], Mapping[int, str]]
"""((prompt text, response text, answer, metadata), positions of the rewards to compute, what judges said by position)."""
_Score = Callable[["WireItem"], object]
"""What a reward gives: a number or a mapping with ``score``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """The first message."""

    configs: tuple[RewardConfig, ...]
    folder: str | None
    memory_bytes: int
    disk_bytes: int
    isolation: Isolation


@dataclass(slots=True)
class _Reply:
    """Where the results of a batch go."""

    connection: socket.socket
    nonce: bytes
    position: int = 0
    """Of the sample in work."""

    def send(self, number: int, *, ok: bool, score: float, elapsed_s: float, rest: str | Mapping[str, float]) -> None:
        head = RESULT.pack(self.nonce, self.position, number, ok, score, elapsed_s)
        send_frame(self.connection, head + (json.dumps(rest).encode() if rest else b""))


def _serve(connection: socket.socket, setup: Setup) -> int:
    """Serve until the parent closes the socket; returns the exit status.

    Raises:
        RefusedError: a reward function is of no use.
    """
    isolation = setup.isolation
    limits = Limits(
        job_folder=setup.folder,
        read_paths=isolation.read_paths,
        write_paths=(os.getcwd(),),
        network=isolation.network,
        processes=isolation.processes or isolation.runs_code,
        memory_bytes=setup.memory_bytes,
    )
    # Where code runs, this process stays single-threaded to fork; it looks at the connection while it waits.
    active = confined(connection, limits, watches=not isolation.runs_code)
    runner = CodeRunner(connection.fileno()) if isolation.runs_code else None
    try:
        functions = [_scored(number, config, setup.folder, runner) for number, config in enumerate(setup.configs)]
    except RewardSetupError as error:
        raise RefusedError(str(error)) from error
    say_ready(connection, active)
    while (frame := read_frame(connection)) is not None:
        batch: list[WireItem]
        nonce, batch = pickle.loads(frame)
        reply = _Reply(connection, nonce)
        for reply.position, item in enumerate(batch):
            bound_log(MAX_LOG_BYTES)  # a file that is as large as confinement allows would fail every print
            _score_item(reply, item, setup.configs, functions)
    return 0


def _scored(number: int, config: RewardConfig, folder: str | None, runner: CodeRunner | None) -> _Score:
    """The reward at a position, with all it needs loaded."""
    if config.judge is not None:
        read = load_reader(config, folder)

        def from_judgement(item: WireItem) -> object:
            (prompt, response, answer, metadata), _, said = item
            return read(said[number], prompt, response, answer, metadata)

        return from_judgement
    function = load(config, folder, runner)

    def from_response(item: WireItem) -> object:
        prompt, response, answer, metadata = item[0]
        part = extract(response, config)
        return 0.0 if part is None else function(prompt, part, answer, metadata)

    return from_response


def _score_item(reply: _Reply, item: WireItem, configs: tuple[RewardConfig, ...], functions: list[_Score]) -> None:
    for number in item[1]:
        config = configs[number]
        started = time.perf_counter()
        try:
            score, extra = to_scores(functions[number](item))
        except BaseException as error:  # noqa: BLE001 - process border: whatever user code raises, sys.exit too, fails this sample only
            elapsed_s = time.perf_counter() - started
            reply.send(number, ok=False, score=0.0, elapsed_s=elapsed_s, rest=one_line(error, os.path.dirname(__file__)))
            if config.on_error is None:
                return
            continue
        elapsed_s = time.perf_counter() - started
        reply.send(number, ok=True, score=score, elapsed_s=elapsed_s, rest=extra)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], _serve))
