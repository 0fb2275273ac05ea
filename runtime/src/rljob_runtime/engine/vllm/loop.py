"""The part of the vLLM engine that only its own thread touches.

``VllmEngine`` (``engine``) builds a ``VllmLoop`` in its thread and calls it between two steps. The loop talks to vLLM's engine
core directly instead of through ``LLM.generate``: requests are made from one validated template per sampling setting, and tokens,
log-probs and weight versions are taken from the core's outputs as they come, without detokenizing, but for requests with stop strings.
That halves the time of a short batch (256 responses of 4 tokens) and makes partial responses of aborted requests available.

vLLM is not thread-safe here: adding or aborting from another thread can crash its scheduler.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from vllm.distributed.parallel_state import get_pp_group
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.llm_engine import LLMEngine

from rljob_runtime.engine.protocol import EngineConfig, EngineResidenceError, OnOffload
from rljob_runtime.engine.residence import EngineResidence, check_running, names
from rljob_runtime.engine.stop_strings import StopFinder, decoder, reach
from rljob_runtime.engine.tokenizer import load_tokenizer
from rljob_runtime.engine.vllm import weight_receiver
from rljob_runtime.engine.vllm.engine_args import engine_args
from rljob_runtime.engine.vllm.memory import CpuMemory, CudaMemory, EngineMemory, Moved
from rljob_runtime.engine.vllm.patched_updates import PatchedUpdates
from rljob_runtime.engine.vllm.response import Response
from rljob_runtime.engine.vllm.routes import routes_of
from rljob_runtime.engine.vllm.sampling import sampling_params
from rljob_runtime.engine.vllm.served_adapters import ADAPTER, install_empty, install_received, reload_model
from rljob_runtime.engine.vllm.shared_queues import remove_names
from rljob_runtime.engine.vllm.updating import WeightUpdates
from rljob_runtime.errors import DeadlineError, ModelError, RuntimeFault, WeightSyncError
from rljob_runtime.offload.states import MemorySnapshot, Residence, StateKind, SwitchReport
from rljob_runtime.records import Completion, GenerationRequest, OnRunning, Sampling
from rljob_runtime.weightsync.holdings import Holdings
from rljob_runtime.weightsync.parcel import Remote
from rljob_runtime.weightsync.transport import IncomingUpdate

FINISH_REASONS: Mapping[FinishReason, str] = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}
SEED_RANGE = 2**63
"""torch generators take seeds below it."""


@dataclass(slots=True)
class _ScoreJob:
    """One ``score`` call: results arrive sequence by sequence."""

    result: Future[list[tuple[float, ...]]]
    rows: list[tuple[float, ...] | None]
    left: int


class VllmLoop:
    """One vLLM engine core and the requests in it. Not thread-safe."""

    def __init__(self, config: EngineConfig) -> None:
        """Load the model and generate a first response, so that what is compiled on first use is compiled now.

        Args:
            config: how to start.
        """
        weight_receiver.register()
        if current_platform.is_cpu() and config.dtype == "bfloat16":
            _permit_amx()
        self._engine = LLMEngine.from_engine_args(engine_args(config))
        self.core: Any = self._engine.engine_core
        """vLLM's client of its engine core."""
        self._scheduler: Any = self.core.engine_core.scheduler
        self._executor: Any = self.core.engine_core.model_executor
        self.vocab_size: int = self._engine.model_config.get_vocab_size()
        self.version = 0
        batches = self.core.engine_core.batch_queue
        self._in_flight: Collection[object] = () if batches is None else batches
        """Batches that are computed between two calls of :meth:`step`: of pipeline stages, or scheduled ahead. Otherwise there are none."""
        if config.pipeline_parallel_size > 1 and current_platform.is_cpu():
            self.core.collective_rpc(receive_hidden_states)
        self.core.set_weight_version("0")
        self.weights = WeightUpdates(
            self.core,
            self.process_ended,
            PatchedUpdates(drops_copies=config.release != "discard", writes_whole=_are_plain(config, self._engine)),
            None if config.adapters is None else install_received,
        )
        self.residence = EngineResidence(config.release != "never")
        self._discards = config.release != "copy"
        self._memory: EngineMemory = (
            CpuMemory(self.core, config.release != "never") if current_platform.is_cpu() else CudaMemory(self.core, not self._discards)
        )
        self.generated_tokens = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.busy_s = 0.0
        self.steps = 0
        tokenizer = load_tokenizer(config)
        self._tokenizer_eos: int | None = None if tokenizer is None else tokenizer.eos_token_id
        self._decode = decoder(tokenizer) if config.finds_texts and tokenizer is not None else None
        self._caches = bool(self._engine.vllm_config.cache_config.enable_prefix_caching)
        self._templates: dict[Sampling, SamplingParams] = {}
        self.responses: dict[str, Response] = {}
        """Under way, by request id."""
        self._finished: list[Completion] = []
        self._scores: dict[str, tuple[_ScoreJob, int]] = {}
        self._num_scores = 0
        self._score_params = self._validated(SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False))
        self._routes = routes_of(self._engine.model_config, self.core) if config.returns_routes else None
        self._adapter = None if config.adapters is None else ADAPTER
        if self._adapter is not None:
            self.core.collective_rpc(install_empty)
        self._warm_up()
        if config.num_processes > 1:
            remove_names()
            self.core.collective_rpc(remove_names)

    def close(self) -> None:
        """Free the model and the executor's processes."""
        self.core.shutdown()

    def process_ended(self) -> bool:
        """Whether a process that computes a shard of the model has ended; any thread may ask.

        The executor notices in a thread of its own, which can be later than the error of a shard that misses its peer.
        """
        if getattr(self._executor, "is_failed", False):
            return True
        return any(not worker.proc.is_alive() for worker in getattr(self._executor, "workers", ()) or ())

    def on_process_end(self, notify: Callable[[], None]) -> None:
        """Have ``notify`` called when such a process ends, from a thread of vLLM's; an engine in one process has none."""
        self._executor.register_failure_callback(notify)

    def salvage(self) -> list[Completion]:
        """Unfinished responses as they stand; for another thread, when this loop will never step again.

        A thread that hangs may have been stopped between two lists of one response: only tokens that have all that belongs to them count.
        """
        return [response.whole().completion(request_id, "abort") for request_id, response in list(self.responses.items())]

    def has_work(self) -> bool:
        """Whether a step would do something."""
        return self.weights.undefined is None and not self.residence.away() and (self._scheduler.has_requests() or bool(self._in_flight))

    @property
    def weights_undefined(self) -> str | None:
        """Why nothing is generated until a full update succeeds; None in normal times, and while one comes in bucket after bucket."""
        return None if self.weights.is_open() else self.weights.undefined

    def take_finished(self) -> list[Completion]:
        """Responses that ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def counters(self) -> dict[str, float]:
        """What ``Engine.stats`` promises."""
        running, waiting = self._scheduler.get_request_counts()
        return {
            "running": float(running),
            "waiting": float(waiting),
            "generated_tokens": float(self.generated_tokens),
            "prompt_tokens": float(self.prompt_tokens),
            "cached_tokens": float(self.cached_tokens),
            "drafted_tokens": float(self.drafted_tokens),
            "accepted_tokens": float(self.accepted_tokens),
            "busy_s": self.busy_s,
            "steps": float(self.steps),
            "updates": float(self.weights.finished),
            "update_s": self.weights.last_s,
            "update_bytes": float(self.weights.last_bytes),
            "reloaded_fraction": self.weights.patched.reloaded_fraction,
        }

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Hand requests to the scheduler; ids must be new."""
        arrival = time.time()
        salt = str(self.version) if self._caches else None
        for request in requests:
            template = self._templates.get(request.sampling)
            if template is None:
                template = self._templates[request.sampling] = self._validated(
                    sampling_params(request.sampling, self._tokenizer_eos, self.vocab_size)
                )
            params = copy.copy(template)
            params.seed = request.seed % SEED_RANGE
            self.responses[request.request_id] = Response.of(request, self._finder(request))
            if request.sampling.returns_routes:
                params.routed_experts_prompt_start = request.num_routed_before
            self._add(request.request_id, request.prompt_token_ids.tolist(), params, arrival, salt)

    def _finder(self, request: GenerationRequest) -> StopFinder | None:
        """What finds the stop strings of a request."""
        texts, before = request.sampling.stop_strings, request.num_sampled_before
        if not texts or self._decode is None:
            return None
        return StopFinder(self._decode, texts, request.prompt_token_ids[-min(before, reach(texts)) :].tolist() if before else ())

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests now with what they have; unknown ids are ignored."""
        known = [request_id for request_id in request_ids if request_id in self.responses]
        if not known:
            return
        self.core.abort_requests(known)
        self._finished += [self.responses.pop(request_id).completion(request_id, "abort") for request_id in known]

    def score(self, sequences: Sequence[tuple[int, ...]], result: Future[list[tuple[float, ...]]]) -> None:
        """Queue sequences for scoring; ``result`` is set when all of them are done, at once where they cannot be computed now."""
        if (refusal := self.residence.refusal("score")) is not None:
            result.set_exception(EngineResidenceError(refusal))
            return
        if self.weights.undefined is not None:
            result.set_exception(WeightSyncError(f"score: {self.weights.undefined}; send a full update"))
            return
        job = _ScoreJob(result=result, rows=[None] * len(sequences), left=len(sequences))
        arrival = time.time()
        for position, sequence in enumerate(sequences):
            self._num_scores += 1
            request_id = f"__score__{self._num_scores}"
            self._scores[request_id] = (job, position)
            self._add(request_id, list(sequence), copy.copy(self._score_params), arrival, None)

    def cancel_score(self, result: Future[list[tuple[float, ...]]]) -> None:
        """Drop the sequences of a call nobody waits for any more."""
        mine = [request_id for request_id, (job, _) in self._scores.items() if job.result is result]
        self.core.abort_requests(mine)
        for request_id in mine:
            del self._scores[request_id]

    def step(self) -> None:
        """Compute one step of everything that runs.

        Raises:
            RuntimeFault: vLLM reports a request as failed.
        """
        begin = time.perf_counter()
        outputs = self.core.get_output()
        if self._routes is not None:
            self._routes.hand_out(outputs.outputs, self.responses)
        version = int(outputs.weight_version) if outputs.weight_version is not None else self.version
        for output in outputs.outputs:
            response = self.responses.get(output.request_id)
            if response is None:
                if output.request_id in self._scores:
                    self._take_score(output)
                continue
            if output.prefill_stats is not None:
                self.prompt_tokens += output.prefill_stats.num_prompt_tokens
                self.cached_tokens += output.prefill_stats.num_cached_tokens
            if (drafts := output.spec_decode_metrics) is not None:  # with the last tokens of a response
                self.drafted_tokens += drafts.num_draft_tokens
                self.accepted_tokens += sum(accepted * count for accepted, count in enumerate(drafts.histogram))
            if output.new_token_ids:
                self.generated_tokens += len(output.new_token_ids)
                if response.take(output, version, self.vocab_size):
                    if output.finish_reason is None:
                        self.core.abort_requests([output.request_id])
                    del self.responses[output.request_id]
                    self._finished.append(response.completion(output.request_id, "stop"))
                    continue
            if output.finish_reason is not None:
                reason = FINISH_REASONS.get(output.finish_reason)
                if reason is None:
                    raise RuntimeFault(f"vLLM ended request {output.request_id} as {output.finish_reason!s}; see its log above")
                del self.responses[output.request_id]
                self._finished.append(response.completion(output.request_id, reason))
        self.steps += 1
        self.busy_s += time.perf_counter() - begin

    def load_update(self, incoming: IncomingUpdate, deadline: float) -> None:
        """Load what has come of a set of weights, between two steps; scoring calls end first under the weights they began with.

        Raises:
            WeightSyncError: the weights are offloaded (nothing changed), or vLLM failed to load (they are undefined until a full update
                succeeds).
            DeadlineError: the deadline passed.
        """
        if not self.weights.is_open(incoming):
            self.residence.check_update(incoming.version)
            self._finish_scores(deadline)
            self._finish_batches(deadline)
        self.weights.load(incoming, deadline)

    def check_transport(self, tests: Sequence[Remote], deadline: float) -> None:
        """Have every process of the engine fetch what senders sent first; the model stays as it is.

        Raises:
            WeightSyncError, DeadlineError: as for :meth:`load_update`.
        """
        self.weights.test(tests, deadline)

    def leave_transport(self, holdings: Holdings, deadline: float) -> None:
        """Have workers free what they hold of a transport; errors as of :meth:`check_transport`."""
        self.weights.leave_transport(holdings, deadline)

    def apply_update(self, incoming: IncomingUpdate, on_running: OnRunning, deadline: float) -> int:
        """Load the rest of a full set of weights and serve it.

        Args:
            incoming: brings all buckets of its manifest.
            on_running: see ``OnRunning``.
            deadline: ``time.monotonic`` value after which to give up.

        Raises:
            WeightSyncError, DeadlineError: as for :meth:`load_update`.
        """
        self.load_update(incoming, deadline)
        self.weights.finish(incoming, deadline)
        # Cached keys and values are of the old weights. With requests running a plain reset does nothing, so with ``keep`` the salt
        # (see ``add``) keeps later requests away from them. A reset looks at every block.
        recompute = on_running == "recompute"
        if self._caches or (recompute and self._scheduler.get_request_counts()[0]):
            self.core.reset_prefix_cache(reset_running_requests=recompute)
        self.version = incoming.version
        self.weights.closed()
        return self.version

    def offload(self, kinds: Collection[StateKind], on_running: OnOffload, deadline: float) -> SwitchReport:
        """Give memory back between two steps; see ``Engine.offload``.

        vLLM in one process can ``abort`` or ``keep``: its third way, to let responses end (``wait``), needs the steps that only this loop
        makes. Kept requests are preempted: they return to the waiting queue with their tokens and their random generators.

        Raises:
            EngineResidenceError: refused, nothing changed.
            DeadlineError: not begun before the deadline, nothing changed.
            RuntimeFault: broke off half-way; this loop is of no use any more.
        """
        wanted = self.residence.to_offload(kinds)
        self._finish_scores(deadline)
        if wanted and on_running == "refuse":
            check_running(self._scheduler.get_request_counts()[0])
        _raise_if_past(deadline, "offload")
        if wanted and on_running == "abort":
            self.abort(list(self.responses))
        if wanted:
            self._finish_batches(deadline)
            self.core.reset_prefix_cache(reset_running_requests=True)
        if StateKind.PARAMS in wanted and self._discards:
            self.weights.discard()
        return self._switch("offload", wanted, deadline)

    def load(self, kinds: Collection[StateKind], deadline: float) -> SwitchReport:
        """Take memory again; see ``Engine.load``.

        Raises:
            EngineResidenceError, DeadlineError, RuntimeFault: as for ``offload``.
        """
        wanted = self.residence.to_load(kinds)
        _raise_if_past(deadline, "load")
        report = self._switch("load", wanted, deadline)
        if StateKind.PARAMS in wanted and self._discards and self._adapter is not None:
            self._reload_model(deadline)  # the next update brings adapters alone
        return report

    def _reload_model(self, deadline: float) -> None:
        """Bring back the weights that updates do not bring."""
        try:
            self.core.collective_rpc(reload_model, max(0.0, deadline - time.monotonic()))
        except Exception as exc:
            raise RuntimeFault(f"the model's weights could not be read again: {type(exc).__name__}: {exc}") from exc

    def memory(self) -> MemorySnapshot:
        """Memory of all workers, summed."""
        return self._memory.snapshot()

    def _switch(self, direction: Literal["offload", "load"], wanted: frozenset[StateKind], deadline: float) -> SwitchReport:
        """Move ``wanted``, measured."""
        before = self._memory.snapshot()
        begin = time.perf_counter()
        moved = Moved(copied_bytes={}, freed_bytes={})
        if wanted:
            off = direction == "offload"
            with self.residence.moving(wanted, Residence.OFFLOADED if off else Residence.ON_DEVICE):
                try:
                    moved = self._memory.offload(wanted, deadline) if off else self._memory.load(wanted, deadline)
                except Exception as exc:
                    raise RuntimeFault(f"{direction} of {names(wanted)} broke off half-way: {type(exc).__name__}: {exc}") from exc
        return SwitchReport(
            direction=direction,
            copied_bytes=moved.copied_bytes,
            freed_bytes=moved.freed_bytes,
            elapsed_s=time.perf_counter() - begin,
            before=before,
            after=self._memory.snapshot(),
            undefined=wanted & {StateKind.PARAMS} if direction == "load" and self.weights.undefined is not None else frozenset(),
        )

    def _finish_scores(self, deadline: float) -> None:
        """Let scoring calls end under the weights they began with."""
        while self._scores and self.has_work():
            if time.monotonic() > deadline:
                raise DeadlineError(f"update waited for {len(self._scores)} sequences being scored; allow more time")
            self.step()

    def _finish_batches(self, deadline: float) -> None:
        """Let batches under way complete, which are computed with the weights and the cache that a change would replace."""
        if not self._in_flight:
            return
        self._scheduler.set_pause_state(PauseState.PAUSED_ALL)
        try:
            while self._in_flight:
                _raise_if_past(deadline, "change, which waited for batches under way,")
                self.step()
        finally:
            self._scheduler.set_pause_state(PauseState.UNPAUSED)

    def _take_score(self, output: EngineCoreOutput) -> None:
        """Take the log-probs of one scored sequence."""
        if output.finish_reason is None:
            return
        job, position = self._scores.pop(output.request_id)
        tensors = output.new_prompt_logprobs_tensors
        if tensors is None:
            raise RuntimeFault(f"vLLM returned no prompt log-probs for a scored sequence of request {output.request_id}")
        job.rows[position] = tuple(tensors.logprobs[:, 0].tolist())
        job.left -= 1
        if job.left == 0:
            job.result.set_result([row for row in job.rows if row is not None])

    def _add(self, request_id: str, prompt: list[int], params: SamplingParams, arrival: float, salt: str | None) -> None:
        """Hand one request to the core, past the front end's per-request work."""
        self.core.add_request(
            EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=prompt,
                mm_features=None,
                sampling_params=params,
                pooling_params=None,
                arrival_time=arrival,
                lora_request=self._adapter,
                cache_salt=salt,
                data_parallel_rank=None,
            )
        )

    def _validated(self, params: SamplingParams) -> SamplingParams:
        """Run vLLM's own checks once per template and fill in the model's end-of-sequence tokens."""
        processor = self._engine.input_processor
        params.verify(self._engine.model_config, self._engine.vllm_config.speculative_config, None, None)
        params.update_from_generation_config(processor.generation_config_fields, None)
        return params

    def _warm_up(self) -> None:
        """Generate and score once."""
        result: Future[list[tuple[float, ...]]] = Future()
        request = GenerationRequest(
            request_id="__warm_up__", prompt_token_ids=np.zeros(1, dtype=np.int32), sampling=Sampling(max_tokens=2), seed=0
        )
        self.add([request])
        self.score([(0, 0)], result)
        while self.has_work():
            self.step()
        self.take_finished()
        self.generated_tokens, self.prompt_tokens, self.cached_tokens, self.busy_s, self.steps = 0, 0, 0, 0.0, 0
        self.drafted_tokens, self.accepted_tokens = 0, 0


def receive_hidden_states(worker: Any) -> None:
    """Give a later pipeline stage the buffers that it receives hidden states in.

    vLLM 0.32 makes them in the first trial run of a model, which it leaves out on CPU where nothing is compiled.
    """
    runner = worker.model_runner
    if runner.intermediate_tensors is None and not get_pp_group().is_first_rank:
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
            batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
        )


def _are_plain(config: EngineConfig, engine: LLMEngine) -> bool:
    """Whether numbers may go into parameters as they come: not adapters, and not what vLLM quantizes."""
    return config.adapters is None and engine.vllm_config.quant_config is None


def _permit_amx() -> None:
    """Ask the kernel to let this process use AMX tiles, where the processor has them.

    vLLM 0.32 computes bfloat16 attention with them and does not ask; then the first tile instruction ends the process (SIGILL).

    Raises:
        ModelError: the kernel refuses.
    """
    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
        raise ModelError("this kernel lets no process use AMX, which vLLM needs for bfloat16 here; write engine.dtype: float32 or float16")


def _raise_if_past(deadline: float, what: str) -> None:
    """Give up before a switch begins.

    Raises:
        DeadlineError: the deadline has passed.
    """
    if time.monotonic() > deadline:
        raise DeadlineError(f"engine: the deadline passed before the {what} began; allow more time and call it again")
