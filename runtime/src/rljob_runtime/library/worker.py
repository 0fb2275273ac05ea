"""The base class of workers whose state leaves the device for others; imports torch only once state is registered."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rljob_runtime.offload.states import StateKind, SwitchReport

if TYPE_CHECKING:
    import torch

    from rljob_runtime.offload.store import StateStore


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPlace:
    """Where one worker of a group runs."""

    name: str
    """``<group>-<rank>``; also the name of its log file."""
    rank: int
    """0 .. world_size - 1 within its group."""
    world_size: int
    node_rank: int
    """Rank of its node; node groups are counted in order."""
    devices: tuple[int, ...]
    """Global ranks of its devices; empty for a worker without."""
    device: str
    """What torch calls its first device: ``cuda:0``, for it sees its own alone, or ``cpu``."""


place_of_next: ContextVar[WorkerPlace] = ContextVar("place_of_next")
"""Set while a worker is constructed."""


class Worker:
    """One process of a group; derive from it to have state that moves. A class without a base can be launched, too."""

    place: WorkerPlace
    """There before ``__init__`` runs."""
    _states: StateStore | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Worker:
        """Remember the place."""
        made = super().__new__(cls)
        made.place = place_of_next.get(WorkerPlace(name=cls.__name__, rank=0, world_size=1, node_rank=0, devices=(), device="cpu"))
        return made

    def register(self, kind: StateKind, name: str, tensor: torch.Tensor, *, rederivable: bool = False) -> None:
        """Add a tensor that leaves and comes with its kind; call it in ``__init__``. The tensor stays the same object.

        Args:
            kind: which part of the state it is, by which policies in ``components[].offload`` and ``include`` name it.
            name: for messages.
            tensor: its whole storage moves.
            rederivable: it is not copied, and comes back without its content.

        Raises:
            OffloadError: its memory can neither be freed nor replaced.
        """
        self._store.register(kind, name, tensor, rederivable=rederivable)

    def offload(self, kinds: Iterable[StateKind]) -> SwitchReport:
        """Take kinds off the device; called by the group."""
        return self._store.offload(kinds)

    def load(self, kinds: Iterable[StateKind]) -> SwitchReport:
        """Bring kinds back; called by the group."""
        return self._store.load(kinds)

    @property
    def _store(self) -> StateStore:
        if self._states is None:
            import torch

            from rljob_runtime.offload.slabs import HostSlabs
            from rljob_runtime.offload.store import StateStore

            device = torch.device(self.place.device)
            self._states = StateStore(device, HostSlabs(pinned=device.type == "cuda"), name=self.place.name)
        return self._states
