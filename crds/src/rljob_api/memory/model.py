"""What an estimate is made of. Data only; bytes throughout.

::

    Term ─┐  what one component keeps in one pool, with its arithmetic
    PhaseEstimate ─┐  all terms of one phase; their sum is what is needed
    PoolEstimate ─┐  one device, or one node's memory: all phases against its limit; stands for all pools in the same situation
    MemoryEstimate   the job
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from rljob_api.memory.shape import ModelShape


class Phase(StrEnum):
    """What a job does at a time; the values are for people."""

    START_UP = "start-up"
    """Models are loaded and sharded."""
    GENERATE = "generate"
    """Engines answer prompts."""
    SCORE = "score"
    """References and teachers compute log-probs."""
    JUDGE = "judge"
    """Judges and reward models score responses."""
    TRAIN = "train"
    """Forward and backward passes."""
    OPTIMIZER_STEP = "optimizer step"
    """AdamW updates the weights."""
    TRAIN_CRITIC = "train critic"
    """Forward and backward passes of the critic; on shared devices not while the policy has its own."""
    CRITIC_STEP = "critic's optimizer step"
    """AdamW updates the critic's weights."""
    WEIGHT_SYNC = "weight sync"
    """New weights travel to the engines."""


class Kind(StrEnum):
    """Sorts of state, as ``components[].offload`` tells them apart."""

    WEIGHT = "weight"
    """Parameters."""
    GRAD = "grad"
    """Gradients."""
    OPTIMIZER = "optimizer"
    """Optimizer states."""
    KV_CACHE = "kvCache"
    """Keys and values of running requests."""
    WORKSPACE = "workspace"
    """What exists while something is computed."""
    PROCESS = "process"
    """What a process has as long as it lives."""


class PoolKind(StrEnum):
    """What memory belongs to."""

    DEVICE = "device"
    """One accelerator."""
    NODE = "node"
    """One node, shared by its processes and by devices that only count."""
    HOST = "offloaded state on node"
    """What one node's processes may keep of state that left their devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What one process needs for one purpose."""

    kind: Kind
    name: str
    formula: str
    """The arithmetic in short, for example ``7.62B x 4 B / 16``."""
    num_bytes: int
    remedy: str = ""
    """What would make it smaller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A need of a component in a pool."""

    component: str
    need: Need
    processes: int = 1
    """Processes of the component in this pool; each has the need."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all processes together."""
        return self.need.num_bytes * self.processes


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseEstimate:
    """All that is in a pool during a phase, at its peak."""

    phase: Phase
    terms: tuple[Term, ...]

    @property
    def num_bytes(self) -> int:
        """Sum of the terms."""
        return sum(term.num_bytes for term in self.terms)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolEstimate:
    """One of several pools in the same situation: same group, same processes."""

    kind: PoolKind
    group: str
    count: int
    """How many pools are in this situation."""
    first: int
    """Lowest rank of them: of all devices, or of all nodes."""
    limit_bytes: int | None
    """Memory of one pool; None when the spec does not say."""
    limit_path: str
    """Field that says it, or would."""
    limit_text: str | None
    """As written."""
    phases: tuple[PhaseEstimate, ...]

    @property
    def peak(self) -> PhaseEstimate:
        """The phase that needs most; the latest of several."""
        return max(reversed(self.phases), key=lambda phase: phase.num_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCapacity:
    """What the KV cache of one engine holds."""

    component: str
    path: str
    """Path of the engine in the spec."""
    group: str
    kv_bytes: int
    """KV cache of one device; 0 when nothing is left for it."""
    formula: str
    bytes_per_token: int | None
    """Bytes of one token on one device; None where the model's sizes are not known."""
    block_tokens: int
    """Tokens are kept in blocks of this many."""
    full_tokens: int
    """Prompt and response at their longest."""
    mean_tokens: int
    """Prompt at its longest and half a response: what a running request holds on average, roughly."""
    wanted_sequences: int
    """Requests that should run at the same time in one engine."""

    @property
    def tokens(self) -> int | None:
        """Tokens that fit, in whole blocks."""
        return None if self.bytes_per_token is None else self.kv_bytes // (self.bytes_per_token * self.block_tokens) * self.block_tokens

    @property
    def full_sequences(self) -> int | None:
        """Requests of the longest kind that fit at the same time."""
        return None if self.tokens is None else self.tokens // (-(-self.full_tokens // self.block_tokens) * self.block_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedFraction:
    """Engines on one device that together want more of it than there is."""

    path: str
    """Field of the last of them."""
    value: float
    """Its memoryFraction."""
    group: str
    first: int
    """Rank of the first such device."""
    count: int
    fractions: tuple[tuple[str, float, int], ...]
    """Component, memoryFraction and number of engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """What a job needs, by distinct situation of its devices and nodes."""

    shape: ModelShape | None
    """None: nothing is known of the model, and only what needs no model is estimated."""
    pools: tuple[PoolEstimate, ...]
    """The fullest first, by share of the limit, those without a limit last."""
    capacities: tuple[KVCapacity, ...]
    shared_fractions: tuple[SharedFraction, ...] = ()
    notes: tuple[str, ...] = field(default=())
    """What was left out, in sentences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessNeeds:
    """What one process of a component needs, alone on its device."""

    active: frozenset[Phase]
    """When it computes."""
    states: tuple[Need, ...]
    """What it holds from its start on."""
    starting: tuple[Need, ...]
    """What it holds at the worst moment of its start."""
    working: Mapping[Phase, tuple[Need, ...]]
    """What comes on top while it is active."""
    host_starting: tuple[Need, ...] = ()
    """On an accelerator node: what its start takes of the node's own memory."""
    host_working: Mapping[Phase, tuple[Need, ...]] = field(default_factory=dict)
    """In the node's own memory, on top while it is active."""
    host_kept: tuple[Need, ...] = ()
    """In the node's own memory, beside any phase but the start: a copy of its state while a checkpoint is written, what it sent last."""
    carries_weights: bool = False
    """Whether new weights pass through its node's shared memory."""
    keeps_workspace: bool = False
    """Whether it keeps, while idle, what it took for its work, as PyTorch's caching allocator does on accelerators."""
    capacity: KVCapacity | None = None
