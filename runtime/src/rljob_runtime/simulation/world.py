"""What a simulated job is made of, and what came out. Data only; all times are virtual seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

UpdateMode = Literal["Drain", "Interrupt", "InFlight"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStep:
    """How long an engine takes for one token of every running response.

    ``max(fixed + experts * (1 - (1 - routed)^n) + n * cache, n * compute)`` for n responses: weights are read once for all of them, of a
    mixture the experts that some of their tokens are routed to; caches are read by each, and arithmetic grows with them.
    """

    fixed_s: float
    cache_s: float = 0.0
    compute_s: float = 0.0
    experts_s: float = 0.0
    """To read all experts."""
    routed_share: float = 0.0
    """Of the experts, by one token."""

    def seconds(self, running: int) -> float:
        """Of one step with so many responses, at least one."""
        experts_s = self.experts_s * (1 - (1 - self.routed_share) ** running) if self.experts_s else 0.0
        return max(self.fixed_s + experts_s + running * self.cache_s, running * self.compute_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One configuration."""

    groups_per_step: int
    samples_per_group: int
    num_engines: int
    slots: int
    """Responses that an engine generates at the same time."""
    max_tokens: int
    """Of a response."""
    decode: DecodeStep
    train_s: float
    """Of one step on the trainer, whatever is in it."""
    sync_s: float
    """From the end of training until every engine serves the new weights; engines generate nothing meanwhile."""
    recompute_token_s: float
    """Of one token of KV cache, which mode Interrupt computes again before the engine goes on."""
    reward_s: float
    """From the last response of a group to its scores."""
    ratio: float
    mode: UpdateMode
    steps: int
    warmup_steps: int
    """Left out of every figure."""
    max_staleness: int | None = None
    """None: the ratio, rounded up."""
    train_token_s: float = 0.0
    """Of one trained response token, on top of ``train_s``."""
    sync_hidden_s: float = 0.0
    """The part of a sync in which engines generate."""
    reward_sample_s: float = 0.0
    """Of one sample; samples are scored one after another."""
    prompt_tokens: float = 0.0
    prefill_token_s: float = 0.0
    """Of one token of a prompt, during which the engine generates nothing."""
    caches_prefixes: bool = True
    """A prompt is computed once for the samples that an engine has of it."""
    shares_devices: bool = False
    """Trainer and engines compute in turn."""
    switch_s: float = 0.0
    """Of each change between them."""

    @property
    def samples_per_step(self) -> int:
        """Q."""
        return self.groups_per_step * self.samples_per_group

    @property
    def total_slots(self) -> int:
        """Of all engines."""
        return self.num_engines * self.slots

    @property
    def token_s(self) -> float:
        """Of one token of a response that has an engine for itself."""
        return self.decode.seconds(1)


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a simulated run did after its warm-up."""

    step_s: float
    """Mean virtual seconds of a step."""
    step_times_s: list[float]
    staleness: list[int]
    """Per trained group: versions by which its oldest token was behind."""
    token_staleness_mean: float
    trained_groups: list[int]
    """Group numbers by training order, from the first step on."""
    trainer_idle_share: float
    """Of the steps' time, waiting for a batch."""
    engine_idle_share: float
    """Of the engines' time, without a response to work on, standing still for weights or for the trainer included."""
    slot_use_share: float
    """Slot-seconds that generated tokens which were trained, over all, at the pace of a single response."""
    running_mean: float
    """Responses that an engine works on while it generates."""
    train_s: float
    """Mean seconds of training in a step."""
    tokens_per_step: float
    """Trained response tokens."""
    longest_tokens: float
    """Mean over steps of the longest response."""
    dropped_groups: int
    requests: int
    """Responses sampled, warm-up included."""
    scheduler_cpu_s: float
    """Processor time of the whole run without that of the simulated engines: scheduler and event loop."""
