"""One installation of the chart per run: namespaces, a volume, the operator from the built image; removed at the end.

`make e2e` builds the cluster and the images first. For another cluster set KUBECONFIG (its context must be on the allow-list of
e2e.cluster), RLJOB_E2E_OPERATOR_IMAGE, RLJOB_E2E_RUNTIME_IMAGE, and RLJOB_E2E_STORAGE_CLASS for a ReadWriteMany volume.

Starting a job's pods and processes is most of what a scenario computes, so scenarios share jobs where they can. A job whose scenario only
looks at the outcome is applied ahead of it (marker ``begins``), and trains while other scenarios wait. The scenario of queues has a
namespace of its own and runs in a thread from the beginning.

test_rights.py runs last and checks the operator's permissions against the API server's audit log, RLJOB_E2E_AUDIT_LOG. Only the built
cluster has one; without it that test is deselected.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from e2e.cluster.guard import require_allowed_context
from e2e.environment import needed
from e2e.guarded import Guarded
from e2e.installation import NAMESPACE, Helm, installation_values, installed
from e2e.kubectl import Kubectl
from e2e.rights import Right
from e2e.volumes import Volume, shared_volume

pytest.register_assert_rewrite("e2e.queues")
from e2e.queues import Outcome, namespace_with_a_queue, preempted_and_suspended  # noqa: E402 - after its assertions are to explain themselves

AUDIT_LOG = "RLJOB_E2E_AUDIT_LOG"
AFTER = {"test_time_division.py": "test_training.py", "test_agents.py": "test_queues.py", "test_upgrade.py": "test_security.py"}
"""Files that look at a job of an earlier file, or go on with it, which would otherwise train longer."""
LAST = Path(__file__).with_name("test_rights.py")
ABREAST = 1
"""Jobs that are applied ahead and have not ended: with those of the scenario and of queues three. On two slow cores that started four at
once, Ray's processes did not come up within the 30 s that Ray gives them."""
COLLECTED_AT = pytest.StashKey[datetime]()
"""Before the first request of this run."""
RIGHTS_FOR_A_WHILE = pytest.StashKey[set[Right]]()
"""Of the operator, while a scenario had the chart's webhook installed."""
DESELECTED = pytest.StashKey[list[str]]()
"""Tests that were collected and will not run."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Run the test that evaluates all scenarios last, or deselect it without an audit log."""
    config.stash[COLLECTED_AT] = datetime.now(UTC)
    items.sort(key=lambda item: place(item.path.name))
    last = [item for item in items if item.path == LAST]
    others = [item for item in items if item.path != LAST]
    if AUDIT_LOG in os.environ:
        items[:] = [*others, *last]
    elif last:
        items[:] = others
        config.hook.pytest_deselected(items=last)


def place(file: str) -> tuple[str, ...]:
    """Sorts files by their names, those of :data:`AFTER` behind the one they follow."""
    return (*place(AFTER[file]), file) if file in AFTER else (file,)


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        item.config.stash.setdefault(DESELECTED, []).append(item.name)


def what_did_not_run(session: pytest.Session) -> str:
    """Why this was not a complete, passing run of e2e/; empty if it was."""
    here = Path(__file__).parent
    files = {path.name for path in here.glob("test_*.py")} - {item.path.name for item in session.items if item.path.parent == here}
    reasons = [
        f"not collected: {', '.join(sorted(files))}" if files else "",
        f"deselected: {', '.join(session.config.stash.get(DESELECTED, []))}" if session.config.stash.get(DESELECTED, []) else "",
        f"only part of a file: {', '.join(session.config.args)}" if any("::" in arg for arg in session.config.args) else "",
        f"{session.testsfailed} failed" if session.testsfailed else "",
    ]
    return "; ".join(filter(None, reasons))


@pytest.fixture(scope="session")
def kubectl() -> Kubectl:
    kubeconfig = Path(needed("KUBECONFIG"))
    require_allowed_context(kubeconfig)
    return Kubectl(shutil.which("kubectl") or needed("RLJOB_E2E_KUBECTL"), kubeconfig, NAMESPACE)


@pytest.fixture(scope="session")
def helm(kubectl: Kubectl) -> Helm:
    return Helm(kubectl)


@pytest.fixture(scope="session")
def chart_values() -> list[str]:
    return installation_values()


@pytest.fixture(scope="session", autouse=True)
def installation(kubectl: Kubectl, helm: Helm, chart_values: list[str]) -> Iterator[None]:
    """Install the chart and wait until the operator is ready."""
    with installed(kubectl, helm, chart_values):
        yield


@pytest.fixture(scope="session")
def volume(kubectl: Kubectl, installation: None) -> Iterator[Volume]:
    """A ReadWriteMany volume for checkpoints, in the namespace of the scenarios."""
    with shared_volume(kubectl) as made:
        yield made


@pytest.fixture(scope="session")
def scenario_of_queues(kubectl: Kubectl, installation: None) -> Iterator[Future[Outcome]]:
    """Begun with the first scenario."""
    with namespace_with_a_queue(kubectl) as queued, shared_volume(queued) as made, ThreadPoolExecutor(1) as thread:
        yield thread.submit(preempted_and_suspended, queued, made)


@pytest.fixture(scope="session")
def guarded(kubectl: Kubectl, volume: Volume) -> Iterator[Guarded]:
    """The job of the scenarios of security and of upgrades."""
    made = Guarded(kubectl)
    yield made
    made.delete()


class Ahead:
    """Jobs of later scenarios that train beside the present one, whose waits leave the machine idle."""

    def __init__(self, items: Sequence[pytest.Item], kubectl: Kubectl) -> None:
        self._kubectl = kubectl
        self._waiting = [(item.nodeid, marker) for item in items for marker in item.iter_markers("begins")]
        self._applied: list[str] = []
        self._prepared: list[object] = []

    def begin(self, nodeid: str) -> None:
        """Apply the jobs of this scenario, and of the next ones while fewer than :data:`ABREAST` have not ended."""
        self._applied = [name for name in self._applied if not self._ended(name)]
        while self._waiting and (len(self._applied) < ABREAST or nodeid in [waiting for waiting, _ in self._waiting]):
            _, marker = self._waiting.pop(0)
            prepare = marker.kwargs.get("prepare")
            if prepare is not None and prepare not in self._prepared:
                prepare(self._kubectl)
                self._prepared.append(prepare)
            self._kubectl.apply(marker.args[0])
            self._applied.append(marker.args[0]["metadata"]["name"])

    def _ended(self, name: str) -> bool:
        return any(self._kubectl.condition(name, kind).get("status") == "True" for kind in ("Succeeded", "Failed"))


@pytest.fixture(scope="session")
def ahead(request: pytest.FixtureRequest, kubectl: Kubectl, installation: None) -> Ahead:
    made = Ahead(request.session.items, kubectl)
    if any(item.get_closest_marker("begins") for item in request.session.items):
        request.getfixturevalue("volume")
    if any("scenario_of_queues" in getattr(item, "fixturenames", ()) for item in request.session.items):
        request.getfixturevalue("scenario_of_queues")
    return made


@pytest.fixture(autouse=True)
def begun(request: pytest.FixtureRequest, ahead: Ahead) -> None:
    """Apply jobs that have the marker ``begins``, the present scenario's and some of the next."""
    ahead.begin(request.node.nodeid)
