"""Members of a chain pass on what they receive: each link carries it once, and who keeps the others waiting is named."""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from rljob_runtime.errors import DeadlineError, WeightSyncError
from rljob_runtime.weightsync import chain
from rljob_runtime.weightsync.chain import HELLO_BYTES, Chain
from rljob_runtime.weightsync.meetings import blamed
from rljob_runtime.weightsync.transport import TransportSettings
from rljob_runtime.weightsync.transports.collective import chain_order
from tests.support.pace import HANG_S
from tests.support.ports import needs_ipv6

HOST = "127.0.0.1"


MEMBERS = ("trainer rank 0", "engine-0", "engine-1", "engine-2")
LARGE_BYTES = 48 << 20
"""More than the sockets of a connection keep."""
SENT_AT = 120
"""Of ``tcpi_bytes_acked`` in Linux's ``struct tcp_info``."""
STRANGER = """
import socket, sys
from rljob_runtime.weightsync.chain import Chain
member = Chain("a", {members!r}, {rank}, {host!r})
print(member.address, flush=True)
member.connect(sys.stdin.readline().strip(), float("inf"), lambda rank, what: None)
print("connected", flush=True)
sys.stdin.readline()
"""
"""A member in a process of its own, which takes part in no broadcast."""


def never_over(rank: int, what: str) -> None:
    """A meeting that goes on."""


def soon() -> float:
    return time.monotonic() + HANG_S


def connect(members: dict[int, Chain], addresses: Sequence[str], pool: ThreadPoolExecutor) -> list[Future[None]]:
    """Each with its neighbors; ``addresses`` are those of all members, by rank."""
    behind = [*addresses[1:], ""]
    return [pool.submit(member.connect, behind[rank], soon(), never_over) for rank, member in members.items()]


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(len(MEMBERS)) as made:
        yield made


@pytest.fixture
def members(pool: ThreadPoolExecutor) -> Iterator[list[Chain]]:
    """A connected chain of a sender and three receivers."""
    made = [Chain("a", MEMBERS, rank, HOST) for rank in range(len(MEMBERS))]
    for done in connect(dict(enumerate(made)), [member.address for member in made], pool):
        done.result(HANG_S)
    yield made
    for member in made:
        member.abort()


def pass_on(member: Chain, data: np.ndarray, deadline: float | None = None, look: chain.Look = never_over) -> None:
    member.pass_on(data.data, soon() if deadline is None else deadline, look)


@pytest.mark.parametrize(("host", "size_bytes"), [(HOST, 1), pytest.param("::1", 1, marks=needs_ipv6), (HOST, 3 * chain.CHUNK_BYTES + 7)])
def test_all_receivers_get_the_bits_and_the_sender_sends_them_once(
    pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, host: str, size_bytes: int
) -> None:
    ends: dict[str, socket.socket] = {}
    connected = chain.connected

    def kept(address: tuple[str, int], wait: Any) -> socket.socket:
        ends[wait.name] = connected(address, wait)
        return ends[wait.name]

    monkeypatch.setattr(chain, "connected", kept)
    made = [Chain("a", MEMBERS, rank, host) for rank in range(len(MEMBERS))]
    for done in connect(dict(enumerate(made)), [member.address for member in made], pool):
        done.result(HANG_S)
    sent = np.random.default_rng(0).integers(0, 256, size_bytes, dtype=np.uint8)
    for _ in range(2):  # the second broadcast begins where the first ended
        found = [sent, *(np.zeros(size_bytes, dtype=np.uint8) for _ in MEMBERS[1:])]
        for done in [pool.submit(pass_on, member, data) for member, data in zip(made, found, strict=True)]:
            done.result(HANG_S)
        assert all(np.array_equal(one, sent) for one in found)
    counted = {name: acknowledged_bytes(end) for name, end in ends.items()}
    for member in made:
        member.abort()
    # The sender has one connection; the sequence number of its SYN counts as a byte.
    assert counted == dict.fromkeys(MEMBERS[1:], 2 * size_bytes + HELLO_BYTES + 1)


def test_connections_are_probed_while_a_training_step_leaves_them_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Firewalls forget connections that are idle for minutes, and drop what comes over them without a word."""
    ends: list[socket.socket] = []
    connected = chain.connected

    def kept(address: tuple[str, int], wait: Any) -> socket.socket:
        ends.append(connected(address, wait))
        return ends[-1]

    monkeypatch.setattr(chain, "connected", kept)
    pair = [Chain("b", MEMBERS[:2], rank, HOST) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for done in connect(dict(enumerate(pair)), ["", pair[1].address], pool):
            done.result(HANG_S)
    assert ends[0].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    assert ends[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == chain.KEEP_ALIVE_S
    for member in pair:
        member.abort()


def acknowledged_bytes(end: socket.socket) -> int:
    """Bytes that have left through a connection and arrived; all of them, once the other end has read them."""
    deadline = soon()
    while struct.unpack_from("I", end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 64), 24)[0] and time.monotonic() < deadline:
        pass  # `tcpi_unacked`: the acknowledgment of the last segment may be under way
    return int(struct.unpack_from("Q", end.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), SENT_AT)[0])


def test_bytes_reach_the_last_member_before_the_sender_has_sent_all(members: list[Chain], pool: ThreadPoolExecutor) -> None:
    """A member passes chunks on; it does not wait for the whole."""
    reached = threading.Event()
    waited_for = []
    size_bytes = LARGE_BYTES
    sent = np.ones(size_bytes, dtype=np.uint8)
    last = np.zeros(size_bytes, dtype=np.uint8)

    def held_back(rank: int, what: str) -> None:
        waited_for.append((rank, what))
        if last[: chain.CHUNK_BYTES // 2].all():
            reached.set()
            raise WeightSyncError("seen enough")

    def in_time(rank: int, what: str) -> None:
        if reached.is_set():
            raise WeightSyncError("seen enough")

    # The sender has only half of the bytes: the other half never comes.
    calls = [pool.submit(pass_on, members[0], sent[: size_bytes // 2], None, in_time)]
    calls += [pool.submit(pass_on, member, np.zeros(size_bytes, dtype=np.uint8), None, in_time) for member in members[1:3]]
    calls += [pool.submit(pass_on, members[3], last, None, held_back)]
    for call in calls[1:]:
        with pytest.raises(WeightSyncError, match="seen enough"):
            call.result(HANG_S)
    with contextlib.suppress(WeightSyncError):  # its half may be on its way when the next member stops taking it
        calls[0].result(HANG_S)
    assert waited_for[-1][0] == 2


def test_who_does_not_take_part_is_named_by_both_neighbors(members: list[Chain], pool: ThreadPoolExecutor) -> None:
    """Engine-1 hangs: one neighbor cannot send all to it, the other gets nothing from it."""
    deadline = time.monotonic() + 5.0
    data = [np.zeros(LARGE_BYTES, dtype=np.uint8) for _ in MEMBERS]
    calls = {rank: pool.submit(pass_on, members[rank], data[rank], deadline) for rank in (1, 3)}
    sending = pool.submit(pass_on, members[0], data[0])
    with pytest.raises(DeadlineError, match=r"^engine-0 waited until its deadline for engine-1 to take \d+ more of 50331648 bytes$"):
        calls[1].result(HANG_S)
    with pytest.raises(DeadlineError, match=r"^engine-2 waited until its deadline for engine-1 to send 50331648 more of 50331648 bytes$"):
        calls[3].result(HANG_S)
    sending.result(HANG_S)  # engine-0 had room for all


def test_neighbors_of_a_killed_process_end_when_the_meeting_is_over(pool: ThreadPoolExecutor) -> None:
    """The driver hears of the loss, and says so; until then they wait, because their own error would hide the cause."""
    command = [sys.executable, "-c", STRANGER.format(members=MEMBERS, rank=2, host=HOST)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as middle:
        assert middle.stdin is not None
        assert middle.stdout is not None
        near = {rank: Chain("a", MEMBERS, rank, HOST) for rank in (0, 1, 3)}
        addresses = ["", near[1].address, middle.stdout.readline().strip(), near[3].address]
        middle.stdin.write(f"{addresses[3]}\n")
        middle.stdin.flush()
        for done in connect(near, addresses, pool):
            done.result(HANG_S)
        assert middle.stdout.readline() == "connected\n"
        over = threading.Event()

        def look(rank: int, what: str) -> None:
            if over.is_set():
                raise WeightSyncError("engine-1 was lost")

        calls = [pool.submit(pass_on, member, np.zeros(LARGE_BYTES, dtype=np.uint8), None, look) for member in near.values()]
        middle.kill()
        middle.wait(HANG_S)
        over.set()
        for call in calls:
            with pytest.raises(WeightSyncError, match=r"^engine-1 was lost$"):
                call.result(HANG_S)
    for member in near.values():
        member.abort()


def test_a_closed_connection_without_a_reported_loss_names_the_member(
    members: list[Chain], pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "LOST_S", 0.1)
    members[2].abort()
    said = r"^engine-1 closed its connection with engine-2, and was to send 8 more of 8 bytes: end of the stream$"
    with pytest.raises(WeightSyncError, match=said):
        pass_on(members[3], np.zeros(8, dtype=np.uint8))


def test_a_connection_without_the_groups_hello_is_closed(pool: ThreadPoolExecutor) -> None:
    first, last = (Chain("a", MEMBERS[:2], rank, HOST) for rank in range(2))
    host, port = last.address.split()
    strangers = [socket.create_connection((host, int(port))) for _ in range(2)]
    strangers[0].sendall(bytes(HELLO_BYTES))
    for done in connect({0: first, 1: last}, ["", last.address], pool):
        done.result(HANG_S)
    found = np.zeros(3, dtype=np.uint8)
    receiving = pool.submit(pass_on, last, found)
    pass_on(first, np.array([1, 2, 3], dtype=np.uint8))
    receiving.result(HANG_S)
    assert found.tolist() == [1, 2, 3]
    assert [stranger.recv(1) for stranger in strangers] == [b"", b""]
    for end in (*strangers,):
        end.close()
    first.abort()
    last.abort()


def test_a_member_that_does_not_connect_in_time_is_named() -> None:
    last = Chain("a", MEMBERS, 3, HOST)
    with pytest.raises(DeadlineError, match=r"^engine-2 waited until its deadline for engine-1 to connect$"):
        last.connect("", time.monotonic() + 0.1, never_over)
    last.abort()


@pytest.mark.parametrize(
    ("waiting", "expected"),
    [
        ({}, []),
        ({0: "7 1 take 3 more", 1: "9 2 take 2 more", 3: "4 2 send 5 more"}, [2]),  # 2 hangs
        ({0: "7 1 take 3 more", 1: "9 2 take 2 more", 2: "4 1 send 5 more", 3: "1 2 send 5 more"}, [1, 2]),  # the link between them is slow
        ({1: "7 0 send 3 more", 2: "4 1 send 5 more", 3: "1 2 send 5 more"}, [0]),  # the trainer packs
    ],
)
def test_who_keeps_a_chain_waiting(waiting: dict[int, str], expected: list[int]) -> None:
    assert [rank for rank, _ in blamed(waiting)] == expected


def settings(engine_nodes: tuple[int, ...], sender_nodes: dict[int, int]) -> TransportSettings:
    return TransportSettings(run="a", while_generating=False, engine_nodes=engine_nodes, sender_nodes=sender_nodes)


@pytest.mark.parametrize(
    ("sender", "engines", "expected"),
    [
        (0, range(6), [0, 3, 1, 4, 2, 5]),  # nodes 0, 1, 2: its own first
        (1, range(6), [2, 5, 0, 3, 1, 4]),  # nodes 2, 0, 1
        (0, [0, 1, 2, 4, 5], [0, 1, 4, 2, 5]),  # without a lost one
    ],
)
def test_a_chain_goes_node_by_node_from_the_sender_s(sender: int, engines: Sequence[int], expected: list[int]) -> None:
    assert chain_order(engines, sender, settings((0, 1, 2, 0, 1, 2), {0: 0, 1: 2})) == expected


def test_without_nodes_a_chain_goes_by_the_number_of_the_engine() -> None:
    assert chain_order([0, 2, 3], 1, settings((), {})) == [0, 2, 3]


def test_a_sender_whose_engines_are_all_lost_sends_to_nobody() -> None:
    alone, data = Chain("a", ["sender"], 0, HOST), np.arange(4, dtype=np.uint8)

    def waited(rank: int, what: str) -> None:
        raise AssertionError(f"waited for member {rank} to {what}")

    pass_on(alone, data, None, waited)
    alone.abort()
    assert alone.next_rank is None
    assert data.tolist() == [0, 1, 2, 3]
