"""Make the model of examples/frozen-lake.yaml: it has learned the way over the ice, and then to doubt it.

Three phases on whole episodes. *Rule*: best actions. *Noise*: most actions replaced by one that is not the best. *Calibration*: short
nudges with fewer or more of those, until the share of played episodes that reach the goal lies in the aim. There is then reward to find in
most groups, and most is still to be gained; a model that was only taught to answer with some action would take thousands of updates.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedTokenizerBase, Qwen2ForCausalLM, Qwen2Tokenizer

from rljob_runtime.environments.frozen_lake import FrozenLake
from rljob_runtime.errors import ModelError
from rljob_runtime.tiny.folder import existing, torch_threads, write
from rljob_runtime.tiny.lake_corpus import ACTIONS, MAX_TURNS, PARAMETERS, Demonstration, demonstrations, response
from rljob_runtime.tiny.lake_play import Played, play
from rljob_runtime.tiny.model import model_config
from rljob_runtime.tiny.settings import FROZEN_LAKE, TinySize, TinySummary
from rljob_runtime.tiny.tokenizer import build_tokenizer
from rljob_runtime.tiny.warmstart import IGNORED_LABEL, Progress, make_optimizers, train_step

_FORMAT = 2
_NUM_SHOWN = 200
"""Maps whose texts the vocabulary is made from."""
_PROBE_SEED, _MEASURE_SEED = 10_000_000, 20_000_000
"""Maps that no demonstration has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeConfig:
    """How long and how noisily to train."""

    rule_steps: int = 200
    """Optimizer steps of the first phase."""
    noise_steps: int = 60
    batch_size: int = 64
    """Episodes per step."""
    num_demonstrations: int = 6000
    """Episodes of the first phase; half as many of each noise."""
    learning_rate: float = 6e-3
    """Peak of the first phase, with a linear warm-up over 50 steps; a sixth of it later."""
    best_share: float = 0.33
    """Share of best actions in the second phase."""
    aim: tuple[float, float] = (0.22, 0.26)
    """Share of played episodes that should reach the goal; outside of it the third phase nudges."""
    calibration_rounds: int = 10
    """Nudges at most."""
    calibration_steps: int = 8
    """Optimizer steps per nudge."""
    num_probed: int = 768
    """Episodes that are played before each nudge; 256 of them at most after the first phase."""
    num_measured: int = 1024
    """Episodes that are played at the end, on maps of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LakeReport:
    """What the warm start did."""

    rule_steps: int
    noise_steps: int
    """Steps of the second and third phase."""
    rule: Played
    """At the end of the first phase, the most likely actions."""
    sampled: Played
    """At the end, at temperature 1."""
    greedy: Played
    """At the end, the most likely actions."""


def make_lake(
    out_folder: Path,
    *,
    seed: int = 0,
    target_success: tuple[float, float] = (0.2, 0.28),
    config: LakeConfig | None = None,
    progress: Progress | None = None,
    num_threads: int | None = None,
) -> TinySummary:
    """See ``rljob_runtime.tiny.make_lake_model``; ``config`` overrides the warm start."""
    config = config or LakeConfig()
    described = [_FORMAT, FROZEN_LAKE, dict(PARAMETERS), seed, asdict(config), torch.__version__, transformers.__version__]
    fingerprint = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]
    if (finished := existing(out_folder, fingerprint)) is not None:
        return finished
    started = time.perf_counter()
    with torch_threads(num_threads), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        tokenizer = lake_tokenizer()
        model = Qwen2ForCausalLM(model_config(TinySize.TINY, tokenizer))
        report = warm_start_lake(model, tokenizer, config, seed=seed, progress=progress)
    low, high = target_success
    if not low <= report.sampled.success <= high:
        raise ModelError(
            f"tiny model: after the warm start {report.sampled.success:.3f} of {config.num_measured} played episodes reach the goal "
            f"(most likely actions: {report.greedy.success:.3f}), wanted {low:g} to {high:g}; take another seed (now {seed})"
        )
    summary = TinySummary(
        folder=out_folder,
        reused=False,
        fingerprint=fingerprint,
        task=FROZEN_LAKE,
        seed=seed,
        num_parameters=sum(p.numel() for p in model.parameters()),
        vocab_size=len(tokenizer),
        sampled_pass_rate=report.sampled.success,
        greedy_pass_rate=report.greedy.success,
        num_measured=config.num_measured,
        rule_steps=report.rule_steps,
        noise_steps=report.noise_steps,
        elapsed_s=time.perf_counter() - started,
    )
    write(out_folder, model, tokenizer, summary, {"parameters": dict(PARAMETERS), "warm_start": asdict(report)})
    return summary


def lake_tokenizer() -> Qwen2Tokenizer:
    """A token for each cell of the map, few for a response."""
    lake = FrozenLake(PARAMETERS)
    texts = [lake.reset(seed).observation + "\n" for seed in range(_NUM_SHOWN)]
    return build_tokenizer([*texts, *map(response, ACTIONS)], vocab_size=640)


def warm_start_lake(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, config: LakeConfig, *, seed: int, progress: Progress | None = None
) -> LakeReport:
    """Train ``model`` in place; the result is a function of the arguments (and of the number of torch threads)."""
    report = progress or (lambda _phase, _fraction: None)
    total = config.rule_steps + config.noise_steps + config.calibration_rounds * config.calibration_steps
    learner = _Learner(model, tokenizer, config, seed)
    model.train()
    corpus = demonstrations(tokenizer, count=config.num_demonstrations, turns=MAX_TURNS, best_share=None, seed=seed)
    learner.learn(corpus, config.rule_steps, lambda step: _rule_rate(config, step), lambda done: report("rule", done / total))
    maps = range(_PROBE_SEED, _PROBE_SEED + config.num_probed)
    rule = play(model, tokenizer, maps[:256], temperature=0.0, seed=seed)
    noise_steps, best_share = 0, config.best_share
    for number in range(config.calibration_rounds + 1):
        steps = config.calibration_steps if number else config.noise_steps
        report("noise" if number == 0 else "calibration", (config.rule_steps + noise_steps) / total)
        learner.learn(learner.noise(best_share, number), steps, lambda _step: config.learning_rate / 6)
        noise_steps += steps
        success = play(model, tokenizer, maps, temperature=1.0, seed=seed + number).success
        if config.aim[0] <= success <= config.aim[1]:
            break
        best_share = max(0.0, config.best_share + (0.15 if success < config.aim[0] else -0.15))
    maps = range(_MEASURE_SEED, _MEASURE_SEED + config.num_measured)
    sampled = play(model, tokenizer, maps, temperature=1.0, seed=seed)
    greedy = play(model, tokenizer, maps[:256], temperature=0.0, seed=seed)
    report("done", 1.0)
    model.eval()
    return LakeReport(rule_steps=config.rule_steps, noise_steps=noise_steps, rule=rule, sampled=sampled, greedy=greedy)


def _rule_rate(config: LakeConfig, step: int) -> float:
    return config.learning_rate * min(1.0, (step + 1) / 50) * (1 - 0.9 * step / config.rule_steps)


class _Learner:
    """Optimizers, and the order of the demonstrations."""

    def __init__(self, model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, config: LakeConfig, seed: int) -> None:
        self._model, self._tokenizer, self._config, self._seed = model, tokenizer, config, seed
        self._optimizers = make_optimizers(model)
        self._generator = random.Random(seed)

    def noise(self, best_share: float, number: int) -> list[Demonstration]:
        """Noisy episodes for one phase or nudge."""
        steps = self._config.calibration_steps if number else self._config.noise_steps
        count = max(1, min(self._config.num_demonstrations // 2, steps * self._config.batch_size))
        return demonstrations(self._tokenizer, count=count, turns=MAX_TURNS, best_share=best_share, seed=self._seed + 1 + number)

    def learn(
        self, corpus: Sequence[Demonstration], steps: int, rate: Callable[[int], float], report: Callable[[int], None] = lambda _done: None
    ) -> None:
        """Take ``steps`` steps."""
        batches = self._batches(corpus)
        for step in range(steps):
            train_step(self._model, self._optimizers, self._padded(next(batches)), rate(step))
            report(step + 1)

    def _batches(self, corpus: Sequence[Demonstration]) -> Iterator[list[Demonstration]]:
        """Without end: episodes of like length together, which costs little padding, in a random order."""
        size = self._config.batch_size
        while True:
            shuffled = self._generator.sample(corpus, len(corpus))
            for start in range(0, len(shuffled), 4 * size):
                part = sorted(shuffled[start : start + 4 * size], key=lambda made: len(made.ids))
                starts = list(range(0, len(part), size))
                self._generator.shuffle(starts)
                yield from (part[first : first + size] for first in starts)

    def _padded(self, batch: Sequence[Demonstration]) -> tuple[torch.Tensor, torch.Tensor]:
        """(input ids, labels), both (B, L) int64, padded behind."""
        width, pad = max(len(made.ids) for made in batch), int(self._tokenizer.pad_token_id)
        ids = [[*made.ids, *[pad] * (width - len(made.ids))] for made in batch]
        labels = [
            [token if learned else IGNORED_LABEL for token, learned in zip(made.ids, made.labeled, strict=True)]
            + [IGNORED_LABEL] * (width - len(made.ids))
            for made in batch
        ]
        return torch.tensor(ids), torch.tensor(labels)
