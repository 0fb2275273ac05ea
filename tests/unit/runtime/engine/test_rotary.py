"""Which computation rotates a query on CPU."""

from __future__ import annotations

import numpy as np

from rljob_runtime.engine.vllm.rotary import by_dimensions


def test_queries_of_three_dimensions_do_not_reach_the_kernel() -> None:
    rotate = by_dimensions(lambda *given: ("kernel", *given), lambda *given: ("native", *given))
    flat, latent = np.zeros((5, 12)), np.zeros((5, 3, 4))
    assert rotate("self", "positions", flat, "key") == ("kernel", "self", "positions", flat, "key")
    assert rotate("self", "positions", latent)[0] == "native"
