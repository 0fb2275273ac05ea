"""What must stay light: the command line starts without tensors, the API and the operator install without Ray or torch."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.layout.tree import ROOT, member_files, python_files
from tests.support.pace import HANG_S

HEAVY = ("ray", "torch", "transformers", "vllm")
FOR_FEW_TESTS = re.compile(r"^(?:from|import) (vllm|pandas|reasoning_gym)\b", re.MULTILINE)
"""Packages that every process of pytest would import while it collects, 1 to 5 s of computing each."""
NOT_CODE = re.compile(r'"""[\s\S]*?"""')
"""Docstrings, and programs that tests give to other processes."""

RUN_COMMAND = """
import sys
from rljob_runtime.commands.cli import main
sys.argv = ["rljob", *sys.argv[1:]]
try:
    code = main()
except SystemExit as stop:
    code = stop.code
print("exit", code or 0)
print("heavy", *sorted({name.partition(".")[0] for name in sys.modules} & set(%r)))
"""

IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
count = 0
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
        count += 1
print("imported", count, package.__file__)
print("heavy", *sorted({name.partition(".")[0] for name in sys.modules} & set(sys.argv[2:])))
"""


def run(command: list[str | Path], *, cwd: Path = ROOT, timeout_s: float = HANG_S) -> str:
    """The command's stdout; a failure shows the command and everything it printed."""
    words = [str(part) for part in command]
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["validate", "examples/quickstart.yaml"]], ids=["help", "validate"])
def test_command_line_starts_without_tensors(arguments: list[str]) -> None:
    lines = run([sys.executable, "-c", RUN_COMMAND % (HEAVY,), *arguments]).splitlines()
    assert lines[-2:] == ["exit 0", "heavy"]


def test_a_missing_model_is_reported_before_anything_heavy_is_imported(tmp_path: Path) -> None:
    job = (ROOT / "examples" / "quickstart.yaml").read_text().replace("path: models/tiny", f"path: {tmp_path}/models/tiny")
    (tmp_path / "job.yaml").write_text(job)
    run_it = RUN_COMMAND % ((*HEAVY, "aiohttp", "huggingface_hub", "reasoning_gym"),)
    lines = run([sys.executable, "-c", run_it, "run", tmp_path / "job.yaml"]).splitlines()
    assert lines[-2:] == ["exit 2", "heavy"]


def test_collecting_tests_imports_no_package_that_few_of_them_need() -> None:
    """They are imported in the tests that use them, as are the engine's modules that import vLLM at once."""
    engines = [path.stem for path in member_files() if "vllm" in path.parts and re.search(r"^from vllm", path.read_text(), re.MULTILINE)]
    names = "|".join(engines)
    through = re.compile(rf"^(?:from|import) rljob_runtime\.engine\.vllm(?:\.(?:{names})\b| import .*\b(?:{names})\b)", re.MULTILINE)
    assert "engine_args" in engines
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in python_files()
        if path.name.startswith("test_")
        for pattern in (FOR_FEW_TESTS, through)
        for match in pattern.finditer(NOT_CODE.sub("", path.read_text()))
    ]
    assert found == []


def find_uv() -> str:
    beside = Path(sys.executable).parent / "uv"
    uv = str(beside) if beside.exists() else shutil.which("uv")
    assert uv, "uv is missing; make setup installs it into .venv"
    return uv


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheels of every distribution without Ray or torch, built as a release would build them."""
    folder = tmp_path_factory.mktemp("wheels")
    for member in ("crds", "crds/convert", "operator"):
        run([find_uv(), "build", "--quiet", "--wheel", "--out-dir", folder, ROOT / member], timeout_s=300)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "distributions", "forbidden"),
    [
        ("rljob_api", ["rljob_api"], ["kopf", "kubernetes", "numpy", *HEAVY]),
        ("rljob_convert", ["rljob_api", "rljob_convert"], ["kopf", "kubernetes", "numpy", *HEAVY]),
        ("rljob_operator", ["rljob_api", "rljob_operator"], ["rljob_convert", "numpy", *HEAVY]),
    ],
    ids=["api", "convert", "operator"],
)
def test_slim_install(package: str, distributions: list[str], forbidden: list[str], wheels: Path, tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    files = [next(wheels.glob(f"{name}-*.whl")) for name in distributions]
    run([find_uv(), "venv", "--quiet", "--python", sys.executable, tmp_path / "venv"], timeout_s=120)
    options = ["--quiet", "--python", python, "-c", ROOT / "constraints" / "dev.txt"]
    run([find_uv(), "pip", "install", *options, *files], cwd=tmp_path, timeout_s=300)
    installed = {path.name for path in (tmp_path / "venv").glob("lib/*/site-packages/*") if path.is_dir()}
    assert installed.isdisjoint(forbidden), "a dependency pulls in what this distribution must do without"
    imported, heavy = run([python, "-I", "-c", IMPORT_ALL, package, *forbidden], cwd=tmp_path).splitlines()
    assert str(tmp_path) in imported, "imported from the workspace instead of the wheel"
    assert heavy == "heavy"
