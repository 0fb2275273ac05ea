"""The interpreter that runs verl: the user's, or one in an environment of its own, made with uv from pinned packages."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

PINS = Path(__file__).with_name("verl.txt")
INSTALL_S = 1200.0


class EnvironmentFailedError(RuntimeError):
    """Raised when verl's environment cannot be made; names the command and what it said."""


def verl_python(say: Callable[[str], None]) -> Path:
    """The interpreter of verl's environment, which the first call makes in the user's cache folder; made once for each list of pins.

    verl pins tensordict and transformers to other versions than the runtime's, so that the project's environment cannot hold it.

    Raises:
        EnvironmentFailedError: uv cannot make it or cannot download.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rljob-bench"
    folder = cache / f"verl-{hashlib.sha256(PINS.read_bytes()).hexdigest()[:12]}"
    python, complete = folder / "bin" / "python", folder / "COMPLETE"
    if complete.is_file():
        return python
    say(f"making verl's environment in {folder}: 3 GB to download unless uv has them; --verl-python PATH takes another")
    _uv("venv", "--quiet", "--clear", "--python", f"{sys.version_info.major}.{sys.version_info.minor}", str(folder))
    _uv("pip", "install", "--quiet", "--no-deps", "--python", str(python), "--requirements", str(PINS))
    complete.touch()
    return python


def _uv(*arguments: str) -> None:
    command = [str(Path(sys.executable).with_name("uv")), *arguments]
    environment = dict(os.environ)
    for pip_name, uv_name in (("PIP_INDEX_URL", "UV_DEFAULT_INDEX"), ("PIP_CERT", "SSL_CERT_FILE")):  # uv does not read pip's
        if environment.get(pip_name):
            environment.setdefault(uv_name, environment[pip_name])
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_S, env=environment)
    except (subprocess.SubprocessError, OSError) as error:
        said = getattr(error, "stderr", None) or error
        raise EnvironmentFailedError(f"{' '.join(command)}: {said}\npass an interpreter that has verl: --verl-python PATH") from error
