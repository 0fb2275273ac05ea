"""Stands in for ``sgl_kernel``, SGLang's package of compiled kernels, where no accelerator is and no wheel of it fits: CPU machines.

It stands at one border: SGLang 0.5.23 with ``--device cpu`` imports names of this package at module level, whether or not they are ever
called, and does not start without it. With ``--attention-backend torch_native``, ``--sampling-backend pytorch`` and no AMX all numerics
are plain torch; of the kernels only the one below is called. Every other name exists, so that imports succeed, and refuses to be called.

Because each of SGLang's processes imports it before it makes groups, it also has them share gloo's thread.

The folder above is put on ``PYTHONPATH`` of the server's process on CPU machines only, never of a worker and never where an accelerator
computes. Nothing of RLJob imports it.
"""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__version__ = "0.0.0"
LONE_GROUPS = Path(__file__).parents[4] / "lone_groups.py"


def share_loop_of_lone_groups() -> None:
    """Of SGLang's groups, nine in each scheduler; by the file, because RLJob is not installed where SGLang is."""
    spec = spec_from_file_location("rljob_lone_groups", LONE_GROUPS)
    assert spec is not None
    assert spec.loader is not None
    made = module_from_spec(spec)
    spec.loader.exec_module(made)
    made.share_loop_of_lone_groups()


share_loop_of_lone_groups()


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write where each request's new tokens lie in the cache: row r of the table gets its stretch of ``out_cache_loc``.

    Args:
        req_pool_indices: shape (requests,): their rows.
        req_to_token: shape (rows, ``pool_len``), written.
        start_offset: shape (requests,): first column of each.
        end_offset: shape (requests,): one past the last column of each.
        out_cache_loc: stretches of all requests, one after another.
        pool_len: columns of the table.
    """
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """Any other kernel: there to be imported."""
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} was called, and this machine has no compiled kernels of SGLang; remove the option "
            "that needs it from engine.extraArgs"
        )

    return absent
