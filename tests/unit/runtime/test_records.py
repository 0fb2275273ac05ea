"""Records travel as they are."""

import pickle
from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest

from rljob_runtime.records import GenerationRequest, Prompt, RewardResult, Sampling
from rljob_runtime.weightsync.packing import plan_buckets

PROMPT = Prompt(index=3, text="1 + 1", token_ids=np.arange(4, dtype=np.int32), answer="2", source="sums", metadata={"entry": {"x": 1}})
SAMPLING = Sampling(max_tokens=8, top_k=4, stop_token_ids=(2,))
RECORDS = (
    PROMPT,
    SAMPLING,
    GenerationRequest(request_id="3/0", prompt_token_ids=PROMPT.token_ids, sampling=SAMPLING, seed=7),
    plan_buckets([("model.norm.weight", "float32", (4,))], 64),
    RewardResult(sample_id="3/0", score=0.5, parts={"task": 0.5}, passed=True, errors=("other",), elapsed_s=0.1),
)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_pickled_record_is_the_same_and_still_frozen(record: object) -> None:
    buffers: list[pickle.PickleBuffer] = []
    copied = pickle.loads(pickle.dumps(record, protocol=5, buffer_callback=buffers.append), buffers=buffers)
    assert copied == record
    with pytest.raises(FrozenInstanceError):
        setattr(copied, fields(copied)[0].name, None)


def test_a_manifest_that_comes_again_is_not_read_again() -> None:
    """With a hundred engines every update would otherwise pickle hundreds of tensors' layout a hundred times."""
    first = plan_buckets([("model.norm.weight", "float32", (4,))], 64)
    other = plan_buckets([("model.norm.weight", "float32", (5,))], 64)
    again, once_more = (pickle.loads(pickle.dumps(first)) for _ in range(2))
    assert again is once_more
    assert pickle.loads(pickle.dumps(again)) == first
    assert pickle.loads(pickle.dumps(other)) == other != first
