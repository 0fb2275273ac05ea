"""Records on disk: any cut is a clean end, any wrong byte is noticed."""

import io
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_runtime.journal.frames import PREFIX_BYTES, Arrays, DamagedError, Frame, encode, read

ARRAYS = [np.arange(5, dtype=np.int32), np.zeros(0, dtype=np.float32), np.ones(3, dtype=np.float32)]
RECORDS = [
    encode({"kind": "begin"}),
    encode({"kind": "group", "text": "ä\ud800"}, ARRAYS),
    encode({"kind": "step", "groups": list(range(9))}),
]


def whole(records: Sequence[Sequence[bytes]] = RECORDS) -> bytes:
    return b"".join(piece for record in records for piece in record)


def frames(data: bytes) -> list[Frame]:
    return list(read(io.BytesIO(data)))


def test_records_come_back_as_they_were() -> None:
    found = frames(whole())
    assert [frame.kind for frame in found] == ["begin", "group", "step"]
    assert found[1].content["text"] == "ä\ud800"
    arrays = Arrays(found[1].payload)
    assert arrays.take(np.int32, 5).tolist() == [0, 1, 2, 3, 4]
    assert arrays.take(np.float32, 3).tolist() == [1.0, 1.0, 1.0]
    arrays.done()


@given(cut=st.integers(0, len(whole())))
def test_a_file_that_was_cut_anywhere_ends_with_its_last_whole_record(cut: int) -> None:
    ends = np.cumsum([len(whole([record])) for record in RECORDS])
    assert frames(whole()[:cut]) == frames(whole())[: int(np.searchsorted(ends, cut, side="right"))]


@given(place=st.integers(0, len(whole()) - 1), bit=st.integers(0, 7))
def test_a_wrong_bit_is_noticed_and_what_came_before_is_kept(place: int, bit: int) -> None:
    data = bytearray(whole())
    data[place] ^= 1 << bit
    before = []
    with pytest.raises(DamagedError, match=r"byte \d+"):
        before.extend(read(io.BytesIO(bytes(data))))  # extend keeps what came before the error
    ends = np.cumsum([len(whole([record])) for record in RECORDS])
    assert before == frames(whole())[: int(np.searchsorted(ends, place, side="right"))]


def test_zeros_behind_the_last_record_are_damage() -> None:
    with pytest.raises(DamagedError, match="no record begins here"):
        frames(whole() + bytes(PREFIX_BYTES))


def test_an_array_that_is_not_there_is_damage() -> None:
    arrays = Arrays(bytes(8))
    with pytest.raises(DamagedError, match="3 numbers are declared, 8 bytes are left"):
        arrays.take(np.int32, 3)
    with pytest.raises(DamagedError, match="8 bytes are left over"):
        arrays.done()


def test_arrays_are_views_of_what_was_read() -> None:
    payload = np.arange(4, dtype=np.int32).tobytes()
    found = Arrays(payload).take(np.int32, 4)
    assert not found.flags.writeable
    assert not found.flags.owndata
