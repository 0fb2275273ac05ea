"""A teacher's vocabulary is compared with the policy's before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rljob_api.v1alpha1 import RLJobSpec
from rljob_api.validation import check
from rljob_runtime.errors import DataError, ModelError
from rljob_runtime.job.teacher import check_taught, check_teachers
from rljob_runtime.tiny.tokenizer import build_tokenizer
from tests.unit.api.manifests import manifest

TEXTS = ["What is 12 + 34?", "Calculate 5 + 67."]


def folder(place: Path, texts: list[str] = TEXTS, *, vocab_size: int | None = None) -> str:
    tokenizer = build_tokenizer(texts)
    tokenizer.save_pretrained(place)
    size = len(tokenizer) if vocab_size is None else vocab_size
    (place / "config.json").write_text(json.dumps({"model_type": "qwen2", "vocab_size": size}))
    return str(place)


def spec_of(policy: str, teacher: str) -> RLJobSpec:
    document = manifest()
    document["spec"]["model"]["path"] = policy
    added: dict[str, Any] = {"name": "teacher", "role": "Teacher", "placement": {"ranks": "0"}, "model": {"path": teacher}}
    document["spec"]["components"].append(added)
    return check(document).job.spec


def refused(policy: str, teacher: str) -> str:
    spec = spec_of(policy, teacher)
    with pytest.raises(ModelError) as caught:
        check_teachers(spec, spec)
    return str(caught.value)


def test_equal_vocabularies_pass_also_with_more_rows_in_the_teacher(tmp_path: Path) -> None:
    spec = spec_of(folder(tmp_path / "policy"), folder(tmp_path / "teacher", vocab_size=1024))
    check_teachers(spec, spec)


def test_tags_of_the_data_have_a_teacher() -> None:
    document = manifest()
    jsonl = {"path": "data/all.jsonl", "promptField": "question", "tagField": "domain"}
    document["spec"]["data"]["train"] = [{"name": "all", "type": "JSONL", "jsonl": jsonl}]
    document["spec"]["rewards"] = [{"name": "answer", "type": "ExactMatch"}]
    added: dict[str, Any] = {"name": "teacher", "role": "Teacher", "placement": {"ranks": "0"}, "model": {"path": "models/one"}}
    document["spec"]["components"].append(added | {"teaches": {"sources": ["algebra"]}})
    spec = check(document).job.spec
    check_taught(spec, "all", {"algebra"})
    with pytest.raises(DataError, match="data source 'all': the tag 'chess' has no teacher, nor have 1 others; add it to the teaches"):
        check_taught(spec, "all", {"law", "chess", "algebra"})
    document["spec"]["components"].append(added | {"name": "others", "model": {"path": "models/two"}})
    check_taught(check(document).job.spec, "all", {"law", "algebra"})


def test_another_vocabulary_is_refused_with_its_first_difference(tmp_path: Path) -> None:
    message = refused(folder(tmp_path / "policy"), folder(tmp_path / "teacher", ["zebra zebra zebra zebra", "zigzag zigzag"]))
    assert message.startswith(f"spec.components[3].model.path '{tmp_path}/teacher' has another vocabulary than {tmp_path}/policy: ")
    assert "and id " in message
    assert "use a teacher of the policy's own family" in message


def test_a_teacher_with_fewer_rows_is_refused(tmp_path: Path) -> None:
    message = refused(folder(tmp_path / "policy", vocab_size=512), folder(tmp_path / "teacher", vocab_size=384))
    assert "has vocab_size 384 in its config.json and the policy 512" in message


def test_a_teacher_without_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "teacher").mkdir()
    message = refused(folder(tmp_path / "policy"), str(tmp_path / "teacher"))
    assert message.startswith(f"spec.components[3].model.path '{tmp_path}/teacher': the tokenizer of ")
    assert "a Teacher's folder needs its tokenizer" in message
