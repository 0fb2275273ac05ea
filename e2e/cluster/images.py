"""Container images without a registry: a Debian base made here, the Dockerfile's targets on top, and a way onto the node.

Tags are hashes of everything an image is made from, so an unchanged one is neither built nor loaded again.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from e2e.cluster import build, containerd, dockerfile, node_images, packages, shell
from e2e.cluster.build import Say, content_key
from e2e.cluster.buildah import buildah, exists, find, others_of
from e2e.cluster.errors import ClusterError
from e2e.cluster.paths import REPOSITORY, cache_root
from e2e.cluster.state import StateFolder
from e2e.cluster.versions import Mode

TARGETS = ("base", "operator", "runtime", "runtime-sglang")

_SUITE = "bookworm"
_BASE_PACKAGES = ("python3", "python3-venv", "ca-certificates", "libnuma1", "procps")
_RECIPE = b"1"
"""Changed by hand when the way the base image is made changes."""
_DEBOOTSTRAP_TIMEOUT_S = 1800.0
_TAR_TIMEOUT_S = 300.0
_CONTEXT_KEY_NAME = "localhost/rljob-{target}:{key}"
_UV_CACHE_IN_BUILD = "/var/cache/host-uv"
"""Where the Dockerfile looks for packages before it uses a cache of its own."""
_HOST_FILES = ("/etc/ssl/certs", "/etc/resolv.conf")
"""Lent to the build: the machine's own certificates and name servers are what downloads need."""


def image(target: str, folder: StateFolder, say: Say, *, stocked: bool = False) -> str:
    """Build an image unless its content is there already, and put it on the node if a cluster is up; returns its name.

    Args:
        target: one of :data:`TARGETS`.
        folder: state of the cluster.
        say: gets one line per step.
        stocked: only have it in the stock that the node of a later cluster begins with; a cluster, or what is left of one, is not touched.

    Raises:
        ClusterError: not root, a program is missing, or the build failed.
    """
    packages.require_root()
    packages.require({**packages.IMAGE_PROGRAMS, **(packages.STOCK_PROGRAMS if stocked else {})}, say)
    name = _base(say) if target == "base" else _from_dockerfile(target, say)
    if stocked:
        identity, full_name = find(name)
        node_images.add_to_stock(full_name, identity, say)
        return name
    state = folder.load()
    if target != "base" and state is not None and state.mode is Mode.CLUSTER:
        load(folder, name, say)
    return name


def load(folder: StateFolder, name: str, say: Say) -> None:
    """Put an image of buildah's store on the node, unless this very content is there under this name.

    Raises:
        ClusterError: no such image, or no cluster with a node.
    """
    state = folder.require()
    if state.mode is not Mode.CLUSTER:
        raise ClusterError(f"{folder.path.name!r} is an API server without node; images need a cluster: python -m e2e.cluster up")
    identity, full_name = find(name)
    there = containerd.of_node(folder)
    if node_images.notes(there.place).get(full_name) == identity and full_name in there.images():
        say(f"{full_name} is on the node already")
        return
    say(f"import {full_name} ...")
    there.put(full_name, identity)


def pause(say: Say) -> str:
    """The image every pod begins with, of our own static program, in the stock; returns its name.

    Raises:
        ClusterError: not root, or the build failed.
    """
    program = build.binary("pause")
    name = f"localhost/rljob-e2e-pause:{content_key([program.read_bytes()])}"
    if not exists(name):
        with _container() as container:
            buildah("add", "--quiet", container, program, "/pause")
            buildah("config", "--entrypoint", '["/pause"]', "--user", "65535:65535", container)
            buildah("commit", "--quiet", container, name)
        _remove_superseded(name, say)
    node_images.add_to_stock(name, find(name)[0], say)
    return name


@contextmanager
def _container() -> Iterator[str]:
    """An empty one, to make an image from."""
    container = buildah("from", "scratch").strip()
    try:
        yield container
    finally:
        buildah("rm", container)


def _base(say: Say) -> str:
    """A minimal Debian with Python, from the machine's own package mirror."""
    key = content_key([_RECIPE, _SUITE.encode(), platform.machine().encode(), *(package.encode() for package in _BASE_PACKAGES)])
    name = _CONTEXT_KEY_NAME.format(target="base", key=key)
    if exists(name):
        say(f"{name} is built already")
        return name
    say(f"build {name} ...")
    cache_root().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="base-", dir=cache_root()) as work:
        root, tar = Path(work, "root"), Path(work, "root.tar")
        include = f"--include={','.join(_BASE_PACKAGES)}"
        shell.run(["debootstrap", "--variant=minbase", include, _SUITE, root, *_mirror()], timeout_s=_DEBOOTSTRAP_TIMEOUT_S)
        for leftovers in ("var/cache/apt/archives", "var/lib/apt/lists"):
            shutil.rmtree(root / leftovers, ignore_errors=True)
        shell.run(["tar", "-C", root, "--numeric-owner", "--one-file-system", "-cf", tar, "."], timeout_s=_TAR_TIMEOUT_S)
        with _container() as container:
            buildah("add", "--quiet", container, tar, "/")
            path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
            buildah("config", "--env", f"PATH={path}", "--cmd", "python3", container)
            buildah("commit", "--quiet", container, name)
    return name


def _mirror() -> list[str]:
    """The mirror this machine itself installs from; debootstrap's own default where apt knows none for the suite."""
    if packages.find("apt-get") is None:
        return []
    listed = shell.run(["apt-get", "indextargets", "--format", "$(SITE) $(CODENAME) $(COMPONENT)", "Created-By: Packages"], timeout_s=60)
    for line in listed.splitlines():
        site, _, rest = line.partition(" ")
        if rest == f"{_SUITE} main":
            return [site]
    return []


def _from_dockerfile(target: str, say: Say) -> str:
    file = REPOSITORY / "Dockerfile"
    if not file.exists():
        raise ClusterError(f"{file} does not exist")
    base = _base(say)
    name = _CONTEXT_KEY_NAME.format(target=target, key=dockerfile_key(target, base, REPOSITORY))
    if exists(name):
        say(f"{name} is built already")
        return name
    say(f"build {name} ...")
    index = os.environ.get("PIP_INDEX_URL")
    buildah(
        "build", "--layers", "--network", "host", *(f"--volume={path}:{path}:ro" for path in _HOST_FILES), *_packages(),
        "--target", target, "--build-arg", f"BASE_IMAGE={base}", *(("--build-arg", f"PIP_INDEX_URL={index}") if index else ()),
        "--tag", name, "--file", file, REPOSITORY,
    )  # fmt: skip
    _remove_superseded(name, say)
    return name


def _packages() -> list[str]:
    """uv's cache of this machine, where set-up has left the same packages: they are not downloaded a second time."""
    uv_cache = Path(os.environ.get("UV_CACHE_DIR") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "uv")
    return [f"--volume={uv_cache}:{_UV_CACHE_IN_BUILD}"] if uv_cache.is_dir() else []


def _remove_superseded(name: str, say: Say) -> None:
    """Remove earlier contents of this image: each holds gigabytes that nothing asks for any more."""
    for old in others_of(name):
        say(f"remove {old}, which {name} replaces")
        buildah("rmi", old)


def dockerfile_key(target: str, base: str, root: Path) -> str:
    """Key of everything the target is made from: the base, the instructions of the stages it uses, and the files they copy."""
    ignore = root / ".dockerignore"
    used = dockerfile.needed(dockerfile.stages((root / "Dockerfile").read_text()), target)
    sources = [source for stage in used for source in stage.sources]
    files = dockerfile.context_files(root, sources, ignore.read_text() if ignore.exists() else "")
    parts = [base.encode(), target.encode(), *(stage.text.encode() for stage in used)]
    for file in files:
        parts += [str(file.relative_to(root)).encode(), b"x" if os.access(file, os.X_OK) else b"-", file.read_bytes()]
    return content_key(parts)
