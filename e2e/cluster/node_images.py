"""How images come from buildah's store to containerd, and a stock of unpacked ones in the cache that nodes begin with.

    buildah's store -- layers that containerd lacks --> the stock == hard links ==> a new node
                    \\-- likewise ------------------------------------------------> a node that is up

The runtime's image is gigabytes and nearly all of it stays the same when the sources change: the stock takes only layers that it does not
have, and a node that starts takes none.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from e2e.cluster import shell
from e2e.cluster.build import Say
from e2e.cluster.buildah import skopeo
from e2e.cluster.errors import CommandError
from e2e.cluster.paths import cache_lock, cache_root
from e2e.cluster.process import log_tail
from e2e.cluster.wait import wait_until

_UNUSED_SNAPSHOTTERS = ("aufs", "btrfs", "devmapper", "zfs")

CRI = "io.containerd.grpc.v1.cri"
"""containerd's plugin for the kubelet."""

_BLOBS = "blobs/sha256"
_CONTENT = f"io.containerd.content.v1.content/{_BLOBS}"
_DATABASES = "*/*.db"
"""What containerd changes in place, below its root; all other files are made once, under names of their own."""
_LAYOUT = "image-"
_CTR_TIMEOUT_S = 1800.0
_LINK_TIMEOUT_S = 600.0
_START_DEADLINE_S = 120.0
_END_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Containerd:
    """One that runs, and where it keeps images."""

    place: Path
    """Folder of its socket, of its files (``root``), and of our notes of what was put there (``images.json``)."""

    @property
    def socket(self) -> Path:
        """Where it listens."""
        return self.place / "containerd.sock"

    def ctr(self, *arguments: str | Path, stdin: IO[bytes] | None = None) -> str:
        """Run containerd's own command line on the pods' images and containers.

        Raises:
            CommandError: it failed.
        """
        command = ["ctr", "--address", self.socket, "--namespace", "k8s.io", *arguments]
        return shell.run(command, timeout_s=_CTR_TIMEOUT_S, stdin=stdin)

    def images(self) -> set[str]:
        """Names of its images.

        Raises:
            CommandError: containerd does not answer.
        """
        return set(self.ctr("images", "list", "--quiet").split())

    def put(self, name: str, identity: str) -> None:
        """Give it an image of buildah's store, of whose layers those travel that it lacks.

        Args:
            name: full name.
            identity: the image's id, for our notes.

        Raises:
            CommandError: buildah or containerd refuses.
        """
        with tempfile.TemporaryDirectory(prefix=_LAYOUT, dir=self.place) as work:
            layout = Path(work)
            blobs = layout / _BLOBS
            blobs.mkdir(parents=True)
            content = self.place / "root" / _CONTENT
            for blob in content.iterdir() if content.is_dir() else ():
                (blobs / blob.name).symlink_to(blob)  # skopeo writes only blobs that are not there
            # Compressed layers would have other names than buildah's store has for them, and none would be found there. buildah itself
            # compresses whatever it pushes to a layout.
            skopeo("copy", "--quiet", "--dest-oci-accept-uncompressed-layers", f"containers-storage:{name}", f"oci:{layout}:{name}")
            made = [path.relative_to(layout) for path in sorted(layout.rglob("*")) if path.is_file() and not path.is_symlink()]
            with subprocess.Popen(["tar", "-C", layout, "-cf", "-", "--", *made], stdout=subprocess.PIPE) as tar:
                self.ctr("images", "import", "-", stdin=tar.stdout)
            if tar.returncode != 0:
                raise CommandError(f"tar of {name}: exit code {tar.returncode}")
        self.note({**notes(self.place), name: identity})

    def remove(self, name: str) -> None:
        """Remove an image, and the layers that no other one has."""
        self.ctr("images", "remove", "--sync", name)
        self.note({other: identity for other, identity in notes(self.place).items() if other != name})

    def note(self, identities: dict[str, str]) -> None:
        """Write down which contents are there, by name."""
        (self.place / "images.json").write_text(json.dumps(identities, indent=1))


def notes(place: Path) -> dict[str, str]:
    """Ids of the images that were put there, by name."""
    file = place / "images.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


def stock() -> Path:
    """Folder of the stock's containerd, which runs only while it is given images."""
    return cache_root() / "node"


def add_to_stock(name: str, identity: str, say: Say) -> None:
    """Have an image in the stock, in the place of earlier contents of the same repository.

    Raises:
        ClusterError: buildah or containerd refuses, or containerd did not start.
    """
    with cache_lock("node"):
        if notes(stock()).get(name) == identity:
            return
        say(f"unpack {name} for nodes ...")
        for left in stock().glob(f"{_LAYOUT}*"):  # by one that was killed
            shutil.rmtree(left)
        with _stock_containerd() as there:
            there.put(name, identity)
            repository = name.rpartition(":")[0]
            for old in there.images():
                if old.rpartition(":")[0] == repository and old != name:
                    there.remove(old)


def begin_with_stock(place: Path) -> None:
    """Give a node's containerd, which does not run yet, the images of the stock; nothing if there are none.

    Raises:
        CommandError: files cannot be linked or copied.
    """
    with cache_lock("node"):
        if not (stock() / "root").is_dir():
            return
        links = ["--link"] if stock().stat().st_dev == place.stat().st_dev else []
        shell.run(["cp", "--archive", *links, stock() / "root", place / "root"], timeout_s=_LINK_TIMEOUT_S)
        for database in (place / "root").glob(_DATABASES):
            database.unlink()
            shutil.copy2(stock() / "root" / database.relative_to(place / "root"), database)
        Containerd(place=place).note(notes(stock()))


@contextmanager
def _stock_containerd() -> Iterator[Containerd]:
    """It ends with this process, however that ends."""
    there = Containerd(place=stock())
    there.place.mkdir(parents=True, exist_ok=True)
    file, log = there.place / "config.toml", there.place / "containerd.log"
    file.write_text(configuration(there.place, CRI))
    with log.open("wb") as output:
        command: list[str | Path] = ["setpriv", "--pdeathsig", "TERM", "containerd", "--config", file]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)

    def check() -> str | None:
        if process.poll() is not None:
            raise CommandError(f"containerd of {there.place} ended with exit code {process.returncode}\n{log_tail(log)}")
        try:
            there.images()
        except CommandError as error:
            return f"{error}\n{log_tail(log)}"
        return None

    try:
        wait_until(f"containerd of {there.place}", check, deadline_s=_START_DEADLINE_S)
        yield there
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def configuration(place: Path, *disabled: str) -> str:
    """containerd's configuration without its part for pods, with everything it keeps below ``place``."""
    plugins = ", ".join(f'"{name}"' for name in (*(f"io.containerd.snapshotter.v1.{name}" for name in _UNUSED_SNAPSHOTTERS), *disabled))
    return f"""version = 2
root = "{place}/root"
state = "{place}/state"
disabled_plugins = [{plugins}]
[grpc]
  address = "{Containerd(place=place).socket}"
[plugins."io.containerd.internal.v1.opt"]
  path = "{place}/opt"
"""
