"""The nouns that travel between the parts of the runtime, one place, no behaviour.

Data flows one way::

    Prompt -> GenerationRequest -> Completion -> Trajectory -> TrainBatch

Who makes what: ``data`` makes prompts, ``overlap`` makes requests and trajectories, the engines make completions,
``rewards`` fills rewards in, ``overlap.batching`` makes train batches, the trainer consumes them.

Shape legend: ``T`` tokens of all sequences one after another, ``S`` sequences, ``R`` response tokens of one sequence.
Everything here pickles cheaply: plain tuples for single sequences, flat numpy arrays for batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from rljob_runtime.sampling_mask import SamplingMask

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

OnRunning = Literal["recompute", "keep"]
"""What a weight update does to responses in progress: ``recompute`` their keys and values under the new weights (the next tokens are
sampled exactly as the new weights would), or ``keep`` the old ones (no work is repeated; the rest of the response mixes both weights)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One task to solve, tokenized once by the data source."""

    index: int
    """Position in the endless, seeded order of the source; unique within a run."""
    text: str
    token_ids: tuple[int, ...]
    answer: str
    """The reference answer as text; empty where the task verifies itself from ``metadata``."""
    source: str
    """Name of the data source entry it came from (``spec.data.train[].name``)."""
    own_tag: str | None = None
    """The entry's own tag (``jsonl.tagField``); None where the data source names none."""
    metadata: Mapping[str, object] = field(default_factory=dict)
    """What a verifier needs besides the answer (for reasoning-gym: the dataset entry)."""

    @property
    def tag(self) -> str:
        """What chooses its rewards: the entry's own tag, else the data source's name."""
        return self.source if self.own_tag is None else self.own_tag


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How an engine draws tokens. The behaviour log-probs it returns are those of this very distribution."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 switches the limit off."""
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    """Ends a response besides the model's own end-of-sequence token; the token stays in the response."""
    returns_mask: bool = False
    """Whether completions bring their sampling mask; needs ``top_k`` and a temperature above 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One response to draw."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    seed: int
    """Makes the sampled tokens a function of (weights, prompt, seed), whatever else the engine runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Response tokens ``[start, end)`` were sampled under weights ``version``."""

    start: int
    end: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What an engine returns for one request."""

    request_id: str
    token_ids: tuple[int, ...]
    """Length R, the end-of-sequence token included where one was sampled."""
    logprobs: tuple[float, ...]
    """Length R, log-prob of each sampled token under the behaviour distribution (after temperature, top-k, top-p)."""
    version_spans: tuple[VersionSpan, ...]
    """Contiguous, covering [0, R)."""
    finish_reason: str
    """``stop`` (end-of-sequence or stop token), ``length`` (max_tokens reached) or ``abort``."""
    sampling_mask: SamplingMask | None = None
    """Of the R tokens, where the request asked for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRequest:
    """One response to score."""

    sample_id: str
    prompt: Prompt
    response_text: str
    finish_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardResult:
    """The scores of one response."""

    sample_id: str
    score: float | None
    """Weighted sum of the rewards of its tag; None when one failed and its sample is dropped, then ``error`` says why."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """Unweighted score per reward name."""
    passed: bool = False
    """Whether the response counts as solved (score of the first applicable reward >= its pass threshold)."""
    error: str | None = None
    """One line: which reward, what it raised, or that it ran past its time limit; the last one where a score took its place."""
    errors: tuple[str, ...] = ()
    """Names of the rewards that raised, gave no number, or whose process died."""
    timeouts: tuple[str, ...] = ()
    """Names of the rewards that ran past their limit twice."""
    retries: int = 0
    """Times that it was tried once more because a reward ran past its limit."""
    elapsed_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """A scored response with all that training on it needs."""

    group_id: int
    """All samples of one prompt share it; groups are numbered in the order they were admitted."""
    sample_index: int
    prompt: Prompt
    response_text: str
    completion: Completion
    reward: RewardResult


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Sequences for one data-parallel rank and one optimizer update.

    Token arrays hold prompt then response of every sequence, sequences one after another.
    """

    token_ids: IntArray
    """Shape (T,)."""
    lengths: IntArray
    """Shape (S,): prompt plus response tokens of each sequence; sums to T."""
    response_mask: FloatArray
    """Shape (T,): 1 where a token was sampled by the policy and is trained, else 0."""
    behaviour_logprobs: FloatArray
    """Shape (T,): from the engine; 0 where the mask is 0."""
    advantages: FloatArray
    """Shape (T,): 0 where the mask is 0."""
    reference_logprobs: FloatArray | None = None
    """Shape (T,) when a reference policy is used."""
    proximal_logprobs: FloatArray | None = None
    """Shape (T,) when the trainer's own log-probs at the beginning of the step are the loss's old policy."""
    staleness: FloatArray | None = None
    """Shape (T,) when old log-probs are interpolated: by how many versions the token is older than the trainer."""
    values: FloatArray | None = None
    """Shape (T,) with a critic: its value before the token is sampled, at the beginning of the step."""
    returns: FloatArray | None = None
    """Shape (T,) with a critic: what the value should have been."""
    scores: FloatArray | None = None
    """Shape (S,): raw score of each sequence, where the loss asks for its sign."""
    sample_weights: FloatArray | None = None
    """Shape (S,): factor on each sequence's policy loss; None: all 1."""
    sampling_mask: SamplingMask | None = None
    """Of T positions where sampling left tokens out: log-probs are those among the tokens that could be sampled; None: among all."""
    kl_coefficient: float | None = None
    """Weight of the KL term where it is adapted from step to step; None: the configured one. Without one there, no term."""
    temperature: float = 1.0
    """Sampling temperature: the trainer divides logits by it so that its log-probs match the behaviour's."""
    global_tokens: int
    """Response tokens of this update over all ranks: the denominator of token means."""
    global_sequences: int
    """Sequences with at least one response token of this update over all ranks."""
    version: int
    """Weights version the trainer holds before this update."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSlot:
    """Where one parameter lies inside a packed bucket."""

    name: str
    """Hugging Face checkpoint name, as ``save_pretrained`` would write it."""
    dtype: str
    """torch dtype without the prefix, for example ``float32``."""
    shape: tuple[int, ...]
    offset_bytes: int
    """Multiple of 64 from the bucket's start."""
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """One packed piece of the weights: uint8, sent as a whole."""

    index: int
    size_bytes: int
    slots: tuple[TensorSlot, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """The fixed layout of a weight update, agreed once between trainer and engines."""

    buckets: tuple[Bucket, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of one full update."""
        return sum(b.size_bytes for b in self.buckets)

    @property
    def tensor_names(self) -> frozenset[str]:
        """Every parameter an update carries."""
        return frozenset(s.name for b in self.buckets for s in b.slots)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One line of ``metrics.jsonl`` and one frame of the live display.

    Keys are ``group/name`` (``reward/mean``, ``time/generate_s``, ``sync/bytes``); see ``report.names``.
    """

    step: int
    version: int
    metrics: Mapping[str, float]
