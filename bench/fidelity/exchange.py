"""What the bench and the peers' processes exchange on disk; imported by both, so it needs numpy alone.

A folder holds ``batches.npz`` with an array for each ``batch|name``, and ``cases.json``, a list of ``{"name", "batches", "given",
"settings"}`` for one peer. The peer writes an ``.npz`` with an array for each ``case|batch|name`` of :data:`RESULTS`, and its versions.
Arrays are float32, shape (S, R) for S responses padded to R tokens, unless another shape is named.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Batch = Mapping[str, Array]
"""``lengths`` (S,) int: tokens of each response; ``mask`` 1 where a token is trained; ``groups`` (S,) int: equal means same prompt;
``scores`` (S,); log-probs ``logprobs`` of the policy being trained, ``proximal`` of the trainer at the beginning of the step,
``behavior`` of the engine, ``reference``; ``entropy`` of the policy; ``values`` of the critic, ``old_values`` at the beginning of the
step, ``returns``; ``token_advantages`` and ``sequence_advantages``, the second with one number a response; ``logits`` (S, R, V) and the
``tokens`` (S, R) int sampled from them, which have nothing to do with the log-probs above."""
Result = dict[str, Array]

RESULTS = (
    "advantages",
    "returns",
    "loss",
    "d_logprobs",
    "d_entropy",
    "value_loss",
    "d_values",
    "head_logprobs",
    "head_entropy",
    "d_logits",
)
"""Advantages and returns are 0 where the mask is; ``d_x`` is the gradient of the loss (of the value loss for values) with respect to x;
losses have the shape (). ``head_x`` are computed from logits, and ``d_logits`` is the gradient of the sum of ``token_advantages`` times
``head_logprobs`` and ``returns`` times ``head_entropy`` over trained tokens."""
_VERSIONS = "versions"


def gradient(tensor: Any) -> Array:
    """Of a tensor of torch that a loss was sent back through."""
    assert tensor.grad is not None
    return tensor.grad.numpy()


def write_batches(folder: Path, batches: Mapping[str, Batch]) -> None:
    """Write ``batches.npz``."""
    arrays: dict[str, Any] = {f"{name}|{key}": array for name, batch in batches.items() for key, array in batch.items()}
    np.savez_compressed(folder / "batches.npz", **arrays)


def read_batches(folder: Path) -> dict[str, dict[str, Array]]:
    """Read ``batches.npz``."""
    batches: dict[str, dict[str, Array]] = {}
    with np.load(folder / "batches.npz") as stored:
        for key in stored.files:
            batch, name = key.split("|")
            batches.setdefault(batch, {})[name] = stored[key]
    return batches


def read_results(file: Path) -> tuple[dict[tuple[str, str], Result], dict[str, str]]:
    """Results by case and batch, and versions by package."""
    results: dict[tuple[str, str], Result] = {}
    with np.load(file) as stored:
        versions = json.loads(str(stored[_VERSIONS]))
        for key in stored.files:
            if key != _VERSIONS:
                case, batch, name = key.split("|")
                results.setdefault((case, batch), {})[name] = stored[key]
    return results, versions


def serve(folder: Path, output: Path, run: Callable[[str, Mapping[str, Any], Batch], Result], packages: tuple[str, ...]) -> None:
    """A peer's whole life: run every case on its batches and write the results.

    Args:
        folder: with ``batches.npz`` and ``cases.json``.
        output: the file to write.
        run: from which advantages are given (``token``, ``sequence``), a case's settings and a batch to the results.
        packages: whose versions are noted.
    """
    batches = read_batches(folder)
    arrays: dict[str, Any] = {}
    for case in json.loads((folder / "cases.json").read_text()):
        for batch in case["batches"]:
            result = run(case["given"], case["settings"], batches[batch])
            arrays |= {f"{case['name']}|{batch}|{key}": np.asarray(value, dtype=np.float32) for key, value in result.items()}
    versions = {package: metadata.version(package) for package in packages}
    arrays[_VERSIONS] = np.array(json.dumps(versions))
    np.savez_compressed(output, **arrays)
