"""Records travel as they are."""

import pickle
from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest

from rljob_runtime.records import GenerationRequest, Prompt, RewardResult, Sampling

PROMPT = Prompt(index=3, text="1 + 1", token_ids=np.arange(4, dtype=np.int32), answer="2", source="sums", metadata={"entry": {"x": 1}})
SAMPLING = Sampling(max_tokens=8, top_k=4, stop_token_ids=(2,))
RECORDS = (
    PROMPT,
    SAMPLING,
    GenerationRequest(request_id="3/0", prompt_token_ids=PROMPT.token_ids, sampling=SAMPLING, seed=7),
    RewardResult(sample_id="3/0", score=0.5, parts={"task": 0.5}, passed=True, errors=("other",), elapsed_s=0.1),
)


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_pickled_record_is_the_same_and_still_frozen(record: object) -> None:
    buffers: list[pickle.PickleBuffer] = []
    copied = pickle.loads(pickle.dumps(record, protocol=5, buffer_callback=buffers.append), buffers=buffers)
    assert copied == record
    with pytest.raises(FrozenInstanceError):
        setattr(copied, fields(copied)[0].name, None)
