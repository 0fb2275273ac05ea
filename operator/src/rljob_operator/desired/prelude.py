"""Shell prelude that computes the node rank of a worker pod before Ray starts, and escaping of text that Kubernetes would expand.

KubeRay runs a container's args before its own command, in one line: ``/bin/bash -c -- "<args> && ulimit -n 65536; <command>"``.
So the prelude exports into the shell that becomes Ray, exits the shell if it cannot determine the rank (a failed command would only skip
``ulimit``), and must not contain KubeRay's command, or KubeRay would not append it.
"""

from __future__ import annotations

import shlex

from rljob_api import naming

REPLICA_LABEL = "ray.io/worker-group-replica-index"
"""KubeRay's label with the index of a pod in its group; a replacement pod gets the lowest free index."""
ENV_REPLICA_INDEX = "RLJOB_REPLICA_INDEX"
"""Variable that passes the label into the container; the downward API leaves it empty if the label is missing."""


def literal(text: str) -> str:
    """Escape text so that a container receives it unchanged: Kubernetes expands ``$(NAME)`` in args and env, and ``$$`` to ``$``."""
    return text.replace("$", "$$")


def rank_prelude(first_rank: int, num_nodes: int) -> str:
    """Prelude of a group whose first node has ``first_rank``; escape it with :func:`literal`."""
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
