"""What ``status`` shows."""

from __future__ import annotations

from e2e.cluster.errors import ClusterError
from e2e.cluster.kubectl import Kubectl
from e2e.cluster.state import State, StateFolder
from e2e.cluster.versions import Mode

_TIMEOUT_S = 15.0


def overview(folder: StateFolder) -> tuple[str, bool]:
    """A few lines about a cluster, and whether all is well.

    Raises:
        ClusterError: its state cannot be read.
    """
    state = folder.load()
    if state is None:
        return f"{folder.path.name}: not up ({folder.path} has no state)", False
    dead = [record.name for record in state.processes if not record.identity.alive()]
    lines = [f"{folder.path.name}: mode {state.mode}, KUBECONFIG={folder.kubeconfig}", *_processes(folder, state)]
    lines.append("ports: " + ", ".join(f"{name} {port}" for name, port in sorted(state.ports.items())))
    problems = [f"does not run: {', '.join(dead)}"] if dead else []
    try:
        problems += _cluster(Kubectl(kubeconfig=folder.kubeconfig), state, lines)
    except ClusterError as error:
        problems.append(f"the API server does not answer: {str(error).strip().splitlines()[-1]}")
    lines += [f"PROBLEM: {problem}" for problem in problems] or ["all is well"]
    return "\n".join(lines), not problems


def _processes(folder: StateFolder, state: State) -> list[str]:
    rows = [f"  {'program':<24} {'pid':>8}  {'':<7} log"]
    for record in state.processes:
        runs = "runs" if record.identity.alive() else "ENDED"
        rows.append(f"  {record.name:<24} {record.identity.pid:>8}  {runs:<7} {folder.log(record.name)}")
    return rows


def _cluster(kubectl: Kubectl, state: State, lines: list[str]) -> list[str]:
    """Append nodes and pods; return what is not as it should be."""
    kubectl("get", "--raw", "/readyz", timeout_s=_TIMEOUT_S)
    lines.append("API server: ready")
    if state.mode is Mode.API:
        return []
    problems = []
    nodes = kubectl.json("get", "nodes", timeout_s=_TIMEOUT_S)["items"]
    for node in nodes:
        ready = next((c["status"] for c in node["status"].get("conditions", []) if c["type"] == "Ready"), "Unknown")
        extended = {key: value for key, value in node["status"].get("allocatable", {}).items() if "/" in key}
        devices = ", ".join(f"{value} {key}" for key, value in extended.items()) or "no devices"
        lines.append(f"node {node['metadata']['name']}: Ready={ready}, {devices}")
        if ready != "True":
            problems.append(f"node {node['metadata']['name']} is not ready")
    if not nodes:
        problems.append("no node has registered")
    pods = kubectl.json("get", "pods", "--all-namespaces", timeout_s=_TIMEOUT_S)["items"]
    phases: dict[str, int] = {}
    for pod in pods:
        phase = pod.get("status", {}).get("phase", "Unknown")
        phases[phase] = phases.get(phase, 0) + 1
    lines.append("pods: " + (", ".join(f"{number} {phase}" for phase, number in sorted(phases.items())) or "none"))
    return problems
