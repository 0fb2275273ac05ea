"""``python -m bench.weightsync.nodes``, as root: weight syncs between two nodes, over a link of a known rate, beside a bare socket.

Two network namespaces of this machine, joined by a pair of virtual interfaces that ``tc`` shapes in both directions (token bucket), have a
Ray node each. The trainer is on the first, engines are on the second; what crosses is counted by the interface. The limit is a plain socket
that sends the same number of bytes over the same link. Writes ``bench/results/weightsync-nodes.json`` and ``.md``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import ray

from bench.measure import machine, write_results
from bench.weightsync.__main__ import TIMEOUT_S, syncs
from bench.weightsync.world import start
from rljob_runtime.cluster.ports import group_port
from rljob_runtime.cluster.protocol import gather_all
from rljob_runtime.cluster.ray_cluster import RayWorker
from rljob_runtime.weightsync.transports.object_store import ObjectStoreTransport

HERE, THERE = "198.18.0.1", "198.18.0.2"
"""Of the block for benchmarks (RFC 2544)."""
LINK = "rljob0"
"""What both namespaces call their end."""
RATES_MBIT = {1000: 64, 200: 32}
"""Rate of the link -> MiB of the model."""
CHANGED = 0.01
STORE_BYTES = 512 << 20
RAY_START_S = 120.0


def main() -> int:
    """Make the namespaces, measure in the first, write, and print the markdown."""
    parser = argparse.ArgumentParser(prog="python -m bench.weightsync.nodes", description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--inside", help="used by itself, in the first namespace: the name of the second")
    args = parser.parse_args()
    if args.inside is not None:
        sys.stdout.write(json.dumps(measure(args.inside, args.repeat)) + "\n")
        return 0
    values: dict[str, Any] = {"machine": machine(("torch", "ray")), "load_before": os.getloadavg()[0], "repeat": args.repeat}
    started = time.monotonic()
    with namespaces() as (first, second):
        command = ["ip", "netns", "exec", first, sys.executable, "-m", "bench.weightsync.nodes", "--inside", second]
        env = os.environ | {"RAY_AUTH_MODE": "disabled"}  # nobody else reaches these namespaces
        done = subprocess.run([*command, "--repeat", str(args.repeat)], stdout=subprocess.PIPE, text=True, check=True, env=env)
    values |= json.loads(done.stdout.splitlines()[-1])
    values["duration_s"] = time.monotonic() - started
    text = markdown(values)
    write_results("weightsync-nodes", values, text)
    sys.stdout.write(text)
    return 0


@contextmanager
def namespaces() -> Iterator[tuple[str, str]]:
    """Two joined network namespaces, removed afterwards."""
    first, second = (f"rljob-bench-{os.getpid()}-{side}" for side in ("a", "b"))
    made: list[str] = []
    try:
        for name in (first, second):
            run("ip", "netns", "add", name)
            made.append(name)
        run("ip", "link", "add", LINK, "netns", first, "type", "veth", "peer", "name", LINK, "netns", second)
        for name, address in ((first, HERE), (second, THERE)):
            inside = ("ip", "netns", "exec", name, "ip")
            run(*inside, "address", "add", f"{address}/30", "dev", LINK)
            run(*inside, "link", "set", LINK, "up")
            run(*inside, "link", "set", "lo", "up")
        yield first, second
    finally:
        for name in made:
            run("ip", "netns", "delete", name)


def run(*command: str) -> None:
    """A command that has to succeed."""
    subprocess.run(command, check=True)


def shape(second: str, mbit: int) -> None:
    """Limit both directions of the link; a frame at most 20 ms late."""
    limit = ("tc", "qdisc", "replace", "dev", LINK, "root", "tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "20ms")
    run(*limit)
    run("ip", "netns", "exec", second, *limit)


def measure(second: str, repeat: int) -> dict[str, Any]:
    """Rows by rate, from inside the first namespace."""
    with tempfile.TemporaryDirectory() as folder, ray_nodes({"there": (second, THERE)}, Path(folder)):
        try:
            return {"rows": asyncio.run(_measure(second, repeat, Path(folder)))}
        finally:
            ray.shutdown()


@contextmanager
def ray_nodes(others: Mapping[str, tuple[str, str]], folder: Path) -> Iterator[None]:
    """A Ray node here, which has the resource ``here``, and one in each other namespace; ended afterwards.

    Args:
        others: resource of a node -> its namespace and its address.
        folder: for the log.
    """
    port = group_port(HERE)
    common = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus", "2", "--object-store-memory", str(STORE_BYTES)]
    here = [*common, "--head", "--node-ip-address", HERE, "--port", str(port), "--include-dashboard", "false"]
    paths = [str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    nodes: list[subprocess.Popen[bytes]] = []
    with (folder / "ray.log").open("wb") as log:
        try:
            nodes.append(subprocess.Popen([*here, "--resources", '{"here": 1}'], stdout=log, stderr=log, env=env))
            _until("the first Ray node", lambda: _connected(f"{HERE}:{port}"))
            for name, (namespace, address) in others.items():
                there = ["ip", "netns", "exec", namespace, *common, "--address", f"{HERE}:{port}", "--node-ip-address", address]
                nodes.append(subprocess.Popen([*there, "--resources", json.dumps({name: 1})], stdout=log, stderr=log, env=env))
                # One after the other: nodes of one machine choose the names of their sockets by what is there.
                _until(f"Ray's node {name}", partial(_is_there, name))
            yield
        finally:
            for node in reversed(nodes):
                node.terminate()
            for node in nodes:
                node.wait(RAY_START_S)


def _connected(address: str) -> bool:
    try:
        ray.init(address=address, log_to_driver=False, _node_ip_address=HERE)
    except (ConnectionError, RuntimeError):
        return False
    return True


def _is_there(resource: str) -> bool:
    return resource in ray.cluster_resources()


def _until(what: str, found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + RAY_START_S
    while not found():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} was not there within {RAY_START_S:.0f} s")
        time.sleep(0.5)


async def _measure(second: str, repeat: int, folder: Path) -> list[dict[str, Any]]:
    env = {"GLOO_SOCKET_IFNAME": LINK}
    [alone] = start("Trainer", 1, folder / "t", nodes=["here"])
    engines = start("Engine", 2, folder / "e", nodes=["there", "there"])
    ranks = start("Trainer", 2, folder / "r", nodes=["here", "there"], settings=[{"rank": r, "world_size": 2} for r in range(2)], env=env)
    [near] = start("Engine", 1, folder / "n", nodes=["here"])
    for worker in (alone, *engines, *ranks, near):
        await worker.started(TIMEOUT_S)
    port = group_port(HERE)
    await gather_all([rank.start("join", HERE, port) for rank in ranks], TIMEOUT_S)
    rows = []
    for mbit, mib in RATES_MBIT.items():
        size = mib << 20
        await gather_all([worker.start("take_model", size) for worker in (alone, *ranks)], TIMEOUT_S)
        shape(second, mbit)
        socket_s = min(bare_socket_s(second, size) for _ in range(repeat))
        ways: dict[str, tuple[list[RayWorker], list[RayWorker], dict[str, Any]]] = {
            "dense, one engine there": ([alone], engines[:1], {}),
            "dense, two engines there": ([alone], engines, {}),
            "sparse, 1 % changed, two engines there": ([alone], engines, {"changed": CHANGED, "dense_above": 1.0}),
            "a trainer rank and an engine on each node, rank 0 sends": (ranks, [near, engines[0]], {}),
            "the same, both ranks send": (ranks, [near, engines[0]], {"senders": (0, 1)}),
        }
        for name, (trainers, receivers, settings) in ways.items():
            before = crossed_bytes()
            found = await syncs(trainers, receivers, ObjectStoreTransport, True, size, repeat, **settings)
            sent, received = (after - old for after, old in zip(crossed_bytes(), before, strict=True))
            # the first two are not counted in the seconds, and with sparse syncs the first is whole
            rows.append({"mbit": mbit, "mib": mib, "way": name, "socket_s": socket_s, "sent_bytes": sent / (repeat + 2)} | found
                        | {"received_bytes": received / (repeat + 2)})  # fmt: skip
            sys.stderr.write(f"{mbit} Mbit/s, {name}: {found['seconds']:.3f} s, a socket {socket_s:.3f} s\n")
    return rows


def crossed_bytes() -> tuple[int, int]:
    """Bytes that have left this node over the link, and that came."""
    folder = Path(f"/sys/class/net/{LINK}/statistics")
    return int((folder / "tx_bytes").read_text()), int((folder / "rx_bytes").read_text())


def bare_socket_s(second: str, size_bytes: int) -> float:
    """Seconds until the other node has all bytes of a plain socket, and says so."""
    receiving = (
        "import socket\n"
        f"server = socket.create_server(({THERE!r}, 0)); print(server.getsockname()[1], flush=True)\n"
        "peer, _ = server.accept(); left = int.from_bytes(peer.recv(8), 'big'); buffer = bytearray(1 << 20)\n"
        "while left:\n    left -= peer.recv_into(buffer)\n"
        "peer.sendall(b'x')\n"
    )
    command = ["ip", "netns", "exec", second, sys.executable, "-c", receiving]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as there:
        assert there.stdout is not None
        port, data = int(there.stdout.readline()), bytes(size_bytes)
        with socket.create_connection((THERE, port), timeout=TIMEOUT_S) as peer:
            started = time.perf_counter()
            peer.sendall(size_bytes.to_bytes(8, "big"))
            peer.sendall(data)
            peer.recv(1)
            return time.perf_counter() - started


def markdown(values: dict[str, Any]) -> str:
    """One row per rate and way."""
    where = values["machine"]
    lines = [
        "# Weight syncs between two nodes",
        "",
        f"Written by `python -m bench.weightsync.nodes` on {where['measured_at']}, in {values['duration_s']:.0f} s: {where['processor']}, "
        f"{where['cores']} cores, load {values['load_before']:.1f} before; {where['versions']}. Two namespaces of one machine have a "
        "Ray node each, connected by a link that `tc` limits in each direction; ObjectStore, bfloat16, engines generate during the sync.",
        "",
        f"Seconds of a sync, the fastest of {values['repeat']}; socket: the same model as bare bytes through one socket over the same "
        "link, the limit of a dense sync from one node; link: that limit over the sync. Bytes are those of the network interface, per "
        "sync, including two additional syncs; the first of these is full also in the sparse case.",
        "",
        "| Mbit/s | MiB | way | seconds | socket, s | link | stall, s | hidden, s | sent, MiB | back, MiB |",
        "|---:|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in values["rows"]:
        lines.append(
            f"| {row['mbit']} | {row['mib']} | {row['way']} | {row['seconds']:.3f} | {row['socket_s']:.3f} | "
            f"{row['socket_s'] / row['seconds']:.0%} | {row['stall_s']:.3f} | {row['hidden_s']:.3f} | {row['sent_bytes'] / 2**20:.1f} | "
            f"{row['received_bytes'] / 2**20:.1f} |"
        )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
