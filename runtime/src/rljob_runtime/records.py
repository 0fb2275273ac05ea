"""The nouns that travel between the parts of the runtime, one place, no behavior.

Data flows one way::

    Prompt -> GenerationRequest -> Completion -> Trajectory -> TrainBatch

Who makes what: ``data`` makes prompts, ``overlap`` makes requests and trajectories, the engines make completions,
``rewards`` fills rewards in, ``overlap.batching`` makes train batches, the trainer consumes them.

Shape legend: ``T`` tokens of all sequences one after another, ``S`` sequences, ``R`` tokens of one segment.
Tokens are arrays everywhere, 8 bytes for a sampled one (id and log-prob); they pickle out of band, without a copy in the pickle. What
travels in numbers between processes is one array for many sequences (:mod:`rljob_runtime.packed`). Arrays may be views of a received
message and are read-only by convention.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from operator import attrgetter
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from rljob_runtime.routes import RouteArray
from rljob_runtime.sampling_mask import SamplingMask

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

OnRunning = Literal["recompute", "keep"]
"""What a weight update does to responses in progress: ``recompute`` their keys and values under the new weights (the next tokens are
sampled exactly as the new weights would), or ``keep`` the old ones (no work is repeated; the rest of the response mixes both weights)."""


class _Content:
    """Equality by content, that of arrays included; records of tokens are no keys."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        """Whether all fields are equal."""
        if type(other) is not type(self):
            return NotImplemented
        pairs = ((getattr(self, f.name), getattr(other, f.name)) for f in fields(self))  # type: ignore[arg-type]
        return all(np.array_equal(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else a == b for a, b in pairs)

    __hash__ = None  # type: ignore[assignment]


_Record = TypeVar("_Record")


def pickled_by_values(record: type[_Record]) -> type[_Record]:
    """A dataclass of which many travel at once, pickled as its values in order.

    What ``dataclass`` makes for frozen classes with slots asks for the fields of every instance again: 6 microseconds instead of 1.
    """
    names = tuple(field.name for field in fields(record))  # type: ignore[arg-type]
    values_of = attrgetter(*names)

    writers = tuple(getattr(record, name).__set__ for name in names)  # of the slots: past what refuses to write to a frozen object

    def restore(self: object, values: tuple[object, ...]) -> None:
        for write, value in zip(writers, values, strict=True):
            write(self, value)

    methods = {"__getstate__": lambda self: values_of(self), "__setstate__": restore}
    for name, method in methods.items():
        setattr(record, name, method)
    return record


@pickled_by_values
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Prompt(_Content):
    """One task to solve, tokenized once by the data source."""

    index: int
    """Position in the endless, seeded order of the source; unique within a run."""
    text: str
    token_ids: IntArray
    """Shape (n,)."""
    question: str = ""
    """The question alone, as the data has it."""
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


@pickled_by_values
@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How an engine samples tokens. The behavior log-probs it returns are those of this very distribution."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 switches the limit off."""
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    """Ends a response besides the model's own end-of-sequence token; the token stays in the response."""
    stop_strings: tuple[str, ...] = ()
    """End a response, with the token that completes one of them."""
    returns_mask: bool = False
    """Whether completions bring their sampling mask; needs ``top_k`` and a temperature above 0."""
    returns_routes: bool = False
    """Whether completions bring their routes; needs an engine that was started for it."""


@pickled_by_values
@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class GenerationRequest(_Content):
    """One stretch of tokens to sample."""

    request_id: str
    prompt_token_ids: IntArray
    """Shape (n,): all that comes before."""
    sampling: Sampling
    seed: int
    """Makes the sampled tokens a function of (weights, prompt, seed), whatever else the engine runs."""
    num_sampled_before: int = 0
    """The last so many tokens of the prompt are of this very response: a stop string may begin in them."""
    num_routed_before: int = 0
    """The routes of the first so many tokens of the prompt are known already, fewer than the prompt has; the completion begins after
    them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Tokens ``[start, end)`` of a segment were sampled under weights ``version``."""

    start: int
    end: int
    version: int


NO_LOGPROBS: FloatArray = np.zeros(0, dtype=np.float32)
"""Those of a given segment."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Segment(_Content):
    """R tokens in a row that one side wrote: sampled by the policy, or given to it (an environment's answer, a tool's output)."""

    token_ids: IntArray
    """Shape (R,); a sampled end-of-sequence token included."""
    sampled: bool
    """Whether the policy sampled them and is trained on them."""
    logprobs: FloatArray = field(default_factory=lambda: NO_LOGPROBS)
    """Shape (R,) where sampled: log-prob of each token under the behavior distribution (after temperature, top-k, top-p); (0,) else."""
    version_spans: tuple[VersionSpan, ...] = ()
    """Where sampled: contiguous, covering [0, R)."""
    reward: float | None = None
    """Earned by this segment, where an environment rewards steps; None: the trajectory's reward is all there is."""
    sampling_mask: SamplingMask | None = None
    """Of R positions, where the request asked for it."""
    routes: RouteArray | None = None
    """Shape (C, L, K), where the request asked for them: of the C tokens of its sequence that end before the segment's last one. C is
    more than R - 1 where it begins with tokens before the segment: those that the engine had not said earlier."""
    is_prompt: bool = False
    """Whether a given one does not continue what stands before it: what follows is a sequence of its own, which begins with it."""
    number: int = 0
    """Of a sampled one in an episode: how many actions came before it. Sequences of an episode need not follow each other in time."""

    def __len__(self) -> int:
        """R."""
        return self.token_ids.size


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Completion(_Content):
    """What an engine returns for one request."""

    request_id: str
    segment: Segment
    """Sampled; without tokens where it was aborted before the first."""
    finish_reason: str
    """``stop`` (end-of-sequence or stop token), ``length`` (max_tokens reached) or ``abort``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRequest:
    """One response to score, as text: what reward functions are given."""

    sample_id: str
    prompt: Prompt
    response_text: str
    finish_reason: str


@pickled_by_values
@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What a judge said of one response, and what that took."""

    reward: str
    """Name of the reward that asked."""
    text: str = ""
    """Its words; empty where it gave none."""
    error: str | None = None
    """Why there are none, in one line."""
    calls: int = 0
    """Requests sent; 0 where the answer was remembered."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    elapsed_s: float = 0.0
    """From the question until the answer: waiting for limits and retries included."""


@pickled_by_values
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
    """Of scoring processes."""
    judgements: tuple[Judgement, ...] = ()
    """Of its rewards that ask a judge."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of an episode, for the report and for advantages of turns."""

    observation: str
    """What the policy was shown last, as text."""
    action: str
    """What it sampled, decoded."""
    reward: float
    action_valid: bool
    """Whether the environment understood the action."""
    state_key: str | None = None
    """Equal for equal states in which the action was taken."""
    generation_s: float = 0.0
    """From the first request to an engine until the action was whole, pauses included."""
    environment_s: float = 0.0
    """From the action until its environment answered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRecord:
    """How an episode went; its tokens are the trajectory's."""

    turns: tuple[Turn, ...]
    stop: str
    """Why it ended, a word of ``environments.messages.StopReason``."""
    summary: Mapping[str, float]
    """The environment's numbers, such as ``success``."""
    environment_s: float
    """From each message to its environment until the reply, summed."""
    last_observation: str = ""
    """What the environment showed after the last action; no token of it is in the trajectory."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Trajectory(_Content):
    """A scored response or episode with all that training on it needs."""

    group_id: int
    """All samples of one prompt share it; groups are numbered in the order they were admitted."""
    sample_index: int
    prompt: Prompt
    segments: tuple[Segment, ...]
    """What follows the prompt: one sampled segment for a response, sampled and given ones for an episode, further prompts among them
    (``Segment.is_prompt``)."""
    finish_reason: str
    """Of the last sampled segment."""
    reward: RewardResult
    episode: EpisodeRecord | None = None
    """Of an agentic job."""
    generation_s: float = 0.0
    """From the first request to an engine until the response was whole, pauses included; of an episode summed over its turns."""

    @property
    def sequences(self) -> tuple[tuple[IntArray, tuple[Segment, ...]], ...]:
        """What is one sequence to the model: a prompt, and the segments until the next prompt."""
        if not any(segment.is_prompt for segment in self.segments):
            return ((self.prompt.token_ids, self.segments),)
        found: list[tuple[IntArray, tuple[Segment, ...]]] = []
        prompt, following = self.prompt.token_ids, list[Segment]()
        for segment in self.segments:
            if segment.is_prompt:
                found.append((prompt, tuple(following)))
                prompt, following = segment.token_ids, []
            else:
                following.append(segment)
        return (*found, (prompt, tuple(following)))

    @property
    def time_order(self) -> list[int]:
        """Places among the sampled segments, as they are written, in the order of time."""
        numbers = [segment.number for segment in self.segments if segment.sampled]
        return sorted(range(len(numbers)), key=numbers.__getitem__)

    @property
    def actions(self) -> list[Segment]:
        """Sampled segments in the order of time."""
        written = [segment for segment in self.segments if segment.sampled]
        return [written[place] for place in self.time_order]

    @property
    def num_tokens(self) -> int:
        """Tokens after the prompt."""
        return sum(segment.token_ids.size for segment in self.segments)

    @property
    def num_sampled(self) -> int:
        """Sampled tokens."""
        return sum(segment.token_ids.size for segment in self.segments if segment.sampled)

    @property
    def version_spans(self) -> tuple[VersionSpan, ...]:
        """Those of all segments; their places count within each."""
        return tuple(span for segment in self.segments for span in segment.version_spans)


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
    behavior_logprobs: FloatArray
    """Shape (T,): from the engine; 0 where the mask is 0."""
    advantages: FloatArray
    """Shape (T,): 0 where the mask is 0."""
    reference_logprobs: FloatArray | None = None
    """Shape (T,) when a reference policy is used."""
    teacher_logprobs: FloatArray | None = None
    """Shape (T,) when the loss has a term for the distance to a teacher."""
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
    routes: RouteArray | None = None
    """Shape (T, L, K): the engine's choices of experts, ``routes.NO_ROUTE`` where there is none; None: routers choose."""
    kl_coefficient: float | None = None
    """Weight of the KL term where it is adapted from step to step; None: the configured one. Without one there, no term."""
    temperature: float = 1.0
    """Sampling temperature: the trainer divides logits by it so that its log-probs match the behavior's."""
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
    """The fixed layout of a weight update, agreed once between trainer and engines.

    Every update names it to every engine, so that it is pickled once and read once in a process: a model has hundreds of tensors, a job
    tens of engines.
    """

    buckets: tuple[Bucket, ...]
    _pickled: list[bytes] = field(default_factory=list, init=False, repr=False, compare=False)
    """The buckets as they travel, once they have."""

    def __reduce__(self) -> tuple[Callable[[bytes], WeightManifest], tuple[bytes]]:
        if not self._pickled:
            self._pickled.append(pickle.dumps(self.buckets, protocol=pickle.HIGHEST_PROTOCOL))
        return _manifest, (self._pickled[0],)

    @property
    def total_bytes(self) -> int:
        """Bytes of one full update."""
        return sum(b.size_bytes for b in self.buckets)

    @property
    def tensor_names(self) -> frozenset[str]:
        """Every parameter an update carries."""
        return frozenset(s.name for b in self.buckets for s in b.slots)


@lru_cache(maxsize=4)
def _manifest(pickled: bytes) -> WeightManifest:
    """The manifest that traveled as these bytes."""
    return WeightManifest(buckets=pickle.loads(pickled))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One line of ``metrics.jsonl`` and one frame of the live display.

    Keys are ``group/name`` (``reward/mean``, ``time/generate_s``, ``sync/bytes``); see ``report.names``.
    """

    step: int
    version: int
    metrics: Mapping[str, float]
