"""What goes to SGLang's server and comes from it, without a server."""

from __future__ import annotations

import base64
import importlib.util
import json
import pickle
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rljob_runtime.engine.protocol import EngineConfig
from rljob_runtime.engine.sglang.arguments import command_line, server_arguments
from rljob_runtime.engine.sglang.memory import LedgerMemory, ReportedMemory
from rljob_runtime.engine.sglang.response import SEED_RANGE, Response, generate_body, group_body
from rljob_runtime.engine.sglang.server import CPU_KERNELS, server_environment
from rljob_runtime.engine.sglang.weights import shared, update_body
from rljob_runtime.engine.stop_strings import StopFinder
from rljob_runtime.errors import ModelError, RuntimeFault
from rljob_runtime.offload.states import StateKind
from rljob_runtime.records import GenerationRequest, Sampling, VersionSpan
from rljob_runtime.weightsync.packing import plan_buckets
from tests.support.pace import HANG_S
from tests.support.records import ids, tokens

MODEL = SimpleNamespace(vocab_size=100, num_attention_heads=4, num_key_value_heads=2, hidden_size=64, num_hidden_layers=3)
TOKEN_BYTES = 2 * 3 * 2 * 16 * 4


def config(**changes: Any) -> EngineConfig:
    return EngineConfig(model_path="m", max_model_len=32, kv_cache_bytes=TOKEN_BYTES * 40, threads=1, **changes)


def body(sampling: Sampling, prompt: tuple[int, ...] = (1, 2, 3), seed: int = 5) -> dict[str, Any]:
    request = GenerationRequest(request_id="r", prompt_token_ids=ids(*prompt), sampling=sampling, seed=seed)
    return generate_body(request, "7.", extra_eos=9, vocab_size=100, max_model_len=32)


def piece(new: list[int], *, ended: str | None = None, spans: Any = (), **meta: Any) -> dict[str, Any]:
    versions = {"weight_versions": [{"version": str(v), "start": s, "end": e} for s, e, v in spans]} if ended else {}
    reason = {"type": ended} if ended else None
    plain = {"finish_reason": reason, "prompt_tokens": 3, "output_token_logprobs": [[-0.5 * t, t, None] for t in new]}
    return {"output_ids": new, "meta_info": plain | versions | meta}


def response(sampling: Sampling | None = None, finder: StopFinder | None = None) -> Response:
    return Response(sampling=sampling or Sampling(max_tokens=8), finder=finder, begun_at=4)


def test_a_request_asks_for_its_room_its_stops_and_the_whole_distribution() -> None:
    asked = body(Sampling(max_tokens=50, stop_token_ids=(4, 9)), seed=SEED_RANGE + 3)
    params = asked["sampling_params"]
    assert (params["max_new_tokens"], params["stop_token_ids"], params["sampling_seed"]) == (29, [4, 9], 3)
    assert "top_k" not in params
    assert asked["return_sampling_mask"] is False


def test_requests_of_one_call_keep_their_own_settings() -> None:
    asked = [body(Sampling(max_tokens=4), (1, 2)), body(Sampling(max_tokens=5, top_k=3), (3,))]
    group = group_body(asked)
    assert group["input_ids"] == [[1, 2], [3]]
    assert group["return_sampling_mask"] == [False, True]
    assert group["sampling_params"] == [one["sampling_params"] for one in asked]


@pytest.mark.parametrize(
    ("sampling", "top_k"),
    [
        (Sampling(max_tokens=1, top_k=5), 5),
        (Sampling(max_tokens=1, top_k=500), 100),
        (Sampling(max_tokens=1, top_p=0.9), 100),
        (Sampling(max_tokens=1, min_p=0.1), 100),
    ],
)
def test_where_tokens_are_left_out_the_mask_brings_the_log_probs(sampling: Sampling, top_k: int) -> None:
    asked = body(sampling)
    assert asked["return_sampling_mask"] is True
    assert asked["sampling_params"]["top_k"] == top_k


def test_greedy_leaves_nothing_out() -> None:
    assert body(Sampling(max_tokens=1, temperature=0.0, top_k=5))["return_sampling_mask"] is False


def test_pieces_make_a_response_with_its_versions() -> None:
    found = response()
    assert [found.take(piece([7, 8])), found.take(piece([9], ended="length", spans=[(0, 2, 4), (2, 3, 5)]))] == [2, 1]
    completion = found.completion("r", "length")
    assert tokens(completion) == (7, 8, 9)
    assert completion.segment.logprobs.tolist() == [-3.5, -4.0, -4.5]
    assert completion.segment.version_spans == (VersionSpan(start=0, end=2, version=4), VersionSpan(start=2, end=3, version=5))


def test_the_mask_and_its_log_probs_are_taken() -> None:
    found = response(Sampling(max_tokens=8, top_k=2, returns_mask=True))
    extra = {"output_token_sampling_logprobs": [-0.1, -0.2], "output_token_sampling_mask": [[7, 1], [8]]}
    found.take(piece([7, 8], ended="length", spans=[(0, 2, 4)], **extra))
    segment = found.completion("r", "length").segment
    assert segment.logprobs == pytest.approx([-0.1, -0.2])
    assert segment.sampling_mask is not None
    assert (segment.sampling_mask.token_ids.tolist(), segment.sampling_mask.counts.tolist()) == ([7, 1, 8], [2, 1])


def test_what_comes_behind_a_stop_string_is_left_out_with_its_versions() -> None:
    found = response(finder=StopFinder(lambda all_ids: "".join(chr(96 + token) for token in all_ids), ["bc"]))
    found.take(piece([1, 2]))
    assert not found.stopped
    found.take(piece([3, 4]))
    assert found.stopped
    found.take(piece([5, 6], ended="abort", spans=[(0, 2, 4), (2, 4, 5), (4, 6, 6)]))
    completion = found.completion("r", "stop")
    assert tokens(completion) == (1, 2, 3)
    assert completion.segment.version_spans == (VersionSpan(start=0, end=2, version=4), VersionSpan(start=2, end=3, version=5))


def test_the_repeated_token_of_an_abort_in_the_queue_is_not_taken() -> None:
    found = response()
    found.take(piece([7, 8]))
    last = piece([8], ended="abort", spans=[(0, 2, 4)], completion_tokens=2)
    del last["meta_info"]["prompt_tokens"]
    assert found.take(last) == 0
    assert tokens(found.completion("r", "abort")) == (7, 8)


def test_the_repeated_token_is_not_taken_where_the_server_joined_it_with_the_piece_before() -> None:
    found = response()
    found.take(piece([7]))
    repeated = [[-0.5 * t, t, None] for t in (8, 9, 7, 8, 9)]
    last = piece([8, 9, 9], ended="abort", spans=[(0, 3, 4)], completion_tokens=3, output_token_logprobs=repeated)
    del last["meta_info"]["prompt_tokens"]
    assert found.take(last) == 2
    completion = found.completion("r", "abort")
    assert (tokens(completion), completion.segment.logprobs.tolist()) == ((7, 8, 9), [-3.5, -4.0, -4.5])


def test_answers_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(RuntimeFault, match="2 tokens, 1 log-probs"):
        response().take(piece([7, 8], output_token_logprobs=[[-1.0, 7, None]]))
    found = response()
    found.take(piece([7, 8], ended="length", spans=[(0, 1, 4)]))
    with pytest.raises(RuntimeFault, match="no weight versions for the 2 tokens of request r"):
        found.completion("r", "length")


def test_only_tokens_whose_version_is_known_are_salvaged() -> None:
    found = response()
    found.take(piece([7, 8]))
    saved = found.salvaged("r", 4)
    assert (tokens(saved), saved.segment.version_spans) == ((7, 8), (VersionSpan(start=0, end=2, version=4),))
    assert len(found.salvaged("r", 5).segment) == 0


def test_arguments_of_the_server() -> None:
    arguments = server_arguments(config(extra_args={"schedule_policy": "lpm"}), MODEL)
    words = command_line(arguments)
    assert arguments["max_total_tokens"] == 40
    assert words[words.index("--schedule-policy") + 1] == "lpm"
    assert "--disable-overlap-schedule" in words
    assert "--disable-radix-cache" not in words
    assert "--random-seed" not in words
    assert "--disable-radix-cache" in command_line(server_arguments(config(enable_prefix_caching=False), MODEL))


def test_options_as_words() -> None:
    given = {"a_b": [1, "x"], "c": {"d": 2}, "e": True, "f": False, "g": None, "h": 0.5}
    assert command_line(given) == ["--a-b", "1", "x", "--c", '{"d": 2}', "--e", "--h", "0.5"]


def test_a_cache_that_holds_no_request_is_refused_with_the_size_that_does() -> None:
    small = EngineConfig(model_path="m", max_model_len=32, kv_cache_bytes=TOKEN_BYTES * 37, threads=1)
    with pytest.raises(ModelError, match=rf"holds 37 tokens .* may have 32; write at least {TOKEN_BYTES * 38}"):
        server_arguments(small, MODEL)


@pytest.mark.parametrize(
    ("size", "model", "numbers"),
    [
        (2, {}, 2 * 1 * 16),
        (4, {}, 2 * 1 * 16),  # each of two heads on two devices
        (4, {"kv_lora_rank": 24, "qk_rope_head_dim": 8}, 24 + 8),
    ],
)
def test_the_cache_of_a_device_holds_what_sglang_keeps_there(size: int, model: dict[str, int], numbers: int) -> None:
    found = server_arguments(config(tensor_parallel_size=size), SimpleNamespace(**vars(MODEL), **model))
    assert found["max_total_tokens"] == TOKEN_BYTES * 40 // (3 * numbers * 4)


def test_a_bucket_travels_as_it_is() -> None:
    (bucket,) = plan_buckets([("a", "float32", (2, 3)), ("b", "bfloat16", (5,))], 10_000).buckets
    data = np.arange(bucket.size_bytes, dtype=np.uint8)
    sent = update_body(bucket, shared(data), 2, "12")
    assert (sent["weight_version"], sent["flush_cache"], len(sent["serialized_named_tensors"])) == ("12", False, 2)
    content = pickle.loads(base64.b64decode(sent["serialized_named_tensors"][1]))
    assert content["flattened_tensor"].numpy().tobytes() == data.tobytes()
    described = [(m.name, m.shape, m.dtype, m.start_idx, m.end_idx) for m in content["metadata"]]
    assert described == [("a", (2, 3), torch.float32, 0, 24), ("b", (5,), torch.bfloat16, 64, 74)]


OPENS_ONE_AFTER_THE_OTHER = """
import base64, json, pickle, sys
for each in json.load(sys.stdin):
    content = pickle.loads(base64.b64decode(each))  # and dropped before the next: nobody else holds the memory then
    print(content["flattened_tensor"].sum().item())
    del content
"""


def test_every_rank_can_open_a_bucket_after_the_others_have_let_go() -> None:
    (bucket,) = plan_buckets([("a", "float32", (4,))], 10_000).buckets
    data = shared(np.arange(bucket.size_bytes, dtype=np.uint8))
    sent = json.dumps(update_body(bucket, data, 4, "12")["serialized_named_tensors"])
    command = [sys.executable, "-c", OPENS_ONE_AFTER_THE_OTHER]
    opened = subprocess.run(command, input=sent, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert opened.stdout.split() == ["120"] * 4, opened.stderr
    assert data.sum().item() == 120


def test_the_stand_in_for_kernels_is_seen_where_cpu_cores_compute_alone() -> None:
    assert server_environment(2)["PYTHONPATH"] == str(CPU_KERNELS)
    assert server_environment(2)["OMP_NUM_THREADS"] == "2"
    assert "PYTHONPATH" not in server_environment(None)


def test_ranks_on_cpu_cores_run_without_nccl_and_have_their_cores_named() -> None:
    found = server_environment(1, ranks=2)
    assert not Path(found["SGLANG_NCCL_SO_PATH"]).exists()
    assert found["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"
    assert "SGLANG_NCCL_SO_PATH" not in server_environment(None, ranks=2)


def loaded_kernels() -> Any:
    spec = importlib.util.spec_from_file_location("stand_in", CPU_KERNELS / "sgl_kernel" / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_stand_in_writes_cache_places_and_refuses_everything_else() -> None:
    kernels = loaded_kernels()
    table = torch.zeros(3, 5, dtype=torch.int32)
    kernels.assign_req_to_token_pool_cpu(
        torch.tensor([2, 0]), table, torch.tensor([1, 0]), torch.tensor([3, 2]), torch.tensor([11, 12, 13, 14]), 5
    )
    assert table.tolist() == [[13, 14, 0, 0, 0], [0, 0, 0, 0, 0], [0, 11, 12, 0, 0]]
    with pytest.raises(NotImplementedError, match=r"sgl_kernel\.silu was called"):
        kernels.silu(1)


def test_with_the_stand_in_groups_of_one_process_share_gloos_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    group = torch.distributed.ProcessGroupGloo
    monkeypatch.setattr(group, "__init__", getattr(group.__init__, "__wrapped__", group.__init__))
    loaded_kernels()
    kept = [group(torch.distributed.HashStore(), 0, 1, timeout=timedelta(seconds=9)) for _ in range(3)]
    devices = [device for made in kept for device in made.options._devices]
    assert len(devices) == 3
    assert devices == devices[:1] * 3


def loaded_stand_in() -> Any:
    spec = importlib.util.spec_from_file_location("saver_stand_in", CPU_KERNELS / "torch_memory_saver" / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module.TorchMemorySaver()


def test_the_memory_savers_stand_in_frees_what_was_made_inside_and_counts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = tmp_path / "ledger"
    monkeypatch.setenv("RLJOB_MEMORY_LEDGER", str(ledger))
    saver, outside = loaded_stand_in(), torch.ones(8)
    with saver.region("weights", enable_cpu_backup=True):
        layer = torch.nn.Linear(16, 16, bias=False)
        gone = torch.ones(1000)
        del gone
        outside.add_(1)
    with saver.region("kv_cache"):
        cache = torch.ones(64)
    memory = LedgerMemory(ledger)
    full = {StateKind.KV_CACHE: 256, StateKind.PARAMS: 1024}
    assert memory.held(()) == full
    before, row = layer.weight.detach().clone(), layer.weight[3]
    saver.pause("weights")
    assert memory.held(()) == full | {StateKind.PARAMS: 0}
    saver.pause("kv_cache")
    assert (layer.weight.untyped_storage().nbytes(), cache.untyped_storage().nbytes()) == (0, 0)
    assert outside.tolist() == [2.0] * 8
    saver.resume("kv_cache")
    saver.resume("weights")
    assert memory.held(()) == full
    assert torch.equal(layer.weight, before)
    assert torch.equal(row, before[3])
    assert not cache.any()


def test_what_a_server_on_accelerators_holds_is_what_its_start_took() -> None:
    usage = {"weight": 1.5, "kvcache": 0.25, "graph": {}}
    memory = ReportedMemory({"tp_size": 2, "internal_states": [{"memory_usage": usage}]})
    assert memory.held(()) == {StateKind.KV_CACHE: 2**29, StateKind.PARAMS: 3 * 2**30}
    assert memory.held([StateKind.PARAMS]) == {StateKind.KV_CACHE: 2**29, StateKind.PARAMS: 0}


@pytest.mark.parametrize(("release", "saver", "backup"), [("never", False, False), ("discard", True, False), ("copy", True, True)])
def test_a_server_that_is_to_leave_starts_with_its_memory_saver(release: str, saver: bool, backup: bool) -> None:
    made = server_arguments(config(release=release), MODEL)
    assert (made["enable_memory_saver"], made["enable_weights_cpu_backup"]) == (saver, backup)
