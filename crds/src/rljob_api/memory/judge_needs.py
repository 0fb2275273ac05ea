"""What a judge holds on one of its devices: an engine of its own model, which gets no weights from the trainer.

While others have its devices it gives its memory back as a whole: on accelerators vLLM's sleep keeps the weights in host memory, on CPU
they are read again (``rljob_runtime.engine.vllm.server``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rljob_api.memory.engine_needs import CPU_PREFILL_TOKENS, LARGE_PREFILL_TOKENS, EngineNeeds
from rljob_api.memory.model import Kind, Need, Phase, ProcessNeeds
from rljob_api.memory.units import MIB

CPU_SERVER_BYTES = 650 * MIB
"""vLLM's API server, a process beside the engine's: 651 MiB with shared pages divided, measured with vLLM 0.32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeNeeds(EngineNeeds):
    """Computes the needs of one engine of a Judge on one of its devices."""

    @property
    def full_tokens(self) -> int:
        """Tokens of the longest request: ``max_model_len`` where it is given, else as many as it computes at once."""
        longest = self.engine.extra_args.get("max_model_len")
        prefill = LARGE_PREFILL_TOKENS if self.on_cuda else CPU_PREFILL_TOKENS
        return longest if isinstance(longest, int) else prefill

    def needs(self) -> ProcessNeeds:
        """States; how many requests wait for each other is not estimated, their length is the template's and the judge's own."""
        own = super(JudgeNeeds, self).needs()
        beside = () if self.on_cuda else (Need(kind=Kind.PROCESS, name="server", formula="constant", num_bytes=CPU_SERVER_BYTES),)
        states = (*beside, *own.states)
        return replace(
            own, active=frozenset({Phase.JUDGE}), states=states, starting=states, working={}, carries_weights=False, capacity=None
        )
