"""From the plan to the bytes in every phase: ``estimate`` is the entry.

::

    Plan ── situations ──> equal devices, equal nodes ─┐
    spec, ModelShape ── *_needs ──> one process alone ─┴─> who is active, who keeps what ──> PoolEstimate per situation

Devices of CUDA groups are pools of their own, and their nodes' memory is a pool for what passes through it. On CPU groups the
processes share the node's memory; where such a group declares deviceMemory, each device is a pool as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rljob_api.memory.adapter_needs import AdapterNeeds
from rljob_api.memory.critic_needs import CriticNeeds
from rljob_api.memory.engine_needs import EngineNeeds
from rljob_api.memory.judge_needs import JudgeNeeds
from rljob_api.memory.known_shapes import Served, served_shapes
from rljob_api.memory.model import (
    Kind,
    KVCapacity,
    MemoryEstimate,
    Need,
    Phase,
    PhaseEstimate,
    PoolEstimate,
    PoolKind,
    ProcessNeeds,
    SharedFraction,
    Term,
)
from rljob_api.memory.shape import ModelShape
from rljob_api.memory.situations import Resident, Situation, engine_situations, situations
from rljob_api.memory.sync_needs import keeps_update, whole_update
from rljob_api.memory.training_needs import PolicyNeeds
from rljob_api.memory.units import show_bytes
from rljob_api.planning.plan import Plan, PlannedComponent, PlannedProcess
from rljob_api.planning.sync_routes import chosen_backend, chosen_senders
from rljob_api.quantities import rounded_down
from rljob_api.roles import TRAITS
from rljob_api.v1alpha1.components import Component, ComponentOffload, Engine, OffloadPolicy, Role
from rljob_api.v1alpha1.nodes import NodeGroup
from rljob_api.v1alpha1.operations import THROUGH_HOST_MEMORY, Residency
from rljob_api.v1alpha1.rljob import RLJobSpec
from rljob_api.vocabulary import GradientReduction, RouterReplay

TIGHT_SHARE = 0.9
"""From this share of the limit on an estimate is tight: fragments and rounding of allocators are not in it."""
_ROUNDING = 1e-9
_COPIED = frozenset({Kind.WEIGHT, Kind.OPTIMIZER})
"""Kinds that are copied when they leave; others can be made again."""
_HOST_REMEDY = "Never in components[].offload for state that has room on the device"


def estimate(spec: RLJobSpec, plan: Plan, shape: ModelShape | None, served: Served | None = None) -> MemoryEstimate:
    """Memory of every distinct situation, by phase and term.

    Args:
        spec: of the job.
        plan: of that spec.
        shape: of its model; None estimates nothing, but still finds engines that share a device and want too much of it.
        served: of the models that Judges and Teachers have of their own, without those of unknown size; None takes what the spec says.
    """
    served = served_shapes(spec) if served is None else served
    seen = situations(plan, served)
    fractions = tuple(_shared_fractions(spec, engine_situations(plan)))
    if shape is None:
        notes = ("the size of the model is not known: set spec.model.parameterCount",)
        return MemoryEstimate(shape=None, pools=(), capacities=(), shared_fractions=fractions, notes=notes)
    estimator, pools = _estimated(spec, plan, shape, served, seen)
    return MemoryEstimate(
        shape=shape,
        pools=tuple(sorted(pools, key=_fullest_first)),
        capacities=estimator.capacities(),
        shared_fractions=fractions,
        notes=tuple(_notes(spec, shape, served, pools, estimator.reduction)),
    )


def process_needs(
    spec: RLJobSpec, plan: Plan, shape: ModelShape, served: Served | None = None
) -> Callable[[PlannedComponent, PlannedProcess], ProcessNeeds]:
    """A function that tells the needs of one process that holds a model of known size: what :func:`estimate` adds up.

    Args:
        spec: of the job.
        plan: of that spec.
        shape: of its model.
        served: of the models that Judges and Teachers have of their own; None takes what the spec says.
    """
    served = served_shapes(spec) if served is None else served
    estimator, _ = _estimated(spec, plan, shape, served, situations(plan, served))
    indexes = {component.name: index for index, component in enumerate(plan.components)}

    def needs(component: PlannedComponent, process: PlannedProcess) -> ProcessNeeds:
        first = TRAITS[component.role].publishes_weights and process.rank == 0
        return estimator.of((indexes[component.name], first), plan.nodes[process.node_rank].group)

    return needs


def chosen_reduction(spec: RLJobSpec, plan: Plan, shape: ModelShape | None, served: Served | None = None) -> GradientReduction:
    """When a job's gradients are reduced: what it asks for, or with Auto on each micro-batch where whole gradients do not fit.

    Args:
        spec: of the job.
        plan: of that spec.
        shape: of its model; None decides for the last micro-batch, which is faster, as does a limit that the spec does not say.
        served: of the models that Judges and Teachers have of their own; None takes what the spec says.
    """
    if shape is None:
        asked = spec.training.gradient_reduction
        return GradientReduction.LAST_MICRO_BATCH if asked is GradientReduction.AUTO else asked
    served = served_shapes(spec) if served is None else served
    return _estimated(spec, plan, shape, served, situations(plan, served))[0].reduction


def _estimated(
    spec: RLJobSpec, plan: Plan, shape: ModelShape, served: Served, seen: tuple[Sequence[Situation], Sequence[Situation]]
) -> tuple[_Estimator, list[PoolEstimate]]:
    """The estimator with the reduction that is decided for, and its pools of the situations (of devices, of nodes)."""
    asked, each = spec.training.gradient_reduction, GradientReduction.EACH_MICRO_BATCH
    first = _Estimator(spec, plan, shape, served, GradientReduction.LAST_MICRO_BATCH if asked is GradientReduction.AUTO else asked)
    pools = first.pools(*seen)
    if asked is not GradientReduction.AUTO or not any(_is_tight(pool) for pool in pools):
        return first, pools
    second = _Estimator(spec, plan, shape, served, each)
    smaller = second.pools(*seen)
    helps = any(_is_tight(pool) and less.peak.num_bytes < pool.peak.num_bytes for pool, less in zip(pools, smaller, strict=True))
    return (second, smaller) if helps else (first, pools)


def _is_tight(pool: PoolEstimate) -> bool:
    return pool.limit_bytes is not None and pool.peak.num_bytes > TIGHT_SHARE * pool.limit_bytes


def _fullest_first(pool: PoolEstimate) -> tuple[int, float, int]:
    need = pool.peak.num_bytes
    if pool.limit_bytes is None:
        return 1, -float(need), pool.first
    return 0, -need / pool.limit_bytes if pool.limit_bytes else -float("inf"), pool.first


def _bytes(quantity: str | None) -> int | None:
    return None if quantity is None else rounded_down(quantity)


def _engine(spec: RLJobSpec, index: int) -> Engine:
    return spec.components[index].engine or Engine()


def _shared_fractions(spec: RLJobSpec, on_devices: Sequence[Situation]) -> Iterator[SharedFraction]:
    """Devices whose engines' shares add up to more than the whole; a judge that makes room for others is not there with them.

    Judges alone are compared by ``rljob_api.rules.judges``: they are on a device together also where they switch.
    """
    switching = spec.offload.residency is Residency.SWITCHING
    cuda = {group.name for group in spec.node_groups if group.on_accelerators}
    for situation in on_devices:
        engines = [
            (index, engine.memory_fraction, count)
            for (index, _), count in situation.residents
            if (traits := TRAITS[spec.components[index].role]).has_engine
            and not (traits.has_own_model and switching)
            and (engine := _engine(spec, index)).kv_cache_bytes is None
        ]
        several = sum(count for _, _, count in engines) > 1 and any(spec.components[i].role is not Role.JUDGE for i, _, _ in engines)
        if situation.group in cuda and several and sum(share * count for _, share, count in engines) > 1 + _ROUNDING:
            index, value, _ = engines[-1]
            yield SharedFraction(
                path=f"spec.components[{index}].engine.memoryFraction",
                value=value,
                group=situation.group,
                first=situation.first,
                count=situation.count,
                fractions=tuple((spec.components[i].name, share, count) for i, share, count in engines),
            )


def _notes(
    spec: RLJobSpec, shape: ModelShape, served: Served, pools: Sequence[PoolEstimate], reduction: GradientReduction
) -> Iterator[str]:
    if shape.decoder is None:
        yield (
            "only the number of parameters is known: gathered layers, activations, logits and what a KV cache holds are left out, "
            "so that more is needed than shown"
        )
    used = {pool.group for pool in pools if pool.kind is PoolKind.DEVICE and pool.limit_bytes is None}
    for index, group in enumerate(spec.node_groups):
        if group.name in used:
            yield f"spec.nodeGroups[{index}].deviceMemory is not set: nothing is checked on the devices of {group.name}"
    for index, component in enumerate(spec.components):
        if TRAITS[component.role].has_own_model and component.name not in served:
            yield f"{component.name}: left out, the size of its model is not known: set spec.components[{index}].model.parameterCount"
    if reduction is GradientReduction.EACH_MICRO_BATCH and spec.training.gradient_reduction is GradientReduction.AUTO:
        yield "training.gradientReduction: Auto is EachMicroBatch here, because whole gradients would not fit"
    if spec.training.router_replay is not RouterReplay.DISABLED and shape.decoder is not None:
        rollout = spec.rollout
        tokens = rollout.prompts_per_step * rollout.samples_per_prompt * (rollout.max_prompt_tokens + rollout.max_response_tokens)
        routes = show_bytes(tokens * shape.decoder.route_bytes)
        yield f"training.routerReplay: the head's driver has up to {routes} of routes a step, about three times while it makes batches"
    if spec.model.lora is not None and shape.decoder is None:
        yield "model.lora: adapters are left out, their size follows from that of the layers"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Occupant:
    """Equal processes of a component in a pool."""

    name: str
    offload: ComponentOffload
    needs: ProcessNeeds
    processes: int
    switches: bool
    """Whether it makes room for others while idle."""
    is_engine: bool
    serves: bool
    """Whether it is an engine with a model of its own."""
    copies: bool
    """Whether what leaves the device is kept in host memory; else it is read or received again."""

    def terms(self, needs: Sequence[Need]) -> tuple[Term, ...]:
        return tuple(Term(component=self.name, need=need, processes=self.processes) for need in needs if need.num_bytes)

    def at(self, phase: Phase) -> tuple[Term, ...]:
        """What it holds during a phase other than the start."""
        if phase not in self.needs.active:
            return self.idle()
        states = [need for need in self.needs.states if not self._away(need.kind, phase)]
        return self.terms([*states, *self.needs.working.get(phase, ())])

    def _away(self, kind: Kind, phase: Phase) -> bool:
        """Whether it does without: a sync needs weights alone, and an optimizer that is Always to leave comes for its step alone."""
        if not self.switches:
            return False
        if kind is Kind.KV_CACHE:
            return phase is Phase.WEIGHT_SYNC and self._policy(kind) is not OffloadPolicy.NEVER
        if kind is not Kind.OPTIMIZER:
            return False
        if self._policy(kind) is OffloadPolicy.ALWAYS:
            return phase not in (Phase.OPTIMIZER_STEP, Phase.CRITIC_STEP)
        return phase is Phase.WEIGHT_SYNC and self._policy(kind) is not OffloadPolicy.NEVER

    def idle(self) -> tuple[Term, ...]:
        """What it holds while others compute."""
        kept = [need for need in self.needs.states if self._stays(need.kind)]
        if self.needs.keeps_workspace and not self.switches:
            kept += self._cached()
        return self.terms(kept)

    def copied(self) -> tuple[Term, ...]:
        """What it copies to host memory, and keeps there once it has."""
        if not self.switches or not self.copies:
            return ()
        leaving = [need for need in self.needs.states if need.kind in _COPIED and not self._stays(need.kind)]
        return self.terms([replace(need, name=f"{need.name} in host memory", remedy=_HOST_REMEDY) for need in leaving])

    def _policy(self, kind: Kind) -> OffloadPolicy:
        policies = {
            Kind.WEIGHT: self.offload.weight,
            Kind.GRAD: self.offload.grad,
            Kind.OPTIMIZER: self.offload.optimizer,
            Kind.KV_CACHE: self.offload.kv_cache,
        }
        return policies.get(kind, OffloadPolicy.AUTO)

    def _stays(self, kind: Kind) -> bool:
        return kind is Kind.PROCESS or not self.switches or self._policy(kind) is OffloadPolicy.NEVER

    def _cached(self) -> list[Need]:
        """PyTorch keeps the memory of an earlier peak for itself."""
        peaks = {phase: sum(need.num_bytes for need in needs) for phase, needs in self.needs.working.items()}
        phase = max(peaks, key=lambda one: peaks[one])
        remedy = "offload.residency: Switching"
        return [Need(kind=Kind.WORKSPACE, name="kept by PyTorch", formula=f"of {phase}", num_bytes=peaks[phase], remedy=remedy)]


class _Estimator:
    """Estimates pool after pool; computes the needs of equal processes once."""

    def __init__(self, spec: RLJobSpec, plan: Plan, shape: ModelShape, served: Served, reduction: GradientReduction) -> None:
        self._spec, self._plan, self._shape, self._served = spec, plan, shape, served
        self.reduction = reduction
        self._groups = {group.name: (index, group) for index, group in enumerate(spec.node_groups)}
        self._needs: dict[tuple[Resident, str], ProcessNeeds] = {}
        self._num_senders = len(chosen_senders(spec, plan))
        self._backend = chosen_backend(spec, plan)
        self._num_engines = sum(component.world_size for component in plan.with_role(Role.ROLLOUT))

    def pools(self, on_devices: Sequence[Situation], on_nodes: Sequence[Situation]) -> list[PoolEstimate]:
        """Devices, then nodes, then what offloaded state takes on these."""
        pools = [pool for s in on_devices if (pool := self.device(s))]
        pools += [pool for s in on_nodes if (pool := self.node(s))]
        return pools + [pool for s in on_nodes if (pool := self.host(s))]

    def device(self, situation: Situation) -> PoolEstimate | None:
        """One device; None on CPU groups that give devices no memory of their own."""
        index, group = self._groups[situation.group]
        if not group.on_accelerators and group.device_memory is None:
            return None
        components = {component for (component, _), _ in situation.residents}
        occupants = self._occupants(situation, shared=dict.fromkeys(components, len(components) > 1))
        path = f"spec.nodeGroups[{index}].deviceMemory"
        return self._pool(PoolKind.DEVICE, situation, (path, group.device_memory), _phases(occupants, {}))

    def node(self, situation: Situation) -> PoolEstimate | None:
        """One node's memory: all of its processes on CPU, else what passes through it."""
        index, group = self._groups[situation.group]
        occupants = self._on_node(situation)
        traveling = self._traveling(situation, occupants)
        copied = tuple(term for one in occupants for term in (*one.copied(), *one.terms(one.needs.host_kept)))
        extra = _extra(occupants, traveling)
        phases = _host_phases(occupants, extra, copied) if group.on_accelerators else _phases(occupants, extra, copied)
        field = "limits.memory" if "memory" in group.resources.limits else "memory"
        limit = (f"spec.nodeGroups[{index}].resources.{field}", group.resources.memory_limit)
        return self._pool(PoolKind.NODE, situation, limit, phases) if phases else None

    def host(self, situation: Situation) -> PoolEstimate | None:
        """What offload.hostMemoryBytes bounds on one node; None where it says nothing, or nothing is copied there."""
        limit = self._spec.offload.host_memory_bytes
        copied = tuple(term for one in self._on_node(situation) for term in one.copied())
        if limit is None or not copied:
            return None
        phases = (PhaseEstimate(phase=Phase.GENERATE, terms=_merged(copied)),)
        return self._pool(PoolKind.HOST, situation, ("spec.offload.hostMemoryBytes", str(limit)), phases)

    def capacities(self) -> tuple[KVCapacity, ...]:
        """KV cache capacity of all engines seen, by component and group."""
        return tuple(needs.capacity for _, needs in sorted(self._needs.items()) if needs.capacity is not None)

    def _pool(self, kind: PoolKind, situation: Situation, limit: tuple[str, str | None], phases: tuple[PhaseEstimate, ...]) -> PoolEstimate:
        path, text = limit
        return PoolEstimate(
            kind=kind,
            group=situation.group,
            count=situation.count,
            first=situation.first,
            limit_bytes=_bytes(text),
            limit_path=path,
            limit_text=text,
            phases=phases,
        )

    def _on_node(self, situation: Situation) -> list[_Occupant]:
        shared = {component: bool(self._plan.components[component].shares_devices_with) for (component, _), _ in situation.residents}
        return self._occupants(situation, shared=shared)

    def _occupants(self, situation: Situation, *, shared: dict[int, bool]) -> list[_Occupant]:
        return [self._occupant(resident, processes, situation.group, shared[resident[0]]) for resident, processes in situation.residents]

    def _occupant(self, resident: Resident, processes: int, group: str, shared: bool) -> _Occupant:
        component = self._spec.components[resident[0]]
        traits = TRAITS[component.role]
        serves = traits.has_engine and traits.has_own_model
        return _Occupant(
            name=component.name,
            offload=component.offload,
            needs=self.of(resident, group),
            processes=processes,
            switches=shared and self._spec.offload.residency is Residency.SWITCHING,
            is_engine=traits.has_engine,
            serves=serves,
            # Engines get their weights by the next sync; a judge's stay in host memory where its engine can sleep.
            copies=not traits.has_engine or (serves and self._groups[group][1].on_accelerators),
        )

    def of(self, resident: Resident, group: str) -> ProcessNeeds:
        """Needs of one process on a device of a group."""
        found = self._needs.get((resident, group))
        if found is None:
            found = self._needs[resident, group] = self._compute(resident, self._groups[group][1])
        return found

    def _compute(self, resident: Resident, group: NodeGroup) -> ProcessNeeds:
        index, first = resident
        component, processes = self._spec.components[index], self._plan.components[index].world_size
        traits = TRAITS[component.role]
        shape = self._served[component.name] if traits.has_own_model else self._shape
        if traits.has_engine:
            engine_needs = JudgeNeeds if traits.has_own_model else EngineNeeds
            return engine_needs(
                spec=self._spec,
                component=component.name,
                path=f"spec.components[{index}]",
                engine=_engine(self._spec, index),
                shape=shape,
                num_engines=self._num_engines,
                group=group.name,
                on_cuda=group.on_accelerators,
                limit_bytes=_bytes(group.device_memory) if group.on_accelerators else None,
                backend=self._backend,
            ).needs()
        policy = self._needs_of(component)(
            spec=self._spec,
            shape=shape,
            world_size=processes,
            tensor_parallel_size=self._spec.tensor_parallel_size(component),
            token_parts=self._spec.token_parts(component),
            context_parallel_size=self._spec.context_parallel_size(component),
            expert_parallel_size=self._spec.expert_parallel_size(component),
            on_cuda=group.on_accelerators,
            first=first,
            senders=self._num_senders,
            backend=self._backend,
            reduces_each=self.reduction is GradientReduction.EACH_MICRO_BATCH,
        )
        return policy.trained() if traits.is_trained else policy.frozen()

    def _needs_of(self, component: Component) -> type[PolicyNeeds]:
        """By role; only the Trainer has adapters. A teacher is a reference with another model."""
        trainer = PolicyNeeds if self._spec.model.lora is None else AdapterNeeds
        return {Role.TRAINER: trainer, Role.CRITIC: CriticNeeds}.get(component.role, PolicyNeeds)

    def _traveling(self, situation: Situation, occupants: Sequence[_Occupant]) -> dict[Phase, tuple[Term, ...]]:
        """An update on a node: in a weight sync, until every engine has it, or also between two, where engines receive it together.

        Nothing of one that goes from device to device (``rljob_runtime.weightsync.transports``: ``ipc``, ``nccl``).
        """
        if self._backend not in THROUGH_HOST_MEMORY or not any(one.needs.carries_weights for one in occupants):
            return {}
        rollouts = {index for index, component in enumerate(self._spec.components) if component.role is Role.ROLLOUT}
        here = [(index, devices) for (index, _), devices in situation.residents if index in rollouts]
        engines = sum(devices // _engine(self._spec, index).num_devices for index, devices in here)
        phases = {phase for one in occupants for phase in one.needs.active} if keeps_update(self._backend, engines) else {Phase.WEIGHT_SYNC}
        return dict.fromkeys(phases, (Term(component="weight sync", need=whole_update(self._spec, self._shape)),))


def _extra(occupants: Sequence[_Occupant], traveling: Mapping[Phase, tuple[Term, ...]]) -> dict[Phase, tuple[Term, ...]]:
    """What a node holds in some phases besides its processes' own: an update, and what these receive."""
    extra = dict(traveling)
    for one in occupants:
        for phase, needs in one.needs.host_working.items():
            if terms := one.terms(needs):
                extra[phase] = (*extra.get(phase, ()), *terms)
    return extra


def _phases(
    occupants: Sequence[_Occupant], extra: Mapping[Phase, tuple[Term, ...]], copied: tuple[Term, ...] = ()
) -> tuple[PhaseEstimate, ...]:
    """Start-up, and every phase in which somebody here is active; ``extra`` adds to some, ``copied`` to all after the start."""
    active = {phase for one in occupants for phase in one.needs.active}
    phases = [PhaseEstimate(phase=Phase.START_UP, terms=_merged(_start_up(occupants)))]
    for phase in Phase:
        if phase in active:
            terms = _at(phase, occupants)
            phases.append(PhaseEstimate(phase=phase, terms=_merged((*terms, *extra.get(phase, ()), *copied))))
    return tuple(phases)


def _at(phase: Phase, occupants: Sequence[_Occupant]) -> list[Term]:
    """Terms of all; of judges that make room for each other, which score one after the other, the largest computes."""
    in_turn = [one for one in occupants if one.switches and phase is Phase.JUDGE and phase in one.needs.active]
    beside = [term for one in occupants if one not in in_turn for term in one.at(phase)]

    def while_computes(active: _Occupant) -> list[Term]:
        return [term for one in in_turn for term in (one.at(phase) if one is active else one.idle())]

    largest = max((while_computes(one) for one in in_turn), key=lambda terms: sum(term.num_bytes for term in terms), default=[])
    return beside + largest


def _merged(terms: Iterable[Term]) -> tuple[Term, ...]:
    """Equal needs of one component as one term."""
    counts: dict[tuple[str, Need], int] = {}
    for term in terms:
        key = (term.component, term.need)
        counts[key] = counts.get(key, 0) + term.processes
    return tuple(Term(component=component, need=need, processes=count) for (component, need), count in counts.items())


def _start_up(occupants: Sequence[_Occupant]) -> tuple[Term, ...]:
    """Those that make room for others start in stages (the runtime's ``start_stages``), the others may start at any time: the worst moment.

    Policies load together and leave, each judge after the other does, and engines, which measure what is free, come last.
    """
    switching = [one for one in occupants if one.switches]
    policies = [one for one in switching if not one.is_engine]
    judges = [[one] for one in switching if one.serves]
    stages = [policies, *judges, [one for one in switching if one.is_engine and not one.serves]]
    always = [term for one in occupants if not one.switches for term in one.terms(one.needs.starting)]

    def at(stage: int) -> tuple[Term, ...]:
        left = [term for earlier in stages[:stage] for one in earlier for term in one.idle()]
        return (*always, *left, *(term for one in stages[stage] for term in one.terms(one.needs.starting)))

    return max((at(stage) for stage in range(len(stages))), key=lambda terms: sum(term.num_bytes for term in terms))


def _host_phases(
    occupants: Sequence[_Occupant], extra: Mapping[Phase, tuple[Term, ...]], copied: tuple[Term, ...]
) -> tuple[PhaseEstimate, ...]:
    """Phases of the memory of a node with accelerators; ``copied`` stays there from the first switch on."""
    loading = _merged(term for one in occupants for term in one.terms(one.needs.host_starting))
    phases = [PhaseEstimate(phase=Phase.START_UP, terms=loading)] if loading else []
    if copied and not extra:
        phases.append(PhaseEstimate(phase=Phase.TRAIN, terms=_merged(copied)))
    phases += [PhaseEstimate(phase=phase, terms=_merged((*extra[phase], *copied))) for phase in Phase if phase in extra]
    return tuple(phases)
