"""A critic's model: the layers of a causal language model, and one linear layer that makes a hidden state a value.

The head starts at zero, so that all first values are exactly 0: advantages then begin as discounted rewards, not as the noise of a random
head, and the layers below get no gradient before the head points somewhere. It is a float32 unit of its own also where the layers compute
in bfloat16, whose eight significant bits would round values.
"""

from __future__ import annotations

import types

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from transformers import PreTrainedModel

from rljob_runtime.training.attention import Packing
from rljob_runtime.training.config import PolicyConfig
from rljob_runtime.training.model import hidden_states, shard_model
from rljob_runtime.training.parallel import Layout

VALUE_HEAD = "value_head"
"""Name of the head in the model, and so in checkpoints."""


def replace_head(model: PreTrainedModel) -> None:
    """Put a value head of zeros in the place of the language model's head, in place; a tied embedding stays."""
    head = model.get_output_embeddings()
    name = next(name for name, module in model.named_modules() if module is head)
    parent, _, attribute = name.rpartition(".")
    delattr(model.get_submodule(parent), attribute)
    value_head = nn.Linear(head.in_features, 1, dtype=torch.float32)
    nn.init.zeros_(value_head.weight)
    nn.init.zeros_(value_head.bias)
    model.add_module(VALUE_HEAD, value_head)
    model.get_output_embeddings = types.MethodType(_no_embeddings, model)


def _no_embeddings(model: PreTrainedModel) -> None:
    """What transformers answers for most classes without a head; GPT-NeoX would ask for the one that is gone."""


def shard_critic(model: PreTrainedModel, config: PolicyConfig, layout: Layout, device: torch.device) -> None:
    """Shard in place as a policy is, the head by itself, and put ``token_values`` on the model."""
    fully_shard(model.get_submodule(VALUE_HEAD), mesh=layout.fsdp_mesh)
    shard_model(model, config, layout, device)
    model.token_values = types.MethodType(_token_values, model)
    register_fsdp_forward_method(model, "token_values")


def _token_values(
    self: PreTrainedModel,
    input_ids: torch.Tensor,
    positions: torch.Tensor,
    packing: Packing | None = None,
) -> torch.Tensor:
    """Values (N,) float32 of the :func:`~rljob_runtime.training.model.hidden_states` at ``positions`` (N,)."""
    chosen = hidden_states(self, input_ids, positions, packing)
    values: torch.Tensor = self.get_submodule(VALUE_HEAD)(chosen.float())
    return values.squeeze(-1).clone()  # FSDP hooks into what is returned, and warns of a view
