"""Errors of the CUDA runtime that were handled."""

from __future__ import annotations

import ctypes
import logging

import torch

logger = logging.getLogger(__name__)


def clear_last_error() -> None:
    """Reset the runtime's last error of this thread, which torch's check of its next kernel would take for that kernel's.

    Torch binds no ``cudaGetLastError``; its runtime library is in the process already, and is found by its name.
    """
    if torch.version.cuda is None:
        return
    try:
        runtime = ctypes.CDLL(f"libcudart.so.{torch.version.cuda.partition('.')[0]}")
    except OSError as error:  # torch has it linked in
        logger.warning("the CUDA runtime's last error cannot be reset: %s", error)
        return
    runtime.cudaGetLastError()
