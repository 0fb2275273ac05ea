"""Container images without a registry: a Debian base made here, the Dockerfile's targets on top, and a way onto the node.

Tags are hashes of everything an image is made from, so an unchanged one is neither built nor loaded again.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import tempfile
from pathlib import Path

from e2e.cluster import archives, containerd, dockerfile, packages, shell
from e2e.cluster.build import Say, content_key
from e2e.cluster.errors import ClusterError, CommandError
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


def image(target: str, folder: StateFolder, say: Say, *, archived: bool = False) -> str:
    """Build an image unless its content is there already, and put it on the node if a cluster is up; returns its name.

    Args:
        target: one of :data:`TARGETS`.
        folder: state of the cluster.
        say: gets one line per step.
        archived: only write the archive that the node of a later cluster loads; a cluster, or what is left of one, is not touched.

    Raises:
        ClusterError: not root, a program is missing, or the build failed.
    """
    packages.require_root()
    packages.require(packages.IMAGE_PROGRAMS, say)
    name = _base(say) if target == "base" else _from_dockerfile(target, say)
    if archived:
        _archived(*_find(name), say)
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
    identity, full_name = _find(name)
    notes = folder.path / "loaded.json"
    loaded: dict[str, str] = json.loads(notes.read_text()) if notes.exists() else {}
    if loaded.get(full_name) == identity and full_name in containerd.images(folder):
        say(f"{full_name} is on the node already")
        return
    archive = _archived(identity, full_name, say)
    say(f"import {full_name} ...")
    containerd.import_archive(folder, archive)
    notes.write_text(json.dumps({**loaded, full_name: identity}, indent=1))


def _archived(identity: str, full_name: str, say: Say) -> Path:
    """The image's archive in the cache."""
    archive = archives.path(full_name.rpartition(":")[0].rpartition("/")[2], content_key([full_name.encode(), identity.encode()]))
    if not archive.exists():
        say(f"export {full_name} ...")
        archives.export(full_name, archive)
    return archive


def _find(name: str) -> tuple[str, str]:
    """Image id and full name in buildah's store."""
    try:
        found = json.loads(archives.buildah("images", "--json", name))
    except CommandError as error:
        raise ClusterError(
            f"buildah has no image {name!r}. Remedy: python -m e2e.cluster image operator|runtime; list: buildah images"
        ) from error
    names = [
        full for full in found[0].get("names") or [] if full == name or full.endswith(f"/{name}") or full == f"localhost/{name}:latest"
    ]
    if not names:
        raise ClusterError(
            f"image {name!r} has no name of its own in buildah's store; give it a tag: buildah tag {name} localhost/NAME:TAG"
        )
    return str(found[0]["id"]), str(names[0])


def _exists(name: str) -> bool:
    try:
        archives.buildah("images", "--json", name)
    except CommandError:
        return False
    return True


def _base(say: Say) -> str:
    """A minimal Debian with Python, from the machine's own package mirror."""
    key = content_key([_RECIPE, _SUITE.encode(), platform.machine().encode(), *(package.encode() for package in _BASE_PACKAGES)])
    name = _CONTEXT_KEY_NAME.format(target="base", key=key)
    if _exists(name):
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
        container = archives.buildah("from", "scratch").strip()
        try:
            archives.buildah("add", "--quiet", container, tar, "/")
            path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
            archives.buildah("config", "--env", f"PATH={path}", "--cmd", "python3", container)
            archives.buildah("commit", "--quiet", container, name)
        finally:
            archives.buildah("rm", container)
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
    if _exists(name):
        say(f"{name} is built already")
        return name
    say(f"build {name} ...")
    index = os.environ.get("PIP_INDEX_URL")
    archives.buildah(
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
    repository = name.rpartition(":")[0]
    for entry in json.loads(archives.buildah("images", "--json")):
        for old in entry.get("names") or []:
            if old.rpartition(":")[0] == repository and old != name:
                say(f"remove {old}, which {name} replaces")
                archives.buildah("rmi", old)


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
