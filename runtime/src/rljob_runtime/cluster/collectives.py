"""Which errors of a worker say that its process group is broken, by another rank's doing.

A rank that ends closes its connections: gloo fails in the others at once, NCCL after ``TORCH_NCCL_ASYNC_ERROR_HANDLING`` has seen it. One
that hangs makes their collectives run into the group's timeout. Either way the rank that raises is not the one to blame, and the driver
often hears from it before Ray tells of the one that ended.
"""

from __future__ import annotations

DIST_ERRORS = frozenset({"DistBackendError", "DistNetworkError"})
"""Classes of ``torch.distributed`` (subclasses of ``DistError``), by name: this package does not import torch."""
GLOO = ("/gloo/transport/", "Connection closed by peer", "Application timeout caused pair closure")
"""Of gloo's messages, which torch raises as plain RuntimeErrors: ``[.../third_party/gloo/gloo/transport/tcp/pair.cc:547] ...``."""
MAX_CHARACTERS = 300


def is_broken_group(error: BaseException) -> bool:
    """Whether a foreign error of a worker was raised by a collective whose group is broken."""
    if any(kind.__name__ in DIST_ERRORS for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in GLOO)


def first_line(error: BaseException) -> str:
    """What it says, without the stack of C++ frames that torch appends."""
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:MAX_CHARACTERS]
