"""What a process of a trainer, a critic or a reference holds: the terms of FSDP2 as ``rljob_runtime.training`` uses it.

Weights, gradients and both moments of AdamW are float32 and sharded over the data-parallel processes (ZeRO stage 3, arXiv 1910.02054,
with 4 + 4 + 8 bytes a parameter because masters are what is sharded). Computation is in ``model.dtype`` on gathered layers: FSDP2
gathers the next layer while one computes, and keeps the root unit (embedding, head) gathered (torch.distributed.fsdp.fully_shard).
With ``training.gradientReduction: LastMicroBatch`` gradients are exchanged with the last micro-batch of an update only, so with several
of them each process accumulates WHOLE float32 gradients (``set_requires_gradient_sync(False)``); with EachMicroBatch its share of them.

Saved activations follow the method of Korthikanti et al. (arXiv 2205.05198, section 4): per layer, count what autograd keeps. The
counts are those of transformers' layers, which keep more than Megatron's; a test compares them with what autograd really saves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rljob_api.dtypes import DTYPE_BYTES, sync_dtype
from rljob_api.memory.adapters import sent_parameters
from rljob_api.memory.model import Kind, Need, Phase, ProcessNeeds
from rljob_api.memory.shape import DecoderShape, ModelShape
from rljob_api.memory.units import GIB, MIB, ceil_div, show_bytes, show_count
from rljob_api.v1alpha1.learning import Training
from rljob_api.v1alpha1.operations import THROUGH_HOST_MEMORY, SyncBackend
from rljob_api.v1alpha1.rljob import RLJobSpec

MASTER_BYTES = 4
"""Bytes of one float32 number."""
ONE_UNIT_BYTES = 32 * MIB
"""``rljob_runtime.training.model.ONE_UNIT_BYTES``: a model up to this size is gathered as a whole."""
CUDA_PROCESS_BYTES = GIB
"""CUDA context with its kernels (about 0.5 GiB) and NCCL's buffers, outside PyTorch's allocator."""
CPU_PROCESS_BYTES = 700 * MIB
"""A process that imported torch and transformers, without its model: 702 MiB resident, measured with torch 2.13."""

MORE_SHARDS = "more devices for that component"


def process_need(on_cuda: bool) -> Need:
    """What a training process has whatever its model."""
    if on_cuda:
        return Need(kind=Kind.PROCESS, name="CUDA context and NCCL", formula="constant", num_bytes=CUDA_PROCESS_BYTES)
    return Need(kind=Kind.PROCESS, name="Python with torch", formula="constant", num_bytes=CPU_PROCESS_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyNeeds:
    """Computes the needs of one process of a policy, trained or frozen."""

    spec: RLJobSpec
    shape: ModelShape
    world_size: int
    """Processes of the component."""
    tensor_parallel_size: int
    """Processes that divide each layer."""
    on_cuda: bool
    first: bool
    """Whether it is rank 0, which gathers weights to send them."""
    senders: int = 1
    """Trainer ranks that do; of several each is taken for one."""
    backend: SyncBackend = SyncBackend.AUTO
    """How weights travel."""
    reduces_each: bool = False
    """Whether gradients are reduced with each micro-batch."""

    @property
    def phases(self) -> tuple[Phase, Phase]:
        """Passes, and the optimizer's step."""
        return Phase.TRAIN, Phase.OPTIMIZER_STEP

    @property
    def tensor(self) -> int:
        """Tensor parallel size."""
        return min(self.tensor_parallel_size, self.world_size)

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return self.shape.parameters

    @property
    def root_parameters(self) -> int:
        """Parameters outside the layers; 0 where sizes are not known."""
        return 0 if self.shape.decoder is None else self.shape.decoder.root_parameters

    @property
    def data(self) -> int:
        """Data parallel size."""
        return max(1, self.world_size // self.tensor)

    @property
    def compute_bytes(self) -> int:
        """Bytes of one number in the computation."""
        return DTYPE_BYTES[self.spec.model.dtype]

    @property
    def full_tokens(self) -> int:
        """Tokens of the longest sequence."""
        return self.spec.rollout.max_prompt_tokens + self.spec.rollout.max_response_tokens

    @property
    def update_tokens(self) -> int:
        """That one process handles in one update, when all sequences have full length."""
        rollout = self.spec.rollout
        samples = ceil_div(rollout.prompts_per_step * rollout.samples_per_prompt, self.spec.training.mini_batches)
        return ceil_div(samples, self.data) * self.full_tokens

    @property
    def trains_norms(self) -> bool:
        """Whether norms have gradients, for which their normalized input is kept."""
        return True

    @property
    def training(self) -> Training:
        """Settings that it is trained by."""
        return self.spec.training

    @property
    def less_work(self) -> str:
        """Remedy for what grows with a micro-batch."""
        return "a smaller training.microBatchTokens"

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of the largest micro-batch; a single sequence may be longer than the budget."""
        return min(self.update_tokens, max(self.training.micro_batch_tokens, self.full_tokens))

    @property
    def holds_whole_gradients(self) -> bool:
        """Whether gradients of several micro-batches add up before they are reduced."""
        return self.update_tokens > self.micro_batch_tokens and not self.reduces_each

    @property
    def vocabulary_parts(self) -> int:
        """Processes that share head and logits: all tensor parallel ones, or none where they do not divide the vocabulary."""
        decoder = self.shape.decoder
        return self.tensor if decoder is not None and decoder.vocab_size % self.tensor == 0 else 1

    def trained(self) -> ProcessNeeds:
        """Needs of a policy with gradients and optimizer, whose weights go to the engines."""
        passes, step = self.phases
        weights = self._sharded(Kind.WEIGHT, "float32 weights", MASTER_BYTES)
        optimizer = self._sharded(Kind.OPTIMIZER, "AdamW m and v", 2 * MASTER_BYTES)
        gradients = self._sharded(Kind.GRAD, "gradients", MASTER_BYTES)
        process = process_need(self.on_cuda)
        working = {
            passes: self._passes(MASTER_BYTES, *self._training_gradients()),
            step: (gradients,),
            **self._sending(),
        }
        return ProcessNeeds(
            active=frozenset(working),
            states=(process, weights, optimizer),
            starting=(process, weights, self._reading(MASTER_BYTES)),
            working=working,
            host_starting=(self._reading(MASTER_BYTES),),
            saved=self._saved(weights, optimizer),
            carries_weights=self.first and Phase.WEIGHT_SYNC in working,
            keeps_workspace=self.on_cuda,
        )

    def _saved(self, *trained: Need) -> tuple[Need, ...]:
        """What an asynchronous checkpoint copies (``rljob_runtime.training.checkpoint``): trained weights and both moments."""
        if not self.spec.checkpoint.asynchronous:
            return ()
        name, remedy = "checkpoint while it is written", "checkpoint.asynchronous: false"
        formula = " + ".join(need.formula for need in trained)
        return (Need(kind=Kind.WORKSPACE, name=name, formula=formula, num_bytes=sum(need.num_bytes for need in trained), remedy=remedy),)

    def frozen(self) -> ProcessNeeds:
        """Needs of a reference, held in the dtype of the computation."""
        process, size = process_need(self.on_cuda), self.compute_bytes
        weights = self._sharded(Kind.WEIGHT, f"{self.spec.model.dtype} weights", size)
        return ProcessNeeds(
            active=frozenset({Phase.SCORE}),
            states=(process, weights),
            starting=(process, weights, self._reading(size)),
            working={Phase.SCORE: (*self._gathered(size), *self._passing(), *self._last(trained=False))},
            host_starting=(self._reading(size),),
            keeps_workspace=self.on_cuda,
        )

    def _passes(self, size: int, gradients: Need, *others: Need) -> tuple[Need, ...]:
        """The fuller of two moments of a backward pass: that of the head, when no layer is gathered, and that of the last layer.

        Args:
            size: bytes of a number of the shards.
            gradients: of the micro-batches before.
            others: what a layer's backward takes besides.
        """
        saved, states, logits = self._activations(), self._last(trained=True)[:1], self._last(trained=True)[1:]
        head = (*self._gathered(size, layers=0), gradients, *saved[:1], *states, *logits)
        layer = (*self._gathered(size), gradients, *others, *saved, *states)
        return max(head, layer, key=lambda needs: sum(need.num_bytes for need in needs))

    def _sharded(self, kind: Kind, name: str, size: int) -> Need:
        parameters, shards = self.parameters, self.data * self.tensor
        return Need(
            kind=kind,
            name=name,
            formula=f"{show_count(parameters)} x {size} B{self._over(shards)}",
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

    def _is_one_unit(self, size: int) -> bool:
        return self.parameters * size <= ONE_UNIT_BYTES

    def _gathered(self, size: int, layers: int = 2) -> tuple[Need, ...]:
        """The root unit and some layers, whose whole weights exist at one time. ``size``: of a number of the shards."""
        decoder, number = self.shape.decoder, self.compute_bytes
        if self._is_one_unit(size):
            parameters, text = self.parameters, show_count(self.parameters)
        elif decoder is not None:
            parameters = self.root_parameters + min(layers, decoder.num_layers) * decoder.layer_parameters
            text = f"root {show_count(self.root_parameters)}"
            text = f"({text} + {layers} layers of {show_count(decoder.layer_parameters)})" if layers else text
        else:
            return ()
        formula = f"{text} x {number} B{self._over(self.tensor)}"
        return (Need(kind=Kind.WORKSPACE, name="gathered weights", formula=formula, num_bytes=ceil_div(parameters * number, self.tensor)),)

    def _training_gradients(self) -> tuple[Need, ...]:
        """While micro-batches are added up, and the exchange with the last of them, unit by unit.

        The root unit comes when activations are gone, so that a layer, or the whole of a model that is one unit, sets the peak.
        """
        decoder = self.shape.decoder
        reduced = self.parameters if self._is_one_unit(MASTER_BYTES) else 0 if decoder is None else decoder.layer_parameters
        unit, number = ceil_div(reduced, self.tensor), self.compute_bytes + MASTER_BYTES
        exchange = Need(
            kind=Kind.WORKSPACE,
            name="gradients of the layer being reduced",
            formula=f"{show_count(unit)} x ({self.compute_bytes} + {MASTER_BYTES}) B",
            num_bytes=unit * number,
        )
        if not self.holds_whole_gradients:
            return (self._sharded(Kind.GRAD, "gradients", MASTER_BYTES), exchange)
        whole = Need(
            kind=Kind.GRAD,
            name="whole gradients of several micro-batches",
            formula=f"{show_count(self.parameters)} x {MASTER_BYTES} B{self._over(self.tensor)}",
            num_bytes=ceil_div(self.parameters, self.tensor) * MASTER_BYTES,
            remedy="training.gradientReduction: EachMicroBatch",
        )
        return (whole, exchange)

    def _activations(self) -> tuple[Need, ...]:
        """What autograd keeps of the layers, and the gradients that flow back through one of them."""
        decoder, tokens, number = self.shape.decoder, self.micro_batch_tokens, self.compute_bytes
        if decoder is None:
            return ()
        layer = self._layer_bytes_per_token(decoder)
        numbers = 2 * (decoder.hidden_size + ceil_div(decoder.intermediate_size, self.tensor))
        flowing = Need(
            kind=Kind.WORKSPACE,
            name="gradients flowing through a layer",
            formula=f"{show_count(tokens)} tokens x {numbers} x {number} B",
            num_bytes=tokens * numbers * number,
            remedy=self.less_work,
        )
        if self.spec.training.activation_checkpointing:
            kept = decoder.num_layers * decoder.hidden_size * number + layer
            text, remedy = f"({decoder.num_layers} layers x {decoder.hidden_size} x {number} + {layer:,}) B", self.less_work
        else:
            kept, text = decoder.num_layers * layer, f"{decoder.num_layers} layers x {layer:,} B"
            remedy = f"training.activationCheckpointing: true, {self.less_work}"
        saved = Need(
            kind=Kind.WORKSPACE,
            name="activations",
            formula=f"{show_count(tokens)} tokens x {text}",
            num_bytes=tokens * kept,
            remedy=remedy,
        )
        return (saved, flowing)

    def _passing(self) -> tuple[Need, ...]:
        """What exists of one layer when nothing is kept for a backward pass."""
        decoder, tokens = self.shape.decoder, self.micro_batch_tokens
        if decoder is None:
            return ()
        layer = self._layer_bytes_per_token(decoder)
        formula = f"{show_count(tokens)} tokens x {layer:,} B"
        return (
            Need(kind=Kind.WORKSPACE, name="one layer's activations", formula=formula, num_bytes=tokens * layer, remedy=self.less_work),
        )

    def _layer_bytes_per_token(self, decoder: DecoderShape) -> int:
        """What autograd keeps of one layer.

        Two norms (float32 input, output, and normalized input where the norm is trained), queries, keys, values and the attention's
        output (keys and values repeated to all heads, as under a mask), four tensors of the MLP, and with eager attention a float32 row
        of scores per head, also in the dtype of the computation where that is another. Qwen3 normalizes queries and keys as well. With
        tensor parallelism all but the norms is divided.
        """
        number, heads = self.compute_bytes, decoder.num_attention_heads
        normalized = number if self.trains_norms else 0
        norms = 2 * (MASTER_BYTES + normalized + number) * decoder.hidden_size + 8
        inner = 4 * number * (decoder.query_size + decoder.intermediate_size) + 4 * heads
        if decoder.qk_norm:
            inner += (MASTER_BYTES + normalized) * (decoder.query_size + decoder.kv_size) + 8 * heads
        if self.spec.model.attention == "eager":
            inner += (MASTER_BYTES + (number if number != MASTER_BYTES else 0)) * heads * self.full_tokens
        return norms + ceil_div(inner, self.tensor)

    def _last(self, *, trained: bool) -> tuple[Need, ...]:
        """The final norm and log-probs, see ``rljob_runtime.training.logprob``: a chunk of float32 logits and one temporary of its size."""
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
        per_token = (MASTER_BYTES + (5 if trained else 2) * number) * decoder.hidden_size
        states = Need(
            kind=Kind.WORKSPACE,
            name="last hidden states",
            formula=f"{show_count(tokens)} tokens x {per_token:,} B",
            num_bytes=tokens * per_token,
            remedy=self.less_work,
        )
        if not trained:
            return (states, logits)
        head = Need(
            kind=Kind.WORKSPACE,
            name="gradient of the head",
            formula=f"{show_count(decoder.embedding_parameters)} x ({MASTER_BYTES} + {number}) B{self._over(parts)}",
            num_bytes=decoder.embedding_parameters // parts * (MASTER_BYTES + number),
        )
        return (states, logits, head)

    def _sending(self) -> Mapping[Phase, tuple[Need, ...]]:
        """What a weight sync takes."""
        return {Phase.WEIGHT_SYNC: self._sync_buffers()}

    def _sync_buffers(self) -> tuple[Need, ...]:
        """Buckets on their way, see ``rljob_runtime.training.weights``; a larger tensor than a bucket travels alone."""
        bucket = largest_bucket(self.spec, self.shape)
        on_device = self.backend not in THROUGH_HOST_MEMORY  # one travels, or is read, while the next is packed
        whole = 2 if on_device else 1
        senders = self.world_size if self.backend is SyncBackend.IPC else self.senders
        if self.data == 1:
            size, count = whole * bucket, "2 buckets" if on_device else "1 bucket"
        else:  # own shards of every sender's bucket three times: cast, in one piece, padded; on a sender everybody's of its own as well
            size, count = 3 * senders * ceil_div(bucket, self.data), f"{3 * senders} / {self.data} buckets"
            if self.first or senders > 1:
                size, count = size + (2 * whole - 1) * bucket, f"{2 * whole - 1} + {count}"
        formula, remedy = f"{count} of {show_bytes(bucket)}", "a smaller weightSync.bucketBytes"
        return (Need(kind=Kind.WORKSPACE, name="weight buckets", formula=formula, num_bytes=size, remedy=remedy),)

    @staticmethod
    def _over(size: int) -> str:
        return "" if size == 1 else f" / {size}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticNeeds(PolicyNeeds):
    """Needs of a critic: the layers of the policy, all of them trained; a value head instead of logits."""

    @property
    def phases(self) -> tuple[Phase, Phase]:
        """Passes, and the optimizer's step: phases of their own where the Trainer has the same devices."""
        return Phase.TRAIN_CRITIC, Phase.CRITIC_STEP

    @property
    def training(self) -> Training:
        """Settings that it is trained by."""
        return self.spec.algorithm.critic.over(self.spec.training)

    @property
    def less_work(self) -> str:
        """Remedy for what grows with a micro-batch."""
        own = self.spec.algorithm.critic.micro_batch_tokens is not None
        return f"a smaller {'algorithm.critic' if own else 'training'}.microBatchTokens"

    @property
    def parameters(self) -> int:
        """Without the head; a value head is one row."""
        return self.shape.parameters - self._head_parameters

    @property
    def root_parameters(self) -> int:
        """Parameters outside the layers; 0 where sizes are not known."""
        return 0 if self.shape.decoder is None else self.shape.decoder.root_parameters - self._head_parameters

    @property
    def _head_parameters(self) -> int:
        decoder = self.shape.decoder
        return 0 if decoder is None or decoder.tied_embeddings else decoder.embedding_parameters

    def _last(self, *, trained: bool) -> tuple[Need, ...]:
        """The final norm and the hidden states that become values."""
        return tuple(need for need in super(CriticNeeds, self)._last(trained=trained) if need.name == "last hidden states")

    def _sending(self) -> Mapping[Phase, tuple[Need, ...]]:
        return {}


def largest_bucket(spec: RLJobSpec, shape: ModelShape) -> int:
    """Bytes of the largest bucket of a weight sync: bucketBytes, or the embedding where that is larger, at most all that travels."""
    number = DTYPE_BYTES[sync_dtype(spec)]
    embedding = 0 if shape.decoder is None else shape.decoder.embedding_parameters * number
    return min(sent_parameters(spec, shape) * number, max(spec.weight_sync.bucket_bytes, embedding))
