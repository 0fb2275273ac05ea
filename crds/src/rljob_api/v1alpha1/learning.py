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
    """Which groups are trained (dynamic sampling); another prompt takes the place of one that is not."""

    min_mean: Score | None = None
    """Train only groups whose mean score is above this."""
    max_mean: Score | None = None
    """Train only groups whose mean score is below this."""
    min_std: NonNegative | None = None
    """Train only groups whose scores deviate by more than this; 0 leaves out groups of equal scores, which teach nothing."""
    max_in_row: Count = 1000
    """The run fails when so many groups one after another are left out."""


class Rollout(SpecModel):
    """How responses are generated."""

    prompts_per_step: Count = 32
    """Prompts (groups) of one training step; in an agentic job a group plays one seed of one environment."""
    samples_per_prompt: Annotated[int, Field(ge=1, le=4096)] = 8
    """Responses sampled per prompt: the group size."""
    redundant_samples: Annotated[int, Field(ge=0, le=4096)] = 0
    """Further responses sampled per prompt: the first samplesPerPrompt that end make the group, the others are cancelled."""
    extra_prompts: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Further prompts that may be answered at the same time: a step trains those whose groups are complete first."""
    group_filter: GroupFilter | None = None
    """Which groups are trained; all when not set."""
    group_routing: GroupRouting = GroupRouting.SPREAD
    """How the samples of one prompt spread over engines."""
    max_prompt_tokens: Annotated[int, Field(ge=1, le=10_000_000)] = 1024
    """Longer prompts are left out and counted. An episode of an agentic job ends when it is longer than this before a turn."""
    max_response_tokens: Annotated[int, Field(ge=1, le=10_000_000)] = 1024
    """Responses are cut here; in an agentic job those of one turn."""
    temperature: Annotated[float, Field(gt=0.0, le=2.0)] = 1.0
    """Sampling temperature."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling; 1 switches it off."""
    top_k: Annotated[int, Field(ge=0, le=MAX_TOP_K)] | None = None
    """Sample from the k most likely tokens; 0 switches it off. When not set 1024 with topP or minP, else 0: the trainer gets the ids of all
    tokens that could have been sampled, and this bounds them."""
    min_p: Fraction = 0.0
    """Leave out tokens below this share of the most likely one; 0 switches it off."""
    stop_token_ids: tuple[Annotated[int, Field(ge=0, le=10_000_000)], ...] = Field(default=(), max_length=64)
    """Tokens that end a response besides the model's end-of-sequence token."""
    stop_strings: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = Field(default=(), max_length=64)
    """Texts that end a response with the token that completes one of them; they stay in it, as stop tokens do."""
    stall_timeout_seconds: Seconds = 1800
    """An engine that gives no token for this long although responses are running there is lost, like one whose process ended."""
    max_engine_restarts: Annotated[int, Field(ge=0, le=1000)] = 3
    """How often each engine is replaced when it is lost, within one attempt: by a new process on the same devices, with the newest weights.
    Beyond it the other engines go on, and the loss of the last one ends the attempt. The same holds for each environment worker."""
    standby_processes: StandbyProcesses = StandbyProcesses.AUTO
    """Where a process that has imported the engine and uses no device waits to take the place of a lost engine, so that this takes seconds
    less: about a gigabyte of host memory each. It is filled again after it was used."""

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
    """The auxiliary loss that keeps the experts of a mixture in use (arXiv 2101.03961), over all trained tokens of an update."""

    coefficient: NonNegative | None = None
    """What it is multiplied by; the model's own (router_aux_loss_coef of config.json) when not set."""


class Training(SpecModel):
    """How the policy is updated."""

    steps: Annotated[int, Field(ge=0, le=1_000_000)] = 100
    """Training steps; each consumes promptsPerStep groups and publishes one version of the weights. 0 trains nothing: engines load the
    model, answer data.validation once and the run ends with the scores."""
    learning_rate: Positive = 1e-6
    """Peak learning rate of AdamW."""
    min_learning_rate: NonNegative = 0.0
    """Where the schedules Linear and Cosine end."""
    schedule: Schedule = Schedule.CONSTANT
    """Learning rate over the steps."""
    warmup_steps: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Steps over which the learning rate rises from 0."""
    beta1: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.9
    """AdamW's first decay."""
    beta2: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.999
    """AdamW's second decay."""
    epsilon: Positive = 1e-8
    """AdamW's epsilon."""
    weight_decay: NonNegative = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this norm."""
    mini_batches: Count = 1
    """Optimizer updates per epoch of a step; must divide promptsPerStep."""
    epochs: Count = 1
    """How often a step's samples are used."""
    micro_batch_tokens: Annotated[int, Field(ge=1, le=100_000_000)] = 16_384
    """At most this many tokens, padding included, in one forward and backward pass on one device."""
    logprob_chunk_tokens: Annotated[int, Field(ge=1, le=1_000_000)] = 1024
    """Tokens whose vocabulary logits exist at one time."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""
    layer_compilation: LayerCompilation = LayerCompilation.AUTO
    """Whether torch.compile makes few kernels of the many operations of a decoder layer, in the trainer, critic, reference, and teachers:
    more tokens per second and fewer activations, for a compilation in the first passes. May be changed between a checkpoint and what
    resumes from it. Results differ by rounding only."""
    gradient_reduction: GradientReduction = GradientReduction.AUTO
    """When the processes of the trainer, and those of a critic, add up their gradients. Results differ by rounding only."""
    optimizer_state_dtype: OptimizerStateDType = OptimizerStateDType.FLOAT32
    """What the trainer, and a critic, keep AdamW's moments in. May be changed between a checkpoint and what resumes from it."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """Devices that share each layer of the trainer."""
    context_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """Devices, or groups of tensorParallelSize of them, that share each sequence of the trainer, for long responses: each computes a part
    of its tokens, and attention a part of its heads (DeepSpeed-Ulysses). Activations are divided by it; weights are sharded over these
    devices as over data-parallel ones. Its product with tensorParallelSize has to divide the model's attention heads."""
    expert_parallel_size: Annotated[int, Field(ge=1, le=128)] = 1
    """Of a mixture of experts: devices of the trainer that have a part each of every layer's experts and exchange tokens, instead of each
    gathering all experts. Divides the experts of a layer, and the devices; neighbors form a group. Not with tensorParallelSize."""
    load_balancing: LoadBalancing | None = None
    """Of a mixture of experts: add the load-balancing loss of its routers; not added when not set. Costs about a third of a step."""
    router_replay: RouterReplay = RouterReplay.DISABLED
    """Of a mixture of experts: who chooses the experts of each token in the trainer's updates and its own log-probs. Engine takes the
    choices of vLLM, so that trainer and engine differ less; each token then brings layers x experts per token bytes to the trainer."""
    step_timeout_seconds: Seconds = 3600
    """Deadline of one training step on the trainer's side. A trainer that misses it counts as lost: its group starts again from the newest
    checkpoint, failurePolicy.maxWorkerRestarts times, then the run fails."""

    @property
    def devices_per_share(self) -> int:
        """Devices of the trainer that compute one data-parallel share together."""
        return self.context_parallel_size * self.tensor_parallel_size

    @property
    def device_unit(self) -> int:
        """Devices of which the trainer has a multiple: those of a share, and of a group that divides experts."""
        return math.lcm(self.devices_per_share, self.expert_parallel_size)
