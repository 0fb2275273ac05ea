"""What every test gets: no network through Hugging Face, no telemetry, caches of its own, deterministic examples.

`make test`, `make test-slow` and `make test-all` run files side by side in several processes of pytest (pytest-xdist), longest first;
fixtures of a module are made once.
"""

import contextlib
import gc
import os
import resource
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from tests.support import forked_workers
from tests.support.file_order import LONGEST_FIRST, SPREAD, TOGETHER, WITH_API_SERVER
from tests.support.golden import SWITCH, Golden

TESTS = Path(__file__).parent
GIB_PER_PROCESS = 5
"""Of pytest and a small job that it waits for."""

# Set before any test module is imported, because the libraries read these at import time; child processes (Ray workers) inherit them.
# One cache for all processes of pytest in a session: forked workers are shared by processes whose libraries read the same variables.
_OWN_HF_HOME = None if "PYTEST_XDIST_WORKER" in os.environ else tempfile.mkdtemp(prefix="rljob-tests-hf-")
os.environ.update(
    DO_NOT_TRACK="1",
    HF_HOME=_OWN_HF_HOME or os.environ["HF_HOME"],
    HF_HUB_OFFLINE="1",
    RAY_USAGE_STATS_ENABLED="0",
    TOKENIZERS_PARALLELISM="false",
    TRANSFORMERS_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
)
# With it, every process the tests start would compile vLLM again instead of reading its bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Several processes share the cores; threads of torch that wait for each other in turn would be most of the work.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A runaway test must end in MemoryError, not take down the machine and whatever else runs there. Per process, inherited by children.
_MEMORY_CEILING_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
_SOFT, _HARD = resource.getrlimit(resource.RLIMIT_DATA)
if _SOFT == resource.RLIM_INFINITY or _SOFT > _MEMORY_CEILING_BYTES:
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_CEILING_BYTES, _HARD))

# One machine's failure is every machine's failure; a slow machine is not a failure.
settings.register_profile("rljob", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("rljob")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(SWITCH, action="store_true", help="write the golden files instead of comparing with them; review the diff")


@pytest.fixture(scope="session")
def golden(request: pytest.FixtureRequest) -> Golden:
    """``assert golden.differences(path, text) == ""`` fails where the golden file holds another text, with a diff."""
    return Golden(updating=request.config.getoption(SWITCH))


class LongTestsSpread(LoadFileScheduling):
    """A file is run by one process, those of :data:`SPREAD` by several, those of :data:`TOGETHER` by the same."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        name = Path(file).name
        return nodeid if name in SPREAD else TOGETHER.get(name, file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadFileScheduling | None:
    """For ``--dist loadfile``, which the Makefile asks for."""
    return LongTestsSpread(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """More processes than cores, because tests wait for processes that start; fewer where memory is short. Slow tests compute more."""
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    more = 2 if config.getoption("markexpr") == "not slow" else 1
    return max(1, min(len(os.sched_getaffinity(0)) + more, int(memory_gib / GIB_PER_PROCESS)))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Torch, transformers and some thousand tests stay: looking for garbage among them is a third of what collecting them takes.

    Nor is it looked for once at the end, which takes every process 2 s, and while tests run ten times less often than by default.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(7_000)
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """``-m slow`` reads no file without a slow test: most of them import torch."""
    is_tests = collection_path.suffix == ".py" and config.getoption("markexpr") == "slow"
    return True if is_tests and "slow" not in collection_path.read_text() else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything under tests/integration is an integration test, without saying so in each file; the longest files come first."""
    marks = {f"{TESTS / folder}{os.sep}": getattr(pytest.mark, folder) for folder in ("integration", "layout")}
    for item in items:
        for folder, mark in marks.items():
            if str(item.path).startswith(folder):
                item.add_marker(mark)
        if "api_server" in getattr(item, "fixturenames", ()) and item.path.name not in WITH_API_SERVER:
            raise pytest.UsageError(f"{item.path.name} starts an API server of its own; name it in WITH_API_SERVER of {__file__}")
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


_forking = contextlib.ExitStack()
"""What ends the processes that Ray workers are forked from."""


def pytest_configure(config: pytest.Config) -> None:
    """One manager of forked workers for all processes of pytest."""
    if not hasattr(config, "workerinput"):
        folder = Path(_forking.enter_context(tempfile.TemporaryDirectory(prefix="rljob-tests-fork-")))
        _forking.enter_context(forked_workers.managed(folder))


def pytest_unconfigure() -> None:
    _forking.close()
    if _OWN_HF_HOME is not None:
        shutil.rmtree(_OWN_HF_HOME, ignore_errors=True)
