"""Joins the calls of an episode: which sample a prompt continues, and the token ids behind those that it has. No clock, no I/O.

::

    pieces of a sample   given ─ sampled ─ given ─ sampled
    a new prompt         ===== ≈≈≈≈≈≈≈≈≈ ===== ≈≈≈≈≈≈≈≈≈ new text     continues it: ids of the new text alone
                         ===== ≈≈≈≈≈≈≈≈≈ ==X                          a sample of its own, which begins with the pieces that agree
                         ==X                                          a sample of its own, encoded as a whole

Given text must be equal (``=``); of sampled text (``≈``) only what is no white space, because templates trim responses and write the JSON
of tool calls in their own way. A stop string is among the sampled ids though no program is shown it: one that puts it back continues behind
it, as does one that leaves it out. Named invariant EXACT: sampled ids are never encoded again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rljob_runtime.records import IntArray

Encode = Callable[[str], list[int]]

_NO_IDS: IntArray = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one side wrote in one go."""

    text: str
    """Of a sampled piece: what the program was shown, a stop string and special tokens left out."""
    token_ids: IntArray
    """Shape (n,)."""
    sampled: bool
    hidden: tuple[str, ...] = ()
    """Of a sampled piece: what a program may put back behind the text because the ids have it, longest first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a prompt belongs."""

    branch: int
    """Number of the sample."""
    begins: bool
    """Whether it is a new one."""
    token_ids: IntArray
    """Shape (n,): to append; of a new sample its whole prompt."""
    prompt_ids: IntArray
    """Shape (m,): the whole prompt."""
    text: str
    """What ``token_ids`` are, or of a new sample what follows the pieces that it shares."""
    shared: tuple[Piece, ...] = ()
    """Of a new sample: pieces of another one that it begins with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Close:
    """What a chat template writes behind a response."""

    token_id: int
    text: str


@dataclass(slots=True)
class _Branch:
    pieces: list[Piece] = field(default_factory=list)

    @property
    def token_ids(self) -> IntArray:
        return np.concatenate([_NO_IDS, *(piece.token_ids for piece in self.pieces)])


class Conversation:
    """The samples of one episode; used by one call at a time."""

    def __init__(self, encode: Encode, close: Close | None) -> None:
        """Start empty.

        Args:
            encode: token ids of a text, without any that it does not name.
            close: of the chat template, where it has one; a sampled close token is not written twice.
        """
        self._encode, self._close = encode, close
        self._branches: list[_Branch] = []

    def __len__(self) -> int:
        """Samples so far."""
        return len(self._branches)

    def place(self, text: str, encode_first: Encode | None = None) -> Place:
        """Where a prompt of this text belongs; ``encode_first``, where it is given, encodes one that shares nothing with those before."""
        best, known, end = self._longest(text)
        behind = text[end:]
        if best is not None and known == len(self._branches[best].pieces):
            return self._continued(best, self._behind(behind, self._branches[best].pieces[-1]), behind)
        shared = () if best is None else tuple(self._branches[best].pieces[:known])
        ids = self._behind(behind, shared[-1]) if shared else np.asarray((encode_first or self._encode)(behind), dtype=np.int32)
        return self._new(ids, behind, shared)

    def place_ids(self, token_ids: Sequence[int], decode: Callable[[IntArray], str]) -> Place:
        """Where a prompt of these token ids belongs."""
        ids = np.asarray(token_ids, dtype=np.int32)
        best, size = None, 0
        for index, branch in enumerate(self._branches):
            so_far = branch.token_ids
            if size < len(so_far) <= len(ids) and np.array_equal(ids[: len(so_far)], so_far):
                best, size = index, len(so_far)
        return self._new(ids, decode(ids), ()) if best is None else self._continued(best, ids[size:], decode(ids[size:]))

    def sampled(self, place: Place, token_ids: IntArray, shown: str, hidden: tuple[str, ...] = ()) -> None:
        """What was sampled behind a place, which is the last one that was asked for.

        Args:
            place: the last one that was asked for.
            token_ids: shape (n,).
            shown: what the program reads of it.
            hidden: what else the ids have behind that, and a program may know: the stop string, with and without what its last token says
                more; longest first.
        """
        if place.begins:
            self._branches.append(_Branch(list(place.shared)))
        pieces = self._branches[place.branch].pieces
        own = place.prompt_ids[sum(len(piece.token_ids) for piece in place.shared) :] if place.begins else place.token_ids
        pieces += [
            Piece(text=place.text, token_ids=own, sampled=False),
            Piece(text=shown, token_ids=token_ids, sampled=True, hidden=hidden),
        ]

    def _longest(self, text: str) -> tuple[int | None, int, int]:
        """The branch that shares most tokens with a prompt, how many of its pieces, and where they end in the text.

        Among several, one that can be continued is preferred, then the last.
        """
        found: tuple[int | None, int, int] = (None, 0, 0)
        most = (0, False)
        for index, branch in enumerate(self._branches):
            known, end = _match(branch.pieces, text, self._close.text if self._close is not None else "")
            rank = (sum(len(piece.token_ids) for piece in branch.pieces[:known]), known == len(branch.pieces))
            if known and rank >= most:
                found, most = (index, known, end), rank
        return found

    def _continued(self, branch: int, ids: IntArray, text: str) -> Place:
        whole = np.concatenate([self._branches[branch].token_ids, ids])
        return Place(branch=branch, begins=False, token_ids=ids, prompt_ids=whole, text=text)

    def _new(self, ids: IntArray, text: str, shared: tuple[Piece, ...]) -> Place:
        whole = np.concatenate([*(piece.token_ids for piece in shared), ids])
        return Place(branch=len(self._branches), begins=True, token_ids=whole, prompt_ids=whole, text=text, shared=shared)

    def _behind(self, text: str, last: Piece) -> IntArray:
        """Ids of the text behind a response; the token that closes it only once, and no white space of the template before it."""
        close = self._close
        if close is None or not text.lstrip().startswith(close.text):
            return np.asarray(self._encode(text), dtype=np.int32)
        ids = self._encode(text.lstrip())
        if len(last.token_ids) and last.token_ids[-1] == close.token_id:
            ids = ids[ids.index(close.token_id) + 1 :]
        return np.asarray(ids, dtype=np.int32)


def _match(pieces: Sequence[Piece], text: str, close: str) -> tuple[int, int]:
    """With how many pieces, up to a sampled one, a text begins, and where in it they end; a template writes ``close`` behind one."""
    place = known = end = 0
    for number, piece in enumerate(pieces, 1):
        found = _end_of_sampled(piece, text, place, close) if piece.sampled else _end_of_given(piece.text, text, place, number > 1)
        if found is None:
            break
        place = found
        if piece.sampled:
            known, end = number, place
    return known, end


def _end_of_given(given: str, text: str, place: int, follows: bool) -> int | None:
    """Where given text ends that stands at ``place``; behind a response white space may be missing, or be more."""
    if text.startswith(given, place):
        return place + len(given)
    if not follows:
        return None
    bare = given.lstrip()
    place = _skip_space(text, place)
    return place + len(bare) if text.startswith(bare, place) else None


def _end_of_sampled(piece: Piece, text: str, place: int, close: str) -> int | None:
    """Where a sampled piece ends whose text stands at ``place``, but for white space; behind what was put back of its hidden text.

    Where the template's close follows nothing was put back, although the close may begin like the stop string.
    """
    shown = place + len(piece.text) if text.startswith(piece.text, place) else _end_but_for_space(piece.text, text, place)
    if close and shown is not None and text.startswith(close, _skip_space(text, shown)):
        return shown
    candidates = [*(piece.text + hidden for hidden in piece.hidden), piece.text]
    for whole in candidates:
        if text.startswith(whole, place):
            return place + len(whole)
    for whole in candidates:
        end = _end_but_for_space(whole, text, place)
        if end is not None:
            return end
    return None


def _end_but_for_space(sampled: str, text: str, place: int) -> int | None:
    """Behind the last letter of a text that stands at ``place``, but for white space."""
    for letter in sampled:
        if letter.isspace():
            continue
        place = _skip_space(text, place)
        if place == len(text) or text[place] != letter:
            return None
        place += 1
    return place


def _skip_space(text: str, place: int) -> int:
    while place < len(text) and text[place].isspace():
        place += 1
    return place
