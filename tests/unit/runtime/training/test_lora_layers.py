"""Adapter layers against autograd through the merged weight written out; which layers get them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from rljob_runtime.errors import ModelError
from rljob_runtime.training.config import LoraConfig, PolicyConfig
from rljob_runtime.training.lora import LoraLinear, add_adapters, merged_linear, merged_weight


class Block(nn.Module):
    """A stand-in for a decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"q_proj": nn.Linear(6, 8), "o_proj": nn.Linear(8, 6, bias=False)})
        self.norm = nn.LayerNorm(6)
        self.requires_grad_(False)


def blocks(config: LoraConfig, seed: int = 0) -> list[nn.Module]:
    torch.manual_seed(1)
    layers: list[nn.Module] = [Block(), Block()]
    add_adapters(layers, config, seed)
    return layers


def tensors(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


@given(
    st.integers(0, 1000), st.integers(1, 7), st.integers(1, 9), st.integers(1, 5), st.booleans(), st.sampled_from([(3,), (2, 4), (1, 1, 3)])
)
def test_gradients_equal_autograd_through_the_merged_weight(
    seed: int, inputs: int, outputs: int, rank: int, with_bias: bool, rows: tuple[int, ...]
) -> None:
    x, weight, bias, a, b, out = tensors(seed, (*rows, inputs), (outputs, inputs), (outputs,), (rank, inputs), (outputs, rank), (outputs,))
    weight, used_bias = weight.detach(), bias.detach() if with_bias else None
    scale = 0.7
    (merged_linear(x, weight, used_bias, a, b, scale) * out).sin().sum().backward()  # type: ignore[no-untyped-call]
    got = [tensor.grad for tensor in (x, a, b)]
    for tensor in (x, a, b):
        tensor.grad = None
    (F.linear(x, weight + scale * b @ a, used_bias) * out).sin().sum().backward()  # type: ignore[no-untyped-call]
    for gradient, tensor in zip(got, (x, a, b), strict=True):
        torch.testing.assert_close(gradient, tensor.grad, atol=2e-5, rtol=1e-4)


def test_bfloat16_computes_with_the_weight_that_engines_get() -> None:
    (x, weight, bias), (a, b) = tensors(0, (5, 32), (16, 32), (16,), dtype=torch.bfloat16), tensors(1, (4, 32), (16, 4))
    sent = merged_weight(weight.detach(), a, b, 0.25).to(torch.bfloat16)
    got = merged_linear(x, weight.detach(), bias.detach(), a, b, 0.25)
    assert torch.equal(got, F.linear(x, sent, bias))
    apart = F.linear(x, weight, bias) + 0.25 * F.linear(F.linear(x, a.bfloat16()), b.bfloat16())
    assert not torch.equal(got, apart)


def test_a_layer_starts_as_its_base_and_trains_its_adapters_only() -> None:
    base = nn.Linear(6, 8)
    x = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    expected = base(x)
    layer = LoraLinear(base, 2, 4.0, torch.Generator().manual_seed(0))
    assert torch.equal(layer(x), expected)
    layer(x).sum().backward()
    assert {n for n, p in layer.named_parameters() if p.requires_grad} == {"lora_a", "lora_b"}
    assert {n for n, p in layer.named_parameters() if p.grad is not None} == {"lora_a", "lora_b"}
    assert layer.weight is base.weight
    assert layer.bias is base.bias
    assert layer.scale == 2.0
    assert (layer.lora_a.shape, layer.lora_b.shape) == ((2, 6), (8, 2))
    assert layer.lora_a.abs().max() <= 6**-0.5  # kaiming uniform with a = sqrt(5): bound 1 / sqrt(inputs)
    assert layer.lora_a.std() > 0.1


def test_all_linear_layers_by_default_or_the_named_ones() -> None:
    config = LoraConfig(rank=2, alpha=2.0)
    for layer in blocks(config):
        assert {n for n, m in layer.named_modules() if isinstance(m, LoraLinear)} == {"attention.q_proj", "attention.o_proj"}
    for layer in blocks(LoraConfig(rank=2, alpha=2.0, target_modules=("o_proj",))):
        assert {n for n, p in layer.named_parameters() if p.requires_grad} == {"attention.o_proj.lora_a", "attention.o_proj.lora_b"}


def test_equal_seeds_give_equal_adapters() -> None:
    config = LoraConfig(rank=2, alpha=2.0)

    def initial(seed: int) -> list[torch.Tensor]:
        torch.randn(seed)  # the global generator must not matter
        return [p for layer in blocks(config, seed) for n, p in layer.named_parameters() if n.endswith("lora_a")]

    first, second, other = initial(1), initial(1), initial(2)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert not torch.equal(first[0], first[2])  # layers differ


def test_unknown_targets_are_refused_with_the_names_there_are() -> None:
    with pytest.raises(ModelError, match=r"names up_proj, but the linear layers of Block are o_proj, q_proj; name some"):
        blocks(LoraConfig(rank=2, alpha=2.0, target_modules=("q_proj", "up_proj")))
    with pytest.raises(ModelError, match=r"of LayerNorm are none \(of type torch.nn.Linear\)"):
        add_adapters([nn.LayerNorm(3)], LoraConfig(rank=2, alpha=2.0), 0)


def test_settings_without_meaning_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lora.rank is 0; it must be at least 1"):
        LoraConfig(rank=0, alpha=1.0)
    with pytest.raises(ValueError, match=r"lora.alpha is 0.0; it must be above 0"):
        LoraConfig(rank=1, alpha=0.0)
    with pytest.raises(ValueError, match="lora is set with trainable False"):
        PolicyConfig(model_path="m", trainable=False, lora=LoraConfig(rank=1, alpha=1.0))
    with pytest.raises(ValueError, match="tensor_parallel_size is 0; it must be at least 1"):
        PolicyConfig(model_path="m", tensor_parallel_size=0)
    with pytest.raises(ValueError, match="sequence_parallel is True with tensor_parallel_size 1"):
        PolicyConfig(model_path="m", sequence_parallel=True)
