"""rljob plan --simulate: cases worked out by hand, bounds, and recorded runs."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from bench import scale
from rljob_api.memory import shape_from_config, shape_from_count
from rljob_api.validation import check
from rljob_runtime.commands.cli import app
from rljob_runtime.errors import SetupError
from rljob_runtime.simulation import costs, measured
from rljob_runtime.simulation.devices import DEVICES
from rljob_runtime.simulation.findings import Refused, changes, find, lower_bounds_s
from rljob_runtime.simulation.layout import layout_of
from rljob_runtime.simulation.lengths import sigma_of
from rljob_runtime.simulation.measured import Measurement
from rljob_runtime.simulation.virtual_time import run_virtual
from rljob_runtime.simulation.world import DecodeStep
from tests.layout.tree import ROOT
from tests.unit.api.model_configs import CONFIGS, QWEN25_7B

QUICKSTART = ROOT / "examples" / "quickstart.yaml"
RECORDED = ROOT / "tests" / "data" / "overlap_recorded.json"
"""`python -m bench.overlap real` of steps of 0.9 s: real jobs with vLLM on two cores: mean seconds of the phases by ratio."""
TOLERANCE = 0.15


def job(**spec: object) -> dict[str, object]:
    base: dict[str, object] = {
        "nodeGroups": [{"name": "g", "nodes": 1, "devicesPerNode": 8}],
        "components": [
            {"name": "trainer", "role": "Trainer", "placement": {"ranks": "0-3"}},
            {"name": "engine", "role": "Rollout", "placement": {"ranks": "4-7"}, "engine": {"tensorParallelSize": 2}},
            {"name": "reward", "role": "Reward", "placement": {"workers": 1}},
        ],
        "model": {"path": "m", "dtype": "bfloat16", "parameterCount": 7_000_000_000},
        "data": {"train": [{"name": "p", "type": "JSONL", "jsonl": {"path": "p.jsonl"}}]},
        "rewards": [{"name": "r", "type": "Function", "function": "r:r"}],
        "rollout": {"promptsPerStep": 8, "samplesPerPrompt": 4, "maxPromptTokens": 128, "maxResponseTokens": 512},
        "training": {"steps": 10},
    }
    return {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "simulated"}, "spec": base | spec}


def made(document: dict[str, object], device: str = "H100") -> costs.Simulated:
    checked = check(document, runnable=False)
    shape = shape_from_count(checked.job.spec.model.parameter_count or 0)
    return costs.simulated(checked.job.spec, layout_of(checked.job.spec, checked.plan), shape, DEVICES[device], None)


def recorded(ratio: float) -> dict[str, float]:
    return next(run for run in json.loads(RECORDED.read_text())["runs"] if run["ratio"] == ratio and run["corrected"])


def of_recorded() -> Measurement:
    found = recorded(0)
    return Measurement(
        step_s=found["step_s"],
        generate_s=found["generate_s"],
        reward_s=found["reward_s"],
        train_s=found["train_s"],
        sync_s=found["sync_s"],
        stall_s=found["sync_s"],
        mean_tokens=3.5,  # of the quickstart; the record has no lengths
        longest_tokens=4.0,
        sequences=256.0,
    )


def quickstart(ratio: float) -> str:
    ahead = f"  overlap: {{asyncGenerationRatio: {ratio:g}, updateMode: InFlight}}\n"
    return QUICKSTART.read_text() + (ahead if ratio else "")


@pytest.mark.parametrize("ratio", [0.0, 1.0, 2.0])
def test_steps_of_recorded_runs_follow_from_the_phases_of_the_synchronous_one(ratio: float):
    alone, checked = check(quickstart(0), runnable=False), check(quickstart(ratio), runnable=False)
    ran_on = layout_of(alone.job.spec, alone.plan)
    world = measured.simulated(checked.job.spec, layout_of(checked.job.spec, checked.plan), of_recorded(), ran_on)
    assert find("", world).outcome.step_s == pytest.approx(recorded(ratio)["step_s"], rel=TOLERANCE)


def test_training_of_a_dense_model_by_hand():
    world = made(job()).world
    tokens = 128 + 256  # of a sequence: prompt and mean response
    by_response = 6 * 7e9 * tokens / 256 / (4 * 989e12 * 0.4)
    assert world.train_token_s == pytest.approx(by_response, rel=0.02)
    assert world.sync_s == pytest.approx(7e9 * 2 / 20e9)


@pytest.mark.parametrize(
    ("nodes", "size", "backend", "seconds"),
    [
        (2, 8, "Auto", 7e9 * 2 / 8.25e9),  # the rate of a sync
        (17, 8, "Auto", 7e9 * 2 / 8.25e9),  # a chain: as before
        (17, 4, "Auto", 7e9 * 2 / 8.25e9),  # two engines of a node have one copy
        (17, 4, "ObjectStore", 16 * 7e9 * 2 / 50e9),  # the sender's link carries a copy for each node
    ],
)
def test_weights_leave_the_sender_once_in_a_chain_and_once_for_each_node_through_the_object_store(
    nodes: int, size: int, backend: str, seconds: float
):
    components = [
        {"name": "trainer", "role": "Trainer", "placement": {"ranks": "0-7"}},
        {
            "name": "engine",
            "role": "Rollout",
            "placement": {"ranks": f"8-{8 * nodes - 1}"},
            "engine": {"tensorParallelSize": size},
        },
        {"name": "reward", "role": "Reward", "placement": {"workers": 1}},
    ]
    groups = [{"name": "g", "nodes": nodes, "devicesPerNode": 8}]
    world = made(job(nodeGroups=groups, components=components, weightSync={"backend": backend})).world
    assert world.sync_s + world.sync_hidden_s == pytest.approx(seconds)


def test_devices_that_share_sequences_exchange_them_and_move_together():
    spec = check(job(training={"steps": 10, "contextParallelSize": 4}), runnable=False)
    alone = check(job(), runnable=False)
    shape, h100 = shape_from_config(QWEN25_7B), DEVICES["H100"]
    shared, whole = (costs.simulated(one.job.spec, layout_of(one.job.spec, one.plan), shape, h100, None) for one in (spec, alone))
    moved = 28 * (2 * 3584 + 2 * 512) * 2 * 3 / 4  # queries, outputs, keys and values of a token, three quarters to others, forward
    exchange = 2 * moved / h100.link_bytes_per_s / 4 * (128 + 256) / 256
    assert shared.world.train_token_s - whole.world.train_token_s == pytest.approx(exchange, rel=1e-4)
    assert whole.layout.moved(1) is not None
    assert shared.layout.moved(1) is None, "two devices are left to the trainer"


def test_devices_that_share_experts_gather_fewer_and_exchange_rows():
    config = {
        **{"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4},
        **{"head_dim": 128, "vocab_size": 151_936, "intermediate_size": 6144, "num_experts": 128, "num_experts_per_tok": 8},
        **{"moe_intermediate_size": 768},
    }
    shape, h100 = shape_from_config(config), DEVICES["H100"]
    found = []
    for sizes in ({}, {"expertParallelSize": 4}, {"tensorParallelSize": 4}, {"expertParallelSize": 4, "tensorParallelSize": 4}):
        one = check(job(training={"steps": 10, "microBatchTokens": 1, **sizes}), runnable=False)
        found.append(costs.simulated(one.job.spec, layout_of(one.job.spec, one.plan), shape, h100, None))
    whole, shared, divided, both = found
    experts = 48 * 128 * 3 * 2048 * 768
    share = (128 + 256) / 256
    gathered = 2 * experts * 3 / 4 * 2 / h100.link_bytes_per_s / 4 * share  # twice, in bfloat16, of three others, over four devices' tokens
    moved = 2 * 2 * 48 * 8 * 2048 * 2 * 3 / 4 / h100.link_bytes_per_s / 4 * share  # there and back, forward and backward
    assert whole.world.train_token_s - shared.world.train_token_s == pytest.approx(gathered - moved, rel=0.01)
    assert whole.world.train_s > 5 * shared.world.train_s > 0
    assert shared.layout.moved(1) is None, "two devices are left to the trainer"
    assert divided.world.train_token_s > 3 * whole.world.train_token_s, "four devices gather experts for one micro-batch"
    assert divided.world.train_s == pytest.approx(4 * experts * 3 / 4 / h100.link_bytes_per_s, rel=1e-3)
    assert both.world.train_s == 0.0, "each device has its experts and its part of the rest"


def test_a_decoding_step_reads_weights_until_arithmetic_takes_longer():
    decode = made(job()).world.decode
    reading = 7e9 * 2 / (2 * 3.35e12 * 0.6)
    assert decode.seconds(1) == pytest.approx(reading + costs.STEP_S)
    assert decode.seconds(1000) == pytest.approx(1000 * 2 * 7e9 / (2 * 989e12 * 0.15))


def test_a_mixture_reads_the_experts_that_are_in_use():
    decode = DecodeStep(fixed_s=1.0, experts_s=16.0, routed_share=0.25)
    assert [decode.seconds(n) for n in (1, 2)] == [1 + 4, 1 + 16 * (1 - 0.75**2)]


@pytest.mark.parametrize(
    ("config", "of_a_token"),
    [
        (CONFIGS["deepseek_v3"], 3 * (24 + 8)),  # latents
        (QWEN25_7B | {"num_key_value_heads": 1}, 28 * 2 * 128),
    ],
)
def test_devices_that_share_a_layer_each_cache_latents_and_the_heads_that_they_share(config: dict[str, object], of_a_token: int):
    engines = {"tensorParallelSize": 2}, {"pipelineParallelSize": 2, "type": "VLLM"}
    cached = []
    for engine in engines:
        components = [
            {"name": "trainer", "role": "Trainer", "placement": {"ranks": "0-3"}},
            {"name": "engine", "role": "Rollout", "placement": {"ranks": "4-7"}, "engine": engine},
            {"name": "reward", "role": "Reward", "placement": {"workers": 1}},
        ]
        checked = check(job(components=components), runnable=False)
        layout = layout_of(checked.job.spec, checked.plan)
        assert layout.engine_devices == 2
        cached.append(costs.weights_of(shape_from_config(config), layout).cache_numbers)
    assert cached == [2 * of_a_token, of_a_token]


def test_shared_experts_are_read_and_gathered_by_every_device():
    checked = check(job(), runnable=False)
    weights = costs.weights_of(shape_from_config(CONFIGS["qwen2_moe"]), layout_of(checked.job.spec, checked.plan))
    hidden, sparse = CONFIGS["qwen2_moe"]["hidden_size"], CONFIGS["qwen2_moe"]["num_hidden_layers"] - 1
    assert weights.experts == sparse * 8 * 3 * hidden * 48
    assert weights.routed_share == 2 / 8


@pytest.mark.parametrize("ratio", [0, 1])
def test_no_step_is_shorter_than_its_bounds(ratio: int):
    found = find("", made(job(overlap={"asyncGenerationRatio": ratio})))
    bounds = lower_bounds_s(found.simulated, found.outcome)
    assert found.outcome.step_s >= 0.95 * max(bounds.values())  # a window begins and ends with responses under way
    assert max(found.outcome.staleness) <= ratio
    assert 0 <= found.outcome.trainer_idle_share < 1
    assert 0 <= found.outcome.engine_idle_share < 1


def test_devices_that_are_shared_take_turns():
    trainer = {"name": "trainer", "role": "Trainer", "placement": {"ranks": "0-3"}}
    engine = {"name": "engine", "role": "Rollout", "placement": {"ranks": "0-3"}}
    reward = {"name": "reward", "role": "Reward", "placement": {"workers": 1}}
    shared = made(job(components=[trainer, engine, reward], offload={"residency": "Switching"}))
    outcome = find("", shared).outcome
    assert shared.layout.shares_devices
    assert outcome.step_s > outcome.train_s + shared.world.sync_s + 2 * shared.world.switch_s
    assert shared.world.switch_s == pytest.approx(7e9 * 12 / 4 / 50e9)


def test_every_change_that_applies_is_tried_and_what_does_not_fit_is_refused():
    document = job(model={"path": "m", "dtype": "bfloat16", "parameterCount": 60_000_000_000})
    checked = check(document, runnable=False)
    spec, layout = checked.job.spec, layout_of(checked.job.spec, checked.plan)
    shape = shape_from_count(60_000_000_000)
    found = list(changes(spec, layout, lambda s, on: costs.simulated(s, on, shape, DEVICES["H100"], None), measured=False))
    assert [change.what for change in found] == [
        "overlap.asyncGenerationRatio 1",
        "2 devices more for generation",
        "2 devices fewer for generation",
        "engines of 4 devices",
        "engines of 1 device",
    ]
    (refused,) = [change for change in found if isinstance(change, Refused)]
    assert "120 GB" in refused.why
    assert "72 GB" not in refused.why or "H100" in refused.why


def test_a_faster_device_makes_no_step_longer():
    assert find("", made(job(), "H200")).outcome.step_s <= find("", made(job(), "A100")).outcome.step_s


def test_sigma_is_that_of_the_longest_response():
    assert sigma_of(mean=100, longest=100, count=256) == 0.0
    assert 0 < sigma_of(mean=100, longest=300, count=256) < sigma_of(mean=100, longest=600, count=256) <= 2


def test_a_mean_above_the_longest_is_refused():
    checked = check(job(), runnable=False)
    with pytest.raises(SetupError, match=r"600.*512"):
        costs.response_lengths(checked.job.spec, 600)


def test_the_command(tmp_path: Path):
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job()))
    shown = CliRunner().invoke(app, ["plan", str(file), "--simulate"])
    assert shown.exit_code == 0, shown.output
    assert "limited by generation and training take turns" in shown.output
    assert "overlap.asyncGenerationRatio 1" in shown.output
    written = json.loads(CliRunner().invoke(app, ["plan", str(file), "--simulate", "-o", "json", "--device-type", "H200"]).stdout)
    assert written["deviceType"] == "H200"
    assert written["stepSeconds"] == pytest.approx(find("", made(job(), "H200")).outcome.step_s)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--simulate", "--device-type", "H999"], "H999: not known"),
        (["--simulate", "--explain"], "leave --svg, --html and --explain out"),
        (["--device-type", "H100"], "no effect without --simulate"),
        (["--simulate", "--measured", "/nowhere"], "cannot be read"),
        (["--simulate", "-o", "yaml"], "take json"),
    ],
)
def test_senseless_options_are_refused(words: list[str], message: str, tmp_path: Path):
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(job()))
    shown = CliRunner().invoke(app, ["plan", str(file), *words])
    assert shown.exit_code == 2
    assert message in shown.output


def test_a_run_is_read_and_its_own_step_predicted(tmp_path: Path):
    phases = recorded(0)
    row = {f"time/{name}_s": phases[f"{name}_s"] for name in ("step", "generate", "reward", "train", "sync")}
    row |= {"time/score_s": 0.0, "response/mean_tokens": 3.5, "response/max_tokens": 4.0, "rollout/sequences": 256.0}
    rows = [{"step": step, "version": step, "wall_s": float(step), **row} for step in range(1, 5)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in rows))
    (tmp_path / "spec.yaml").write_text(quickstart(0))
    words = ["plan", str(QUICKSTART), "--simulate", "--measured", str(tmp_path), "-o", "json"]
    written = json.loads(CliRunner().invoke(app, words).stdout)
    assert written["measuredStepSeconds"] == phases["step_s"]
    assert written["stepSeconds"] == pytest.approx(phases["step_s"], rel=TOLERANCE)
    assert replace(of_recorded(), step_s=0.0) == replace(measured.read(tmp_path / "metrics.jsonl"), step_s=0.0)


def test_what_is_computed_in_a_thread_takes_no_virtual_time():
    async def main() -> tuple[float, str]:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(1.0, lambda: None)
        found = await asyncio.to_thread(str.upper, "done")
        timer.cancel()
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(divmod, 1, 0)
        return loop.time(), found

    assert run_virtual(main()) == (0.0, "DONE")


def test_the_page_of_sizes_is_what_the_simulation_computes():
    """Of its rows those that take a second; whole responses of thousands of tokens, which the scheduler scores in a thread."""
    page = scale.PAGE.read_text(encoding="utf-8").splitlines()
    for model in scale.MODELS:
        assert scale.rows(model, 8)[0] in page, "python -m bench.scale writes docs/scale.md"
