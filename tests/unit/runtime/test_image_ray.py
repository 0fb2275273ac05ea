"""The command `ray` of the runtime image, as KubeRay's init container calls it on every worker node, and what its shell reads before."""

import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.layout.tree import ROOT
from tests.support.pace import HANG_S
from tests.support.ports import needs_ipv6

BASH_ENV = ROOT / "runtime" / "image" / "bash_env"


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


@pytest.mark.parametrize("command", ["ray", "sleep"])
def test_the_shell_that_waits_for_the_head_ends_at_once_when_asked_to(tmp_path: Path, command: str) -> None:
    """Whichever of its two commands runs. As the first process of a container it would ignore the signal, elsewhere not end by 143."""
    for name, program in {"ray": "exit 1", "sleep": "exit 0", command: "echo waits; exec /bin/sleep 1000"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{program}\n")
        (tmp_path / name).chmod(0o755)
    waits = "while true; do if ray health-check --address head:6379; then break; fi; sleep 5; done"
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "BASH_ENV": str(BASH_ENV)}
    with subprocess.Popen(["/bin/bash", "-c", "--", waits], stdout=subprocess.PIPE, env=environment, start_new_session=True) as shell:
        assert shell.stdout is not None
        try:
            assert shell.stdout.readline() == b"waits\n"
            shell.send_signal(signal.SIGTERM)
            assert shell.wait(HANG_S) == 128 + signal.SIGTERM
        finally:
            os.killpg(shell.pid, signal.SIGKILL)


def test_other_shells_of_the_image_are_as_always(tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("set -u\ntrap -p\ndeclare -F\n")
    for arguments in (["-c", "trap -p; declare -F; ulimit -n; ray start --head --block || true"], [script]):
        done = subprocess.run(
            ["/bin/bash", *arguments], capture_output=True, text=True, timeout=HANG_S, check=True, env={"BASH_ENV": str(BASH_ENV)}
        )
        assert "SIGTERM" not in done.stdout
        assert "declare" not in done.stdout


def test_the_image_has_what_its_shells_read() -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert "COPY runtime/image/bash_env /opt/rljob/share/bash_env\n" in text
    assert " BASH_ENV=/opt/rljob/share/bash_env " in text
