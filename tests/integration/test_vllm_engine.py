"""Real vLLM on CPU behind the engine protocol, compared with transformers token by token."""

from __future__ import annotations

import os
import pickle
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import Qwen2ForCausalLM

from rljob_runtime.engine.vllm import packed_weights
from rljob_runtime.engine.vllm.engine import VllmEngine
from rljob_runtime.engine.vllm.environment import engine_environment
from rljob_runtime.errors import CorruptedWeightsError, DataError, EngineDiedError, ModelError, RuntimeFault, WeightSyncError
from rljob_runtime.records import Bucket, Sampling, VersionSpan
from rljob_runtime.weightsync.assembly import UpdateAssembly
from rljob_runtime.weightsync.packing import pack
from rljob_runtime.weightsync.parcel import Parcel, sealed
from rljob_runtime.weightsync.shared_memory import Segments
from rljob_runtime.weightsync.staging import Staging
from tests.support.engine_bits import multiplied_bits
from tests.support.engine_contract import (
    EOS,
    LONG,
    TIMEOUT_S,
    TOLERANCE,
    EngineContract,
    check_scores_after_updates,
    config_for,
    drain,
    endless,
    expected_logprobs,
    expected_scores,
    generate,
    letters,
    manifest_of,
    new_model,
    packed,
    push,
    request,
    save,
    wait_for_tokens,
    weights,
)
from tests.support.fake_cuda import StrictFakeCuda
from tests.support.records import collected, tokens
from tests.support.sparse_updates import PACKED_RECEIVER, FetchedUpdates, SparseUpdates, push_whole
from tests.support.vllm_engine import forget_loads, running


def gloo_loops() -> int:
    """Threads of gloo in this process: one for each of its devices."""
    return sum(name.read_text() == "gloo_tcp_loop\n" for name in Path("/proc/self/task").glob("*/comm"))


def started(path: str, **settings: object) -> Iterator[VllmEngine]:
    config = replace(config_for(path), **settings)
    before = gloo_loops()
    with running(config) as engine:
        LOOPS[engine] = gloo_loops() - before
        AS_READ[engine] = multiplied_bits(engine)
        yield engine


AS_READ: dict[VllmEngine, list[dict[str, int]]] = {}
"""What each engine multiplied with when it had read its folder, the weights of seed 0."""
LOOPS: dict[VllmEngine, int] = {}
"""Threads of gloo that each engine started in the process of the test."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_without_instructions_for_them_torch_multiplies_16_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import _custom_ops
    from vllm.model_executor.layers import utils

    monkeypatch.setattr(utils, "check_cpu_sgl_kernel", lambda *_: False)  # of CPUs with AMX, which have them
    monkeypatch.setattr(_custom_ops, "create_onednn_mm", _custom_ops.create_onednn_mm)  # which is put back after the test
    widened: list[bool] = []
    monkeypatch.setattr(packed_weights, "widen_products", lambda: widened.append(True))
    packed_weights.multiply_halves_in_float32.__wrapped__()
    assert widened == [True]
    layer = torch.nn.Linear(64, 96, dtype=dtype)
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    assert packed_weights.has_packed_copy(layer) == (dtype is torch.float32)
    inputs = torch.randn(3, 64, dtype=dtype)
    with torch.no_grad():
        found = layer.cpu_linear(inputs, layer.weight, layer.bias)
        torch.testing.assert_close(found, layer(inputs))


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    model = save(new_model(tied=False, seed=0), tmp_path_factory.mktemp("untied"))
    yield from started(model, tokenizer_path=letters(tmp_path_factory.mktemp("letters")), finds_texts=True)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    yield from started(save(new_model(tied=True, seed=0), tmp_path_factory.mktemp("tied")))


@pytest.fixture
def engine(untied: VllmEngine) -> VllmEngine:
    """The untied engine with known weights under a version of its own."""
    push(untied, new_model(tied=False, seed=0), untied.version() + 1)
    return untied


def push_shared(engine: VllmEngine, model: Qwen2ForCausalLM, version: int) -> None:
    """The same through two segments of shared memory that take turns; layers are larger than a bucket."""
    tensors = weights(model)
    manifest = manifest_of(tensors, 50_000)
    assert len(manifest.buckets) > 4
    segments = Segments.equal(f"rljob-vllm{os.getpid()}-", 2, max(bucket.size_bytes for bucket in manifest.buckets))

    def written(bucket: Bucket) -> Parcel:
        data = segments.array(bucket.index % 2, bucket.size_bytes)
        pack(bucket, tensors, data)
        return sealed(version, data, segments.shared(bucket.index % 2, bucket.size_bytes))

    test = {"streams": True, "tests": [written(manifest.buckets[0])]}
    engine.prepare_receiver("rljob_runtime.weightsync.transports.shared_memory:SharedReceiver", test)
    engine.begin_update(manifest, version)
    for bucket in manifest.buckets:
        engine.load_bucket(bucket.index, written(bucket))
    assert engine.finish_update(TIMEOUT_S) == version
    segments.close()
    engine.prepare_receiver(PACKED_RECEIVER, {})


def test_the_models_own_end_token_ends_a_response(tied: VllmEngine) -> None:
    found = generate(tied, [request(f"r{seed}", Sampling(max_tokens=40), seed) for seed in range(40)])
    ended = [completion for completion in found.values() if completion.finish_reason == "stop"]
    assert 5 < len(ended) < 40
    assert all(tokens(completion).index(EOS) == len(tokens(completion)) - 1 for completion in ended)
    assert all(EOS not in tokens(completion) for completion in found.values() if completion.finish_reason == "length")


def test_the_same_seed_samples_the_same_tokens_alone_and_in_a_batch(engine: VllmEngine) -> None:
    sampling = Sampling(max_tokens=24)
    alone = generate(engine, [request("alone", sampling, 7)])["alone"]
    crowd = [request(f"c{i}", Sampling(max_tokens=5 + i % 20, temperature=0.9), 1000 + i, (3 + i % 50, 9, 4)) for i in range(90)]
    crowd.insert(70, request("same", sampling, 7))
    found = generate(engine, crowd)
    assert tokens(found["same"]) == tokens(alone)
    assert found["same"].segment.logprobs == pytest.approx(alone.segment.logprobs, abs=TOLERANCE)
    others = generate(engine, [request(f"s{seed}", sampling, seed) for seed in range(8)])
    assert len({tokens(completion) for completion in others.values()}) > 1


def test_its_thirteen_groups_have_one_thread_of_gloo(tied: VllmEngine) -> None:
    assert LOOPS[tied] <= 1  # 0 where an engine was there before


class TestVllm(EngineContract):
    """The contract of all engines."""


@pytest.mark.parametrize("bring", [push, push_shared])
def test_after_an_update_scores_of_a_tied_model_are_those_of_the_new_weights(
    tied: VllmEngine, bring: Callable[[VllmEngine, Qwen2ForCausalLM, int], None]
) -> None:
    check_scores_after_updates(tied, tied=True, bring=bring)


def test_after_an_update_through_shared_memory_scores_are_those_of_the_new_weights(engine: VllmEngine) -> None:
    check_scores_after_updates(engine, tied=False, bring=push_shared)


@pytest.mark.parametrize("kind", ["tied", "untied"])
@pytest.mark.parametrize("bring", [push, push_shared])
def test_after_an_update_every_layer_multiplies_with_the_bits_that_a_start_gives(
    kind: str, bring: Callable[[VllmEngine, Qwen2ForCausalLM, int], None], tied: VllmEngine, untied: VllmEngine
) -> None:
    """Fused projections of queries, keys and values, of gate and up, and the packed copies of CPU kernels among them."""
    engine = tied if kind == "tied" else untied
    (as_read,) = AS_READ[engine]
    assert any("qkv_proj" in name for name in as_read)
    assert any("gate_up_proj" in name for name in as_read)
    bring(engine, new_model(tied=kind == "tied", seed=21), engine.version() + 1)
    (other,) = multiplied_bits(engine)
    assert other.keys() == as_read.keys()
    assert {name for name in as_read if other[name] == as_read[name]} <= {name for name in as_read if "norm" in name or "bias" in name}
    bring(engine, new_model(tied=kind == "tied", seed=0), engine.version() + 1)
    assert multiplied_bits(engine) == [as_read]


@pytest.mark.parametrize("updates", [SparseUpdates, FetchedUpdates])
def test_sparse_and_whole_buckets_of_one_update_leave_the_same_bits(
    updates: type[SparseUpdates | FetchedUpdates], tied: VllmEngine
) -> None:
    """Its kernels have packed copies, so that what changed is loaded from copies."""
    forget_loads(tied)
    first, sparse = weights(new_model(tied=True, seed=0)), updates(tied)
    changed = {name: tensor.clone() for name, tensor in first.items()}
    whole = next(name for name in changed if "layers.0" in name and "down_proj" in name)
    changed[whole] += 1.0
    for name, tensor in changed.items():
        tensor.view(-1)[::50] *= 1.5 if name != whole else 1.0
    for _ in range(1 if updates is SparseUpdates else 2):
        assert not any(sparse.push(first, tied.version() + 1))
    assert multiplied_bits(tied) == AS_READ[tied]
    kinds = sparse.push(changed, tied.version() + 1)
    assert set(kinds) == {True, False}, "the test is of a mixed update"
    after = multiplied_bits(tied)
    assert after != AS_READ[tied]
    push_whole(tied, changed)
    assert multiplied_bits(tied) == after
    sparse = updates(tied)
    for _ in range(1 if updates is SparseUpdates else 2):
        sparse.push(changed, tied.version() + 1)
    assert set(sparse.push(first, tied.version() + 1)) == {True, False}
    assert multiplied_bits(tied) == AS_READ[tied]
    tied.prepare_receiver(PACKED_RECEIVER, {})


def test_a_streamed_update_that_breaks_off_stops_the_engine_until_a_full_one(engine: VllmEngine) -> None:
    old, model = engine.version(), new_model(tied=False, seed=13)
    engine.submit([endless(f"r{i}", i) for i in range(4)])
    wait_for_tokens(engine, 40)
    segments = Segments.equal(f"rljob-vllm{os.getpid()}-", 1, 100_000)
    manifest = manifest_of(weights(model))
    first = manifest.buckets[0]
    pack(first, weights(model), segments.array(0, first.size_bytes))
    parcel = sealed(old + 1, segments.array(0, first.size_bytes), segments.shared(0, first.size_bytes))
    engine.prepare_receiver("rljob_runtime.weightsync.transports.shared_memory:SharedReceiver", {"streams": True, "tests": [parcel]})
    engine.begin_update(manifest, old + 1)
    engine.load_bucket(0, parcel)
    generated = engine.stats()["generated_tokens"]
    assert len(engine.collect(0.01).request_ids) == 0  # an update under way is no error
    with pytest.raises(CorruptedWeightsError):
        engine.load_bucket(1, replace(parcel, checksum=parcel.checksum ^ 1))
    with pytest.raises(WeightSyncError, match="buckets never arrived"):
        engine.finish_update(TIMEOUT_S)
    assert engine.stats()["generated_tokens"] == generated
    assert engine.version() == old
    segments.close()
    engine.prepare_receiver(PACKED_RECEIVER, {})
    push(engine, model, old + 2)
    found = drain(engine, 4)
    assert {completion.segment.version_spans[-1].version for completion in found.values()} == {old + 2}


def test_a_tied_head_may_be_in_the_manifest(tied: VllmEngine) -> None:
    model = new_model(tied=True, seed=21)
    tensors = weights(model) | {"lm_head.weight": model.lm_head.weight.detach()}
    manifest = manifest_of(tensors)
    tied.begin_update(manifest, 77)
    for bucket in manifest.buckets:
        tied.load_bucket(bucket.index, packed(bucket, tensors))
    assert tied.finish_update(TIMEOUT_S) == 77
    assert tied.score([(5, 6, 7)], TIMEOUT_S)[0] == pytest.approx(expected_scores(model, (5, 6, 7)), abs=TOLERANCE)


def test_keep_goes_on_with_old_keys_and_new_requests_do_not_see_them(engine: VllmEngine) -> None:
    new = new_model(tied=False, seed=6)
    shared = tuple(range(3, 59)) * 5  # more than one cache block
    generate(engine, [request("warm", Sampling(max_tokens=1), 0, shared)])
    engine.submit([endless(f"r{i}", i) for i in range(4)])
    wait_for_tokens(engine, 40)
    push(engine, new, engine.version() + 1, "keep")
    engine.submit([request("fresh", Sampling(max_tokens=4), 1, shared)])
    found = drain(engine, 5)
    assert any(len(completion.segment.version_spans) == 2 for completion in found.values())
    expected = expected_logprobs(new, shared, Sampling(max_tokens=4), tokens(found["fresh"]))
    assert found["fresh"].segment.logprobs == pytest.approx(expected, abs=TOLERANCE)


def test_a_failure_while_loading_stops_generation_until_a_full_update(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    from rljob_runtime.engine.vllm.weight_receiver import BucketReceiver

    receive = BucketReceiver.receive_weights
    calls = []

    def fail_on_third(self: BucketReceiver, update: object) -> None:
        calls.append(update)
        if len(calls) == 3:
            raise ValueError("broken bucket")
        receive(self, update)

    monkeypatch.setattr(BucketReceiver, "receive_weights", fail_on_third)
    # Small buckets, so that the failure leaves layers half loaded.
    tensors = weights(new_model(tied=False, seed=1))
    manifest = manifest_of(tensors, 9_000)
    engine.begin_update(manifest, 90)
    for bucket in manifest.buckets:
        engine.load_bucket(bucket.index, packed(bucket, tensors))
    with pytest.raises(WeightSyncError, match="broken bucket"):
        engine.finish_update(TIMEOUT_S)
    engine.submit([request("waits", Sampling(max_tokens=2))])
    with pytest.raises(WeightSyncError, match="version 90 broke off"):
        collected(engine, 1.0)
    with pytest.raises(WeightSyncError, match="version 90 broke off"):
        engine.score([(1, 2)], 1.0)
    model = new_model(tied=False, seed=2)
    push(engine, model, 91)
    assert drain(engine, 1)["waits"].segment.version_spans == (VersionSpan(start=0, end=2, version=91),)
    assert engine.score([(5, 6, 7)], TIMEOUT_S)[0] == pytest.approx(expected_scores(model, (5, 6, 7)), abs=TOLERANCE)


def test_the_constructor_says_why_it_cannot_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    with pytest.raises(ModelError, match="VLLM_CPU_KVCACHE_SPACE is set"):
        VllmEngine(config_for(str(tmp_path)))
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE")
    for name, value in engine_environment(config_for("")).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ModelError, match=r"config\.json is not readable"):
        VllmEngine(config_for(str(tmp_path)))


def test_stop_strings_need_an_engine_with_a_tokenizer(tied: VllmEngine) -> None:
    with pytest.raises(DataError, match="started without a tokenizer"):
        tied.submit([request("texts", Sampling(max_tokens=1, stop_strings=("x",)))])


def test_the_death_of_the_engine_thread_reaches_every_caller(tied: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Last of the module: the tied engine is dead afterwards."""
    from rljob_runtime.engine.vllm.loop import VllmLoop

    def die(self: VllmLoop) -> None:
        raise MemoryError("no more memory")

    monkeypatch.setattr(VllmLoop, "step", die)
    tied.submit([endless("never", 0)])
    with pytest.raises(EngineDiedError, match="no more memory"):
        collected(tied, TIMEOUT_S)
    for call in (
        lambda: tied.submit([endless("later", 0)]),
        lambda: tied.score([(1, 2)], TIMEOUT_S),
        lambda: tied.abort(["never"]),
        lambda: tied.begin_update(manifest_of(weights(new_model(tied=True, seed=0))), 1),
        tied.version,
        tied.stats,
    ):
        with pytest.raises(EngineDiedError, match="no more memory"):
            call()


@pytest.mark.slow
@pytest.mark.usefixtures("forked_shards")
def test_tensor_parallel_ranks_read_shared_memory_themselves(tmp_path: Path) -> None:
    """Last: the end of an engine with processes of its own takes vLLM's groups of this process with it."""
    model = new_model(tied=True, seed=14)
    for engine in started(save(new_model(tied=True, seed=0), tmp_path), tensor_parallel_size=2):
        as_read = AS_READ[engine]
        assert len(as_read) == 2
        queues = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/psm_" in line]
        assert queues
        assert all(line.endswith("(deleted)") for line in queues), "shared memory that stays when the engine is killed"
        push_shared(engine, model, 1)
        assert all(after != before for after, before in zip(multiplied_bits(engine), as_read, strict=True))
        push_shared(engine, new_model(tied=True, seed=0), 2)
        assert multiplied_bits(engine) == as_read
        push_shared(engine, model, 3)
        probe = (5, 17, 33, 8, 9, 10)
        assert engine.score([probe], TIMEOUT_S)[0] == pytest.approx(expected_scores(model, probe), abs=TOLERANCE)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_shards")
def test_pipeline_stages_sample_under_the_weights_that_they_name(tmp_path: Path) -> None:
    """Batches that the stages compute when new weights come keep the old version, and both versions' log-probs are right."""
    old, new = new_model(tied=False, seed=0), new_model(tied=False, seed=5)
    for engine in started(save(old, tmp_path), pipeline_parallel_size=2):
        assert len(AS_READ[engine]) == 2
        engine.submit([endless(f"r{i}", i) for i in range(8)])
        wait_for_tokens(engine, 80)
        push(engine, new, 1)
        found = drain(engine, 8)
        mixed = [completion for completion in found.values() if len(completion.segment.version_spans) == 2]
        assert len(mixed) >= 3
        for completion in mixed:
            for model, span in zip((old, new), completion.segment.version_spans, strict=True):
                expected = expected_logprobs(model, (5, 17, 33, 8), LONG, tokens(completion))
                assert completion.segment.logprobs[span.start : span.end] == pytest.approx(expected[span.start : span.end], abs=TOLERANCE)
        push_shared(engine, old, 2)
        assert multiplied_bits(engine) == AS_READ[engine]


def test_an_update_does_not_wait_for_scales_that_vllm_computes_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last update goes by way of a device, from shared memory.

    As with ``quantization: fp8``, which a CPU cannot compute: processing replaces the weight and adds its scale.
    """
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    from rljob_runtime.engine.vllm import weight_receiver
    from rljob_runtime.engine.vllm.weight_receiver import BucketReceiver, BucketUpdate, register

    cuda = StrictFakeCuda()
    monkeypatch.setattr(weight_receiver, "staging_for", lambda device: Staging(device, cuda, cuda))

    class Scaling(UnquantizedLinearMethod):
        def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
            scale = layer.weight.abs().max()
            layer.weight = torch.nn.Parameter((layer.weight / scale).detach(), requires_grad=False)
            layer.weight_scale = torch.nn.Parameter(scale.detach(), requires_grad=False)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Module()
            self.layer.weight = torch.nn.Parameter(torch.ones(4, 4), requires_grad=False)
            self.layer.weight.weight_loader = default_weight_loader
            self.layer.quant_method = Scaling()

        def load_weights(self, tensors: Any) -> set[str]:
            loaded = set()
            for name, tensor in tensors:
                parameter = self.get_parameter(name)
                parameter.weight_loader(parameter, tensor)
                loaded.add(name)
            return loaded

    register()
    model = Model()
    record_metadata_for_reloading(model)
    model.layer.quant_method.process_weights_after_loading(model.layer)
    settings = SimpleNamespace(lora_config=None, parallel_config=SimpleNamespace(rank=0), model_config=SimpleNamespace(dtype=torch.float32))
    receiver = BucketReceiver(WeightTransferConfig(backend="rljob"), cast(Any, settings), torch.device("cpu"), model)
    tensors = {"layer.weight": 3 * torch.eye(4)}
    (bucket,) = manifest_of(tensors).buckets
    segments = Segments.equal(f"rljob-vllm{os.getpid()}-", 1, bucket.size_bytes)
    for payload in (packed(bucket, tensors), packed(bucket, tensors), segments.shared(0, bucket.size_bytes)):
        pack(bucket, tensors, segments.array(0, bucket.size_bytes))
        receiver.start_weight_update()
        receiver.receive_weights(BucketUpdate(bucket=bucket, payload=payload, last=True))
        receiver.finish_weight_update()
        assert model.layer.weight_scale.item() == 3
        assert torch.equal(model.layer.weight, torch.eye(4))
    assert cuda.events == ["lock", "copy", "drain"]
    receiver.shutdown()
    assert cuda.locked == {}
    segments.close()
    receiver.start_weight_update()
    with pytest.raises(WeightSyncError, match=r"no data for layer\.weight"):
        receiver.receive_weights(BucketUpdate(bucket=Bucket(index=0, size_bytes=0, slots=()), payload=np.zeros(0, np.uint8), last=True))


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (
            "bucket 0 of weights v-1 from trainer rank 1 cannot be opened on cuda:0: CUDA error: invalid argument",
            WeightSyncError,
        ),
        ("CUDA error: an illegal memory access was encountered", RuntimeFault),
        ("HIP error: an illegal memory access was encountered", RuntimeFault),
        (
            "member 1 of 2 of the group of trainer rank 0: broadcast 3 broke off: HIP error: unspecified launch failure",
            RuntimeFault,
        ),
        (
            "member 1 of 2 of the group of trainer rank 0: broadcast 3 broke off: NCCL error: remote process exited",
            WeightSyncError,
        ),
        ("NCCL error: unhandled system error", RuntimeFault),
    ],
)
def test_what_another_process_does_not_lend_costs_a_sync_and_what_the_device_says_the_engine(said: str, kind: type[Exception]) -> None:
    from rljob_runtime.engine.vllm.patched_updates import PatchedUpdates
    from rljob_runtime.engine.vllm.updating import WeightUpdates

    class Core:
        """All its ranks say the same."""

        def collective_rpc(self, *_: object) -> None:
            raise RuntimeError(said)

    with pytest.raises(RuntimeFault) as found:
        WeightUpdates(Core(), lambda: False, PatchedUpdates(drops_copies=False)).test((), time.monotonic() + TIMEOUT_S)
    assert type(found.value) is kind


def test_a_call_that_is_not_over_in_time_costs_the_engine() -> None:
    """Its ranks' answers would be taken for those to the next call."""
    from rljob_runtime.engine.vllm.patched_updates import PatchedUpdates
    from rljob_runtime.engine.vllm.updating import WeightUpdates

    class Core:
        def collective_rpc(self, *_: object) -> None:
            raise TimeoutError("RPC call timed out")

    with pytest.raises(RuntimeFault, match="fetch_tests was not done in 60 s") as found:
        WeightUpdates(Core(), lambda: False, PatchedUpdates(drops_copies=False)).test((), time.monotonic() + 60)
    assert type(found.value) is RuntimeFault


class Rank:
    """What loads into one rank's model; fails in its first update if a test asks for it."""

    supports_draft_weight_update = False

    def __init__(self, fails: bool) -> None:
        self.fails = fails
        self.loaded: list[int] = []

    def start_weight_update(self) -> None:
        self.loaded.clear()

    def update_weights(self, update: Mapping[str, Any]) -> None:
        if self.fails:
            self.fails = False
            raise WeightSyncError("the bucket cannot be opened on cuda:1")
        self.loaded.append(update["bucket"].index)

    def finish_weight_update(self) -> None:
        """All is in place."""

    def reset_weight_update_target(self) -> None:
        """It is the model itself."""


@pytest.mark.parametrize("fails", [(True, True), (True, False), (False, True)])
def test_an_update_that_broke_off_in_some_ranks_leaves_no_answer_behind_and_a_full_one_puts_all_right(fails: tuple[bool, ...]) -> None:
    """Through vLLM's own executor and workers, but for their processes and models."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc
    from vllm.v1.worker.gpu_worker import Worker
    from vllm.v1.worker.worker_base import WorkerWrapperBase

    from rljob_runtime.engine.vllm.patched_updates import PatchedUpdates
    from rljob_runtime.engine.vllm.updating import WeightUpdates

    class Answers(deque[Any]):
        def enqueue(self, answer: Any) -> None:
            self.append(answer)

        def dequeue(self, timeout: float | None = None) -> Any:
            return self.popleft()

    def process(rank: int) -> WorkerProc:
        worker, proc = object.__new__(Worker), object.__new__(WorkerProc)
        worker.weight_transfer_engine = Rank(fails[rank])
        worker._weight_update_active = worker._weight_update_is_draft = False
        worker.vllm_config = None
        worker.model_runner = SimpleNamespace(reset_lora_state=lambda: None)
        proc.rank, proc.use_async_scheduling, proc.worker_response_mq = rank, False, Answers()
        proc.worker = WorkerWrapperBase(rpc_rank=rank)
        proc.worker.worker = worker
        return proc

    class Requests:
        def enqueue(self, call: Any) -> None:
            for proc in procs:
                proc._execute_worker_rpc(pickle.loads(pickle.dumps(call)))

    procs = [process(rank) for rank in range(2)]
    executor = object.__new__(MultiprocExecutor)
    executor.is_failed, executor.futures_queue = False, deque()
    executor.rpc_broadcast_mq = Requests()
    executor.response_mqs = [proc.worker_response_mq for proc in procs]
    core = SimpleNamespace(collective_rpc=executor.collective_rpc, set_weight_version=lambda version: None)
    updates = WeightUpdates(core, lambda: False, PatchedUpdates(drops_copies=False))
    manifest = manifest_of(weights(new_model(tied=False, seed=1)), 50_000)
    deadline = time.monotonic() + TIMEOUT_S

    def whole(version: int) -> UpdateAssembly:
        incoming = UpdateAssembly(manifest, version, None)
        for bucket in manifest.buckets:
            incoming.take(bucket.index, np.zeros(bucket.size_bytes, dtype=np.uint8))
        return incoming

    with pytest.raises(WeightSyncError, match="failed in a worker of vLLM: WeightSyncError: the bucket cannot be opened on cuda:1; send"):
        updates.load(whole(1), deadline)
    again = whole(2)
    updates.load(again, deadline)
    updates.finish(again, deadline)
    assert [proc.worker.weight_transfer_engine.loaded for proc in procs] == [[bucket.index for bucket in manifest.buckets]] * 2
    assert [list(queue) for queue in executor.response_mqs] == [[], []]
