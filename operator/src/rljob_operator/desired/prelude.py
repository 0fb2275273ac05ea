"""The shell line by which a worker pod learns its node rank before Ray starts, and the escape that keeps Kubernetes from editing text.

KubeRay runs a container's args in front of its own command, as one line: ``/bin/bash -c -- "<args> && ulimit -n 65536; <command>"``.
So the line exports into the shell that becomes Ray, ends the pod itself when it cannot tell the rank (a mere failure would only skip
``ulimit``), and does not name KubeRay's command, which would make KubeRay leave it out.
"""

from __future__ import annotations

import shlex

from rljob_api import naming

REPLICA_LABEL = "ray.io/worker-group-replica-index"
"""KubeRay's label with the pod's index in its group; a pod that replaces another gets the lowest free one."""
ENV_REPLICA_INDEX = "RLJOB_REPLICA_INDEX"
"""Carries that label into the container; the downward API leaves it empty when the label is missing."""


def literal(text: str) -> str:
    """Text that a container receives unchanged: Kubernetes expands ``$(NAME)`` in args and env values, and reads ``$$`` as ``$``."""
    return text.replace("$", "$$")


def rank_prelude(first_rank: int, num_nodes: int) -> str:
    """The line for a group whose first node has ``first_rank``; still to be escaped with :func:`literal`."""
    reason = f"rljob: label {REPLICA_LABEL} is missing or not below {num_nodes}; KubeRay needs its feature gate RayMultiHostIndexing"
    refuse = f"{{ echo {shlex.quote(reason)} >&2; exit 1; }}"
    index = f"${ENV_REPLICA_INDEX}"
    return "; ".join(
        [
            f'[[ "{index}" =~ ^[0-9]+$ && "{index}" -lt {num_nodes} ]] || {refuse}',
            f"export {naming.ENV_NODE_RANK}=$(({first_rank} + {ENV_REPLICA_INDEX}))",
            f'export RAY_OVERRIDE_LABELS="{{\\"{naming.NODE_RANK_LABEL}\\": \\"${naming.ENV_NODE_RANK}\\"}}"',
        ]
    )
