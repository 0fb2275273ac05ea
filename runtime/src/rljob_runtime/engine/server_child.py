"""``python -m rljob_runtime.engine.server_child COMMAND...``: runs a server until standard input closes, then ends all its processes.

A killed worker closes its end of the pipe, whatever else happens, so that no server keeps the devices of a worker that is gone.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading

_GRACE_S = 10.0
_PR_SET_PDEATHSIG = 1


def main(command: list[str]) -> int:
    """Exit status of the server, or 0 where it was ended."""
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_end_with_parent)
    ended = threading.Event()

    def end_with_input() -> None:
        while os.read(sys.stdin.fileno(), 1024):  # a buffered read would hold a lock that the interpreter's end waits for
            pass
        ended.set()
        _signal(server.pid, signal.SIGTERM)
        try:
            server.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            _signal(server.pid, signal.SIGKILL)

    threading.Thread(target=end_with_input, daemon=True).start()
    status = server.wait()
    _signal(server.pid, signal.SIGKILL)  # what outlived it: processes of a tensor-parallel engine
    return 0 if ended.is_set() else status


def _end_with_parent() -> None:
    """In the server's process: killed when this program is, as Ray does with the children of a worker that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _signal(group: int, number: int) -> None:
    """To all processes of the server's session."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
