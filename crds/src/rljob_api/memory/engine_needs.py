"""What an inference engine holds on one of its devices.

vLLM (docs, "Conserving memory"; ``determine_available_memory`` of its GPU worker) takes ``memoryFraction`` of the device for everything:
weights, what a profiled forward pass needs, CUDA graphs; the rest becomes KV cache. With ``kvCacheBytes`` the cache has that size whatever
the fraction. SGLang's ``mem_fraction_static`` is the share of weights and cache alone. Both refuse to start when one full request does not
fit into the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from rljob_api.adapters import padded_rank, serves_adapters
from rljob_api.dtypes import DTYPE_BYTES, engine_dtype
from rljob_api.memory.adapters import adapter_parameters
from rljob_api.memory.model import Kind, KVCapacity, Need, Phase, ProcessNeeds
from rljob_api.memory.shape import DecoderShape, ModelShape
from rljob_api.memory.sync_needs import largest_bucket
from rljob_api.memory.units import GIB, MIB, ceil_div, show_bytes, show_count
from rljob_api.v1alpha1.components import Engine, EngineType
from rljob_api.v1alpha1.data import DType
from rljob_api.v1alpha1.operations import THROUGH_HOST_MEMORY, SyncBackend
from rljob_api.v1alpha1.rljob import RLJobSpec

CPU_KV_CACHE_BYTES = 128 * MIB
"""As ``rljob_runtime.engine.vllm.server_settings.CPU_KV_CACHE_BYTES``: on CPU devices where the spec sets none."""
CPU_ENGINE_BYTES = 900 * MIB
"""vLLM on CPU with a tiny model and without its cache: 1.1 GB resident at 128 MiB of cache, measured with vLLM 0.32."""
CUDA_CONTEXT_BYTES = GIB // 2
NCCL_BYTES = GIB
"""Buffers of one rank of a tensor parallel engine (reported in vllm#51485 for four)."""
CUDA_GRAPH_BYTES = GIB
"""Captured graphs of a decode step; an order of magnitude, vLLM measures them at start."""
CUDA_BLOCK_TOKENS = 16
CPU_BLOCK_TOKENS = 128
"""Tokens of one block of the KV cache in vLLM."""
LARGE_DEVICE_BYTES = 70 * GIB
"""From here on vLLM prefills :data:`LARGE_PREFILL_TOKENS` at once, else half of it (``EngineArgs`` of vLLM 0.32)."""
LARGE_PREFILL_TOKENS = 16_384
CPU_PREFILL_TOKENS = 8192
"""As ``rljob_runtime.engine.vllm.engine_args.CPU_BATCHED_TOKENS``, which is raised to the longest request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineNeeds:
    """Computes the needs of one engine on one of its devices."""

    spec: RLJobSpec
    component: str
    path: str
    """Path of the component in the spec."""
    engine: Engine
    shape: ModelShape
    num_engines: int
    """Engines of all Rollout components, which share the responses of a step."""
    group: str
    on_cuda: bool
    limit_bytes: int | None
    """Memory of the device; None when not known, or on CPU."""
    backend: SyncBackend = SyncBackend.AUTO
    """How weights come."""

    @property
    def _dtype(self) -> DType:
        return engine_dtype(self.spec, self.engine)

    @property
    def _number(self) -> int:
        return DTYPE_BYTES[self._dtype]

    @property
    def _layer_number(self) -> int:
        """Bytes of a weight of a layer. Both engines quantize to fp8 while they load (``quantization: fp8`` of ``extraArgs``)."""
        return self._bytes_with("quantization")

    @property
    def _cached_number(self) -> int:
        """Bytes of a cached key or value (``kv_cache_dtype``)."""
        return self._bytes_with("kv_cache_dtype")

    def _bytes_with(self, argument: str) -> int:
        return 1 if str(self.engine.extra_args.get(argument)).startswith("fp8") else self._number

    @property
    def full_tokens(self) -> int:
        """Tokens of the longest request."""
        return self.spec.rollout.max_prompt_tokens + self.spec.rollout.max_response_tokens

    def needs(self) -> ProcessNeeds:
        """States, work and the capacity of its cache."""
        fixed = (self._process(), self._weights(), *self._adapters(), *self._reserve())
        cache, capacity = self._cache(fixed)
        states = (*fixed, *cache)
        return ProcessNeeds(
            active=frozenset({Phase.GENERATE} if self.spec.validates_only else {Phase.GENERATE, Phase.WEIGHT_SYNC}),
            states=states,
            starting=states,
            working={Phase.WEIGHT_SYNC: self._reloading()},
            carries_weights=True,
            capacity=capacity,
        )

    def _process(self) -> Need:
        if not self.on_cuda:
            return Need(kind=Kind.PROCESS, name="engine process", formula="constant", num_bytes=CPU_ENGINE_BYTES)
        devices = self.engine.num_devices
        size = CUDA_CONTEXT_BYTES + (NCCL_BYTES if devices > 1 else 0) + (0 if self.engine.enforce_eager else CUDA_GRAPH_BYTES)
        parts = ["CUDA context", *(["NCCL"] if devices > 1 else []), *([] if self.engine.enforce_eager else ["graphs"])]
        return Need(kind=Kind.PROCESS, name=", ".join(parts), formula="constant", num_bytes=size)

    def _weights(self) -> Need:
        """Layers are divided by both sizes; embedding and head lie on the first and the last stage, and keep the engine's dtype."""
        tensor, pipeline, decoder = self.engine.tensor_parallel_size, self.engine.pipeline_parallel_size, self.shape.decoder
        if pipeline == 1 or decoder is None:
            parameters, text = self.shape.parameters, show_count(self.shape.parameters)
            outside = 0 if decoder is None else min(parameters, decoder.root_parameters)
            shards = tensor * pipeline
        else:
            layers = ceil_div(decoder.num_layers, pipeline)
            parameters = min(self.shape.parameters, layers * decoder.layer_parameters + decoder.embedding_parameters)
            text, shards = f"({layers} layers and an embedding: {show_count(parameters)})", tensor
            outside = min(parameters, decoder.embedding_parameters)
        inside = parameters - outside
        size = inside * self._layer_number + outside * self._number
        formula = f"{text} x {self._number} B"
        if self._layer_number != self._number:
            formula = f"({show_count(inside)} x {self._layer_number} B + {show_count(outside)} x {self._number} B)"
        return Need(
            kind=Kind.WEIGHT,
            name=f"{self._dtype if self._layer_number == self._number else 'fp8'} weights",
            formula=f"{formula}{f' / {shards}' if shards > 1 else ''}",
            num_bytes=ceil_div(size, shards),
            remedy="a larger engine.tensorParallelSize",
        )

    def _adapters(self) -> tuple[Need, ...]:
        """Those that are served, padded to a rank of the engine's; of each pair one half is whole on every device."""
        lora = self.spec.model.lora
        if lora is None or not serves_adapters(self.spec):
            return ()
        parameters = adapter_parameters(self.spec, self.shape) // lora.rank * padded_rank(lora.rank)
        formula = f"{show_count(parameters)} x {self._number} B"
        remedy = "a smaller model.lora.rank"
        return (Need(kind=Kind.WEIGHT, name="adapters", formula=formula, num_bytes=parameters * self._number, remedy=remedy),)

    def _reserve(self) -> tuple[Need, ...]:
        """The profiled forward pass: a layer's tensors for a full prefill, and logits of all requests in float32, three times."""
        decoder = self.shape.decoder
        if decoder is None:
            return ()
        full = self.full_tokens
        if self.on_cuda:
            prefill = LARGE_PREFILL_TOKENS if (self.limit_bytes or 0) >= LARGE_DEVICE_BYTES else LARGE_PREFILL_TOKENS // 2
        else:
            prefill = max(CPU_PREFILL_TOKENS, full)
        tokens = min(prefill, full * self.engine.max_running_requests)
        width = 3 * decoder.hidden_size + 3 * ceil_div(decoder.intermediate_size, self.engine.tensor_parallel_size)
        size = tokens * width * self._number + self.engine.max_running_requests * decoder.vocab_size * 12
        formula = (
            f"{show_count(tokens)} tokens x {width:,} x {self._number} B"
            f" + {show_count(self.engine.max_running_requests)} x {show_count(decoder.vocab_size)} x 12 B"
        )
        remedy = "a smaller engine.maxRunningRequests"
        return (Need(kind=Kind.WORKSPACE, name="activations and logits", formula=formula, num_bytes=size, remedy=remedy),)

    def _cache(self, fixed: tuple[Need, ...]) -> tuple[tuple[Need, ...], KVCapacity | None]:
        """The KV cache, and what it holds; nothing where its size is a share of an unknown memory."""
        engine = self.engine
        if engine.kv_cache_bytes is not None:
            size, formula, remedy = engine.kv_cache_bytes, "engine.kvCacheBytes", "a smaller engine.kvCacheBytes"
        elif not self.on_cuda:
            size, formula, remedy = CPU_KV_CACHE_BYTES, "default on CPU", "a smaller engine.kvCacheBytes"
        elif self.limit_bytes is None:
            return (), None
        else:
            counted = [need for need in fixed if engine.type is EngineType.VLLM or need.kind is Kind.WEIGHT]
            taken = sum(need.num_bytes for need in counted)
            size = max(0, int(engine.memory_fraction * self.limit_bytes) - taken)
            what = "the engine's other needs" if engine.type is EngineType.VLLM else "weights"
            formula = f"{engine.memory_fraction:g} x {show_bytes(self.limit_bytes)} - {show_bytes(taken)} of {what}"
            remedy = "a smaller engine.memoryFraction"
        capacity = self._capacity(size, formula)
        return (Need(kind=Kind.KV_CACHE, name="KV cache", formula=formula, num_bytes=size, remedy=remedy),), capacity

    def _capacity(self, kv_bytes: int, formula: str) -> KVCapacity:
        rollout, decoder = self.spec.rollout, self.shape.decoder
        block = CUDA_BLOCK_TOKENS if self.on_cuda else CPU_BLOCK_TOKENS
        in_flight = rollout.prompts_per_step * rollout.samples_per_prompt * (1 + self.spec.overlap.async_generation_ratio)
        return KVCapacity(
            component=self.component,
            path=f"{self.path}.engine",
            group=self.group,
            kv_bytes=kv_bytes,
            formula=formula,
            bytes_per_token=None if decoder is None else self._bytes_per_token(decoder),
            block_tokens=block,
            full_tokens=self.full_tokens,
            mean_tokens=rollout.max_prompt_tokens + ceil_div(rollout.max_response_tokens, 2),
            wanted_sequences=min(self.engine.max_running_requests, ceil_div(int(in_flight), max(1, self.num_engines))),
        )

    def _bytes_per_token(self, decoder: DecoderShape) -> int:
        """What a device caches of its layers."""
        layers = ceil_div(decoder.num_layers, self.engine.pipeline_parallel_size)
        return layers * decoder.cached_numbers(self.engine.tensor_parallel_size) * self._cached_number

    def _reloading(self) -> tuple[Need, ...]:
        """The largest layer once more while it is loaded and packed, and buckets where they arrive on the device."""
        decoder, tensor = self.shape.decoder, self.engine.tensor_parallel_size
        needs: list[Need] = []
        if decoder is not None:
            unit = max(decoder.layer_parameters, decoder.embedding_parameters)
            formula = f"{show_count(unit)} x {self._number} B{f' / {tensor}' if tensor > 1 else ''}"
            size = ceil_div(unit * self._number, tensor)
            needs.append(Need(kind=Kind.WORKSPACE, name="layer that is being loaded", formula=formula, num_bytes=size))
        if self.backend not in THROUGH_HOST_MEMORY:
            bucket = largest_bucket(self.spec, self.shape)
            needs.append(
                Need(
                    kind=Kind.WORKSPACE,
                    name="weight buckets",
                    formula=f"2 buckets of {show_bytes(bucket)}",
                    num_bytes=2 * bucket,
                    remedy="a smaller weightSync.bucketBytes",
                )
            )
        return tuple(needs)
