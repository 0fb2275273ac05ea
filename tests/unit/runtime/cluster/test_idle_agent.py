"""What takes the place of Ray's agents, over a raylet that is a plain process and an agent of the test's own."""

import contextlib
import http.client
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rljob_runtime.cluster import idle_agent
from tests.support.pace import HANG_S, until

AGENT = """
import http.server, os, sys
given = dict(a.removeprefix("--").split("=", 1) for a in sys.argv[1:])
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"{os.getpid()} {given['log-dir']}".encode())
http.server.HTTPServer((given["node-ip-address"], int(given["runtime-env-agent-port"])), Answer).serve_forever()
"""


class Raylet:
    """A process that lives until it is ended, and an agent that believes to be its child."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.process = subprocess.Popen([sys.executable, "-I", "-S", "-c", "import signal; signal.pause()"])
        (folder / "agent.py").write_text(AGENT)
        arguments = ["--node-id=n1", f"--session-dir={folder}", "--node-ip-address=127.0.0.1", "--runtime-env-agent-port=0", "--log-dir=/l"]
        self.agent = subprocess.Popen(
            [sys.executable, "-I", "-S", idle_agent.__file__, kind, str(folder / "agent.py"), *arguments],
            env=os.environ | {"RAY_RAYLET_PID": str(self.process.pid)},
        )

    def end(self) -> None:
        self.process.kill()
        self.process.wait(HANG_S)


@pytest.fixture
def raylet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Raylet]:
    made = Raylet(request.param, tmp_path)
    yield made
    made.end()
    made.agent.kill()
    made.agent.wait(HANG_S)


def content(path: Path) -> str:
    """Of a file, once it is there."""
    until(f"{path} is written", path.exists)
    return path.read_text()


def answer(port: int) -> str:
    """Of the agent, asked again until there is one, as the raylet does."""
    answers: list[str] = []

    def answered() -> bool:
        asking = http.client.HTTPConnection("127.0.0.1", port, timeout=HANG_S)
        with contextlib.closing(asking), contextlib.suppress(ConnectionError):
            asking.request("GET", "/")
            answers.append(asking.getresponse().read().decode())
        return bool(answers)

    until("the agent answers", answered)
    return answers[0]


@pytest.mark.parametrize("raylet", [idle_agent.DASHBOARD], indirect=True)
def test_the_dashboards_agent_runs_no_service_and_ends_with_the_raylet(raylet: Raylet, tmp_path: Path) -> None:
    for service in ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port"):
        assert content(tmp_path / f"{service}_n1") == "-1"
    assert raylet.agent.poll() is None
    raylet.end()
    assert raylet.agent.wait(HANG_S) == 0


@pytest.mark.parametrize("raylet", [idle_agent.RUNTIME_ENV], indirect=True)
def test_the_agent_of_runtime_environments_that_nobody_asks_ends_with_the_raylet(raylet: Raylet, tmp_path: Path) -> None:
    assert int(content(tmp_path / "runtime_env_agent_port_n1")) > 0
    raylet.end()
    assert raylet.agent.wait(HANG_S) == 0


@pytest.mark.parametrize("raylet", [idle_agent.RUNTIME_ENV], indirect=True)
def test_the_agent_of_runtime_environments_becomes_rays_own_at_the_first_request(raylet: Raylet, tmp_path: Path) -> None:
    port = int(content(tmp_path / "runtime_env_agent_port_n1"))
    assert answer(port) == answer(port) == f"{raylet.agent.pid} /l"
