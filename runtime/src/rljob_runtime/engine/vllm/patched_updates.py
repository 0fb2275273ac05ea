"""Which part of an update is written into vLLM's parameters and which is loaded; the engine's side, for all its workers.

::

    first whole update   loaded by vLLM, recorded in each worker  ──> plan
    later ones           exact tensors: what changed is written   ──> the first time all is loaded as well, and compared
                         others, where they changed: the copy's tensors of their layers are loaded

If the comparison fails, everything is loaded from the copy from then on, and the log says so. Once it succeeded, copies of buckets
whose tensors are all exact are dropped.

Where each worker fetches buckets by itself (``weightsync.copies``), the second update is whole, too: it is loaded, and compared with what
would have been written. So workers keep copies only of buckets that have tensors to be loaded. Which of these changed is not known here:
all in a bucket of which something changed are loaded.

Parameters whose numbers were discarded while the engine was away are written, too, if exact tensors, and what loaders fill with
constants, are all of them: whole buckets, from the copy where only changes came.

Where all updates are whole, no copy is kept. From the third on they are written, if all tensors are exact: a plain copy of each tensor
takes a quarter of the time of vLLM's loaders, which make a new layer, fill it, and copy it into the old one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from rljob_runtime.engine.vllm.load_record import LoadPlan, closed, joined
from rljob_runtime.engine.vllm.weight_receiver import NOT_WRITTEN, compare_bits, remember_bits, start_partial, start_update, write_bucket
from rljob_runtime.errors import WeightSyncError, WholeNeededError
from rljob_runtime.records import Bucket
from rljob_runtime.weightsync.assembly import UpdateAssembly
from rljob_runtime.weightsync.changes import between, number_bytes, split_changes
from rljob_runtime.weightsync.copies import Kept
from rljob_runtime.weightsync.delta import Images
from rljob_runtime.weightsync.parcel import SEND_WHOLE, Held, Payload, view
from rljob_runtime.weightsync.transport import IncomingUpdate

logger = logging.getLogger(__name__)

Call = Callable[[str | Callable[..., None], tuple[object, ...]], None]
"""Of a method of every worker, or a function with it."""


class PatchedUpdates:
    """Writes updates into the parameters as far as they are known. Not thread-safe."""

    def __init__(self, *, drops_copies: bool, writes_whole: bool = False) -> None:
        """How to treat updates.

        Args:
            drops_copies: the parameters stay in memory, so that a copy of what they have is needed no more.
            writes_whole: updates are written also where none may be sparse.
        """
        self._drops_copies = drops_copies
        self._writes_whole = writes_whole
        self._is_sparse = False
        """Whether the last update might have been."""
        self._plan: LoadPlan | None = None
        self._proven = False
        self._versions: dict[int, int] = {}
        """Of each bucket in the parameters; empty while they are undefined."""
        self._copied: dict[int, int] = {}
        """Of each bucket of which workers have a copy of their own."""
        self._kept: dict[int, tuple[Bucket, Payload]] = {}
        """Whole buckets of the update under way that may be needed at its end."""
        self._changed: set[str] = set()
        """Tensors of the update under way that have to be loaded."""

    @property
    def reloaded_fraction(self) -> float:
        """Share of the tensors of which a changed one is loaded, because its load is no plain copy or was not recorded."""
        return 0.0 if self._plan is None or not self._is_sparse else self._plan.reloaded_fraction

    def records(self, incoming: IncomingUpdate) -> bool:
        """Whether an update is to be recorded: the first one, if its successors may be written."""
        self._is_sparse = _images(incoming) is not None
        return self._plan is None and (self._is_sparse or self._writes_whole)

    def writes(self, incoming: IncomingUpdate) -> bool:
        """Whether an update is written instead of loaded."""
        images = _images(incoming)
        return (self._proven or (images is not None and not images.in_processes)) and self._knows(incoming)

    @property
    def fills_all(self) -> bool:
        """Whether an update that is written needs nothing of what was in the parameters."""
        return self._plan is not None and self._plan.is_complete

    def proves(self, incoming: IncomingUpdate) -> bool:
        """Whether an update, which is loaded, is to be compared with what would be written."""
        images = _images(incoming)
        return not self._proven and (images is None or images.in_processes) and self._knows(incoming)

    def _knows(self, incoming: IncomingUpdate) -> bool:
        """Whether it was seen of all tensors of an update how they are loaded; and, where no copies are kept, that none has to be."""
        plan = self._plan
        if plan is None or plan.refused is not None:
            return False
        if _images(incoming) is None and (plan.reloaded or not self._writes_whole):
            return False
        return all(slot.name in plan.layers for bucket in incoming.manifest.buckets for slot in bucket.slots)

    def recorded(self, plans: Sequence[LoadPlan | None]) -> None:
        """Take what the workers saw of a recorded update."""
        self._plan = joined(plans)
        if self._is_sparse and (limits := self._plan.limits) is not None:
            logger.warning("%s", limits)

    def refuse(self, reason: str) -> None:
        """A load that was watched failed: from now on all updates are loaded, and none is watched."""
        logger.error("a load of weights that was watched failed, and from now on all updates are loaded: %s", reason)
        self._plan = LoadPlan(places={}, layers={}, reloaded=frozenset(), refused="a load that was watched failed")

    def loaded(self, index: int, version: int) -> None:
        """A bucket was loaded as a whole."""
        self._versions[index] = version

    def forget_copies(self) -> None:
        """Workers have none any more."""
        self._copied.clear()

    def broke_off(self) -> None:
        """The parameters are undefined."""
        self._versions.clear()
        self._kept.clear()
        self._changed.clear()

    def write(self, bucket: Bucket, payload: Payload, version: int, call: Call) -> None:
        """Write a bucket as it comes.

        Raises:
            WholeNeededError: it has changes of a version that the parameters do not have.
        """
        assert self._plan is not None
        others = [slot.name for slot in bucket.slots if slot.name in self._plan.reloaded]
        if isinstance(payload, Kept):
            self._write_kept(bucket, payload, others, call)
            self._versions[bucket.index] = version
            return
        held = payload if isinstance(payload, Held) else Held(whole=payload)
        if held.changes is not None and self._versions.get(bucket.index) == held.base:
            self._changed |= _changed(bucket, held, self._plan.reloaded) if others else set()
            call(write_bucket, (bucket, held.changes, False))
        else:
            whole = self.whole_of(bucket, held)
            self._changed |= set(others)
            call(write_bucket, (bucket, whole, True))
        if held.whole is not None and (others or not self._proven):
            self._kept[bucket.index] = bucket, held.whole
        self._versions[bucket.index] = version

    def _write_kept(self, bucket: Bucket, kept: Kept, others: Sequence[str], call: Call) -> None:
        """Write a bucket that workers fetch."""
        is_whole = kept.base is None or self._versions.get(bucket.index) != kept.base
        arriving = self.whole_of(bucket, kept) if is_whole else self._arriving(bucket, kept)
        if others and kept.arriving.num_bytes:
            self._changed |= set(others)
            self._kept[bucket.index] = bucket, kept.copy
        call(write_bucket, (bucket, arriving, is_whole))

    def finish(self, incoming: IncomingUpdate, call: Call) -> None:
        """Load what could not be written, and compare what was written the first time."""
        assert self._plan is not None
        if not self._proven:
            self._prove(call)
        elif self._changed:
            names = closed(self._changed, self._plan.layers)
            call(start_partial, (names,))
            for bucket, payload in self._kept.values():
                slots = tuple(slot for slot in bucket.slots if slot.name in names)
                if slots:
                    call("update_weights", ({"bucket": replace(bucket, slots=slots), "payload": payload, "last": False},))
            call("finish_weight_update", ())
        self._kept.clear()
        self._changed.clear()
        images = _images(incoming)
        if images is not None and not images.in_processes and self._proven and self._drops_copies and self._plan.refused is None:
            reloaded = self._plan.reloaded
            images.drop([b.index for b in incoming.manifest.buckets if not any(slot.name in reloaded for slot in b.slots)])

    def _prove(self, call: Call) -> None:
        """Load everything once more: what was written has to have the bits that a load leaves."""
        assert self._plan is not None
        call(remember_bits, ())
        call(start_update, ())
        for number, (bucket, payload) in enumerate(self._kept.values(), 1):
            call("update_weights", ({"bucket": bucket, "payload": payload, "last": number == len(self._kept)},))
        call("finish_weight_update", ())
        self.compare(call)

    def compare(self, call: Call) -> None:
        """Compare what a load left in the parameters with what was, or would have been, written.

        Raises:
            WeightSyncError: a worker failed.
        """
        try:
            call(compare_bits, ())
        except WeightSyncError as error:
            if NOT_WRITTEN not in str(error):
                raise
            assert self._plan is not None
            logger.error("%s; the load holds, and from now on all updates are loaded", error)
            self._plan = replace(self._plan, refused="changes written into parameters went wrong")
        self._proven = True

    def whole_of(self, bucket: Bucket, payload: Payload) -> Payload:
        """A whole bucket, to be loaded.

        Raises:
            WholeNeededError: what came are changes of weights that the engine does not have.
        """
        if isinstance(payload, Kept):
            return self._arriving(bucket, payload) if payload.base is None else self._copying(bucket, payload)
        if not isinstance(payload, Held):
            return payload
        if payload.whole is None:
            raise self._no_copy(bucket, payload.base)
        return payload.whole

    def _arriving(self, bucket: Bucket, kept: Kept) -> Payload:
        """What workers fetch of a bucket: with a copy of it, where one is needed; errors are those of :meth:`_copying`."""
        return self._copying(bucket, kept) if self._needs_copy(bucket) else kept.arriving

    def _copying(self, bucket: Bucket, kept: Kept) -> Kept:
        """A bucket with its copy in workers.

        Raises:
            WholeNeededError: they have none that could be changed.
        """
        if kept.base is not None and self._copied.get(bucket.index) != kept.base:
            raise self._no_copy(bucket, kept.base)
        self._copied[bucket.index] = kept.version
        return kept

    def _needs_copy(self, bucket: Bucket) -> bool:
        """Whether changes of a bucket may have to be loaded. Not known of the first update; the second is whole, too."""
        plan = self._plan
        if not self._drops_copies:
            return True
        if plan is None:
            return False
        return plan.refused is not None or any(slot.name in plan.reloaded or slot.name not in plan.layers for slot in bucket.slots)

    @staticmethod
    def _no_copy(bucket: Bucket, base: int | None) -> WholeNeededError:
        return WholeNeededError(
            f"bucket {bucket.index} has the changes of weights v{base}, which this engine's parameters do not have and of which it "
            f"keeps no copy; {SEND_WHOLE}"
        )


def _images(incoming: IncomingUpdate) -> Images | None:
    """What an update that may be sparse has of earlier ones."""
    return incoming.images if isinstance(incoming, UpdateAssembly) else None


def _changed(bucket: Bucket, held: Held, among: frozenset[str]) -> set[str]:
    """Tensors, among some, of which something changed in a bucket."""
    assert held.changes is not None
    size, (indexes, _) = number_bytes(bucket), split_changes(bucket, view(held.changes))
    found = set()
    for slot in bucket.slots:
        if slot.name in among and slot.size_bytes:
            first, end = between(indexes, slot.offset_bytes // size, (slot.offset_bytes + slot.size_bytes) // size)
            if first < end:
                found.add(slot.name)
    return found
