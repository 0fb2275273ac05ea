"""Where an engine's weights and its cache are: what may move when, and what an engine answers meanwhile. Pure, no torch.

::

    offload(KV_CACHE, PARAMS) -> load(PARAMS) -> full update -> load(KV_CACHE) -> answers again
                                 undefined        defined

Used by ``vllm.loop`` and ``fake``, so that both refuse the same things with the same words. A move that fails half-way leaves its kinds
``Broken``; the engine that owns them ends, and only a new engine answers again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager

from rljob_runtime.engine.protocol import EngineResidenceError
from rljob_runtime.errors import WeightSyncError
from rljob_runtime.offload.states import Residence, StateKind

ENGINE_KINDS = frozenset({StateKind.PARAMS, StateKind.KV_CACHE})
"""What an engine can give back on request."""

DISCARDED = "its weights were discarded by an offload and no full update came since"
"""Why nothing is generated between a load of discarded weights and the update that brings them."""


def names(kinds: Collection[StateKind]) -> str:
    """Kinds for a message, in one order."""
    return ", ".join(sorted(kinds)) or "nothing"


def check_running(running: int) -> None:
    """Refuse an offload under responses in progress.

    Raises:
        EngineResidenceError: there are some.
    """
    if running:
        raise EngineResidenceError(
            f"offload: {running} responses are running; wait until they end, or pass on_running='abort' (they come back with the tokens "
            "sampled so far) or 'keep' (they go on after the load)"
        )


class EngineResidence:
    """The state machine of ``offload.states`` for one engine. One thread owns it."""

    def __init__(self, releasable: bool = True) -> None:
        """Everything is on the device.

        Args:
            releasable: False refuses every offload: the engine was started without the means to free.
        """
        self._releasable = releasable
        self._states = dict.fromkeys(ENGINE_KINDS, Residence.ON_DEVICE)

    def states(self) -> Mapping[StateKind, Residence]:
        """Where each kind is, a copy."""
        return dict(self._states)

    def away(self) -> frozenset[StateKind]:
        """Kinds that are not on the device; while there are any nothing is computed."""
        return frozenset(kind for kind, state in self._states.items() if state is not Residence.ON_DEVICE)

    def refusal(self, what: str) -> str | None:
        """Why ``what`` cannot be answered now, None when nothing is away."""
        away = self.away()
        return f"{what}: the engine's {names(away)} are not on the device; load them first" if away else None

    def check_update(self, version: int) -> None:
        """Refuse to write weights that have no memory.

        Raises:
            WeightSyncError: they are not on the device; the update stays open.
        """
        if StateKind.PARAMS in self.away():
            raise WeightSyncError(
                f"update to version {version}: the engine's weights are offloaded; load params, then finish the update again"
            )

    def to_offload(self, kinds: Collection[StateKind]) -> frozenset[StateKind]:
        """Those of ``kinds`` that have to leave; what left before is no error, so that a call can be repeated.

        Raises:
            EngineResidenceError: an engine has no such kind, it was started with ``release='never'``, or the weights are to leave
                while the cache stays: keys and values of absent weights serve nobody, and vLLM's sleep frees them together.
        """
        wanted = self._known("offload", kinds)
        if wanted and not self._releasable:
            raise EngineResidenceError(
                f"offload of {names(wanted)}: the engine was started with release='never'; start it with EngineConfig.release 'discard' "
                "or 'copy'"
            )
        if StateKind.PARAMS in wanted and StateKind.KV_CACHE not in wanted | self.away():
            raise EngineResidenceError("offload of params: the kv_cache of absent weights serves nobody; offload both, or kv_cache first")
        return wanted - self.away()

    def to_load(self, kinds: Collection[StateKind]) -> frozenset[StateKind]:
        """Those of ``kinds`` that have to come back; what is on the device is no error.

        Raises:
            EngineResidenceError: an engine has no such kind.
        """
        return self._known("load", kinds) & self.away()

    @contextmanager
    def moving(self, kinds: frozenset[StateKind], to: Residence) -> Iterator[None]:
        """Mark ``kinds`` as under way to ``Offloaded`` or ``OnDevice`` inside the block, and as arrived, or broken, after it."""
        self._states.update(dict.fromkeys(kinds, Residence.OFFLOADING if to is Residence.OFFLOADED else Residence.LOADING))
        end = Residence.BROKEN
        try:
            yield
            end = to
        finally:
            self._states.update(dict.fromkeys(kinds, end))

    def _known(self, call: str, kinds: Collection[StateKind]) -> frozenset[StateKind]:
        """``kinds`` as a set, refused where an engine does not have one of them or has it broken."""
        wanted = frozenset(kinds)
        if unknown := wanted - ENGINE_KINDS:
            raise EngineResidenceError(f"{call} of {names(unknown)}: an engine has only {names(ENGINE_KINDS)}; ask for those")
        broken = frozenset(kind for kind, state in self._states.items() if state is Residence.BROKEN)
        if broken:
            raise EngineResidenceError(f"{call} of {names(wanted)}: {names(broken)} broke in an earlier switch; start a new engine")
        return wanted
