"""One rank of a critic: says what each state is worth, and learns it. Rules of calling: :mod:`.rank`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from rljob_runtime.records import FloatArray, IntArray, TrainBatch
from rljob_runtime.training.context_parallel import check_context_parallel
from rljob_runtime.training.critic_config import CriticConfig
from rljob_runtime.training.model import layer_costs, load_model
from rljob_runtime.training.parallel import Layout, layout_of
from rljob_runtime.training.rank import ModelRank, check_tokens
from rljob_runtime.training.sharing import LayerCosts
from rljob_runtime.training.state import WEIGHTS
from rljob_runtime.training.value_head import replace_head, shard_critic
from rljob_runtime.training.value_step import ValueMeter, accumulate_value_gradients, prepare_values, run_value_micro_batch


class CriticWorker(ModelRank):
    """One rank of one critic."""

    role = "critic"
    config: CriticConfig

    def __init__(self, config: CriticConfig, rank: int, world_size: int) -> None:
        """Take nothing yet; :meth:`setup` does.

        Args:
            config: equal on all ranks.
            rank: of this process.
            world_size: number of processes.
        """
        super().__init__(config, rank, world_size)

    def compute_values(self, token_ids: IntArray, lengths: IntArray, wanted: FloatArray) -> FloatArray:
        """What the states before the wanted tokens are worth under the current weights.

        Args:
            token_ids: shape (T,), sequences one after another; may be empty on some ranks.
            lengths: shape (S,), sums to T.
            wanted: shape (T,), non-zero at response tokens, never on a first token.

        Returns:
            Shape (T,), float32: at a wanted token t the value V(s_t) of the tokens before it, the state in which it was sampled, read from
            the hidden state that predicts it; 0 elsewhere.

        Raises:
            ValueError: malformed arrays.
            OffloadError: weights are off the device.
        """
        ready = self._require(WEIGHTS, "compute_values")
        return self._score(ready, token_ids, lengths, wanted, ready.costs, lambda micro: run_value_micro_batch(ready.model, micro))

    def train_step(self, batches: Sequence[TrainBatch], step: int) -> dict[str, float]:
        """Make one optimizer update per batch, in order.

        Args:
            batches: this rank's mini-batches with ``values`` and ``returns``, at least one; as many on every rank.
            step: finished training steps before this one; sets the learning rate.

        Returns:
            Metrics by name, equal on all ranks: those of :mod:`rljob_runtime.training.value_step`, ``critic/grad_norm`` (mean over
            updates, before clipping) and ``critic/learning_rate``.

        Raises:
            ValueError: malformed batches, or none, or they lack values or returns.
            ModelError: gradients are not finite; weights are then those before the failing update.
            OffloadError: weights, gradients or optimizer are off the device; or with ``optimizer_around_step`` AdamW's states could not
                come, then weights are on all ranks those before the failing update; or not leave, then the update was made.
        """
        ready, optimizer = self._trained("train_step")
        if not batches:
            raise ValueError("train_step got no batches; every rank must get the same number, at least one")
        for received in batches:
            check_tokens(received.token_ids, ready.vocab_size)
        rate = self._set_learning_rate(optimizer, step)
        prepared = prepare_values(batches, self.config, ready.device, ready.costs)
        meter = ValueMeter(ready.device, layout_of(ready.model).dp_group)
        for received in batches:
            meter.add_batch(received)
        norms = []
        for index, batch in enumerate(prepared):
            accumulate_value_gradients(ready.model, batch, self.config, meter)
            norms.append(self._update(ready, optimizer, step, index))
        ready.steps_done = step + 1
        return meter.reduce(len(batches)) | {
            "critic/grad_norm": sum(norms) / len(norms),
            "critic/learning_rate": rate,
        }

    def _build(self, folder: Path, device: torch.device, layout: Layout) -> tuple[PreTrainedModel, LayerCosts]:
        model = load_model(self.config, folder)
        costs = layer_costs(model, device)
        check_context_parallel(model, costs, cp_size=layout.cp_size, tp_size=layout.tp_size)
        replace_head(model)
        shard_critic(model, self.config, layout, device)
        return model, costs
