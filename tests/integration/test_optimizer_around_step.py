"""Two ranks whose AdamW states come for the step alone: what one of them cannot load, none of them steps with.

The ranks are real processes over gloo, forks of this file's script (``rank_processes``).
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from rljob_runtime.errors import OffloadError
from rljob_runtime.training.config import PolicyConfig
from rljob_runtime.training.worker import PolicyWorker
from tests.integration.rank_processes import fork_ranks, join, run_script
from tests.integration.test_trainer_ranks import make_batch, make_model
from tests.support.offload_fakes import FailingCopies, bytes_of


def run_rank(rank: int, port: int, folder: str, fails: bool) -> dict[str, object]:
    """A step, one that fails on rank 0 alone if asked, and two more."""
    worker = PolicyWorker(PolicyConfig(model_path=folder, learning_rate=1e-2, optimizer_around_step=True), rank, 2)
    join(worker, port)
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


def main(rank: int, ports: list[int], folder: Path) -> None:
    """Without a failure and with one."""
    found = [run_rank(rank, port, str(folder / "model"), fails) for port, fails in zip(ports, (False, True), strict=True)]
    (folder / f"{rank}.json").write_text(json.dumps(found))


def test_an_update_is_made_on_all_ranks_or_on_none(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    run_script(__file__, tmp_path)
    plain, failed = zip(*(json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)), strict=True)
    for rank in (0, 1):
        assert failed[rank]["untouched"]
        assert str(failed[rank]["error"]).startswith("update 0 of step 1 was not made on any rank: ")
        assert {name: failed[rank][name] for name in ("norms", "weights")} == plain[rank], "they train on as if nothing had been"
    assert "copy 1 failed" in str(failed[0]["error"]), "the second try failed too"
    assert [result["rolled_back"] for result in failed] == [True, True]
    assert str(failed[1]["error"]).endswith("the optimizer of 1 other rank(s) could not be loaded")


if __name__ == "__main__":
    fork_ranks(2, 2, main)
