"""``python -m bench.scale``: 7B, 32B and 235B-A22B on 8 to 1,024 devices, simulated, as ``docs/scale.md``; a test compares it."""

from __future__ import annotations

import argparse
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rljob_api import memory
from rljob_api.errors import SpecInvalidError
from rljob_api.memory import shape_from_config
from rljob_api.validation import check
from rljob_runtime.commands.simulate_plan import device_peak, device_type, number
from rljob_runtime.simulation import costs
from rljob_runtime.simulation.findings import LIMITS, Finding, changes, find
from rljob_runtime.simulation.layout import layout_of

PAGE = Path(__file__).resolve().parents[1] / "docs" / "scale.md"
DEVICE = "H100"
DEVICE_MEMORY = "80Gi"
"""With it the plan knows whether a job fits, and the trainer when to reduce gradients."""
PROMPTS = {8: 32, 64: 64, 512: 256, 1024: 512}
"""Of a step, by devices."""
SAMPLES = 8
PROMPT_TOKENS, RESPONSE_TOKENS = 1024, 8192
WITH_CHANGES = 64
"""Devices for which one change at a time is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One size, as in its config.json."""

    name: str
    engine_devices: int
    config: dict[str, Any]


MODELS = (
    Model(name="7B", engine_devices=1, config={"model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18_944, "vocab_size": 152_064}),
    Model(name="32B", engine_devices=4, config={"model_type": "qwen3", "hidden_size": 5120, "num_hidden_layers": 64,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 25_600, "vocab_size": 151_936}),
    Model(name="235B-A22B", engine_devices=8, config={"model_type": "qwen3_moe", "hidden_size": 4096, "num_hidden_layers": 94,
        "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 12_288, "moe_intermediate_size": 1536,
        "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151_936}),
)  # fmt: skip
"""Qwen2.5-7B, Qwen3-32B and Qwen3-235B-A22B (config.json on their pages)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """What a job does so that it fits into the devices' memory, as a reader of the plan's advice would."""

    said: str
    training: dict[str, Any]
    in_turn: bool = False
    """Trainer and engines share all devices, also on several nodes."""
    lora: bool = False


_SMALL_PASSES = {"microBatchTokens": PROMPT_TOKENS + RESPONSE_TOKENS}
_LIGHT = {"optimizerStateDtype": "bfloat16", **_SMALL_PASSES}
SAVINGS = {
    ("32B", 8): Saving(said="moments in bfloat16, passes of one sequence", training=_LIGHT),
    ("235B-A22B", 8): Saving(
        said="LoRA, experts on 8 devices, passes of one sequence",
        training={"expertParallelSize": 8, **_SMALL_PASSES},
        lora=True,
    ),
    ("235B-A22B", 64): Saving(
        said="experts on 8 devices, moments in bfloat16, passes of one sequence",
        training={"expertParallelSize": 8, **_LIGHT},
        in_turn=True,
    ),
    ("235B-A22B", 512): Saving(said="experts on 8 devices", training={"expertParallelSize": 8}),
    ("235B-A22B", 1024): Saving(said="experts on 8 devices", training={"expertParallelSize": 8}),
}  # fmt: skip
"""By model and devices; the other jobs fit as they are."""
AS_IS = Saving(said="-", training={})
_SHARED = "in turn"


def job(model: Model, devices: int) -> dict[str, Any]:
    """On one node Trainer and engines in turn, on more of them a half each and one batch ahead, unless memory forbids that."""
    saving = SAVINGS.get((model.name, devices), AS_IS)
    apart = devices > 8 and not saving.in_turn
    trainer, engine = (f"0-{devices // 2 - 1}", f"{devices // 2}-{devices - 1}") if apart else (f"0-{devices - 1}",) * 2
    spec: dict[str, Any] = {
        "nodeGroups": [{"name": "gpus", "nodes": devices // 8, "devicesPerNode": 8, "deviceMemory": DEVICE_MEMORY}],
        "components": [
            {"name": "trainer", "role": "Trainer", "placement": {"ranks": trainer}},
            {"name": "engine", "role": "Rollout", "placement": {"ranks": engine}, "engine": {"tensorParallelSize": model.engine_devices}},
            {"name": "reward", "role": "Reward", "placement": {"workers": 8}},
        ],
        "model": {"path": f"models/{model.name}", "dtype": "bfloat16"} | ({"lora": {}} if saving.lora else {}),
        "data": {"train": [{"name": "prompts", "type": "JSONL", "jsonl": {"path": "prompts.jsonl"}}]},
        "rewards": [{"name": "reward", "type": "Function", "function": "rewards:score"}],
        "rollout": {
            "promptsPerStep": PROMPTS[devices],
            "samplesPerPrompt": SAMPLES,
            "maxPromptTokens": PROMPT_TOKENS,
            "maxResponseTokens": RESPONSE_TOKENS,
        },
        "training": {"steps": 100, "activationCheckpointing": True} | saving.training,
    }
    more = {"overlap": {"asyncGenerationRatio": 1, "updateMode": "InFlight"}} if apart else {"offload": {"residency": "Switching"}}
    return {"apiVersion": "rljob.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "scale"}, "spec": spec | more}


def rows(model: Model, devices: int) -> tuple[str, list[str]]:
    """The row of one configuration, and those of its changes."""
    kind, shape = device_type(DEVICE), shape_from_config(model.config)
    saving = SAVINGS.get((model.name, devices), AS_IS)
    try:
        checked = check(job(model, devices), runnable=False, shape_of=lambda _spec: shape)
    except SpecInvalidError as error:
        need = _device_needs(error)
        return f"| {model.name} | {devices} | {_SHARED} | {saving.said} |{' |' * 7} {need} | does not fit |", []
    spec, layout = checked.job.spec, layout_of(checked.job.spec, checked.plan)

    def make(changed: Any, on: Any) -> costs.Simulated:
        return costs.simulated(changed, on, shape, kind, None)

    found = find("as it is", make(spec, layout))
    peak = device_peak(memory.estimate(spec, checked.plan, shape))
    assert peak is not None, "the size of the model is given"
    how = _SHARED if layout.shares_devices else f"{layout.trainer_devices} + {layout.rollout_devices}"
    row = f"| {model.name} | {devices} | {how} | {saving.said} | {_cells(found)} | {peak[0] / 2**30:.0f} | {LIMITS[found.limit]} |"
    if devices != WITH_CHANGES:
        return row, []
    found_changes = [change for change in changes(spec, layout, make, measured=False) if isinstance(change, Finding)]
    return row, [
        f"| {model.name} | {change.what} | {number(change.outcome.step_s)} | {found.outcome.step_s / change.outcome.step_s:.2f} "
        f"| {LIMITS[change.limit]} |"
        for change in found_changes
    ]


def _device_needs(error: SpecInvalidError) -> str:
    """GiB that the refusal names, rounded up.

    Raises:
        SpecInvalidError: the job was refused for anything else.
    """
    found = re.search(r"needs ([0-9.]+) GiB of", str(error))
    if found is None:
        raise error
    return f"**{math.ceil(float(found[1]))}**"


def _cells(found: Finding) -> str:
    outcome, world = found.outcome, found.simulated.world
    figures = [number(value) for value in (outcome.step_s, outcome.train_s, world.sync_s, found.tokens_per_s, found.tokens_per_s_device)]
    return " | ".join([*figures, f"{outcome.trainer_idle_share:.0%}", f"{outcome.engine_idle_share:.0%}"])


def page() -> str:
    """The whole page."""
    base, changed = [], []
    for model in MODELS:
        for devices in PROMPTS:
            row, more = rows(model, devices)
            base.append(row)
            changed += more
    sizes = ", ".join(f"{m.name} ({shape_from_config(m.config).parameters / 1e9:.1f})" for m in MODELS)
    prompts = ", ".join(f"{count} on {devices:,}" for devices, count in PROMPTS.items())
    return "\n".join([*HEAD, *_about(sizes, prompts), *BASE, *base, *CHANGES, *changed, *TAIL, ""])


HEAD = [
    "# Scale",
    "",
    "What a job would take on devices that this project has not run on: `rljob plan job.yaml --simulate` runs the scheduler's own",
    "code, its staleness gate and its buffer, in virtual time over engines and a trainer that only take time. **Nothing on this page",
    "was measured on a GPU.** It is written by `python -m bench.scale`, and a test compares rows of it with what that computes.",
    "",
    "```",
    "rljob plan job.yaml --simulate                                  # on H100; --device-type H200, --mean-response 2000",
    "rljob plan job.yaml --simulate -o json",
    "rljob plan job.yaml --simulate --measured runs/first/summary.json     # seconds of a run of yours instead of arithmetic",
    "```",
    "",
]
COLUMNS = (
    "model", "devices", "Trainer + engines", "for memory",
    "step s", "training s", "sync s", "tokens/s", "a device", "trainer idle", "engines idle",
    "GiB", "limited by",
)  # fmt: skip
BASE = [f"| {' | '.join(COLUMNS)} |", "|---|---:|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---|"]
CHANGES = [
    "",
    "## One change at a time",
    "",
    f"Of the jobs on {WITH_CHANGES} devices.",
    "",
    "| model | change | step s | speed-up | limited by |",
    "|---|---|---:|---:|---|",
]
TAIL = [
    "",
    "## What it is made of",
    "",
    "Seconds follow from operations, bytes and the data sheets in `runtime/src/rljob_runtime/simulation/devices.py`; the formulas are",
    "in `costs.py` there. The fractions of peak that are reached are those that `mode: Auto` assumes: 40 % of the arithmetic in",
    "training, 15 % in decoding, 60 % of the memory's bandwidth, 20 GB/s and 8.25 GB/s of a weight sync inside and between nodes.",
    "Between nodes weights go along TCP's chain, which leaves the sender's node once, at the rate of one network card; a single",
    "connection may not fill a link of that rate, which was not measured. Through the object store they leave it once for each node",
    "with engines.",
    "Expect the order of things and what limits them, not seconds. Left out: rewards, validation, checkpoints, filters, redundant",
    "samples, episodes, failures.",
    "",
    "With `--measured` training, sync, rewards and the pace of engines are those of a synchronous run; the simulation adds what the",
    "scheduler makes of them. From the recorded phases of ratio 0, with steps of 0.9 s, it predicts that step and those of ratio 1 and 2",
    "within 15 % (`tests/unit/runtime/simulation/test_simulation.py`). Of steps of 0.5 s (`bench/results/overlap-real.md`), in which the",
    "work of the driver on the same two cores is a larger part, ratio 1 took 19 % longer and ratio 2 13 % longer than predicted.",
    "",
    "A simulation takes O(steps x (groups x samples x log(slots) + engines)) time, whatever the number of devices and the length of",
    "responses, which are simulated in at most 1,024 pieces; the memory estimate takes O(processes).",
]


def _about(sizes: str, prompts: str) -> list[str]:
    memory_gib = device_type(DEVICE).memory_bytes // 2**30
    return [
        f"Nodes of 8 {DEVICE}. Models, with billions of parameters: {sizes}. Prompts of a step by devices: {prompts};",
        f"{SAMPLES} samples each, prompts of {PROMPT_TOKENS:,} tokens, responses log-normal with a mean of {RESPONSE_TOKENS // 2:,}, cut",
        f"at {RESPONSE_TOKENS:,}. On one node Trainer and engines take turns and switch (`offload.residency: Switching`); on more each has",
        "a half, one batch ahead (`overlap.asyncGenerationRatio: 1`, `InFlight`), except as the column *for memory* says. Activations are",
        "recomputed, and with `deviceMemory` set the trainer reduces gradients after each micro-batch where whole ones do not fit.",
        "Tokens are response tokens. GiB is the fullest device by the estimate of *rljob plan*; of 235B-A22B on 8 devices it is what the",
        f"plan asks for when it refuses the job (**bold**, more than {memory_gib}), even with LoRA.",
        "",
    ]


def main() -> int:
    """Write the page."""
    argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__).parse_args()
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {PAGE.name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
