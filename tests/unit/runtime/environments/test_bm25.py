import json
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rljob_runtime.environments.bm25 import K1, B, Corpus, read_corpus
from rljob_runtime.errors import EnvironmentSetupError

WORDS = st.lists(st.sampled_from("abcdef"), min_size=1, max_size=8).map(" ".join)


def reference(passages, query, top_k):
    """The formula, word by word."""
    split = [p.split() for p in passages]
    mean = sum(map(len, split)) / len(split)
    scores = []
    for words in split:
        counts, score = Counter(words), 0.0
        for word in dict.fromkeys(query.split()):
            having = sum(word in other for other in split)
            if not having or not counts[word]:
                continue
            idf = math.log(1 + (len(split) - having + 0.5) / (having + 0.5))
            score += idf * counts[word] * (K1 + 1) / (counts[word] + K1 * (1 - B + B * len(words) / max(mean, 1.0)))
        scores.append(score)
    order = sorted((n for n, s in enumerate(scores) if s > 0), key=lambda n: (-round(scores[n], 4), n))
    return [(passages[n], round(scores[n], 3)) for n in order[:top_k]]


@given(passages=st.lists(WORDS, min_size=1, max_size=12), query=WORDS)
def test_passages_are_found_in_the_order_of_the_formula(passages, query) -> None:
    wanted = reference(passages, query, 5)
    found = Corpus(passages).search(query, 5)
    by_passage = dict(reference(passages, query, len(passages)))
    assert [by_passage[p] for p in found] == pytest.approx([score for _, score in wanted], abs=2e-3)


def test_words_are_found_without_regard_to_case_and_signs() -> None:
    corpus = Corpus(["The Canaan dog, of Israel.", "Cats", "A dog"])
    assert corpus.search("CANAAN dog?", 3) == ["The Canaan dog, of Israel.", "A dog"]
    assert corpus.search("zebra", 3) == corpus.search("", 3) == []


def test_a_file_of_passages(tmp_path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text('{"body": "one", "id": 1}\n\n{"body": "two"}\n')
    assert len(read_corpus(path, "body")) == 2
    for text, message in (("{}\n", "line 1 is no JSON object with 'body'"), ("", "no passages"), ('{"body": 1}', "'body' is not text")):
        path.write_text(text)
        with pytest.raises(EnvironmentSetupError, match=message):
            read_corpus(path, "body")
    with pytest.raises(EnvironmentSetupError, match="cannot be read"):
        read_corpus(tmp_path / "none.jsonl", "body")
    path.write_text(json.dumps({"body": "ö"}), encoding="latin-1")
    assert read_corpus(path, "body").search("ö", 1) == ["ö"]
