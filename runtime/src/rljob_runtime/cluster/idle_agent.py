"""Takes the place of Ray's agents on the nodes of an embedded cluster; only the standard library, and little of it.

``python -I -S idle_agent.py KIND AGENT [ARGUMENTS]``, where the raylet would run ``python AGENT [ARGUMENTS]``. It starts working when the
files with its agents' ports are there, and ends as soon as one of them ends. Imports of Ray take its own agents a second before they write
those files. Of each kind:

- ``dashboard`` exports Ray's metrics and answers Ray's dashboard. Here it writes port -1, which is what Ray's own agent does for services
  that it does not run, and waits for the end of the raylet.
- ``runtime_env`` prepares environments that workers ask for, and most jobs' workers ask for none. Here it listens, and becomes Ray's own
  agent at the first request, which the raylet repeats every second until it is answered.

No switch of Ray's leaves the agents out: `include_dashboard` and `RAY_enable_metrics_collection` decide what they do, not whether they are
started. This relies on Ray 2.60, which rljob-runtime pins: on the names of the port files and of the agents' arguments, and on
RAY_RAYLET_PID. With a Ray that has others no node starts: "the embedded Ray cluster did not start in 2 attempts", with Ray's own reason,
and the raylet's log names the file that it waits for. On Kubernetes nodes have Ray's own agents: KubeRay's probes ask them.
"""

from __future__ import annotations

import os
import select
import socket
import sys
from collections.abc import Iterable, Mapping

DASHBOARD, RUNTIME_ENV = "dashboard", "runtime_env"
DASHBOARD_PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port")
RUNTIME_ENV_PORT = "runtime_env_agent_port"
PORT_ARGUMENT = "--runtime-env-agent-port="
NOT_RUNNING = -1
LOOK_S = 1.0
"""Where the system cannot wait for the end of a process that is no child."""


def main() -> None:
    """Until the raylet ends, or forever as Ray's own agent."""
    kind, command = sys.argv[1], sys.argv[2:]
    given = options(command)
    raylet = int(os.environ["RAY_RAYLET_PID"])
    if kind == DASHBOARD:
        for service in DASHBOARD_PORTS:
            write_port(given, service, NOT_RUNNING)
        wait(raylet)
        return
    with bound(given["node-ip-address"], 0) as kept:  # nobody else gets the port while Ray's own agent is imported
        address, port, *_ = kept.getsockname()
        with bound(address, port) as listening:
            listening.listen()
            write_port(given, RUNTIME_ENV_PORT, port)
            wanted = wait(raylet, listening)
        if wanted:
            kept.set_inheritable(True)
            own = [PORT_ARGUMENT + str(port) if argument.startswith(PORT_ARGUMENT) else argument for argument in command]
            os.execv(sys.executable, [sys.executable, "-u", *own])


def options(command: Iterable[str]) -> dict[str, str]:
    """Arguments of the form ``--name=value``, by name."""
    return dict(argument.removeprefix("--").split("=", 1) for argument in command if argument.startswith("--") and "=" in argument)


def write_port(given: Mapping[str, str], service: str, port: int) -> None:
    """Into a file that is whole when it appears; ``given`` are the agent's arguments."""
    path = os.path.join(given["session-dir"], f"{service}_{given['node-id']}")
    with open(f"{path}.part", "w") as file:
        file.write(str(port))
    os.rename(f"{path}.part", path)


def bound(address: str, port: int) -> socket.socket:
    """A socket on a port of the node's address, 0 for a free one; another that does not listen may have it too."""
    family, kind, protocol, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    made.bind(place)
    return made


def wait(raylet: int, *listening: socket.socket) -> bool:
    """Whether somebody connects; False when the raylet has ended before."""
    try:
        ended = [os.pidfd_open(raylet)]
    except (AttributeError, OSError):  # not on Linux, or the raylet has ended already
        ended = []
    try:
        while ended or os.getppid() == raylet:
            ready, _, _ = select.select([*(s.fileno() for s in listening), *ended], [], [], None if ended else LOOK_S)
            if ready:
                return ready != ended
    finally:
        for descriptor in ended:
            os.close(descriptor)
    return False


if __name__ == "__main__":
    main()
