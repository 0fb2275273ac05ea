"""The resolved RLJob of an attempt and the ConfigMap that mounts it into the head pod."""

from __future__ import annotations

import posixpath

import yaml

from rljob_api import naming
from rljob_api.v1alpha1.rljob import RLJob
from rljob_operator.desired.metadata import attempt_labels, child_metadata
from rljob_operator.model import JobView, Manifest
from rljob_operator.settings import Settings

_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""libyaml's emitter is four times faster than the pure Python one, which would dominate the cost of building an attempt's objects."""
SPEC_KEY = posixpath.basename(naming.SPEC_FILE)


def resolve(job: RLJob, settings: Settings) -> RLJob:
    """Resolve what one attempt runs, regardless of later changes: image and Ray version filled in, not suspended, no status."""
    spec = job.spec.model_copy(
        update={
            "suspend": False,
            "image": job.spec.image or settings.runtime_image,
            "ray_version": job.spec.ray_version or settings.runtime_ray_version,
        }
    )
    return job.model_copy(update={"spec": spec, "status": None})


def config_map(job: JobView, resolved: RLJob, attempt: int) -> Manifest:
    """Immutable ConfigMap with the resolved job, all defaults spelled out."""
    document = resolved.model_dump(mode="json", by_alias=True, exclude_none=True)
    document["metadata"] = {"name": job.key.name, "namespace": job.key.namespace}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": child_metadata(job, naming.rayjob_name(job.key.name, attempt), attempt_labels(job, attempt)),
        "immutable": True,
        "data": {SPEC_KEY: yaml.dump(document, Dumper=_DUMPER, sort_keys=False, allow_unicode=True, width=140)},
    }
