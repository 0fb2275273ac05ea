"""The command `ray` of the runtime image, as KubeRay's init container calls it on every worker node."""

import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from tests.layout.tree import ROOT
from tests.support.pace import HANG_S
from tests.support.ports import needs_ipv6


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


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), pytest.param(socket.AF_INET6, "[::1]", marks=needs_ipv6)])
def test_a_health_check_succeeds_as_soon_as_the_head_speaks(ray: Path, family: socket.AddressFamily, address: str) -> None:
    with socket.socket(family) as head:
        head.settimeout(HANG_S)
        head.bind((address.strip("[]"), 0))
        asking = subprocess.Popen([ray, "health-check", "--address", f"{address}:{head.getsockname()[1]}"], stdout=subprocess.PIPE)
        head.listen()
        head.accept()[0].close()  # as a proxy does that reaches nothing
        connection, _ = head.accept()
        with connection:
            connection.sendall(bytes.fromhex("000018040000000000"))  # how the control service of Ray 2.60 begins
            out, _ = asking.communicate(timeout=HANG_S)
    assert (asking.returncode, out) == (0, b"")


@pytest.mark.parametrize("arguments", [["start", "--head", "--block"], ["health-check"], ["health-check", "--address", "head"], []])
def test_all_else_is_for_rays_own_command(ray: Path, arguments: list[str]) -> None:
    check_own(ray, arguments, {})


def test_with_tls_the_client_speaks_first(ray: Path) -> None:
    check_own(ray, ["health-check", "--address", "head:6379"], {"RAY_USE_TLS": "1"})


def check_own(ray: Path, arguments: list[str], environment: dict[str, str]) -> None:
    done = subprocess.run([ray, *arguments], capture_output=True, text=True, timeout=HANG_S, check=False, env=os.environ | environment)
    assert (done.returncode, done.stdout) == (3, f"own {' '.join(arguments)}\n")
