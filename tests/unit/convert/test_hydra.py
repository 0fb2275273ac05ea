"""Files that a configuration takes in: what is merged where, with which line, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from rljob_api.errors import SpecInvalidError
from rljob_convert import convert
from rljob_convert.source import Source, read


def source(folder: Path, files: dict[str, str], **options: dict[str, str]) -> Source:
    """The configuration of ``main.yaml``."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    inner = folder / "config"
    return read((inner / "main.yaml").read_text(), "RLinf", folder=inner, **options)


MAIN = "config/main.yaml"


@pytest.mark.parametrize(
    ("main", "other", "expected"),
    [
        ("defaults: [base]\na: 1", {"base": "a: 2\nb: 3"}, {"a": 1, "b": 3}),
        ("defaults: [base, _self_]\na: 1", {"base": "a: 2"}, {"a": 1}),
        ("defaults: [_self_, base]\na: 1", {"base": "a: 2"}, {"a": 2}),
        ("defaults: [group/one@here.there]", {"group/one": "a: 2"}, {"here": {"there": {"a": 2}}}),
        ("defaults: [group/one]", {"group/one": "a: 2"}, {"group": {"a": 2}}),
        ("defaults: [{group: one}]", {"group/one": "a: 2"}, {"group": {"a": 2}}),
        ("defaults: [{group@p: [one, two]}]", {"group/one": "a: 2", "group/two": "b: 3"}, {"p": {"a": 2, "b": 3}}),
        ("defaults: [{group: null}]\na: 1", {}, {"a": 1}),
        ("defaults: [group/one]", {"group/one": "# @package _global_\na: 2"}, {"a": 2}),
        ("defaults: [../other/one@_here_]", {"../other/one": "a: 2"}, {"a": 2}),
        ("defaults: [group/one@p]", {"group/one": "defaults: [two@q]\na: 2", "group/two": "b: 3"}, {"p": {"q": {"b": 3}, "a": 2}}),
        ("defaults: [optional nothing]\na: 1", {}, {"a": 1}),
        ("defaults: [{override hydra/job_logging: stdout}]\na: 1", {}, {"a": 1}),
        ("defaults: [base]\nlist: [1]", {"base": "list: [1, 2, 3]"}, {"list": [1]}),
        ("defaults: [base]\ns: {a: null}", {"base": "s: {a: {b: 1}, c: 2}"}, {"s": {"a": None, "c": 2}}),
    ],
)
def test_what_is_merged_where(tmp_path: Path, main: str, other: dict[str, str], expected: object) -> None:
    files = {MAIN: main, **{f"config/{name}.yaml": text for name, text in other.items()}}
    assert source(tmp_path, files).data == expected


def test_notes_name_the_file_and_its_line(tmp_path: Path) -> None:
    config = source(tmp_path, {MAIN: "defaults: [base]\na: 1", "config/base.yaml": "x: 1\nb:\n  c: 2"})
    config.drop(("b", "c"), "has no place")
    config.drop(("a",), "has no place")
    assert [str(note).split(":")[0] for note in config.notes] == ["base.yaml line 3", "line 2"]


def test_search_paths(tmp_path: Path) -> None:
    main = "defaults: [env/one]\nhydra: {searchpath: ['file://${oc.env:ROOT}/more']}"
    files = {MAIN: main, "more/env/one.yaml": "a: 2"}
    assert source(tmp_path, files, environment={"ROOT": str(tmp_path)}).data["env"] == {"a": 2}
    with pytest.raises(SpecInvalidError, match="environment variable ROOT is not set"):
        source(tmp_path, files)


@pytest.mark.parametrize(
    ("main", "message"),
    [
        ("defaults: [group/one]", r"defaults\[0\]: \"group/one\": takes group/one.yaml into this configuration, which is not beside"),
        ("defaults: base", "is not a list"),
        ("defaults: ['a/${b}']", "of a form that is not followed here"),
        ("defaults: [main]", "perhaps in a circle"),
        ("defaults: [list]", "is not one map"),
    ],
)
def test_what_is_refused(tmp_path: Path, main: str, message: str) -> None:
    with pytest.raises(SpecInvalidError, match=message):
        source(tmp_path, {MAIN: main, "config/list.yaml": "- 1"})


def test_a_text_alone_cannot_take_files_in() -> None:
    with pytest.raises(SpecInvalidError, match=r"traj_envs\.yaml into this configuration, and only its text was given"):
        convert("roll", "defaults: [../config/traj_envs@_here_]\nexp_name: a")


class TestEnvironment:
    TEXT = "runner: {experiment_name: a}\nrollout: {model: {model_path: '${oc.env:MODELS%s}/tiny'}}\nother: ${oc.env:NOT_ASKED}"

    def test_a_variable(self) -> None:
        spec = convert("rlinf", self.TEXT % "", environment={"MODELS": "/models"}).manifest["spec"]
        assert spec["model"]["path"] == "/models/tiny"

    def test_its_default(self) -> None:
        assert convert("rlinf", self.TEXT % ",here", environment={}).manifest["spec"]["model"]["path"] == "here/tiny"

    def test_without_either_it_is_named(self) -> None:
        with pytest.raises(SpecInvalidError, match=r"model_path: .*variable MODELS is not set and has no default"):
            convert("rlinf", self.TEXT % "", environment={})

    def test_no_secret_is_read(self) -> None:
        text = "runner: {experiment_name: '${oc.env:HF_TOKEN}'}"
        converted = convert("rlinf", text, environment={"HF_TOKEN": "not-to-be-shown"})
        assert "not-to-be-shown" not in str(converted)
        assert any("promises a secret" in note.why for note in converted.notes)


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("${subtract:${int_div:10,3},1}", 2),
        ("${multiply:${a},${a}}", 16),
        ("${b}", 4),
        ("${oc.select:a,7}", 4),
        ("${oc.select:nothing,7}", 7),
        ("${oc.decode:'12'}", 12),
        ("${oc.env:UNSET,${a}}", "4"),
    ],
)
def test_references_in_references_and_calls(expression: str, expected: object) -> None:
    config = read(f'a: 4\nb: ${{a}}\nx: "{expression}"', "RLinf")
    assert config.take("x") == expected
