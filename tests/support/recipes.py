"""The recipes of CONTRIBUTING.md as changes of the tree, each with a check that its addition works.

``tests/data/recipes/NAME/`` holds the files that a contributor would write (``new/``, at their paths in the repository), the lines that
they would insert into existing files (``recipe.yaml``), and a script that runs on the changed tree (``check.py``). An insertion names the
line that it precedes, by how that line begins: unlike a patch with context, it survives changes of all other lines, and fails only where
this line is gone, or no longer the only one.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import yaml

from tests.layout.tree import ROOT

FOLDER = ROOT / "tests" / "data" / "recipes"
SOURCES = ("crds/src", "runtime/src")
"""What checks import; from the copy, not from the repository."""
CHECK_TIMEOUT_S = 120.0


@dataclass(frozen=True, kw_only=True)
class Insertion:
    """Lines that an existing file gets."""

    file: str
    before: str
    """Beginning of the line that they precede, without its indentation, which they get as well."""
    text: str

    def apply(self, root: Path) -> None:
        path = root / self.file
        lines = path.read_text().splitlines(keepends=True)
        found = [index for index, line in enumerate(lines) if line.lstrip().startswith(self.before)]
        if len(found) != 1:
            raise AssertionError(f"{self.file}: {len(found)} lines begin with {self.before!r}, there must be one; change `before`")
        indent = lines[found[0]][: -len(lines[found[0]].lstrip())]
        lines.insert(found[0], textwrap.indent(self.text, indent))
        path.unlink()  # a copy may share the file with its source
        path.write_text("".join(lines))


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A change of the tree."""

    name: str
    new: tuple[str, ...]
    insertions: tuple[Insertion, ...]

    @property
    def files(self) -> frozenset[str]:
        """All files that are written by hand."""
        return frozenset(self.new) | {insertion.file for insertion in self.insertions}

    def apply(self, root: Path) -> None:
        """Make a copy of the sources below ``root``, and change it."""
        for source in SOURCES:
            shutil.copytree(ROOT / source, root / source)
        for file in {insertion.file for insertion in self.insertions if not (root / insertion.file).exists()}:
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / file, root / file)
        for file in self.new:
            assert not (root / file).exists(), f"{file} is not new"
            shutil.copy2(FOLDER / self.name / "new" / file, root / file)
        for insertion in self.insertions:
            insertion.apply(root)

    def check(self, root: Path) -> None:
        """Run the check on the changed copy, in a process of its own."""
        path = os.pathsep.join([*(str(root / source) for source in SOURCES), str(ROOT)])
        script = FOLDER / self.name / "check.py"
        done = subprocess.run(
            [sys.executable, str(script)],
            cwd=root,
            env=os.environ | {"PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=CHECK_TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{script} failed on {root}:\n{done.stdout}{done.stderr}"


def load(name: str) -> Recipe:
    """A recipe by its folder's name."""
    folder = FOLDER / name
    new = folder / "new"
    return Recipe(
        name=name,
        new=tuple(sorted(str(path.relative_to(new)) for path in new.rglob("*") if path.is_file() and path.suffix != ".pyc")),
        insertions=tuple(Insertion(**row) for row in yaml.load((folder / "recipe.yaml").read_text(), yaml.CSafeLoader)),
    )


def toy_engine() -> ModuleType:
    """The engine of the recipe, importable under the name that it has there; for tests of what is around an engine."""
    name = "rljob_runtime.engine.parrot"
    if name not in sys.modules:
        found = importlib.util.spec_from_file_location(name, FOLDER / "engine/new/runtime/src/rljob_runtime/engine/parrot.py")
        assert found is not None
        assert found.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(found)
        found.loader.exec_module(sys.modules[name])
    return sys.modules[name]
