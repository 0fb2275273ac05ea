"""Training state in torch's distributed checkpoint format: loadable at another number of ranks, bit-equal at the same.

Frozen weights are not written, because training starts from the same model folder again: with adapters a checkpoint is small.
The caller makes a new folder per checkpoint and marks it complete afterwards; here a folder is only written or read.

::

    begin:  state ── copy to host memory ──> a thread: save (collectives in a gloo group of their own), fsync, checksums ──> sums
    save:   state ────────────────────────────────────> the same, awaited, a few files' worth of copies at a time
    load:   .metadata ── allow-listed unpickler ──> plan ── torch.load(weights_only=True) ──> state
"""

from __future__ import annotations

import datetime
import functools
import logging
import pickle
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from rljob_runtime.checkpoint_files import FileSum, sum_file
from rljob_runtime.cuda_errors import clear_last_error
from rljob_runtime.errors import CheckpointError
from rljob_runtime.training.bfloat16_adamw import MOMENTS
from rljob_runtime.training.checkpoint_reading import METADATA, CheckedReader, TensorsPlanner
from rljob_runtime.training.checkpoint_writing import PiecewiseWriter
from rljob_runtime.training.parallel import has_disjoint_shards, layout_of, local_tensor

TRAINED_ONLY = StateDictOptions(ignore_frozen_params=True, strict=False)
"""Frozen parameters are in no checkpoint, and are not missed; of the others none can be missing, as loading fails before."""
WRITE_TIMEOUT_S = 1800.0
"""Deadline of writing: of each wait of a rank for the files of the others."""
FILES = {"cuda": 4, "cpu": 1}
"""Files of a rank that are written side by side, by the device of its state. One file reached 0.5 GB/s on a machine with an H200, a plain
one 1.4. On a CPU the cores train meanwhile."""
REFUSED = "Registering memory failed"
"""In torch's words for an error of cudaHostRegister (``torch.cuda._pin_memory_utils``)."""
CLOSE_TIMEOUT_S = 60.0
"""How long a worker that leaves waits for a checkpoint that is still being written."""
State = dict[str, Any]
logger = logging.getLogger(__name__)


class CheckpointWriter:
    """One rank's end of writing checkpoints, one at a time; every method on all ranks in the same order."""

    def __init__(self, device: torch.device) -> None:
        """Collective. ``device``: where the state is."""
        # the thread's collectives must not come between those of training
        self._group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=WRITE_TIMEOUT_S))
        self._pinned = device.type == "cuda"
        self._num_files = FILES[device.type]
        self._stager: DefaultStager | None = None
        self._folder = Path()
        self._pending: Future[tuple[FileSum, ...]] | None = None

    def begin(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, extra: State) -> None:
        """Copy the state to host memory and write it from there, beside whatever follows.

        Args:
            folder: new, equal on all ranks.
            model: sharded.
            optimizer: of the model.
            extra: further tensors by name, equal on all ranks or of names of their own; the caller leaves them as they are.

        Raises:
            CheckpointError: another one is still being written.
        """
        self._require_idle(folder)
        copy = self._staged(_state(model, optimizer, extra))
        self._folder, self._pending = folder, Future()
        threading.Thread(target=self._write_behind, args=(self._pending, folder, copy), name="checkpoint", daemon=True).start()

    def save(self, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, extra: State) -> tuple[FileSum, ...]:
        """Write the state and return when it is durable, without a copy of all of it; arguments as of :meth:`begin`.

        Returns:
            The files that this rank wrote, names relative to ``folder``.

        Raises:
            CheckpointError: it cannot be written, or another one is still being written.
        """
        self._require_idle(folder)
        return self._write(folder, _state(model, optimizer, extra))

    def written(self) -> tuple[FileSum, ...] | None:
        """The files that this rank wrote of the checkpoint begun last, once they are durable on all ranks; None until then.

        Raises:
            CheckpointError: it cannot be written, or none was begun.
        """
        return self._begun().result() if self._begun().done() else None

    def finish(self, timeout_s: float) -> tuple[FileSum, ...]:
        """:meth:`written`, waiting for it.

        Raises:
            CheckpointError: it cannot be written, is not in ``timeout_s``, or none was begun.
        """
        try:
            return self._begun().result(timeout_s)
        except TimeoutError as error:
            raise CheckpointError(
                f"checkpoint {self._folder} is not written after {timeout_s:.0f} s more; look at the speed of its volume"
            ) from error

    def close(self) -> None:
        """Wait for what is being written, at most ``CLOSE_TIMEOUT_S``: its collectives need the process group."""
        if self._pending is not None and not self._pending.done():
            self._pending.exception(CLOSE_TIMEOUT_S)
        if self._stager is not None:
            self._stager.close()
            self._stager = None

    def _staged(self, state: State) -> State:
        """A copy in host memory. Page-locked memory is slow to get, and is kept for the next one."""
        if self._pinned:
            self._stager = self._stager or _new_stager(pinned=True)
            try:
                return cast(State, self._stager.stage(state))
            except RuntimeError as error:
                if REFUSED not in str(error):
                    raise
                logger.warning("checkpoints are copied through pageable memory, because CUDA page-locked none: %s", error)
                torch.accelerator.synchronize()  # copies into what is unlocked now
                self._stager.close()
                self._stager, self._pinned = None, False
                clear_last_error()
        stager = _new_stager(pinned=False)
        try:
            return cast(State, stager.stage(state))
        finally:
            stager.close()

    def _begun(self) -> Future[tuple[FileSum, ...]]:
        if self._pending is None:
            raise CheckpointError("no checkpoint was begun; call begin_checkpoint first")
        return self._pending

    def _require_idle(self, folder: Path) -> None:
        if self._pending is not None and not self._pending.done():
            raise CheckpointError(f"checkpoint {folder} cannot begin while {self._folder} is being written; call finish_checkpoint first")

    def _write_behind(self, pending: Future[tuple[FileSum, ...]], folder: Path, state: State) -> None:
        try:
            pending.set_result(self._write(folder, state))
        except BaseException as error:  # noqa: BLE001 - a thread has nobody to raise to; it comes out of written and finish
            pending.set_exception(error)

    def _write(self, folder: Path, state: State) -> tuple[FileSum, ...]:
        """Files are synced before rank 0 writes the metadata, and that before any rank gets here.

        Torch passes what fails on a rank on to all as a CheckpointException; a RuntimeError is a collective's, whose group is broken.
        """
        rank = dist.get_rank()
        try:
            writer = PiecewiseWriter(folder, threads=self._num_files)
            save(state, storage_writer=writer, process_group=self._group)
            names = sorted(path.name for path in folder.glob(f"__{rank}_*")) + ([METADATA] if rank == 0 else [])
            with ThreadPoolExecutor(self._num_files) as threads:
                return tuple(threads.map(functools.partial(sum_file, folder), names))
        except (OSError, CheckpointException) as error:
            raise CheckpointError(
                f"checkpoint {folder} cannot be written: {error}; free space or point checkpoint storage elsewhere"
            ) from error


def _new_stager(*, pinned: bool) -> DefaultStager:
    options = StagingOptions(use_pinned_memory=pinned, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=pinned)
    return DefaultStager(options)


def checkpoint_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes that this rank writes: its shards of trained weights, in float32, and of AdamW's two moments."""
    first = layout_of(model).tp_rank == 0
    trained = [p for p in model.parameters() if p.requires_grad and (first or has_disjoint_shards(p))]
    return sum(local_tensor(tensor).nbytes for p in trained for tensor in (p, *(optimizer.state[p][name] for name in MOMENTS)))


def load_checkpoint(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, extra: State) -> State:
    """Restore what a :class:`CheckpointWriter` wrote; all ranks must call it. Nothing in it is executed.

    Hyperparameters stay those of the optimizer given, so that a changed configuration takes effect.

    Args:
        folder: of the checkpoint.
        model: as it was saved, sharded in any way.
        optimizer: of the model.
        extra: tensors by name of the shapes that were saved; those that this checkpoint lacks are left out.

    Returns:
        ``extra`` with the values of the checkpoint.

    Raises:
        CheckpointError: missing, unreadable, of another model, or with something in it that no checkpoint has.
    """
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    try:
        reader = CheckedReader(folder)
        known = reader.read_metadata().state_dict_metadata
        state = _state(model, optimizer, {name: value for name, value in extra.items() if name in known})
        load(state, storage_reader=reader, planner=TensorsPlanner())
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError, CheckpointException) as error:
        raise CheckpointError(
            f"checkpoint {folder} cannot be loaded into this model: {error}; resume from a complete one of the same model"
        ) from error
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=TRAINED_ONLY)
    for group, kept in zip(optimizer.param_groups, settings, strict=True):
        group.update(kept)
    return {name: state[name] for name in extra if name in state}


def _state(model: nn.Module, optimizer: torch.optim.Optimizer, extra: State) -> State:
    """What every rank shares, tensors by reference, and ``extra``."""
    model_state, optimizer_state = get_state_dict(model, optimizer, options=TRAINED_ONLY)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            model_state.pop(name, None)  # torch leaves the second name of a frozen tied parameter
    return {"model": model_state, "optimizer": optimizer_state} | extra
