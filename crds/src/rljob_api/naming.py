"""Derived names and labels with their length budgets, so that nothing is refused after devices are taken.

KubeRay refuses RayJob names over 47 characters. A child is called ``<job>-a<attempt>``; with two digits for the attempt
that leaves 43 for the job, which the schema enforces.
"""

from __future__ import annotations

MAX_JOB_NAME = 43
"""Characters of ``metadata.name``."""
MAX_RAYJOB_NAME = 47
"""Characters KubeRay allows for a RayJob."""
NODE_GROUP_LABEL = "ray.io/node-group"
"""Ray node label (and pod label) that carries the name of the node group."""
RESERVED_LABEL_PREFIXES = ("ray.io/", "rljob.dev/", "kubernetes.io/", "k8s.io/")
"""Label prefixes that users cannot set in ``nodeGroups[].labels``."""


def rayjob_name(job: str, attempt: int) -> str:
    """Name of the RayJob of an attempt (counted from 1), for example ``math-grpo-a1``.

    Raises:
        ValueError: the attempt is not positive or the name gets longer than KubeRay allows.
    """
    name = f"{job}-a{attempt}"
    if attempt < 1 or len(name) > MAX_RAYJOB_NAME:
        raise ValueError(
            f"{name!r} cannot name a RayJob: attempts count from 1 and {len(name)} characters must not exceed {MAX_RAYJOB_NAME}; "
            f"use a job name of at most {MAX_JOB_NAME} characters"
        )
    return name


def worker_name(component: str, rank: int) -> str:
    """Name of a worker process, its actor and its log file: ``<component>-<rank>``."""
    return f"{component}-{rank}"
