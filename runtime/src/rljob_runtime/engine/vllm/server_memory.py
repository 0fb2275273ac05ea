"""What vLLM's server runs inside each of its workers to give device memory back: a worker extension, called over HTTP.

On CUDA the server's own sleep moves the memory and this measures it. On CPU, which has no sleep mode, cache and weights are freed as
those of a rollout engine (:mod:`.memory`), and the weights are read again from the files that the server started from.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from vllm.platforms import current_platform

from rljob_runtime.engine.vllm import memory
from rljob_runtime.engine.vllm.packed_weights import repack_shared_weights


class MovableMemory:
    """Methods that every worker of the server gets; ``self`` is vLLM's worker."""

    def rljob_snapshot(self) -> dict[str, int]:
        """Fields of a :class:`~rljob_runtime.offload.states.MemorySnapshot`."""
        worker: Any = self
        return asdict(memory.cpu_snapshot(worker) if current_platform.is_cpu() else memory.sleep_snapshot(worker))

    def rljob_release(self) -> None:
        """CPU: free cache and weights. Nothing may be computed until :meth:`rljob_restore`."""
        memory.free_cache(self)
        memory.free_weights(self)
        memory.return_pages(self)

    def rljob_restore(self) -> None:
        """CPU: take them again, the cache empty and the weights as they were."""
        worker: Any = self
        memory.restore_weights(worker)
        with torch.inference_mode():
            worker.reload_weights()
            repack_shared_weights(worker.model_runner.get_model())
        memory.restore_cache(worker)
