"""The command `ray` of the runtime image, as KubeRay's init container calls it on every worker node."""

import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from tests.layout.tree import ROOT
from tests.support.pace import HANG_S


@pytest.fixture
def ray(tmp_path: Path) -> Path:
    """In a folder beside that of Ray's own command, which says what it was called with and fails."""
    own = tmp_path / "bin" / "ray"
    own.parent.mkdir()
    own.write_text('#!/bin/sh\necho "own $*"\nexit 3\n')
    own.chmod(0o755)
    (tmp_path / "first").mkdir()
    return Path(shutil.copy(ROOT / "runtime" / "image" / "ray", tmp_path / "first"))


def test_it_is_the_first_of_its_name_in_the_image() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert "COPY runtime/image/ray /opt/rljob/first/ray\n" in text
    assert "ENV PATH=/opt/rljob/first:/opt/rljob/bin:" in text


def test_a_health_check_succeeds_as_soon_as_the_head_takes_connections(ray: Path) -> None:
    with socket.socket() as head:
        head.bind(("127.0.0.1", 0))
        asking = subprocess.Popen([ray, "health-check", "--address", f"localhost:{head.getsockname()[1]}"], stdout=subprocess.PIPE)
        head.listen()
        out, _ = asking.communicate(timeout=HANG_S)
    assert (asking.returncode, out) == (0, b"")


@pytest.mark.parametrize("arguments", [["start", "--head", "--block"], ["health-check"], ["health-check", "--address", "head"], []])
def test_all_else_is_for_rays_own_command(ray: Path, arguments: list[str]) -> None:
    done = subprocess.run([ray, *arguments], capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (done.returncode, done.stdout) == (3, f"own {' '.join(arguments)}\n")
