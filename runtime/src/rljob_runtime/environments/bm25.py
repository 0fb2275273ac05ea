r"""A corpus whose passages are found by their words.

Okapi BM25 as Lucene has it: a query's words add up :math:`idf(w) \frac{tf (k_1 + 1)}{tf + k_1 (1 - b + b\,|d| / \overline{|d|})}` with
:math:`idf(w) = \ln(1 + (N - n_w + 0.5) / (n_w + 0.5))`, where :math:`n_w` of :math:`N` passages have the word. Source: Robertson and
Zaragoza, The Probabilistic Relevance Framework (2009), section 3. Scores of a word are computed once; a query adds arrays.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rljob_runtime.errors import EnvironmentSetupError

K1, B = 1.2, 0.75
_WORD = re.compile(r"\w+")
_MAX_QUERY_WORDS = 64


class Corpus:
    """Passages and their index, in memory: some 12 bytes for each different word of a passage besides the texts."""

    def __init__(self, passages: Sequence[str]) -> None:
        """Index them."""
        self._passages = list(passages)
        places: dict[str, array[int]] = {}
        counts: dict[str, array[int]] = {}
        lengths = np.zeros(len(self._passages), dtype=np.float32)
        for number, passage in enumerate(self._passages):
            words = _WORD.findall(passage.lower())
            lengths[number] = len(words)
            for word, count in Counter(words).items():
                places.setdefault(word, array("i")).append(number)
                counts.setdefault(word, array("i")).append(count)
        norm = K1 * (1 - B + B * lengths / max(float(lengths.mean()) if len(lengths) else 0.0, 1.0))
        self._postings: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for word in list(places):
            at, frequency = np.array(places.pop(word), dtype=np.int32), np.array(counts.pop(word), dtype=np.float32)
            idf = np.log1p((len(self._passages) - len(at) + 0.5) / (len(at) + 0.5))
            self._postings[word] = (at, (idf * frequency * (K1 + 1) / (frequency + norm[at])).astype(np.float32))

    def __len__(self) -> int:
        """Number of passages."""
        return len(self._passages)

    def search(self, query: str, top_k: int) -> list[str]:
        """The passages that fit best, best first, the earlier one before an equal one; those without a word of the query never."""
        scores = np.zeros(len(self._passages), dtype=np.float32)
        for word in dict.fromkeys(_WORD.findall(query.lower())[:_MAX_QUERY_WORDS]):
            if word in self._postings:
                at, score = self._postings[word]
                scores[at] += score
        found = np.flatnonzero(scores)
        best = found[np.argsort(-scores[found], kind="stable")[:top_k]]
        return [self._passages[number] for number in best.tolist()]


def read_corpus(path: Path, text_field: str) -> Corpus:
    """Read the passages of a JSONL file.

    Raises:
        EnvironmentSetupError: it cannot be read, has no passage, or a line that is none; the first such line is named.
    """
    passages: list[str] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    passages.append(_passage(line, text_field, f"{path}: line {number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise EnvironmentSetupError(f"corpus {path} cannot be read: {error}; name a JSONL file in UTF-8") from error
    if not passages:
        raise EnvironmentSetupError(f"corpus {path} has no passages; write one JSON object on each line")
    return Corpus(passages)


def _passage(line: str, text_field: str, where: str) -> str:
    try:
        passage = json.loads(line)[text_field]
    except (ValueError, TypeError, KeyError) as error:
        raise EnvironmentSetupError(f"{where} is no JSON object with {text_field!r} ({type(error).__name__}); correct it") from error
    if not isinstance(passage, str):
        raise EnvironmentSetupError(f"{where}: {text_field!r} is not text; correct it, or name another text_field")
    return passage
