"""Shared memory of vLLM's message queues between the processes of one engine.

Whoever made a queue removes its name from ``/dev/shm`` when it ends in order. Engines are killed when a run ends, or when one of them is
replaced, and the memory would stay until the machine restarts. Only the start of an engine opens queues by their names; what is mapped
stays as it is without one, and is freed with the last process.
"""

from __future__ import annotations

import gc

from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer


def remove_names(worker: object = None) -> None:
    """In each process, once all of them have opened their queues; ``worker`` is what vLLM passes in those of shards."""
    frozen = gc.get_freeze_count() > 0  # vLLM freezes what it has started with, which is not listed then
    if frozen:
        gc.unfreeze()
    queues = [found for found in gc.get_objects() if type(found) is ShmRingBuffer]  # isinstance would ask lazy modules for their class
    if frozen:
        gc.freeze()
    for made in queues:
        if made.is_creator:
            made.shared_memory.unlink()
            made.is_creator = False
