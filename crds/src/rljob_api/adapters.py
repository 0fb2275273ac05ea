"""Adapters that engines serve beside the weights (``weightSync.adapters: Served``). Pure."""

from __future__ import annotations

from rljob_api.v1alpha1.operations import AdapterSync
from rljob_api.v1alpha1.rljob import RLJobSpec

SERVED_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What ``max_lora_rank`` of vLLM 0.32 may be (``vllm.config.lora.MaxLoRARanks``); adapters of a smaller rank are padded."""


def serves_adapters(spec: RLJobSpec) -> bool:
    """Whether engines get adapters alone."""
    return spec.model.lora is not None and spec.weight_sync.adapters is AdapterSync.SERVED


def padded_rank(rank: int) -> int:
    """What an adapter of that rank takes in an engine; ``rank`` is at most the largest of :data:`SERVED_RANKS`."""
    return next(allowed for allowed in SERVED_RANKS if allowed >= rank)
