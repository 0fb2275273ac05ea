"""Names that must not clash, and words that must not be committed."""

import operator
import re
import sysconfig
from pathlib import Path

import pytest

from tests.layout.tree import MEMBERS, ROOT, python_files, repository_files, text_of

LOCK_FILES = {"uv.lock", "poetry.lock", "Pipfile.lock", "package-lock.json", "yarn.lock", "pdm.lock"}
# Any URL whose host is a package index or its file store; the service names are split so that this file does not match itself.
REGISTRIES = ["py" + "pi", "python" + "hosted", "proxy." + "golang", "sum." + "golang", "npm" + "js"]
REGISTRY_URL = re.compile(r"https?://[^\s/\"']*(?:" + "|".join(REGISTRIES) + ")")
INDEX_URL = re.compile(r"https?://[^\s\"'<>]+/" + r"simple\b")
# Home folders of people and of root; the official Ray image's own user is part of an image, not of a machine.
HOME_PATH = re.compile(r"(?<![\w.$~}])/(?:home/(?!ray\b)\w+|Users/\w+|root)/")


def test_operator_is_the_standard_library_module() -> None:
    assert Path(operator.__file__).parent == Path(sysconfig.get_paths()["stdlib"])


@pytest.mark.parametrize("folder", MEMBERS)
def test_member_folder_is_no_package(folder: str) -> None:
    assert (ROOT / folder).is_dir()
    assert not (ROOT / folder / "__init__.py").exists(), f"{folder}/__init__.py would make the folder importable; remove it"


@pytest.mark.parametrize(("folder", "package"), MEMBERS.items())
def test_member_is_typed_and_lies_under_src(folder: str, package: str) -> None:
    source = ROOT / folder / "src" / package
    assert (source / "__init__.py").is_file()
    assert (source / "py.typed").is_file(), f"add an empty {source.relative_to(ROOT)}/py.typed"


@pytest.mark.parametrize(("folder", "package"), MEMBERS.items())
def test_every_folder_of_a_package_has_an_init(folder: str, package: str) -> None:
    folders = {path.parent for path in python_files() if (ROOT / folder / "src" / package) in (path.parent, *path.parents)}
    assert folders
    bare = sorted(str(place.relative_to(ROOT)) for place in folders if not (place / "__init__.py").exists())
    assert bare == [], "add an __init__.py: without one the import contracts do not see the folder"


def test_no_lock_files() -> None:
    assert [path for path in repository_files() if path.name in LOCK_FILES] == []


def test_constraints_are_plain_pins() -> None:
    for path in sorted((ROOT / "constraints").glob("*.txt")):
        pins = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
        assert pins, path
        assert [pin for pin in pins if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*==[0-9][\w.!+]*", pin)] == [], path


def find(pattern: re.Pattern[str]) -> list[str]:
    """Every match of ``pattern`` in the text files of the repository, as ``file:line: match``."""
    hits = []
    for path in repository_files():
        text = text_of(path) or ""
        hits += [f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, m.start()) + 1}: {m.group()}" for m in pattern.finditer(text)]
    return hits


def test_no_package_registry_hosts() -> None:
    assert find(REGISTRY_URL) + find(INDEX_URL) == []


def test_no_machine_paths() -> None:
    here = [] if ROOT.parent in (Path("/"), Path("/tmp")) else find(re.compile(re.escape(f"{ROOT.parent}/")))
    assert find(HOME_PATH) + here == []


@pytest.mark.parametrize(
    ("pattern", "text", "matches"),
    [
        (REGISTRY_URL, "https://files." + "python" + "hosted.org/x", True),
        (REGISTRY_URL, "https://example.org/" + "py" + "pi", False),
        (INDEX_URL, "https://mirror.example.org/root/" + "simple/", True),
        (HOME_PATH, "open('" + "/home/" + "alice/x')", True),
        (HOME_PATH, "/home/ray/rljob", False),
        (HOME_PATH, "$HOME" + "/ro" + "ot/", False),
    ],
)
def test_the_patterns_find_what_they_should(pattern: re.Pattern[str], text: str, matches: bool) -> None:
    assert bool(pattern.search(text)) is matches
