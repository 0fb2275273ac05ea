"""What a rollout engine does, whoever implements it.

Called by the engine actors; implemented by ``vllm.engine.VllmEngine`` and ``fake.FakeEngine``. All methods block and may be called from
several threads. Requests go in by ``submit``, every one of them comes back exactly once through ``collect``.

An engine gives its device memory back by ``offload`` and takes it again by ``load``, between the two it computes nothing::

    offload({PARAMS, KV_CACHE}) -> load({PARAMS}) -> begin_update .. finish_update -> load({KV_CACHE})

Meanwhile ``submit`` queues, ``collect`` returns what had finished and then nothing until its wait is over, ``abort``, ``version``,
``stats``, ``memory`` and ``residence`` answer as ever, ``begin_update`` and ``load_bucket`` buffer bytes, ``score`` refuses while anything
is away and ``finish_update`` while the weights are.

Named invariants: VERSION (``version`` changes only in ``finish_update``, and only after every byte of the manifest arrived),
NO-HANG (each wait has a limit; an engine that died raises ``EngineDiedError`` from every call but ``salvage``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from rljob_runtime.errors import RuntimeFault
from rljob_runtime.offload.states import MemorySnapshot, Residence, StateKind, SwitchReport
from rljob_runtime.packed import CompletionBatch
from rljob_runtime.records import GenerationRequest, OnRunning, WeightManifest

ByteArray = npt.NDArray[np.uint8]

OnOffload = Literal["refuse", "abort", "keep"]
"""What an offload does to responses in progress: ``refuse`` the offload, ``abort`` them (they come back with the tokens sampled so far), or
``keep`` them queued with their tokens and recompute their keys and values after the load."""


class EngineResidenceError(RuntimeFault):
    """Raised when a call does not fit where the engine's memory is, and by an offload under running responses; nothing was changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAdapters:
    """Adapters that updates bring instead of the model's own weights."""

    rank: int
    slot_rank: int
    """Rank that the engine has room for, not below ``rank``."""
    target_modules: tuple[str, ...] = ()
    """Linear layers of the decoder layers by their last name; empty: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How to start one engine."""

    model_path: str
    """Folder with ``config.json`` and, for ``load_format`` ``auto``, the weights."""
    dtype: str = "float32"
    """Compute dtype: ``float32``, ``bfloat16`` or ``float16``."""
    max_model_len: int
    """Tokens of prompt plus response at most; a response that reaches it ends with ``length``."""
    max_num_seqs: int = 256
    """Requests computed in one step; more of them wait."""
    kv_cache_bytes: int | None = None
    """Memory of keys and values. None takes ``gpu_memory_utilization`` of the device (on CPU: of the host's memory, so set it there)."""
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    """Stages, each with a part of the layers; as many batches are computed at once."""
    gpu_memory_utilization: float = 0.9
    """Share of the device, used where ``kv_cache_bytes`` is None."""
    enforce_eager: bool = True
    """False compiles the model and captures CUDA graphs."""
    enable_prefix_caching: bool = True
    """Share keys and values of equal prompt beginnings. Costs about 10 % where prompts are shorter than a block (128 tokens on CPU)."""
    seed: int = 0
    """The engine's own seed; sampling depends only on the seed of each request."""
    load_format: Literal["auto", "dummy"] = "auto"
    """``dummy`` starts with random weights, for engines that receive theirs before the first request."""
    trust_remote_code: bool = False
    tokenizer_path: str | None = None
    """Folder whose tokenizer's end-of-sequence token ends a response besides those of the generation config; None: the model's folder,
    where it holds a tokenizer."""
    finds_texts: bool = False
    """Whether requests may have stop strings; the tokenizer then has to be there."""
    threads: int | None = None
    """OpenMP threads of the process (see ``environment``); None leaves the default."""
    max_batched_tokens: int | None = None
    """Tokens computed in one step; longer prompts are computed in chunks. None takes vLLM's default."""
    release: Literal["never", "discard", "copy"] = "never"
    """Whether ``offload`` works, and what becomes of the weights: ``discard`` drops them (the next update brings them), ``copy`` keeps them
    in host memory (CUDA only). Other than ``never`` makes vLLM allocate through its sleep-mode allocator on CUDA."""
    adapters: ServedAdapters | None = None
    """Compute with adapters beside the weights of ``model_path``; updates then bring these alone."""
    returns_routes: bool = False
    """Whether requests may ask which experts were chosen for each token; the model must be a mixture."""
    start_timeout_s: float = 600.0
    """Limit for loading the model and a first warm-up request."""
    extra_args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments by the engine's own names, over those that follow from the other fields."""
    extra_args_path: str = "extra_args"
    """Where they were written, for messages."""

    @property
    def num_processes(self) -> int:
        """Ranks of the model: each has a process of its own where there are several."""
        return self.tensor_parallel_size * self.pipeline_parallel_size


class Engine(Protocol):
    """A rollout engine inside one process."""

    def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue requests and return at once.

        Raises:
            DataError: a request this engine cannot serve (empty or over-long prompt, unknown token, bad sampling, stop strings
                without ``finds_texts``, routes without ``returns_routes``, id in use);
                then none of ``requests`` is queued.
            EngineDiedError: the engine ended.
        """

    def collect(self, max_wait_s: float) -> CompletionBatch:
        """All responses finished since the last call; waits for the first one, at most ``max_wait_s``, then returns none.

        Tokens travel to the driver and are owned there: an engine that dies takes nothing with it that it has returned.

        Those whose request has ``sampling.returns_mask`` bring their sampling mask, those with ``sampling.returns_routes`` and at least one
        token the routes of all tokens from ``num_routed_before`` on, but of the last.

        Raises:
            EngineDiedError: the engine ended.
            WeightSyncError: an update failed half-way, or discarded weights were loaded together with the cache and no update came since:
                the weights are undefined and nothing is generated until a full update succeeds. Not raised while something is offloaded.
        """

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests early; they come back through ``collect`` as ``abort`` with the tokens sampled so far.

        Ids that already finished, or that the engine does not know, are ignored.

        Raises:
            EngineDiedError: the engine ended.
        """

    def clear(self, timeout_s: float) -> None:
        """End all requests and drop their responses: another driver, which knows none of them, begins.

        Raises:
            DeadlineError: a request did not end within ``timeout_s``.
            EngineDiedError: the engine ended.
        """

    def salvage(self) -> CompletionBatch:
        """What a lost engine still has: responses nobody collected, and unfinished ones as ``abort`` with the tokens sampled so far.

        Works after the engine ended and while its own thread hangs, and waits for neither. Nothing may be asked of the engine afterwards.
        """

    def score(self, sequences: Sequence[tuple[int, ...]], timeout_s: float) -> list[tuple[float, ...]]:
        """Log-probs of tokens 1..n-1 of each sequence given what precedes them, at temperature 1 without truncation.

        Runs together with whatever is being generated, and never from cached keys and values.

        Raises:
            DataError: a sequence shorter than 2 or longer than ``max_model_len - 1`` tokens, or an unknown token.
            DeadlineError: not done after ``timeout_s``.
            EngineResidenceError: weights or cache are offloaded.
            EngineDiedError, WeightSyncError: as for ``collect``.
        """

    def prepare_receiver(self, receiver: str, settings: Mapping[str, Any]) -> None:
        """Make the engine's end of a weight transport; until then it takes packed buckets.

        Args:
            receiver: ``module:Class``, see ``weightsync.transport.Receiver``.
            settings: keyword arguments of it.

        Raises:
            WeightSyncError: it cannot be made here.
            EngineDiedError: the engine ended.
        """

    def begin_update(self, manifest: WeightManifest, version: int) -> None:
        """Open an update; one that was open and unfinished is dropped. Generation goes on.

        Raises:
            WeightSyncError: the manifest lacks parameters of the model, brings unknown ones, or shapes differ (each named).
            EngineDiedError: the engine ended.
        """

    def load_bucket(self, bucket_index: int, data: ByteArray) -> None:
        """Take one part of an update, for most transports a packed bucket, in any order, each exactly once. Generation goes on.

        Read-only arrays are kept as they are until ``finish_update`` (their bytes must not change), writable ones are copied.

        Raises:
            WeightSyncError: no open update, unknown or repeated index, or a size that is not the manifest's.
            EngineDiedError: the engine ended.
        """

    def finish_update(self, timeout_s: float, on_running: OnRunning = "recompute") -> int:
        """Receive what has not come yet, put the weights in place between two steps and return the version now served.

        Raises:
            WeightSyncError: a bucket is missing or the weights are offloaded (nothing changed and the update stays open), or the engine
                failed while loading.
            DeadlineError: not done after ``timeout_s``.
            EngineDiedError: the engine ended.
        """

    def update(self, manifest: WeightManifest, version: int, timeout_s: float, on_running: OnRunning, *parts: ByteArray) -> int:
        """``begin_update``, ``load_bucket`` of every part in order, and ``finish_update`` in one call; errors and result are theirs."""

    def offload(self, kinds: Collection[StateKind], timeout_s: float, on_running: OnOffload = "refuse") -> SwitchReport:
        """Give memory back between two steps; kinds that left before are left out of the report, so a call can be repeated.

        ``KV_CACHE`` is dropped, and with it all cached prefixes. ``PARAMS`` are dropped or copied as ``EngineConfig.release`` says, and
        never leave before the cache. Scoring calls in progress end first. Requests that no step has touched simply stay queued.

        Raises:
            EngineResidenceError: another kind than these two, weights without the cache, ``release='never'``, or responses are running
                and ``on_running`` is ``refuse``; nothing was changed.
            DeadlineError: not done after ``timeout_s``; ``residence`` shows what happened, and the call can be repeated.
            EngineDiedError: the engine ended, also because this offload failed half-way.
        """

    def load(self, kinds: Collection[StateKind], timeout_s: float) -> SwitchReport:
        """Take memory again; kinds that are on the device are left out of the report.

        ``PARAMS`` that were discarded come back ``undefined``: nothing is answered until a full update has succeeded. Load the cache
        after that update, then weights and cache need not fit beside what the update needs.

        Raises:
            EngineResidenceError: another kind than these two.
            DeadlineError, EngineDiedError: as for ``offload``.
        """

    def residence(self) -> Mapping[StateKind, Residence]:
        """Where weights and cache are.

        Raises:
            EngineDiedError: the engine ended.
        """

    def memory(self) -> MemorySnapshot:
        """Memory of the engine's workers now, summed over them.

        Raises:
            EngineDiedError: the engine ended.
            DeadlineError: the step in progress takes longer than a minute.
        """

    def version(self) -> int:
        """The version being served; 0 before the first update.

        Raises:
            EngineDiedError: the engine ended.
        """

    def stats(self) -> Mapping[str, float]:
        """Counters since the start, and what runs now.

        Keys: ``running`` and ``waiting`` (requests now), ``generated_tokens``, ``prompt_tokens`` (of requests whose first token came),
        ``cached_tokens`` (those of them that a cached prefix spared), ``busy_s``, ``steps``, ``updates``, ``update_s`` (seconds of the
        last update, during which nothing is generated), ``update_bytes`` (of it, as they traveled). vLLM also has ``drafted_tokens``
        and ``accepted_tokens`` (those of them that were sampled), of responses that ended on their own in engines with speculation, and
        ``reloaded_fraction`` (share of the tensors that sparse updates load as whole ones where they change).

        Raises:
            EngineDiedError: the engine ended.
        """

    def shutdown(self) -> None:
        """End the engine and free its memory; repeated calls do nothing.

        Raises:
            DeadlineError: the engine's thread did not end.
        """
