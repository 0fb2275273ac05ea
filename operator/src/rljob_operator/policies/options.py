"""The few spec fields that decisions depend on, read from raw JSON.

A spec that was valid when its child was created may be invalid to a newer operator; the child is managed all the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rljob_api.v1alpha1.base import LABEL_PATTERN
from rljob_api.v1alpha1.operations import FailureAction, FailurePolicy
from rljob_api.v1alpha1.rljob import RLJobSpec

MAX_GROUPS = 16
MAX_GROUP_NAME = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A node group."""

    name: str
    nodes: int
    first_rank: int

    @property
    def rank_range(self) -> str:
        """Node ranks, for example ``0-3`` or ``4``."""
        last = self.first_rank + self.nodes - 1
        return str(last) if self.nodes <= 1 else f"{self.first_rank}-{last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Inputs of the policies."""

    managed_by: str | None
    suspend: bool
    queue: str
    """Name of spec.queue; empty: none. Kueue then owns the RayJob's spec.suspend."""
    groups: tuple[Group, ...]
    max_restarts: int
    max_disruptions: int
    restart_backoff_s: int
    rules: tuple[tuple[str, FailureAction], ...]
    """Reason and action, first match wins."""
    startup_deadline_s: int
    scheduling_deadline_s: int | None
    active_deadline_s: int | None
    ttl_s: int | None

    @property
    def is_queued(self) -> bool:
        """Whether spec.queue is set."""
        return self.queue != ""

    @property
    def num_nodes(self) -> int:
        """Number of nodes of all groups."""
        return sum(group.nodes for group in self.groups)


def read(spec: Mapping[str, Any]) -> Options:
    """Read the options of a spec; absent or malformed fields get their defaults."""
    policy = _map(spec.get("failurePolicy"))
    defaults = FailurePolicy()
    return Options(
        managed_by=managed_by if isinstance(managed_by := spec.get("managedBy"), str) else None,
        suspend=spec.get("suspend") is True,
        queue=str(_map(spec.get("queue")).get("name") or ""),
        groups=_groups(spec.get("nodeGroups")),
        max_restarts=min(_whole(policy.get("maxRestarts"), defaults.max_restarts), 98),
        max_disruptions=min(_whole(policy.get("maxDisruptions"), defaults.max_disruptions), 98),
        restart_backoff_s=_whole(policy.get("restartBackoffSeconds"), defaults.restart_backoff_seconds),
        rules=_rules(policy.get("rules")),
        startup_deadline_s=_whole(spec.get("startupDeadlineSeconds"), RLJobSpec.model_fields["startup_deadline_seconds"].default),
        scheduling_deadline_s=_optional(spec.get("schedulingDeadlineSeconds")),
        active_deadline_s=_optional(spec.get("activeDeadlineSeconds")),
        ttl_s=_optional(spec.get("ttlSecondsAfterFinished")),
    )


def _map(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: object) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _optional(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _whole(value: object, default: int) -> int:
    number = _optional(value)
    return default if number is None else number


def _rules(value: object) -> tuple[tuple[str, FailureAction], ...]:
    actions = {str(action): action for action in FailureAction}
    rules = [_map(item) for item in _list(value)]
    return tuple((str(rule.get("reason")), actions[str(rule.get("action"))]) for rule in rules if str(rule.get("action")) in actions)


def _groups(value: object) -> tuple[Group, ...]:
    groups: list[Group] = []
    rank = 0
    for item in _list(value)[:MAX_GROUPS]:
        name = str(_map(item).get("name"))
        if len(name) <= MAX_GROUP_NAME and re.fullmatch(LABEL_PATTERN, name):
            groups.append(Group(name=name, nodes=min(_whole(_map(item).get("nodes"), 1), 4096), first_rank=rank))
            rank += groups[-1].nodes
    return tuple(groups)
