"""An image is built again exactly when something it is made from changes."""

import ast
from pathlib import Path

import pytest

from e2e.cluster import dockerfile
from e2e.cluster.errors import ClusterError
from e2e.cluster.images import TARGETS, dockerfile_key
from tests.layout.tree import ROOT

DOCKERFILE = """\
ARG BASE_IMAGE=example.com/python
FROM ${BASE_IMAGE} AS base
RUN one && \\
    # a comment in between
    two
FROM base AS tools
COPY --chown=1:1 pins/a.txt /build/
FROM base AS small
COPY small /app
RUN --mount=type=bind,from=tools,source=/opt,target=/opt three
FROM base AS big
COPY --from=tools /opt /opt
COPY ["big", "pins/b.txt", "/app/"]
"""


@pytest.fixture
def context(tmp_path: Path) -> Path:
    for name in ("pins/a.txt", "pins/b.txt", "small/main.py", "big/main.py", "big/__pycache__/main.pyc", "unused.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    (tmp_path / ".dockerignore").write_text("*\n!small\n**/__pycache__\n**/*.pyc\n")
    return tmp_path


def keys(context: Path, base: str = "base:1") -> dict[str, str]:
    return {target: dockerfile_key(target, base, context) for target in ("small", "big")}


def test_stages_and_what_they_use():
    stages = dockerfile.stages(DOCKERFILE)
    assert {name: (set(stage.uses), stage.sources) for name, stage in stages.items()} == {
        "base": ({"${BASE_IMAGE}"}, ()),
        "tools": ({"base"}, ("pins/a.txt",)),
        "small": ({"base", "tools"}, ("small",)),
        "big": ({"base", "tools"}, ("big", "pins/b.txt")),
    }
    assert "RUN one && two" in stages["base"].text


def test_every_image_of_the_dockerfile_can_be_built_by_name():
    stages = dockerfile.stages((ROOT / "Dockerfile").read_text())
    images = stages.keys() - {used for stage in stages.values() for used in stage.uses}
    assert images <= set(TARGETS) <= stages.keys()


def test_targets_differ_and_nothing_changes_by_itself(context: Path):
    assert keys(context) == keys(context)
    assert len(set(keys(context).values())) == 2


@pytest.mark.parametrize(
    ("path", "rebuilt"),
    [
        ("small/main.py", {"small"}),
        ("small/new.py", {"small"}),
        ("big/main.py", {"big"}),
        ("pins/a.txt", {"small", "big"}),
        ("pins/b.txt", {"big"}),
        ("unused.txt", set()),
        ("big/__pycache__/main.pyc", set()),
    ],
)
def test_a_change_rebuilds_what_is_made_from_it(context: Path, path: str, rebuilt: set[str]):
    before = keys(context)
    (context / path).write_text("changed")
    assert {target for target, key in keys(context).items() if key != before[target]} == rebuilt


def test_a_changed_instruction_rebuilds_its_stage_only(context: Path):
    before = keys(context)
    (context / "Dockerfile").write_text(DOCKERFILE.replace("three", "four"))
    assert {target for target, key in keys(context).items() if key != before[target]} == {"small"}


def test_another_base_rebuilds_all(context: Path):
    assert set(keys(context).values()) & set(keys(context, "base:2").values()) == set()


def test_a_source_that_is_not_there(context: Path):
    (context / "pins" / "b.txt").unlink()
    with pytest.raises(ClusterError, match=r"copies pins/b\.txt"):
        keys(context)


def test_an_unknown_target(context: Path):
    with pytest.raises(ClusterError, match="no target 'huge'; it has base, tools, small, big"):
        dockerfile_key("huge", "base:1", context)


@pytest.mark.parametrize("target", ["operator", "runtime"])
def test_the_project_s_own_dockerfile(target: str):
    used = dockerfile.needed(dockerfile.stages((ROOT / "Dockerfile").read_text()), target)
    assert target in {stage.name for stage in used}
    sources = {source.split("/")[0] for stage in used for source in stage.sources}
    assert target in sources
    assert {"operator": "runtime", "runtime": "operator"}[target] not in sources


def module_files(name: str) -> list[Path]:
    """The file of a module of this project, and those of the packages around it; empty for what is no module."""
    parts = name.split(".")
    files = [ROOT / source / "/".join(parts) for source in ("crds/src", "runtime/src")]
    found = next((f for base in files for f in (base.with_suffix(".py"), base / "__init__.py") if f.is_file()), None)
    return [] if found is None else [found, *(module_files(".".join(parts[:-1])) if len(parts) > 1 else [])]


def imported(file: Path) -> list[Path]:
    """Files of this project that come with the import of one."""
    names: list[str] = []
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return [file for name in names for file in module_files(name)]


def test_the_stage_that_makes_the_model_copies_every_module_that_this_imports() -> None:
    (stage,) = (s for s in dockerfile.stages((ROOT / "Dockerfile").read_text(encoding="utf-8")).values() if s.name == "tiny-model")
    copied = {file for source in stage.sources for file in [ROOT / source, *(ROOT / source).rglob("*.py")] if file.is_file()}
    needed, waiting = set(), module_files("rljob_runtime.tiny.model")
    while waiting:
        file = waiting.pop()
        if file not in needed:
            needed.add(file)
            waiting += imported(file)
    assert ROOT / "runtime/src/rljob_runtime/records.py" in needed
    assert sorted(str(file.relative_to(ROOT)) for file in needed - copied) == []
