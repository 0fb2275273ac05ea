"""A process for foreign code as its parent sees it: started, spoken to over a socket, ended with all it started."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rljob_runtime.sandbox.disk import DiskWatch, Watched
from rljob_runtime.sandbox.frames import FAILED, LENGTH, READY

_log = logging.getLogger(__name__)
_DISK = DiskWatch()

_KILL_WAIT_S = 10.0
_SEND_TIMEOUT_S = 30.0
_MAX_FRAME_BYTES = 16 << 20
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
_PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "PYTHONHASHSEED", "OMP_NUM_THREADS")


class BrokenProtocolError(Exception):
    """What came from the process is no result: code in it wrote to the socket."""


class UselessProcessError(Exception):
    """The process says why it is of no use."""


class SandboxProcess:
    """One child process, its socket and its folder. The child confines itself before it runs anything foreign."""

    def __init__(self, module: str, setup: bytes, *, purpose: str, log_file: Path, startup_timeout_s: float, disk_bytes: int) -> None:
        """Start ``python -m module FD``; it reads ``setup`` as its first frame and says when it is ready.

        Args:
            module: its main program.
            setup: the first frame.
            purpose: a word for the name of its folder and for logs.
            log_file: receives what it prints.
            startup_timeout_s: ``deadline`` at first.
            disk_bytes: of all files in its folder; with more it is killed.
        """
        self.socket, theirs = socket.socketpair()
        self._purpose = purpose
        self._folder = tempfile.mkdtemp(prefix=f"rljob-{purpose}-")
        try:
            with log_file.open("ab") as log:
                # A session of its own, which nothing in it can leave: killing the group takes along whatever it started.
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-m", module, str(theirs.fileno())],
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
        self.sandbox = ""
        """What keeps it in, once it is ready."""
        self.startup_timeout_s = startup_timeout_s
        self.deadline = time.monotonic() + startup_timeout_s
        self._buffer = bytearray()
        self._filled = ""
        """Why it was killed, where it wrote too much."""
        self._disk_bytes = disk_bytes
        _DISK.add(Watched(pid=self.process.pid, folder=Path(self._folder), limit_bytes=disk_bytes, too_much=self._too_much))
        self.send(setup)

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

        The first one makes the process ``ready`` and is not among them.

        Raises:
            BrokenProtocolError: a frame is announced that no result can be, or the first one is no beginning.
            UselessProcessError: the first one says why.
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
        if frames and not self.ready:
            self._begin(frames.pop(0))
        return frames, closed

    def _begin(self, frame: bytes) -> None:
        text = frame[1:].decode(errors="replace")
        if frame[:1] == FAILED:
            raise UselessProcessError(text)
        if frame[:1] != READY:
            raise BrokenProtocolError("it wrote something before it was ready")
        self.ready, self.sandbox = True, text

    def end(self, *, grace_s: float = 0.0) -> str:
        """Make sure the process and all it started are gone; returns how the process itself ended.

        ``grace_s`` leaves a process that is already ending the time to do so, so that its own exit status is seen.
        """
        _DISK.forget(self.process.pid)
        self.socket.close()
        if grace_s > 0:
            try:
                self.process.wait(grace_s)
            except subprocess.TimeoutExpired:
                _log.debug("%s process %d still runs %.1f s after it closed its connection", self._purpose, self.process.pid, grace_s)
        self._kill()
        code = self.process.wait(_KILL_WAIT_S)
        shutil.rmtree(self._folder, ignore_errors=True)
        return self._filled or (f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}")

    def _too_much(self, used_bytes: int) -> None:
        self._filled = f"killed: its files took {used_bytes} bytes of disk, more than the {self._disk_bytes} of diskBytes"
        _log.warning("%s process %d %s", self._purpose, self.process.pid, self._filled)
        self._kill()

    def _kill(self) -> None:
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            _log.debug("%s process %d had ended by itself", self._purpose, self.process.pid)


def _environment(folder: str) -> dict[str, str]:
    """The process's environment: nothing of the parent's but where programs and packages are, so that no token is in it."""
    env = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    env["PYTHONPATH"] = os.pathsep.join(p for p in (_PACKAGE_ROOT, os.environ.get("PYTHONPATH", "")) if p)
    env["PYTHONUNBUFFERED"] = "1"
    env.setdefault("OMP_NUM_THREADS", "1")
    return env | {"HOME": folder, "TMPDIR": folder}
