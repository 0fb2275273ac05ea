"""tools/gpu-check: every line at CPU size, with torch alone, and what makes a line pass or fail."""

import json
import math
import queue
import runpy
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from bench.gpu_check import checks, children, flops
from bench.gpu_check.__main__ import main, parse
from bench.gpu_check.checks import CHECKS, Check
from bench.gpu_check.children import Stage, messages
from bench.gpu_check.ending import CutOffError, limited
from bench.gpu_check.estimate import shape_of
from bench.gpu_check.lines import Line, Verdict, at_most, equal, exit_code, share, within
from bench.gpu_check.scale import GPU_MODELS, cpu
from bench.gpu_check.terminal import row
from tests.layout.tree import ROOT

NOT_HERE = ["pydantic", "transformers", "xxhash", "vllm", "rich"]
TORCH_ALONE = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({NOT_HERE!r}))  # None: not to be imported, and not found
sys.argv = ["gpu-check", "--only", "limits", "--only", "offload", "--only", "train-7B", "--only", "engine"]
runpy.run_path("tools/gpu-check", run_name="__main__")
"""


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        (share("c", "w", 90.0, "GB/s", limit=100.0, limit_name="l", at_least=0.85), Verdict.PASS),
        (share("c", "w", 84.0, "GB/s", limit=100.0, limit_name="l", at_least=0.85), Verdict.FAIL),
        (share("c", "w", 1.0, "GB/s", limit=100.0, limit_name="l", at_least=None), Verdict.PASS),
        (share("c", "w", 1.0, "GB/s", limit=0.0, limit_name="l", at_least=0.85), Verdict.FAIL),
        (within("c", "w", 11.0, "GiB", expected=10.0, expected_name="e", tolerance=0.11), Verdict.PASS),
        (within("c", "w", 8.0, "GiB", expected=10.0, expected_name="e", tolerance=0.1), Verdict.FAIL),
        (at_most("c", "w", 0.1, "nats", 0.08), Verdict.FAIL),
        (at_most("c", "w", math.nan, "nats", None), Verdict.FAIL),
        (equal("c", "w", 0.0), Verdict.PASS),
        (equal("c", "w", 1e-9), Verdict.FAIL),
        (Line(check="c", what="w", skipped="no vllm"), Verdict.SKIP),
        (Line(check="c", what="w", failed="RuntimeError"), Verdict.FAIL),
    ],
)
def test_a_line_is_its_value_against_its_bounds(line: Line, verdict: Verdict):
    assert line.verdict is verdict
    assert json.loads(json.dumps(line.as_document(), allow_nan=False))["verdict"] == verdict
    assert row(line)[0] == verdict


def test_only_what_was_measured_and_passed_is_a_success():
    passed, failed, skipped = equal("c", "w", 0.0), equal("c", "w", 1.0), Line(check="c", what="w", skipped="why")
    assert [exit_code(lines) for lines in ([passed, skipped], [passed, failed], [skipped], [])] == [0, 1, 1, 1]


def test_both_values_and_the_bound_are_shown():
    cells = row(share("offload", "load", 45.0, "GB/s", limit=50.0, limit_name="bare copies", at_least=0.85))
    assert cells == ("PASS", "offload", "load", "45 GB/s", "50 GB/s, bare copies", "90%", "at least 85%")


def test_operations_of_qwen_7b_by_hand():
    shape = shape_of(GPU_MODELS[-1])
    assert flops.matrix_parameters(shape) == pytest.approx(7.07e9, rel=0.001)
    length = 4096
    attention = 6 * 28 * 28 * 128 * length  # layers, query heads, head size
    assert flops.per_step(shape, [length, length], lora=False) / (2 * length) == pytest.approx(6 * 7.07e9 + attention, rel=0.001)
    assert flops.per_forward(shape, [length]) * 3 == pytest.approx(flops.per_step(shape, [length], lora=False))
    assert flops.per_step(shape, [length], lora=True) < flops.per_step(shape, [length], lora=False)


def test_a_check_that_breaks_is_a_failed_line_and_one_without_time_is_skipped(tmp_path, monkeypatch):
    scale = cpu(tmp_path)
    broken = Check(name="broken", entry="limits:file_rate", expected_s=1)  # takes another argument
    monkeypatch.setattr(checks, "_function", lambda check: lambda scale: (_ for _ in ()).throw(RuntimeError("out of memory")))
    (line,) = checks.run(broken, scale, time.monotonic(), is_last=True)
    assert line.verdict is Verdict.FAIL
    assert "out of memory" in line.failed
    monkeypatch.setattr(type(scale), "on_cuda", property(lambda self: True))
    (late,) = checks.run(broken, scale, time.monotonic(), is_last=False)
    assert late.verdict is Verdict.SKIP
    (tried,) = checks.run(broken, scale, time.monotonic(), is_last=True)
    assert tried.verdict is Verdict.FAIL


def test_what_is_cut_off_leaves_its_lines_and_says_what_was_under_way(tmp_path, monkeypatch, capsys):
    file = tmp_path / "out.json"
    seen: list[dict[str, object]] = []

    def endless(scale):
        yield equal("limits", "quick", 0.0)
        seen.append(json.loads(file.read_text()))
        scale.begin("compiling")
        seen.append(json.loads(file.read_text()))
        signal.raise_signal(signal.SIGALRM)  # as when the minutes are over

    monkeypatch.setattr(checks, "_function", lambda check: endless)
    assert main(["--only", "limits", "--only", "attention", "--minutes", "10", "--json", str(file)]) == 0
    assert [one["under_way"] for one in seen] == [
        {"check": "limits", "what": "what follows 'quick'"},
        {"check": "limits", "what": "compiling"},
    ]
    assert [[line["what"] for line in one["lines"]] for one in seen] == [["quick"], ["quick"]]  # before the check ended
    left = json.loads(file.read_text())
    assert "under_way" not in left
    quick, cut, not_begun = left["lines"]
    assert (quick["verdict"], cut["verdict"], not_begun["verdict"]) == ("PASS", "SKIP", "SKIP")
    assert cut["skipped"].startswith("cut off (--minutes); under way: compiling, ")
    assert (not_begun["check"], not_begun["skipped"]) == ("attention", "not begun (--minutes)")
    assert "compiling" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_the_minutes_end_what_waits():
    with pytest.raises(CutOffError, match="minutes"), limited(0.01, "minutes"):
        threading.Event().wait()


def test_a_signal_ends_it_with_what_was_measured(tmp_path, monkeypatch):
    def ended(scale):
        yield equal("limits", "quick", 0.0)
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(checks, "_function", lambda check: ended)
    assert main(["--only", "limits", "--json", str(tmp_path / "out.json")]) == 128 + signal.SIGTERM
    lines = json.loads((tmp_path / "out.json").read_text())["lines"]
    assert [line["what"] for line in lines] == ["quick", "cut off"]


def test_stages_of_a_process_are_reported_between_its_answers():
    results: queue.Queue[object] = queue.Queue()
    for message in (Stage("first"), 1, Stage("second"), Stage("third"), 2):
        results.put(message)
    stages: list[str] = []
    found = list(messages(None, [], results, count=2, timeout_s=0.0, what="c", begin=stages.append))
    assert (found, stages) == ([1, 2], ["first", "second", "third"])
    results.put(Stage("last"))
    with pytest.raises(TimeoutError, match="c: last: no answer within 0 s"):
        list(messages(None, [], results, count=1, timeout_s=0.0, what="c", begin=stages.append))


@pytest.mark.parametrize(
    "wrong",
    [["--only", "train-9B"], ["--minutes", "0"], ["--folder", "/nowhere"], ["--json", "/nowhere/x.json"], ["--markdown", "/nowhere/x.md"]],
)
def test_senseless_options_are_refused(wrong, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(wrong)
    assert ended.value.code == 2
    assert wrong[0] in capsys.readouterr().err


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide one from this process and those that it starts: everything then runs at CPU size."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def forked_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's server of a check starts without imports."""
    monkeypatch.setattr(children, "PRELOADED", [*children.PRELOADED, "tests.support.forked_workers.in_fork_server"])


@pytest.mark.slow
@pytest.mark.usefixtures("no_gpu", "forked_servers")
def test_every_line_at_cpu_size(tmp_path: Path, capsys):
    names = [check.name for check in CHECKS if not check.name.startswith(("engine", "sglang"))]
    files = ("--json", str(tmp_path / "out.json"), "--markdown", str(tmp_path / "out.md"), "--folder", str(tmp_path))
    code = main([*(word for name in names for word in ("--only", name)), *files])
    found = json.loads((tmp_path / "out.json").read_text())
    assert [line for line in found["lines"] if line["verdict"] != "PASS"] == []
    assert code == 0
    assert found["cpu_size"]
    assert list(dict.fromkeys(line["check"] for line in found["lines"])) == names
    assert "every line runs at CPU size" in capsys.readouterr().out
    assert (tmp_path / "out.md").read_text().count("| PASS |") == len(found["lines"])
    assert [path for path in tmp_path.iterdir() if path.stem != "out"] == []


@pytest.mark.usefixtures("no_gpu")
def test_torch_alone_is_enough_for_what_needs_no_more():
    done = subprocess.run([sys.executable, "-c", TORCH_ALONE], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for name, missing in (("offload", "pydantic"), ("train-7B", "pydantic, transformers, xxhash"), ("engine", "vllm")):
        (line,) = [text for text in done.stdout.splitlines() if text.startswith("SKIP") and f"  {name}" in text]
        assert missing in line
    assert "PASS  limits" in done.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("no_gpu", "forked_servers")
@pytest.mark.parametrize(("check", "engine"), [("engine", "vLLM"), ("sglang", "SGLang")])
def test_an_engine_sleeps_and_wakes_at_cpu_size(check: str, engine: str, tmp_path: Path):
    assert main(["--only", check, "--json", str(tmp_path / "out.json")]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    whats = [line["what"] for line in found["lines"]]
    assert any(f"{engine} against the trainer" in what for what in whats)
    assert any("waking up" in what for what in whats)


@pytest.mark.slow
@pytest.mark.usefixtures("no_gpu", "forked_servers")
def test_an_engine_samples_what_the_trainer_scores(tmp_path: Path):
    variants = [check.name for check in CHECKS if check.name.startswith("engine-")]
    assert main([*(word for name in variants for word in ("--only", name)), "--json", str(tmp_path / "out.json")]) == 0
    lines = json.loads((tmp_path / "out.json").read_text())["lines"]
    (accepted,) = [line["value"] for line in lines if line["what"].startswith("drafted tokens that were accepted")]
    assert accepted > 0
    assert {line["check"] for line in lines if line["verdict"] == "PASS"} == {"engine-plain", "engine-ngram"}
    assert {line["check"] for line in lines if line["skipped"]} == {"engine-fp8", "engine-async"}
    assert sum("against the trainer, as sampled" in line["what"] for line in lines) == 6


def test_the_entry_point_is_python_that_runs():
    assert runpy.run_path(str(ROOT / "tools" / "gpu-check"))["ROOT"] == ROOT
