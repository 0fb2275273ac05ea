"""A process group of one sender and all processes of engines that receive from it: rebuilt whenever its members change.

::

    sender     Outbox (``weightsync.outbox``): a thread forms the group and broadcasts what is put into it, in order, and a store for the
               members to meet at
    receiver   Member: joins at its first receipt; every receipt is one broadcast, also where members pass bytes on to each other
    driver     Meetings (``weightsync.meetings``): tells all members to give up, when an engine is lost or a deadline passed

The group is torch's own class, made directly: no member is in torch's default group with the others, and engines have one of their own.
It is NCCL between CUDA devices and gloo between hosts' memories, and nothing else differs between the two. Neither of them ends a call
whose peer is gone in a time that would suit: so nothing here waits inside of it. Calls are begun, looked at until they are done, and given
up at their deadline, or once the store says that the meeting is over. A chain of sockets (``weightsync.chain``) takes the place of gloo
where a meeting says so, under the same deadlines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from rljob_runtime.cluster.ports import listening
from rljob_runtime.errors import ClusterError, DeadlineError, SyncBrokenError, WeightSyncError
from rljob_runtime.weightsync.chain import LOOK_S, Chain
from rljob_runtime.weightsync.store import Store

C10D: Any = dist
"""Torch's annotations leave out its stores, and options of its groups."""
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.0002, 0.005
STORE_TIMEOUT_S = 30.0
"""Of connecting to the store, and of one question to it. Torch looks up the name of the other end's address at each connection, in the
store's one thread too, and a resolver that gets no answer takes 5 s and more for that."""
OVER = "over"
"""Key of the store: why nobody should wait any more."""
TAKEN = "taken"
"""Key of the store: number of the last broadcast that a receiver has announced, see :meth:`Member.announce`."""
NO_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_BLOCKING_WAIT": "1"}
"""Torch would end the whole process when a peer of an NCCL group is lost; here that is an error of one sync.

Turning off error handling is not enough. The group's watchdog thread still sees the error and requests a debug dump. The monitor thread of
the first group of the process (the trainer's, or vLLM's) sees that request, and ends the process after ``TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC``
(8 minutes). With blocking wait torch starts no watchdog for the group, so nobody requests a dump. ``wait`` does not block here, because the
broadcast is complete by then.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where and for how long the members of one group meet."""

    name: str
    """Of this group alone."""
    sender: int
    """Trainer rank that sends; member 0."""
    host: str
    """Address of the sender."""
    port: int = 0
    """Of the store; known once the sender listens there."""
    num_members: int
    """With the sender."""
    join_s: float
    """How long a receiver waits for the others, and how long connecting may then take. The sender waits ``timeout_s``, because receivers
    visit senders one after another."""
    timeout_s: float
    """Deadline of every broadcast."""
    chain: tuple[str, ...] = ()
    """What the members are called, by rank, where they pass buckets on from one to the next (``weightsync.chain``); empty: a broadcast of
    torch's group."""


def device_here() -> torch.device:
    """The device whose memory travels: the process's CUDA device, or the host."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


class Member:
    """One process's part in a group. One thread at a time."""

    def __init__(self, meeting: Meeting, rank: int, device: torch.device) -> None:
        """Join; returns once all members are there.

        Args:
            meeting: its store has to be there.
            rank: in the group; 0 is the sender.
            device: of what will travel.

        Raises:
            DeadlineError: not all members came.
            WeightSyncError: the meeting is over, or the group cannot be formed.
        """
        self._meeting, self._rank, self._device = meeting, rank, device
        self._next = self._looks = 0
        self._announced = -1
        self._group: Any = None
        deadline = time.monotonic() + (meeting.join_s if rank else meeting.timeout_s)
        self._what = f"member {rank} of {meeting.num_members} of the group of trainer rank {meeting.sender}"
        self._control = connection(meeting)
        with as_sync_errors(f"{self._what}: the group could not be formed"):
            try:
                self._look()  # who comes late must not be waited for, nor wait for those that have gone
                if rank == 0:
                    self._control.set(TAKEN, str(self._announced))
                if meeting.chain:
                    self._group = Chain(meeting.name, meeting.chain, rank, _own_address(meeting))
                    self._control.set(f"address/{rank}", self._group.address)
                self._control.set(f"here/{rank}", "")
                wanted = [f"here/{other}" for other in range(meeting.num_members)]
                self._wait(lambda: self._control.check(wanted), deadline, "the other members did not come")
                self._look()
                try:
                    self._connect(max(min(deadline - time.monotonic(), meeting.join_s), 1.0))
                except (RuntimeError, OSError) as error:  # nobody else need wait for their own deadline to learn of it
                    self.give_up(str(error))
                    raise
            except BaseException:
                self.close()
                raise

    def broadcast(self, data: torch.Tensor, sequence: int) -> None:
        """Send ``data`` as member 0, fill it as another.

        Args:
            data: uint8 on the member's device; as large on all members.
            sequence: counts broadcasts of the group, so that no member takes one for another.

        Raises:
            DeadlineError: it took longer than the meeting allows.
            WeightSyncError: a member is lost or the meeting is over; the group is of no use any more.
        """
        if sequence != self._next:
            raise WeightSyncError(f"{self._what} is at broadcast {self._next} and was to make number {sequence}")
        self._next += 1
        if not data.numel():
            return
        fault = self._fault_of(data, sequence)
        if fault is not None:
            self.close(data)
            try:
                raise fault
            finally:
                del fault, data  # the traceback has this frame, and would keep both until a garbage collection

    def announce(self, sequence: int) -> None:
        """Let the sender begin with a broadcast that it holds back, and with all after it; only the first call for each goes to the store.

        Raises:
            WeightSyncError: the store does not answer.
        """
        if sequence > self._announced:
            with as_sync_errors(f"{self._what}: broadcast {sequence} could not be announced"):
                self._control.set(TAKEN, str(sequence))
            self._announced = sequence

    def await_announced(self, sequence: int) -> None:
        """As member 0, wait until a receiver has announced a broadcast.

        A broadcast of NCCL occupies the device from its beginning until all receivers take part, and calls such as ``cudaFree``, which the
        allocator makes where memory is short, wait for everything on the device. If receivers come only once all buckets are packed, a
        broadcast that began before could keep the sender from packing the rest.

        Raises:
            DeadlineError: nobody announced it in time.
            WeightSyncError: the meeting is over, or the store does not answer.
        """
        if sequence > self._announced:
            with as_sync_errors(f"{self._what}: broadcast {sequence} could not begin"):
                deadline = time.monotonic() + self._meeting.timeout_s
                self._wait(lambda: int(self._control.get(TAKEN)) >= sequence, deadline, f"no engine was there to take broadcast {sequence}")
            self._announced = sequence

    def close(self, used: torch.Tensor | None = None) -> None:
        """Leave the group; who still waits for this member gets an error.

        ``used``: what a call that broke off may still write to, kept until the group is aborted, so that nobody else gets its memory.
        """
        held, self._group = [self._group, used], None
        self._next = -1
        self._control.close()
        if held[0] is not None:  # gloo's end waits for its calls under way, until their own time-out: nobody here does
            threading.Thread(target=_dropped, args=(held,), name="rljob-group-end", daemon=True).start()

    def give_up(self, reason: str) -> None:
        """End the meeting for all, unless somebody has, or the store does not answer."""
        with contextlib.suppress(RuntimeError):
            if not self._control.check([OVER]):
                self._control.set(OVER, reason)

    def _connect(self, left_s: float) -> None:
        """Connect the members, which are all there now, within that time."""
        if isinstance(self._group, Chain):
            behind = self._group.next_rank
            address = "" if behind is None else self._control.get(f"address/{behind}")
            self._group.connect(address, time.monotonic() + left_s, self._look_for)
            return
        on_cuda = self._device.type == "cuda"
        # Own connection: NCCL's thread blocks in it, and `_look` must not block with it.
        own = connection(self._meeting)
        store = C10D.PrefixStore("group", own.connection)
        own.close()  # for questions; torch's store lives as long as the group
        self._group = process_group(store, self._rank, self._meeting, self._device, left_s)
        if not on_cuda:
            return
        # NCCL would connect them in the first broadcast, and wait forever for a peer that it cannot reach.
        done: Future[None] = Future()
        threading.Thread(target=_connected, args=(self._group, self._device, done), name="rljob-group-connect", daemon=True).start()
        self._wait(done.done, time.monotonic() + self._meeting.join_s, "NCCL did not connect the members")
        done.result()

    def _fault_of(self, data: torch.Tensor, sequence: int) -> WeightSyncError | DeadlineError | None:
        """What went wrong in a broadcast, without its frames, which would keep the call alive, and the group with it."""
        options = C10D.BroadcastOptions()
        options.rootRank = 0
        what = f"broadcast {sequence} of {data.numel()} bytes"
        deadline = time.monotonic() + self._meeting.timeout_s
        try:
            with as_sync_errors(f"{self._what}: {what} broke off"):
                if isinstance(self._group, Chain):
                    self._group.pass_on(data.numpy().data, deadline, self._look_for)
                else:
                    self._finished(self._group.broadcast([data], options), deadline, f"{what} did not end")
        except (WeightSyncError, DeadlineError) as error:
            return type(error)(str(error))
        return None

    def _finished(self, work: Any, deadline: float, late: str) -> None:
        self._wait(work.is_completed, deadline, late)
        work.wait()

    def _wait(self, is_done: Callable[[], bool], deadline: float, late: str) -> None:
        pause, next_look = SHORTEST_PAUSE_S, time.monotonic() + LOOK_S
        while not is_done():
            now = time.monotonic()
            if now > deadline:
                raise DeadlineError(f"{self._what}: {late} in time")
            if now > next_look:
                self._look()
                next_look = now + LOOK_S
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)

    def _look_for(self, rank: int, what: str) -> None:
        """The same, and a note of what this member of a chain waits for, see :meth:`Meetings.waited_for`."""
        self._look()
        self._looks += 1
        self._control.set(f"waits/{self._rank}", f"{self._looks} {rank} {what}")

    def _look(self) -> None:
        """Raise WeightSyncError if the meeting is over."""
        if self._control.check([OVER]):
            raise WeightSyncError(f"{self._what}: {self._control.get(OVER)}")


def end_meeting(store: Any, reason: str) -> None:
    """Leave the reason in torch's store, where members look."""
    with contextlib.suppress(RuntimeError):  # its sender is gone, and members see that
        store.set(OVER, reason)


class Memberships:
    """The groups that a process has joined."""

    def __init__(self) -> None:
        """None yet."""
        self._lock = threading.Lock()
        self._joined: dict[tuple[int, int], tuple[str, Member]] = {}
        """By sender and rank in its group: the meeting that was joined last."""

    def join(self, meeting: Meeting, rank: int, device: torch.device) -> Member:
        """The membership of a meeting; at the first call it joins, and leaves the meetings of the sender that were there before.

        At any rank: after the loss of an engine the others have other ranks, and a group that is left behind would keep its memory on the
        device.

        Raises:
            DeadlineError, WeightSyncError: as of :class:`Member`.
        """
        key = (meeting.sender, rank)
        with self._lock:
            if (known := self._joined.get(key)) is not None and known[0] == meeting.name:
                return known[1]
            over = [at for at, (name, _) in self._joined.items() if at[0] == meeting.sender and name != meeting.name]
            left = [self._joined.pop(at)[1] for at in over]
        for one in left:
            one.close()
        member = Member(meeting, rank, device)
        with self._lock:
            self._joined[key] = meeting.name, member
        return member

    def leave(self, meetings: Collection[str] | None = None) -> None:
        """Leave meetings, by their names, that were joined: no other end of a transport uses them; all where none are named."""
        with self._lock:
            over = [at for at, (name, _) in self._joined.items() if meetings is None or name in meetings]
            left = [self._joined.pop(at)[1] for at in over]
        for one in left:
            one.close()


MEMBERSHIPS = Memberships()
"""Those of this process."""


def _connected(group: Any, device: torch.device, done: Future[None]) -> None:
    """Connect the members. Runs in a thread of its own, which is abandoned if NCCL never returns."""
    try:
        torch.cuda.set_device(device)
        group.eager_connect_single_device(device)
    except Exception as error:  # noqa: BLE001 - the member raises it
        done.set_exception(error)
    else:
        done.set_result(None)


def _dropped(held: list[Any]) -> None:
    """Abort a group and let go of it."""
    with contextlib.suppress(RuntimeError):
        held[0].abort()
    held.clear()


def process_group(store: Any, rank: int, meeting: Meeting, device: torch.device, left_s: float) -> Any:
    """The lowest border between CUDA and CPU: which of torch's groups it is."""
    if device.type == "cuda":
        options = C10D.ProcessGroupNCCL.Options()
        options._timeout = _time(meeting.timeout_s)
        with _environment(NO_WATCHDOG):
            return C10D.ProcessGroupNCCL(store, rank, meeting.num_members, options)
    gloo = C10D.ProcessGroupGloo._Options()
    gloo._timeout = _time(left_s)
    gloo._devices = [C10D.ProcessGroupGloo.create_device(hostname=_own_address(meeting))]
    group = C10D.ProcessGroupGloo(store, rank, meeting.num_members, gloo)
    group._set_default_timeout(_time(meeting.timeout_s))
    return group


def _own_address(meeting: Meeting) -> str:
    """The address of this process as the sender sees it: the host's name may stand for another interface, or the loopback."""
    family, kind, _, _, address = socket.getaddrinfo(meeting.host, meeting.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as way:
        way.connect(address)  # of a datagram socket: chooses the interface, and sends nothing
        return str(way.getsockname()[0])


def connection(meeting: Meeting) -> Store:
    """A connection of its own."""
    name = f"the store of trainer rank {meeting.sender} at {meeting.host} port {meeting.port}"
    with as_sync_errors(f"{name} does not answer"):
        return Store(lambda: _tcp_store(meeting, is_master=False), name, _store_timeout_s(meeting))


def opened(meeting: Meeting) -> tuple[Meeting, Any]:
    """The meeting with its port, and its store, which listens there from the moment when the port is chosen.

    A port that is only known to be free can be another process's, or another sender's of this machine, when torch listens on it.
    """
    with listening(meeting.host) as listener:
        meeting = dataclasses.replace(meeting, port=listener.getsockname()[1])
        return meeting, _tcp_store(meeting, is_master=True, master_listen_fd=os.dup(listener.fileno()))  # the store closes what it gets


def _tcp_store(meeting: Meeting, *, is_master: bool, **more: Any) -> Any:
    return C10D.TCPStore(
        meeting.host,
        meeting.port,
        is_master=is_master,
        wait_for_workers=False,
        timeout=_time(_store_timeout_s(meeting)),
        use_libuv=False,
        **more,
    )


def _store_timeout_s(meeting: Meeting) -> float:
    return min(STORE_TIMEOUT_S, meeting.join_s)


def _time(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=seconds)


@contextlib.contextmanager
def as_sync_errors(what: str) -> Iterator[None]:
    """Torch's errors as ours."""
    try:
        yield
    except (WeightSyncError, DeadlineError):
        raise
    except (RuntimeError, OSError, ClusterError) as error:
        raise SyncBrokenError(f"{what}: {error}") from error


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Variables that torch reads when a group is made."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
