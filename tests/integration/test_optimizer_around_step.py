"""Two ranks whose AdamW states come for the step alone: what one of them cannot load, none of them steps with.

The ranks are real processes over gloo: this file runs itself once per rank (``main``).
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import torch

from rljob_runtime.errors import OffloadError
from rljob_runtime.training.config import PolicyConfig
from rljob_runtime.training.worker import PolicyWorker
from tests.integration.test_trainer_ranks import make_batch, make_model
from tests.layout.tree import ROOT
from tests.support.offload_fakes import FailingCopies, bytes_of
from tests.support.pace import HANG_S
from tests.support.ports import free_ports

DEADLINE_S = HANG_S


def run_rank(rank: int, port: int, folder: str, fails: bool) -> dict[str, object]:
    """A step, one that fails on rank 0 alone if asked, and two more."""
    worker = PolicyWorker(PolicyConfig(model_path=folder, learning_rate=1e-2, optimizer_around_step=True), rank, 2)
    worker.setup("127.0.0.1", port, timeout_s=HANG_S)
    store, found = worker.ready.store, {}
    try:
        worker.train_step([make_batch(rank, 2, seed=0)], 0)
        if fails:
            copies = store.copies
            store.copies = FailingCopies(0, 1) if rank == 0 else copies
            before = digest(worker)
            try:
                worker.train_step([make_batch(rank, 2, seed=1)], 1)
            except OffloadError as error:
                found = {"error": str(error), "rolled_back": error.rolled_back, "untouched": digest(worker) == before}
            store.copies = copies
        norms = [worker.train_step([make_batch(rank, 2, seed=step)], step)["train/grad_norm"].hex() for step in (2, 3)]
        return found | {"norms": norms, "weights": digest(worker)}
    finally:
        worker.shutdown()


def digest(worker: PolicyWorker) -> str:
    """Of this rank's shards."""
    sums = hashlib.sha256()
    for parameter in worker.model.parameters():
        sums.update(bytes_of(parameter._local_tensor))
    return sums.hexdigest()


def main(rank: str, *ports: str, folder: str) -> None:
    torch.set_num_threads(1)
    print(json.dumps([run_rank(int(rank), int(port), folder, fails) for port, fails in zip(ports, (False, True), strict=True)]))


def both_ranks(folder: Path) -> list[list[dict[str, object]]]:
    """By rank: without a failure and with one."""
    ports = [str(port) for port in free_ports(2)]
    command = [sys.executable, "-m", "tests.integration.test_optimizer_around_step", str(folder)]
    running = [subprocess.Popen([*command, rank, *ports], cwd=ROOT, stdout=subprocess.PIPE, text=True) for rank in "01"]
    try:
        return [json.loads(process.communicate(timeout=DEADLINE_S)[0].splitlines()[-1]) for process in running]
    finally:
        for process in running:
            process.kill()


def test_an_update_is_made_on_all_ranks_or_on_none(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    plain, failed = zip(*both_ranks(tmp_path / "model"), strict=True)
    for rank in (0, 1):
        assert failed[rank]["untouched"]
        assert str(failed[rank]["error"]).startswith("update 0 of step 1 was not made on any rank: ")
        assert {name: failed[rank][name] for name in ("norms", "weights")} == plain[rank], "they train on as if nothing had been"
    assert "copy 1 failed" in str(failed[0]["error"]), "the second try failed too"
    assert [result["rolled_back"] for result in failed] == [True, True]
    assert str(failed[1]["error"]).endswith("the optimizer of 1 other rank(s) could not be loaded")


if __name__ == "__main__":
    main(*sys.argv[2:], folder=sys.argv[1])
