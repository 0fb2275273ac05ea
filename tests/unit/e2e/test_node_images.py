"""Only layers that a node lacks travel to it, and a new node shares the stock's files but not its databases."""

from pathlib import Path

import pytest

from e2e.cluster import node_images
from e2e.cluster.build import silent
from e2e.cluster.errors import CommandError
from e2e.cluster.node_images import Containerd

OLD, NEW = "a" * 64, "b" * 64
NAME = "localhost/rljob-runtime:2"
SKOPEO = f"""#!/bin/sh
layout=${{6#oci:}}; layout=${{layout%:{NAME}}}
echo "$@" > "$LOG/skopeo"
ls "$layout/blobs/sha256" > "$LOG/found"
echo new > "$layout/blobs/sha256/{NEW}"
echo index > "$layout/index.json"
"""
CTR = """#!/bin/sh
tar -tf - > "$LOG/traveled"
exit $CODE
"""


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Fakes of skopeo and ctr on the PATH, and where they write what they were given."""
    programs, found = tmp_path / "programs", tmp_path / "log"
    for folder in (programs, found):
        folder.mkdir()
    for name, text in (("skopeo", SKOPEO), ("ctr", CTR)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    monkeypatch.setenv("LOG", str(found))
    monkeypatch.setenv("CODE", "0")
    monkeypatch.setenv("RLJOB_E2E_CACHE", str(tmp_path / "cache"))
    return found


def containerd(place: Path) -> Containerd:
    """It has one layer, and no process behind it."""
    content = place / "root" / "io.containerd.content.v1.content" / "blobs" / "sha256"
    content.mkdir(parents=True)
    (content / OLD).write_text("old")
    return Containerd(place=place)


def test_a_layer_that_is_there_does_not_travel(log: Path, tmp_path: Path):
    there = containerd(tmp_path / "node")
    there.put(NAME, "id-2")
    assert (log / "found").read_text().split() == [OLD], "skopeo sees it and does not write it"
    assert (log / "traveled").read_text().split() == [f"blobs/sha256/{NEW}", "index.json"]
    assert node_images.notes(there.place) == {NAME: "id-2"}
    assert [path.name for path in there.place.iterdir() if path.name.startswith("image-")] == [], "nothing is left of the layout"


def test_an_image_that_containerd_refuses_is_not_noted(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CODE", "1")
    there = containerd(tmp_path / "node")
    with pytest.raises(CommandError, match=r"ctr .* exit code 1"):
        there.put(NAME, "id-2")
    assert node_images.notes(there.place) == {}


def test_a_node_shares_the_files_of_the_stock_but_not_its_databases(log: Path, tmp_path: Path):
    there = containerd(node_images.stock())
    database = there.place / "root" / "io.containerd.metadata.v1.bolt" / "meta.db"
    database.parent.mkdir()
    database.write_text("images")
    there.put(NAME, "id-2")
    node = tmp_path / "node"
    node.mkdir()
    node_images.begin_with_stock(node)
    content = f"root/io.containerd.content.v1.content/blobs/sha256/{OLD}"
    assert (node / content).samefile(there.place / content)
    own = node / database.relative_to(there.place)
    own.write_text("images and containers")
    assert database.read_text() == "images"
    assert node_images.notes(node) == {NAME: "id-2"}


def test_without_a_stock_a_node_begins_empty(log: Path, tmp_path: Path):
    node_images.begin_with_stock(tmp_path)
    assert not (tmp_path / "root").exists()


def test_what_is_in_the_stock_is_not_unpacked_again(log: Path):
    containerd(node_images.stock()).note({NAME: "id-2"})
    node_images.add_to_stock(NAME, "id-2", silent)
    assert not (log / "skopeo").exists()
