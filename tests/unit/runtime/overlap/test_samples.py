"""A response in parts, from one engine after another, with what could be sampled at each of its tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rljob_runtime.errors import RuntimeFault
from rljob_runtime.overlap.samples import Sample
from rljob_runtime.records import Completion, Sampling
from rljob_runtime.sampling_mask import SamplingMask
from tests.support.records import make_completion, make_prompt, make_segment

OWNER: Any = object()
SAMPLING = Sampling(max_tokens=8, top_p=0.7, top_k=5, returns_mask=True)


def part(tokens: tuple[int, ...], finish: str) -> Completion:
    """With each token and the one after it possible."""
    ids = np.array([(token, token + 1) for token in tokens], dtype=np.int32).reshape(-1)
    mask = SamplingMask(token_ids=ids, counts=np.full(len(tokens), 2, dtype=np.int32))
    return Completion(request_id="part", segment=replace(make_segment(tokens), sampling_mask=mask), finish_reason=finish)


def asked(sampling: Sampling) -> Sample:
    sample = Sample(owner=OWNER, group_id=0, index=0, prompt=make_prompt(0))
    sample.request(sampling, 0)
    return sample


def test_masks_of_all_parts_are_one() -> None:
    sample = asked(SAMPLING)
    assert sample.take(part((4, 5), "abort")) is None
    assert sample.take(part((), "abort")) is None
    whole = sample.take(part((6,), "stop"))
    assert whole is not None
    assert whole.segment.token_ids.tolist() == [4, 5, 6]
    assert whole.segment.sampling_mask == part((4, 5, 6), "stop").segment.sampling_mask


def test_an_engine_that_leaves_the_mask_out_is_a_fault() -> None:
    with pytest.raises(RuntimeFault, match=r"without its sampling mask, which rollout\.topP, topK and minP need"):
        asked(SAMPLING).take(make_completion("0/0"))


def test_without_being_asked_for_there_is_none() -> None:
    whole = asked(Sampling(max_tokens=8)).take(make_completion("0/0"))
    assert whole is not None
    assert whole.segment.sampling_mask is None
