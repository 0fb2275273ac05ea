"""``python -m bench.weightsync.fanout``, as root: weight syncs from one node to three, in a chain, by gloo, and through the object store.

Four network namespaces of this machine have a Ray node each, and are joined by a bridge in a fifth. ``tc`` shapes the link of each node in
both directions (token bucket). The trainer is on the first node, one engine is on each other; what a node sends is counted by its
interface. TCP, its transport with gloo's broadcast in place of the chain, and ObjectStore take turns. Writes
``bench/results/weightsync-fanout.json`` and ``.md``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from bench.measure import machine, write_results
from bench.pairs import PAIRS, ratios, spread
from bench.weightsync.__main__ import TIMEOUT_S, syncs
from bench.weightsync.nodes import LINK, bare_socket_s, ray_nodes, run
from bench.weightsync.world import start
from rljob_runtime.weightsync.transport import Transport, TransportSettings
from rljob_runtime.weightsync.transports.collective import TcpTransport
from rljob_runtime.weightsync.transports.object_store import ObjectStoreTransport

ADDRESSES = ("198.18.0.1", "198.18.0.2", "198.18.0.3", "198.18.0.4")
"""Of the nodes, the trainer's first; of the block for benchmarks (RFC 2544)."""
RATES_MBIT = {1000: 64, 200: 16}
"""Rate of every link -> MiB of the model."""
COUNTS = (1, 3)
"""Engines, each on a node of its own."""


class GlooTransport(TcpTransport):
    """The same with gloo's broadcast: a tree of whole messages."""

    title = "TCP by gloo"
    in_chain = False


WAYS: Mapping[str, Callable[[TransportSettings], Transport]] = {
    "TCP, chain": TcpTransport,
    "TCP, gloo's broadcast": GlooTransport,
    "ObjectStore": ObjectStoreTransport,
}
OWN = "TCP, chain"


def main() -> int:
    """Make the namespaces, measure in the first, write, and print the markdown."""
    parser = argparse.ArgumentParser(prog="python -m bench.weightsync.fanout", description=__doc__)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--inside", nargs="+", help="used by itself, in the first namespace: the names of all")
    args = parser.parse_args()
    if args.inside is not None:
        sys.stdout.write(json.dumps(measure(args.inside, args.repeat)) + "\n")
        return 0
    values: dict[str, Any] = {"machine": machine(("torch", "ray")), "load_before": os.getloadavg()[0], "repeat": args.repeat}
    started = time.monotonic()
    with namespaces() as names:
        command = ["ip", "netns", "exec", names[0], sys.executable, "-m", "bench.weightsync.fanout", "--repeat", str(args.repeat)]
        # Nobody else reaches these namespaces, not even a DNS server, which torch's stores would ask for the name of every address.
        env = os.environ | {"RAY_AUTH_MODE": "disabled", "RES_OPTIONS": "attempts:0"}
        done = subprocess.run([*command, "--inside", *names], stdout=subprocess.PIPE, text=True, check=True, env=env)
    values |= json.loads(done.stdout.splitlines()[-1])
    values |= {"duration_s": time.monotonic() - started}
    values["headline"] = headline(values)
    text = markdown(values)
    write_results("weightsync-fanout", values, text)
    sys.stdout.write(text)
    return 0


@contextmanager
def namespaces() -> Iterator[list[str]]:
    """A network namespace per address, joined by a bridge in another one; removed afterwards."""
    switch, *names = (f"rljob-bench-{os.getpid()}-{index}" for index in range(1 + len(ADDRESSES)))
    made: list[str] = []
    try:
        for name in (switch, *names):
            run("ip", "netns", "add", name)
            made.append(name)
        on_switch = ("ip", "netns", "exec", switch, "ip", "link")
        run(*on_switch, "add", "bridge", "type", "bridge")
        run(*on_switch, "set", "bridge", "up")
        for index, (name, address) in enumerate(zip(names, ADDRESSES, strict=True)):
            run("ip", "link", "add", LINK, "netns", name, "type", "veth", "peer", "name", port(index), "netns", switch)
            run(*on_switch, "set", port(index), "master", "bridge", "up")
            inside = ("ip", "netns", "exec", name, "ip")
            run(*inside, "address", "add", f"{address}/24", "dev", LINK)
            run(*inside, "link", "set", LINK, "up")
            run(*inside, "link", "set", "lo", "up")
            run(*inside, "route", "add", "default", "dev", LINK)  # a worker's address is the one that it would leave its node by
        yield names
    finally:
        for name in made:
            run("ip", "netns", "delete", name)


def port(index: int) -> str:
    """The bridge's end of a node's link."""
    return f"port{index}"


def shape(names: Sequence[str], mbit: int) -> None:
    """Limit every link in both directions; a frame at most 20 ms late."""
    switch = f"{names[0].rpartition('-')[0]}-0"
    for index, name in enumerate(names):
        for namespace, device in ((name, LINK), (switch, port(index))):
            command = ("tc", "qdisc", "replace", "dev", device, "root", "tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "20ms")
            run("ip", "netns", "exec", namespace, *command)


def measure(names: Sequence[str], repeat: int) -> dict[str, Any]:
    """Rows by rate and number of engines, from inside the first namespace."""
    others = {f"node{index}": (names[index], ADDRESSES[index]) for index in range(1, len(names))}
    with tempfile.TemporaryDirectory() as folder, ray_nodes(others, Path(folder)):
        try:
            return {"rows": asyncio.run(_measure(names, list(others), repeat, Path(folder)))}
        finally:
            ray.shutdown()


async def _measure(names: Sequence[str], nodes: Sequence[str], repeat: int, folder: Path) -> list[dict[str, Any]]:
    [trainer] = start("Trainer", 1, folder / "t", nodes=["here"])
    engines = start("Engine", len(nodes), folder / "e", nodes=nodes)
    for worker in (trainer, *engines):
        await worker.started(TIMEOUT_S)
    rows = []
    for mbit, mib in RATES_MBIT.items():
        size = mib << 20
        await trainer.call("take_model", size, timeout_s=TIMEOUT_S)
        shape(names, mbit)
        socket_s = min(bare_socket_s(names[1], size) for _ in range(repeat + 1))
        for count in COUNTS:
            rounds: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
            for _ in range(PAIRS):
                for way, make in WAYS.items():
                    before = sent_bytes(names)
                    found = await syncs([trainer], engines[:count], make, True, size, repeat)
                    sent = [(after - old) / (repeat + 2) for after, old in zip(sent_bytes(names), before, strict=True)]
                    rounds[way].append(found | {"sent_bytes": sent})
            row = {"mbit": mbit, "mib": mib, "engines": count, "socket_s": socket_s} | paired(rounds)
            rows.append(row)
            took = ", ".join(f"{way} {row[way]['median_s']:.3f} s" for way in WAYS)
            sys.stderr.write(f"{mbit} Mbit/s, {count} engines: {took}, a socket {socket_s:.3f} s\n")
    return rows


def paired(rounds: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    """All rounds of each way as one: the median of its syncs, median bytes by node, and the ratios to the chain round by round."""
    found: dict[str, Any] = {}
    for way, parts in rounds.items():
        found[way] = {
            "all_s": [seconds for part in parts for seconds in part["all_s"]],
            "median_s": statistics.median(seconds for part in parts for seconds in part["all_s"]),
            "stall_s": statistics.median(part["stall_s"] for part in parts),
            "hidden_s": statistics.median(part["hidden_s"] for part in parts),
            "sent_bytes": [statistics.median(sent) for sent in zip(*(part["sent_bytes"] for part in parts), strict=True)],
        }
    medians = {way: [part["median_s"] for part in parts] for way, parts in rounds.items()}
    return found | {"ratios": {way: ratios(medians[OWN], medians[way]) for way in rounds if way != OWN}}


def sent_bytes(names: Sequence[str]) -> list[int]:
    """Bytes that have left each node over its link."""
    path = f"/sys/class/net/{LINK}/statistics/tx_bytes"
    return [int(subprocess.check_output(["ip", "netns", "exec", name, "cat", path], text=True)) for name in names]


def headline(values: dict[str, Any]) -> str:
    """The chain and gloo at the largest number of engines, by rate."""
    parts = []
    for row in values["rows"]:
        if row["engines"] == COUNTS[-1]:
            chain, gloo = row[OWN], row["TCP, gloo's broadcast"]
            parts.append(
                f"{chain['median_s']:.2f} s in a chain instead of {gloo['median_s']:.2f} s by gloo's broadcast at {row['mbit']:,} Mbit/s "
                f"({row['mib']} MiB)"
            )
    return f"to {COUNTS[-1]} nodes: {', '.join(parts)}"


def markdown(values: dict[str, Any]) -> str:
    """One row per rate, number of engines, and way."""
    where = values["machine"]
    lines = [
        "# Weight syncs from one node to others",
        "",
        f"Written by `python -m bench.weightsync.fanout` on {where['measured_at']}, in {values['duration_s']:.0f} s: {where['processor']}, "
        f"{where['cores']} cores, load {values['load_before']:.1f} before; {where['versions']}. Four namespaces of one machine have a Ray "
        "node each; `tc` limits the link of each node in each direction. The trainer is on one node, engines are on nodes of their own; "
        "bfloat16, one bucket, engines generate during the sync.",
        "",
        f"Seconds: the median of {values['repeat'] * PAIRS} syncs, in {PAIRS} rounds in which the ways alternate; ratio: to the chain, of "
        "the medians of a round. Socket: the same model as bare bytes through one socket between two nodes; link: that over the sync. "
        f"Sent are the MiB of the network interfaces per sync. TCP sends the bucket {values['repeat'] + 3} times in {values['repeat'] + 2} "
        "syncs, once as its test at the start.",
        "",
        "| Mbit/s | MiB | engines | way | seconds | ratio | socket, s | link | stall, s | hidden, s | trainer sent | engine nodes sent |",
        "|---:|---:|---:|---|---:|---|---:|---:|---:|---:|---:|---|",
    ]
    for row in values["rows"]:
        for way in WAYS:
            found = row[way]
            home, *others = (f"{sent / 2**20:.1f}" for sent in found["sent_bytes"])
            lines.append(
                f"| {row['mbit']:,} | {row['mib']} | {row['engines']} | {way} | {found['median_s']:.3f} | "
                f"{spread(row['ratios'][way]) if way != OWN else ''} | {row['socket_s']:.3f} | {row['socket_s'] / found['median_s']:.0%} | "
                f"{found['stall_s']:.3f} | {found['hidden_s']:.3f} | {home} | {', '.join(others)} |"
            )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
