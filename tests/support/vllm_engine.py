"""A real vLLM engine in the process of the test, in the environment that its worker would have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rljob_runtime.engine.protocol import EngineConfig
from rljob_runtime.engine.vllm.engine import VllmEngine
from rljob_runtime.engine.vllm.environment import ENVIRONMENT_TO_UNSET, engine_environment


@contextmanager
def running(config: EngineConfig) -> Iterator[VllmEngine]:
    """The engine until the end of the block."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ENVIRONMENT_TO_UNSET:
            patch.delenv(name, raising=False)
        for name, value in engine_environment(config).items():
            patch.setenv(name, value)
        engine = VllmEngine(config)
        yield engine
        engine.shutdown()


def forget_loads(engine: VllmEngine, *, drops_copies: bool = True, writes_whole: bool = False) -> None:
    """As before its first update: how weights are loaded is to be recorded; ``writes_whole`` as in jobs, else whole updates are loaded."""
    from rljob_runtime.engine.vllm.patched_updates import PatchedUpdates

    assert engine.loop is not None
    engine.loop.weights.patched = PatchedUpdates(drops_copies=drops_copies, writes_whole=writes_whole)
