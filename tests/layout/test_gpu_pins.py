"""The requirements and pins of the extra gpu, which no test here installs."""

import tomllib

from tests.layout.tree import ROOT


def test_cuda_python_is_of_the_release_of_its_bindings() -> None:
    """Version 12 has their modules itself and overwrites those of version 13: FlashInfer, and with it vLLM, does not start then."""
    lines = (ROOT / "constraints" / "gpu.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    assert pins["cuda-python"] == pins["cuda-bindings"]
    project = tomllib.loads((ROOT / "runtime" / "pyproject.toml").read_text())["project"]
    assert "cuda-python>=13" in project["optional-dependencies"]["gpu"]
