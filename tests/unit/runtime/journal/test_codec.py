"""A group comes back from the journal as it was, whatever it holds."""

from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest

from rljob_runtime.journal.codec import decode_group, encode_group, size_bytes
from rljob_runtime.journal.frames import DamagedError, Frame, read
from rljob_runtime.overlap.buffer import Group
from rljob_runtime.records import EpisodeRecord, Judgement, RewardResult, Segment, Turn, VersionSpan
from rljob_runtime.sampling_mask import SamplingMask
from tests.support.records import ids, make_group, make_segment, make_trajectory


def written(group: Group) -> Frame:
    (frame,) = read(BytesIO(b"".join(encode_group(group))))
    return frame


def episode() -> Group:
    """Two samples: an episode of three segments with everything a segment may have, and one that ended before its first token."""
    mask = SamplingMask(token_ids=ids(4, 5, 9), counts=ids(2, 1))
    routes = np.array([[[3, 0], [-1, -1]]] * 3, dtype=np.int8)
    sampled = replace(make_segment((4, 9), versions=(3, 5), logprobs=(-0.1, -1e-7)), sampling_mask=mask, reward=0.25, routes=routes)
    given = Segment(token_ids=ids(70000, 2), sampled=False, reward=-1.0)
    reward = RewardResult(
        sample_id="7/0",
        score=1 / 3,
        parts={"a": 0.1, "ä": 2.0},
        passed=True,
        error="b: ran past 1 s",
        errors=("b",),
        timeouts=("b", "c"),
        retries=2,
        elapsed_s=0.5,
        judgements=(Judgement(reward="b", text="Ü 3", calls=2, prompt_tokens=7, elapsed_s=1.5), Judgement(reward="c", error="late")),
    )
    first = make_trajectory(7, 0)
    turn = Turn(observation="ä", action="up", reward=0.25, action_valid=False, state_key="a1")
    record = EpisodeRecord(turns=(turn, turn), stop="done", summary={"success": 1.0}, environment_s=0.5)
    prompt = replace(first.prompt, own_tag="hard", text="ä\ud800")
    spans = (VersionSpan(start=0, end=0, version=4),)
    empty = replace(make_segment(()), version_spans=spans)
    return Group(
        group_id=7,
        trajectories=(
            replace(
                first,
                prompt=prompt,
                segments=(sampled, given, sampled, replace(given, is_prompt=True), sampled),
                finish_reason="length",
                reward=reward,
                episode=record,
            ),
            replace(make_trajectory(7, 2), prompt=prompt, segments=(empty,)),
        ),
        failed_samples=1,
    )


@pytest.mark.parametrize("group", [make_group(3, scores=(0.0, 0.1, 1.0), version=2, failed=1), episode()])
def test_every_field_and_number_comes_back(group: Group) -> None:
    found = decode_group(written(group))
    assert found.recovered
    assert replace(found, recovered=False) == group
    assert (found.oldest_version, found.newest_version) == (group.oldest_version, group.newest_version)
    for trajectory in found.trajectories:
        assert trajectory.prompt is found.trajectories[0].prompt
        for segment in trajectory.segments:
            assert (segment.token_ids.dtype, segment.logprobs.dtype) == (np.int32, np.float32)


def test_arrays_are_read_without_a_copy() -> None:
    frame = written(make_group(3))
    memory = np.frombuffer(frame.payload, dtype=np.uint8)
    assert all(np.shares_memory(s.token_ids, memory) for t in decode_group(frame).trajectories for s in t.segments)


def test_a_long_group_takes_eight_bytes_a_token_and_little_more() -> None:
    long = replace(make_trajectory(1, 0), segments=(make_segment(range(20_000)),))
    group = Group(group_id=1, trajectories=(long,) * 4, failed_samples=0)
    assert size_bytes(group) == 4 * 20_000 * 8
    assert sum(len(piece) for piece in encode_group(group)) < 8.05 * 4 * 20_000


def test_what_a_verifier_needed_is_left_out() -> None:
    trajectory = make_trajectory(1, 0)
    reported = replace(trajectory, prompt=replace(trajectory.prompt, metadata={"set": {1, 2}}))
    found = decode_group(written(Group(group_id=1, trajectories=(reported,), failed_samples=0)))
    assert found.trajectories[0] == trajectory


@pytest.mark.parametrize(
    ("change", "what"), [({"samples": [{}]}, "reward"), ({"prompt": {}}, "tokens"), ({"samples": []}, "cannot be used")]
)
def test_a_record_that_contradicts_itself_is_refused(change: dict[str, object], what: str) -> None:
    frame = written(make_group(1))
    with pytest.raises(DamagedError, match=what):
        decode_group(Frame(content={**frame.content, **change}, payload=frame.payload))
