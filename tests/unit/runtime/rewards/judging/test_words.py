"""A judge's words become a score, or an error that says what it said."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rljob_api.vocabulary import RewardType
from rljob_runtime.errors import RewardSetupError
from rljob_runtime.rewards.config import RewardConfig
from rljob_runtime.rewards.judging.config import JudgeConfig, ReaderConfig
from rljob_runtime.rewards.judging.words import UnreadableError, load_reader

YES_NO = {"yes": 1.0, "no": 0.0}


def read(text: str, *, folder: str | None = None, params: Mapping[str, object] | None = None, **reader: Any) -> object:
    judge = JudgeConfig(url="http://judge/v1", model="m", template="{response}", reader=ReaderConfig(**reader))
    config = RewardConfig(name="grader", type=RewardType.LLM_JUDGE, judge=judge, params=params or {})
    return load_reader(config, folder)(text, "2 + 2?", "4", "four", {"level": 1})


@pytest.mark.parametrize(
    ("text", "reader", "score"),
    [
        ("Score: 3. No: Score: 7.5", {"pattern": r"Score: ([0-9.]*[0-9])"}, 7.5),
        ("I say 4", {"pattern": r"\d+"}, 4.0),
        ("<think>yes yes</think> No.", {"pattern": r"(?i)\b(yes|no)\b", "values": YES_NO}, 0.0),
        ("**YES**", {"pattern": r"(?i)\b(yes|no)\b", "values": YES_NO}, 1.0),
        ('Well {"x": {"y": 2}} and {"x": {"y": 3}} {"z": 1}', {"json_field": "x.y"}, 3.0),
        ('```json\n{"verdict": "YES", "why": "{"}\n```', {"json_field": "verdict", "values": YES_NO}, 1.0),
        ("I cannot say", {"pattern": "(?i)yes", "values": YES_NO, "otherwise": 0.0}, 0.0),
        ("Oh yes", {"pattern": "(?i)yes", "values": YES_NO, "otherwise": 0.0}, 1.0),
        ("10", {"pattern": r"\d+", "minimum": 0.0, "maximum": 10.0}, 10.0),
    ],
)
def test_patterns_and_fields(text: str, reader: dict[str, Any], score: float) -> None:
    assert read(text, **reader) == score


@pytest.mark.parametrize(
    ("text", "reader", "said"),
    [
        ("I cannot say", {"pattern": r"Score: (\d+)"}, r'said "I cannot say", where nothing matches Score: \(\\d\+\)'),
        ("maybe", {"pattern": r"\w+", "values": YES_NO}, 'said "maybe", which is none of yes, no'),
        ("ten", {"pattern": r"\w+"}, 'said "ten", which is not a number'),
        ("11", {"pattern": r"\d+", "minimum": 0.0, "maximum": 10.0}, "said 11, which is not from 0 to 10"),
        ("nan", {"pattern": r"\w+", "minimum": 0.0}, 'said "nan", which is not a finite number'),
        ('{"a": ' * 5000, {"json_field": "score"}, "holds no JSON object with score"),
        ("{broken {", {"json_field": "score"}, "holds no JSON object with score"),
        ("a" * 100, {"json_field": "score"}, r'"\.\.\.a{80}"'),
    ],
)
def test_what_cannot_be_read_is_reported(text: str, reader: dict[str, Any], said: str) -> None:
    with pytest.raises(UnreadableError, match=said):
        read(text, **reader)


def test_a_function_of_ones_own_gets_everything(tmp_path: Path) -> None:
    (tmp_path / "own_verdicts.py").write_text(
        "def read(judgement, prompt, response, answer, metadata, scale):\n"
        "    return {'score': scale * len(judgement), 'level': metadata['level'], 'right': response == '4' and answer == 'four'}\n"
    )
    result = read("abc", folder=str(tmp_path), params={"scale": 2.0}, function="own_verdicts:read")
    assert result == {"score": 6.0, "level": 1, "right": True}
    with pytest.raises(RewardSetupError, match=r"reward 'grader': own_verdicts:read.* it must take the keywords judgement, prompt"):
        read("abc", folder=str(tmp_path), function="own_verdicts:read")
