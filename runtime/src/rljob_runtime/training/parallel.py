"""How the ranks of a policy stand to each other, and tensor parallelism within one decoder layer.

rank = (dp rank * cp size + cp rank) * tp size + tp rank. The cp * tp ranks of one dp rank get the same batches. Its cp ranks compute a part
of each sequence (:mod:`.context_parallel`); FSDP2 shards parameters over dp and cp ranks alike, so that the mesh of parameters is
``("fsdp", "tp")``; experts have a mesh of their own (:mod:`.expert_parallel`), as tensor parallelism does not divide them.
Its tp ranks hold a part of each layer: heads and intermediate channels are divided by rows of ``q, k, v, gate, up``
and by columns of ``o, down``, embedding and head by rows of the vocabulary (Megatron-LM, arXiv 1909.08053). Divided parameters are
DTensors, so that FSDP2 cuts them once more and checkpoints know the whole; the arithmetic is on plain local tensors with one sum over tp
per attention and MLP in each direction. Everything else is on each tp rank as a whole, with equal gradients, except the few that see only
their rank's heads or tokens: see :func:`sum_partial_gradients`. What is divided how is said in :mod:`.tensor_plan`, computed in
:mod:`.tensor_layers`, and with tokens divided beside layers in :mod:`.sequence_parallel`.
"""

from __future__ import annotations

import copy
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

from rljob_runtime.errors import ModelError
from rljob_runtime.training.lora import LoraLinear
from rljob_runtime.training.mixtures import is_experts, mixture_blocks
from rljob_runtime.training.sequence_parallel import DividedTokens
from rljob_runtime.training.tensor_layers import (
    Regrouping,
    column_forward,
    copy_input,
    head_norm_forward,
    row_forward,
    sum_over,
    whole_norm_forward,
)
from rljob_runtime.training.tensor_layers import local_tensor as local_tensor
from rljob_runtime.training.tensor_plan import FUSED_ATTENTION, Style, check_plan, fused_sizes, layer_styles


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Data-parallel, context-parallel and tensor-parallel place of this rank."""

    mesh: DeviceMesh
    """Of parameters: dimensions ``("fsdp",)`` without tensor parallelism, otherwise ``("fsdp", "tp")``."""
    batches: DeviceMesh | None = None
    """With context parallelism the same ranks as ``("dp", "cp", "tp")``, by what they compute."""
    experts: DeviceMesh | None = None
    """Of experts, all ranks: ``("efsdp", "ep")`` with expert parallelism, ``("efsdp",)`` with tensor parallelism alone. None without both:
    experts are sharded as all other parameters are."""

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
        return 1 if self.experts is None or self.experts.ndim == 1 else self.experts.size(1)

    @property
    def tp_group(self) -> dist.ProcessGroup:
        """For sums over the parts of a layer; only with tensor parallelism."""
        return self.mesh.get_group("tp")

    @property
    def token_groups(self) -> tuple[dist.ProcessGroup, ...]:
        """Sums over which, one after the other, are sums over all ranks, whose routers see different tokens each."""
        return (self.fsdp_group,) if self.tp_size == 1 else (self.fsdp_group, self.tp_group)

    def place_of_expert(self, expert: int, num_experts: int) -> tuple[int, int]:
        """Which rank of all has an expert, and which of its own it is there.

        Ranks of an expert-parallel group have consecutive parts of the experts. Each part is cut over the groups as FSDP2 cuts, into
        ``ceil(experts of a part / groups)``.

        Args:
            expert: its number in its layer.
            num_experts: of the layer.
        """
        ep_rank, within = divmod(expert, num_experts // self.ep_size)
        per_rank = -(-(num_experts // self.ep_size) // (self.fsdp_size * self.tp_size // self.ep_size))
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
    experts = None if tp == expert_parallel_size == 1 else _expert_mesh(device, world_size, expert_parallel_size)
    shape, names = ((world_size,), ("fsdp",)) if tp == 1 else ((world_size // tp, tp), ("fsdp", "tp"))
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    batches = None if cp == 1 else init_device_mesh(device.type, (world_size // (tp * cp), cp, tp), mesh_dim_names=("dp", "cp", "tp"))
    for made in (mesh, batches, experts):
        if made is not None and timeout_s is not None:
            for group in made.get_all_groups():
                set_pg_timeout(datetime.timedelta(seconds=timeout_s), group)
    return Layout(mesh=mesh, batches=batches, experts=experts)


def _expert_mesh(device: torch.device, world_size: int, ep: int) -> DeviceMesh:
    """Neighbors form a group, so that what they exchange stays on a node.

    Args:
        device: of the ranks.
        world_size: ranks.
        ep: ranks of a group.

    Raises:
        ModelError: ``ep`` does not divide the ranks.
    """
    if ep == 1:
        return init_device_mesh(device.type, (world_size,), mesh_dim_names=("efsdp",))
    if world_size % ep != 0:
        raise ModelError(f"expert_parallel_size is {ep} but there are {world_size} ranks; use a divisor of them")
    return init_device_mesh(device.type, (world_size // ep, ep), mesh_dim_names=("efsdp", "ep"))


def layout_of(model: nn.Module) -> Layout:
    """The layout that a sharded model carries."""
    layout = model.layout
    assert isinstance(layout, Layout)
    return layout


def divided_dimension(tensor: torch.Tensor) -> int | None:
    """Which dimension of a sharded parameter is divided over tp; None if each tp rank has it as a whole."""
    if isinstance(tensor, DTensor) and tensor.device_mesh.ndim == 2:
        placement = tensor.placements[1]
        return placement.dim if isinstance(placement, Shard) else None
    return None


def has_disjoint_shards(parameter: torch.Tensor) -> bool:
    """Whether no two ranks have the same of a sharded parameter; otherwise the tp ranks of a group each have a copy of a shard."""
    return isinstance(parameter, DTensor) and parameter.device_mesh.size() == dist.get_world_size()


def apply_tensor_parallel(model: PreTrainedModel, layers: list[nn.Module], layout: Layout, *, divides_tokens: bool = False) -> None:
    """Divide the model's parameters over tp in place, before FSDP; nothing to do with one tp rank.

    Embedding and head stay whole on each tp rank where tp does not divide the vocabulary. Experts do as well: within the block of a
    mixture tokens are divided instead (:mod:`.expert_parallel`), and the model gets them as ``mixture_tokens``.

    Args:
        model: whole, on any device, with adapters if there are any.
        layers: its decoder layers.
        layout: of the ranks.
        divides_tokens: whether hidden states between attention and MLP are divided by tokens (:mod:`.sequence_parallel`).

    Raises:
        ModelError: the model has no plan, or tp does not divide its heads or channels.
    """
    if layout.tp_size == 1:
        return
    check_plan(model, layout.tp_size)
    config, styles_of = model.config.get_text_config(), [layer_styles(model, layer) for layer in layers]
    tokens = DividedTokens(layout.tp_group)
    for layer, styles in zip(layers, styles_of, strict=True):
        for name, module in list(layer.named_modules()):
            if name in styles:
                _divide_module(module, styles[name], layout, fused_sizes(config, name, module))
            if any(styles.get(f"{name}.{child}") is Style.COLUMN for child, _ in module.named_children()):
                _divide_block(module, layout)
        _divide_tokens(layer, tokens if divides_tokens else None)
        _divide_mixtures(layer, tokens, divides_tokens=divides_tokens)
    if divides_tokens:
        tokens.attach(layers[0], layers[-1])
    model.mixture_tokens = tokens if any(mixture_blocks(layer) for layer in layers) else None
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
    """Complete the gradients of whole parameters that saw only their tp rank's heads, channels, or tokens, with one sum over tp.

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


def divide(module: nn.Module, name: str, dimension: int, mesh: DeviceMesh) -> None:
    """Replace a whole parameter by this rank's part of it, as a DTensor on a mesh of one dimension; nothing travels."""
    whole = getattr(module, name)
    device = "meta" if whole.is_meta else mesh.device_type
    part = whole.detach().chunk(mesh.size(), dimension)[mesh.get_local_rank()].to(device, copy=True).contiguous()
    divided = DTensor.from_local(part, mesh, [Shard(dimension)], run_check=False)
    setattr(module, name, nn.Parameter(divided, requires_grad=whole.requires_grad))


def _divide_module(module: Any, style: Style, layout: Layout, projections: tuple[int, ...] | None) -> None:
    """Divide a module's parameters and give it the forward that computes with its part.

    Args:
        module: whole.
        style: of it.
        layout: of the ranks.
        projections: output channels of each, of a column layer that is several.
    """
    if style is Style.COLUMN:
        _divide_by_columns(module, layout)
        if projections is not None:
            module.tp_regrouping = Regrouping.of(projections, layout.tp_rank, layout.tp_size, layout.tp_group, layout.mesh.device_type)
    elif style is Style.ROW:
        _divide_by_rows(module, layout)
    elif style is Style.PARTIAL:
        module.tp_partial = tuple(name for name, _ in module.named_parameters(recurse=False))
    elif style is Style.WHOLE_NORM:
        module.tp_channels, module.tp_group = module.weight.numel(), layout.tp_group
        divide(module, "weight", 0, layout.mesh["tp"])
        module.forward = types.MethodType(whole_norm_forward, module)
    else:
        module.tp_norm = type(module).forward
        divide(module, "weight", 0, layout.mesh["tp"])
        module.forward = types.MethodType(head_norm_forward, module)


def _divide_block(block: Any, layout: Layout) -> None:
    """Of an attention or MLP the input, and the numbers of heads by which Phi-3 cuts its fused projection."""
    block.tp_group = layout.tp_group
    block.register_forward_pre_hook(copy_input, with_kwargs=True)
    if hasattr(block, FUSED_ATTENTION):
        block.config = copy.copy(block.config)
        block.config.num_attention_heads //= layout.tp_size
        block.num_key_value_heads //= layout.tp_size


def _divide_tokens(layer: nn.Module, tokens: DividedTokens | None) -> None:
    """With sequence parallelism what a rank has as a whole of a layer sees its tokens alone."""
    module: Any
    for module in layer.modules():
        module.tp_tokens = tokens
        if tokens is not None and not is_experts(module):
            whole = (name for name, p in module.named_parameters(recurse=False) if not isinstance(p, DTensor))
            module.tp_partial = tuple(whole)


def _divide_mixtures(layer: nn.Module, tokens: DividedTokens, *, divides_tokens: bool) -> None:
    """Within blocks of experts a rank computes its tokens alone; without sequence parallelism they are cut before, and joined behind."""
    module: Any
    for block in mixture_blocks(layer).values():
        for module in block.modules():
            module.tp_tokens = tokens
        if not divides_tokens:
            tokens.attach(block, block)


def mixture_tokens_of(model: nn.Module) -> DividedTokens | None:
    """How blocks of experts divide tokens over tp; None where they have all of this rank's batch, or where there are none."""
    found: DividedTokens | None = getattr(model, "mixture_tokens", None)
    return found


def _divide_by_columns(module: Any, layout: Layout) -> None:
    divide(module, "weight", 0, layout.mesh["tp"])
    if module.bias is not None:
        divide(module, "bias", 0, layout.mesh["tp"])
    if isinstance(module, LoraLinear):
        divide(module, "lora_b", 0, layout.mesh["tp"])
        module.tp_partial = ("lora_a",)
    module.forward = types.MethodType(column_forward, module)


def _divide_by_rows(module: Any, layout: Layout) -> None:
    divide(module, "weight", 1, layout.mesh["tp"])
    if isinstance(module, LoraLinear):
        divide(module, "lora_a", 1, layout.mesh["tp"])
        module.tp_partial = ("lora_b",)
    module.tp_group = layout.tp_group
    module.forward = types.MethodType(row_forward, module)


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
    result = sum_over(found, layout.tp_group)
    scale = getattr(self, "embed_scale", None)
    return result if scale is None else result * scale.to(rows.dtype)
