"""A sender's end of its group (``weightsync.group``), which sends in the background while the next bucket is packed."""

from __future__ import annotations

import queue
import threading

import torch

from rljob_runtime.errors import DeadlineError, WeightSyncError
from rljob_runtime.weightsync.group import Meeting, Member, as_sync_errors, end_meeting, opened

AHEAD = 2
"""Buckets that a sender holds: one travels while the next is packed."""
CLOSE_TIMEOUT_S = 10.0


class Outbox:
    """A sender's end of its group: what is put into it travels in the background, in order."""

    def __init__(self, meeting: Meeting, device: torch.device) -> None:
        """Open the meeting; the group is formed once something is to be sent.

        Raises:
            WeightSyncError: the address cannot be listened on.
        """
        self._device = device
        with as_sync_errors(f"trainer rank {meeting.sender} cannot listen on {meeting.host}"):
            self._meeting, self._store = opened(meeting)
        self._waiting: queue.SimpleQueue[tuple[torch.Tensor, int | None] | None] = queue.SimpleQueue()
        """With what has to be announced before a tensor that is held beside those that have a room each; None: nothing."""
        self._room = threading.Semaphore(AHEAD)
        self._held_bytes = self._first = 0
        self._lock = threading.Lock()
        self._fault: WeightSyncError | DeadlineError | None = None
        self._thread = threading.Thread(target=self._run, name=f"rljob-group-{meeting.sender}", daemon=True)
        self._thread.start()
        self._put = 0

    @property
    def meeting(self) -> Meeting:
        """With the port that it listens on."""
        return self._meeting

    def room(self) -> WeightSyncError | DeadlineError | None:
        """Wait until there is room for one more tensor; what broke the group, if something did.

        The caller raises it once its part in collectives of trainer ranks is done, so that none of them waits for it.
        """
        if self._fault is None and not self._room.acquire(timeout=self._meeting.timeout_s):
            return DeadlineError(f"trainer rank {self._meeting.sender}: engines did not take the bucket before the last in time")
        return self._fault

    def put(self, data: torch.Tensor, *, spare_bytes: int = 0, is_first: bool = True) -> tuple[int, int | None]:
        """Have ``data`` sent, which must not change any more. :meth:`room` comes before each.

        Args:
            data: of any size.
            spare_bytes: what may be held, all together, of tensors that give their room back at once.
            is_first: of an update, whose others receivers take without a break.

        Returns:
            Its number. If it has given its room back, so that the next tensor has room before this one is sent, also the number that
            receivers have to announce before it is: that of the first tensor of the update.
        """
        sequence, self._put = self._put, self._put + 1
        if is_first:
            self._first = sequence
        with self._lock:
            held = self._held_bytes + data.nbytes <= spare_bytes
            self._held_bytes += data.nbytes if held else 0
        if held:
            self._room.release()
        announced = self._first if held else None
        self._waiting.put((data, announced))
        return sequence, announced

    def close(self) -> None:
        """End the meeting."""
        end_meeting(self._store, "the sender closed the group")
        self._waiting.put(None)
        self._thread.join(CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        """The thread: no exception leaves it, callers of :meth:`room` get it."""
        member: Member | None = None
        sequence = 0
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            while (given := self._waiting.get()) is not None:
                member = member or Member(self._meeting, 0, self._device)
                data, announced = given
                if announced is not None:
                    member.await_announced(announced)
                member.broadcast(data, sequence)
                sequence += 1
                if announced is not None:
                    with self._lock:
                        self._held_bytes -= data.nbytes
                else:
                    self._room.release()
                del data, given
        except (WeightSyncError, DeadlineError) as error:
            self._fault = type(error)(str(error))  # without its frames, which would keep the bucket
            self._room.release()
        except Exception as error:  # noqa: BLE001 - nobody else hears of it, and the sender would wait for room until its deadline
            self._fault = WeightSyncError(f"trainer rank {self._meeting.sender}: {type(error).__name__}: {error}")
            self._room.release()
        finally:
            if member is not None:
                member.close()
