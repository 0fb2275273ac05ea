"""A store whose copies, device or owner fail: everything is as before, or Broken; nothing half-loaded is used."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from rljob_runtime.errors import OffloadError
from rljob_runtime.offload.states import Residence, StateKind
from tests.support.offload_fakes import FailingCopies, bytes_of, two_kinds

PARAMS, GRADS, OPTIMIZER, OTHER = StateKind.PARAMS, StateKind.GRADS, StateKind.OPTIMIZER, StateKind.OTHER
COPIES = 9
"""Of an offload of everything in :func:`two_kinds`: 3 for a, 1 for b, 2 for c, 1 for m, 2 for v."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_after_a_load_that_failed_half_way_an_offload_changes_nothing_and_a_load_brings_every_byte() -> None:
    store, tensors = two_kinds(FailingCopies(COPIES + 4, COPIES + 8))
    kept = {name: bytes_of(tensor) for name, tensor in tensors.items()}
    store.offload([PARAMS, OPTIMIZER])
    for kinds in ([PARAMS, OPTIMIZER], [OPTIMIZER, PARAMS]):
        with pytest.raises(OffloadError, match="was undone"):
            store.load(kinds)
        assert set(store.offload(StateKind).copied_bytes.values()) <= {0}, "the slabs keep the good copy"
        with pytest.raises(OffloadError, match="params is Offloaded; load it first"):
            store.require([PARAMS], "forward")
    store.load([OPTIMIZER])
    store.load([PARAMS])
    assert {name: bytes_of(tensor) for name, tensor in tensors.items()} == kept


@pytest.mark.parametrize("error", [RuntimeError, MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("index", range(2 * COPIES))
def test_a_failure_at_any_chunk_is_undone(index: int, error: type[BaseException]) -> None:
    store, tensors = two_kinds(FailingCopies(index, error=error))
    kept = {name: bytes_of(tensor) for name, tensor in tensors.items()}
    if index >= COPIES:
        store.offload([PARAMS, OPTIMIZER])
    switch = store.offload if index < COPIES else store.load
    with pytest.raises(BaseException, match=f"copy {index} failed") as caught:
        switch([PARAMS, OPTIMIZER])
    if error is KeyboardInterrupt:
        assert caught.type is KeyboardInterrupt
    else:
        assert isinstance(caught.value, OffloadError)
        assert caught.value.rolled_back
        assert "was undone" in str(caught.value)
    back = Residence.ON_DEVICE if index < COPIES else Residence.OFFLOADED
    assert {store.residence(kind) for kind in (PARAMS, OPTIMIZER)} == {back}
    if back is Residence.OFFLOADED:
        assert all(tensor.untyped_storage().size() == 0 for tensor in tensors.values()), "no half-loaded tensor looks valid"
    assert store.memory().allocated_bytes == sum(tensor.untyped_storage().size() for tensor in tensors.values())
    store.load([PARAMS, OPTIMIZER])
    assert {name: bytes_of(tensor) for name, tensor in tensors.items()} == kept


@pytest.mark.parametrize("index", range(1, COPIES))
def test_a_failure_that_cannot_be_undone_is_broken(index: int) -> None:
    store, tensors = two_kinds(FailingCopies(*range(index, 100)))
    kept = {name: bytes_of(tensor) for name, tensor in tensors.items()}
    if index < 3:  # nothing had left: there is nothing to undo
        with pytest.raises(OffloadError, match="was undone"):
            store.offload([PARAMS, OPTIMIZER])
        assert {name: bytes_of(tensor) for name, tensor in tensors.items()} == kept
        return
    with pytest.raises(OffloadError, match=r"could not be undone.*Broken") as caught:
        store.offload([PARAMS, OPTIMIZER])
    assert not caught.value.rolled_back
    assert f"copy {index + 1} failed after RuntimeError: copy {index} failed" in str(caught.value)
    assert store.residence(PARAMS) is Residence.BROKEN
    for name, tensor in tensors.items():
        assert tensor.untyped_storage().size() == 0 or bytes_of(tensor) == kept[name]
    for use in (lambda: store.require([PARAMS], "forward"), lambda: store.offload([PARAMS]), lambda: store.load([PARAMS])):
        with pytest.raises(OffloadError, match=f"params is Broken.*copy {index} failed.*restart the worker"):
            use()


def test_out_of_memory_on_the_device_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    store, tensors = two_kinds()
    kept = {name: bytes_of(tensor) for name, tensor in tensors.items()}
    store.offload([PARAMS, OPTIMIZER])
    resize = torch.UntypedStorage.resize_

    def full(storage: torch.UntypedStorage, size: int) -> object:
        if size == tensors["c"].nbytes:
            raise torch.OutOfMemoryError("no memory")
        return resize(storage, size)

    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", full)
        with pytest.raises(OffloadError, match=r"OutOfMemoryError: no memory.*was undone"):
            store.load([PARAMS, OPTIMIZER])
    assert {tensor.untyped_storage().size() for tensor in tensors.values()} == {0}
    store.load([PARAMS, OPTIMIZER])
    assert {name: bytes_of(tensor) for name, tensor in tensors.items()} == kept


def test_an_error_after_the_copies_does_not_hide_where_the_state_is() -> None:
    class Unreleased(FailingCopies):
        def release(self) -> None:
            raise RuntimeError("the driver is gone")

    store, tensors = two_kinds(Unreleased())
    kept = {name: bytes_of(tensor) for name, tensor in tensors.items()}
    with pytest.raises(RuntimeError, match="the driver is gone"):
        store.offload([PARAMS, OPTIMIZER])
    assert {store.residence(kind) for kind in (PARAMS, OPTIMIZER)} == {Residence.OFFLOADED}
    store.load([PARAMS, OPTIMIZER])
    assert {name: bytes_of(tensor) for name, tensor in tensors.items()} == kept


def test_an_owner_that_cannot_drop_keeps_everything() -> None:
    store, tensors = two_kinds()
    kept = {name: bytes_of(tensor) for name, tensor in tensors.items()}

    def drop() -> None:
        raise RuntimeError("gradients are in use")

    store.register_dropped(GRADS, list, drop)
    cache = torch.ones(10)
    store.register(StateKind.KV_CACHE, "cache", cache, rederivable=True)
    with pytest.raises(OffloadError, match=r"gradients are in use.*was undone"):
        store.offload(StateKind)
    assert {name: bytes_of(tensor) for name, tensor in tensors.items()} == kept
    assert torch.equal(cache, torch.ones(10)), "what was not copied goes last, when nothing can fail any more"
