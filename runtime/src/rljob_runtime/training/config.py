"""Settings of one policy (trained, or frozen as the reference); imported by the driver, so free of torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from rljob_api.vocabulary import LayerCompilation, OptimizerStateDType, Schedule
from rljob_runtime.losses.config import LossConfig
from rljob_runtime.offload.states import StateKind


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig:
    """Train low-rank adapters instead of all weights (arXiv 2106.09685)."""

    rank: int
    alpha: float
    """Products of adapters are scaled by ``alpha / rank``."""
    target_modules: tuple[str, ...] = ()
    """Linear layers inside decoder layers by their last name, such as ``q_proj``; empty takes all of them."""

    def __post_init__(self) -> None:
        """Refuse values that have no meaning.

        Raises:
            ValueError: naming the setting, its value and the allowed range.
        """
        if self.rank < 1:
            raise ValueError(f"lora.rank is {self.rank}; it must be at least 1")
        if not self.alpha > 0:
            raise ValueError(f"lora.alpha is {self.alpha}; it must be above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadBalancingConfig:
    """Train a mixture's routers to use all experts; see :mod:`rljob_runtime.training.balance`."""

    coefficient: float | None = None
    """Of the loss; None: the one in the model's config.json."""

    def __post_init__(self) -> None:
        """Refuse values that have no meaning.

        Raises:
            ValueError: naming the setting, its value and the allowed range.
        """
        if self.coefficient is not None and self.coefficient < 0:
            raise ValueError(f"load_balancing.coefficient is {self.coefficient}; it must be at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyConfig:
    """Everything one policy worker needs to know; equal on all ranks."""

    model_path: str
    """Local folder as ``save_pretrained`` writes it."""
    dtype: str = "float32"
    """``float32`` or ``bfloat16``: of the arithmetic, of the weights sent to engines and of exports. A trained policy keeps float32
    masters and reduces gradients in float32 either way; a frozen one, and the frozen weights under adapters, are held in this dtype."""
    trainable: bool = True
    """False: a frozen reference without gradients or optimizer."""
    learning_rate: float = 1e-6
    min_learning_rate: float = 0.0
    """Where Linear and Cosine end; not above ``learning_rate``."""
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    optimizer_state_dtype: OptimizerStateDType = OptimizerStateDType.FLOAT32
    """What AdamW's moments are kept in; see :mod:`.bfloat16_adamw`."""
    weight_decay: float = 0.0
    """Decoupled decay of matrices; vectors (norms, biases) are never decayed."""
    warmup_steps: int = 0
    lr_schedule: Schedule = Schedule.CONSTANT
    total_steps: int | None = None
    """Training steps of the whole run; needed by Linear and Cosine."""
    max_grad_norm: float | None = 1.0
    """Gradients are scaled down to this global 2-norm; None never scales."""
    token_budget: int = 16_384
    """Most tokens of one micro-batch on a rank, padding included; a single longer sequence still makes one."""
    logprob_chunk_tokens: int = 1024
    """Tokens whose logits exist at the same time."""
    activation_checkpointing: bool = False
    """Recompute decoder layers in backward: less memory, about a third more time."""
    layer_compilation: LayerCompilation = LayerCompilation.AUTO
    """Whether decoder layers go through torch.compile; see :mod:`.compiling`."""
    loss: LossConfig = field(default_factory=LossConfig)
    seed: int = 0
    threads: int = 1
    """CPU threads of torch in this process."""
    offload_host_bytes: int | None = None
    """Most host memory of this process for offloaded state; None sets no limit."""
    reserve: tuple[StateKind, ...] = ()
    """Kinds whose host memory is taken at set-up, so that a budget that is too small ends the start and not a step."""
    reduces_each_micro_batch: bool = False
    """Add up gradients over ranks with every micro-batch, so that a rank holds only its share of them; else once, with the last one."""
    optimizer_around_step: bool = False
    """AdamW's states are on the device only while ``optimizer.step()`` runs, or a checkpoint is written or read. They count as reserved."""
    trust_remote_code: bool = False
    """Run model code that comes with the checkpoint."""
    attn_implementation: str = "sdpa"
    """As transformers names it."""
    tensor_parallel_size: int = 1
    """Ranks that hold one copy of the layers together and compute the same batches; divides the number of ranks."""
    sequence_parallel: bool = False
    """Divide hidden states between attention and MLP by tokens over the tensor-parallel ranks; see :mod:`.sequence_parallel`."""
    context_parallel_size: int = 1
    """Ranks, or tensor-parallel groups of them, that compute a part each of the same sequences; its product with
    ``tensor_parallel_size`` divides the number of ranks."""
    expert_parallel_size: int = 1
    """Ranks that have a part each of a mixture's experts and exchange tokens; divides the number of ranks, and that of experts."""
    lora: LoraConfig | None = None
    """Adapters to train; None trains all weights. Engines and exports get plain weights either way."""
    load_balancing: LoadBalancingConfig | None = None
    """Of a mixture of experts; None: routers learn from the other terms of the loss alone."""
    router_bias_update_rate: float = 0.0
    """How far an update moves the correction biases of a mixture's routers; 0: not. See :mod:`.router_bias`."""
    replays_routes: bool = False
    """Take the experts that batches bring as routes; see :mod:`rljob_runtime.training.replay`. The model must be a mixture."""

    def __post_init__(self) -> None:
        """Refuse values that have no meaning.

        Raises:
            ValueError: naming the setting, its value and the allowed range.
        """
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype is {self.dtype!r}; it must be float32 or bfloat16")
        sizes = ("tensor_parallel_size", "context_parallel_size", "expert_parallel_size")
        for name in ("token_budget", "logprob_chunk_tokens", "threads", *sizes):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in (
            *("learning_rate", "min_learning_rate", "weight_decay", "warmup_steps", "offload_host_bytes"),
            "router_bias_update_rate",
        ):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0")
        if self.min_learning_rate > self.learning_rate:
            raise ValueError(f"min_learning_rate is {self.min_learning_rate}; it must be at most learning_rate, {self.learning_rate}")
        if self.optimizer_around_step and not self.trainable:
            raise ValueError("optimizer_around_step is True with trainable False; a frozen policy has no optimizer, leave it False")
        if self.lora is not None and not self.trainable:
            raise ValueError("lora is set with trainable False; a frozen policy trains no adapters, leave it None")
        if self.max_grad_norm is not None and self.max_grad_norm <= 0:
            raise ValueError(f"max_grad_norm is {self.max_grad_norm}; it must be above 0, or None to switch clipping off")
        if self.lr_schedule is not Schedule.CONSTANT and (self.total_steps is None or self.total_steps <= self.warmup_steps):
            raise ValueError(
                f"lr_schedule {self.lr_schedule} with total_steps {self.total_steps} and warmup_steps {self.warmup_steps}; "
                "set total_steps above warmup_steps"
            )

        self._check_routers()
        self._check_tensor_parallel()

    def _check_routers(self) -> None:
        if self.load_balancing is not None and not self.trainable:
            raise ValueError("load_balancing is set with trainable False; a frozen policy trains no routers, leave it None")
        if self.router_bias_update_rate > 0 and (not self.trainable or self.lora is not None):
            raise ValueError(
                f"router_bias_update_rate is {self.router_bias_update_rate} with routers that are not trained (trainable {self.trainable}, "
                f"lora {self.lora}); leave it 0"
            )

    def _check_tensor_parallel(self) -> None:
        if self.sequence_parallel and self.tensor_parallel_size == 1:
            raise ValueError("sequence_parallel is True with tensor_parallel_size 1, which has no ranks to divide tokens; leave it False")
        if self.layer_compilation is LayerCompilation.ENABLED and self.tensor_parallel_size > 1:
            raise ValueError(
                f"layer_compilation is Enabled with tensor_parallel_size {self.tensor_parallel_size}; divided layers are not compiled, "
                "set it to Auto or Disabled"
            )

    @property
    def shared_budget(self) -> int:
        """Most tokens of a micro-batch that context-parallel ranks divide."""
        return self.token_budget * self.context_parallel_size
