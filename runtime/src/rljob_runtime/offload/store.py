"""State of one worker that can leave its device and come back bit-equal: what there is, where it is, and the switches in between.

Used from one thread. A switch is all or nothing; one that can neither be done nor undone leaves its kinds ``Broken``, and from then on
every use is refused with the reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from rljob_runtime.errors import OffloadError
from rljob_runtime.offload.copies import Copies, Direction, copies_for
from rljob_runtime.offload.memory import snapshot
from rljob_runtime.offload.slabs import HostSlabs
from rljob_runtime.offload.states import MemorySnapshot, Residence, StateKind, SwitchReport
from rljob_runtime.offload.transfer import Item, Ledger, move_in, move_out

Provider = Callable[[], Iterable[tuple[str, torch.Tensor]]]
"""Lists (name, tensor) of what exists now; asked at every switch, because owners make and replace tensors in between."""

_ALIGNMENT_BYTES = 64
"""Storages begin at cache lines of the slab."""

_STATES = {
    Direction.OFFLOAD: (Residence.OFFLOADING, Residence.ON_DEVICE),
    Direction.LOAD: (Residence.LOADING, Residence.OFFLOADED),
}
"""What a kind is during a switch, and again if the switch was undone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    provider: Provider
    rederivable: bool = False
    drop: Callable[[], None] | None = None
    """Makes the owner give the tensors up, instead of emptying their storages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """One storage that exists on the device now."""

    kind: StateKind
    name: str
    storage: torch.UntypedStorage
    size_bytes: int
    source: _Source


class StateStore:
    """Registers state by kind and moves it; tensor identity, views and ties survive."""

    def __init__(self, device: torch.device, slabs: HostSlabs, *, name: str = "state", copies: Copies | None = None) -> None:
        """Take nothing yet.

        Args:
            device: where the state lives; tensors of other devices stay where they are.
            slabs: the process's host memory; several stores may share it under different names.
            name: of the owner, for messages.
            copies: how bytes travel; None takes the device's own.
        """
        self._device = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device
        self.slabs = slabs
        self._name = name
        self.copies = copies_for(self._device) if copies is None else copies
        self._sources: dict[StateKind, list[_Source]] = {kind: [] for kind in StateKind}
        self._residence = dict.fromkeys(StateKind, Residence.ON_DEVICE)
        self._away: dict[StateKind, list[Item]] = {}
        self._undefined: set[StateKind] = set()
        self._broken_because = ""
        self._owned: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self._resident_bytes = 0
        self._peak_bytes = 0

    def register(self, kind: StateKind, name: str, tensor: torch.Tensor, *, rederivable: bool = False) -> None:
        """Add one tensor: a parameter, a DTensor (its local shard), a view; its whole storage will move, once.

        Memory that cannot be freed (memory-mapped, shared, NumPy's) is first copied into a storage of the tensor's own. Register all
        tensors that share such memory before the first switch, otherwise they part.

        Args:
            kind: with which it moves.
            name: for messages.
            tensor: stays the same object.
            rederivable: do not copy; after a load its bytes are 0xFF and the kind is :attr:`undefined` until :meth:`mark_written`.

        Raises:
            OffloadError: the kind is not on the device now, or the memory can neither be freed nor replaced.
        """
        self._require_here(kind, f"registering {name}")
        self._own(name, tensor)
        self._sources[kind].append(_Source(provider=lambda: [(name, tensor)], rederivable=rederivable))

    def register_provider(self, kind: StateKind, provider: Provider, *, rederivable: bool = False) -> None:
        """Add whatever ``provider`` lists at each switch, such as an optimizer's states; else as :meth:`register`."""
        self._require_here(kind, "registering a provider")
        self._sources[kind].append(_Source(provider=provider, rederivable=rederivable))

    def register_dropped(self, kind: StateKind, provider: Provider, drop: Callable[[], None]) -> None:
        """Add state that an offload makes its owner forget, such as gradients: never copied, absent after a load.

        Args:
            kind: with which it goes.
            provider: lists it, for the accounts.
            drop: lets go of it; may be called when there is nothing.
        """
        self._require_here(kind, "registering state to drop")
        self._sources[kind].append(_Source(provider=provider, drop=drop))

    def residence(self, kind: StateKind) -> Residence:
        """Where the kind is; a kind without any state switches like the others."""
        return self._residence[kind]

    @property
    def undefined(self) -> frozenset[StateKind]:
        """Kinds on the device whose re-derivable content was not copied and has not been written since."""
        return frozenset(self._undefined)

    def mark_written(self, kind: StateKind) -> None:
        """Mark the content of an undefined kind as written."""
        self._undefined.discard(kind)

    def require(self, kinds: Iterable[StateKind], user: str) -> None:
        """Check that ``user`` may work with ``kinds``.

        Raises:
            OffloadError: naming every kind that is not usable and why.
        """
        problems = []
        for kind in sorted(set(kinds)):
            if (residence := self._residence[kind]) is Residence.BROKEN:
                problems.append(f"{kind} is Broken ({self._broken_because}); restart the worker from its last checkpoint")
            elif residence is not Residence.ON_DEVICE:
                problems.append(f"{kind} is {residence}; load it first")
            elif kind in self._undefined:
                problems.append(f"{kind} came back without its content; write it first")
        if problems:
            raise OffloadError(f"{self._name}: {user} needs its state on {self._device}, but {'; '.join(problems)}")

    def reserve(self, kinds: Iterable[StateKind] | None = None) -> None:
        """Take the host memory that offloading ``kinds`` (None: all) needs now, so that the first switch takes none.

        What does not exist yet is not counted: an optimizer must have made its states.

        Raises:
            HostBudgetError: over the budget; nothing was taken.
            OffloadError: the machine has no memory left.
        """
        found = self._find_by_kind(StateKind if kinds is None else kinds)
        self.slabs.require({self._region_name(kind): self._layout(of_kind)[1] for kind, of_kind in found.items()})
        for of_kind in found.values():
            self._place(of_kind)

    def offload(self, kinds: Iterable[StateKind], *, release: bool = True) -> SwitchReport:
        """Move kinds off the device; those that are off already are left alone.

        Args:
            kinds: what leaves.
            release: other processes get the memory; False leaves it to this process's allocator, which is faster.

        Raises:
            HostBudgetError: the host budget does not suffice; nothing has moved.
            OffloadError: refused, or failed and undone (everything is as before), or Broken; the message says which.
        """
        chosen = self._chosen(kinds, Residence.ON_DEVICE, "offload")
        started, before = time.perf_counter(), self.memory()
        found = self._find_by_kind(chosen)
        items = [item for kind in chosen for item in self._place(found[kind])]
        dropped = [source.drop for kind in chosen for source in self._sources[kind] if source.drop is not None]
        dropped_bytes = {kind: sum(f.size_bytes for f in found[kind] if f.source.drop is not None) for kind in chosen}
        self._owned.clear()
        self._run(chosen, Direction.OFFLOAD, lambda ledger: move_out(items, self.copies, dropped, ledger))
        for kind in chosen:
            self._residence[kind] = Residence.OFFLOADED
            self._away[kind] = [item for item in items if item.kind is kind]
        self._account(-sum(dropped_bytes.values()))
        if release:
            self.copies.release()
        return self._report(Direction.OFFLOAD, chosen, items, dropped_bytes, started, before)

    def load(self, kinds: Iterable[StateKind]) -> SwitchReport:
        """Bring kinds back; those that are there already are left alone.

        Raises:
            OffloadError: refused, or failed and undone (everything is as before), or Broken; the message says which.
        """
        chosen = self._chosen(kinds, Residence.OFFLOADED, "load")
        started, before = time.perf_counter(), self.memory()
        items = [item for kind in chosen for item in self._away[kind]]
        changed = [f"{item.name} ({item.kind})" for item in items if item.storage.size() != 0]
        if changed:
            raise OffloadError(f"{self._name}: {', '.join(changed[:5])} got memory while off the device; nothing may write to it there")
        self._run(chosen, Direction.LOAD, lambda ledger: move_in(items, self.copies, ledger))
        for kind in chosen:
            self._residence[kind] = Residence.ON_DEVICE
            del self._away[kind]
        self._undefined.update(item.kind for item in items if item.region is None)
        return self._report(Direction.LOAD, chosen, items, {}, started, before)

    def memory(self) -> MemorySnapshot:
        """Memory now. On a CPU the device's figures are this store's own accounts; the peak starts again."""
        if self._device.type != "cuda":
            here = [kind for kind in StateKind if self._residence[kind] is Residence.ON_DEVICE]
            self._account(sum(f.size_bytes for f in self._find(here)) - self._resident_bytes)
        taken = snapshot(self._device, self.slabs.held_bytes, resident_bytes=self._resident_bytes, peak_bytes=self._peak_bytes)
        self._peak_bytes = self._resident_bytes
        return taken

    def _chosen(self, kinds: Iterable[StateKind], start: Residence, what: str) -> list[StateKind]:
        """Kinds to move, in the order of :class:`StateKind`."""
        wanted = set(kinds)
        broken = [kind for kind in wanted if self._residence[kind] not in (Residence.ON_DEVICE, Residence.OFFLOADED)]
        if broken:
            self.require(broken, what)
        return [kind for kind in StateKind if kind in wanted and self._residence[kind] is start]

    def _run(self, kinds: Sequence[StateKind], what: Direction, move: Callable[[Ledger], None]) -> None:
        """Run a move and leave a true state, whatever happens in it.

        Raises:
            OffloadError: the move failed; says whether it was undone.
            BaseException: what interrupted it, if that was no failure of the copies.
        """
        during, back = _STATES[what]
        ledger = Ledger(account=self._account)
        self._residence.update(dict.fromkeys(kinds, during))
        try:
            move(ledger)
        except BaseException as error:
            self._residence.update(dict.fromkeys(kinds, back if ledger.undone else Residence.BROKEN))
            cause = " after ".join(f"{type(e).__name__}: {e}" for e in (error, error.__context__) if e is not None)
            if not ledger.undone:
                self._broken_because = f"{what} failed: {cause}"
            if not isinstance(error, RuntimeError | MemoryError):
                raise
            outcome = (
                f"was undone: its state is {back} as before; retry when there is memory"
                if ledger.undone
                else "could not be undone: its state is Broken; restart the worker from its last checkpoint"
            )
            raise OffloadError(f"{self._name}: {what} of {', '.join(kinds)} failed ({cause}) and {outcome}", ledger.undone) from error

    def _report(
        self,
        direction: Direction,
        kinds: Sequence[StateKind],
        items: Sequence[Item],
        dropped_bytes: dict[StateKind, int],
        started: float,
        before: MemorySnapshot,
    ) -> SwitchReport:
        elapsed_s = time.perf_counter() - started
        copied, freed = dict.fromkeys(kinds, 0), dict.fromkeys(kinds, 0) | dropped_bytes
        for item in items:
            freed[item.kind] += item.size_bytes
            copied[item.kind] += 0 if item.region is None else item.size_bytes
        return SwitchReport(
            direction=direction.value,
            copied_bytes=copied,
            freed_bytes=freed,
            elapsed_s=elapsed_s,
            before=before,
            after=self.memory(),
            undefined=frozenset(kind for kind in kinds if kind in self._undefined),
        )

    def _account(self, change_bytes: int) -> None:
        self._resident_bytes += change_bytes
        self._peak_bytes = max(self._peak_bytes, self._resident_bytes)

    def _region_name(self, kind: StateKind) -> str:
        """Bytes of the kind's slabs."""
        return f"{self._name}/{kind}"

    def _layout(self, found: Sequence[_Found]) -> tuple[list[tuple[_Found, int]], int]:
        """What of one kind leaves, each with its offset in the kind's region, and the region's size."""
        offset, placed = 0, []
        for one in found:
            if one.source.drop is not None:
                continue
            placed.append((one, offset))
            if not one.source.rederivable:
                offset += -(-one.size_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        return placed, offset

    def _place(self, found: Sequence[_Found]) -> list[Item]:
        """Give each storage of one kind its place in the kind's region."""
        placed, size_bytes = self._layout(found)
        if not placed:
            return []
        region = self.slabs.region(self._region_name(placed[0][0].kind), size_bytes)
        return [
            Item(
                kind=one.kind,
                name=one.name,
                storage=one.storage,
                size_bytes=one.size_bytes,
                offset=at,
                region=None if one.source.rederivable else region,
            )
            for one, at in placed
        ]

    def _find_by_kind(self, kinds: Iterable[StateKind]) -> dict[StateKind, list[_Found]]:
        """What each kind has on the device now; every other kind is looked at too, so that no storage is claimed twice."""
        wanted = list(kinds)
        result: dict[StateKind, list[_Found]] = {kind: [] for kind in wanted}
        for found in self._find([kind for kind in StateKind if self._residence[kind] is Residence.ON_DEVICE]):
            if found.kind in result:
                result[found.kind].append(found)
        return result

    def _find(self, kinds: Iterable[StateKind]) -> list[_Found]:
        """Storages of the kinds on the device, each once.

        Raises:
            OffloadError: two kinds claim one storage, or a tensor has lost its memory to somebody else.
        """
        seen: dict[int, _Found] = {}
        for kind in kinds:
            for source in self._sources[kind]:
                for name, tensor in source.provider():
                    if source.drop is None:
                        self._own(name, tensor)
                    local = _local(tensor)
                    storage = local.untyped_storage()
                    if local.device != self._device or (local.numel() == 0 and storage.size() == 0):
                        continue
                    if storage.size() == 0:
                        raise OffloadError(f"{self._name}: {name} ({kind}) has no memory although it should be on {self._device}")
                    first = seen.setdefault(
                        storage._cdata, _Found(kind=kind, name=name, storage=storage, size_bytes=storage.size(), source=source)
                    )
                    if first.kind is not kind or first.source.rederivable != source.rederivable:
                        raise OffloadError(
                            f"{self._name}: {name} ({kind}) shares memory with {first.name} ({first.kind}) but is treated differently; "
                            "register what shares memory under one kind and in one way"
                        )
        return list(seen.values())

    def _own(self, name: str, tensor: torch.Tensor) -> None:
        """Give a tensor on memory that cannot be freed a storage of its own; tensors that share it get the same new one.

        Raises:
            OffloadError: a DTensor, whose owner keeps further views that would be left behind.
        """
        local = _local(tensor)
        storage = local.untyped_storage()
        if storage.resizable() and not (storage.device.type == "cpu" and storage.is_shared()):
            return
        if isinstance(tensor, DTensor):
            raise OffloadError(
                f"{self._name}: the shard of {name} lies in memory that cannot be freed (shared, mapped or in a NumPy array); copy it first"
            )
        if storage._cdata not in self._owned:
            fresh = torch.UntypedStorage(storage.size(), device=storage.device)
            fresh.copy_(storage)
            self._owned[storage._cdata] = (storage, fresh)  # the old one too: its address must not be taken by another meanwhile
        fresh = self._owned[storage._cdata][1]
        with torch.no_grad():
            local.set_(fresh, local.storage_offset(), local.size(), local.stride())

    def _require_here(self, kind: StateKind, user: str) -> None:
        if self._residence[kind] is not Residence.ON_DEVICE:
            self.require([kind], user)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor, or the tensor itself; not ``to_local``, which is an autograd operation."""
    if isinstance(tensor, DTensor):
        shard: torch.Tensor = tensor._local_tensor
        return shard
    return tensor
