"""Builds the programs once into the cache, each under a key of its module version, checksums and flags.

Modules come from wherever the user's Go configuration says; nothing here names a host.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from e2e.cluster import shell
from e2e.cluster.errors import ClusterError
from e2e.cluster.paths import TOOLS, cache_lock, cache_root
from e2e.cluster.versions import MODULE_FILES, Mode, ModuleFiles, Program, linker_flags, output_name, program, programs, version

Say = Callable[[str], None]

_BUILD_TIMEOUT_S = 3600.0
_DOWNLOAD_TIMEOUT_S = 900.0
_GO_ENVIRONMENT = {"CGO_ENABLED": "0", "GOWORK": "off"}
_BUILD_FLAGS = ("-trimpath", "-buildvcs=false", "-mod=readonly", "-gcflags=all=-dwarf=false")
"""Without debug information, which the linker would drop (``-s -w``)."""


def silent(_text: str) -> None:
    """A :data:`Say` that says nothing."""


def content_key(parts: Iterable[bytes]) -> str:
    """Sixteen characters that change when any part, or where one part ends, changes."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.hexdigest()[:16]


@functools.cache
def binary(name: str) -> Path:
    """Where the program's binary lies in the cache, built or not.

    Raises:
        ClusterError: there is no program of that name.
    """
    item = program(name)
    folder = TOOLS / item.folder
    sources = sorted(path for path in folder.rglob("*") if path.name in ("go.mod", "go.sum") or path.suffix == ".go")
    key = content_key([*(path.read_bytes() for path in sources), linker_flags(item.folder).encode(), *(f.encode() for f in _BUILD_FLAGS)])
    return cache_root() / "bin" / f"{name}-{version(name)}-{key}" / name


def missing(mode: Mode) -> list[str]:
    """Names of the programs that ``mode`` needs and that are not built."""
    return [item.name for item in programs(mode) if not binary(item.name).exists()]


def require_built(mode: Mode) -> None:
    """Fail early, in one sentence, instead of at the first start.

    Raises:
        ClusterError: something is not built.
    """
    absent = missing(mode)
    if absent:
        raise ClusterError(f"not built: {', '.join(absent)}. Remedy: python -m e2e.cluster build --mode {mode}")


def build(mode: Mode, say: Say = silent) -> None:
    """Build what ``mode`` needs and the cache lacks, and keep beside it the files of the same modules.

    Args:
        mode: what to build for.
        say: gets one line per step.

    Raises:
        ClusterError: no suitable Go, or a build failed.
    """
    if not missing(mode) and not _missing_files(mode):
        return
    with cache_lock("build"):
        absent = missing(mode)
        if absent or _missing_files(mode):
            go = require_go()
            of_module: dict[str, list[Program]] = {}
            for item in map(program, absent):
                of_module.setdefault(item.folder, []).append(item)
            # Side by side: one module downloads or links while another compiles.
            with ThreadPoolExecutor(max_workers=len(of_module) or 1) as pool:
                for done in [pool.submit(_build_module, go, items, say) for items in of_module.values()]:
                    done.result()
            for item in _missing_files(mode):
                _keep(go, item)


def require_go() -> str:
    """Path of a go command that can build the programs.

    Raises:
        ClusterError: there is none, or it is too old.
    """
    wanted = (TOOLS / "pause" / "go.mod").read_text().split("\ngo ", 1)[1].split()[0]
    remedy = f"Remedy: install Go {wanted.rsplit('.', 1)[0]} or newer (go.dev/dl) and put its bin folder on the PATH."
    go = shutil.which("go")
    if go is None:
        raise ClusterError(f"no go command on the PATH; the cluster's programs are built from source.\n{remedy}")
    try:
        # In the module's folder: Go itself compares its version with go.mod's, or switches to a newer toolchain if allowed to.
        shell.run([go, "list", "-m"], cwd=TOOLS / "pause", env=_GO_ENVIRONMENT, timeout_s=_DOWNLOAD_TIMEOUT_S)
    except ClusterError as error:
        raise ClusterError(f"{go} cannot build the cluster's programs, which need Go {wanted}: {error}\n{remedy}") from error
    return go


def _build_module(go: str, items: list[Program], say: Say) -> None:
    """Build programs of one module in one go: what they share is compiled once, and one links while others compile."""
    started_s, folder = time.monotonic(), items[0].folder
    what = ", ".join(f"{item.name} {version(item.name)}" for item in items)
    say(f"build {what} ...")
    with tempfile.TemporaryDirectory(prefix="unfinished-", dir=cache_root()) as unfinished:
        packages = [item.package for item in items]
        argv = [go, "build", *_BUILD_FLAGS, "-ldflags", linker_flags(folder), "-o", f"{unfinished}/", *packages]
        shell.run(argv, cwd=TOOLS / folder, env=_GO_ENVIRONMENT, timeout_s=_BUILD_TIMEOUT_S)
        for item in items:
            target = binary(item.name)
            target.parent.mkdir(parents=True, exist_ok=True)
            Path(unfinished, output_name(item)).rename(target)
    say(f"built {what}: {time.monotonic() - started_s:.0f} s")


def module_files(item: ModuleFiles) -> list[Path]:
    """Where these files lie in the cache, in their order; :func:`build` puts them there."""
    folder = cache_root() / "manifests" / f"{item.program}-{version(item.program)}"
    return [folder / Path(file).name for file in item.files]


def _missing_files(mode: Mode) -> list[ModuleFiles]:
    return [item for item in MODULE_FILES if mode in item.modes and not all(path.exists() for path in module_files(item))]


def _keep(go: str, item: ModuleFiles) -> None:
    """Copy files out of a module, so that a cluster starts without Go."""
    owner = program(item.program)
    answer = shell.run(
        [go, "mod", "download", "-json", f"{owner.module}@{version(owner.name)}"],
        cwd=TOOLS / owner.folder, env=_GO_ENVIRONMENT, timeout_s=_DOWNLOAD_TIMEOUT_S,
    )  # fmt: skip
    source = Path(json.loads(answer)["Dir"])
    for file, target in zip(item.files, module_files(item), strict=True):
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_suffix(f".{os.getpid()}")
        shutil.copyfile(source / file, unfinished)
        unfinished.rename(target)
