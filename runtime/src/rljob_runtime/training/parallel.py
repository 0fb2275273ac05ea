"""How the ranks of a policy stand to each other, and tensor parallelism within one decoder layer.

rank = (dp rank * cp size + cp rank) * tp size + tp rank. The cp * tp ranks of one dp rank get the same batches. Its cp ranks compute a part
of each sequence (:mod:`.context_parallel`); FSDP2 shards parameters over dp and cp ranks alike, so that the mesh of parameters is
``("fsdp", "tp")``; experts can have a mesh of their own (:mod:`.expert_parallel`).
Its tp ranks hold a part of each layer: heads and intermediate channels are divided by rows of ``q, k, v, gate, up``
and by columns of ``o, down``, embedding and head by rows of the vocabulary (Megatron-LM, arXiv 1909.08053). Divided parameters are
DTensors, so that FSDP2 cuts them once more and checkpoints know the whole; the arithmetic is on plain local tensors with one sum over tp
per attention and MLP in each direction. Everything else is on each tp rank as a whole, with equal gradients, except the few that see only
their rank's heads: see :func:`sum_partial_gradients`.
"""

from __future__ import annotations

import datetime
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name every torch user knows
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout as set_pg_timeout
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from rljob_api.rules.model import DIVIDED_SIZES, TENSOR_PARALLEL_MODELS
from rljob_runtime.errors import ModelError
from rljob_runtime.training.lora import LoraLinear, merged_linear

COLUMN, ROW, PARTIAL = "colwise", "rowwise", "replicated_with_grad_allreduce"
"""Styles of transformers' plans (``base_model_tp_plan``) that are used here: linear layers divided by output channels, whose input each
rank has as a whole; linear layers divided by input channels, whose outputs are summed over tp; norms that see only this rank's heads."""


IN_LAYERS = "layers.*."
"""How a plan's names of modules of the decoder layers begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Data-parallel, context-parallel and tensor-parallel place of this rank."""

    mesh: DeviceMesh
    """Of parameters: dimensions ``("fsdp",)`` without tensor parallelism, otherwise ``("fsdp", "tp")``."""
    batches: DeviceMesh | None = None
    """With context parallelism the same ranks as ``("dp", "cp", "tp")``, by what they compute."""
    experts: DeviceMesh | None = None
    """With expert parallelism the same ranks as ``("efsdp", "ep")``, by which experts they have."""

    @property
    def fsdp_mesh(self) -> DeviceMesh:
        """One dimension: the ranks that share out the same part of each layer."""
        return self.mesh if self.mesh.ndim == 1 else self.mesh["fsdp"]

    @property
    def fsdp_size(self) -> int:
        """Number of data-parallel times context-parallel ranks: over how many FSDP shards a tensor and averages its gradient."""
        return self.mesh.size(0)

    @property
    def fsdp_rank(self) -> int:
        """Which part of each tensor this rank holds."""
        return self.mesh.get_local_rank(0)

    @property
    def fsdp_group(self) -> dist.ProcessGroup:
        """For sums over all tokens of all batches."""
        return self.mesh.get_group(0)

    @property
    def tp_size(self) -> int:
        """Number of ranks that compute one batch together."""
        return 1 if self.mesh.ndim == 1 else self.mesh.size(1)

    @property
    def tp_rank(self) -> int:
        """Which part of each layer this rank holds."""
        return 0 if self.mesh.ndim == 1 else self.mesh.get_local_rank(1)

    @property
    def dp_group(self) -> dist.ProcessGroup:
        """For sums over different batches, of what the ranks of one batch all know."""
        return self.fsdp_group if self.batches is None else self.batches.get_group("dp")

    @property
    def cp_size(self) -> int:
        """Number of ranks that divide each sequence."""
        return 1 if self.batches is None else self.batches.size(1)

    @property
    def cp_rank(self) -> int:
        """Which part of each sequence this rank computes."""
        return 0 if self.batches is None else self.batches.get_local_rank("cp")

    @property
    def cp_group(self) -> dist.ProcessGroup | None:
        """The ranks that divide this rank's sequences; None without context parallelism."""
        return None if self.batches is None else self.batches.get_group("cp")

    @property
    def ep_size(self) -> int:
        """Number of ranks that have a part each of a layer's experts."""
        return 1 if self.experts is None else self.experts.size(1)

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """For sums over the parts of a layer; only with tensor parallelism."""
        return self.mesh.get_group("tp")

    def place_of_expert(self, expert: int, num_experts: int) -> tuple[int, int]:
        """Which FSDP rank has an expert, and which of its own it is there.

        Ranks of an expert-parallel group have consecutive parts of the experts. Each part is cut over the groups as FSDP2 cuts, into
        ``ceil(experts of a part / groups)``.

        Args:
            expert: its number in its layer.
            num_experts: of the layer.
        """
        ep_rank, within = divmod(expert, num_experts // self.ep_size)
        per_rank = -(-(num_experts // self.ep_size) // (self.fsdp_size // self.ep_size))
        group, local = divmod(within, per_rank)
        return group * self.ep_size + ep_rank, local


def make_layout(
    device: torch.device,
    *,
    tensor_parallel_size: int = 1,
    context_parallel_size: int = 1,
    expert_parallel_size: int = 1,
    timeout_s: float | None = None,
) -> Layout:
    """The layout of all ranks; the process group must exist, and all ranks must call it.

    Args:
        device: of the ranks.
        tensor_parallel_size: ranks that divide each layer.
        context_parallel_size: ranks that divide each sequence.
        expert_parallel_size: ranks that divide the experts of each layer.
        timeout_s: deadline of every collective of its groups: those that torch makes for a mesh do not take over that of the process group.
            None leaves torch's.

    Raises:
        ModelError: the sizes do not divide the number of ranks.
    """
    world_size, tp, cp = dist.get_world_size(), tensor_parallel_size, context_parallel_size
    if world_size % (tp * cp) != 0:
        sizes = f"tensor_parallel_size is {tp}" if cp == 1 else f"context_parallel_size * tensor_parallel_size is {cp} * {tp}"
        raise ModelError(
            f"{sizes} but there are {world_size} ranks; make the number of ranks a multiple of it "
            "(ranks = data-parallel ranks * context_parallel_size * tensor_parallel_size)"
        )
    experts = _expert_mesh(device, world_size // tp, tp, expert_parallel_size)
    shape, names = ((world_size,), ("fsdp",)) if tp == 1 else ((world_size // tp, tp), ("fsdp", "tp"))
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    batches = None if cp == 1 else init_device_mesh(device.type, (world_size // (tp * cp), cp, tp), mesh_dim_names=("dp", "cp", "tp"))
    for made in (mesh, batches, experts):
        if made is not None and timeout_s is not None:
            for group in made.get_all_groups():
                set_pg_timeout(datetime.timedelta(seconds=timeout_s), group)
    return Layout(mesh=mesh, batches=batches, experts=experts)


def _expert_mesh(device: torch.device, num_shares: int, tp: int, ep: int) -> DeviceMesh | None:
    """Neighbors form a group, so that what they exchange stays on a node.

    Args:
        device: of the ranks.
        num_shares: data-parallel times context-parallel ranks.
        tp: tensor-parallel ranks.
        ep: ranks of a group.

    Raises:
        ModelError: ``ep`` does not fit the others.
    """
    if ep == 1:
        return None
    if tp > 1:
        raise ModelError(
            f"expert_parallel_size is {ep} and tensor_parallel_size is {tp}; tensor-parallel ranks have the same tokens, so that each "
            "would send and compute the same rows of experts, set one of the two to 1"
        )
    if num_shares % ep != 0:
        raise ModelError(
            f"expert_parallel_size is {ep} but there are {num_shares} data-parallel times context-parallel ranks; use a divisor of them"
        )
    return init_device_mesh(device.type, (num_shares // ep, ep), mesh_dim_names=("efsdp", "ep"))


def layout_of(model: nn.Module) -> Layout:
    """The layout that a sharded model carries."""
    layout = model.layout
    assert isinstance(layout, Layout)
    return layout


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a sharded tensor, or the tensor itself; shares memory, gradients flow back."""
    if isinstance(tensor, DTensor):
        local: torch.Tensor = tensor.to_local()
        return local
    return tensor


def divided_dimension(tensor: torch.Tensor) -> int | None:
    """Which dimension of a sharded parameter is divided over tp; None if each tp rank has it as a whole."""
    if isinstance(tensor, DTensor) and tensor.device_mesh.ndim == 2:
        placement = tensor.placements[1]
        return placement.dim if isinstance(placement, Shard) else None
    return None


def apply_tensor_parallel(model: PreTrainedModel, layers: list[nn.Module], layout: Layout) -> None:
    """Divide the model's parameters over tp in place, before FSDP; nothing to do with one tp rank.

    Embedding and head stay whole on each tp rank where tp does not divide the vocabulary.

    Args:
        model: whole, on any device, with adapters if there are any.
        layers: its decoder layers.
        layout: of the ranks.

    Raises:
        ModelError: the model has no plan, or tp does not divide its heads or channels.
    """
    if layout.tp_size == 1:
        return
    styles = _required_plan(model, layers, layout.tp_size)
    for layer in layers:
        for name, module in list(layer.named_modules()):
            if styles.get(name) == COLUMN:
                _divide_by_columns(module, layout)
            elif styles.get(name) == ROW:
                _divide_by_rows(module, layout)
            elif styles.get(name) == PARTIAL:
                module.tp_partial = ("weight",)
            if any(styles.get(f"{name}.{child}") == COLUMN for child, _ in module.named_children()):
                module.tp_group = layout.tp_group
                module.register_forward_pre_hook(_copy_input, with_kwargs=True)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding.num_embeddings % layout.tp_size == 0:
        tied = head is not None and head.weight is embedding.weight  # a critic has none
        divide(embedding, "weight", 0, layout.mesh["tp"])
        embedding.tp_layout = layout
        embedding.forward = types.MethodType(_embedding_forward, embedding)
        if tied:
            head.weight = embedding.weight
        elif head is not None:
            divide(head, "weight", 0, layout.mesh["tp"])


def sum_partial_gradients(model: nn.Module) -> None:
    """Complete the gradients of whole parameters that saw only their tp rank's heads or channels, with one sum over tp.

    To be called once between the last backward of an update and the first use of ``.grad``; all ranks must call it.
    """
    gradients = [local_tensor(p.grad) for p in _partial_parameters(model) if p.grad is not None]
    if not gradients:
        return
    flat = torch.cat([g.reshape(-1) for g in gradients])
    dist.all_reduce(flat, group=layout_of(model).tp_group)
    for gradient, total in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(total.view_as(gradient))


def _partial_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    """In the same order on all ranks."""
    for module in model.modules():
        for name in getattr(module, "tp_partial", ()):
            yield getattr(module, name)


def _required_plan(model: PreTrainedModel, layers: list[nn.Module], tp_size: int) -> dict[str, str]:
    """Style of each module of a layer that has one, by its name in the layer: transformers' plan, if it fits the model.

    Parameters that it does not name have to be the layer's own norms, which see whole hidden states.

    Raises:
        ModelError: naming what does not fit.
    """
    config = model.config.get_text_config()
    remedy = "set tensorParallelSize to 1"
    if config.model_type not in TENSOR_PARALLEL_MODELS or not _is_plain(model.get_input_embeddings()):
        known = ", ".join(TENSOR_PARALLEL_MODELS)
        raise ModelError(f"model type {config.model_type} has no tensor-parallel plan (there is one for {known}); {remedy}")
    for key in DIVIDED_SIZES:
        value = getattr(config, key)
        if value % tp_size != 0:
            raise ModelError(f"tensor_parallel_size is {tp_size} but the model has {key} {value}; choose a divisor of it")
    styles = {name.removeprefix(IN_LAYERS): style for name, style in config.base_model_tp_plan.items() if name.startswith(IN_LAYERS)}
    for layer in layers:
        owners = {name.rpartition(".")[0] for name, _ in layer.named_parameters()}
        unknown = sorted(owner for owner in owners if styles.get(owner) not in (COLUMN, ROW, PARTIAL) and "." in owner)
        if unknown:
            known = f"the tensor-parallel plan of {config.model_type}"
            raise ModelError(f"{type(layer).__name__} has {', '.join(unknown)}, which {known} does not divide; {remedy}")
    return styles


def _is_plain(embedding: nn.Module) -> bool:
    """Whether it looks rows up and, as Gemma's, multiplies them by one number."""
    return type(embedding) is nn.Embedding or (isinstance(embedding, nn.Embedding) and hasattr(embedding, "embed_scale"))


def divide(module: nn.Module, name: str, dimension: int, mesh: DeviceMesh) -> None:
    """Replace a whole parameter by this rank's part of it, as a DTensor on a mesh of one dimension; nothing travels."""
    whole = getattr(module, name)
    device = "meta" if whole.is_meta else mesh.device_type
    part = whole.detach().chunk(mesh.size(), dimension)[mesh.get_local_rank()].to(device, copy=True).contiguous()
    divided = DTensor.from_local(part, mesh, [Shard(dimension)], run_check=False)
    setattr(module, name, nn.Parameter(divided, requires_grad=whole.requires_grad))


def _divide_by_columns(module: Any, layout: Layout) -> None:
    divide(module, "weight", 0, layout.mesh["tp"])
    if module.bias is not None:
        divide(module, "bias", 0, layout.mesh["tp"])
    if isinstance(module, LoraLinear):
        divide(module, "lora_b", 0, layout.mesh["tp"])
        module.tp_partial = ("lora_a",)
    module.forward = types.MethodType(_column_forward, module)


def _divide_by_rows(module: Any, layout: Layout) -> None:
    divide(module, "weight", 1, layout.mesh["tp"])
    if isinstance(module, LoraLinear):
        divide(module, "lora_a", 1, layout.mesh["tp"])
        module.tp_partial = ("lora_b",)
    module.tp_group = layout.tp_group
    module.forward = types.MethodType(_row_forward, module)


def _column_forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """This rank's output channels; the gradient of ``x`` is this rank's part of a sum, which :func:`_copy_input` makes."""
    return _product(self, x, None if self.bias is None else local_tensor(self.bias))


def _row_forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """All output channels from this rank's input channels and the other ranks' sums."""
    result: torch.Tensor = _Sum.apply(_product(self, x, None), self.tp_group)  # type: ignore[no-untyped-call]
    return result if self.bias is None else result + self.bias


def _product(module: nn.Linear, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    weight = local_tensor(module.weight)
    if isinstance(module, LoraLinear) and module.is_adapted:
        return merged_linear(x, weight, bias, local_tensor(module.lora_a), local_tensor(module.lora_b), module.scale)
    return F.linear(x, weight, bias)


def _embedding_forward(self: nn.Embedding, input_ids: torch.Tensor) -> torch.Tensor:
    """Rows of this rank's part of the vocabulary, zeros for other tokens, summed over tp."""
    rows = local_tensor(self.weight)
    layout = self.tp_layout
    assert isinstance(layout, Layout)
    first = layout.tp_rank * rows.shape[0]
    places = input_ids - first
    elsewhere = (places < 0) | (places >= rows.shape[0])
    padding = None if self.padding_idx is None or not first <= self.padding_idx < first + rows.shape[0] else self.padding_idx - first
    found = F.embedding(places.masked_fill(elsewhere, 0), rows, padding_idx=padding).masked_fill(elsewhere.unsqueeze(-1), 0.0)
    result: torch.Tensor = _Sum.apply(found, layout.tp_group)  # type: ignore[no-untyped-call]
    scale = getattr(self, "embed_scale", None)
    return result if scale is None else result * scale.to(rows.dtype)


def _copy_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Pass hidden states on; their gradient is summed over tp. One sum for all the column layers of an attention or MLP."""
    if args:
        return (_Copy.apply(args[0], module.tp_group), *args[1:]), kwargs  # type: ignore[no-untyped-call]
    return args, kwargs | {"hidden_states": _Copy.apply(kwargs["hidden_states"], module.tp_group)}  # type: ignore[no-untyped-call]


class _Copy(torch.autograd.Function):
    """Identity whose gradient is summed over tp (``f`` of arXiv 1909.08053)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)  # autograd may hand the same gradient to others
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Sum(torch.autograd.Function):
    """Sum over tp in place, whose gradient is that of every summand (``g`` of arXiv 1909.08053)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None
