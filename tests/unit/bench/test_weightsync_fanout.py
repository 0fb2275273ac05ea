"""The report of syncs to several nodes: medians, ratios of a round, and what each node sent."""

from __future__ import annotations

from typing import Any

from bench.weightsync.fanout import WAYS, headline, markdown, paired


def part(seconds: float, sent: list[float]) -> dict[str, Any]:
    return {
        "all_s": [seconds],
        "median_s": seconds,
        "stall_s": 0.01,
        "hidden_s": seconds - 0.01,
        "sent_bytes": [one * 2**20 for one in sent],
    }


def test_the_report_has_every_way() -> None:
    chain, gloo, store = WAYS
    rounds = {
        chain: [part(seconds, [64, 64, 64, 0]) for seconds in (0.5, 0.6, 0.7)],
        gloo: [part(2 * seconds, [128, 64, 0, 0]) for seconds in (0.5, 0.6, 0.7)],
        store: [part(3 * seconds, [96, 64, 32, 0]) for seconds in (0.5, 0.6, 0.7)],
    }
    row = {"mbit": 1000, "mib": 64, "engines": 3, "socket_s": 0.54} | paired(rounds)
    values = {
        "machine": {"measured_at": "now", "processor": "P", "cores": 2, "versions": {}},
        "duration_s": 1.0, "load_before": 0.0, "repeat": 1, "rows": [row],
    }  # fmt: skip
    assert headline(values) == "to 3 nodes: 0.60 s in a chain instead of 1.20 s by gloo's broadcast at 1,000 Mbit/s (64 MiB)"
    text = markdown(values)
    assert "| 1,000 | 64 | 3 | TCP, chain | 0.600 |  | 0.540 | 90% | 0.010 | 0.590 | 64.0 | 64.0, 64.0, 0.0 |" in text
    row_of_gloo = "| 1,000 | 64 | 3 | TCP, gloo's broadcast | 1.200 | 2.00 (2.00 to 2.00, 3 pairs) | 0.540 | 45% | 0.010 | 1.190 | 128.0 | "
    assert f"{row_of_gloo}64.0, 0.0, 0.0 |" in text
