"""Which devices a plan gives to training and to generation."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rljob_api.planning.plan import Plan
from rljob_api.planning.sync_routes import chosen_backend, chosen_senders, engines_elsewhere, trainer_nodes
from rljob_api.v1alpha1.components import Engine, Role
from rljob_api.v1alpha1.operations import SyncBackend
from rljob_api.v1alpha1.rljob import RLJobSpec
from rljob_runtime.errors import SetupError


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Counts; of several Rollout components all engines are taken to be like the first."""

    trainer_devices: int
    tensor_parallel_size: int
    """Of the trainer."""
    device_unit: int
    """Of which the trainer has a multiple: devices that compute one data-parallel share together, and that divide experts."""
    engines: int
    engine_devices: int
    """Of one engine."""
    engine_stages: int
    """Pipeline stages of one engine."""
    max_engine_devices: int
    """Devices of the smallest node with an engine: an engine is on one node."""
    slots: int
    """Responses of one engine at the same time."""
    caches_prefixes: bool
    reference_devices: int
    """0 without a Reference."""
    shares_devices: bool
    """Trainer and engines have devices in common: they compute in turn."""
    trainer_spans_nodes: bool
    sync_spans_nodes: bool
    """Weights leave a node on their way to the engines."""
    sync_copies: float
    """How often all weights leave a sender's node in a sync: once for each node of engines with the object store, else once at most."""

    @property
    def rollout_devices(self) -> int:
        """Of all engines."""
        return self.engines * self.engine_devices

    @property
    def engine_tensor_devices(self) -> int:
        """Of one engine those that share each layer."""
        return max(self.engine_devices // self.engine_stages, 1)

    @property
    def devices(self) -> int:
        """Of Trainer and engines together."""
        return max(self.trainer_devices, self.rollout_devices) if self.shares_devices else self.trainer_devices + self.rollout_devices

    def moved(self, engines: int) -> Layout | None:
        """The layout with so many engines more and the trainer's devices fewer; None where that cannot be."""
        trainer = self.trainer_devices - engines * self.engine_devices
        possible = not self.shares_devices and self.engines + engines >= 1 and trainer >= self.device_unit
        if not possible or trainer % self.device_unit:
            return None
        return replace(self, engines=self.engines + engines, trainer_devices=trainer)


def layout_of(spec: RLJobSpec, plan: Plan) -> Layout:
    """The layout of a planned job.

    Raises:
        SetupError: it has no Trainer or no engine on devices, or its responses are episodes.
    """
    trainers, rollouts = plan.with_role(Role.TRAINER), plan.with_role(Role.ROLLOUT)
    training = {device for component in trainers for device in component.devices}
    generating = {device for component in rollouts for device in component.devices}
    if not training or not generating:
        raise SetupError("--simulate: needs a Trainer and a Rollout component on devices; this job trains nothing or generates nothing")
    if spec.environments:
        raise SetupError("--simulate: episodes are not simulated, and spec.environments is set; take a job whose rewards score responses")
    engine = next((c.engine for c in spec.components if c.role is Role.ROLLOUT and c.engine is not None), None) or Engine()
    size = engine.num_devices
    trainer_nodes = {process.node_rank for component in trainers for process in component.processes}
    rollout_nodes = {process.node_rank for component in rollouts for process in component.processes}
    references = {device for component in plan.with_role(Role.REFERENCE) for device in component.devices}
    return Layout(
        trainer_devices=len(training),
        tensor_parallel_size=min(spec.training.tensor_parallel_size, len(training)),
        device_unit=min(spec.training.device_unit, len(training)),
        engines=sum(component.world_size for component in rollouts),
        engine_devices=size,
        engine_stages=engine.pipeline_parallel_size,
        max_engine_devices=min(plan.nodes[rank].num_devices for rank in rollout_nodes),
        slots=engine.max_running_requests,
        caches_prefixes=engine.prefix_caching,
        reference_devices=len(references),
        shares_devices=bool(training & generating),
        trainer_spans_nodes=len(trainer_nodes) > 1,
        sync_spans_nodes=not rollout_nodes <= trainer_nodes,
        sync_copies=_sync_copies(spec, plan),
    )


def _sync_copies(spec: RLJobSpec, plan: Plan) -> float:
    elsewhere = engines_elsewhere(plan)[1]
    if chosen_backend(spec, plan) is not SyncBackend.OBJECT_STORE:
        return float(bool(elsewhere))  # a chain: the sender sends to the first node alone
    nodes = trainer_nodes(plan)
    return len(elsewhere) / len({nodes[rank] for rank in chosen_senders(spec, plan)})
