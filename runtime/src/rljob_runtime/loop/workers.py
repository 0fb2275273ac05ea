"""The running workers of a job, component by component, and the phases in which they may use shared devices.

::

    generating(n)        engines hold the devices they share: weights and KV cache; engines on devices of their own never wait
    judging(n)           judges and reward models hold the devices they share
    component.leased(n)  that component holds its devices with all its state: scoring, an update, a checkpoint
    syncing(n)           trainer and engines hold theirs together, with weights alone

Where no component shares devices these phases pass at once. Components that stay resident take the same leases and nothing moves.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from rljob_api.v1alpha1.components import Role
from rljob_api.v1alpha1.operations import SyncBackend
from rljob_runtime.cluster.protocol import Worker
from rljob_runtime.offload.arbiter import DeviceArbiter
from rljob_runtime.offload.records import DeviceResidency
from rljob_runtime.offload.states import StateKind
from rljob_runtime.offload.worker_group import WorkerGroup

PARAMS = (StateKind.PARAMS,)
WEIGHTS = (StateKind.PARAMS, StateKind.OTHER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """A forward pass over all samples of a step, before the learning rule is applied."""

    method: str
    """Method of the workers: ``(token_ids, lengths, temperature, wanted, sampling_mask, routes)``, the last two where there are any."""
    result: str
    """Field of :class:`~rljob_runtime.overlap.arrange.StepSamples` that its answer fills."""
    takes_sampling: bool = True
    """Whether the method is given temperature and sampling mask."""
    takes_routes: bool = False
    """Whether it replays the engines' routes, where samples have them: only where the model is the one that sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """A component's running workers and what the loop does with them."""

    role: Role
    group: WorkerGroup
    phase: str
    """What a lease of it is for, with ``{step}``: for messages and the timeline."""
    scorings: tuple[Scoring, ...] = ()
    """Passes that it makes in this job; each fills another field of the samples."""
    tags: tuple[str, ...] = ()
    """Of the prompts whose samples it scores; empty: all that no other component of its role names."""
    ranks_per_share: int = 1
    """Neighboring ranks that compute one data-parallel share together (context and tensor parallelism)."""
    checkpoint_folder: str | None = None
    """Folder in a checkpoint; None: it has nothing to save."""
    survivable: bool = False
    """Whether its other workers, or those of other components of the role, take over where one is lost."""

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Its workers, in rank order."""
        return self.group.workers

    def leased(self, step: int) -> AbstractAsyncContextManager[None]:
        """It can do anything inside the block."""
        return self.group.resident(what=self.phase.format(step=step))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobWorkers:
    """Every worker of a job."""

    components: tuple[Component, ...]
    """In the order of the plan."""
    arbiter: DeviceArbiter | None = None
    """Arbiter of the devices that several components share; None: there are none."""
    sync_backend: SyncBackend = SyncBackend.OBJECT_STORE
    """How weights reach the engines from where the trainer's rank 0 is."""
    judges_displace_engines: bool = False
    """Whether a judge uses a device of an engine."""
    sync_senders: tuple[int, ...] = (0,)
    """Trainer ranks that pack and send them."""
    sync_neighbors: tuple[tuple[int | None, ...], ...] = ()
    """By engine and process of it, the trainer rank on its device; see ``TransportSettings.neighbors``."""
    sync_engine_nodes: tuple[int, ...] = ()
    """Node rank of each engine."""
    sync_sender_nodes: Mapping[int, int] = field(default_factory=dict)
    """Node rank of each trainer rank."""

    def with_role(self, role: Role) -> tuple[Component, ...]:
        """All components of a role."""
        return tuple(component for component in self.components if component.role is role)

    @property
    def trainer(self) -> Component:
        """The component whose policy is trained."""
        return self.with_role(Role.TRAINER)[0]

    @property
    def critic(self) -> Component | None:
        """The component that learns values, if there is one."""
        return next(iter(self.with_role(Role.CRITIC)), None)

    @property
    def scorers(self) -> tuple[tuple[Component, Scoring], ...]:
        """Components that score a step's samples in this job, and how; those that are never trained first."""
        found = [(component, scoring) for component in self.components for scoring in component.scorings]
        return tuple(sorted(found, key=lambda pair: (pair[0].checkpoint_folder is not None, pair[0].role is not Role.TRAINER)))

    def scored_by(self, component: Component, tags: Sequence[str]) -> list[bool]:
        """Whether a component scores the samples of prompts with these tags."""
        if component.tags:
            return [tag in component.tags for tag in tags]
        elsewhere = {tag for other in self.with_role(component.role) for tag in other.tags}
        return [tag not in elsewhere for tag in tags]

    @property
    def engines(self) -> tuple[Worker, ...]:
        """Engines of all rollout components; an engine's index counts through them."""
        return tuple(worker for component in self.with_role(Role.ROLLOUT) for worker in component.workers)

    @property
    def rewards(self) -> tuple[Worker, ...]:
        """Reward workers of all reward components."""
        return tuple(worker for component in self.with_role(Role.REWARD) for worker in component.workers)

    @property
    def environments(self) -> tuple[Worker, ...]:
        """Environment workers of all environment components."""
        return tuple(worker for component in self.with_role(Role.ENVIRONMENT) for worker in component.workers)

    @property
    def leased_judges(self) -> tuple[Component, ...]:
        """Judges that share devices."""
        return tuple(component for component in self.with_role(Role.JUDGE) if component.group.shares_devices)

    @property
    def leased_engines(self) -> tuple[int, ...]:
        """Indexes of the engines that release their devices while other components compute there."""
        leased: list[int] = []
        first = 0
        for component in self.with_role(Role.ROLLOUT):
            leased += [first + rank for rank in component.group.leased_ranks]
            first += len(component.workers)
        return tuple(leased)

    @property
    def indispensable(self) -> tuple[Worker, ...]:
        """Workers whose loss ends the run: all but those that can take over for each other."""
        return tuple(worker for component in self.components if not component.survivable for worker in component.workers)

    @asynccontextmanager
    async def generating(self, step: int) -> AsyncIterator[None]:
        """All engines can answer inside the block."""
        async with AsyncExitStack() as leases:
            for rollout in self.with_role(Role.ROLLOUT):
                await leases.enter_async_context(rollout.leased(step))
            yield

    @asynccontextmanager
    async def judging(self, step: int) -> AsyncIterator[None]:
        """All judges can answer inside the block."""
        async with AsyncExitStack() as leases:
            for judge in self.leased_judges:
                await leases.enter_async_context(judge.leased(step))
            yield

    @asynccontextmanager
    async def syncing(self, step: int) -> AsyncIterator[None]:
        """Weights can travel from the trainer to the engines inside the block; those of the engines are written and stay."""
        what = f"weight sync after step {step}"
        async with AsyncExitStack() as leases:
            await leases.enter_async_context(self.trainer.group.resident(WEIGHTS, what=what))
            for rollout in self.with_role(Role.ROLLOUT):
                await leases.enter_async_context(rollout.group.resident(PARAMS, writes=PARAMS, is_offload_states=False, what=what))
            yield

    def take_metrics(self) -> dict[str, float]:
        """Metrics of the switches since the last call; none where nothing is shared."""
        return {} if self.arbiter is None else self.arbiter.take_metrics()

    def residency(self) -> list[DeviceResidency]:
        """What is where now, on shared devices."""
        return [] if self.arbiter is None else self.arbiter.residency()
