"""What a process of a trainer, a critic or a reference holds: the terms of FSDP2 as ``rljob_runtime.training`` uses it.

Weights, gradients and both moments of AdamW are float32 and sharded over the data-parallel processes (ZeRO stage 3, arXiv 1910.02054,
with 4 + 4 + 8 bytes a parameter because masters are what is sharded; with ``training.optimizerStateDtype: bfloat16`` 4 + 4 + 4).
Computation is in ``model.dtype`` on gathered layers: FSDP2 gathers the next layer while one computes, and keeps the root unit (embedding,
head) gathered (torch.distributed.fsdp.fully_shard).
With ``training.gradientReduction: LastMicroBatch`` gradients are exchanged with the last micro-batch of an update only, so with several
of them each process accumulates WHOLE float32 gradients (``set_requires_gradient_sync(False)``); with EachMicroBatch its share of them.

Saved activations follow the method of Korthikanti et al. (arXiv 2205.05198, section 4): per layer, count what autograd keeps. The
counts are those of transformers' layers, which keep more than Megatron's (:mod:`.layer_activations`); a test compares them with what
autograd really saves. ``bench/training/memory.py`` compares the whole with the peaks of training steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rljob_api.dtypes import optimizer_state_bytes
from rljob_api.layer_compilation import compiles_layers
from rljob_api.memory.layer_activations import Attending, TreeSizes, cpu_attending, exchanged_numbers, layer_bytes_per_token
from rljob_api.memory.model import Kind, Need, Phase, ProcessNeeds
from rljob_api.memory.process_needs import process_need
from rljob_api.memory.shape import DecoderShape
from rljob_api.memory.step_needs import routes, stepping
from rljob_api.memory.sync_needs import SyncNeeds
from rljob_api.memory.training_sizes import PolicySizes
from rljob_api.memory.units import GIB, MIB, ceil_div, show_count

MASTER_BYTES = 4
"""Bytes of one float32 number."""
CHECKPOINT_FILES, CHECKPOINT_FILE_BYTES = 4, GIB // 2
"""Files that a rank on a GPU writes at a time, and their size (``rljob_runtime.training``: ``checkpoint``, ``checkpoint_writing``)."""
ONE_UNIT_BYTES = 32 * MIB
"""``rljob_runtime.training.model.ONE_UNIT_BYTES``: a model up to this size is gathered as a whole."""

MORE_SHARDS = "more devices for that component"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyNeeds(PolicySizes):
    """Computes the needs of one process of a policy, trained or frozen."""

    def trained(self) -> ProcessNeeds:
        """Needs of a policy with gradients and optimizer, whose weights go to the engines."""
        passes, step = self.phases
        weights = self._sharded(Kind.WEIGHT, "float32 weights", MASTER_BYTES)
        optimizer = self._sharded(Kind.OPTIMIZER, "AdamW m and v", optimizer_state_bytes(self.training))
        gradients = self._sharded(Kind.GRAD, "gradients", MASTER_BYTES)
        process = process_need(self.on_cuda)
        working = {
            passes: self._passes(MASTER_BYTES, self._accumulated()),
            step: (gradients, *self._stepping(self.parameters)),
            **self._sending(),
        }
        return ProcessNeeds(
            active=frozenset(working),
            states=(process, weights, optimizer, *self._sync.kept()),
            starting=(process, weights, self._reading(MASTER_BYTES)),
            working=working,
            host_starting=(self._reading(MASTER_BYTES),),
            host_working=self._receiving(),
            host_kept=(*self._saved(weights, optimizer), *self._sync.kept_on_host()),
            carries_weights=self.first and Phase.WEIGHT_SYNC in working,
            keeps_workspace=self.on_cuda,
        )

    def _receiving(self) -> Mapping[Phase, tuple[Need, ...]]:
        """What a step's samples are in host memory."""
        rollout, passes = self.spec.rollout, self.phases[0]
        samples = ceil_div(rollout.prompts_per_step * rollout.samples_per_prompt, self.data // self.context)
        return {passes: routes(self.training, self.shape.decoder, samples * self.full_tokens)}

    def _saved(self, *trained: Need) -> tuple[Need, ...]:
        """What a checkpoint copies (``rljob_runtime.training.checkpoint``): trained weights and both moments, or some files of them."""
        name, num_bytes = "checkpoint while it is written", sum(need.num_bytes for need in trained)
        if self.spec.checkpoint.asynchronous:
            formula, remedy = " + ".join(need.formula for need in trained), "checkpoint.asynchronous: false"
            return (Need(kind=Kind.WORKSPACE, name=name, formula=formula, num_bytes=num_bytes, remedy=remedy),)
        if not self.on_cuda:
            return ()
        decoder = self.shape.decoder  # the largest tensor is the embedding, or the experts of a layer
        largest = 0 if decoder is None else max(decoder.embedding_parameters, decoder.layer_expert_parameters)
        files = CHECKPOINT_FILES * max(CHECKPOINT_FILE_BYTES, ceil_div(largest, self.data) * MASTER_BYTES)
        formula = "tensors of the files that are being written"
        return (Need(kind=Kind.WORKSPACE, name=name, formula=formula, num_bytes=min(num_bytes, files)),)

    def frozen(self) -> ProcessNeeds:
        """Needs of a reference, held in the dtype of the computation."""
        process, size = process_need(self.on_cuda), self.compute_bytes
        weights = self._sharded(Kind.WEIGHT, f"{self.spec.model.dtype} weights", size)
        return ProcessNeeds(
            active=frozenset({Phase.SCORE}),
            states=(process, weights),
            starting=(process, weights, self._reading(size)),
            working={Phase.SCORE: (*self._gathered(size, layers=2), *self._passing(), *self._last(trained=False))},
            host_starting=(self._reading(size),),
            keeps_workspace=self.on_cuda,
        )

    def _passes(self, size: int, gradients: Need, *others: Need) -> tuple[Need, ...]:
        """The fullest of the moments of a backward pass; what is there goes from the head to the embedding.

        * the head: no layer computes; logits, and the gradient of the head, which is kept until the root unit is reduced;
        * before the last layer: on the CPU gloo has a copy of what it gathers;
        * in the last layer: all activations, and gradients flow;
        * in the layer before: the last layer's activations are gone, and its gradients are being reduced;
        * the root unit, or the whole of a model that is one unit: activations are gone.

        Args:
            size: bytes of a number of the shards.
            gradients: of the micro-batches before.
            others: what a layer's backward takes besides.
        """
        saved, flowing = self._activations(), self._flowing()
        kept, states = self._head_gradient(kept=True), self._last(trained=True)
        ahead = 0 if self.data == 1 else 1
        moments = [
            (*self._gathered(size, layers=ahead), gradients, *saved, *states, *self._head_gradient(kept=False)),
            (*self._gathered(size, layers=1 + ahead), gradients, *kept, *saved, *flowing, *self._layer_gradients(), *others),
            (self._sharded_gradients(), *self._exchanged(self._trained_root_parameters(size), at_root=True)),
        ]
        if self.shape.decoder is None or self._is_one_unit(size):
            return max(moments, key=_sum)
        if self.shape.decoder.num_layers > 1:
            less, exchange = self._activations(fewer_layers=1), self._exchanged(self.trained_layer_parameters)
            moments.append((*self._gathered(size, layers=1 + ahead), gradients, *kept, *less, *flowing, *exchange, *others))
        if self._copies_by_gloo:
            moments.append((*self._gathered(size, layers=2 + ahead), gradients, *kept, *saved))
        return max(moments, key=_sum)

    def _sharded(self, kind: Kind, name: str, size: int) -> Need:
        parameters, shards = self.parameters, self.data * self.tensor
        copied = self._copied_parameters(0 if self.shape.decoder is None else self.shape.decoder.num_layers)
        text, parameters = show_count(parameters), parameters + copied
        text = f"({text} + {show_count(copied)} of copies)" if copied else text
        return Need(
            kind=kind,
            name=name,
            formula=f"{text} x {size} B{self._over(shards)}",
            num_bytes=ceil_div(parameters, shards) * size,
            remedy=MORE_SHARDS,
        )

    def _reading(self, size: int) -> Need:
        """The largest block of the checkpoint's files that is read for this process's shards: of the embedding, or of the head."""
        embedding, shards = 0 if self.shape.decoder is None else self.shape.decoder.embedding_parameters, self.data * self.tensor
        return Need(
            kind=Kind.WORKSPACE,
            name="block of a file that is being read",
            formula=f"{show_count(embedding)} x {size} B{self._over(shards)}",
            num_bytes=ceil_div(embedding, shards) * size,
        )

    def _stepping(self, parameters: int) -> tuple[Need, ...]:
        """What AdamW takes for its step. ``parameters``: trained ones of all processes."""
        return stepping(self.training, ceil_div(parameters, self.data * self.tensor), on_cuda=self.on_cuda)

    def _is_one_unit(self, size: int) -> bool:
        return self.parameters * size <= ONE_UNIT_BYTES

    def _gathered(self, size: int, *, layers: int) -> tuple[Need, ...]:
        """The root unit and some layers, whose whole weights exist at one time. ``size``: of a number of the shards."""
        decoder, number = self.shape.decoder, self.compute_bytes
        if self._is_one_unit(size):
            parameters, text = self.computed_parameters, show_count(self.computed_parameters)
        elif decoder is not None:
            parameters = self.root_parameters + min(layers, decoder.num_layers) * self.layer_parameters
            text = f"root {show_count(self.root_parameters)}"
            text = f"({text} + {layers} x {show_count(self.layer_parameters)} of a layer)" if layers else text
        else:
            return ()
        formula = f"{text} x {number} B{self._over(self.tensor)}"
        return (Need(kind=Kind.WORKSPACE, name="gathered weights", formula=formula, num_bytes=ceil_div(parameters * number, self.tensor)),)

    @property
    def _copies_by_gloo(self) -> bool:
        """Whether processes exchange by gloo, which copies what it reduces or gathers."""
        return self.data > 1 and not self.on_cuda

    @property
    def gradient_bytes(self) -> int:
        """Bytes of one number of a gradient before it is reduced."""
        return self.compute_bytes

    @property
    def trained_layer_parameters(self) -> int:
        """Parameters of the largest layer that have gradients, on one process; 0 where sizes are not known."""
        return ceil_div(self.layer_parameters, self.tensor)

    def _trained_root_parameters(self, size: int) -> int:
        """The same of the root unit. ``size``: of a number of the shards."""
        return ceil_div(self.computed_parameters if self._is_one_unit(size) else self.root_parameters, self.tensor)

    def _sharded_gradients(self) -> Need:
        return self._sharded(Kind.GRAD, "gradients", MASTER_BYTES)

    def _accumulated(self) -> Need:
        """Gradients of the micro-batches before: whole where they are reduced with the last one only."""
        if not self.holds_whole_gradients:
            return self._sharded_gradients()
        return Need(
            kind=Kind.GRAD,
            name="whole gradients of several micro-batches",
            formula=f"{show_count(self.computed_parameters)} x {MASTER_BYTES} B{self._over(self.tensor)}",
            num_bytes=ceil_div(self.computed_parameters, self.tensor) * MASTER_BYTES,
            remedy="training.gradientReduction: EachMicroBatch",
        )

    def _layer_gradients(self) -> tuple[Need, ...]:
        """Those that a layer's backward makes."""
        unit, number = self.trained_layer_parameters, self.gradient_bytes
        text = f"{show_count(unit)} x {number} B"
        return (Need(kind=Kind.WORKSPACE, name="gradients of a layer", formula=text, num_bytes=unit * number),)

    def _exchanged(self, unit: int, *, at_root: bool = False) -> tuple[Need, ...]:
        """Gradients of a unit of so many parameters as they are copied into the float32 buffer that is reduced.

        A buffer lives on while the next layer makes its gradients. Gloo reduces a copy, and each of its two threads may hold that of an
        earlier layer until it gets its next work. Of whole gradients what was reduced between processes is gone, as much as the next
        layer makes; those of the root are float32 already.
        """
        whole, number = self.holds_whole_gradients, self.gradient_bytes
        if whole and (at_root or self.data > 1):
            number = MASTER_BYTES if at_root else 0
        copied = unit + 2 * self.trained_layer_parameters if self._copies_by_gloo else 0
        text = f"{show_count(unit)} x ({number} + {MASTER_BYTES}) B"
        need = Need(
            kind=Kind.WORKSPACE,
            name="gradients being reduced",
            formula=f"{text} + {show_count(copied)} x {MASTER_BYTES} B of gloo" if copied else text,
            num_bytes=unit * (number + MASTER_BYTES) + copied * MASTER_BYTES,
        )
        return (need,)

    def _activations(self, *, fewer_layers: int = 0) -> tuple[Need, ...]:
        """What autograd keeps of the layers; with checkpointing of each its input alone, but all of the one that is computed again."""
        decoder, tokens, number = self.shape.decoder, self.micro_batch_tokens, self.compute_bytes
        if decoder is None:
            return ()
        layer, layers = self._layer_bytes_per_token(decoder), decoder.num_layers - fewer_layers
        if self.spec.training.activation_checkpointing:
            state, over = decoder.hidden_size * number, self._over(self.token_parts)
            kept = state + (layers - 1) * ceil_div(state, self.token_parts) + layer  # the first layer keeps its input whole, and cuts it
            text, remedy = f"({layers} layers x {decoder.hidden_size} x {number}{over} + {layer:,}) B", self.less_work
        else:
            kept, text = layers * layer, f"{layers} layers x {layer:,} B"
            remedy = f"training.activationCheckpointing: true, {self.less_work}"
        formula, remedy = f"{show_count(tokens)} tokens x {text}", remedy + self.shorter_sequences
        return (Need(kind=Kind.WORKSPACE, name="activations", formula=formula, num_bytes=tokens * kept, remedy=remedy),)

    def _flowing(self) -> tuple[Need, ...]:
        """Gradients of activations: of a layer's output and input, of both halves of its MLP; that of their product takes its place.

        With expert parallelism also rows of the experts' outputs, as they are sent and as they come.
        """
        decoder, tokens, number = self.shape.decoder, self.micro_batch_tokens, self.compute_bytes
        if decoder is None:
            return ()
        exchanged = ceil_div(exchanged_numbers(decoder, self.expert_parallel_size), self.tensor)
        numbers = 2 * (decoder.hidden_size + ceil_div(decoder.intermediate_size, self.tensor) + exchanged)
        need = Need(
            kind=Kind.WORKSPACE,
            name="gradients flowing through a layer",
            formula=f"{show_count(tokens)} tokens x {numbers} x {number} B",
            num_bytes=tokens * numbers * number,
            remedy=self.less_work,
        )
        return (need,)

    def _passing(self) -> tuple[Need, ...]:
        """What exists of one layer when nothing is kept for a backward pass; rows of experts while they are on their way back."""
        decoder, tokens = self.shape.decoder, self.micro_batch_tokens
        if decoder is None:
            return ()
        exchanged = ceil_div(exchanged_numbers(decoder, self.expert_parallel_size), self.tensor)
        layer = self._layer_bytes_per_token(decoder) + exchanged * self.compute_bytes
        formula = f"{show_count(tokens)} tokens x {layer:,} B"
        return (
            Need(kind=Kind.WORKSPACE, name="one layer's activations", formula=formula, num_bytes=tokens * layer, remedy=self.less_work),
        )

    @property
    def _tree(self) -> TreeSizes:
        """Sequences of full length after one prompt; a tree is no longer than a micro-batch."""
        rollout = self.spec.rollout
        prompt, response = rollout.max_prompt_tokens, rollout.max_response_tokens
        fitting = max(1, (self.shared_budget - prompt) // response)
        return TreeSizes(prompt_tokens=prompt, response_tokens=response, samples=min(rollout.samples_per_prompt, fitting))

    def _layer_bytes_per_token(self, decoder: DecoderShape) -> int:
        """What autograd keeps of one layer."""
        tree, attending = self._tree, Attending.DIRECT
        if self.spec.model.attention == "eager":
            attending = Attending.EAGER
        elif not self.on_cuda:
            attending = cpu_attending(decoder, tree)
        return layer_bytes_per_token(
            decoder,
            tree,
            attending,
            number=self.compute_bytes,
            trains_all=self.trains_all,
            tensor=self.tensor,
            token_parts=self.token_parts,
            context=self.context,
            compiled=compiles_layers(
                self.spec.training.layer_compilation,
                on_cuda=self.on_cuda,
                tensor_parallel_size=self.tensor,
                is_mixture=decoder.num_experts > 0,
                may_be_custom=self.spec.model.trust_remote_code,
                num_parameters=self.parameters,
            ),
        )

    def _last(self, *, trained: bool) -> tuple[Need, ...]:
        """The final norm and log-probs, see ``rljob_runtime.training.logprob``.

        Hidden states need the norm's float32 input, its output, and in training its normalized input and the gradient of its output;
        logits need a chunk in float32 and one temporary of its size.
        """
        decoder, tokens, number = self.shape.decoder, self.micro_batch_tokens, self.compute_bytes
        if decoder is None:
            return ()
        chunk, parts = min(self.spec.training.logprob_chunk_tokens, tokens), self.vocabulary_parts
        logits = Need(
            kind=Kind.WORKSPACE,
            name="logits of a chunk",
            formula=f"{show_count(chunk)} tokens x {show_count(decoder.vocab_size)} x 8 B{self._over(parts)}",
            num_bytes=chunk * (decoder.vocab_size // parts) * 2 * MASTER_BYTES,
            remedy="a smaller training.logprobChunkTokens",
        )
        per_token = (MASTER_BYTES + (3 if trained else 2) * number) * decoder.hidden_size
        states = Need(
            kind=Kind.WORKSPACE,
            name="last hidden states",
            formula=f"{show_count(tokens)} tokens x {per_token:,} B",
            num_bytes=tokens * per_token,
            remedy=self.less_work,
        )
        return (states, logits)

    def _head_gradient(self, *, kept: bool) -> tuple[Need, ...]:
        """Of the head's weight: a float32 sum over all chunks, then in the dtype of the computation.

        Args:
            kept: after the head's moment, until the root unit is reduced. Then it is part of whole float32 gradients where there are such.
        """
        decoder, parts, number = self.shape.decoder, self.vocabulary_parts, self.compute_bytes
        in_place = number == MASTER_BYTES and self.holds_whole_gradients
        if decoder is None or (kept and in_place):
            return ()
        rounded = 0 if number == MASTER_BYTES else number
        size, text = (number, f"{number}") if kept or not rounded else (MASTER_BYTES + number, f"({MASTER_BYTES} + {number})")
        formula = f"{show_count(decoder.embedding_parameters)} x {text} B{self._over(parts)}"
        num_bytes = decoder.embedding_parameters // parts * size
        return (Need(kind=Kind.WORKSPACE, name="gradient of the head", formula=formula, num_bytes=num_bytes),)

    def _sending(self) -> Mapping[Phase, tuple[Need, ...]]:
        """What a weight sync takes."""
        return {Phase.WEIGHT_SYNC: self._sync.buffers()}

    @property
    def _sync(self) -> SyncNeeds:
        return SyncNeeds(
            spec=self.spec,
            shape=self.shape,
            backend=self.backend,
            shards=self.data,
            senders=self.senders,
            first=self.first,
            on_cuda=self.on_cuda,
        )

    @staticmethod
    def _over(size: int) -> str:
        return "" if size == 1 else f" / {size}"


def _sum(needs: Sequence[Need]) -> int:
    return sum(need.num_bytes for need in needs)
