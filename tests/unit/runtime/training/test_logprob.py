"""Chunked log-probs against log_softmax on full logits, values and gradients."""

from __future__ import annotations

import pytest
import torch

from rljob_runtime.training import logprob
from rljob_runtime.training.logprob import selected_logprobs


def inputs(dtype: torch.dtype, rows: int = 13) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(rows, 8, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(31, 8, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, 31, (rows,), generator=generator)


def full_logprobs(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float) -> torch.Tensor:
    logits = (hidden.float() @ weight.float().T) / temperature
    return logits.log_softmax(-1)[torch.arange(targets.numel()), targets]


@pytest.mark.parametrize("chunk_tokens", [1, 5, 13, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_equals_full_logits(chunk_tokens: int, temperature: float, dtype: torch.dtype, tolerance: float) -> None:
    hidden, weight, targets = inputs(dtype)
    upstream = torch.linspace(-1, 1, targets.numel())
    result = selected_logprobs(hidden, weight, targets, temperature=temperature, chunk_tokens=chunk_tokens)
    gradients = torch.autograd.grad((result * upstream).sum(), (hidden, weight))
    expected = full_logprobs(hidden, weight, targets, temperature)
    expected_gradients = torch.autograd.grad((expected * upstream).sum(), (hidden, weight))
    assert result.dtype is torch.float32
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=2e-6)  # also for bfloat16 inputs: their logits are never rounded
    for got, want in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=10 * tolerance)


def test_a_head_wider_than_one_block_is_widened_piece_by_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, targets = inputs(torch.bfloat16)
    monkeypatch.setattr(logprob, "WIDENED_ROWS", 7)
    result = selected_logprobs(hidden, weight, targets, temperature=1.0, chunk_tokens=5)
    torch.testing.assert_close(result, full_logprobs(hidden, weight, targets, 1.0), rtol=1e-6, atol=2e-6)


def test_frozen_head_gets_no_gradient() -> None:
    hidden, weight, targets = inputs(torch.float32)
    selected_logprobs(hidden, weight.detach(), targets, temperature=1.0, chunk_tokens=4).sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_no_rows_give_no_logprobs_and_zero_gradient() -> None:
    hidden, weight, targets = inputs(torch.float32, rows=0)
    result = selected_logprobs(hidden, weight, targets, temperature=1.0, chunk_tokens=4)
    result.sum().backward()
    assert result.shape == (0,)
    assert weight.grad is not None
    assert not weight.grad.any()


def test_refuses_temperature_zero() -> None:
    hidden, weight, targets = inputs(torch.float32)
    with pytest.raises(ValueError, match=r"temperature is 0\.0"):
        selected_logprobs(hidden, weight, targets, temperature=0.0, chunk_tokens=4)


@pytest.mark.parametrize("chunk_tokens", [1, 5, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_entropy_equals_full_logits(chunk_tokens: int, temperature: float, dtype: torch.dtype, tolerance: float) -> None:
    hidden, weight, targets = inputs(dtype)
    upstream = torch.stack([torch.linspace(-1, 1, targets.numel()), torch.linspace(2, -1, targets.numel())])
    result = selected_logprobs(hidden, weight, targets, temperature=temperature, chunk_tokens=chunk_tokens, with_entropy=True)
    gradients = torch.autograd.grad((result * upstream).sum(), (hidden, weight))
    everything = ((hidden.float() @ weight.float().T) / temperature).log_softmax(-1)
    entropy = -(everything.exp() * everything).sum(-1)
    expected = torch.stack([full_logprobs(hidden, weight, targets, temperature), entropy])
    expected_gradients = torch.autograd.grad((expected * upstream).sum(), (hidden, weight))
    assert result.shape == (2, targets.numel())
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=2e-6)
    for got, want in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=10 * tolerance)


def test_entropy_changes_no_bit_of_log_probs() -> None:
    hidden, weight, targets = inputs(torch.float32)
    plain = selected_logprobs(hidden, weight, targets, temperature=0.7, chunk_tokens=4)
    both = selected_logprobs(hidden, weight, targets, temperature=0.7, chunk_tokens=4, with_entropy=True)
    assert torch.equal(plain, both[0])


def test_entropy_of_a_flat_and_of_a_certain_distribution() -> None:
    hidden = torch.tensor([[0.0], [1.0]], requires_grad=True)
    weight = torch.tensor([[200.0], [0.0], [0.0], [0.0]])
    result = selected_logprobs(hidden, weight, torch.tensor([0, 1]), temperature=1.0, chunk_tokens=2, with_entropy=True)
    torch.testing.assert_close(result[1], torch.tensor([4.0, 1.0]).log())
    result[1].sum().backward()
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad, torch.zeros(2, 1))  # both are extremes
