"""What every test gets: no network through Hugging Face, no telemetry, caches of its own, deterministic examples."""

import os
import resource
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.golden import SWITCH, Golden

TESTS = Path(__file__).parent

# Set before any test module is imported, because the libraries read these at import time; child processes (Ray workers) inherit them.
_HF_HOME = tempfile.mkdtemp(prefix="rljob-tests-hf-")
os.environ.update(
    DO_NOT_TRACK="1",
    HF_HOME=_HF_HOME,
    HF_HUB_OFFLINE="1",
    RAY_USAGE_STATS_ENABLED="0",
    TOKENIZERS_PARALLELISM="false",
    TRANSFORMERS_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
)
# With it, every process the tests start would compile vLLM anew instead of reading its bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

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
    """golden(path, text) fails where the golden file holds another text."""
    return Golden(updating=request.config.getoption(SWITCH))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything under tests/integration is an integration test, without saying so in each file."""
    for item in items:
        if (TESTS / "integration") in item.path.parents:
            item.add_marker(pytest.mark.integration)


def pytest_unconfigure() -> None:
    shutil.rmtree(_HF_HOME, ignore_errors=True)
