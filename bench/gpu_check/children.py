"""Processes of a check, with a deadline for all of them."""

from __future__ import annotations

import faulthandler
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.multiprocessing as mp

LOOK_S = 0.5
END_S = 10.0
PRELOADED = ["bench.gpu_check.peers"]
"""What the fork server imports: torch."""


class Stage(str):
    """What a process does from now on; put into ``results`` between its answers."""

    __slots__ = ()


def context() -> Any:
    """A fork server that has imported torch, and has not touched a GPU."""
    made = mp.get_context("forkserver")
    made.set_forkserver_preload(PRELOADED)
    return made


def answer(
    ctx: Any,
    jobs: Sequence[tuple[Callable[..., None], tuple[Any, ...]]],
    results: Any,
    *,
    timeout_s: float,
    what: str,
    begin: Callable[[str], None],
) -> Any:
    """Start a process for each job, and return what one of them puts into ``results``.

    Raises:
        RuntimeError, TimeoutError: as of :func:`messages`.
    """
    (found,) = messages(ctx, jobs, results, count=1, timeout_s=timeout_s, what=what, begin=begin)
    return found


def messages(
    ctx: Any,
    jobs: Sequence[tuple[Callable[..., None], tuple[Any, ...]]],
    results: Any,
    *,
    count: int,
    timeout_s: float,
    what: str,
    begin: Callable[[str], None],
) -> Iterator[Any]:
    """Start a process for each job, and yield ``count`` messages that they put into ``results``; all are ended with the iterator.

    Args:
        ctx: of multiprocessing.
        jobs: function and arguments of each process.
        results: a queue of ``ctx``.
        count: messages that are no :class:`Stage`.
        timeout_s: for each message, a stage among them.
        what: name of the check, for errors.
        begin: called with each stage.

    Raises:
        RuntimeError: one of them ended before all messages had come.
        TimeoutError: one did not come within ``timeout_s``.
    """
    processes = [ctx.Process(target=_guarded, args=(target, *arguments), daemon=False) for target, arguments in jobs]
    try:
        for process in processes:
            process.start()
        for _ in range(count):
            yield _next(processes, results, timeout_s, what, begin)
        for process in processes:
            process.join(END_S)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join(END_S)


@contextmanager
def served(ctx: Any, target: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> Iterator[list[Any]]:
    """Processes that each answer what comes through a pipe until its other end is closed, which are ended with the block.

    Args:
        ctx: of multiprocessing.
        target: called in each process with its arguments and its end of the pipe.
        arguments: of each process.

    Yields:
        This process's ends of the pipes.
    """
    pipes = [ctx.Pipe() for _ in arguments]
    processes = [ctx.Process(target=_guarded, args=(target, *own, theirs)) for own, (_, theirs) in zip(arguments, pipes, strict=True)]
    try:
        for process, (_, theirs) in zip(processes, pipes, strict=True):
            process.start()
            theirs.close()  # so that the end of the process is the end of what comes from it
        yield [ours for ours, _ in pipes]
    finally:
        for ours, _ in pipes:
            ours.close()
        for process in processes:
            if process.pid is not None:
                process.join(END_S)
            if process.is_alive():
                process.kill()
                process.join(END_S)


def _guarded(target: Callable[..., None], *arguments: Any) -> None:
    """In a child: say where it was if a library ends it by a signal."""
    faulthandler.enable()
    target(*arguments)


def _next(processes: Sequence[Any], results: Any, timeout_s: float, what: str, begin: Callable[[str], None]) -> Any:
    stage = ""
    while isinstance(found := _wait(processes, results, timeout_s, f"{what}: {stage}" if stage else what), Stage):
        stage = str(found)
        begin(stage)
    return found


def _wait(processes: Sequence[Any], results: Any, timeout_s: float, what: str) -> Any:
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            return results.get(timeout=LOOK_S)
        except queue.Empty:
            failed = [process.exitcode for process in processes if process.exitcode]
            if failed:
                raise RuntimeError(f"{what}: a process ended with exit code {failed[0]}; its error stands above") from None
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{what}: no answer within {timeout_s:.0f} s; the processes were ended") from None
