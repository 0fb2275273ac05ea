"""A broken process group is distinguished from a worker's own error."""

import pytest

from rljob_runtime.cluster.collectives import MAX_CHARACTERS, first_line, is_broken_group
from rljob_runtime.errors import BrokenGroupError, CallDeadlineError, WorkerLostError

GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"
ENDED = RuntimeError(
    f"{GLOO}pair.cc:553] Connection closed by peer [127.0.0.1]:51883. This is typically caused by a remote worker crashing."
)
HANGS = RuntimeError(f"{GLOO}unbound_buffer.cc:78] Timed out waiting 6000ms for recv operation to complete")


class DistBackendError(RuntimeError):
    """As torch.distributed has it: NCCL's."""


class OwnError(DistBackendError):
    """A subclass."""


@pytest.mark.parametrize("error", [ENDED, HANGS, DistBackendError("NCCL error: remote process exited"), OwnError("")])
def test_collectives_that_fail_by_another_rank_are_a_broken_group(error: Exception) -> None:
    assert is_broken_group(error)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError(str(ENDED)), KeyError("gloo"), MemoryError()],
)
def test_an_error_of_the_worker_itself_is_none(error: Exception) -> None:
    assert not is_broken_group(error)


def test_what_a_collective_said_is_one_short_line() -> None:
    assert first_line(RuntimeError("first\nException raised from recv at ...")) == "RuntimeError: first"
    assert first_line(RuntimeError()) == "RuntimeError: "
    assert len(first_line(RuntimeError("x" * 5000))) == MAX_CHARACTERS


def test_a_call_that_is_not_answered_can_be_taken_for_the_loss_of_its_worker() -> None:
    error = CallDeadlineError("train-1", "train_step", "3600 s", "train-1.log")
    assert str(error) == "worker train-1 did not finish train_step within 3600 s; its log: train-1.log"
    assert isinstance(error.stuck, WorkerLostError)
    assert str(error.stuck) == "worker train-1 is stuck: it did not finish train_step within 3600 s; its log: train-1.log"
    assert "train-0" in str(BrokenGroupError("train-0", first_line(ENDED), "train-0.log"))
