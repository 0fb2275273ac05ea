"""The trainer on one device: step, log-probs and memory of each size, checkpoint, and how far two precisions are apart."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from bench.gpu_check import flops
from bench.gpu_check.estimate import Estimate, estimate
from bench.gpu_check.limits import file_rate, matmul_flops
from bench.gpu_check.lines import Line, at_most, equal, share, within
from bench.gpu_check.peak import peak_bytes
from bench.gpu_check.policy import batch, forget, host_free_bytes, policy, require
from bench.gpu_check.scale import Model, Scale
from bench.gpu_check.timing import median_s
from rljob_runtime.training.worker import PolicyWorker
from rljob_runtime.weightsync.probe import ProbeHistory, ProbeLimits, default_limits

TIGHT = 0.92
"""Share of a device's memory that an estimate may take: what lies outside torch's allocator and fragments need the rest."""
STATE_TOLERANCE = 0.02
PEAK_TOLERANCE = 0.10
CPU_PEAK_TOLERANCE = 0.35
"""At CPU size a step's few temporaries, which the estimate leaves out, are not small against the rest."""
MFU = {"train-0.5B": 0.20, "train-1.5B": 0.28, "train-3B": 0.30, "train-7B": 0.30, "adapters": 0.20, "mixture": 0.05}
"""Of the measured matrix product; a small model has small products and a large head. torchtitan: 33 to 39 % of the data sheet for 8B."""
FORWARD_MFU = {"mixture": 0.05}
"""The same of a log-prob pass, where it is not the default."""
DEFAULT_FORWARD_MFU = 0.30
PROBE_LENGTHS = 8


def check_of(index: int) -> Callable[[Scale], Iterator[Line]]:
    """The check of the size at that place of ``scale.models``."""

    def check(scale: Scale) -> Iterator[Line]:
        yield from _size(f"train-{scale.models[index].name}", scale.models[index], scale)

    return check


def check_adapters(scale: Scale) -> Iterator[Line]:
    """All lines of the second size with adapters."""
    yield from _size("adapters", scale.models[1], scale, adapters=True)


def check_mixture(scale: Scale) -> Iterator[Line]:
    """All lines of a mixture of experts."""
    yield from _size("mixture", scale.mixture, scale)


def _size(name: str, model: Model, scale: Scale, *, adapters: bool = False) -> Iterator[Line]:
    """All lines of one size; adapters alone if asked for, where the whole model does not fit, and for the largest at CPU size."""
    wanted = estimate(model, scale, lora=False)
    lora = adapters or (not fits(wanted, scale) if scale.on_cuda else model is scale.models[-1])
    if lora:
        wanted = estimate(model, scale, lora=True)
    if not fits(wanted, scale):
        require(wanted.peak_bytes, _total_bytes(scale), f"training {model.name} with adapters on {scale.device}")
    note = "" if not lora else "adapters alone are trained: all weights do not fit" if scale.on_cuda and not adapters else "adapters alone"
    with policy(model, scale, lora=lora, learning_rate=1e-5) as worker:
        yield from _steps(name, worker, scale, model, wanted, lora=lora, note=note)
    if scale.on_cuda and model is not scale.models[0]:
        forget(model, scale)


def _steps(name: str, worker: PolicyWorker, scale: Scale, model: Model, wanted: Estimate, *, lora: bool, note: str) -> Iterator[Line]:
    given = batch(scale, int(model.config["vocab_size"]))
    lengths = given.lengths.tolist()
    scale.begin("training steps, of which the first compiles")
    limit = matmul_flops(scale.device, scale.matrix, scale.dtype, scale.repeat)
    worker.train_step([given], 0)  # AdamW makes its moments
    state_bytes = worker.memory().allocated_bytes
    peak = peak_bytes(scale.device, lambda: worker.train_step([given], 0), state_bytes)
    seconds = median_s(scale.device, scale.repeat, lambda: worker.train_step([given], 0))
    reached = flops.per_step(wanted.shape, lengths, lora=lora) / seconds
    yield Line(check=name, what="training step", value=sum(lengths) / seconds, unit="tokens/s", note=note)
    yield share(
        name,
        "training step, MFU",
        reached / 1e12,
        "TFLOP/s",
        limit=limit / 1e12,
        limit_name="matrix product",
        at_least=scale.speed(MFU[name]),
    )
    gib = 2**30
    tolerance = PEAK_TOLERANCE if scale.on_cuda else CPU_PEAK_TOLERANCE
    estimated = "rljob plan's estimate"
    if not lora or scale.on_cuda:
        yield within(
            name,
            "weights and moments",
            state_bytes / gib,
            "GiB",
            expected=wanted.state_bytes / gib,
            expected_name=estimated,
            tolerance=STATE_TOLERANCE,
        )
    yield within(
        name,
        "peak of a training step",
        peak / gib,
        "GiB",
        expected=wanted.peak_bytes / gib,
        expected_name=estimated,
        tolerance=tolerance,
    )
    scale.begin("log-prob pass")
    forward_s = median_s(scale.device, scale.repeat, lambda: worker.compute_logprobs(given.token_ids, given.lengths, 1.0))
    yield share(
        name,
        "log-prob pass, MFU",
        flops.per_forward(wanted.shape, lengths) / forward_s / 1e12,
        "TFLOP/s",
        limit=limit / 1e12,
        limit_name="matrix product",
        at_least=scale.speed(FORWARD_MFU.get(name, DEFAULT_FORWARD_MFU)),
    )


def check_checkpoint(scale: Scale) -> Iterator[Line]:
    """The smallest size, written and read again after another step; the same log-probs, bit for bit."""
    model = scale.models[0]
    state_bytes = estimate(model, scale, lora=False).state_bytes
    require(2 * state_bytes, shutil.disk_usage(scale.folder).free, f"two checkpoints of {model.name} in {scale.folder}")
    folder = scale.folder / "checkpoint"
    with policy(model, scale, learning_rate=1e-3) as worker:
        given = batch(scale, int(model.config["vocab_size"]))
        worker.train_step([given], 0)
        before = worker.compute_logprobs(given.token_ids, given.lengths, 1.0)
        folder.mkdir()
        scale.begin("writing a checkpoint")
        started = time.perf_counter()
        worker.save_checkpoint(folder)
        saved_s = time.perf_counter() - started
        written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        worker.train_step([given], 1)
        moved = float(np.abs(worker.compute_logprobs(given.token_ids, given.lengths, 1.0) - before).max())
        scale.begin("reading the checkpoint")
        started = time.perf_counter()
        worker.load_checkpoint(folder)
        loaded_s = time.perf_counter() - started
        after = worker.compute_logprobs(given.token_ids, given.lengths, 1.0)
        shutil.rmtree(folder)
        folder.mkdir()
        scale.begin("writing a checkpoint beside training")
        for number in range(2):  # the second is copied into memory that is page-locked already
            (folder / str(number)).mkdir()
            started = time.perf_counter()
            worker.begin_checkpoint(folder / str(number))
            stopped_s = time.perf_counter() - started
            worker.train_step([given], 2 + number)
            worker.finish_checkpoint(scale.wait_s)
        worker.load_checkpoint(folder / "0")
        beside = worker.compute_logprobs(given.token_ids, given.lengths, 1.0)
    shutil.rmtree(folder)
    limit = file_rate(scale.folder, written)
    yield share(
        "checkpoint",
        f"written, {written / 2**30:.2f} GiB",
        written / saved_s / 1e9,
        "GB/s",
        limit=limit / 1e9,
        limit_name="one file, synced",
        at_least=scale.speed(0.4),
    )
    yield Line(check="checkpoint", what="read", value=written / loaded_s / 1e9, unit="GB/s")
    note = f"the step in between moved them by {moved:.2g}"
    differing = float(np.abs(after - before).max()) if moved > 0 else float("nan")
    yield equal("checkpoint", "log-probs after reading it", differing, note=note)
    yield Line(check="checkpoint", what="beside training: the trainer is stopped", value=stopped_s, unit="s")
    differing = float(np.abs(beside - before).max()) if moved > 0 else float("nan")
    yield equal("checkpoint", "log-probs after reading one written beside training", differing, note=note)


def check_switch(scale: Scale) -> Iterator[Line]:
    """The smallest size leaves the device with weights and moments, and comes back; the same log-probs, bit for bit."""
    from rljob_runtime.offload.states import StateKind

    model, kinds = scale.models[0], (StateKind.PARAMS, StateKind.OPTIMIZER)
    require(estimate(model, scale, lora=False).state_bytes, host_free_bytes(), f"the state of {model.name} in host memory")
    with policy(model, scale, learning_rate=1e-5) as worker:
        given = batch(scale, int(model.config["vocab_size"]))
        worker.train_step([given], 0)
        before = worker.compute_logprobs(given.token_ids, given.lengths, 1.0)
        there = worker.memory().allocated_bytes
        worker.reserve_offload(kinds)
        left = worker.offload(kinds)
        came = worker.load(kinds)
        after = worker.compute_logprobs(given.token_ids, given.lengths, 1.0)
    for report in (left, came):
        moved = sum(report.copied_bytes.values())
        yield Line(check="switch", what=f"trainer, {report.direction}", value=moved / report.elapsed_s / 1e9, unit="GB/s")
    gone = sum(left.freed_bytes.values()) / 2**30
    yield share("switch", "freed on the device", gone, "GiB", limit=there / 2**30, limit_name="what was there", at_least=0.9)
    yield equal("switch", "log-probs after coming back", float(np.abs(after - before).max()))


def check_probe(scale: Scale) -> Iterator[Line]:
    """Log-probs of the same weights in bfloat16 and float32: the noise that the probe of a weight sync has to live with."""
    model = scale.models[0]
    tokens, lengths = probe_tokens(scale, int(model.config["vocab_size"]))
    found = {}
    for dtype in ("bfloat16", "float32"):
        with policy(model, scale, trainable=False, activation_checkpointing=False, dtype=dtype) as worker:
            found[dtype] = worker.compute_logprobs(tokens, lengths, 1.0)
    given = np.ones(tokens.size, dtype=bool)
    given[np.cumsum(lengths) - lengths] = False
    yield from probe_lines("probe", found["float32"][given], found["bfloat16"][given], "bfloat16 against float32", dtype="bfloat16")


def probe_tokens(scale: Scale, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids of several sequences one after another, and their lengths."""
    each = scale.prompt_tokens + scale.response_tokens
    lengths = np.full(PROBE_LENGTHS, each // 2, dtype=np.int32)
    return np.random.default_rng(1).integers(2, vocab_size, size=int(lengths.sum()), dtype=np.int32), lengths


def probe_lines(check: str, wanted: np.ndarray, found: np.ndarray, what: str, *, dtype: str) -> Iterator[Line]:
    """Mean and tail as the probe of a job computes them, beside its limits for that type."""
    mean, tail = default_limits([dtype])
    history = ProbeHistory(ProbeLimits(mean=mean, tail=tail, fail_factor=float("inf")))
    report = history.test(0, wanted, {what: found})
    yield at_most(check, f"mean difference, {what}", report.mean, "nats", mean)
    yield at_most(check, f"95th percentile, {what}", report.tail, "nats", tail)
    yield Line(check=check, what=f"largest, {what}", value=report.largest, unit="nats")


def fits(wanted: Estimate, scale: Scale) -> bool:
    """Whether the estimate fits the device; at CPU size everything does."""
    return not scale.on_cuda or wanted.peak_bytes <= TIGHT * _total_bytes(scale)


def _total_bytes(scale: Scale) -> int:
    return int(torch.cuda.get_device_properties(scale.device).total_memory)
