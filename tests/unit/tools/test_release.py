"""tools/release: each of its checks sees what is wrong, on a small copy of what they read; nothing is built."""

import importlib.util
import os
import shutil
import sys
import tarfile
import zipfile
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

from rljob_api.validation import check
from tests.layout.tree import ROOT

FILES = ("Dockerfile", "README.md", "CHANGELOG.md", "crds/rljobs.rljob.dev.yaml", "docs/install.md", "examples/kubernetes/rdma.yaml")
METADATA = "Metadata-Version: 2.4\nName: rljob-convert\nVersion: {}\n"


@pytest.fixture(scope="module")
def release() -> ModuleType:
    loader = SourceFileLoader("release", str(ROOT / "tools" / "release"))
    spec = importlib.util.spec_from_loader("release", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["release"] = module
    loader.exec_module(module)
    return module


@pytest.fixture
def tree(release: ModuleType, tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    for name in (*FILES, *(f"{folder}/pyproject.toml" for folder in release.MEMBERS)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    shutil.copytree(ROOT / release.CHART, root / release.CHART, ignore=shutil.ignore_patterns("__pycache__"))
    return root


def test_this_tree_could_be_released(release: ModuleType) -> None:
    assert [*release.problems_of_versions(ROOT), *release.problems_of_labels(ROOT)] == []


@pytest.mark.parametrize(
    ("name", "before", "after", "problem"),
    [
        ("operator/pyproject.toml", 'version = "0.1.0"', 'version = "0.0.9"', "operator/pyproject.toml: has version 0.0.9, not 0.1.0"),
        ("runtime/pyproject.toml", '"rljob-api==0.1.0"', '"rljob-api==0.0.9"', "runtime/pyproject.toml: has version 0.0.9, not 0.1.0"),
        ("operator/pyproject.toml", '"rljob-api==0.1.0"', '"rljob-api"', "operator/pyproject.toml: nothing matches"),
        ("helm/rljob/Chart.yaml", 'appVersion: "0.1.0"', 'appVersion: "0.0.9"', "helm/rljob/Chart.yaml: has version 0.0.9"),
        ("docs/install.md", "rljob-operator:0.1.0", "rljob-operator:0.0.9", "docs/install.md: names an image of 0.0.9, not 0.1.0"),
    ],
)
def test_another_version_is_seen(release: ModuleType, tree: Path, name: str, before: str, after: str, problem: str) -> None:
    release.set_version(tree, "0.1.0")
    text = (tree / name).read_text()
    assert before in text
    (tree / name).write_text(text.replace(before, after, 1))
    (found,) = release.problems_of_versions(tree)
    assert found.startswith(problem)


def test_a_version_is_written_everywhere_and_names_the_section_of_the_changelog(release: ModuleType, tree: Path) -> None:
    assert list(release.problems_of_changelog(tree, rehearse=True)) == []
    (before,) = release.problems_of_changelog(tree)
    assert "tools/release set VERSION" in before
    written = release.set_version(tree, "0.2.0rc1")
    assert {"crds/pyproject.toml", "helm/rljob/Chart.yaml", "Dockerfile", "CHANGELOG.md", "docs/install.md"} <= set(written)
    assert release.version_of(tree) == "0.2.0rc1"
    assert [*release.problems_of_versions(tree), *release.problems_of_changelog(tree)] == []
    assert list(release.problems_of_changelog(tree, rehearse=True)) == [], "the commit of a release can be rehearsed, too"
    assert '"ray[default]==2.60.0"' in (tree / "runtime/pyproject.toml").read_text()
    with pytest.raises(release.ReleaseError, match=r"v0\.2 is no version"):
        release.set_version(tree, "v0.2")


def test_an_empty_section_of_the_changelog_is_seen(release: ModuleType, tree: Path) -> None:
    (tree / "CHANGELOG.md").write_text("# Changelog\n\n## 0.1.0\n\n## 0.0.9\n\n- Something.\n")
    assert list(release.problems_of_changelog(tree)) == ["CHANGELOG.md: section 0.1.0 is empty; say what is new"]


def test_a_missing_label_is_seen(release: ModuleType, tree: Path) -> None:
    text = (tree / "Dockerfile").read_text()
    (tree / "Dockerfile").write_text(text.replace("org.opencontainers.image.revision", "revision", 1))
    assert list(release.problems_of_labels(tree)) == ["Dockerfile: target operator has no label org.opencontainers.image.revision; add it"]


def wheel(release: ModuleType, folder: Path, version: str) -> Path:
    """As hatchling would make it."""
    path = folder / "rljob_convert-any.whl"
    sources = ROOT / "crds" / "convert" / "src"
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted((sources / "rljob_convert").rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                archive.writestr(str(file.relative_to(sources)), "")
        info = f"rljob_convert-{release.version_of(ROOT)}.dist-info"
        archive.writestr(f"{info}/METADATA", METADATA.format(version))
        archive.writestr(f"{info}/licenses/LICENSE", "")
    return path


def test_a_wheel_has_every_file_of_its_package_and_no_other(release: ModuleType, tmp_path: Path) -> None:
    whole = wheel(release, tmp_path, release.version_of(ROOT))
    assert list(release.problems_of_wheel(whole, ROOT, "crds/convert")) == []
    smaller = tmp_path / "smaller.whl"
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(smaller, "w") as new:
        for name in old.namelist():
            if not name.endswith(("py.typed", "LICENSE")):
                new.writestr(name, old.read(name))
        new.writestr("tests/test_it.py", "")
    assert list(release.problems_of_wheel(smaller, ROOT, "crds/convert")) == [
        "smaller.whl: lacks rljob_convert/py.typed",
        "smaller.whl: has tests/test_it.py, which is no file of crds/convert/src",
        "smaller.whl: lacks rljob_convert/py.typed; without it type checkers ignore its types",
        "smaller.whl: lacks the license",
    ]
    earlier = wheel(release, tmp_path, "0.0.9")
    assert list(release.problems_of_wheel(earlier, ROOT, "crds/convert")) == [
        f"rljob_convert-any.whl: is not version {release.version_of(ROOT)} of rljob-convert"
    ]


def test_the_chart_is_packaged_whole_and_the_same_each_time(release: ModuleType, tree: Path, tmp_path: Path) -> None:
    chart = tree / release.CHART
    sources = {f"rljob/{path.relative_to(chart)}" for path in chart.rglob("*") if path.is_file()}
    (chart / "values.yaml.orig").write_text("left by an editor")
    (chart / "files/__pycache__").mkdir()
    (chart / "files/__pycache__/check_install.cpython-311.pyc").write_bytes(b"left by the tests of the script")
    (chart / "files/__pycache__/notes.txt").write_text("in a folder that is left out")
    first = release.build_chart(tree, tmp_path)
    with tarfile.open(first) as archive:
        names = set(archive.getnames())
    assert names == sources
    assert list(release.problems_of_chart(first, tree)) == []
    whole = first.read_bytes()
    os.utime(tree / "helm/rljob/values.yaml", (0, 0))
    assert release.build_chart(tree, tmp_path).read_bytes() == whole
    (tree / "crds/rljobs.rljob.dev.yaml").write_text("another")
    assert list(release.problems_of_chart(first, tree)) == [f"{first.name}: its CRD is not crds/rljobs.rljob.dev.yaml; make generate"]


def test_a_file_of_the_chart_that_git_does_not_track_is_seen(release: ModuleType, tree: Path, tmp_path: Path) -> None:
    release.run(["git", "init", "--quiet"], cwd=tree)
    release.run(["git", "add", "--force", "."], cwd=tree)
    assert list(release.problems_of_chart(release.build_chart(tree, tmp_path), tree)) == []
    (tree / release.CHART / "templates/debug.yaml").write_text("kind: ConfigMap")
    built = release.build_chart(tree, tmp_path)
    (problem,) = release.problems_of_chart(built, tree)
    assert problem.startswith(f"{built.name}: has rljob/templates/debug.yaml, which git does not track; ")


@pytest.mark.parametrize("words", [["check", "--job"], ["build", "--job", "--only-contents"], ["set"], ["check", "0.2.0"]])
def test_options_that_contradict_each_other_are_refused(
    release: ModuleType, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tools/release", *words])
    with pytest.raises(SystemExit, match="2"):
        release.main()
    assert "error: " in capsys.readouterr().err


def test_the_chart_has_the_tests_that_a_release_runs(release: ModuleType) -> None:
    assert [name for name in release.CHART_TESTS if not (ROOT / name).exists()] == []


def test_the_job_of_a_release_has_two_steps(release: ModuleType) -> None:
    assert check(release.short_job(ROOT)).job.spec.training.steps == 2
