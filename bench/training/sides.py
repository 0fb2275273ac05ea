"""Three ways to compute the gradients of one batch: RLJob's trainer, TRL's GRPOTrainer, a plain loop over transformers' model.

The loss is that of GRPO in all three: ratio to the behavior log-probs clipped at 0.2, mean over all response tokens of the batch. A pass
has at most as many tokens, padding included, as the others'. The optimizer's step is left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedModel

from bench.training.rows import cut_in_order, pad_both
from rljob_api.v1alpha1.policy_loss import PPOLoss
from rljob_runtime.losses.config import LossConfig
from rljob_runtime.records import TrainBatch
from rljob_runtime.tiny.tokenizer import build_tokenizer
from rljob_runtime.training.config import PolicyConfig
from rljob_runtime.training.metrics import StepMeter
from rljob_runtime.training.step import accumulate_gradients, prepare_batches
from rljob_runtime.training.worker import PolicyWorker

CLIP = 0.2
SETUP_TIMEOUT_S = 60.0
CPU = torch.device("cpu")


class Side(Protocol):
    """One way to compute gradients."""

    name: str

    def take(self, batch: TrainBatch) -> Any:
        """The batch in the form that this side is given it; not timed."""

    def accumulate(self, given: Any) -> None:
        """Add the gradient of the loss of the whole batch."""

    def norm_and_clear(self) -> float:
        """2-norm of the gradient, which is then gone; not timed."""


class RLJobSide:
    """One rank of RLJob's trainer. Cuts and packs the batch within the timed part."""

    name = "RLJob"

    def __init__(self, folder: Path, token_budget: int, port: int) -> None:
        """Load the model of ``folder``."""
        loss = LossConfig(policy=PPOLoss(clipLow=CLIP, clipHigh=CLIP, dualClip=0.0))  # a dual clip is not in the others' loss
        # All logits of a pass in memory at the same time, as the others have them.
        config = PolicyConfig(model_path=str(folder), token_budget=token_budget, logprob_chunk_tokens=token_budget, loss=loss)
        self.worker = PolicyWorker(config, rank=0, world_size=1)
        self.worker.setup("127.0.0.1", port, timeout_s=SETUP_TIMEOUT_S)

    def take(self, batch: TrainBatch) -> TrainBatch:
        """As it comes from the driver."""
        return batch

    def accumulate(self, given: TrainBatch) -> None:
        """As ``train_step`` does."""
        (prepared,) = prepare_batches([given], self.worker.config, CPU, self.worker.ready.costs)
        accumulate_gradients(self.worker.model, prepared, self.worker.config, StepMeter(CPU), fresh=True)

    def norm_and_clear(self) -> float:
        """Of the only shard."""
        return _norm_and_clear(self.worker.model)


class TrlSide:
    """GRPOTrainer as installed, from its own padding on: ``_compute_loss`` and ``backward`` of each pass."""

    name = "TRL"

    def __init__(self, folder: Path, token_budget: int, work: Path) -> None:
        """Load the model of ``folder``; TRL writes into ``work``."""
        from trl import GRPOConfig, GRPOTrainer  # seconds that the other sides need not wait for

        self.token_budget = token_budget
        config = GRPOConfig(
            output_dir=str(work),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=8,
            num_generations=8,
            temperature=1.0,
            beta=0.0,
            epsilon=CLIP,
            loss_type="dapo",
            router_aux_loss_coef=0.0,  # without it TRL adds a load-balancing loss to mixtures, with the coefficient of config.json
            report_to=[],
        )
        self.trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            args=config,
            train_dataset=Dataset.from_list([{"prompt": "a"}] * 8),
            processing_class=build_tokenizer(["a"]),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
        )
        self.model: PreTrainedModel = self.trainer.model
        self.model.train()

    def take(self, batch: TrainBatch) -> list[dict[str, torch.Tensor]]:
        """Passes of equally many sequences, padded to the longest of the batch, as TRL's generation leaves them."""
        rows = pad_both(batch)
        width = rows.prompt_ids.shape[1] + rows.response_ids.shape[1]
        size = max(1, self.token_budget // width)
        whole = {
            "prompt_ids": torch.from_numpy(rows.prompt_ids).long(),
            "prompt_mask": torch.from_numpy(rows.prompt_mask).long(),
            "completion_ids": torch.from_numpy(rows.response_ids).long(),
            "completion_mask": torch.from_numpy(rows.response_mask).long(),
            "old_per_token_logps": torch.from_numpy(rows.behavior_logprobs),
            "advantages": torch.from_numpy(rows.advantages),
        }
        tokens = torch.tensor(float(batch.global_tokens))
        starts = range(0, len(rows.advantages), size)
        return [{name: one[start : start + size] for name, one in whole.items()} | {"num_items_in_batch": tokens} for start in starts]

    def accumulate(self, given: list[dict[str, torch.Tensor]]) -> None:
        """One pass after the other."""
        self.trainer.args.steps_per_generation = 1  # the denominator is the whole batch's, as after TRL's own split
        self.trainer.current_gradient_accumulation_steps = 1
        for inputs in given:
            self.trainer._compute_loss(self.model, inputs).backward()

    def norm_and_clear(self) -> float:
        """Of the whole model."""
        return _norm_and_clear(self.model)


class PlainSide:
    """A loop as one would write it: rows padded right to the longest of their pass, in the order they came, causal without a mask."""

    name = "plain loop"

    def __init__(self, folder: Path, token_budget: int) -> None:
        """Load the model of ``folder``."""
        self.token_budget = token_budget
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def take(self, batch: TrainBatch) -> list[tuple[torch.Tensor, ...]]:
        """Of each pass token ids, response mask, behavior log-probs and advantages, shape (rows, width); and all response tokens."""
        lengths = batch.lengths.tolist()
        arrays = (batch.token_ids, batch.response_mask, batch.behavior_logprobs, batch.advantages)
        columns = [torch.from_numpy(one.copy()).split(lengths) for one in arrays]
        total = torch.tensor(float(batch.global_tokens))
        pad = torch.nn.utils.rnn.pad_sequence
        runs = cut_in_order(batch.lengths, self.token_budget)
        return [(*(pad(list(column[run]), batch_first=True) for column in columns), total) for run in runs]

    def accumulate(self, given: list[tuple[torch.Tensor, ...]]) -> None:
        """One pass after the other."""
        for ids, mask, behavior, advantages, total in given:
            logits = self.model(input_ids=ids[:, :-1].long(), use_cache=False).logits
            logprobs = logits.log_softmax(-1).gather(2, ids[:, 1:, None].long()).squeeze(2)
            ratio = torch.exp(logprobs - behavior[:, 1:])
            gains = torch.minimum(ratio * advantages[:, 1:], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[:, 1:])
            (-(gains * mask[:, 1:]).sum() / total).backward()

    def norm_and_clear(self) -> float:
        """Of the whole model."""
        return _norm_and_clear(self.model)


def _norm_and_clear(model: torch.nn.Module) -> float:
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    whole = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in gradients]
    norm = float(torch.nn.utils.get_total_norm(whole))
    model.zero_grad(set_to_none=True)
    return norm
