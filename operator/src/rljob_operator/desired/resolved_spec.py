"""The resolved RLJob of an attempt, as the text that the head pod carries.

It is an annotation of the pod, which Kubernetes shows to the pod as a file: an attempt is one object less to make than with a ConfigMap,
and the RayJob is complete in itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from rljob_api.v1alpha1.pods import PullSecret
from rljob_api.v1alpha1.rljob import API_VERSION, KIND, RLJob
from rljob_operator.model import JobView
from rljob_operator.settings import Settings


class _Dumper(getattr(yaml, "CSafeDumper", yaml.SafeDumper)):  # type: ignore[misc]
    """libyaml's emitter is four times faster than the pure Python one, which would dominate the cost of building an attempt's objects."""


# PyYAML writes text such as 1e12 without quotes; YAML 1.2, which jobs are read as, takes that for a number.
_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$"), list("-+.0123456789")
)


def resolve(job: RLJob, status: Mapping[str, Any], settings: Settings) -> RLJob:
    """Resolve what one attempt runs: image and Ray version filled in, not suspended, no status.

    Image and Ray version are those of the first attempt, in ``status``: an upgrade of the operator changes nothing of a job that has begun.
    activeDeadlineSeconds is left out: it may change while the attempt runs, and the operator watches it.
    """
    spec = job.spec.model_copy(
        update={
            "suspend": False,
            "active_deadline_seconds": None,
            "image": status.get("image") or job.spec.image or settings.runtime_image,
            "image_pull_secrets": job.spec.image_pull_secrets or tuple(PullSecret(name=name) for name in settings.pull_secrets),
            "ray_version": status.get("rayVersion") or job.spec.ray_version or settings.runtime_ray_version,
        }
    )
    return job.model_copy(update={"spec": spec, "status": None})


def text(job: JobView, resolved: RLJob) -> str:
    """The resolved job as YAML, without defaults: those are the image's, which may be older than this operator."""
    document = {"apiVersion": API_VERSION, "kind": KIND} | resolved.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    document["metadata"] = {"name": job.key.name, "namespace": job.key.namespace}
    return str(yaml.dump(document, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=140))
