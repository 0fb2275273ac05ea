"""``rljob convert``: streams, exit codes, files; and the page that lists the keys."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from rljob_convert.keys import KeyTable
from rljob_convert.rlinf import keys as rlinf_keys
from rljob_convert.roll import keys as roll_keys
from rljob_runtime.commands.cli import app
from tests.support.golden import Golden
from tests.unit.convert import cases

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "converting.md"
TABLES = {"roll": roll_keys.TABLE, "rlinf": rlinf_keys.TABLE}


def rljob(*arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["convert", *arguments], input=stdin)


def test_manifest_and_notes_are_apart() -> None:
    result = rljob("--from", "roll", str(cases.FOLDER / "roll-rlvr-async.yaml"))
    assert result.exit_code == 0
    assert yaml.load(result.stdout, yaml.CSafeLoader)["kind"] == "RLJob"
    assert "Dropped (" in result.stderr
    problems = rljob("--from", "rlinf", str(cases.FOLDER / "rlinf-doc-groups.yaml"))
    assert "Left to do before rljob run" in problems.stderr
    assert "more checks" not in problems.stderr
    impossible = rljob("--from", "roll", "-", stdin="actor_train: {device_mapping: '[0, 0]'}\n")
    assert impossible.stderr.endswith(" are made once the placement is possible\n")


def test_a_job_that_runs_as_it_is_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # whether somebody made models/tiny must not matter
    text = """
exp_name: small
adv_estimator: grpo
num_return_sequences_in_group: 8
response_length: 64
pretrain: models/tiny
actor_train: {device_mapping: "[0]"}
actor_infer: {device_mapping: "[1]"}
"""
    out = tmp_path / "job.yaml"
    result = rljob("--from", "roll", "-", "--out", str(out), stdin=text)
    assert (result.exit_code, result.stdout) == (0, "")
    assert "The manifest is valid" in result.stderr
    assert CliRunner().invoke(app, ["validate", str(out)]).exit_code == 0


def test_options_reach_the_conversion() -> None:
    result = rljob("--from", "rlinf", str(cases.FOLDER / "rlinf-doc-collocated.yaml"), "--name", "mine", "--devices-per-node", "4")
    document = yaml.load(result.stdout, yaml.CSafeLoader)
    assert document["metadata"]["name"] == "mine"
    assert document["spec"]["nodeGroups"][0]["devicesPerNode"] == 4


def test_an_option_of_the_other_framework_is_refused() -> None:
    result = rljob("--from", "roll", str(cases.FOLDER / "roll-rlvr-async.yaml"), "--devices-per-node", "4")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "num_gpus_per_node" in result.stderr


def test_a_section_without_keys_is_not_called_unknown() -> None:
    text = "exp_name: small\nadv_estimator: grpo\npretrain: m\nactor_train: {device_mapping: '[0]'}\nactor_infer: {device_mapping: '[1]'}\n"
    said = rljob("--from", "roll", "-", stdin=f"{text}rewards:\n").stderr
    assert "did you mean rewards" not in said
    assert "rewards = null: is empty, and a section of keys is expected" in said


def test_strict_refuses_losses(tmp_path: Path) -> None:
    out = tmp_path / "job.yaml"
    result = rljob("--from", "roll", "-", "--strict", "--out", str(out), stdin="exp_name: a\ntrack_with: wandb")
    assert result.exit_code == 2
    assert "--strict: 1 part is lost" in result.stderr
    assert not out.exists()


@pytest.mark.parametrize("text", ["a: [", "", "- 1"])
def test_what_cannot_be_read(text: str) -> None:
    result = rljob("--from", "rlinf", "-", stdin=text)
    assert result.exit_code == 2
    assert "standard input is not valid" in result.stderr


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    result = rljob("--from", "roll", "-", "--out", str(tmp_path / "no" / "job.yaml"), stdin="exp_name: a")
    assert result.exit_code == 2
    assert "cannot be written" in result.stderr


def table_of(table: KeyTable) -> str:
    rows = [f"| `{key}` | {target} |" for key, target in table.mapped.items()]
    return "\n".join([f"| {table.framework} | RLJob |", "|---|---|", *rows])


@pytest.mark.parametrize("framework", sorted(TABLES))
def test_the_page_lists_every_key_that_is_converted(framework: str, golden: Golden) -> None:
    text = PAGE.read_text(encoding="utf-8")
    start, end = f"<!-- {framework} keys -->", f"<!-- end of {framework} keys -->"
    before, _, rest = text.partition(start)
    _, _, after = rest.partition(end)
    assert golden.differences(PAGE, f"{before}{start}\n{table_of(TABLES[framework])}\n{end}{after}") == ""
