"""One rank of a policy: trains it, scores with it, hands out its weights, saves it. Rules of calling: :mod:`.rank`."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from rljob_api.v1alpha1.policy_loss import CustomLoss
from rljob_runtime.errors import ModelError
from rljob_runtime.losses.custom import load_loss
from rljob_runtime.records import Bucket, FloatArray, IntArray, TrainBatch
from rljob_runtime.routes import RouteArray
from rljob_runtime.sampling_mask import SamplingMask
from rljob_runtime.training import export, weights
from rljob_runtime.training.context_parallel import check_context_parallel
from rljob_runtime.training.lora import without_adapters
from rljob_runtime.training.metrics import StepMeter
from rljob_runtime.training.microbatch import MicroBatch
from rljob_runtime.training.model import layer_costs, load_model, shard_model
from rljob_runtime.training.parallel import Layout, layout_of
from rljob_runtime.training.rank import ModelRank, check_mask, check_tokens
from rljob_runtime.training.replay import check_routes
from rljob_runtime.training.router_bias import load_of
from rljob_runtime.training.sharing import LayerCosts
from rljob_runtime.training.state import WEIGHTS
from rljob_runtime.training.step import accumulate_gradients, prepare_batches, run_micro_batch
from rljob_runtime.weightsync.sending import SendingRank


class PolicyWorker(SendingRank, ModelRank):
    """One rank of one policy, trained or frozen."""

    role = "policy"

    def train_step(self, batches: Sequence[TrainBatch], step: int) -> dict[str, float]:
        """Make one optimizer update per batch, in order.

        Args:
            batches: this rank's mini-batches, at least one; as many on every rank.
            step: finished training steps before this one; sets the learning rate.

        Returns:
            Metrics by name, equal on all ranks except times: those of :mod:`rljob_runtime.training.metrics`, ``train/grad_norm`` (mean
            over updates, before clipping), ``train/learning_rate``, ``train/micro_batches`` (this rank), ``time/forward_backward_s`` and
            ``time/optimizer_s`` (this rank); with ``optimizer_around_step`` also the part of it that its moves took,
            ``time/optimizer_load_s`` and ``time/optimizer_offload_s``.

        Raises:
            ValueError: malformed batches, or none.
            ModelError: the policy is frozen or gradients are not finite; weights are then those before the failing update.
            OffloadError: weights, gradients or optimizer are off the device; or with ``optimizer_around_step`` AdamW's states could not
                come, then weights are on all ranks those before the failing update; or not leave, then the update was made.
        """
        ready = self.ready
        if ready.optimizer is None:
            raise ModelError("train_step on a frozen policy; set trainable=True in its PolicyConfig")
        self._require_trained(ready, "train_step")
        if not batches:
            raise ValueError("train_step got no batches; every rank must get the same number, at least one")
        for received in batches:
            check_tokens(received.token_ids, ready.vocab_size)
            check_mask(received.sampling_mask, ready.vocab_size)
            check_routes(ready.model, received.routes)
        rate = self._set_learning_rate(ready.optimizer, step)
        meter = StepMeter(ready.device, layout_of(ready.model).dp_group)
        meter.add_tokens(sum(batch.token_ids.size for batch in batches))
        prepared = prepare_batches(batches, self.config, ready.device, ready.costs)
        norms, forward_backward_s, optimizer_s = [], 0.0, 0.0
        ready.moments_load_s = ready.moments_offload_s = 0.0
        for index, batch in enumerate(prepared):
            started = time.perf_counter()
            load = load_of(ready.model, self.config.router_bias_update_rate)
            accumulate_gradients(ready.model, batch, self.config, meter, fresh=index == 0, load=load)
            backward_done = time.perf_counter()
            norms.append(self._update(ready, ready.optimizer, step, index))
            if load is not None:
                meter.add_balance(load.apply(self.config.router_bias_update_rate, layout_of(ready.model).token_groups))
            forward_backward_s += backward_done - started
            optimizer_s += time.perf_counter() - backward_done
        ready.steps_done = step + 1
        moves = {"time/optimizer_load_s": ready.moments_load_s, "time/optimizer_offload_s": ready.moments_offload_s}
        return meter.reduce(len(batches)) | {
            "train/grad_norm": sum(norms) / len(norms),
            "train/learning_rate": rate,
            "train/micro_batches": float(sum(len(b.micro_batches) for b in prepared)),
            "time/forward_backward_s": forward_backward_s,
            "time/optimizer_s": optimizer_s,
            **(moves if self.config.optimizer_around_step else {}),
        }

    def compute_logprobs(
        self,
        token_ids: IntArray,
        lengths: IntArray,
        temperature: float,
        wanted: FloatArray | None = None,
        sampling_mask: SamplingMask | None = None,
        routes: RouteArray | None = None,
    ) -> FloatArray:
        """Score tokens under the current weights.

        Args:
            token_ids: shape (T,), sequences one after another; may be empty on some ranks.
            lengths: shape (S,), sums to T.
            temperature: logits are divided by it.
            wanted: shape (T,), non-zero where a log-prob is needed, never on a first token; None wants all others. Fewer cost less.
            sampling_mask: of T positions, where log-probs are to be those among the tokens that could be sampled; None: among all.
            routes: shape (T, L, K), where experts are to be those that the engine chose; None: the model's own routers choose.

        Returns:
            Shape (T,), float32: ``log p(token t | tokens before t)``; 0 at first positions and where not wanted.

        Raises:
            ValueError: malformed arrays or temperature.
            OffloadError: weights are off the device.
        """
        ready = self._require(WEIGHTS, "compute_logprobs")
        costs = ready.costs
        if wanted is None:  # no prompt ends anywhere, so there is none to share
            costs = dataclasses.replace(costs, may_share=False)
            wanted = np.ones(token_ids.shape, dtype=np.float32)
            wanted[(np.cumsum(lengths, dtype=np.int64) - lengths)[lengths > 0]] = 0.0
        chunk_tokens = self.config.logprob_chunk_tokens

        def run(micro: MicroBatch) -> torch.Tensor:
            return run_micro_batch(ready.model, micro, temperature, chunk_tokens)

        check_routes(ready.model, routes)
        return self._score(ready, token_ids, lengths, wanted, costs, run, sampling_mask, routes)

    def compute_base_logprobs(
        self,
        token_ids: IntArray,
        lengths: IntArray,
        temperature: float,
        wanted: FloatArray | None = None,
        sampling_mask: SamplingMask | None = None,
    ) -> FloatArray:
        """Score tokens under the frozen weights beneath the adapters: what a reference of the same model folder would answer.

        Arguments and result are those of :meth:`compute_logprobs`.

        Raises:
            ModelError: the policy has no adapters, so that its first weights are gone.
            ValueError: malformed arrays or temperature.
            OffloadError: weights are off the device.
        """
        if self.config.lora is None:
            raise ModelError(f"compute_base_logprobs on {self._name}, which has no adapters; set lora in its PolicyConfig")
        with without_adapters(self.model):
            return self.compute_logprobs(token_ids, lengths, temperature, wanted, sampling_mask)

    def weight_specs(self) -> list[weights.WeightSpec]:
        """(Hugging Face name, dtype, full shape) of every parameter an engine needs; input of ``packing.plan_buckets``."""
        return weights.weight_specs(self.model, self.config.dtype)

    def adapter_specs(self) -> list[weights.WeightSpec]:
        """The same of the adapters, for engines that serve them; see :mod:`rljob_runtime.weightsync.adapters`."""
        return weights.adapter_specs(self.model, self.config.dtype)

    def pack_buckets(self, buckets: Mapping[int, Bucket], out: Any = None, on_packed: Callable[[int], None] | None = None) -> Any:
        """Current weights of this rank's bucket as bytes, None where it has none; all ranks must call it with the same arguments.

        Args:
            buckets: by rank, of a manifest planned from :meth:`weight_specs` or :meth:`adapter_specs`.
            out: where this rank packs, uint8, at least as large as its bucket: an array, or a tensor on its device. None makes a fresh
                array.
            on_packed: see :func:`~rljob_runtime.weightsync.packing.pack`; several ranks do not call it.

        Raises:
            WeightSyncError: a bucket does not fit the model.
            OffloadError: weights are off the device.
        """
        model = self._require(WEIGHTS, "pack_buckets").model
        return weights.pack_buckets(model, buckets, out, on_packed)

    def export_hf(self, folder: str | Path) -> None:
        """Write config, safetensors and tokenizer as a Hugging Face folder, from rank 0.

        Raises:
            CheckpointError: it cannot be written.
            OffloadError: weights are off the device.
        """
        ready = self._require(WEIGHTS, "export_hf")
        export.export_hf(Path(folder), ready.model, ready.folder, self.config.dtype)

    def _build(self, folder: Path, device: torch.device, layout: Layout) -> tuple[PreTrainedModel, LayerCosts]:
        policy = self.config.loss.policy
        if self.config.trainable and isinstance(policy, CustomLoss) and policy.function is not None:
            load_loss(policy.function, policy.parameters, self.config.loss.job_folder)  # before the model: fails in a second
        model = load_model(self.config, folder)
        costs = layer_costs(model, device)
        check_context_parallel(model, costs, cp_size=layout.cp_size, tp_size=layout.tp_size)
        shard_model(model, self.config, layout, device)
        return model, costs
