"""How a process of a trainer, a critic or a reference divides the model and its samples with others: what its needs are computed from."""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.dtypes import DTYPE_BYTES
from rljob_api.memory.model import Phase
from rljob_api.memory.shape import ModelShape
from rljob_api.memory.units import ceil_div
from rljob_api.v1alpha1.learning import Training
from rljob_api.v1alpha1.operations import SyncBackend
from rljob_api.v1alpha1.rljob import RLJobSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySizes:
    """Parameters, tokens and processes of one process of a policy, trained or frozen."""

    spec: RLJobSpec
    shape: ModelShape
    world_size: int
    """Processes of the component."""
    tensor_parallel_size: int
    """Processes that divide each layer."""
    token_parts: int = 1
    """Processes that divide the tokens between attention and MLP (``training.sequenceParallel``)."""
    context_parallel_size: int = 1
    """Groups of these that divide each sequence."""
    expert_parallel_size: int = 1
    """Processes that have a part each of a layer's experts."""
    on_cuda: bool
    first: bool
    """Whether it is rank 0, which gathers weights to send them."""
    senders: int = 1
    """Trainer ranks that do; of several each is taken for one."""
    backend: SyncBackend = SyncBackend.AUTO
    """How weights travel."""
    reduces_each: bool = False
    """Whether gradients are reduced with each micro-batch."""

    @property
    def phases(self) -> tuple[Phase, Phase]:
        """Passes, and the optimizer's step."""
        return Phase.TRAIN, Phase.OPTIMIZER_STEP

    @property
    def tensor(self) -> int:
        """Tensor parallel size."""
        return min(self.tensor_parallel_size, self.world_size)

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return self.shape.parameters

    @property
    def root_parameters(self) -> int:
        """Parameters outside the layers; 0 where sizes are not known."""
        return 0 if self.shape.decoder is None else self.shape.decoder.root_parameters

    @property
    def data(self) -> int:
        """Data times context parallel size: processes over which FSDP2 shards each part of a layer."""
        return max(1, self.world_size // self.tensor)

    @property
    def context(self) -> int:
        """Context parallel size."""
        return min(self.context_parallel_size, self.data)

    @property
    def layer_parameters(self) -> int:
        """Parameters of the largest layer that the processes of a tensor-parallel group gather together; 0 where sizes are not known."""
        decoder = self.shape.decoder
        return 0 if decoder is None else self._gathered_together(decoder.layer_parameters, decoder.layer_expert_parameters, layers=1)

    @property
    def computed_parameters(self) -> int:
        """The same of the whole model."""
        decoder = self.shape.decoder
        if decoder is None:
            return self.parameters
        return self._gathered_together(self.parameters, decoder.expert_parameters, layers=decoder.num_layers)

    def _gathered_together(self, parameters: int, experts: int, *, layers: int) -> int:
        """Each process gathers its share of the experts, which tensor parallelism does not divide; the group divides the others.

        Args:
            parameters: with experts.
            experts: of these those of experts.
            layers: how many layers these are, of each of which a process gathers all that makes latents.
        """
        together = parameters - experts + self.tensor * ceil_div(experts, min(self.expert_parallel_size, self.world_size))
        return together + self._copied_parameters(layers)

    def _copied_parameters(self, layers: int) -> int:
        """Parameters that tensor-parallel processes have besides the model's, because each has what makes latents of so many layers."""
        decoder = self.shape.decoder
        return 0 if decoder is None else (self.tensor - 1) * layers * decoder.whole_parameters

    @property
    def compute_bytes(self) -> int:
        """Bytes of one number in the computation."""
        return DTYPE_BYTES[self.spec.model.dtype]

    @property
    def full_tokens(self) -> int:
        """Tokens of the longest sequence."""
        return self.spec.rollout.max_prompt_tokens + self.spec.rollout.max_response_tokens

    @property
    def update_tokens(self) -> int:
        """That the processes of one context-parallel group handle in one update, when all sequences have full length."""
        rollout = self.spec.rollout
        samples = ceil_div(rollout.prompts_per_step * rollout.samples_per_prompt, self.spec.training.mini_batches)
        return ceil_div(samples, self.data // self.context) * self.full_tokens

    @property
    def trains_all(self) -> bool:
        """Whether all parameters have gradients, for which inputs of norms and experts are kept."""
        return True

    @property
    def training(self) -> Training:
        """Settings that it is trained by."""
        return self.spec.training

    @property
    def less_work(self) -> str:
        """Remedy for what grows with a micro-batch."""
        return "a smaller training.microBatchTokens"

    @property
    def shorter_sequences(self) -> str:
        """One more remedy, where a micro-batch is a single sequence that is longer than the budget."""
        return ", a larger training.contextParallelSize" if self.full_tokens > self.shared_budget else ""

    @property
    def shared_budget(self) -> int:
        """Most tokens of a micro-batch, which context-parallel processes divide."""
        return self.training.micro_batch_tokens * self.context

    @property
    def shared_tokens(self) -> int:
        """Tokens of the largest micro-batch; a single sequence may be longer than the budget."""
        return min(self.update_tokens, max(self.shared_budget, self.full_tokens))

    @property
    def micro_batch_tokens(self) -> int:
        """What one process computes of them."""
        return ceil_div(self.shared_tokens, self.context)

    @property
    def holds_whole_gradients(self) -> bool:
        """Whether gradients of several micro-batches add up before they are reduced."""
        return self.update_tokens > self.shared_tokens and not self.reduces_each

    @property
    def vocabulary_parts(self) -> int:
        """Processes that share head and logits: all tensor parallel ones, or none where they do not divide the vocabulary."""
        decoder = self.shape.decoder
        return self.tensor if decoder is not None and decoder.vocab_size % self.tensor == 0 else 1
