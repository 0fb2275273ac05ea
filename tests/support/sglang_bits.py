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
UNIT = 64
"""SGLang pads the rows of the vocabulary to a multiple of this; on CPU with ranks, each one's neurons of an MLP, too."""


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


def expected_bits(tensors: Mapping[str, torch.Tensor], rank: int = 0, ranks: int = 1) -> dict[str, str]:
    """The same of the trainer's tensors as one rank of SGLang holds them: queries, keys and values in one tensor, gate and up in one.

    With ranks each has its rows or columns. Attention is divided by key heads: the tests' models have one, so the first rank has all of it,
    and the others have what SGLang pads with.
    """
    held: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        fused = next((whole for whole, parts in FUSED.items() if any(f".{part}." in name for part in parts)), None)
        if fused is None:
            held[name] = _share(name, tensor, rank, ranks)
            continue
        first = FUSED[fused][0]
        if f".{first}." in name:
            parts = [name.replace(first, part) for part in FUSED[fused]]
            held[name.replace(first, fused)] = torch.cat([_share(part, tensors[part], rank, ranks) for part in parts])
    return {name: _checksum(tensor) for name, tensor in held.items()}


def _share(name: str, tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """A rank's part of one of the trainer's tensors."""
    if name in VOCABULARY:
        tensor = torch.nn.functional.pad(tensor, (0, 0, 0, -len(tensor) % UNIT))
    if "self_attn" in name:
        return tensor if rank == 0 else torch.zeros_like(tensor)
    if "norm" in name:
        return tensor
    missing = -max(tensor.shape) % (UNIT * ranks) if ".mlp." in name and ranks > 1 else 0
    if "down_proj" in name:
        return torch.nn.functional.pad(tensor, (0, missing)).chunk(ranks, dim=1)[rank]
    return torch.nn.functional.pad(tensor, (0, 0, 0, missing)).chunk(ranks)[rank]


def _checksum(tensor: torch.Tensor) -> str:
    """As ``sglang.srt.managers.mm_utils.tensor_hash`` computes it on CPU: the first 8 bytes of SHA-256."""
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def check_bits_after_updates(engine: SglangEngine, first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor]) -> None:
    """After dense, mixed and sparse updates every parameter has the bits of the trainer's.

    Args:
        engine: computes in the dtype of the tensors.
        first: parameters of a model by name.
        second: others. The engine has ``first`` at the end.
    """
    ranks = len(served_bits(engine))

    def bits(tensors: Mapping[str, torch.Tensor]) -> list[dict[str, str]]:
        return [expected_bits(tensors, rank, ranks) for rank in range(ranks)]

    push_whole(engine, second)
    assert served_bits(engine) == bits(second)
    sparse = SparseUpdates(engine)
    assert not any(sparse.push(first, engine.version() + 1))
    assert served_bits(engine) == bits(first)
    changed = {name: tensor.clone() for name, tensor in first.items()}
    for name, tensor in changed.items():
        if "layers.0.mlp.down_proj" in name:
            tensor += 1.0
        else:
            tensor.view(-1)[::50] *= 1.5
    assert set(sparse.push(changed, engine.version() + 1)) == {True, False}, "the test is of a mixed update"
    assert served_bits(engine) == bits(changed)
    for tensor in changed.values():
        tensor.view(-1)[7::90] = -1.25
    assert all(sparse.push(changed, engine.version() + 1))
    assert served_bits(engine) == bits(changed)
    push_whole(engine, first)
    assert served_bits(engine) == bits(first)
