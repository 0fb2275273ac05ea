"""Every block of YAML, Python and commands on the pages is what it says: valid manifests, importable names, commands that parse."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from rljob_api.validation import check
from rljob_convert import conversion
from rljob_runtime.commands import sweep_file
from rljob_runtime.commands.cli import app
from tests.layout.tree import ROOT
from tests.support.snippets import PAGES, Snippet, all_snippets, job_of
from tests.support.snippets import snippets as snippets_of
from tests.unit.operator.desired import kuberay

FRAMEWORKS = {"ROLL": "roll", "RLinf": "rlinf"}
"""Title of a block -> whose configuration it is."""
BESIDE_A_JOB = {"guess", "my_losses", "my_rewards", "domains_rewards", "sum_agent"}
"""Modules that a page says to write, or of examples/."""

YAML, PYTHON, COMMANDS = all_snippets("yaml"), all_snippets("python"), all_snippets("", "bash")


def framework(snippet: Snippet) -> str | None:
    return FRAMEWORKS.get(snippet.title.partition(":")[0])


@pytest.mark.parametrize("snippet", [snippet for snippet in YAML if not framework(snippet)], ids=str)
def test_yaml_is_a_valid_manifest_or_part_of_one(snippet: Snippet, tmp_path: Path) -> None:
    for document in yaml.load_all(snippet.text, yaml.CSafeLoader):
        kind = document.get("kind")
        if kind == "RLJob":
            check(snippet.text)
        elif "matrix" in document:
            (tmp_path / "sweep.yaml").write_text(snippet.text)
            shutil.copy(ROOT / "examples" / document["job"], tmp_path)
            assert sweep_file.read(tmp_path / "sweep.yaml", shape_of=lambda path: None, config_of=lambda spec: None).points
        elif kind == "RayJob":
            assert kuberay.schema_problems(document) == []
        elif kind:
            assert re.fullmatch(r"[\w.-]+(/\w+)?", document["apiVersion"])
            assert document["metadata"]["name"]
        else:
            check(yaml.safe_dump(job_of(snippet.text)))


@pytest.mark.parametrize("page", [ROOT / "docs" / "migrate" / f"{name}.md" for name in FRAMEWORKS.values()], ids=lambda p: p.stem)
def test_the_converter_writes_what_the_page_shows(page: Path) -> None:
    before, notes, after = (snippet for snippet in snippets_of(page) if snippet.title)
    source = framework(before)
    assert source
    options = {"devices_per_node": 8} if source == "rlinf" else {}
    done = conversion.convert(source, before.text, **options)
    comments = [line.removeprefix("# ") for line in conversion.render(done).splitlines() if line.startswith("# ")][1:]
    assert (yaml.load(after.text, yaml.CSafeLoader), notes.text.splitlines()) == (done.manifest, comments)
    check(after.text)


def test_every_way_to_migrate_shows_a_job_after() -> None:
    pages = [page for page in PAGES if page.parent.name == "migrate" and page.stem != "index"]
    assert sorted(page.stem for page in pages) == ["kuberay", "rlinf", "roll", "trl", "verl"]
    for page in pages:
        before, *_, last = [snippet for snippet in snippets_of(page) if snippet.title and snippet.language in ("yaml", "bash", "python")]
        assert before.text
        assert last.title in {"job.yaml", "my_rewards.py", "to_jsonl.py"}


@pytest.mark.parametrize("name", ["kuberay", "rlinf", "roll", "trl", "verl"])
def test_what_was_before_is_a_file_of_the_other_project(name: str) -> None:
    """Its name, and a link to it at a commit or release: what is on a main branch changes."""
    page = ROOT / "docs" / "migrate" / f"{name}.md"
    path = next(snippet.title for snippet in snippets_of(page) if snippet.title).partition(": ")[2]
    assert re.search(rf"https://github\.com/[\w-]+/[\w-]+/blob/([0-9a-f]{{40}}|v[\d.]+)/{re.escape(path)}\)", page.read_text())


@pytest.mark.parametrize("snippet", PYTHON, ids=str)
def test_python_compiles_and_what_it_imports_exists(snippet: Snippet) -> None:
    tree = ast.parse(snippet.text, str(snippet))
    for node in ast.walk(tree):
        names = (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [a.name for a in node.names]
            if isinstance(node, ast.Import)
            else []
        )
        for name in names:
            top = name.partition(".")[0]
            assert top in BESIDE_A_JOB | set(sys.stdlib_module_names) or importlib.util.find_spec(top), name
            if top.startswith("rljob_") and isinstance(node, ast.ImportFrom):
                assert {alias.name for alias in node.names} <= defined(name)


def defined(module: str) -> set[str]:
    """Names at the top of a module, by its source: importing it may cost seconds. Submodules of a package count."""
    spec = importlib.util.find_spec(module)
    assert spec, module
    assert spec.origin
    found = {path.stem for folder in spec.submodule_search_locations or () for path in Path(folder).iterdir()}
    for node in ast.parse(Path(spec.origin).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def commands(snippet: Snippet) -> list[list[str]]:
    """Words of every ``rljob`` command of a block; lines that end in a backslash go on."""
    lines = snippet.text.replace("\\\n", " ").splitlines()
    found = []
    for line in lines:
        command = re.split(r" {2,}(?!-)", line)[0]  # behind them pictures and comments begin
        words = shlex.split(command, comments=True) if re.match(r"rljob( |$)", line) else []
        if words and re.fullmatch(r"[a-z]+|--[a-z-]+", words[1] if len(words) > 1 else "--help"):
            stops = [i for i, word in enumerate(words) if re.fullmatch(r"[|;<>]|&&|\d?>&?\d?", word)]
            found.append(words[1 : min(stops, default=len(words))])
    return found


def parse(words: list[str]) -> Any:
    """What the command line's own parser makes of the words; nothing is carried out.

    Raises:
        Exception: typer's, which says what is wrong.
    """
    command, name = typer.main.get_command(app), "rljob"
    context = command.make_context(name, ["--help"], resilient_parsing=True)
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        name, *words = words
        assert name in command.commands, f"no command {name}"
        command = command.commands[name]
        context = command.make_context(name, list(words), parent=context, resilient_parsing=hasattr(command, "commands"))
    return context


@pytest.mark.parametrize("snippet", [snippet for snippet in COMMANDS if commands(snippet)], ids=str)
def test_rljob_commands_parse(snippet: Snippet) -> None:
    assert [parse(words) for words in commands(snippet)], "a block without a command"


@pytest.mark.parametrize(
    "words", [["run"], ["run", "a.yaml", "--resum"], ["plan", "a.yaml", "-o", "xml"], ["trian", "a.yaml"], ["model", "tiny", "x"]]
)
def test_a_wrong_command_would_be_noticed(words: list[str]) -> None:
    with pytest.raises(Exception, match=r".+"):
        parse(words)


@pytest.mark.parametrize("snippet", all_snippets("json"), ids=str)
def test_json_is_read(snippet: Snippet) -> None:
    assert [json.loads(line) for line in snippet.text.splitlines()], "a block with nothing in it"


def test_no_block_is_of_a_language_that_nothing_checks() -> None:
    languages = {snippet.language for page in PAGES for snippet in snippets_of(page)}
    assert languages == {"", "bash", "json", "python", "text", "yaml"}


def test_an_unknown_key_in_a_fragment_would_be_noticed() -> None:
    with pytest.raises(ValueError, match="maxStale"):
        check(yaml.safe_dump(job_of("overlap: {maxStale: 1}")))
