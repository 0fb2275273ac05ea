"""``engine.extraArgs`` and the installed vLLM: what its parser says of names and values, and that they reach its arguments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rljob_runtime.engine.vllm import arguments

PATIENCE_S = 1500.0
"""Two imports of vLLM, on a machine with other work; nothing here depends on how long they take."""

pytestmark = [pytest.mark.timeout(2 * PATIENCE_S)]

PATH = "spec.components[1].engine.extraArgs"
GIVEN = {
    "block_size": 64,
    "enable_chunked_prefill": False,
    "hf_overrides": {"rope_theta": 5.0},
    "allowed_media_domains": ["a.example", "b.example"],
    "max_num_batched_tokens": 4096,
}
BUILD = f"""
import json, sys
from rljob_runtime.engine.protocol import EngineConfig
from rljob_runtime.engine.vllm.arguments import parse
from rljob_runtime.engine.vllm.engine_args import engine_args
values, problems = parse("extraArgs", {GIVEN!r})
assert not problems, problems
built = engine_args(EngineConfig(model_path=sys.argv[1], max_model_len=512, extra_args=values))
print(json.dumps({{name: getattr(built, name) for name in [*{list(GIVEN)!r}, "max_model_len"]}}))
"""


def test_problems_are_reported_by_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "CHILD_TIMEOUT_S", PATIENCE_S)
    wrong = {"block_sise": 16, "kv_cache_dtype": "decimal", "max_num_batched_tokens": "many", "enable_chunked_prefill": "yes"}
    problems = [str(problem) for problem in arguments.problems_in_child(PATH, wrong | {"block_size": 64})]
    assert problems[0] == f"{PATH}.block_sise: 16: is not an argument of vLLM; did you mean block_size?"
    assert problems[1].startswith(f'{PATH}.kv_cache_dtype: "decimal": is refused by vLLM: argument --kv-cache-dtype: invalid choice')
    assert problems[2].startswith(f'{PATH}.max_num_batched_tokens: "many": is refused by vLLM')
    assert problems[3].startswith(f'{PATH}.enable_chunked_prefill: "yes": is')
    assert len(problems) == 4


@pytest.mark.slow
def test_values_reach_the_arguments_of_the_engine(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BUILD, str(tmp_path)]  # a folder: offline, vLLM looks a model's name up in the cache
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    assert json.loads(done.stdout.splitlines()[-1]) == GIVEN | {"max_model_len": 512}
