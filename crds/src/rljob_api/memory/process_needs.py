"""What a training process takes whatever its model."""

from rljob_api.memory.model import Kind, Need
from rljob_api.memory.units import GIB, MIB

CUDA_PROCESS_BYTES = GIB
"""CUDA context with its kernels (about 0.5 GiB) and NCCL's buffers, outside PyTorch's allocator."""
CPU_PROCESS_BYTES = 700 * MIB
"""A process that imported torch and transformers, without its model: 702 MiB resident, measured with torch 2.13."""


def process_need(on_cuda: bool) -> Need:
    """What a training process has whatever its model."""
    if on_cuda:
        return Need(kind=Kind.PROCESS, name="CUDA context and NCCL", formula="constant", num_bytes=CUDA_PROCESS_BYTES)
    return Need(kind=Kind.PROCESS, name="Python with torch", formula="constant", num_bytes=CPU_PROCESS_BYTES)
