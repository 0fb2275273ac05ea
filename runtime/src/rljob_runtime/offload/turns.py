"""Whose turn it is on shared devices, phase by phase: what the driver's loop asks of time-division.

::

    generating(n)   engines hold the devices they share: weights and KV cache; engines on devices of their own never wait for a turn
    scoring(n)      the reference holds its devices
    valuing(n)      the critic holds its devices with all its state, also for its training and its checkpoint
    training(n)     the trainer holds them with all its state, also for a checkpoint
    syncing(n)      trainer and engines hold them together with their weights alone

Where nobody shares, :class:`NoTurns` lets all phases pass. Components that stay resident take the same turns, and nothing moves.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, nullcontext
from typing import Any, Protocol

from rljob_runtime.offload.arbiter import DeviceArbiter
from rljob_runtime.offload.records import DeviceResidency
from rljob_runtime.offload.states import StateKind

Kinds = tuple[StateKind, ...]
PARAMS: Kinds = (StateKind.PARAMS,)
WEIGHTS: Kinds = (StateKind.PARAMS, StateKind.OTHER)
OWNER = "driver"
"""Of all leases: the loop's phases follow each other, and those of one phase belong together."""


class Turns(Protocol):
    """Context managers around the phases of a step."""

    @property
    def engines(self) -> tuple[int, ...]:
        """Indexes of the engines that step aside when trainer, reference or critic compute."""

    @property
    def critic_shares(self) -> bool:
        """Whether the critic shares devices, so that it has to be done with them when its turn ends."""

    def generating(self, step: int) -> AbstractAsyncContextManager[Any]:
        """Engines can answer inside the block."""

    def scoring(self, step: int) -> AbstractAsyncContextManager[Any]:
        """The reference can compute inside the block."""

    def valuing(self, step: int) -> AbstractAsyncContextManager[Any]:
        """The critic can do anything inside the block."""

    def training(self, step: int) -> AbstractAsyncContextManager[Any]:
        """The trainer can do anything inside the block."""

    def syncing(self, step: int) -> AbstractAsyncContextManager[Any]:
        """Weights can travel from the trainer to the engines inside the block."""

    def take_metrics(self) -> dict[str, float]:
        """Metrics of the switches since the last call."""

    def residency(self) -> list[DeviceResidency]:
        """What is where now, on devices that are shared."""


class NoTurns:
    """Everybody has devices of their own."""

    engines: tuple[int, ...] = ()
    critic_shares = False

    def generating(self, step: int) -> AbstractAsyncContextManager[Any]:
        """Nothing to wait for."""
        return nullcontext()

    scoring = valuing = training = syncing = generating

    def take_metrics(self) -> dict[str, float]:
        """Nothing moves."""
        return {}

    def residency(self) -> list[DeviceResidency]:
        """Nothing is shared."""
        return []


class ArbiterTurns:
    """Turns by leases of a :class:`DeviceArbiter`; tenants carry the components' names."""

    def __init__(
        self,
        arbiter: DeviceArbiter,
        *,
        trainers: Sequence[str],
        references: Sequence[str],
        critics: Sequence[str] = (),
        engines: Mapping[int, str],
        timeout_s: float,
    ) -> None:
        """Tenants by what they do.

        Args:
            arbiter: knows them all.
            trainers: those of the trainer.
            references: those of the reference policy.
            critics: those of the critic.
            engines: those of engines that share devices, by the engine's index.
            timeout_s: of the wait for devices and state at the beginning of a phase.
        """
        self._arbiter = arbiter
        self._trainers = trainers
        self._references = references
        self._critics = critics
        self.critic_shares = bool(critics)
        self._engines = tuple(engines.values())
        self.engines = tuple(engines)
        self._timeout_s = timeout_s

    def generating(self, step: int) -> AbstractAsyncContextManager[Any]:
        """Engines with weights and cache."""
        return self._held([(tenant, None, ()) for tenant in self._engines], f"generation for step {step}")

    def scoring(self, step: int) -> AbstractAsyncContextManager[Any]:
        """The reference with its weights."""
        return self._held([(tenant, None, ()) for tenant in self._references], f"reference log-probs of step {step}")

    def valuing(self, step: int) -> AbstractAsyncContextManager[Any]:
        """The critic with everything."""
        return self._held([(tenant, None, ()) for tenant in self._critics], f"the critic's part of step {step}")

    def training(self, step: int) -> AbstractAsyncContextManager[Any]:
        """The trainer with everything."""
        return self._held([(tenant, None, ()) for tenant in self._trainers], f"training of step {step}")

    def syncing(self, step: int) -> AbstractAsyncContextManager[Any]:
        """Trainer and engines with their weights; those of the engines are written and stay."""
        weights = [(tenant, WEIGHTS, ()) for tenant in self._trainers]
        return self._held([*weights, *((tenant, PARAMS, PARAMS) for tenant in self._engines)], f"weight sync after step {step}")

    def take_metrics(self) -> dict[str, float]:
        """Metrics of the switches since the last call."""
        return self._arbiter.take_metrics()

    def residency(self) -> list[DeviceResidency]:
        """What is where now."""
        return self._arbiter.residency()

    @asynccontextmanager
    async def _held(self, wanted: Sequence[tuple[str, Kinds | None, Kinds]], what: str) -> AsyncIterator[None]:
        """Leases of some tenants: their kinds, None for all, and the kinds that the block writes."""
        async with AsyncExitStack() as stack:
            for tenant, kinds, writes in wanted:
                stays = False if writes else None
                lease = self._arbiter.use(
                    tenant, kinds, what=what, timeout_s=self._timeout_s, owner=OWNER, writes=writes, is_offload_states=stays
                )
                await stack.enter_async_context(lease)
            yield
