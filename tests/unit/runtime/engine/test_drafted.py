"""Settings of requests, given to each of their drafted tokens."""

from types import SimpleNamespace

import pytest
import torch

from rljob_runtime.engine.vllm.drafted import expanded, repair_drafted_sampling


def test_each_drafted_token_has_the_setting_of_its_request():
    temperatures, counts = torch.tensor([0.7, 0.0, 1.3]), torch.tensor([2, 2, 5], dtype=torch.int32)
    found = expanded(temperatures, counts, 5, replace_from=0, replace_to=1)
    assert found.tolist() == torch.tensor([0.7, 0.7, 1.3, 1.3, 1.3]).tolist()
    assert expanded(torch.tensor([0.0, 3.0]), torch.tensor([1, 3]), 3, replace_from=0, replace_to=1).tolist() == [1.0, 3.0, 3.0]
    assert expanded(torch.tensor([5, 7]), torch.tensor([1, 2]), 2).dtype == torch.int64


def test_a_step_without_drafted_tokens_is_no_error_with_top_k(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.sample import rejection_sampler

    for name in ("expand_batch_to_tokens", "apply_sampling_constraints"):
        monkeypatch.setattr(rejection_sampler, name, getattr(rejection_sampler, name))
    repair_drafted_sampling()
    settings = {"temperature": torch.tensor([0.5]), "top_k": torch.tensor([2]), "top_p": None, "all_greedy": False}

    def constrained(logits: torch.Tensor) -> torch.Tensor:
        counts = torch.tensor([len(logits)], dtype=torch.int32)
        return rejection_sampler.apply_sampling_constraints(logits, counts, SimpleNamespace(**settings))

    assert constrained(torch.zeros(0, 5)).shape == (0, 5)
    assert constrained(torch.tensor([[0.0, 1.0, 3.0]])).tolist() == [[-torch.inf, 2.0, 6.0]]
