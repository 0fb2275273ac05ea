"""Messages of many sequences: nothing is lost, arrays are out of band and come back as views."""

import pickle
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rljob_runtime.packed import RequestBatch, pack, unpack
from rljob_runtime.records import Completion, GenerationRequest, Sampling
from rljob_runtime.sampling_mask import SamplingMask
from tests.support.records import make_segment

lengths = st.lists(st.integers(0, 5), max_size=6)


def completions(sizes: list[int], masked: bool, routed: bool = False) -> list[Completion]:
    made = []
    for number, size in enumerate(sizes):
        segment = make_segment(range(number, number + size), versions=[place // 2 for place in range(size)])
        if masked:
            mask = SamplingMask(token_ids=np.arange(size, dtype=np.int32), counts=np.ones(size, dtype=np.int32))
            segment = replace(segment, sampling_mask=mask)
        if routed and size:  # an aborted one without tokens has none
            segment = replace(segment, routes=np.full((size + 2, 3, 2), number, dtype=np.int8))
        made.append(Completion(request_id=f"r{number}", segment=segment, finish_reason=("stop", "abort")[number % 2]))
    return made


@given(sizes=lengths, masked=st.booleans(), routed=st.booleans())
def test_what_is_packed_comes_back_equal(sizes: list[int], masked: bool, routed: bool) -> None:
    made = completions(sizes, masked, routed)
    buffers: list[pickle.PickleBuffer] = []
    body = pickle.dumps(pack(made), protocol=5, buffer_callback=buffers.append)
    assert unpack(pickle.loads(body, buffers=[bytes(b.raw()) for b in buffers])) == made


def test_tokens_are_neither_in_the_pickle_nor_copied_when_read() -> None:
    many = completions([10_000], False, routed=True) * 4
    buffers: list[pickle.PickleBuffer] = []
    small = [replace(c, segment=replace(c.segment, version_spans=c.segment.version_spans[:1])) for c in many]
    batch = pack(small)
    assert len(pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)) < 2_000
    assert all(np.shares_memory(c.segment.token_ids, batch.token_ids) for c in unpack(batch))
    assert all(np.shares_memory(c.segment.logprobs, batch.logprobs) for c in unpack(batch))
    assert all(np.shares_memory(c.segment.routes, batch.routes) for c in unpack(batch))


PROMPTS = [np.arange(size, dtype=np.int32) for size in (3, 1, 3)]
SETTINGS = [Sampling(max_tokens=4), Sampling(max_tokens=4, top_k=2), Sampling(max_tokens=4)]
requests = st.builds(
    GenerationRequest,
    request_id=st.text(max_size=4),
    prompt_token_ids=st.sampled_from(PROMPTS),
    sampling=st.sampled_from(SETTINGS),
    seed=st.integers(0, 2**63 - 1),
    num_sampled_before=st.integers(0, 3),
)


@given(made=st.lists(requests, max_size=8))
def test_requests_arrive_as_they_were(made: list[GenerationRequest]) -> None:
    arrived = pickle.loads(pickle.dumps(RequestBatch(made), protocol=5))
    assert type(arrived) is list
    assert arrived == made


def test_what_requests_share_travels_once() -> None:
    prompt, sampling = np.arange(1000, dtype=np.int32), Sampling(max_tokens=4)
    many = [GenerationRequest(request_id=f"{i}", prompt_token_ids=prompt, sampling=sampling, seed=i) for i in range(64)]
    body = pickle.dumps(RequestBatch(many), protocol=5)
    assert len(body) < 2 * prompt.nbytes
    arrived = pickle.loads(body)
    assert len({id(request.sampling) for request in arrived}) == len({id(request.prompt_token_ids) for request in arrived}) == 1
