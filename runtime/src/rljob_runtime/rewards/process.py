"""One scoring process as its parent sees it: started, spoken to over a socket, ended with all it started."""

from __future__ import annotations

import json
import logging
import math
import os
import pickle
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from rljob_runtime.rewards.child import LENGTH, RESULT, Setup

_log = logging.getLogger(__name__)

_KILL_WAIT_S = 10.0
_SEND_TIMEOUT_S = 30.0
_MAX_FRAME_BYTES = 16 << 20
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
_PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "PYTHONHASHSEED", "OMP_NUM_THREADS")


class BrokenProtocolError(Exception):
    """What came from the process is no result: code in it wrote to the socket."""


class Result(NamedTuple):
    """One evaluation, as the process reports it; a tuple, because a hundred thousand a second are made."""

    nonce: bytes
    position: int
    reward: int
    score: float | None
    extra: Mapping[str, float]
    error: str | None
    elapsed_s: float


class ScoringProcess:
    """One child process, its socket and its folder."""

    def __init__(self, setup: Setup, log_file: Path, startup_timeout_s: float) -> None:
        """Start it; it says READY later."""
        self.socket, theirs = socket.socketpair()
        self._folder = tempfile.mkdtemp(prefix="rljob-reward-")
        try:
            with log_file.open("ab") as log:
                # A session of its own, which nothing in it can leave: killing the group takes along whatever it started.
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-m", "rljob_runtime.rewards.child", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=(theirs.fileno(),),
                    env=_environment(self._folder),
                    cwd=self._folder,
                    start_new_session=True,
                )
        except OSError:
            self.socket.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        finally:
            theirs.close()
        self.ready = False
        self.used = False
        """Whether it has scored anything: only a fresh one takes a sample that ran past a limit elsewhere."""
        self.deadline = time.monotonic() + startup_timeout_s
        self._buffer = bytearray()
        self.send(pickle.dumps(setup))

    def send(self, body: bytes) -> bool:
        """Send one frame; returns False when the process is gone or does not read within the send limit."""
        self.socket.settimeout(_SEND_TIMEOUT_S)
        try:
            self.socket.sendall(LENGTH.pack(len(body)) + body)
        except (BrokenPipeError, ConnectionResetError, TimeoutError):
            return False
        finally:
            self.socket.setblocking(False)
        return True

    def receive(self) -> tuple[list[bytes], bool]:
        """Return the frames that have arrived, without waiting, and whether the process has closed its end.

        Raises:
            BrokenProtocolError: a frame is announced that no result can be.
        """
        closed = False
        try:
            data = self.socket.recv(1 << 16)
            closed = not data
            self._buffer += data
        except (BlockingIOError, InterruptedError):
            pass
        except ConnectionResetError:
            closed = True
        frames, start = [], 0
        while len(self._buffer) - start >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self._buffer, start)
            if size > _MAX_FRAME_BYTES:
                raise BrokenProtocolError(f"it announced a result of {size} bytes")
            if len(self._buffer) - start - LENGTH.size < size:
                break
            frames.append(bytes(self._buffer[start + LENGTH.size : start + LENGTH.size + size]))
            start += LENGTH.size + size
        del self._buffer[:start]
        return frames, closed

    def end(self, *, grace_s: float = 0.0) -> str:
        """Make sure the process and all it started are gone; returns how the process itself ended.

        ``grace_s`` leaves a process that is already ending the time to do so, so that its own exit status is seen.
        """
        self.socket.close()
        if grace_s > 0:
            try:
                self.process.wait(grace_s)
            except subprocess.TimeoutExpired:
                _log.debug("scoring process %d still runs %.1f s after it closed its connection", self.process.pid, grace_s)
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            _log.debug("scoring process %d had ended by itself", self.process.pid)
        code = self.process.wait(_KILL_WAIT_S)
        shutil.rmtree(self._folder, ignore_errors=True)
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"


def parse_result(frame: bytes) -> Result:
    """Read a result frame.

    Raises:
        BrokenProtocolError: it is none.
    """
    try:
        nonce, position, reward, ok, score, elapsed_s = RESULT.unpack_from(frame)
        rest = json.loads(frame[RESULT.size :]) if len(frame) > RESULT.size else {}
        extra = {str(name): float(value) for name, value in rest.items()} if ok else {}
    except (struct.error, ValueError, TypeError, AttributeError) as error:
        raise BrokenProtocolError("it wrote something that is no result") from error
    if not math.isfinite(score) or not math.isfinite(elapsed_s):
        raise BrokenProtocolError("it wrote a result that is no number")
    return Result(
        nonce=nonce,
        position=position,
        reward=reward,
        score=score if ok else None,
        extra=extra,
        error=None if ok else str(rest),
        elapsed_s=elapsed_s,
    )


def _environment(folder: str) -> dict[str, str]:
    """The process's environment: nothing of the parent's but where programs and packages are, so that no token is in it."""
    env = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    env["PYTHONPATH"] = os.pathsep.join(p for p in (_PACKAGE_ROOT, os.environ.get("PYTHONPATH", "")) if p)
    env["PYTHONUNBUFFERED"] = "1"
    env.setdefault("OMP_NUM_THREADS", "1")
    return env | {"HOME": folder, "TMPDIR": folder}
