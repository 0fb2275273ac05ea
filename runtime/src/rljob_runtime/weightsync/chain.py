"""A chain of the members of a group over plain sockets: each passes on what it receives while it receives it.

::

    sender ──> member 1 ──> member 2 ──> ... ──> last        one connection between neighbors, made when the group forms

Every member's link carries the bytes at most once in each direction, whatever the number of members, so a broadcast takes about
``bytes / link + (members - 1) * chunk / link`` seconds. Gloo's broadcast is a tree of whole messages, whose root sends
``ceil(log2(members))`` copies over its link.

A chunk (:data:`CHUNK_BYTES`, or what comes in :data:`STEP_S`) moves in one system call, without the interpreter lock: a process that
generates at the same time makes each return from a call wait for that lock.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import cast

from rljob_runtime.addresses import family_of
from rljob_runtime.cluster.ports import listening
from rljob_runtime.errors import DeadlineError, SyncBrokenError

CHUNK_BYTES = 4 << 20
"""Most that one call receives or sends."""
STEP_S = 0.01
"""Longest that one call waits for bytes: on a slow link a member passes on what came in this time, not whole chunks."""
LOOK_S = 0.05
"""How often a wait looks whether the meeting is over."""
KEEP_ALIVE_S = 60
"""How long a connection is idle until the system probes it: between two syncs lies a training step, after which a firewall may have
forgotten a connection without a word."""
KEEP_ALIVE_PROBES = {socket.TCP_KEEPIDLE: KEEP_ALIVE_S, socket.TCP_KEEPINTVL: 15, socket.TCP_KEEPCNT: 8}
LOST_S = 20.0
"""How long a member whose neighbor closed the connection waits for the reason: the driver hears of lost engines, and ends the meeting."""
HELLO_BYTES = hashlib.sha256().digest_size

Look = Callable[[int, str], None]
"""Called with the rank that is waited for, and what it is to do; raises WeightSyncError if the meeting is over."""


class Chain:
    """One member's place. One thread at a time."""

    def __init__(self, name: str, members: Sequence[str], rank: int, host: str) -> None:
        """Listen for the member before, unless this is the first.

        Args:
            name: of the group.
            members: what each is called, by rank.
            rank: of this one; 0 sends.
            host: address of this process for the others.

        Raises:
            ClusterError: the address cannot be listened on.
        """
        self._name, self._members, self._rank = name, members, rank
        self._listener = listening(host) if rank else None
        self._before: socket.socket | None = None
        self._behind: socket.socket | None = None
        self._closed = False

    @property
    def address(self) -> str:
        """Where the member before connects to; empty for the first."""
        if self._listener is None:
            return ""
        host, port = self._listener.getsockname()[:2]
        return f"{host} {port}"

    @property
    def next_rank(self) -> int | None:
        """Of the member behind; None for the last."""
        return self._rank + 1 if self._rank + 1 < len(self._members) else None

    def connect(self, address: str, deadline: float, look: Look) -> None:
        """Connect to the member behind, and wait for the one before; all members listen already.

        Args:
            address: of the member behind; empty for the last.
            deadline: ``time.monotonic`` value after which to give up.
            look: see :data:`Look`.

        Raises:
            DeadlineError: a neighbor did not connect in time.
            WeightSyncError: the meeting is over.
            OSError: the member behind cannot be reached.
        """
        if address:
            host, port = address.rsplit(" ", 1)
            wait = self._wait(self._rank + 1, deadline, look)
            wait.what = f"accept a connection at {host} port {port}"
            self._behind = connected((host, int(port)), wait)
            self._behind.sendall(_hello(self._name, self._rank + 1))
        if self._listener is not None:
            wait = self._wait(self._rank - 1, deadline, look)
            wait.what = "connect"
            self._before = _accepted(self._listener, _hello(self._name, self._rank), wait)
            self._listener.close()
        for end in (self._before, self._behind):
            if end is not None:
                _set_up(end)

    def pass_on(self, data: memoryview, deadline: float, look: Look) -> None:
        """Fill ``data`` from the member before, unless this is the first, and send it to the one behind, unless this is the last.

        Args:
            data: bytes; as many for every member.
            deadline: ``time.monotonic`` value after which to give up.
            look: see :data:`Look`.

        Raises:
            DeadlineError: the neighbor that is named did not take or give all bytes in time.
            WeightSyncError: the meeting is over.
            SyncBrokenError: a neighbor closed the connection without a reason.
        """
        if self._before is None and self._behind is None:
            return  # nobody is left to send to
        flow = _Flow(data, len(data) if self._before is None else 0)
        try:
            if self._before is None:
                self._send(flow, deadline, look)
            elif self._behind is None:
                self._receive(flow, deadline, look)
            else:
                self._relay(flow, deadline, look)
        except _ClosedError as error:
            wait = self._wait(error.rank, min(deadline, time.monotonic() + LOST_S), look)
            with contextlib.suppress(DeadlineError):
                while not self._closed:
                    time.sleep(LOOK_S)
                    wait.check()
            raise SyncBrokenError(str(error)) from error

    def abort(self) -> None:
        """Close all connections; a call under way in another thread ends with an error."""
        self._closed = True
        for end in (self._listener, self._before, self._behind):
            if end is not None:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()

    def _relay(self, flow: _Flow, deadline: float, look: Look) -> None:
        """Receive in a thread beside this one, which sends and raises what goes wrong in either."""
        receiving = threading.Thread(target=self._receive_beside, args=(flow, deadline), name="rljob-chain", daemon=True)
        receiving.start()
        try:
            self._send(flow, deadline, look)
        finally:
            flow.ended = True
            receiving.join()  # no call of it takes longer than STEP_S

    def _receive_beside(self, flow: _Flow, deadline: float) -> None:
        try:
            self._receive(flow, deadline, lambda rank, what: None)
        except (_ClosedError, DeadlineError) as error:
            flow.fail(error)

    def _send(self, flow: _Flow, deadline: float, look: Look) -> None:
        assert self._behind is not None
        total, sent = len(flow.data), 0
        wait = self._wait(self._rank + 1, deadline, look)
        while sent < total:
            here = flow.wait_for_more_than(sent)
            if here > sent:
                wait.rank, wait.what = self._rank + 1, f"take {total - sent} more of {total} bytes"
                sent += self._moved(self._behind.send, flow.data[sent : min(here, sent + CHUNK_BYTES)], wait)
            else:
                wait.rank, wait.what = self._rank - 1, f"send {total - here} more of {total} bytes"
            wait.check()

    def _receive(self, flow: _Flow, deadline: float, look: Look) -> None:
        total = len(flow.data)
        wait = self._wait(self._rank - 1, deadline, look)
        while flow.received < total and not flow.ended:
            wait.what = f"send {total - flow.received} more of {total} bytes"
            flow.add(self._moved(self._fill, flow.data[flow.received : flow.received + CHUNK_BYTES], wait))
            wait.check()

    def _fill(self, place: memoryview) -> int:
        assert self._before is not None
        count = self._before.recv_into(place, 0, socket.MSG_WAITALL)
        if not count:
            raise ConnectionResetError("end of the stream")
        return count

    def _moved(self, call: Callable[[memoryview], int], piece: memoryview, wait: _Wait) -> int:
        """How many bytes of a piece one call moved; none where no more could be in :data:`STEP_S`."""
        try:
            return call(piece)
        except BlockingIOError:
            return 0
        except OSError as error:
            said = f"{wait.name} closed its connection with {self._members[self._rank]}, and was to {wait.what}: {error}"
            raise _ClosedError(said, wait.rank) from error

    def _wait(self, rank: int, deadline: float, look: Look) -> _Wait:
        return _Wait(self._members, self._rank, rank, deadline, look)


class _ClosedError(Exception):
    """A neighbor closed the connection."""

    def __init__(self, said: str, rank: int) -> None:
        super().__init__(said)
        self.rank = rank


class _Flow:
    """Bytes of a broadcast that are here, for the two threads of a member between others."""

    def __init__(self, data: memoryview, received: int) -> None:
        self.data, self.received, self.ended = data, received, False
        self._fault: Exception | None = None
        self._changed = threading.Condition()

    def add(self, count: int) -> None:
        """More are here."""
        with self._changed:
            self.received += count
            self._changed.notify_all()

    def fail(self, fault: Exception) -> None:
        """No more come."""
        with self._changed:
            self._fault = fault
            self._changed.notify_all()

    def wait_for_more_than(self, sent: int) -> int:
        """How many are here, at once if there are more; raises what ended the receiving once all that came has been sent."""
        with self._changed:
            if self.received == sent and self._fault is None:
                self._changed.wait(LOOK_S)
            if self.received == sent and self._fault is not None:
                raise self._fault
            return self.received


class _Wait:
    """One wait: for which member, to do what, until when, and whether somebody ended the meeting."""

    def __init__(self, members: Sequence[str], own_rank: int, rank: int, deadline: float, look: Look) -> None:
        self.rank, self.what = rank, "come back"
        self._members, self._own_rank = members, own_rank
        self._deadline, self._look = deadline, look
        self._next_look = time.monotonic() + LOOK_S

    @property
    def name(self) -> str:
        """Of the member that is waited for."""
        return self._members[self.rank]

    def check(self) -> None:
        """Go on, if the deadline has not passed and nobody ended the meeting."""
        now = time.monotonic()
        if now > self._deadline:
            raise DeadlineError(f"{self._members[self._own_rank]} waited until its deadline for {self.name} to {self.what}")
        if now > self._next_look:
            self._look(self.rank, self.what)
            self._next_look = now + LOOK_S


def connected(address: tuple[str, int], wait: _Wait) -> socket.socket:
    """A connection to the member behind."""
    end = socket.socket(family_of(address[0]))
    try:
        end.setblocking(False)
        code = end.connect_ex(address)
        with selectors.DefaultSelector() as selector:
            selector.register(end, selectors.EVENT_WRITE)
            while code == errno.EINPROGRESS:
                if selector.select(LOOK_S):
                    code = end.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                wait.check()
        if code:
            raise OSError(code, f"{wait.name} does not {wait.what}: {os.strerror(code)}")
    except BaseException:
        end.close()
        raise
    return end


def _accepted(listener: socket.socket, hello: bytes, wait: _Wait) -> socket.socket:
    """The connection of the member before; whoever else connects does not say the right thing, and is closed."""
    listener.setblocking(False)
    said: dict[socket.socket, bytes] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        try:
            while True:
                for key, _ in selector.select(LOOK_S):
                    if key.fileobj is listener:
                        with contextlib.suppress(BlockingIOError):
                            end = listener.accept()[0]
                            end.setblocking(False)
                            said[end] = b""
                            selector.register(end, selectors.EVENT_READ)
                        continue
                    end = cast(socket.socket, key.fileobj)
                    part = _part(end, HELLO_BYTES - len(said[end]))
                    said[end] += part
                    if not part or len(said[end]) == HELLO_BYTES:
                        selector.unregister(end)
                        if said[end] == hello:
                            del said[end]
                            return end
                        del said[end]
                        end.close()
                wait.check()
        finally:
            for other in said:
                other.close()


def _part(end: socket.socket, size_bytes: int) -> bytes:
    """What can be read now; nothing where the other end is gone."""
    try:
        return end.recv(size_bytes)
    except OSError:
        return b""


def _set_up(end: socket.socket) -> None:
    """Calls block for :data:`STEP_S` at most: the system's time-outs, because Python's make a call return with the first bytes."""
    end.setblocking(True)
    limit = struct.pack("ll", 0, int(STEP_S * 1e6))
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEP_ALIVE_PROBES.items():
        end.setsockopt(socket.IPPROTO_TCP, option, value)


def _hello(name: str, rank: int) -> bytes:
    """What a member says to the one of that rank: of this group alone."""
    return hashlib.sha256(f"{name} {rank}".encode()).digest()
