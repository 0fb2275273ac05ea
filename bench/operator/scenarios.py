"""What is measured, one function a question; each works in a namespace of its own and returns plain figures."""

from __future__ import annotations

import asyncio
import copy
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.operator.api import RAYJOBS, RLJOBS, Api, bounded
from bench.operator.subject import Subject
from bench.operator.watcher import Watcher, exists, summary
from rljob_api.reading.manifest import read

ROOT = Path(__file__).resolve().parents[2]
RBAC = "/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
CHILDREN = (
    "/api/v1/namespaces/{namespace}/serviceaccounts",
    f"{RBAC}/roles",
    f"{RBAC}/rolebindings",
    "/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies",
    RAYJOBS,
)
"""Collections of what the operator makes for a job, in an order in which they can be made."""
QUICKSTART: dict[str, Any] = dict(read((ROOT / "examples" / "quickstart.yaml").read_text()).data)
REQUESTS = "rljob_operator_requests_total"
WRITES = {"create": ("create",), "patch": ("patch", "apply_status"), "delete": ("delete",)}
"""What a write is called here -> the operator's verbs that are one."""
RECONCILES = "rljob_operator_reconcile_seconds_count"
RUNNING = {"jobDeploymentStatus": "Running", "jobStatus": "RUNNING"}
SUCCEEDED = {"jobDeploymentStatus": "Complete", "jobStatus": "SUCCEEDED"}
TIMEOUT_S = 300.0
LAST_EVENTS_S = 3.0
"""The events of what happened before follow its statuses; they are not part of an idle minute."""
REACTION_PAUSE_S = 0.05
"""Between two child changes of the reaction scenario: about a training fleet's rate, and no queue of its own making."""

Progress = Callable[[str], None]


def writes(subject: Subject, *names: str) -> float:
    """Writes the operator has asked for so far, answered or not; all when no name is given."""
    return sum(subject.total(REQUESTS, verb=verb) for name in names or WRITES for verb in WRITES[name])


def written_kinds(subject: Subject) -> dict[str, float]:
    """The same by verb and kind."""
    return {
        f"{verb} {kind}": subject.total(REQUESTS, verb=verb, kind=kind)
        for verb in itertools.chain.from_iterable(WRITES.values())
        for kind in subject.labels(REQUESTS, "kind")
    }


def job_manifest(name: str) -> dict[str, Any]:
    """The quickstart under another name."""
    manifest = copy.deepcopy(QUICKSTART)
    manifest["metadata"]["name"] = name
    return manifest


def quantiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    """p50, p99 and the largest, in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"p50_ms": cuts[49] * 1e3, "p99_ms": cuts[98] * 1e3, "max_ms": max(seconds) * 1e3}


async def latency(api: Api, namespace: str, count: int) -> dict[str, Any]:
    """RLJob created -> RayJob exists, one at a time on an idle operator: from the API server's answer to the watch event."""
    await api.namespace(namespace)
    rlj, ray = RLJOBS.format(namespace=namespace), RAYJOBS.format(namespace=namespace)
    took_s = []
    async with Watcher(api, ray, exists) as rayjobs:
        for index in range(count):
            await api.create(rlj, job_manifest(f"one-{index}"))
            created_s = time.monotonic()
            seen_s = await rayjobs.wait("exists", index + 1, TIMEOUT_S)
            took_s.append(seen_s[f"one-{index}-a1"] - created_s)
    return {"jobs": count, **quantiles_ms(took_s)}


async def burst(api: Api, subject: Subject, namespace: str, count: int) -> dict[str, Any]:
    """``count`` RLJobs at once -> all RayJobs exist and all statuses say so."""
    await api.namespace(namespace)
    rlj, ray = RLJOBS.format(namespace=namespace), RAYJOBS.format(namespace=namespace)
    written, cpu_s, server_s = writes(subject), subject.cpu_s(), subject.server_cpu_s()
    async with Watcher(api, ray, exists) as rayjobs, Watcher(api, rlj, summary) as jobs:
        began_s = time.monotonic()
        await bounded(partial(api.create, rlj, job_manifest(f"job-{index}")) for index in range(count))
        created_s = time.monotonic() - began_s
        children_s = max((await rayjobs.wait("exists", count, TIMEOUT_S + count / 10)).values()) - began_s
        settled_s = max((await jobs.wait("Starting", count, TIMEOUT_S)).values()) - began_s
    return {
        "jobs": count,
        "client_created_s": created_s,
        "all_children_s": children_s,
        "all_statuses_s": settled_s,
        "jobs_per_s": count / children_s,
        "operator_cpu_ms_per_job": (subject.cpu_s() - cpu_s) / count * 1e3,
        "server_cpu_ms_per_job": (subject.server_cpu_s() - server_s) / count * 1e3,
        "writes_per_job": (writes(subject) - written) / count,
    }


async def direct(api: Api, source: str, namespace: str, count: int) -> dict[str, Any]:
    """The same objects created by the client itself, 16 in flight, RayJobs alone and all of them: what the API server allows."""
    await api.namespace(namespace)
    manifests: dict[str, list[dict[str, Any]]] = {}
    for collection in CHILDREN:
        items = (await api.call("GET", f"{collection.format(namespace=source)}?limit={count}&labelSelector=rljob.dev/job"))["items"]
        manifests[collection.format(namespace=namespace)] = [stripped(item) for item in items]
    took_s = {}
    for collection, objects in manifests.items():
        began_s = time.monotonic()
        await bounded(partial(api.create, collection, m) for m in objects)
        took_s[collection] = time.monotonic() - began_s
    rayjobs = RAYJOBS.format(namespace=namespace)
    num_objects = sum(map(len, manifests.values()))
    return {
        "rayjobs": len(manifests[rayjobs]),
        "all_created_s": took_s[rayjobs],
        "per_s": len(manifests[rayjobs]) / took_s[rayjobs],
        "objects": num_objects,
        "all_objects_s": sum(took_s.values()),
        "objects_per_s": num_objects / sum(took_s.values()),
    }


def stripped(item: dict[str, Any]) -> dict[str, Any]:
    """An object of the same content that nobody owns and that carries no label, so that the operator does not look at it."""
    content = {name: value for name, value in item.items() if name not in ("metadata", "status")}
    return copy.deepcopy(content) | {"metadata": {"name": item["metadata"]["name"]}}


async def all_running(api: Api, namespace: str, count: int) -> dict[str, Any]:
    """KubeRay's part: every RayJob starts; how long until every RLJob says Running."""
    rlj, ray = RLJOBS.format(namespace=namespace), RAYJOBS.format(namespace=namespace)
    async with Watcher(api, rlj, summary) as jobs:
        began_s = time.monotonic()
        await bounded(partial(api.patch_status, f"{ray}/job-{index}-a1", RUNNING) for index in range(count))
        took_s = max((await jobs.wait("Running", count, TIMEOUT_S)).values()) - began_s
    return {"jobs": count, "all_running_s": took_s, "per_s": count / took_s}


async def reaction(api: Api, namespace: str, live: int, changes: int) -> dict[str, Any]:
    """Child status change -> RLJob condition, while ``live`` jobs run: from the API server's answer to the watch event."""
    rlj, ray = RLJOBS.format(namespace=namespace), RAYJOBS.format(namespace=namespace)
    changed_s: dict[str, float] = {}
    async with Watcher(api, rlj, summary) as jobs:
        for index in range(changes):
            await api.patch_status(f"{ray}/job-{index}-a1", SUCCEEDED)
            changed_s[f"job-{index}"] = time.monotonic()
            await asyncio.sleep(REACTION_PAUSE_S)
        seen_s = await jobs.wait("Completed", changes, TIMEOUT_S)
    return {"live_jobs": live, "changes": changes, **quantiles_ms([seen_s[name] - at for name, at in changed_s.items()])}


async def life(api: Api, subject: Subject, namespace: str, count: int) -> dict[str, Any]:
    """Writes of one whole life by verb: created, running, succeeded, one job after the other."""
    await api.namespace(namespace)
    rlj, ray = RLJOBS.format(namespace=namespace), RAYJOBS.format(namespace=namespace)
    before, kinds = {name: writes(subject, name) for name in WRITES}, written_kinds(subject)
    async with Watcher(api, ray, exists) as rayjobs, Watcher(api, rlj, summary) as jobs:
        for index in range(count):
            await api.create(rlj, job_manifest(f"life-{index}"))
            await rayjobs.wait("exists", index + 1, TIMEOUT_S)
            for word, status in (("Running", RUNNING), ("Completed", SUCCEEDED)):
                await api.patch_status(f"{ray}/life-{index}-a1", status)
                await jobs.wait(word, index + 1, TIMEOUT_S)
    await asyncio.sleep(1)  # events follow the status write
    each = {name: (writes(subject, name) - before[name]) / count for name in WRITES}
    by_kind = {what: (total - kinds.get(what, 0.0)) / count for what, total in written_kinds(subject).items()}
    return {"jobs": count, **each, "all": sum(each.values()), "by_kind": {what: each for what, each in by_kind.items() if each}}


async def finished(api: Api, source: str, namespace: str, count: int) -> dict[str, Any]:
    """``count`` jobs that are over, with the status that the operator gave one in ``source``; their children are long gone."""
    await api.namespace(namespace)
    rlj = RLJOBS.format(namespace=namespace)
    (model,) = (await api.call("GET", f"{RLJOBS.format(namespace=source)}?limit=1"))["items"]

    async def one(index: int) -> None:
        # Suspended, the operator makes no children in the moment before the status is there.
        manifest = job_manifest(f"over-{index}")
        manifest["spec"]["suspend"] = True
        await api.create(rlj, manifest)
        await api.patch_status(f"{rlj}/over-{index}", model["status"])

    began_s = time.monotonic()
    await bounded(partial(one, index) for index in range(count))
    return {"jobs": count, "seconds": time.monotonic() - began_s}


async def idle(subject: Subject, jobs: int, seconds: float) -> dict[str, Any]:
    """Nothing happens: what the operator writes and burns."""
    await asyncio.sleep(LAST_EVENTS_S)
    written, cpu_s = writes(subject), subject.cpu_s()
    await asyncio.sleep(seconds)
    return {
        "jobs": jobs,
        "seconds": seconds,
        "writes_per_min": (writes(subject) - written) / seconds * 60,
        "cpu_share_of_a_core": (subject.cpu_s() - cpu_s) / seconds,
        "rss_bytes": subject.rss_bytes(),
    }


async def restart(api: Api, subject: Subject, namespace: str, present: int) -> dict[str, Any]:
    """A new process with ``present`` jobs there: seconds to the first new job's child, and to having looked at every job."""
    await api.namespace(namespace)
    rlj, ray = RLJOBS.format(namespace=namespace), RAYJOBS.format(namespace=namespace)
    subject.stop()
    server_s = subject.server_cpu_s()
    async with Watcher(api, ray, exists) as rayjobs:
        began_s = time.monotonic()
        await asyncio.to_thread(subject.start)
        healthy_s = time.monotonic() - began_s
        await api.create(rlj, job_manifest("first"))
        first_s = (await rayjobs.wait("exists", 1, TIMEOUT_S))["first-a1"] - began_s
        while subject.total(RECONCILES) < present:
            if time.monotonic() - began_s > TIMEOUT_S:
                raise TimeoutError(f"the operator looked at {subject.total(RECONCILES):.0f} of {present} jobs within {TIMEOUT_S:.0f} s")
            await asyncio.sleep(0.2)
        all_s = time.monotonic() - began_s
    return {
        "present": present,
        "healthy_s": healthy_s,
        "first_job_s": first_s,
        "all_jobs_s": all_s,
        "operator_cpu_s": subject.cpu_s(),
        "server_cpu_s": subject.server_cpu_s() - server_s,
        "rss_bytes": subject.rss_bytes(),
    }
