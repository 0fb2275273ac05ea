"""On-policy distillation: whichever way the teacher counts, the gradient on fresh samples is that of the reverse KL."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_runtime.losses.config import LossConfig
from rljob_runtime.losses.objective import LossInputs, objective
from rljob_runtime.losses.rewards import distances_to_teacher
from rljob_runtime.losses.spans import span_index

LOGITS = st.lists(st.floats(-2, 2, width=32), min_size=6, max_size=6)


def inputs_of(behavior: torch.Tensor, weights: torch.Tensor, **more: Any) -> LossInputs:
    """Tokens of one sequence behind one token of a prompt."""
    count = behavior.numel()
    mask = np.array([0.0] + [1.0] * count, dtype=np.float32)
    spans = span_index(mask, np.array([count + 1], dtype=np.int32)).of(np.arange(1, count + 1))
    fixed = {"behavior_logprobs": behavior, "advantages": torch.zeros(count, dtype=behavior.dtype)}
    return LossInputs(weights=weights, policy_weights=weights, spans=spans, **(fixed | more))


def gradient(logits: list[float], teacher: list[float], *, in_loss: bool, coefficient: float) -> tuple[np.ndarray, np.ndarray]:
    """(of the objective over every token with its probability, of the KL itself), both by the policy's logits."""
    theta = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    logq = torch.log_softmax(torch.tensor(teacher, dtype=torch.float64), 0)
    logp = torch.log_softmax(theta, 0)
    behavior = logp.detach()
    more: dict[str, Any] = {"teacher_logprobs": logq}
    if not in_loss:
        more["advantages"] = torch.from_numpy(-coefficient * distances_to_teacher(behavior.numpy(), logq.numpy()))
    config = LossConfig(distillation_coefficient=coefficient if in_loss else 0.0)
    loss = objective(logp, inputs_of(behavior, behavior.exp(), **more), config, kl_coefficient=0.0).loss
    (found,) = torch.autograd.grad(loss, theta, retain_graph=True)
    (expected,) = torch.autograd.grad(coefficient * (logp.exp() * (logp - logq)).sum(), theta)
    return found.numpy(), expected.numpy()


@settings(deadline=None, derandomize=True, max_examples=40)
@given(LOGITS, LOGITS, st.booleans(), st.floats(0.1, 3))
def test_the_gradient_on_fresh_samples_is_that_of_the_reverse_kl(
    logits: list[float], teacher: list[float], in_loss: bool, coefficient: float
) -> None:
    found, expected = gradient(logits, teacher, in_loss=in_loss, coefficient=coefficient)
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-9)


def test_the_term_of_the_loss_equals_its_formula() -> None:
    logp, teacher, weights = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.0, -0.5]), torch.tensor([0.5, 0.25, 0.25])
    config = LossConfig(distillation_coefficient=3.0)
    result = objective(logp, inputs_of(logp, weights, teacher_logprobs=teacher), config, kl_coefficient=0.0)
    expected = sum(w * (p - q) ** 2 / 2 for p, q, w in zip([-1.0, -2.0, -0.5], [-1.5, -1.0, -0.5], [0.5, 0.25, 0.25], strict=True))
    assert result.distillation_loss is not None
    assert float(result.distillation_loss) == pytest.approx(expected)
    assert float(result.loss) == pytest.approx(3 * expected)


def test_without_a_teacher_in_the_loss_there_is_no_term() -> None:
    logp = torch.tensor([-1.0])
    result = objective(logp, inputs_of(logp, torch.ones(1), teacher_logprobs=torch.tensor([-3.0])), LossConfig(), kl_coefficient=0.0)
    assert result.distillation_loss is None
    assert float(result.loss) == 0.0
