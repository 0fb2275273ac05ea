"""Chunked log-probs against log_softmax on full logits, values and gradients."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rljob_runtime.losses.policy import clipped_policy_loss
from rljob_runtime.training import logprob
from rljob_runtime.training.logit_kernels import log_normalizers, logit_gradients
from rljob_runtime.training.logprob import PossibleTokens, selected_logprobs


def inputs(dtype: torch.dtype, rows: int = 13) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(rows, 8, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(31, 8, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, 31, (rows,), generator=generator)


def capped(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return logits if softcap is None else softcap * (logits / softcap).tanh()


def full_logprobs(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float, softcap: float | None = None
) -> torch.Tensor:
    logits = capped(hidden.float() @ weight.float().T, softcap) / temperature
    return logits.log_softmax(-1)[torch.arange(targets.numel()), targets]


@pytest.mark.parametrize("chunk_tokens", [1, 5, 13, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_equals_full_logits(chunk_tokens: int, temperature: float, softcap: float | None, dtype: torch.dtype, tolerance: float) -> None:
    hidden, weight, targets = inputs(dtype)
    upstream = torch.linspace(-1, 1, targets.numel())
    result = selected_logprobs(hidden, weight, targets, temperature=temperature, chunk_tokens=chunk_tokens, softcap=softcap)
    gradients = torch.autograd.grad((result * upstream).sum(), (hidden, weight))
    expected = full_logprobs(hidden, weight, targets, temperature, softcap)
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


class LiveBytes(TorchDispatchMode):
    """The most bytes of tensors made inside at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor) and (storage := tensor.untyped_storage())._cdata not in self._seen:
                self._seen.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, storage._cdata, storage.nbytes())
        return result

    def _free(self, key: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self.now -= num_bytes


@pytest.mark.parametrize("num_chunks", [1, 3])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_two_chunks_in_float32_are_the_peak_also_with_entropy(with_entropy: bool, num_chunks: int) -> None:
    """What the estimate of memory counts (``rljob_api.memory``): a chunk and one temporary of its size."""
    rows, vocabulary = 256, 2048
    hidden, weight = torch.randn(num_chunks * rows, 8, requires_grad=True), torch.randn(vocabulary, 8, requires_grad=True)
    targets = torch.arange(num_chunks * rows)
    with LiveBytes() as live:
        result = selected_logprobs(hidden, weight, targets, temperature=1.0, chunk_tokens=rows, with_entropy=with_entropy)
        result.sum().backward()
    assert live.peak < 8.6 * rows * vocabulary  # bytes a logit


class Products(TorchDispatchMode):
    """Rows of the products with the head, among all operations inside."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.rows: list[int] = []
        self._vocabulary = vocabulary

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and result.shape[-1] == self._vocabulary:
            self.rows.append(result.shape[0])
        return result


@pytest.mark.parametrize("with_entropy", [False, True])
def test_chunks_are_of_equal_size_and_the_last_ones_logits_are_computed_once(with_entropy: bool) -> None:
    hidden, weight = torch.randn(10, 3, requires_grad=True), torch.randn(7, 3, requires_grad=True)
    with Products(7) as products:
        result = selected_logprobs(hidden, weight, torch.arange(10) % 7, temperature=1.0, chunk_tokens=6, with_entropy=with_entropy)
        result.sum().backward(retain_graph=True)
    assert products.rows == [5, 5, 5]
    first, hidden.grad = hidden.grad, None
    result.sum().backward()  # again: what was kept is used up
    torch.testing.assert_close(hidden.grad, first, rtol=0, atol=1e-6)


def test_entropy_of_a_flat_and_of_a_certain_distribution() -> None:
    hidden = torch.tensor([[0.0], [1.0]], requires_grad=True)
    weight = torch.tensor([[200.0], [0.0], [0.0], [0.0]])
    result = selected_logprobs(hidden, weight, torch.tensor([0, 1]), temperature=1.0, chunk_tokens=2, with_entropy=True)
    torch.testing.assert_close(result[1], torch.tensor([4.0, 1.0]).log())
    result[1].sum().backward()
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad, torch.zeros(2, 1))  # both are extremes


sets = st.lists(st.sets(st.integers(0, 30), max_size=12), min_size=1, max_size=13)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(sets, st.integers(1, 14), st.booleans(), st.sampled_from([None, 4.0]))
def test_among_possible_tokens_equals_a_softmax_over_them(
    kept: list[set[int]], chunk_tokens: int, with_entropy: bool, softcap: float | None
) -> None:
    hidden, weight, targets = inputs(torch.float32, rows=len(kept))
    rows = [sorted({*tokens, int(target)}) if tokens else [] for tokens, target in zip(kept, targets, strict=True)]  # empty: all
    ids = torch.tensor([token for row in rows for token in row], dtype=torch.long)
    owners = torch.tensor([i for i, row in enumerate(rows) for _ in row], dtype=torch.long)
    possible = PossibleTokens(token_ids=ids, rows=owners)
    result = selected_logprobs(
        hidden,
        weight,
        targets,
        temperature=0.7,
        chunk_tokens=chunk_tokens,
        with_entropy=with_entropy,
        possible=possible,
        softcap=softcap,
    )
    logits = capped(hidden @ weight.T, softcap) / 0.7
    expected = []
    for row, target, logit in zip(rows, targets.tolist(), logits, strict=True):
        chosen = row or list(range(31))
        logprobs = logit[chosen].log_softmax(-1)
        values = [logprobs[chosen.index(target)], -(logprobs.exp() * logprobs).sum()]
        expected.append(torch.stack(values if with_entropy else values[:1]))
    wanted = torch.stack(expected, dim=1).reshape(result.shape)
    torch.testing.assert_close(result, wanted, rtol=1e-6, atol=2e-6)
    upstream = torch.linspace(-1, 1, result.numel()).reshape(result.shape)
    found, right = (torch.autograd.grad((x * upstream).sum(), (hidden, weight)) for x in (result, wanted))
    for got, want in zip(found, right, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_an_on_policy_token_of_nucleus_sampling_has_ratio_1_and_a_gradient_for_either_sign() -> None:
    """p = (.4, .35, .25) and top-p .7: over the whole vocabulary the ratio is .75, and at A = -1 it is clipped."""
    weight = torch.tensor([0.4, 0.35, 0.25]).log().unsqueeze(1).requires_grad_()
    hidden, target = torch.ones(1, 1), torch.zeros(1, dtype=torch.long)
    behavior = torch.tensor([math.log(0.4 / 0.75)])
    nucleus = PossibleTokens(token_ids=torch.tensor([0, 1]), rows=torch.tensor([0, 0]))
    for advantage in (1.0, -1.0):
        found = {}
        for name, possible in (("masked", nucleus), ("whole", None)):
            logprobs = selected_logprobs(hidden, weight, target, temperature=1.0, chunk_tokens=1, possible=possible)
            terms = clipped_policy_loss(logprobs, behavior, torch.tensor([advantage]), clip_low=0.2, clip_high=0.2)
            (gradient,) = torch.autograd.grad(terms.loss.sum(), weight)
            found[name] = (terms.ratio.item(), gradient[0].item())
        # d log p / d logit of the target: 1 - p
        assert found["masked"] == pytest.approx((1.0, -advantage * (1 - 0.4 / 0.75)), abs=1e-6)
        assert found["whole"] == pytest.approx((0.75, -0.75 * 0.6 if advantage > 0 else 0.0), abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_for_logits_give_the_normalizer_and_the_gradient(dtype: torch.dtype) -> None:
    """What CUDA compiles, run as plain operations."""
    torch.manual_seed(0)
    logits, columns, scale = torch.randn(7, 50) * 4, torch.randint(0, 50, (7,)), torch.randn(7, 1)
    logits[2, 5] = -torch.inf
    normalizer = log_normalizers(logits)
    expected = logits.clone().requires_grad_()
    chosen = torch.log_softmax(expected, dim=-1).gather(1, columns[:, None])
    (chosen * scale).sum().backward()
    torch.testing.assert_close(logits.gather(1, columns[:, None]) - normalizer[:, None], chosen.detach())
    found = logit_gradients(logits, normalizer, columns, scale, dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), expected.grad, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)
