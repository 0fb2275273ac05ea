"""Which bits SGLang's server computes with, in each of its ranks: its own checksums, compared with those of the trainer's tensors."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping

import torch

from rljob_runtime.engine.sglang.client import SglangClient
from rljob_runtime.engine.sglang.engine import SglangEngine
from tests.support.engine_contract import TIMEOUT_S
from tests.support.sparse_updates import SparseUpdates, push_whole

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
VOCABULARY = ("model.embed_tokens.weight", "lm_head.weight")
VOCABULARY_ROWS = 64
"""SGLang pads the rows of the vocabulary to a multiple of this."""


def served_bits(engine: SglangEngine) -> list[dict[str, str]]:
    """SGLang's checksums of the bytes of every parameter, by its names, of each rank."""

    async def ask() -> list[dict[str, str]]:
        client = SglangClient(engine.session.client.url)
        try:
            answer = await client.post("/weights_checker", {"action": "checksum"}, TIMEOUT_S)
        finally:
            await client.close()
        return [rank["checksums"] for rank in answer["ranks"]]

    return asyncio.run(ask())


def expected_bits(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """The same of the trainer's tensors as one rank of SGLang holds them: queries, keys and values in one tensor, gate and up in one."""
    held: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        fused = next((whole for whole, parts in FUSED.items() if any(f".{part}." in name for part in parts)), None)
        if fused is None:
            held[name] = tensor
            continue
        first, *others = FUSED[fused]
        if f".{first}." in name:
            parts = [tensor, *(tensors[name.replace(first, other)] for other in others)]
            held[name.replace(first, fused)] = torch.cat(parts)
    for name in held.keys() & set(VOCABULARY):
        missing = -len(held[name]) % VOCABULARY_ROWS
        held[name] = torch.nn.functional.pad(held[name], (0, 0, 0, missing))
    return {name: _checksum(tensor) for name, tensor in held.items()}


def _checksum(tensor: torch.Tensor) -> str:
    """As ``sglang.srt.managers.mm_utils.tensor_hash`` computes it on CPU: the first 8 bytes of SHA-256."""
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def check_bits_after_updates(engine: SglangEngine, first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> None:
    """After dense, mixed and sparse updates every parameter has the bits of the trainer's.

    Args:
        engine: with one rank, which computes in the dtype of the tensors.
        first: parameters of a model by name.
        second: others.
    """
    assert expected_bits(first).keys() == served_bits(engine)[0].keys()
    push_whole(engine, second)
    assert served_bits(engine) == [expected_bits(second)]
    sparse = SparseUpdates(engine)
    assert not any(sparse.push(first, engine.version() + 1))
    assert served_bits(engine) == [expected_bits(first)]
    changed = {name: tensor.clone() for name, tensor in first.items()}
    for name, tensor in changed.items():
        if "layers.0.mlp.down_proj" in name:
            tensor += 1.0
        else:
            tensor.view(-1)[::50] *= 1.5
    assert set(sparse.push(changed, engine.version() + 1)) == {True, False}, "the test is of a mixed update"
    assert served_bits(engine) == [expected_bits(changed)]
    for tensor in changed.values():
        tensor.view(-1)[7::90] = -1.25
    assert all(sparse.push(changed, engine.version() + 1))
    assert served_bits(engine) == [expected_bits(changed)]
    push_whole(engine, first)
    assert served_bits(engine) == [expected_bits(first)]
