"""Settings of requests, given to each of their drafted tokens."""

import torch

from rljob_runtime.engine.vllm.drafted import expanded


def test_each_drafted_token_has_the_setting_of_its_request():
    temperatures, counts = torch.tensor([0.7, 0.0, 1.3]), torch.tensor([2, 2, 5], dtype=torch.int32)
    found = expanded(temperatures, counts, 5, replace_from=0, replace_to=1)
    assert found.tolist() == torch.tensor([0.7, 0.7, 1.3, 1.3, 1.3]).tolist()
    assert expanded(torch.tensor([0.0, 3.0]), torch.tensor([1, 3]), 3, replace_from=0, replace_to=1).tolist() == [1.0, 3.0, 3.0]
    assert expanded(torch.tensor([5, 7]), torch.tensor([1, 2]), 2).dtype == torch.int64
