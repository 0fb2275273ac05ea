"""Changes written by regions leave the bits that copies of the whole tensors leave, for any cut of tensors into any parameter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_runtime.weightsync.delta import DeltaEncoder
from rljob_runtime.weightsync.packing import as_byte_tensor, pack, plan_buckets
from rljob_runtime.weightsync.patching import INTEGERS, ChangeWriter, Region, different, write_changes, write_whole

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
CUTS = st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(0, 3))
"""Of a dimension: numbers before, in, and behind the region."""


@st.composite
def tensors(draw: st.DrawFn) -> list[tuple[str, str, tuple[int, ...], tuple[tuple[int, ...], ...], tuple[int, ...]]]:
    """Name, dtype, shape, (start, length) by dimension, and the order of dimensions in the parameter."""
    found = []
    for index in range(draw(st.integers(1, 4))):
        cuts = draw(st.lists(CUTS, min_size=1, max_size=3))
        order = tuple(draw(st.permutations(range(len(cuts)))))
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        shape = tuple(sum(cut) for cut in cuts)
        found.append((f"model.layers.{index}.weight", dtype, shape, tuple((cut[0], cut[1]) for cut in cuts), order))
    return found


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(INTEGERS[tensor.element_size()])


@settings(max_examples=150, deadline=None)
@given(
    cut=tensors(),
    seed=st.integers(0, 2**16),
    changed=st.sampled_from([0.0, 0.1, 0.6]),
    bucket_bytes=st.sampled_from([64, 4096]),
    is_tied=st.booleans(),
)
def test_changes_leave_the_bits_of_whole_copies(
    cut: list[tuple[str, str, tuple[int, ...], tuple[tuple[int, ...], ...], tuple[int, ...]]],
    seed: int,
    changed: float,
    bucket_bytes: int,
    is_tied: bool,
) -> None:
    random = torch.Generator().manual_seed(seed)
    manifest = plan_buckets([(name, dtype, shape) for name, dtype, shape, _, _ in cut], bucket_bytes)
    now = {name: torch.randn(shape, generator=random).to(DTYPES[dtype]) for name, dtype, shape, _, _ in cut}
    # Each parameter has a margin, rows of another part before, and the dimensions of its tensor in another order.
    parameters, views, places, device_places = {}, {}, {}, {}
    for name, dtype, _, spans, order in cut:
        part = now[name]
        for dim, (start, length) in enumerate(spans):
            part = part.narrow(dim, start, length)
        part = part.permute(order)
        margin = torch.zeros(2 * part.shape[0] + 1, *part.shape[1:], dtype=DTYPES[dtype])
        parameters[name] = margin[1:]
        views[name] = parameters[name][part.shape[0] :]
        offset = views[name].storage_offset() - parameters[name].storage_offset()
        region = Region.of(part.shape, part.storage_offset(), part.stride(), offset, views[name].stride())
        assert region is not None
        assert region.numel == part.numel()
        count = 2 if is_tied else 1  # parameters that have the numbers of one tensor, as tied embeddings do
        places[name] = [(parameters[name], region), *((margin.clone()[1:], region) for _ in range(count - 1))]
        device_places[name] = [(margin.clone()[1:], region) for _ in range(count)]
    regions = [(name, region) for name, found in device_places.items() for _, region in found]
    device_parameters = [parameter for found in device_places.values() for parameter, _ in found]
    writers = {bucket.index: ChangeWriter(bucket, regions) for bucket in manifest.buckets}
    encoders = {bucket.index: DeltaEncoder(1.0) for bucket in manifest.buckets}
    for version in range(3):
        for bucket in manifest.buckets:
            room = encoders[bucket.index].room(bucket)
            pack(bucket, now, room)
            data, base = encoders[bucket.index].encode(version, bucket, room)
            whole = np.zeros(bucket.size_bytes, dtype=np.uint8)
            pack(bucket, now, whole)
            if base is None:
                write_whole(places, bucket, torch.from_numpy(data.copy()))
                write_whole(device_places, bucket, torch.from_numpy(data.copy()))
            else:
                write_changes(places, bucket, data)
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr("rljob_runtime.weightsync.patching.WRITTEN", 3)
                    writers[bucket.index].write_on_device(device_parameters, as_byte_tensor(data))
            assert different(places, bucket, torch.from_numpy(whole)) == []
            for slot in bucket.slots:
                for parameter, _ in (*places[slot.name], *device_places[slot.name]):
                    assert torch.equal(bits(parameter), bits(parameters[slot.name]))
        for name, _, _, spans, order in cut:
            part = now[name]
            for dim, (start, length) in enumerate(spans):
                part = part.narrow(dim, start, length)
            assert torch.equal(bits(views[name]), bits(part.permute(order)))
            assert not parameters[name][: part.permute(order).shape[0]].any(), "nothing else was written"
            assert parameters[name].untyped_storage().resizable(), "it can be freed"
            where = torch.rand(now[name].shape, generator=random) < changed
            now[name][where] = torch.randn(int(where.sum()), generator=random).to(now[name].dtype)


def test_a_view_that_sees_a_number_twice_is_no_region() -> None:
    whole = torch.arange(12).view(3, 4)
    windows = whole.as_strided((3, 2), (1, 1))
    assert Region.of(windows.shape, 0, windows.stride(), 0, (2, 1)) is None
    expanded = whole[:, :1].expand(3, 4)
    assert Region.of(expanded.shape, 0, expanded.stride(), 0, (4, 1)) is None


def test_a_difference_is_found_by_the_name_of_its_tensor() -> None:
    manifest = plan_buckets([("a", "float32", (4,)), ("b", "float32", (4,))], 1024)
    [bucket] = manifest.buckets
    now = {"a": torch.ones(4), "b": torch.ones(4)}
    data = np.zeros(bucket.size_bytes, dtype=np.uint8)
    pack(bucket, now, data)
    [region] = [Region.of((4,), 0, (1,), 0, (1,))]
    assert region is not None
    places = {name: [(tensor.clone(), region)] for name, tensor in now.items()}
    places["b"][0][0][2] = -1.0
    assert different(places, bucket, torch.from_numpy(data)) == ["b"]
