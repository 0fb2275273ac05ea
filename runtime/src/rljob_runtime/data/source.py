"""The endless, seeded stream of prompts.

Each source is reshuffled every epoch; sources are mixed by weight. The order is a function of (sources, format,
tokenizer, seed) alone: how ``next`` calls are cut does not matter, and ``restore(state())`` continues exactly.

Work is done in chunks ahead of demand (rendering and tokenizing many prompts at once is several times cheaper), so the
state is kept at the last prompt *handed out*, never at the last one prepared.
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Protocol

import numpy as np

from rljob_runtime.data import jsonl, parquet
from rljob_runtime.data.config import FileSource, ParquetSource, PromptFormat, ReasoningGymSource, SourceConfig, check_sources
from rljob_runtime.data.encode import PromptEncoder
from rljob_runtime.data.reasoning_gym_source import ReasoningGymRows
from rljob_runtime.data.rows import Row
from rljob_runtime.errors import DataError
from rljob_runtime.records import IntArray, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHUNK = 64
MAX_CACHED_BYTES = 8 * 2**20
"""What a source keeps of its encoded prompts for the next epoch: thousands of short ones, 100 of 8k tokens. What does not fit is encoded
again."""
_OBJECT_BYTES = 1_500
"""Of a kept prompt besides text and tokens: its row with the task's entry, about, and the objects around it."""
_MAX_DROPPED_AT_START = 2_000
_STATE_VERSION = 1


class Rows(Protocol):
    """The questions of one source, unshuffled."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Row: ...


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Encoded:
    """A row ready to be handed out."""

    row: Row
    text: str
    token_ids: IntArray

    @property
    def num_bytes(self) -> int:
        """Memory that it takes, about."""
        return _OBJECT_BYTES + len(self.text) + len(self.row.question) + int(self.token_ids.nbytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Position:
    """Where one source stands after a prompt was handed out."""

    epoch: int = 0
    cursor: int = 0
    """Entries of the epoch's order already visited."""
    emitted: int = 0
    dropped: int = 0
    """Visited entries left out because they were too long, over all epochs."""


@dataclass(slots=True)
class _Stream:
    """One source: its shuffled order, chunked encoding and length filter."""

    config: SourceConfig
    rows: Rows
    encoder: PromptEncoder
    seed: int
    max_prompt_tokens: int
    announce: Callable[[str], None]
    is_announced: bool = False
    """Whether it was said that prompts are left out."""
    position: _Position = field(default_factory=_Position)
    """After the last prompt handed out."""
    _ahead: _Position = field(default_factory=_Position)
    """After the last prompt prepared."""
    _ready: deque[tuple[_Encoded, _Position]] = field(default_factory=deque)
    _cache: dict[int, _Encoded] = field(default_factory=dict)
    cached_bytes: int = 0
    """Of encoded prompts that are kept for the next epoch."""
    _order: tuple[int, np.ndarray] | None = None
    """(epoch, permutation of the row indexes), kept for the epoch in work."""

    def take(self) -> _Encoded:
        """Hand out the next prompt that fits."""
        while not self._ready:
            self._prepare()
        encoded, self.position = self._ready.popleft()
        return encoded

    def has_unseen(self) -> bool:
        """Whether a prompt of the first epoch is left; of a stream of which no later ones were taken."""
        while not self._ready and self._ahead.epoch == 0:
            self._prepare()
        return bool(self._ready)

    def move_to(self, position: _Position) -> None:
        """Continue after ``position``."""
        self.position = self._ahead = position
        self._ready.clear()

    def _prepare(self) -> None:
        ahead = self._ahead
        epoch, cursor, emitted, dropped = ahead.epoch, ahead.cursor, ahead.emitted, ahead.dropped
        indexes = self._epoch_order(epoch)[cursor : cursor + _CHUNK].tolist()
        for encoded in self._encode(indexes):
            cursor += 1
            if len(encoded.token_ids) > self.max_prompt_tokens:
                dropped += 1
                if emitted == 0:
                    self._check_not_all_dropped(dropped)
                self._announce_dropped(len(encoded.token_ids))
                continue
            emitted += 1
            # The end of an epoch is the start of the next: one spelling of each position.
            after = (epoch + 1, 0) if cursor == len(self.rows) else (epoch, cursor)
            self._ready.append((encoded, _Position(epoch=after[0], cursor=after[1], emitted=emitted, dropped=dropped)))
        if cursor == len(self.rows):
            if epoch == 0 and dropped:
                self.announce(
                    f"data source {self.config.name!r}: {dropped} of {len(self.rows)} prompts are left out: they are {self._too_long}"
                )
            epoch, cursor = epoch + 1, 0
        self._ahead = _Position(epoch=epoch, cursor=cursor, emitted=emitted, dropped=dropped)

    @property
    def _too_long(self) -> str:
        return f"longer than rollout.maxPromptTokens ({self.max_prompt_tokens} tokens)"

    def _announce_dropped(self, num_tokens: int) -> None:
        """Say once that prompts are left out; how many is known at the end of the first epoch."""
        if not self.is_announced:
            self.is_announced = True
            self.announce(f"data source {self.config.name!r}: a prompt of {num_tokens} tokens is left out: it is {self._too_long}")

    def _check_not_all_dropped(self, dropped: int) -> None:
        """Raise DataError once a whole epoch, or very many prompts from the start on, were too long."""
        if dropped >= min(len(self.rows), _MAX_DROPPED_AT_START):
            raise DataError(
                f"data source {self.config.name!r}: all of its first {dropped} prompts are {self._too_long}; "
                "raise it or use shorter prompts"
            )

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, np.random.default_rng([self.seed, epoch]).permutation(len(self.rows)))
        return self._order[1]

    def _encode(self, indexes: Sequence[int]) -> list[_Encoded]:
        missing = [i for i in indexes if i not in self._cache]
        rows = [self.rows[i] for i in missing]
        texts = self.encoder.encode(rows)
        fresh = {
            i: _Encoded(row=row, text=text, token_ids=token_ids) for i, row, (text, token_ids) in zip(missing, rows, texts, strict=True)
        }
        result = [fresh[i] if i in fresh else self._cache[i] for i in indexes]
        for index, encoded in fresh.items():
            if self.cached_bytes + encoded.num_bytes <= MAX_CACHED_BYTES:
                self._cache[index] = encoded
                self.cached_bytes += encoded.num_bytes
        return result


class PromptSource:
    """An endless, seeded stream of prompts from weighted sources."""

    def __init__(
        self,
        sources: Sequence[SourceConfig],
        tokenizer: PreTrainedTokenizerBase,
        *,
        seed: int,
        max_prompt_tokens: int,
        prompt_format: PromptFormat | None = None,
        announce: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Open every source; ``announce`` gets lines about prompts that are left out, and how many there are in the first epoch.

        Raises DataError for unusable sources, files, tasks or templates. Prompts of more than ``max_prompt_tokens`` are
        left out and counted in ``dropped_too_long``; when that leaves none, ``next`` raises DataError.
        """
        if max_prompt_tokens < 1:
            raise DataError(f"data: max_prompt_tokens is {max_prompt_tokens}; it must be at least 1")
        check_sources(tuple(sources))
        prompt_format = prompt_format or PromptFormat()
        encoder = PromptEncoder(tokenizer, prompt_format)
        self._fingerprint = _fingerprint(sources, seed=seed, max_prompt_tokens=max_prompt_tokens, prompt_format=prompt_format)
        self._streams: list[_Stream] = []
        for source in sources:
            own_seed = _derived_seed(seed, source.name)
            rows = open_rows(source, own_seed)
            stream = _Stream(
                config=source, rows=rows, encoder=encoder, seed=own_seed, max_prompt_tokens=max_prompt_tokens, announce=announce
            )
            self._streams.append(stream)

    def next(self, count: int) -> list[Prompt]:
        """Return the next ``count`` prompts of the order. Raises DataError when a source has only too long ones."""
        return [self._next_one(self._streams) for _ in range(count)]

    def once(self, count: int) -> list[Prompt]:
        """The first ``count`` prompts of the order, each entry at most once; not to be mixed with :meth:`next`.

        Raises DataError when a source has only too long ones.
        """
        prompts: list[Prompt] = []
        while len(prompts) < count and (left := [stream for stream in self._streams if stream.has_unseen()]):
            prompts.append(self._next_one(left))
        return prompts

    @property
    def num_prompts(self) -> int:
        """Prompts of all sources, too long ones included."""
        return sum(len(s.rows) for s in self._streams)

    @property
    def fingerprint(self) -> str:
        """Identifies the order of prompts: sources, their content, seed, template and prompt limit."""
        return self._fingerprint

    @property
    def dropped_too_long(self) -> int:
        """Prompts passed over so far because they were too long; one is counted again each epoch."""
        return sum(s.position.dropped for s in self._streams)

    @property
    def cached_bytes(self) -> int:
        """Memory of the encoded prompts that are kept for the next epoch, about; bounded for each source."""
        return sum(s.cached_bytes for s in self._streams)

    def state(self) -> dict[str, object]:
        """Return the position as JSON-ready values; ``restore`` continues exactly after it."""
        return {
            "version": _STATE_VERSION,
            "fingerprint": self._fingerprint,
            "streams": {s.config.name: asdict(s.position) for s in self._streams},
        }

    def restore(self, state: Mapping[str, object]) -> None:
        """Continue after ``state``.

        Raises DataError when the state is of another format or of other data (sources, sizes, seed, template).
        """
        if state.get("version") != _STATE_VERSION:
            raise DataError(
                f"data: the saved sampler state has version {state.get('version')!r}, this release reads {_STATE_VERSION}; start without it"
            )
        if state.get("fingerprint") != self._fingerprint:
            raise DataError(
                "data: the saved sampler state belongs to other data (sources, parameters, seed, template or prompt limit differ); "
                "restore spec.data as it was, or start a new run"
            )
        streams = state.get("streams")
        if not isinstance(streams, Mapping) or set(streams) != {s.config.name for s in self._streams}:
            raise DataError("data: the saved sampler state is damaged: its streams are not those of the sources; use an older checkpoint")
        for stream in self._streams:
            stream.move_to(_position(streams[stream.config.name]))

    def _next_one(self, streams: Sequence[_Stream]) -> Prompt:
        # Largest deficit first: after n prompts every source is within one of its exact share, with no random state to save.
        index = sum(s.position.emitted for s in self._streams)
        total = sum(s.config.weight for s in self._streams)
        stream = max(streams, key=lambda s: s.config.weight / total * (index + 1) - s.position.emitted)
        encoded = stream.take()
        return Prompt(
            index=index,
            text=encoded.text,
            question=encoded.row.question,
            token_ids=encoded.token_ids,
            answer=encoded.row.answer,
            source=stream.config.name,
            own_tag=encoded.row.tag,
            metadata=encoded.row.metadata,
        )


def tags_of(source: SourceConfig, rows: Rows) -> frozenset[str]:
    """Every tag that a source's prompts have."""
    if isinstance(source, FileSource) and source.tag_field is not None:
        return frozenset(row.tag for row in (rows[i] for i in range(len(rows))) if row.tag is not None)
    return frozenset({source.name})


def open_rows(source: SourceConfig, seed: int) -> Rows:
    """The rows of a source, unshuffled. Raises DataError when they cannot be read, or there are none."""
    if isinstance(source, ReasoningGymSource):
        return ReasoningGymRows(source, seed=seed)
    return parquet.read_rows(source) if isinstance(source, ParquetSource) else jsonl.read_rows(source)


def _derived_seed(seed: int, name: str) -> int:
    """Return 31 bits from (run seed, source name).

    Hashed, not added: reasoning-gym generates entry i from ``seed + i``, so that neighboring seeds give nearly the same entries.
    """
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:4], "big") >> 1


def _fingerprint(sources: Sequence[SourceConfig], *, seed: int, max_prompt_tokens: int, prompt_format: PromptFormat) -> str:
    """Return a digest of all that decides the order, except a file's place: a checkpoint may be resumed in another folder."""
    shape = asdict(prompt_format)
    if not prompt_format.template_parameters:  # as it was before there were any: checkpoints of earlier versions are resumed
        del shape["template_parameters"]
    described: list[object] = [seed, max_prompt_tokens, shape]
    for source in sources:
        # no_messages follows from the prompt format.
        values: dict[str, object] = {f.name: getattr(source, f.name) for f in fields(source) if f.name != "no_messages"}
        if isinstance(source, FileSource):
            values["path"] = _content(source)
        described.append([type(source).__name__, values])
    return hashlib.sha256(json.dumps(described, sort_keys=True, default=_jsonable).encode()).hexdigest()[:16]


def _content(source: FileSource) -> str:
    """A digest of what is in the source's files; empty where there are none."""
    digest = hashlib.sha256()
    files = [source.path] if source.path.is_file() else sorted(source.path.glob("*.parquet"))
    for file in files:
        with file.open("rb") as content:
            hashlib.file_digest(content, lambda: digest)
    return digest.hexdigest() if files else ""


def _jsonable(value: object) -> object:
    return dict(value) if isinstance(value, Mapping) else str(value)


def _position(value: object) -> _Position:
    names = _Position.__dataclass_fields__
    if not isinstance(value, Mapping) or set(value) != set(names) or not all(isinstance(v, int) and v >= 0 for v in value.values()):
        raise DataError(f"data: the saved sampler state is damaged: a stream's position reads {value!r}; use an older checkpoint")
    return _Position(**{name: int(value[name]) for name in names})
