"""What a trainer process of low-rank adapters holds (LoRA, arXiv 2106.09685), as ``rljob_runtime.training.lora`` has them.

The model is frozen and held in ``model.dtype``; adapters, their gradients and both moments of AdamW are float32. A layer computes with
the sum of its weight and its adapters' product, which is made in float32 and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.memory.adapters import adapter_parameters
from rljob_api.memory.model import Kind, Need, ProcessNeeds
from rljob_api.memory.training_needs import MASTER_BYTES, PolicyNeeds, process_need
from rljob_api.memory.units import ceil_div, show_count


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterNeeds(PolicyNeeds):
    """Computes the needs of one process of a policy of which only adapters are trained."""

    @property
    def adapter_parameters(self) -> int:
        """Parameters of all adapters; experts have none. 0 where sizes are not known."""
        return adapter_parameters(self.spec, self.shape)

    @property
    def trains_norms(self) -> bool:
        """Only matrices have adapters."""
        return False

    def trained(self) -> ProcessNeeds:
        """Needs of a frozen policy with trained adapters, whose merged weights go to the engines."""
        (passes, step), size, process = self.phases, self.compute_bytes, process_need(self.on_cuda)
        weights = self._sharded(Kind.WEIGHT, f"{self.spec.model.dtype} weights", size)
        adapters = self._adapters(Kind.WEIGHT, "float32 adapters", MASTER_BYTES)
        optimizer = self._adapters(Kind.OPTIMIZER, "AdamW m and v of adapters", 2 * MASTER_BYTES)
        gradients = self._adapters(Kind.GRAD, "gradients of adapters", MASTER_BYTES)
        working = {
            passes: self._passes(size, gradients, *self._merged()),
            step: (gradients,),
            **self._sending(),
        }
        return ProcessNeeds(
            active=frozenset(working),
            states=(process, weights, adapters, optimizer),
            starting=(process, weights, self._reading(size)),
            working=working,
            host_starting=(self._reading(size),),
            saved=self._saved(adapters, optimizer),
            carries_weights=self.first,
            keeps_workspace=self.on_cuda,
        )

    def _adapters(self, kind: Kind, name: str, size: int) -> Need:
        """Sharded like the weights, but for whole gradients while several micro-batches are added up."""
        whole = kind is Kind.GRAD and self.holds_whole_gradients
        shards = self.tensor if whole else self.data * self.tensor
        return Need(
            kind=kind,
            name=name,
            formula=f"{show_count(self.adapter_parameters)} x {size} B{self._over(shards)}",
            num_bytes=ceil_div(self.adapter_parameters, shards) * size,
            remedy="a smaller model.lora.rank",
        )

    def _merged(self) -> tuple[Need, ...]:
        """The largest layer's weight with its adapters, in float32 and rounded."""
        decoder = self.shape.decoder
        if decoder is None:
            return ()
        largest = ceil_div(decoder.hidden_size * max(decoder.intermediate_size, decoder.query_size), self.tensor)
        number = MASTER_BYTES + self.compute_bytes
        formula = f"{show_count(largest)} x ({MASTER_BYTES} + {self.compute_bytes}) B"
        return (Need(kind=Kind.WORKSPACE, name="merged weight", formula=formula, num_bytes=largest * number),)

    def _last(self, *, trained: bool) -> tuple[Need, ...]:
        """The head is frozen and has no gradient."""
        return tuple(need for need in super(AdapterNeeds, self)._last(trained=trained) if need.name != "gradient of the head")
