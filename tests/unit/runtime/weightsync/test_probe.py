"""The probe's statistics: silent on healthy noise, loud on every tensor that did not arrive."""

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import Qwen2ForCausalLM

from rljob_runtime.errors import WeightSyncError
from rljob_runtime.weightsync.probe import ProbeHistory, ProbeLimits, default_limits
from rljob_runtime.weightsync.transports.object_store import ObjectStoreTransport
from tests.support.sync_setting import Setting
from tests.support.trainers import VOCAB, tiny_qwen2

Logprobs = npt.NDArray[np.float32]
SEQUENCES, TOKENS = 4, 64
"""Those of the default probe."""


def limits(dtype: str) -> ProbeLimits:
    mean, tail = default_limits([dtype])
    return ProbeLimits(mean=mean, tail=tail)


def healthy(random: np.random.Generator, size: int, degrees: float = 3.0, rms: float | None = None) -> Logprobs:
    """Differences as bfloat16 makes them: Student's t, of the published RMS, which changes from sync to sync."""
    scale = (random.uniform(0.031, 0.044) if rms is None else rms) / np.sqrt(degrees / (degrees - 2.0))
    return (random.standard_t(degrees, size) * scale).astype(np.float32)


@pytest.mark.parametrize("degrees", [2.5, 3.0, 5.0, 30.0])
@pytest.mark.parametrize("tokens", [36, 252])
def test_a_thousand_syncs_of_eight_healthy_engines_raise_no_alarm(tokens: int, degrees: float) -> None:
    random, history, zero = np.random.default_rng(7), ProbeHistory(limits("bfloat16")), np.zeros(tokens, dtype=np.float32)
    largest = 0.0
    for version in range(1000):
        report = history.test(version, zero, {f"engine-{i}": healthy(random, tokens, degrees) for i in range(8)})
        assert report.warnings == ()
        largest = max(largest, report.largest)
    assert largest > 0.15, "the limit that the largest difference had before"


def test_differences_of_float32_raise_no_alarm_and_a_thousandth_does() -> None:
    random, history, zero = np.random.default_rng(7), ProbeHistory(limits("float32")), np.zeros(252, dtype=np.float32)
    for version in range(1000):
        assert history.test(version, zero, {"engine-0": healthy(random, 252, rms=3e-6)}).warnings == ()
    with pytest.raises(WeightSyncError, match="more than 2 times what is allowed: the engine does not hold the trainer's weights"):
        history.test(1000, zero, {"engine-0": np.full(252, 1e-3, dtype=np.float32)})


def test_a_suspect_engine_is_warned_of_first_and_fails_when_it_stays_so() -> None:
    history, zero = ProbeHistory(limits("bfloat16")), np.zeros(252, dtype=np.float32)
    fine, odd = zero, np.full(252, 0.1, dtype=np.float32)
    for version, (answer, said) in enumerate([(odd, 1), (odd, 2), (fine, 0), (odd, 1), (odd, 2)]):
        report = history.test(version, zero, {"a": fine, "b": answer})
        assert [w.split("suspect ")[1] for w in report.warnings] == ([f"{said} of 3 times in a row"] if said else [])
    with pytest.raises(
        WeightSyncError, match=r"v5 b and the trainer disagree by 0\.1 nats .*, each counted as 0\.48 at most .* for the 3\. probe in a row"
    ):
        history.test(5, zero, {"a": fine, "b": odd})


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_no_number_fails_at_once(bad: float) -> None:
    answer = np.zeros(252, dtype=np.float32)
    answer[17] = bad
    with pytest.raises(WeightSyncError, match="engine-0"):
        ProbeHistory(limits("bfloat16")).test(1, np.zeros_like(answer), {"engine-0": answer})


def test_a_sixteenth_of_the_vocabulary_that_did_not_arrive_fails() -> None:
    random = np.random.default_rng(3)
    answer = healthy(random, 252)
    answer[random.permutation(252)[: 252 // 16]] += 2.0
    with pytest.raises(WeightSyncError, match="95th percentile"):
        ProbeHistory(limits("bfloat16")).test(1, np.zeros_like(answer), {"engine-0": answer})


def test_the_coarsest_type_of_trainer_and_engines_sets_the_limits() -> None:
    assert default_limits(["float32", "bfloat16"]) == default_limits(["float16"]) > default_limits(["float32"])


def logprobs(model: Qwen2ForCausalLM) -> Logprobs:
    tokens = torch.randint(VOCAB, (SEQUENCES, TOKENS), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        scores = model(tokens).logits.float().log_softmax(-1)
    return scores[:, :-1].gather(2, tokens[:, 1:, None]).flatten().numpy()


@pytest.fixture(scope="module")
def faulty() -> tuple[Logprobs, dict[str, Logprobs]]:
    """Log-probs of a bfloat16 model that says something, and of engines with each tensor skipped, and swapped with the next of its shape.

    What is skipped is what the model was before training moved every tensor by half its size.
    """
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(tiny_qwen2(initializer_range=0.25)).to(torch.bfloat16).eval()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            size = parameter.float().abs().mean() + (1.0 if not parameter.any() else 0.0)  # biases start at 0
            parameter += (torch.randn(parameter.shape) * 0.5 * size).to(torch.bfloat16)
    now = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    right, answers = logprobs(model), {}
    for what, changed in faults(now, before):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(changed.get(name, now[name]))
        answers[what] = logprobs(model)
    return right, answers


def faults(now: dict[str, torch.Tensor], before: dict[str, torch.Tensor]) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Each tensor skipped, and each swapped with the next of its shape: what the engine then has instead."""
    names = list(now)
    for index, name in enumerate(names):
        yield f"{name} skipped", {name: before[name]}
        other = next((n for n in names[index + 1 :] if now[n].shape == now[name].shape), None)
        if other is not None:
            yield f"{name} and {other} swapped", {name: now[other], other: now[name]}


def fails_within(history: ProbeHistory, wanted: Logprobs, answers: list[Logprobs]) -> bool:
    """Whether probes with these answers of an engine end the run."""
    try:
        for version, answer in enumerate(answers):
            history.test(version, wanted, {"engine": answer})
    except WeightSyncError:
        return True
    return False


@pytest.mark.parametrize(("dtype", "rms"), [("float32", 3e-6), ("bfloat16", None)])
def test_every_single_skipped_or_swapped_tensor_is_caught(
    dtype: str, rms: float | None, faulty: tuple[Logprobs, dict[str, Logprobs]]
) -> None:
    (wanted, answers), random = faulty, np.random.default_rng(5)
    assert ProbeHistory(limits(dtype)).test(0, wanted, {"engine": wanted + healthy(random, len(wanted), rms=rms)}).warnings == ()
    for what, answer in answers.items():
        difference = np.abs(answer - wanted)
        noisy = [answer + healthy(random, len(wanted), rms=rms) for _ in range(3)]
        found = f"{what}: mean {difference.mean():.3g}, 95th percentile {np.quantile(difference, 0.95):.3g}"
        assert fails_within(ProbeHistory(limits(dtype)), wanted, noisy), found
    assert len(answers) > 40


async def test_the_trainers_pass_is_awaited_from_its_start_which_ends_it_on_the_timeline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setting = Setting(ObjectStoreTransport, None)
    awaited: list[str] = []
    start = setting.training.start

    def watched(method: str, *args: Any) -> Any:
        call = start(method, *args)

        async def result(timeout_s: float) -> Any:
            awaited.append(method)
            return await call.result(timeout_s)

        return SimpleNamespace(result=result)

    try:
        await setting.publisher.publish(0)
        monkeypatch.setattr(setting.training, "start", watched)
        setting.publisher.expect()
        await asyncio.sleep(0)  # one pass of the event loop
        assert awaited == ["compute_logprobs"]
        assert await setting.publisher.probe(0) is not None
        assert awaited == ["compute_logprobs"]
    finally:
        setting.stop()
