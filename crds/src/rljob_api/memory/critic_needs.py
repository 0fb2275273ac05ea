"""What a process of a critic holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rljob_api.memory.model import Need, Phase
from rljob_api.memory.training_needs import PolicyNeeds
from rljob_api.v1alpha1.learning import Training


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticNeeds(PolicyNeeds):
    """Needs of a critic: the layers of the policy, all of them trained; a value head instead of logits."""

    @property
    def phases(self) -> tuple[Phase, Phase]:
        """Passes, and the optimizer's step: phases of their own where the Trainer has the same devices."""
        return Phase.TRAIN_CRITIC, Phase.CRITIC_STEP

    @property
    def training(self) -> Training:
        """Settings that it is trained by."""
        return self.spec.algorithm.critic.over(self.spec.training)

    @property
    def less_work(self) -> str:
        """Remedy for what grows with a micro-batch."""
        own = self.spec.algorithm.critic.micro_batch_tokens is not None
        return f"a smaller {'algorithm.critic' if own else 'training'}.microBatchTokens"

    @property
    def shorter_sequences(self) -> str:
        """One more remedy, where a micro-batch is a single sequence that is longer than the budget."""
        return ", a larger contextParallelSize of that component" if self.full_tokens > self.shared_budget else ""

    @property
    def parameters(self) -> int:
        """Without the head; a value head is one row."""
        return self.shape.parameters - self._head_parameters

    @property
    def root_parameters(self) -> int:
        """Parameters outside the layers; 0 where sizes are not known."""
        return 0 if self.shape.decoder is None else self.shape.decoder.root_parameters - self._head_parameters

    @property
    def _head_parameters(self) -> int:
        decoder = self.shape.decoder
        return 0 if decoder is None or decoder.tied_embeddings else decoder.embedding_parameters

    def _last(self, *, trained: bool) -> tuple[Need, ...]:
        """The final norm and the hidden states that become values."""
        return tuple(need for need in super(CriticNeeds, self)._last(trained=trained) if need.name == "last hidden states")

    def _head_gradient(self, *, kept: bool) -> tuple[Need, ...]:
        """A row of numbers."""
        return ()

    def _receiving(self) -> Mapping[Phase, tuple[Need, ...]]:
        """Its routers are its own."""
        return {}

    def _sending(self) -> Mapping[Phase, tuple[Need, ...]]:
        return {}
