"""Placement of language-model training: trainer, engines and their helpers, in blocks of consecutive units.

::

    ComponentPlacement (grammar) ──> which units do components share? ──> mode ──> strategy per component ──> placements
                                     actor = rollout                      COLLOCATED     engines laid over the trainer's shards
                                     all apart                            DISAGGREGATED  dense engines
                                     all apart, auto_scheduler            AUTO           the actor has a process on every unit

The rules are RLinf 0.3.0's (``ModelParallelComponentPlacement``), with these differences: node groups are honored and process
ranks that contradict a model's size refused (D3), sizes that do not divide their units refused (D11), the critic refused in mode AUTO
instead of leaving that mode silently (D14), and every pair of models compared in mode DISAGGREGATED (D15).

Invariant DEVICE-LOCAL: in mode COLLOCATED, :meth:`ModelParallelComponentPlacement.weight_sync_map` pairs an actor process and an
engine shard on the same unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

from rljob_api.errors import PlacementError
from rljob_api.placement.topology import Topology
from rljob_convert.placement.component import MAX_TOTAL_PROCESSES, ComponentPlacement, ComponentRanks, PlacementMode, located
from rljob_convert.placement.footprint import Footprint, footprint
from rljob_convert.placement.sizes import EngineSizes, ModelParallelSizes
from rljob_convert.placement.strategies import PackedPlacementStrategy
from rljob_convert.placement.weight_sync import EngineShard, RolloutSyncMode, collocated_map, disaggregated_map, engine_stride

__all__ = [
    "EngineSizes",
    "ModelParallelComponentPlacement",
    "ModelParallelEvalComponentPlacement",
    "ModelParallelSizes",
    "RolloutSyncMode",
    "SizedComponentPlacement",
    "engine_stride",
]


class SizedComponentPlacement(ComponentPlacement):
    """What training and evaluation of models have in common."""

    def __init__(
        self,
        component_placement: Mapping[str, object],
        topology: Topology,
        sizes: ModelParallelSizes,
        *,
        max_processes: int = MAX_TOTAL_PROCESSES,
    ) -> None:
        self._sizes = sizes
        super().__init__(component_placement, topology, max_processes=max_processes)

    @property
    def sizes(self) -> ModelParallelSizes:
        """Parallelism of the models."""
        return self._sizes

    @property
    def rollout_world_size(self) -> int:
        """Units of all engines."""
        return self.get_component_ranks("rollout").num_units

    @property
    def rollout_dp_size(self) -> int:
        """Engines."""
        return self.rollout_world_size // self._sizes.rollout_engine

    def _require(self, *names: str) -> None:
        for name in names:
            if name not in self._ranks:
                raise PlacementError("M1", f"{name} is not in component_placement", f"give {name} its units")

    def _check_contiguous(self, *names: str) -> None:
        for name in names:
            entry = self._ranks.get(name)
            if entry is not None and entry.last_rank - entry.first_rank + 1 != entry.num_units:
                raise located(
                    PlacementError(
                        "M2",
                        f"the units of {name} from {entry.first_rank} to {entry.last_rank} have gaps",
                        "give models consecutive units",
                    ),
                    entry.key,
                )

    def _check_size(self, name: str, tp: int) -> None:
        units = self.get_component_ranks(name).num_units
        if tp > units:
            raise PlacementError(
                "M4", f"{name} has {units} units, its tensor parallelism needs {tp}", "give it more units, or lower its tensor parallelism"
            )

    @property
    def rollout_strategy(self) -> PackedPlacementStrategy:
        """What places the engines."""
        return self._rollout_strategy

    def _pack(self, name: str, *, place_as: str | None = None) -> None:
        """Place a component on all units from its first to its last, one to a process."""
        entry = self.get_component_ranks(name)
        self._strategies[place_as or name] = _packed(entry, entry.first_rank, entry.last_rank)
        self._check_process_ranks(name, 1)

    def _pack_rollout(self, size: int, stride: int = 1, *, first: int | None = None) -> None:
        """Place the engines, ``size`` units each, from ``first`` (None: the first of the rank map) to the last unit."""
        entry = self.get_component_ranks("rollout")
        self._rollout_strategy = _packed(entry, entry.first_rank if first is None else first, entry.last_rank, size, stride)
        self._strategies["rollout"] = self._rollout_strategy
        self._check_process_ranks("rollout", size)

    def _pack_reward(self) -> None:
        """Reward has one process per unit; where its group counts nodes, what its rank map says.

        As in RLinf, gaps in the units of reward are filled: reward is the one component whose units may have some.
        """
        if not self.get_component_ranks("reward").selection.counts_nodes:
            self._pack("reward")

    def _check_process_ranks(self, name: str, size: int) -> None:
        """Process ranks, where written, must give every process the units that its model needs (D3)."""
        entry = self.get_component_ranks(name)
        for part in entry.evaluation.parts:
            if part.gives_processes and len(part.units) != size * len(part.processes):
                self._refuse_at_the_end(
                    located(
                        PlacementError(
                            "D3",
                            f"{len(part.units)} units for {len(part.processes)} processes, but a process of {name} has {size}",
                            "leave the process ranks out",
                        ),
                        entry.key,
                    )
                )

    def _check_multiple(self, name: str, size: int) -> None:
        """The units of a model must hold whole copies of it (D11)."""
        entry = self._ranks.get(name)
        if entry is not None and entry.num_units % size:
            self._refuse_at_the_end(
                located(
                    PlacementError(
                        "D11",
                        f"{entry.num_units} units do not hold copies of {name} of {size} units each",
                        f"select a multiple of {size} units",
                    ),
                    entry.key,
                )
            )

    def _refuse_pipeline_stages(self) -> None:
        """Engines that get their tensor-parallel units only cannot have pipeline stages (D11)."""
        if self._sizes.rollout_pp > 1:
            self._refuse_at_the_end(
                PlacementError(
                    "D11",
                    f"engines have {self._sizes.rollout_tp} units each, and no place for {self._sizes.rollout_pp} pipeline stages",
                    "set the engines' pipeline parallelism to 1, or give rollout units of its own",
                )
            )


class ModelParallelEvalComponentPlacement(SizedComponentPlacement):
    """Evaluation: dense engines and reward; always COLLOCATED."""

    @property
    def placement_mode(self) -> PlacementMode:
        """Always collocated."""
        return PlacementMode.COLLOCATED

    def _arrange(self) -> None:
        self._require("rollout", "reward")
        self._check_contiguous("rollout")
        self._check_size("rollout", self._sizes.rollout_tp)
        self._pack_rollout(self._sizes.rollout_tp)
        self._pack_reward()
        self._check_multiple("rollout", self._sizes.rollout_engine)
        self._refuse_pipeline_stages()


class ModelParallelComponentPlacement(SizedComponentPlacement):
    """Training with a language model.

    Needs ``actor``, ``rollout`` and ``reward``; there may be ``inference`` (or ``actor_inference``), ``critic_inference`` and ``critic``.
    Components with other names are placed as their rank map says.
    """

    @property
    def placement_mode(self) -> PlacementMode:
        """Derived from which units components share."""
        return self._mode

    @property
    def rollout_sync_mode(self) -> RolloutSyncMode:
        """How weights get from the actor to the engines."""
        return RolloutSyncMode.COLLOCATED if self._mode is PlacementMode.COLLOCATED else RolloutSyncMode.DISAGGREGATED

    @property
    def is_pipeline(self) -> bool:
        """Whether stages run at the same time."""
        return self._mode is not PlacementMode.COLLOCATED

    @property
    def has_dedicated_inference(self) -> bool:
        """Whether log-probabilities are computed by workers of their own."""
        return self.is_pipeline and self._inference is not None

    @property
    def actor_world_size(self) -> int:
        """Units of the actor; in mode AUTO those it starts with."""
        return self.get_component_ranks("actor").num_units

    @property
    def actor_dp_size(self) -> int:
        """Copies of the actor."""
        return self.actor_world_size // self._sizes.actor_model

    @property
    def rollout_world_size(self) -> int:
        """Units of all engines; in mode AUTO with ``use_pre_process_policy``, with the actor's."""
        return self._rollout_units

    def weight_sync_map(self) -> dict[int, tuple[EngineShard, ...]]:
        """Engine shards (engine, rank within it) that every actor rank sends its weights to; RLinf's mapping.

        Raises:
            PlacementError: RLinf has no mapping for these sizes, or one that leaves engines out (D11).
        """
        sizes = self._sizes
        if sizes.rollout_pp > 1:
            raise PlacementError(
                "D11", "engines with pipeline stages have no weight-sync map", "set the engines' pipeline parallelism to 1"
            )
        if self.rollout_sync_mode is RolloutSyncMode.COLLOCATED:
            return collocated_map(actor_tp=sizes.actor_tp, actor_world=self.actor_world_size, rollout_tp=sizes.rollout_tp)
        return disaggregated_map(
            actor_tp=sizes.actor_tp,
            actor_world=self.actor_world_size,
            rollout_tp=sizes.rollout_tp,
            rollout_world=self.rollout_world_size,
        )

    def _arrange(self) -> None:
        self._require("actor", "rollout", "reward")
        self._inference = next((name for name in ("inference", "actor_inference") if name in self._ranks), None)
        names = ("actor", "rollout", *([self._inference] if self._inference else []), "critic_inference", "critic")
        self._check_contiguous(*names)
        self._footprints: dict[str, Footprint] = {name: self._footprint(name) for name in names if name in self._ranks}
        self._rollout_units = self.get_component_ranks("rollout").num_units
        self._mode = self._decide()
        self._check_size("actor", self._sizes.actor_tp)
        self._check_size("rollout", self._sizes.rollout_tp)
        if self._mode is PlacementMode.COLLOCATED:
            self._arrange_collocated()
        else:
            self._arrange_apart()
        self._pack_reward()
        if "critic" in self._ranks:
            self._pack("critic")
        self._check_multiples()

    def _footprint(self, name: str) -> Footprint:
        entry = self.get_component_ranks(name)
        return footprint(entry.selection, [part.units for part in entry.evaluation.parts])

    def _decide(self) -> PlacementMode:
        auto = self._sizes.auto_scheduler
        if auto and "critic" not in self._ranks:
            self._check_auto()
            return PlacementMode.AUTO
        if auto:
            self._refuse_at_the_end(PlacementError("D14", "auto_scheduler has no support for a critic", "remove auto_scheduler or critic"))
        if self._is_collocated():
            for name in (self._inference, "critic_inference"):
                if name is not None and name in self._ranks:
                    raise PlacementError(
                        "M3c",
                        f"{name} has units although actor and rollout share theirs",
                        f"remove {name}, or give rollout units of its own",
                    )
            return PlacementMode.COLLOCATED
        if not self._is_disaggregated():
            raise PlacementError(
                "M3e",
                "the models have some units in common, neither all nor none",
                "give actor and rollout the same units, or every model units of its own",
            )
        self._check_inference()
        return PlacementMode.DISAGGREGATED

    def _is_collocated(self) -> bool:
        return self._footprints["actor"] == self._footprints["rollout"]

    def _is_disaggregated(self) -> bool:
        """Whether no two models share units; pairs that only RLJob compares are refused at the end (D15)."""
        only_ours = ({"actor", "critic_inference"}, {self._inference, "critic"}, {self._inference, "critic_inference"})
        sharing = [pair for pair in combinations(self._footprints, 2) if self._footprints[pair[0]].overlaps(self._footprints[pair[1]])]
        if any(set(pair) not in only_ours for pair in sharing):
            return False
        for first, second in sharing:
            self._refuse_at_the_end(PlacementError("D15", f"{first} and {second} have units in common", "give each units of its own"))
        return True

    def _check_inference(self) -> None:
        if self._inference is not None:
            self._check_inference_size(self._inference, self._sizes.inference_size[0])
            if not self._sizes.recompute_logprobs:
                raise PlacementError(
                    "M3d",
                    f"{self._inference} has units, but algorithm.recompute_logprobs is not on, so it would have nothing to do",
                    f"remove {self._inference}, or turn algorithm.recompute_logprobs on",
                )
        if "critic_inference" in self._ranks:
            self._check_inference_size("critic_inference", self._sizes.critic_inference_size[0])

    def _check_inference_size(self, name: str, tp: int) -> None:
        units = self.get_component_ranks(name).num_units
        if tp > units:
            raise PlacementError(
                "M3d", f"{name} has {units} units, its tensor parallelism needs {tp}", "give it more units, or lower its tensor parallelism"
            )

    def _check_auto(self) -> None:
        """Actor, rollout and inference must fill their node groups in this order."""
        if not self._is_disaggregated():
            raise PlacementError("M3a", "auto_scheduler needs every model on units of its own", "let no two models share units")
        row = [self.get_component_ranks(name) for name in ("actor", "rollout", self._inference) if name is not None]
        following = 0
        for entry in row:
            if entry.labels != row[0].labels or entry.first_rank != following:
                break
            following = entry.last_rank + 1
        else:
            if following == row[0].selection.num_units:
                return
        raise PlacementError(
            "M3b",
            "auto_scheduler needs actor, rollout and inference in this order, from unit 0 to the last one without gaps",
            "place them one after the other",
        )

    def _arrange_collocated(self) -> None:
        self._pack("actor")
        size = self._sizes.rollout_tp
        self._pack_rollout(size, engine_stride(self._sizes.actor_tp, size))
        self._refuse_pipeline_stages()

    def _arrange_apart(self) -> None:
        actor, rollout = self.get_component_ranks("actor"), self.get_component_ranks("rollout")
        if self._mode is PlacementMode.AUTO:
            self._check_process_ranks("actor", 1)
            self._strategies["actor"] = _packed(actor, 0, actor.selection.num_units - 1)
        else:
            self._pack("actor")
        first = rollout.first_rank
        if self._mode is PlacementMode.AUTO and self._sizes.use_pre_process_policy:
            if actor.num_units % self._sizes.rollout_tp:
                raise PlacementError(
                    "M5",
                    f"use_pre_process_policy: engines of {self._sizes.rollout_tp} units do not fill the actor's {actor.num_units}",
                    f"give the actor a multiple of {self._sizes.rollout_tp} units",
                )
            first, self._rollout_units = 0, actor.num_units + rollout.num_units
        self._pack_rollout(self._units_per_engine(), first=first)
        both = "critic_inference" in self._ranks and self._mode is not PlacementMode.AUTO
        if self._inference is not None:
            self._pack(self._inference, place_as="actor_inference" if both else "inference")
        if both:
            self._pack("critic_inference")

    def _units_per_engine(self) -> int:
        """What RLinf gives an engine: its share of the units, which :meth:`_check_multiples` compares with what it needs."""
        engines = self._rollout_units // self._sizes.rollout_engine
        if not engines:
            raise PlacementError(
                "M4",
                f"rollout has {self._rollout_units} units, an engine needs {self._sizes.rollout_engine}",
                "give it more units, or lower its tensor or pipeline parallelism",
            )
        return self._rollout_units // engines

    def _check_multiples(self) -> None:
        sizes = self._sizes
        self._check_multiple("actor", sizes.actor_model)
        self._check_multiple("rollout", sizes.rollout_engine)
        self._check_multiple("critic", sizes.critic_tp * sizes.critic_cp * sizes.critic_pp)
        if self._inference is not None:
            self._check_multiple(self._inference, sizes.inference_size[0] * sizes.inference_size[1])
        self._check_multiple("critic_inference", sizes.critic_inference_size[0] * sizes.critic_inference_size[1])


def _packed(entry: ComponentRanks, first: int, last: int, size: int = 1, stride: int = 1) -> PackedPlacementStrategy:
    try:
        return PackedPlacementStrategy(first, last, size, stride, entry.labels or None)
    except PlacementError as error:
        raise located(error, entry.key) from None
