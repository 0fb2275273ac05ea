"""What a trainer, reference or critic process answers when its model is loaded.

Apart from the classes that do the work, because the driver reads the answer, and a class is imported with its module: in
``training.rank`` it would bring torch and transformers, seconds of imports, into a process that computes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What was loaded."""

    folder: str
    """Local folder of the loaded checkpoint."""
    model_type: str
    num_parameters: int
    """Of the whole model, tied weights once."""
    vocab_size: int
    max_positions: int | None
    """Longest sequence the model was made for; None if its config does not say."""
    tied_embeddings: bool
    device: str
    load_s: float
