"""What an optimizer's step takes besides its states, and what the samples of a training step are in host memory."""

from __future__ import annotations

from rljob_api.memory.model import Kind, Need
from rljob_api.memory.shape import DecoderShape
from rljob_api.memory.units import show_count
from rljob_api.v1alpha1.learning import Training
from rljob_api.vocabulary import OptimizerStateDType, RouterReplay

CPU_STRETCH_NUMBERS, CUDA_STRETCH_NUMBERS = 2**17, 2**23
"""``rljob_runtime.training.bfloat16_adamw.STRETCH_NUMBERS``."""


def stepping(training: Training, parameters: int, *, on_cuda: bool) -> tuple[Need, ...]:
    """Of bfloat16 moments a stretch in float32, and the noise by which it is rounded. ``parameters``: trained ones of the process."""
    if training.optimizer_state_dtype is OptimizerStateDType.FLOAT32:
        return ()
    stretch = min(parameters, CUDA_STRETCH_NUMBERS if on_cuda else CPU_STRETCH_NUMBERS)
    formula = f"{show_count(stretch)} x 2 x (4 + 4) B"
    return (Need(kind=Kind.WORKSPACE, name="moments being stepped", formula=formula, num_bytes=stretch * 2 * (4 + 4)),)


def routes(training: Training, decoder: DecoderShape | None, tokens: int) -> tuple[Need, ...]:
    """With router replay the experts of the tokens that a process gets for a step: as they come, and once more in micro-batches."""
    if decoder is None or training.router_replay is RouterReplay.DISABLED:
        return ()
    need = Need(
        kind=Kind.WORKSPACE,
        name="routes of a step",
        formula=f"{show_count(tokens)} tokens x {decoder.route_bytes:,} B x 2",
        num_bytes=2 * tokens * decoder.route_bytes,
        remedy="training.routerReplay: Disabled",
    )
    return (need,)
