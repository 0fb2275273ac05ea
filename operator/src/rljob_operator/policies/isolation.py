"""A driver that cannot be reached: its pod runs on, all of its nodes have ended, and KubeRay and Ray report nothing new.

A head pod that is cut off the network cannot report its end. KubeRay's liveness probe ends it after ten minutes. Being not ready alone
proves nothing: the probe of a busy head fails, too, and a step may take longer than any wait. So both must hold:

- the head pod is not ready, for :data:`WAIT`;
- no node runs, by its phase, which stays as it was where a machine does not answer. The pods of a job never run again once they have
  ended, and one that takes the place of another stays Pending until it reaches the head. When the driver began all nodes were ready, so a
  job that trains has at least one that runs.

A driver that lost its nodes and is reached ends by itself, and says why.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from rljob_api.vocabulary import Reason
from rljob_operator import times
from rljob_operator.model import Failure, PodView
from rljob_operator.policies.failure import runs_driver
from rljob_operator.policies.situation import Situation

NOT_RUNNING = ("Pending", "Succeeded", "Failed")
"""Phases of a pod whose processes have not started or have ended; in any other, Unknown among them, they may run."""
WAIT = timedelta(seconds=60)
"""For what the driver says, if it is reached again; the kubelet reports a head as not ready 50 s after it was cut off."""


def lost_at(situation: Situation) -> datetime | None:
    """When the driver counts as lost; None while it may train."""
    head = _head(situation)
    return None if head is None or head.unready_since is None else head.unready_since + WAIT


def lost(situation: Situation) -> Failure | None:
    """The failure of an attempt whose driver cannot be reached."""
    head, until = _head(situation), lost_at(situation)
    if head is None or head.unready_since is None or until is None or situation.now < until or situation.attempt is None:
        return None
    since, nodes = times.text(head.unready_since), f"none of its {situation.options.num_nodes} nodes runs any more"
    if head.is_node_silent:
        message = f"The node of the driver's pod, {head.name}, has not answered since {since}, and {nodes}."
        return Failure(attempt=situation.attempt, reason=Reason.EVICTED, message=message, pod_name=head.name)
    message = f"The driver was lost: its pod, {head.name}, has not been reached since {since}, and {nodes}."
    return Failure(attempt=situation.attempt, reason=Reason.HEAD_LOST, message=message, pod_name=head.name)


def _head(situation: Situation) -> PodView | None:
    """The head pod, if both signs are there."""
    child = situation.live_child
    if child is None or child.deleting or situation.is_held or not runs_driver(child):
        return None
    nodes = [pod for pod in situation.pods if not pod.is_head]
    if len(nodes) < max(situation.options.num_nodes, 1) or any(pod.phase not in NOT_RUNNING for pod in nodes):
        return None  # fewer: not all have been seen yet, or nothing is known of them
    return next((pod for pod in situation.pods if pod.is_head and pod.phase == "Running" and not pod.ready and not pod.deleting), None)
