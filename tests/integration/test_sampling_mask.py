"""On-policy tokens have ratio 1 under every sampling option: real vLLM samples, the trainer's code computes the log-probs again.

The engine is that of ``test_vllm_engine``'s untied model, started once for all options.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from rljob_api.v1alpha1 import RLJob
from rljob_runtime.engine.vllm.engine import VllmEngine
from rljob_runtime.errors import DataError
from rljob_runtime.job.learning_settings import sampling
from rljob_runtime.records import Completion, GenerationRequest, Sampling
from rljob_runtime.sampling_mask import SamplingMask, joined
from rljob_runtime.training.microbatch import make_micro_batches
from rljob_runtime.training.step import run_micro_batch
from tests.integration.test_vllm_engine import started
from tests.support.engine_contract import VOCAB, drain, new_model, push, save
from tests.support.records import ids
from tests.support.trainers import make_whole
from tests.unit.api.manifests import manifest

PROMPT = (5, 17, 33, 8)
OPTIONS = [
    {"temperature": t, **dict(part for part in parts if part)}
    for t, *parts in itertools.product(
        (1.0, 0.6, 1.7), (None, ("topP", 0.7)), (None, ("topK", 1), ("topK", 4), ("topK", 4096)), (None, ("minP", 0.1))
    )
]
"""Every combination of what rollout can say."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    yield from started(save(new_model(tied=False, seed=0), tmp_path_factory.mktemp("masked")))


def of_spec(options: dict[str, Any], max_tokens: int = 12) -> Sampling:
    document = manifest()
    document["spec"]["rollout"] = {"maxResponseTokens": max_tokens, **options}
    return sampling(RLJob.model_validate_json(json.dumps(document)).spec)  # without rules: topK 1 is refused in a job that trains


def trained_logprobs(model: PreTrainedModel, completions: list[Completion], temperature: float, *, masked: bool) -> np.ndarray:
    """The log-probs of the sampled tokens by the trainer's micro-batches and head, without its process group: vLLM has made one here."""
    tokens = np.array([t for c in completions for t in (*PROMPT, *c.segment.token_ids)], dtype=np.int32)
    lengths = np.array([len(PROMPT) + len(c.segment.token_ids) for c in completions], dtype=np.int32)
    wanted = np.concatenate([np.r_[np.zeros(len(PROMPT)), np.ones(len(c.segment.token_ids))] for c in completions]).astype(np.float32)
    mask = None
    if masked:
        nothing = SamplingMask(token_ids=np.zeros(0, dtype=np.int32), counts=np.zeros(len(PROMPT), dtype=np.int32))
        mask = joined([part for c in completions for part in (nothing, c.segment.sampling_mask) if part is not None])
    found = np.zeros(tokens.shape, dtype=np.float32)
    for micro in make_micro_batches(tokens, lengths, wanted, 50, sampling_mask=mask):
        with torch.no_grad():
            found[micro.sources] = run_micro_batch(model, micro, temperature, 7).numpy()
    return found[wanted > 0]


def test_on_policy_ratios_are_1_for_every_sampling_option(engine: VllmEngine) -> None:
    model = new_model(tied=False, seed=0)
    make_whole(model)
    settings = [of_spec(options) for options in OPTIONS]
    engine.submit(
        [
            GenerationRequest(request_id=f"{i}/{seed}", prompt_token_ids=ids(*PROMPT), sampling=chosen, seed=seed)
            for i, chosen in enumerate(settings)
            for seed in range(4)
        ]
    )
    found = drain(engine, 4 * len(settings))
    biased = 0
    for i, chosen in enumerate(settings):
        completions = [found[f"{i}/{seed}"] for seed in range(4)]
        behavior = np.array([x for c in completions for x in c.segment.logprobs])
        assert all((c.segment.sampling_mask is not None) == chosen.returns_mask for c in completions), OPTIONS[i]
        ratio = np.exp(trained_logprobs(model, completions, chosen.temperature, masked=chosen.returns_mask) - behavior)
        assert np.abs(ratio - 1.0).max() < 1e-4, OPTIONS[i]
        if chosen.returns_mask:
            assert all(c.segment.sampling_mask is not None and c.segment.sampling_mask.counts.min() >= 1 for c in completions), OPTIONS[i]
            without = np.exp(trained_logprobs(model, completions, chosen.temperature, masked=False) - behavior)
            biased += bool((without < 0.9).any())
    assert biased > len(settings) // 2  # over the whole vocabulary they would not be 1


def test_equal_logits_at_the_edge_of_top_k_are_all_possible(engine: VllmEngine) -> None:
    model = new_model(tied=False, seed=0)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight[torch.arange(VOCAB) // 10 * 10])  # each logit ten times
    push(engine, model, engine.version() + 1)
    engine.submit([GenerationRequest(request_id="tie", prompt_token_ids=ids(*PROMPT), sampling=of_spec({"topK": 4}), seed=0)])
    mask = drain(engine, 1)["tie"].segment.sampling_mask
    push(engine, new_model(tied=False, seed=0), engine.version() + 1)
    assert mask is not None
    assert set(mask.counts.tolist()) == {10}
    assert all(len({token // 10 for token in part.tolist()}) == 1 for part in np.split(mask.token_ids, 12))


def test_what_an_aborted_response_has_has_its_mask(engine: VllmEngine) -> None:
    engine.submit([GenerationRequest(request_id="cut", prompt_token_ids=ids(*PROMPT), sampling=of_spec({"topP": 0.7}, 400), seed=0)])
    engine.abort(["cut"])
    cut = drain(engine, 1)["cut"]
    assert cut.finish_reason == "abort"
    assert cut.segment.sampling_mask is not None
    assert cut.segment.sampling_mask.counts.size == len(cut.segment.token_ids)


def test_a_set_that_is_wider_than_the_list_is_not_known() -> None:
    from vllm.v1.outputs import LogprobsLists

    from rljob_runtime.engine.vllm.sampling import possible_tokens

    listed = np.array([[3, 3, 5, 6], [5, 3, 5, 6], [9, 3, 5, 6]])
    values = np.array([[-1.0, -1.0, -2.0, -np.inf], [-2.0, -1.0, -2.0, -np.inf], [-3.0, -1.0, -2.0, -3.0]])
    lists = LogprobsLists(logprob_token_ids=listed, logprobs=values, sampled_token_ranks=np.zeros(3))
    assert [row.tolist() for row in possible_tokens(lists, 60)] == [[3, 5], [5, 3], []]
    assert [row.tolist() for row in possible_tokens(lists, 3)] == [[3, 5], [5, 3], [9, 3, 5, 6]]


def test_a_mask_without_a_bound_is_refused(engine: VllmEngine) -> None:
    unbounded = Sampling(max_tokens=2, top_p=0.5, returns_mask=True)
    with pytest.raises(DataError, match="top_k is 0; a sampling mask needs 1 to 4096"):
        engine.submit([GenerationRequest(request_id="r", prompt_token_ids=ids(*PROMPT), sampling=unbounded, seed=0)])
