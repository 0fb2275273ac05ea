"""The name of the folder of made models follows everything that a model depends on."""

from pathlib import Path

import pytest

from tests.support import made_models


@pytest.mark.parametrize("makes", [made_models.MAKES_QUICKSTART, made_models.MAKES_LAKE])
def test_the_sources_are_the_module_and_what_it_imports(makes: str) -> None:
    files = made_models.sources(makes)
    package = Path(made_models.__file__).parents[2] / "runtime" / "src" / "rljob_runtime"
    tiny = {
        package / "tiny" / name
        for name in ("__init__.py", "settings.py", "folder.py", "tokenizer.py", "model.py", "warmstart.py", "muon.py")
    }
    assert set(files.values()) >= {*tiny, package / "commands" / "model.py"}
    lakes = {package / "tiny" / "lake.py", package / "tiny" / "lake_play.py", package / "environments" / "frozen_lake.py"}
    assert lakes & set(files.values()) == (lakes if makes == made_models.MAKES_LAKE else set())
    assert not any(module.startswith("rljob_runtime.engine") for module in files), "a change of an engine makes no model again"
    for ineffective in (package / "errors.py", package / "data" / "jsonl.py", package / "data" / "surrogates.py"):
        assert ineffective.exists()
        assert ineffective not in files.values(), "a change of a message makes no model again"


def test_a_changed_file_or_library_changes_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "model.py"
    file.write_text("layers = 2\n")
    before = made_models.fingerprint({"model": file})
    assert made_models.fingerprint({"model": file}) == before
    file.write_text("layers = 3\n")
    changed = made_models.fingerprint({"model": file})
    monkeypatch.setattr(made_models, "version", lambda name: "0")
    assert len({before, changed, made_models.fingerprint({"model": file})}) == 3


def test_comments_docstrings_and_layout_do_not_change_the_name(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    names = []
    for text in ("def layers(wide):\n    return 2\n", '"""Sizes."""\n\ndef layers(wide):  # all\n    """How many."""\n\n    return (2)\n'):
        file.write_text(text)
        names.append(made_models.fingerprint({"model": file}))
    file.write_text("def layers(wide):\n    return '2'\n")
    assert names[0] == names[1] != made_models.fingerprint({"model": file})


def test_it_is_in_the_users_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert made_models.kept_folder(made_models.MAKES_LAKE).parent == tmp_path / "rljob-tests"
