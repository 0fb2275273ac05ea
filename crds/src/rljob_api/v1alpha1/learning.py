"""Rollout and training: how responses are generated and the policy is updated."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field, model_validator

from rljob_api.v1alpha1.base import Count, Fraction, NonNegative, Positive, Score, Seconds, SpecModel
from rljob_api.vocabulary import (
    GradientReduction,
    GroupRouting,
    LayerCompilation,
    OptimizerStateDType,
    RouterReplay,
    Schedule,
    StandbyProcesses,
)

MAX_TOP_K = 4096
"""Each sampled token brings the ids of all that could have been sampled to the trainer, 4 bytes each."""
DEFAULT_TOP_K = 1024
"""With topP or minP alone: at the places where their set is wider than this, the tokens behind are not sampled."""


class GroupFilter(SpecModel):
    """Which groups are trained (dynamic sampling); a group that is not trained is replaced by another prompt."""

    min_mean: Score | None = None
    """Train only groups whose mean score is above this."""
    max_mean: Score | None = None
    """Train only groups whose mean score is below this."""
    min_std: NonNegative | None = None
    """Train only groups whose scores have a standard deviation above this; 0 excludes groups of equal scores, which have no gradient."""
    max_in_row: Count = 1000
    """The run fails when this many groups in a row are excluded."""


class Rollout(SpecModel):
    """How responses are generated."""

    prompts_per_step: Count = 32
    """Prompts (groups) of one training step; in an agentic job a group plays one seed of one environment."""
    samples_per_prompt: Annotated[int, Field(ge=1, le=4096)] = 8
    """Responses sampled per prompt: the group size."""
    redundant_samples: Annotated[int, Field(ge=0, le=4096)] = 0
    """Additional responses per prompt: the first samplesPerPrompt to finish form the group, the rest are canceled."""
    extra_prompts: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Additional prompts in flight: a step trains the groups that complete first."""
    group_filter: GroupFilter | None = None
    """Which groups are trained; all when not set."""
    group_routing: GroupRouting = GroupRouting.SPREAD
    """How the samples of one prompt are distributed over engines."""
    max_prompt_tokens: Annotated[int, Field(ge=1, le=10_000_000)] = 1024
    """Longer prompts are skipped and counted. In an agentic job, maxPromptTokens + maxResponseTokens limits the tokens of an episode, or,
    with prompt.history Turn, those of a turn."""
    max_response_tokens: Annotated[int, Field(ge=1, le=10_000_000)] = 1024
    """Maximum length of a response; in an agentic job, of one turn's response."""
    temperature: Annotated[float, Field(gt=0.0, le=2.0)] = 1.0
    """Sampling temperature."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling; 1 disables it."""
    top_k: Annotated[int, Field(ge=0, le=MAX_TOP_K)] | None = None
    """Sample from the k most likely tokens; 0 disables it. If not set, 1024 with topP or minP, otherwise 0: the trainer gets the ids of all
    tokens that could have been sampled, and this limits their number."""
    min_p: Fraction = 0.0
    """Exclude tokens whose probability is below this fraction of the most likely one's; 0 disables it."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0, le=10_000_000)], ...] = Field(default=(), max_length=64)
    """Tokens that end a response, in addition to the model's end-of-sequence token."""
    stop_strings: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = Field(default=(), max_length=64)
    """Strings that end a response with the token that completes one of them; they are kept in the response, as stop tokens are."""
    stall_timeout_seconds: Seconds = 1800
    """An engine with running responses that produces no token for this long is considered lost, like one whose process ended."""
    max_engine_restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    """How often each lost engine is replaced within one attempt, by a new process on the same devices with the newest weights. After that
    the other engines continue, and the loss of the last one ends the attempt. The same applies to each environment worker."""
    standby_processes: StandbyProcesses = StandbyProcesses.AUTO
    """Where a process waits that has imported the engine but uses no device. It replaces a lost engine, which saves seconds, and costs
    about 1 GiB of host memory. After use, a new one is started."""

    @model_validator(mode="after")
    def _bounded_mask(self) -> Rollout:
        if self.top_k is None:
            self.__dict__["top_k"] = DEFAULT_TOP_K if self.leaves_out_tokens else 0  # frozen; model_fields_set stays what the user set
        return self

    @property
    def leaves_out_tokens(self) -> bool:
        """Whether some tokens cannot be sampled, so that log-probs are those of a part of the vocabulary."""
        return self.top_p < 1.0 or self.min_p > 0.0 or bool(self.top_k)


class LoadBalancing(SpecModel):
    """The auxiliary loss that balances the load of a mixture's experts (arXiv 2101.03961), over all trained tokens of an update."""

    coefficient: NonNegative | None = None
    """Weight of the loss; by default the model's own (router_aux_loss_coef of config.json)."""


class Training(SpecModel):
    """How the policy is updated."""

    steps: Annotated[int, Field(ge=0, le=1_000_000)] = 100
    """Training steps; each consumes promptsPerStep groups and publishes one version of the weights. 0 trains nothing: engines load the
    model and answer data.validation once, and the run ends with the scores."""
    learning_rate: Positive = 1e-6
    """Peak learning rate of AdamW."""
    min_learning_rate: NonNegative = 0.0
    """Final learning rate of the schedules Linear and Cosine."""
    schedule: Schedule = Schedule.CONSTANT
    """Learning rate schedule."""
    warmup_steps: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Steps over which the learning rate rises from 0."""
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """AdamW's beta1, the decay of the first moment."""
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.999
    """AdamW's beta2, the decay of the second moment."""
    epsilon: Positive = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegative = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: Positive = 1.0
    """Gradients are clipped to this norm."""
    mini_batches: Count = 1
    """Optimizer updates per epoch of a step; must divide promptsPerStep."""
    epochs: Count = 1
    """Passes over the samples of a step."""
    micro_batch_tokens: Annotated[int, Field(ge=1, le=100_000_000)] = 16_384
    """At most this many tokens, padding included, in one forward and backward pass on one device."""
    logprob_chunk_tokens: Annotated[int, Field(ge=1, le=1_000_000)] = 1024
    """Tokens whose logits over the vocabulary are in memory at the same time. The backward pass computes the logits of all other tokens
    of a micro-batch again, so it is faster with larger chunks."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    layer_compilation: LayerCompilation = LayerCompilation.AUTO
    """Whether torch.compile fuses the operations of decoder layers, in trainer, critic, reference, and teachers: more tokens per second
    and fewer activations, but the first passes wait for the compilation. May be changed before resuming from a checkpoint. Results
    differ only by rounding."""
    gradient_reduction: GradientReduction = GradientReduction.AUTO
    """When the processes of the trainer, and those of a critic, reduce their gradients. Results differ only by rounding."""
    optimizer_state_dtype: OptimizerStateDType = OptimizerStateDType.FLOAT32
    """Type of AdamW's moments in the trainer and a critic. May be changed before resuming from a checkpoint."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """Devices that share each layer of the trainer. The experts of a mixture stay whole: the devices divide their tokens instead."""
    sequence_parallel: bool = False
    """Divide hidden states between the attention and MLP of each layer by tokens over the tensorParallelSize devices of the trainer, with
    the same traffic: their activations, which every device otherwise holds whole, are divided too. Needs tensorParallelSize above 1."""
    context_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """Devices, or groups of tensorParallelSize devices, that share each sequence of the trainer, for long responses: each computes a part
    of its tokens and, in attention, a part of its heads (DeepSpeed-Ulysses). Activations are divided by it; weights are sharded over
    these devices as over data-parallel ones. Its product with tensorParallelSize must divide the model's attention heads."""
    expert_parallel_size: Annotated[int, Field(ge=1, le=128)] = 1
    """Mixture of experts: trainer devices that each hold a part of every layer's experts and exchange tokens, instead of gathering all
    experts. It must divide the experts of a layer and the devices; neighbors form a group, whichever sequences or layers they share."""
    load_balancing: LoadBalancing | None = None
    """Mixture of experts: add the load-balancing loss of its routers; off by default. Costs about a third of a step."""
    router_bias_update_rate: NonNegative = 0.0
    """Mixture of experts whose routers have correction biases (DeepSeek-V3, GLM-4-MoE): how far every update moves the bias of each expert,
    up where its layer chose it less than the mean and down where it chose it more; 0 leaves biases as they are. DeepSeek-V3 was trained
    with 0.001."""
    router_replay: RouterReplay = RouterReplay.DISABLED
    """Mixture of experts: who chooses the experts of each token in the trainer's updates and log-probs. With Engine the trainer uses vLLM's
    choices, so that trainer and engine differ less; this sends layers x experts per token bytes with each token."""
    step_timeout_seconds: Seconds = 3600
    """Deadline of one training step on the trainer. A trainer that misses it is considered lost: its group is restarted from the newest
    checkpoint, up to failurePolicy.maxWorkerRestarts times; after that the run fails."""

    @property
    def devices_per_share(self) -> int:
        """Devices of the trainer that compute one data-parallel share together."""
        return self.context_parallel_size * self.tensor_parallel_size

    @property
    def device_unit(self) -> int:
        """Devices of which the trainer has a multiple: those of a share, and of a group that divides experts."""
        return math.lcm(self.devices_per_share, self.expert_parallel_size)
