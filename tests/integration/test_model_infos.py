"""vLLM takes what the image was built with, and starts no process to inspect a model's class."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, sys
from pathlib import Path
from rljob_runtime.engine.vllm import model_infos

folder = Path(sys.argv[1])
model_infos.write(folder / "infos")
os.environ |= {model_infos.FOLDER_VARIABLE: str(folder / "infos"), "VLLM_CACHE_ROOT": str(folder / "cache")}
model_infos.seed()

from vllm.model_executor.models import registry

def never(inspect):
    raise AssertionError("inspected again")

registry._run_in_subprocess = never
for name in model_infos.ARCHITECTURES:
    assert registry.ModelRegistry.models[name].inspect_model_cls().architecture == name
"""


def test_vllm_takes_them(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
