"""Ranks meet on a port that nobody can take between its choice and the meeting."""

from __future__ import annotations

import os
import socket
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from rljob_runtime.cluster import ports
from rljob_runtime.training import meeting
from rljob_runtime.training.meeting import form_group, meeting_store
from tests.support.ports import needs_ipv6


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_a_group_meets_on_the_port_that_was_held_for_it(host: str) -> None:
    port = ports.held_port(host)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as other, pytest.raises(OSError, match="in use"):
        other.bind((host, port))
    form_group(torch.device("cpu"), host, port, rank=0, world_size=1, timeout_s=20.0)
    assert ports.take_listener(port) is None
    try:
        value = torch.ones(1)
        dist.all_reduce(value)
        assert value.item() == 1
    finally:
        dist.destroy_process_group()


def test_a_port_is_taken_once_and_those_that_nobody_takes_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    port = ports.held_port("127.0.0.1")
    listener = ports.take_listener(port)
    assert listener is not None
    listener.close()
    assert ports.take_listener(port) is None
    with meeting_store("127.0.0.1", port, 1.0) as store:
        assert store is None, "another process serves it"
    monkeypatch.setattr(ports, "MAX_HELD", 1)
    oldest, newest = ports.held_port("127.0.0.1"), ports.held_port("127.0.0.1")
    assert ports.take_listener(oldest) is None
    kept = ports.take_listener(newest)
    assert kept is not None
    kept.close()


def test_no_group_binds_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch splits a group with a bound device for each dimension of a mesh, which ends a process that had an earlier group of NCCL."""
    given: list[dict[str, object]] = []
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **options: given.append(options))
    form_group(torch.device("cuda", 1), "127.0.0.1", 1, rank=1, world_size=2, timeout_s=1.0)
    assert "device_id" not in given[0]


@pytest.mark.parametrize(
    ("own", "given", "expected"),
    [("10.1.2.3", None, "eth1"), ("10.1.2.3", "bond0", "bond0"), ("127.0.0.1", None, None), ("10.9.9.9", None, None), (None, None, None)],
    ids=["another node", "the user's", "this machine", "of no interface", "no way"],
)
def test_gloo_takes_the_network_that_leads_to_rank_0(
    monkeypatch: pytest.MonkeyPatch, own: str | None, given: str | None, expected: str | None
) -> None:
    """Not that of the host's name, which is a loopback where /etc/hosts says 127.0.1.1."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", given or "")  # noted, and undone at the end
    if given is None:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    networks = {"lo": ["127.0.0.1"], "eth0": ["192.168.1.7"], "eth1": ["fe80::1%eth1", "10.1.2.3"]}
    found = {name: [SimpleNamespace(address=address) for address in addresses] for name, addresses in networks.items()}
    monkeypatch.setattr("psutil.net_if_addrs", lambda: found)
    monkeypatch.setattr(meeting, "source_address", lambda family, host: own)
    meeting.set_gloo_interface("10.1.2.1")
    assert os.environ.get("GLOO_SOCKET_IFNAME") == expected
