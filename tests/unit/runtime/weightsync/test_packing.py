"""Packed buckets: layout invariants as properties, and the round trip bit by bit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_runtime.errors import WeightSyncError
from rljob_runtime.records import WeightManifest
from rljob_runtime.weightsync import packing, parcel
from rljob_runtime.weightsync.packing import DTYPE_BYTES, as_byte_tensor, layer_groups, pack, plan_buckets, tensor_bytes, unpack
from rljob_runtime.weightsync.parcel import Digest, checksum

Spec = tuple[str, str, tuple[int, ...]]

NAMES = st.one_of(
    st.builds("model.layers.{}.mlp.{}.weight".format, st.integers(0, 5), st.sampled_from(["up", "down", "experts.3.gate"])),
    st.sampled_from(["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight", "scale"]),
)
SPECS = st.lists(
    st.tuples(NAMES, st.sampled_from(sorted(DTYPE_BYTES)), st.lists(st.integers(0, 9), max_size=3).map(tuple)),
    min_size=1,
    max_size=14,
    unique_by=lambda spec: spec[0],
)


def random_bits(spec: Spec, rng: np.random.Generator) -> torch.Tensor:
    """A tensor of the spec with random bytes, so that NaN payloads and negative zeros travel too."""
    name, dtype, shape = spec
    data = rng.integers(0, 2 if dtype == "bool" else 256, tensor_bytes(name, dtype, shape), dtype=np.uint8)
    return torch.frombuffer(bytearray(data.tobytes() + bytes(8)), dtype=torch.uint8)[: data.size].view(getattr(torch, dtype)).view(shape)


def bits(tensor: torch.Tensor) -> bytes:
    """The tensor's bytes."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def slots_by_name(manifest: WeightManifest) -> dict[str, int]:
    """Bucket index of each name."""
    return {slot.name: bucket.index for bucket in manifest.buckets for slot in bucket.slots}


@given(specs=SPECS, bucket_bytes=st.integers(1, 3000), align=st.sampled_from([8, 64, 256]))
def test_slots_are_complete_aligned_disjoint_and_bounded(specs: list[Spec], bucket_bytes: int, align: int) -> None:
    """Every tensor in one slot, slots in order without overlap, buckets within the bound unless one tensor alone breaks it."""
    manifest = plan_buckets(specs, bucket_bytes, align)
    placed = [(slot.name, slot.dtype, slot.shape) for bucket in manifest.buckets for slot in bucket.slots]
    assert sorted(placed) == sorted(specs)
    assert [bucket.index for bucket in manifest.buckets] == list(range(len(manifest.buckets)))
    for bucket in manifest.buckets:
        end = 0
        for slot in bucket.slots:
            assert slot.offset_bytes % align == 0
            assert slot.offset_bytes >= end
            assert slot.size_bytes == tensor_bytes(slot.name, slot.dtype, slot.shape)
            end = slot.offset_bytes + slot.size_bytes
        assert bucket.size_bytes == end
        assert bucket.size_bytes <= bucket_bytes or sum(slot.size_bytes > 0 for slot in bucket.slots) == 1


@given(specs=SPECS, bucket_bytes=st.integers(1, 3000))
def test_a_layer_is_split_only_when_larger_than_a_bucket(specs: list[Spec], bucket_bytes: int) -> None:
    """Names of one decoder layer share a bucket whenever they fit into one."""
    manifest = plan_buckets(specs, bucket_bytes)
    where = slots_by_name(manifest)
    sizes = {name: tensor_bytes(name, dtype, shape) for name, dtype, shape in specs}
    for group in layer_groups([name for name, _, _ in specs]):
        packed_bytes = 0
        for name in group:
            packed_bytes = -(-packed_bytes // 64) * 64 + sizes[name]
        if packed_bytes <= bucket_bytes:
            assert len({where[name] for name in group}) == 1


@settings(max_examples=60)
@given(specs=SPECS, bucket_bytes=st.integers(1, 3000), seed=st.integers(0, 2**32 - 1))
def test_round_trip_keeps_every_bit(specs: list[Spec], bucket_bytes: int, seed: int) -> None:
    """Unpacked views carry the bits, dtypes and shapes that were packed, from read-only memory too."""
    rng = np.random.default_rng(seed)
    tensors = {spec[0]: random_bits(spec, rng) for spec in specs}
    received: dict[str, torch.Tensor] = {}
    for bucket in plan_buckets(specs, bucket_bytes).buckets:
        out = np.zeros(bucket.size_bytes, dtype=np.uint8)
        pack(bucket, tensors, out)
        out.flags.writeable = False
        received.update(unpack(bucket, out))
    assert received.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert received[name].dtype == tensor.dtype
        assert received[name].shape == tensor.shape
        assert bits(received[name]) == bits(tensor)


def test_unpack_shares_memory_and_keeps_it_alive() -> None:
    """Views lie on the buffer itself, also where it is read-only, and outlive the caller's reference."""
    (bucket,) = plan_buckets([("w", "float32", (3,))], 64).buckets
    data = np.frombuffer(np.array([1.0, 2.0, 3.0], dtype=np.float32).tobytes(), dtype=np.uint8)
    assert not data.flags.writeable
    address = data.__array_interface__["data"][0]
    (_, view) = next(iter(unpack(bucket, data)))
    assert view.data_ptr() == address
    del data
    assert view.tolist() == [1.0, 2.0, 3.0]
    assert as_byte_tensor(np.zeros(0, dtype=np.uint8)).numel() == 0


def test_pack_casts_to_the_slot_and_accepts_strided_tensors() -> None:
    """A float32 master weight travels as bfloat16 when the manifest says so; a transposed tensor as its values."""
    (bucket,) = plan_buckets([("w", "bfloat16", (2, 3))], 64).buckets
    source = torch.arange(6, dtype=torch.float32).reshape(3, 2).t()
    out = np.zeros(bucket.size_bytes, dtype=np.uint8)
    pack(bucket, {"w": source}, out)
    assert torch.equal(dict(unpack(bucket, out))["w"], source.to(torch.bfloat16))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("hashers", [None, 2])
def test_a_bucket_is_hashed_while_it_is_packed(threads: int, hashers: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces, casts, strided and empty tensors give the checksum of the whole; what is said to be packed is final."""
    monkeypatch.setattr(packing, "PIECE_BYTES", 64)
    monkeypatch.setattr(parcel, "BLOCK_BYTES", 96)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    shapes = {"plain": (37, 3), "cast": (5, 11), "strided": (9, 6), "empty": (0, 3), "scalar": (), "last": (64,)}
    (bucket,) = plan_buckets([(name, "bfloat16", shape) for name, shape in shapes.items()], 4096).buckets
    tensors = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}
    tensors |= {"cast": torch.randn(5, 11), "strided": torch.randn(6, 9).to(torch.bfloat16).t()}
    whole = np.zeros(bucket.size_bytes, dtype=np.uint8)
    pack(bucket, tensors, whole)
    out, ends = np.zeros_like(whole), [0]
    with ThreadPoolExecutor(2) as pool:
        digest = Digest(out, pool if hashers else None)

        def packed(end: int) -> None:
            assert bytes(out[:end]) == bytes(whole[:end])
            ends.append(end)
            digest.advance(end)

        pack(bucket, tensors, out, packed)
        assert digest.finished() == checksum(whole)
    assert ends == sorted(ends)
    assert ends[-1] == bucket.size_bytes
    pieces = len(ends) - 1 - len(shapes)
    assert pieces == (4 if threads == 1 else 0)  # 222 and 128 bytes are plain and longer than a piece
    for index in range(whole.size):
        changed = whole.copy()
        changed[index] ^= 1
        assert checksum(changed) != checksum(whole)
    assert checksum(whole[:96]) != checksum(whole[:97]) != checksum(np.append(whole[:97], np.uint8(0)))


def test_layers_keep_first_appearance_order() -> None:
    """Experts belong to their layer; names without an index stand alone."""
    names = ["embed", "model.layers.1.a", "model.layers.0.a", "model.layers.1.experts.7.b", "norm"]
    assert layer_groups(names) == [["embed"], ["model.layers.1.a", "model.layers.1.experts.7.b"], ["model.layers.0.a"], ["norm"]]


@pytest.mark.parametrize(
    ("specs", "bucket_bytes", "align", "message"),
    [
        ([], 64, 64, "0 tensors"),
        ([("w", "float32", (1,)), ("w", "float32", (1,))], 64, 64, "2 tensors with 1 distinct"),
        ([("w", "complex64", (1,))], 64, 64, "dtype complex64"),
        ([("w", "float32", (-1,))], 64, 64, "negative"),
        ([("w", "float32", (1,))], 0, 64, "bucket_bytes=0"),
        ([("w", "float32", (1,))], 64, 0, "align=0"),
    ],
)
def test_plan_refuses_what_it_cannot_lay_out(specs: list[Spec], bucket_bytes: int, align: int, message: str) -> None:
    """Each refusal names the value at fault."""
    with pytest.raises(WeightSyncError, match=message):
        plan_buckets(specs, bucket_bytes, align)


def test_pack_and_unpack_refuse_mismatches() -> None:
    """Missing tensor, other shape, small buffer, wrong size: an error that names both sides, never a silent cut."""
    (bucket,) = plan_buckets([("w", "float32", (4,))], 64).buckets
    out = np.zeros(16, dtype=np.uint8)
    with pytest.raises(WeightSyncError, match="w is missing"):
        pack(bucket, {}, out)
    with pytest.raises(WeightSyncError, match=r"\(5,\).*\(4,\)"):
        pack(bucket, {"w": torch.zeros(5)}, out)
    with pytest.raises(WeightSyncError, match="at least 16 bytes"):
        pack(bucket, {"w": torch.zeros(4)}, out[:15])
    with pytest.raises(WeightSyncError, match="16 bytes"):
        list(unpack(bucket, out[:12]))
