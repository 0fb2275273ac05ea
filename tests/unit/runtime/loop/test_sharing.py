"""Batches are sent once per data-parallel share, and small ones in the call itself."""

from typing import Any

import numpy as np
import pytest

from rljob_runtime.cluster.protocol import INLINE_BYTES
from rljob_runtime.loop.sharing import by_worker
from rljob_runtime.sampling_mask import SamplingMask


class Sharing:
    """Keeps what it was asked to share."""

    def __init__(self) -> None:
        self.shared: list[Any] = []

    def share(self, value: Any) -> Any:
        self.shared.append(value)
        return ("shared", len(self.shared))


@pytest.mark.parametrize("together", [1, 2, 3])
async def test_ranks_of_a_share_are_given_the_same_object(together: int) -> None:
    workers: Any = [Sharing() for _ in range(2 * together)]
    large = np.zeros(INLINE_BYTES, dtype=np.uint8)
    mask = SamplingMask(token_ids=np.zeros(INLINE_BYTES, dtype=np.int32), counts=np.array([INLINE_BYTES], dtype=np.int32))
    shares = [(large, mask, 1.0), (large, mask, 2.0)]
    found = await by_worker(workers, shares)
    assert [arguments[2] for arguments in found] == [1.0] * together + [2.0] * together
    assert all(one is other for i, one in enumerate(found) for other in found[i - i % together : i + 1])
    assert [len(worker.shared) for worker in workers] == [2, *[0] * (together - 1)] * 2


async def test_small_ones_are_not_shared() -> None:
    workers: Any = [Sharing(), Sharing()]
    share = (np.zeros(10), 1.0)
    assert await by_worker(workers, [share]) == [share, share]
    assert not any(worker.shared for worker in workers)
