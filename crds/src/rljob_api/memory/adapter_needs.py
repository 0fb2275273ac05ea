"""What a trainer process of low-rank adapters holds (LoRA, arXiv 2106.09685), as ``rljob_runtime.training.lora`` has them.

The model is frozen and held in ``model.dtype``; adapters and their gradients are float32, and so are both moments of AdamW unless
``training.optimizerStateDtype`` says otherwise. A layer computes with the sum of its weight and its adapters' product, which is made in
float32 and rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.dtypes import optimizer_state_bytes
from rljob_api.memory.adapters import adapter_parameters
from rljob_api.memory.model import Kind, Need, ProcessNeeds
from rljob_api.memory.process_needs import process_need
from rljob_api.memory.training_needs import MASTER_BYTES, PolicyNeeds
from rljob_api.memory.units import ceil_div, show_count


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterNeeds(PolicyNeeds):
    """Computes the needs of one process of a policy of which only adapters are trained."""

    @property
    def adapter_parameters(self) -> int:
        """Parameters of all adapters; experts have none. 0 where sizes are not known."""
        return adapter_parameters(self.spec, self.shape)

    @property
    def trains_all(self) -> bool:
        """Only linear layers have adapters."""
        return False

    def trained(self) -> ProcessNeeds:
        """Needs of a frozen policy with trained adapters, whose merged weights go to the engines."""
        (passes, step), size, process = self.phases, self.compute_bytes, process_need(self.on_cuda)
        weights = self._sharded(Kind.WEIGHT, f"{self.spec.model.dtype} weights", size)
        shards = self.data * self.tensor
        adapters = self._adapters(Kind.WEIGHT, "float32 adapters", MASTER_BYTES, shards)
        optimizer = self._adapters(Kind.OPTIMIZER, "AdamW m and v of adapters", optimizer_state_bytes(self.training), shards)
        working = {
            passes: self._passes(size, self._accumulated(), *self._merged()),
            step: (self._sharded_gradients(), *self._stepping(self.adapter_parameters)),
            **self._sending(),
        }
        return ProcessNeeds(
            active=frozenset(working),
            states=(process, weights, adapters, optimizer, *self._sync.kept()),
            starting=(process, weights, self._reading(size)),
            working=working,
            host_starting=(self._reading(size),),
            host_working=self._receiving(),
            host_kept=(*self._saved(adapters, optimizer), *self._sync.kept_on_host()),
            carries_weights=self.first,
            keeps_workspace=self.on_cuda,
        )

    def _adapters(self, kind: Kind, name: str, size: int, shards: int) -> Need:
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

    @property
    def gradient_bytes(self) -> int:
        """Adapters and their gradients are float32."""
        return MASTER_BYTES

    @property
    def trained_layer_parameters(self) -> int:
        """Adapters of one layer, on one process."""
        decoder = self.shape.decoder
        return 0 if decoder is None else ceil_div(self.adapter_parameters, decoder.num_layers * self.tensor)

    def _trained_root_parameters(self, size: int) -> int:
        """All adapters of a model that is one unit; others have none outside the layers."""
        return ceil_div(self.adapter_parameters, self.tensor) if self._is_one_unit(size) else 0

    def _sharded_gradients(self) -> Need:
        return self._adapters(Kind.GRAD, "gradients of adapters", MASTER_BYTES, self.data * self.tensor)

    def _accumulated(self) -> Need:
        """Whole while several micro-batches are added up."""
        shards = self.tensor if self.holds_whole_gradients else self.data * self.tensor
        return self._adapters(Kind.GRAD, "gradients of adapters", MASTER_BYTES, shards)

    def _head_gradient(self, *, kept: bool) -> tuple[Need, ...]:
        """The head is frozen and has none."""
        return ()
