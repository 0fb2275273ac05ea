"""The sync bench: its trainer and engines do what a job's do, and its report has every way and fraction."""

from __future__ import annotations

import os
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bench.weightsync.__main__ import paired
from bench.weightsync.report import COMPARED, OWN, WAYS, headline, markdown
from bench.weightsync.world import Engine, Rows, Trainer, specs
from rljob_runtime.training.parallel import make_layout
from rljob_runtime.training.weights import pack_buckets
from rljob_runtime.weightsync.packing import pack, plan_buckets
from rljob_runtime.weightsync.parcel import checksum

STREAMED = "rljob_runtime.weightsync.transports.shared_memory"
SIZE = 32 << 20


def test_engines_have_what_the_trainer_packs_and_count_what_traveled() -> None:
    trainer, engine, manifest = Trainer(), Engine(), plan_buckets(specs(SIZE), 8 << 20)
    trainer.take_model(SIZE)
    trainer.prepare_sender(
        f"{STREAMED}:SharedSender", manifest, {"prefix": f"rljob-b{os.getpid()}-", "senders": (0,), "segments": 2, "dense_above": 1.0}
    )
    test = trainer.send_weights(-1, 0)
    engine.prepare_receiver(f"{STREAMED}:SharedReceiver", {"streams": True, "tests": [test], "sparse": True})
    for version, changed in ((1, 1.0), (2, 0.01)):
        trainer.step(changed)
        engine.begin_update(manifest, version)
        for bucket in manifest.buckets:
            engine.load_bucket(bucket.index, trainer.send_weights(version, bucket.index))
        assert engine.finish_update(1.0, "recompute") == version
        assert engine.weights() == [checksum(trainer.pack_buckets({0: bucket})) for bucket in manifest.buckets]
        assert engine.stats()["update_bytes"] == pytest.approx(SIZE if version == 1 else SIZE * 0.03, rel=0.01)
    trainer.close_sender()


def test_a_job_packs_the_rows_of_several_ranks() -> None:
    named = specs(1 << 20)
    tensors = {name: torch.randn(shape).to(torch.bfloat16) for name, _, shape in named}
    (bucket,) = plan_buckets(named, 8 << 20).buckets
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        packed = pack_buckets(cast(Any, Rows(tensors, make_layout(torch.device("cpu")))), {0: bucket})
    finally:
        dist.destroy_process_group()
    expected = np.zeros(bucket.size_bytes, dtype=np.uint8)
    pack(bucket, tensors, expected)
    assert np.array_equal(cast(Any, packed), expected)


def test_the_report_has_every_way_and_what_changed() -> None:
    def found(seconds: float) -> dict[str, float]:
        return {"seconds": seconds, "median_s": 2 * seconds, "stall_s": seconds / 4, "hidden_s": seconds / 2, "bytes": 100 * seconds}

    row: dict[str, Any] = {"mib": 1024, "memcpy_s": 0.1, "bare_s": 0.15, "ratios": {way: [2.0, 3.0, 7.0] for way in COMPARED}} | {
        way: found(0.2 * (i + 1)) for i, way in enumerate(WAYS)
    }
    row[OWN]["all_s"] = [0.8] * 9
    change = {f"{way}, {kind}": found(0.5 if kind == "dense" else 0.1) for way in WAYS[:3] for kind in ("dense", "sparse")}
    values: dict[str, Any] = {
        "machine": {"measured_at": "now", "processor": "P", "cores": 2, "versions": {}},
        "duration_s": 1.0, "load_before": 0.0, "repeat": 3, "engines": 2, "bucket_bytes": 2**28, "sparse_mib": 256,
        "sizes": [row], "changes": [{"changed": 0.01} | change],
    }  # fmt: skip
    values["headline"] = headline(values)
    assert values["headline"].startswith(
        "1,024 MiB to 2 engines that generate in 0.80 s through shared memory (median of 9), 3.5 times that by gloo's broadcast, "
        "1.5 through the object store, 3.0 by a file, 3.0 as pickled objects; with idle engines the fastest reaches 75% of the speed"
    )
    text = markdown(values)
    assert "| 1,024 | ObjectStore | 0.6000 | 1.2000 | 1.79 | 25% | 6.0 | 0.1500 | 0.3000 |" in text
    assert "| 1.0% | 0.500 | 0.100 | 0.500 | 0.100 | 20.00% |" in text
    assert "| 1,024 | 3.00 (2.00 to 7.00, 3 pairs) | 3.00 (2.00 to 7.00, 3 pairs) |" in text
    assert sum(line.startswith("| 1,024 |") for line in text.splitlines()) == len(WAYS) + 1


def test_rounds_of_a_way_are_one_row_and_each_round_gives_a_ratio() -> None:
    def part(*seconds: float) -> dict[str, Any]:
        return {"seconds": min(seconds), "median_s": sorted(seconds)[len(seconds) // 2], "all_s": list(seconds)}

    rounds = {OWN: [part(1.0, 2.0, 3.0) | {"stall_s": 0.5}, part(0.8, 4.0, 5.0) | {"stall_s": 0.1}]}
    rounds |= {way: [part(4.0, 4.0, 4.0), part(6.0, 6.0, 6.0)] for way in COMPARED}
    row = paired(rounds)
    assert row[OWN] == {"seconds": 0.8, "median_s": 2.5, "all_s": [1.0, 2.0, 3.0, 0.8, 4.0, 5.0], "stall_s": 0.1}
    assert row["ratios"] == {way: [2.0, 1.5] for way in COMPARED}
