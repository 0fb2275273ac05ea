"""Jobs as the operator sees them."""

import dataclasses
import json
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rljob_api import naming
from rljob_api.validation import CheckedJob, check
from rljob_operator.desired import attempt_objects
from rljob_operator.model import JobView, Key, Manifest
from rljob_operator.settings import Settings

ROOT = Path(__file__).parents[4]
GOLDEN = ROOT / "tests" / "golden" / "rayjobs"
SOURCES = {
    "quickstart": ROOT / "examples" / "quickstart.yaml",
    "evaluate": ROOT / "examples" / "evaluate.yaml",
    **{path.name.removesuffix(".job.yaml"): path for path in sorted(GOLDEN.glob("*.job.yaml"))},
}
"""Manifests whose objects are golden files, by name."""
SETTINGS = Settings(runtime_image="registry.example/rljob-runtime:0.1.0", runtime_ray_version="2.60.0", kuberay_namespace="kuberay")


def checked(source: str | Mapping[str, Any]) -> CheckedJob:
    return check(source)


def view(job: CheckedJob, namespace: str = "team-rl") -> JobView:
    return JobView(
        key=Key(namespace=namespace, name=job.job.metadata.name),
        uid="5f0c1f2e-0000-4000-8000-000000000001",
        version="7",
        generation=1,
        created=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        spec=json.loads(job.job.spec.model_dump_json(by_alias=True)),
        status={},
        deleting=False,
    )


def objects(source: str | Mapping[str, Any], attempt: int = 1, settings: Settings = SETTINGS) -> tuple[Manifest, ...]:
    job = checked(source)
    return attempt_objects(view(job), job, attempt, settings)


def one(found: tuple[Manifest, ...], kind: str) -> Manifest:
    (manifest,) = [item for item in found if item["kind"] == kind]
    return manifest


def spec_text(found: tuple[Manifest, ...]) -> str:
    """The resolved spec that the head pod gets."""
    text: str = groups(one(found, "RayJob"))[0]["template"]["metadata"]["annotations"][naming.SPEC_ANNOTATION]
    return text


def ray_job(source: str | Mapping[str, Any], attempt: int = 1) -> Manifest:
    return one(objects(source, attempt), "RayJob")


def groups(rayjob: Manifest) -> list[Manifest]:
    """Head group first."""
    cluster = rayjob["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def container(group: Manifest) -> Manifest:
    first: Manifest = group["template"]["spec"]["containers"][0]
    return first


def environment(group: Manifest) -> dict[str, Any]:
    return {variable["name"]: variable.get("value", variable.get("valueFrom")) for variable in container(group)["env"]}


def settings(**changes: Any) -> Settings:
    return dataclasses.replace(SETTINGS, **changes)
