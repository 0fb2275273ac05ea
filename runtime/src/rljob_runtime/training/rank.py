"""One rank of a model: what a policy and a critic share, from the process group to the offload of their state.

Called by the worker's actor (or a test) from ONE thread, every method on all ranks in the same order: each holds collectives. A rank
that misses one makes the others fail after ``timeout_s`` with torch's own error.
"""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group as abort_process_group
from transformers import PreTrainedModel

from rljob_runtime.checkpoint_files import FileSum, damaged
from rljob_runtime.errors import ModelError, OffloadError
from rljob_runtime.offload.states import MemorySnapshot, Residence, StateKind, SwitchReport
from rljob_runtime.offload.store import StateStore
from rljob_runtime.records import FloatArray, IntArray
from rljob_runtime.routes import RouteArray
from rljob_runtime.sampling_mask import SamplingMask
from rljob_runtime.training.checkpoint import CheckpointWriter, checkpoint_bytes, load_checkpoint
from rljob_runtime.training.config import PolicyConfig
from rljob_runtime.training.meeting import form_group
from rljob_runtime.training.microbatch import MicroBatch, filler, make_micro_batches
from rljob_runtime.training.model import reshard, resolve_folder
from rljob_runtime.training.model_info import ModelInfo
from rljob_runtime.training.optimizer import build_optimizer, clip_gradients, learning_rate_at
from rljob_runtime.training.parallel import Layout, make_layout
from rljob_runtime.training.sharing import LayerCosts
from rljob_runtime.training.state import TRAINED_STATE, policy_state, prepare_offload

STEPS_DONE = "steps_done"


@dataclass(slots=True, kw_only=True)
class Ready:
    """What exists between ``setup`` and ``shutdown``."""

    model: PreTrainedModel
    optimizer: torch.optim.AdamW | None
    device: torch.device
    folder: Path
    vocab_size: int
    costs: LayerCosts
    store: StateStore
    checkpoints: CheckpointWriter | None
    """None for a frozen model."""
    steps_done: int = 0
    moments_load_s: float = 0.0
    """Spent in the current training step on bringing AdamW's states for an update."""
    moments_offload_s: float = 0.0
    inner_peak_bytes: int = 0
    """Peak of device memory before a switch inside a call; reported with the next snapshot."""


class ModelRank(ABC):
    """One rank of one model, trained or frozen; says nothing about what the model computes."""

    role = "model"
    """What messages call it."""

    def __init__(self, config: PolicyConfig, rank: int, world_size: int) -> None:
        """Take nothing yet; :meth:`setup` does.

        Args:
            config: equal on all ranks.
            rank: as :mod:`.parallel` counts. The context- and tensor-parallel ranks of one data-parallel rank get the same arguments in
                every call.
            world_size: number of ranks.
        """
        self.config = config
        self.rank = rank
        self.world_size = world_size
        self._ready: Ready | None = None

    @abstractmethod
    def _build(self, folder: Path, device: torch.device, layout: Layout) -> tuple[PreTrainedModel, LayerCosts]:
        """Load the model of ``folder`` and shard it as ``layout`` says; also what its layers cost on ``device``.

        Raises:
            ModelError: the model cannot be loaded.
        """

    def setup(self, master_address: str, master_port: int, timeout_s: float) -> ModelInfo:
        """Join the other ranks and load the model.

        Args:
            master_address: host of rank 0.
            master_port: free port there, equal on all ranks.
            timeout_s: deadline of the rendezvous and of every later collective.

        Raises:
            ModelError: the model cannot be loaded.
            HostBudgetError: the host budget is too small for what is to be reserved.
            OffloadError: AdamW's states cannot leave the device.
        """
        started = time.perf_counter()
        torch.set_num_threads(self.config.threads)
        torch.manual_seed(self.config.seed)
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        folder = resolve_folder(self.config.model_path)  # before the rendezvous: a wrong path must not wait for anybody
        form_group(device, master_address, master_port, rank=self.rank, world_size=self.world_size, timeout_s=timeout_s)
        try:
            sizes = ("tensor_parallel_size", "context_parallel_size", "expert_parallel_size")
            layout = make_layout(device, timeout_s=timeout_s, **{name: getattr(self.config, name) for name in sizes})
            model, costs = self._build(folder, device, layout)
            optimizer = build_optimizer(model, self.config) if self.config.trainable else None
            store = policy_state(model, optimizer, device, self.config.offload_host_bytes, self._name)
            around_step = {StateKind.OPTIMIZER} if self.config.optimizer_around_step else set()
            store.reserve({*self.config.reserve, *around_step})
            store.offload(around_step)
            checkpoints = CheckpointWriter(device) if optimizer is not None else None
        except BaseException:
            leave_alone(device)  # so that a corrected setup can follow in the same process
            raise
        text_config = model.config.get_text_config()
        self._ready = Ready(
            model=model,
            optimizer=optimizer,
            device=device,
            folder=folder,
            vocab_size=model.get_input_embeddings().num_embeddings,
            costs=costs,
            store=store,
            checkpoints=checkpoints,
        )
        return ModelInfo(
            folder=str(folder),
            model_type=model.config.model_type,
            num_parameters=sum(p.numel() for p in model.parameters()),
            vocab_size=self._ready.vocab_size,
            max_positions=getattr(text_config, "max_position_embeddings", None),
            tied_embeddings=bool(model.config.tie_word_embeddings),
            device=str(device),
            load_s=time.perf_counter() - started,
        )

    @property
    def ready(self) -> Ready:
        """What exists between :meth:`setup` and :meth:`shutdown`.

        Raises:
            ModelError: before the one or after the other.
        """
        return self._require()

    @property
    def model(self) -> PreTrainedModel:
        """The sharded model.

        Raises:
            ModelError: before :meth:`setup` or after :meth:`shutdown`.
        """
        return self.ready.model

    def checkpoint_bytes(self) -> int:
        """Bytes that this rank writes into a checkpoint.

        Raises:
            ModelError: the model is frozen.
        """
        ready = self._saved("checkpoint_bytes")[0]
        assert ready.optimizer is not None
        return checkpoint_bytes(ready.model, ready.optimizer)

    def begin_checkpoint(self, folder: str | Path) -> None:
        """Copy training state to host memory and write it from there into a new folder; the caller marks it complete.

        Raises:
            CheckpointError: another one is still being written.
            ModelError: the model is frozen, so there is nothing to save.
            OffloadError: state is off the device.
        """
        ready, optimizer = self._trained("begin_checkpoint")
        writer = self._saved("begin_checkpoint")[1]
        with self._moments_here(ready, "the checkpoint was not written"):
            writer.begin(Path(folder), ready.model, optimizer, self._beside(ready))

    def written_checkpoint(self) -> tuple[FileSum, ...] | None:
        """The files that this rank wrote of the checkpoint begun last, when all ranks' are durable; None while they are not.

        Raises:
            CheckpointError: it cannot be written.
        """
        return self._saved("written_checkpoint")[1].written()

    def finish_checkpoint(self, timeout_s: float) -> tuple[FileSum, ...]:
        """:meth:`written_checkpoint`, waiting for it.

        Raises:
            CheckpointError: it cannot be written, or is not in time.
        """
        return self._saved("finish_checkpoint")[1].finish(timeout_s)

    def save_checkpoint(self, folder: str | Path) -> tuple[FileSum, ...]:
        """Write training state into a new folder, without a copy in host memory; the caller marks it complete.

        Returns:
            The files that this rank wrote.

        Raises:
            CheckpointError: it cannot be written.
            ModelError: the model is frozen, so there is nothing to save.
            OffloadError: state is off the device.
        """
        ready, optimizer = self._trained("save_checkpoint")
        writer = self._saved("save_checkpoint")[1]
        with self._moments_here(ready, "the checkpoint was not written"):
            return writer.save(Path(folder), ready.model, optimizer, self._beside(ready))

    def damaged_files(self, folder: str | Path, files: Sequence[FileSum]) -> list[str]:
        """What is wrong with these files of the checkpoint in ``folder``, each of them read here."""
        return damaged(Path(folder), files)

    def load_checkpoint(self, folder: str | Path) -> int:
        """Restore training state, also from another number of ranks: a rank that was not there keeps its own random state.

        Returns:
            Finished training steps: the ``step`` of the next ``train_step``.

        Raises:
            CheckpointError: missing, unreadable, of another model, or with something in it that no checkpoint has.
            ModelError: the model is frozen.
            OffloadError: state is off the device.
        """
        ready, optimizer = self._trained("load_checkpoint")
        with self._moments_here(ready, "the checkpoint was not read"):
            found = load_checkpoint(Path(folder), ready.model, optimizer, self._beside(ready))
        if self._random_key in found:
            torch.set_rng_state(found[self._random_key])
        ready.steps_done = int(found[STEPS_DONE].item())
        return ready.steps_done

    def _beside(self, ready: Ready) -> dict[str, torch.Tensor]:
        """What a checkpoint has besides model and optimizer: finished steps, and this rank's random state under its own name."""
        return {STEPS_DONE: torch.tensor(ready.steps_done), self._random_key: torch.get_rng_state()}

    @property
    def _random_key(self) -> str:
        return f"random_state_rank{self.rank}"

    def _saved(self, method: str) -> tuple[Ready, CheckpointWriter]:
        """State with its writer of checkpoints, or an error naming the call."""
        ready = self.ready
        if ready.checkpoints is None:
            raise _frozen(method, self.role)
        return ready, ready.checkpoints

    def reserve_offload(self, kinds: Iterable[StateKind]) -> None:
        """Take the host memory for offloading ``kinds`` now, as ``PolicyConfig.reserve`` does at set-up.

        Raises:
            HostBudgetError: the budget does not suffice.
            OffloadError: the machine has no memory left.
        """
        self.ready.store.reserve(kinds)

    def offload(self, kinds: Iterable[StateKind]) -> SwitchReport:
        """Move kinds of state to host memory; what is off already stays off. No collective: ranks need not agree on when.

        Raises:
            HostBudgetError: the host budget does not suffice.
            OffloadError: it failed; the message says whether everything is as before.
        """
        ready = self.ready
        prepare_offload(ready.model)
        report = ready.store.offload(kinds)
        return dataclasses.replace(report, before=_with_inner_peak(ready, report.before))

    def load(self, kinds: Iterable[StateKind]) -> SwitchReport:
        """Bring kinds of state back, bit-equal; what is there already stays. With ``optimizer_around_step`` AdamW's states stay away.

        Raises:
            OffloadError: it failed; the message says whether everything is as before.
        """
        ready = self.ready
        report = ready.store.load(set(kinds) - ({StateKind.OPTIMIZER} if self.config.optimizer_around_step else set()))
        return dataclasses.replace(report, before=_with_inner_peak(ready, report.before))

    def memory(self) -> MemorySnapshot:
        """Memory of this process and its device now; the peak starts again."""
        ready = self.ready
        return _with_inner_peak(ready, ready.store.memory())

    def shutdown(self) -> None:
        """Give memory back and leave the other ranks; may be called twice."""
        if self._ready is not None:
            if self._ready.checkpoints is not None:
                self._ready.checkpoints.close()
            self._ready = None
            dist.destroy_process_group()

    @property
    def _name(self) -> str:
        return f"{self.role} worker {self.rank} of {self.world_size}"

    def _score(
        self,
        ready: Ready,
        token_ids: IntArray,
        lengths: IntArray,
        wanted: FloatArray,
        costs: LayerCosts,
        run: Callable[[MicroBatch], torch.Tensor],
        sampling_mask: SamplingMask | None = None,
        routes: RouteArray | None = None,
    ) -> FloatArray:
        """One float32 number for each wanted token (T,), 0 elsewhere; ranks make as many forward passes as the one with most.

        Args:
            ready: whose model.
            token_ids: shape (T,), sequences one after another; may be empty on some ranks.
            lengths: shape (S,), sums to T.
            wanted: shape (T,), non-zero where a number is wanted, never on a first token.
            costs: of the model, as :func:`~rljob_runtime.training.microbatch.make_micro_batches` takes them.
            run: a forward pass; returns one number per wanted token of the micro-batch, shape (N,).
            sampling_mask: of T positions; None where every token could be sampled.
            routes: shape (T, L, K); None where routers choose.

        Raises:
            ValueError: malformed arrays, or tokens that the model does not know.
        """
        check_tokens(token_ids, ready.vocab_size)
        check_mask(sampling_mask, ready.vocab_size)
        micro_batches = make_micro_batches(token_ids, lengths, wanted, self.config.shared_budget, costs, sampling_mask, routes)
        count = torch.tensor(len(micro_batches), device=ready.device)
        if self.world_size > 1:
            dist.all_reduce(count, dist.ReduceOp.MAX)
        micro_batches += [filler()] * (int(count.item()) - len(micro_batches))
        result = np.zeros(token_ids.shape, dtype=np.float32)
        with torch.no_grad():
            for micro in micro_batches:
                numbers = run(micro)
                if not micro.is_filler:
                    result[micro.sources] = numbers.cpu().numpy()
        if micro_batches:
            reshard(ready.model)
        return result

    def _set_learning_rate(self, optimizer: torch.optim.AdamW, step: int) -> float:
        """Give all parameters the rate of training step ``step``; returns it."""
        rate = learning_rate_at(self.config, step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        return rate

    def _update(self, ready: Ready, optimizer: torch.optim.AdamW, step: int, index: int) -> float:
        """Clip, step and clear; returns the gradient norm before clipping."""
        norm = float(clip_gradients(ready.model, self.config.max_grad_norm))
        if not np.isfinite(norm):
            optimizer.zero_grad(set_to_none=True)
            raise ModelError(
                f"gradient norm is {norm} in update {index} of step {step}; the update was not made: "
                "lower the learning rate, or look for non-finite numbers in the batch"
            )
        try:
            with self._moments_here(ready, f"update {index} of step {step} was not made"):
                optimizer.step()
        finally:
            optimizer.zero_grad(set_to_none=True)
        return norm

    @contextmanager
    def _moments_here(self, ready: Ready, otherwise: str) -> Iterator[None]:
        """AdamW's states on the device for the block where they are elsewhere between blocks; on all ranks, or the block is not run.

        Args:
            ready: whose.
            otherwise: what did not happen if they cannot come, for the message.

        Raises:
            OffloadError: they cannot come, here or on another rank; or not leave, then they are on the device, whole.
        """
        if not self.config.optimizer_around_step:
            yield
            return
        kinds = (StateKind.OPTIMIZER,)
        fault: OffloadError | None = None
        try:
            try:
                ready.moments_load_s += _elapsed_s(ready, _twice(lambda: ready.store.load(kinds)))
            except OffloadError as error:
                fault = error
            failed = torch.tensor(int(fault is not None), device=ready.device)
            if self.world_size > 1:
                dist.all_reduce(failed)
            if failed.item():
                cause = str(fault) if fault is not None else f"the optimizer of {int(failed.item())} other rank(s) could not be loaded"
                raise OffloadError(f"{otherwise} on any rank: {cause}", rolled_back=fault is None or fault.rolled_back) from fault
            yield
        finally:
            if ready.store.residence(StateKind.OPTIMIZER) is Residence.ON_DEVICE:
                ready.moments_offload_s += _elapsed_s(ready, _twice(lambda: ready.store.offload(kinds, release=False)))

    def _trained(self, method: str) -> tuple[Ready, torch.optim.AdamW]:
        """State with its optimizer, all on the device, or an error naming the call."""
        ready = self.ready
        if ready.optimizer is None:
            raise _frozen(method, self.role)
        self._require_trained(ready, method)
        return ready, ready.optimizer

    def _require_trained(self, ready: Ready, user: str) -> None:
        """Everything is there that ``user`` does not bring itself, and nothing is broken."""
        brought = self.config.optimizer_around_step and ready.store.residence(StateKind.OPTIMIZER) is not Residence.BROKEN
        ready.store.require(TRAINED_STATE - ({StateKind.OPTIMIZER} if brought else set()), user)

    def _require(self, kinds: Iterable[StateKind] = (), user: str = "") -> Ready:
        """State, or an error before setup, or while ``kinds`` that ``user`` needs are off the device."""
        if self._ready is None:
            raise ModelError(f"{self._name} has no model; call setup first")
        self._ready.store.require(kinds, user)
        return self._ready


def leave_alone(device: torch.device) -> None:
    """Leave the process group where other ranks may not.

    Destroying an NCCL communicator waits for the other ranks of the node. These may be in a collective that waits for this rank, so neither
    would return and the error would be lost. Aborting waits for nobody.
    """
    if device.type == "cuda":
        abort_process_group()
    else:
        dist.destroy_process_group()


def _frozen(method: str, role: str) -> ModelError:
    return ModelError(f"{method} on a frozen {role}; only a trained one has state to keep (export_hf writes weights)")


def check_tokens(token_ids: IntArray, vocab_size: int) -> None:
    """Refuse tokens the embedding lacks: on CUDA they would kill the process later, without a name.

    Raises:
        ValueError: naming the span of the tokens.
    """
    if token_ids.size and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
        raise ValueError(
            f"token ids span [{token_ids.min()}, {token_ids.max()}] but the model's vocabulary has {vocab_size}; tokenizer and model differ"
        )


def check_mask(sampling_mask: SamplingMask | None, vocab_size: int) -> None:
    """As :func:`check_tokens`, of the ids of a sampling mask."""
    if sampling_mask is not None:
        check_tokens(sampling_mask.token_ids, vocab_size)


def _twice(move: Callable[[], SwitchReport]) -> SwitchReport:
    """One more try of a move that was undone."""
    try:
        return move()
    except OffloadError as error:
        if not (error.rolled_back and error.retryable):
            raise
        return move()


def _elapsed_s(ready: Ready, report: SwitchReport) -> float:
    """Keep the peak that a switch inside a call has reset; returns its seconds."""
    ready.inner_peak_bytes = max(ready.inner_peak_bytes, report.before.peak_bytes, report.after.peak_bytes)
    return report.elapsed_s


def _with_inner_peak(ready: Ready, memory: MemorySnapshot) -> MemorySnapshot:
    """The snapshot with the largest peak since somebody outside asked for one."""
    peak_bytes, ready.inner_peak_bytes = max(memory.peak_bytes, ready.inner_peak_bytes), 0
    return dataclasses.replace(memory, peak_bytes=peak_bytes)
