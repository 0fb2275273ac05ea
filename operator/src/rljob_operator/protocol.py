"""The part of the Kubernetes API that the operator uses. Implemented by :mod:`rljob_operator.kube`, and by an in-memory fake in tests.

Methods raise the errors of :mod:`rljob_operator.errors` and no others; none of them retries, which is up to the work queue. Every write
raises NotLeaderError where this process may not write.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from enum import StrEnum
from typing import Protocol

from rljob_operator.model import Manifest

FIELD_MANAGER = "rljob-operator"
"""Field manager of the status fields that the operator applies."""


class Kind(StrEnum):
    """Kinds that the operator reads or writes."""

    RLJOB = "RLJob"
    """The custom resource of this operator."""
    RAYJOB = "RayJob"
    """KubeRay's job: one per attempt."""
    RAYCLUSTER = "RayCluster"
    """KubeRay's cluster: created by KubeRay, read-only here."""
    POD = "Pod"
    """Created by KubeRay, read-only here."""
    SERVICE_ACCOUNT = "ServiceAccount"
    """Identity of the head pod."""
    ROLE = "Role"
    """Permissions of the head pod."""
    ROLE_BINDING = "RoleBinding"
    """Binds the role to the service account."""
    NETWORK_POLICY = "NetworkPolicy"
    """Who may connect to the pods of a job."""
    DISRUPTION_BUDGET = "PodDisruptionBudget"
    """Which pods of a job may not be evicted."""
    EVENT = "Event"
    """Status transitions of an RLJob, for users; warnings about a pod whose containers are not created are read."""
    WORKLOAD = "Workload"
    """Kueue's view of a RayJob: why it has no quota."""
    LEASE = "Lease"
    """Which of several operators acts."""
    SECRET = "Secret"
    """The webhook's certificates; no other Secret is ever read."""
    WEBHOOK_CONFIGURATION = "ValidatingWebhookConfiguration"
    """Which certificates the API server trusts. Cluster-scoped: its namespace is empty."""

    @property
    def api_version(self) -> str:
        """Group and version, for example ``ray.io/v1``."""
        return _RESOURCES[self][0]

    @property
    def plural(self) -> str:
        """Plural name, as in URL paths, for example ``rayjobs``."""
        return _RESOURCES[self][1]


_RESOURCES = {
    Kind.RLJOB: ("rljob.dev/v1alpha1", "rljobs"),
    Kind.RAYJOB: ("ray.io/v1", "rayjobs"),
    Kind.RAYCLUSTER: ("ray.io/v1", "rayclusters"),
    Kind.POD: ("v1", "pods"),
    Kind.SERVICE_ACCOUNT: ("v1", "serviceaccounts"),
    Kind.ROLE: ("rbac.authorization.k8s.io/v1", "roles"),
    Kind.ROLE_BINDING: ("rbac.authorization.k8s.io/v1", "rolebindings"),
    Kind.NETWORK_POLICY: ("networking.k8s.io/v1", "networkpolicies"),
    Kind.DISRUPTION_BUDGET: ("policy/v1", "poddisruptionbudgets"),
    Kind.EVENT: ("v1", "events"),
    Kind.WORKLOAD: ("kueue.x-k8s.io/v1beta2", "workloads"),
    Kind.LEASE: ("coordination.k8s.io/v1", "leases"),
    Kind.SECRET: ("v1", "secrets"),
    Kind.WEBHOOK_CONFIGURATION: ("admissionregistration.k8s.io/v1", "validatingwebhookconfigurations"),
}
WATCHED = (Kind.RLJOB, Kind.RAYJOB, Kind.RAYCLUSTER, Kind.POD)
"""Kinds that the operator watches and caches."""


class KubeClient(Protocol):
    """The Kubernetes API as plain JSON."""

    async def create(self, manifest: Manifest) -> Manifest:
        """Create an object, whose kind must be a :class:`Kind`, and return it as stored.

        Raises:
            AlreadyExistsError: the name is in use.
            RejectedError: rejected by the API server or by admission control.
            UnavailableError: retry later.
        """
        ...

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest:
        """Read the current state of one object.

        Raises:
            NotFoundError: it does not exist.
            UnavailableError: retry later.
        """
        ...

    def pages(self, kind: Kind, namespace: str | None, label_selector: str = "", *, field_selector: str = "") -> AsyncIterator[Manifest]:
        """List a kind in one namespace (None: all), page by page; all pages carry the same resourceVersion.

        Raises:
            NotFoundError: the kind is not installed.
            UnavailableError: retry later, from the first page.
        """
        ...

    async def patch_merge(self, kind: Kind, namespace: str, name: str, patch: Manifest) -> Manifest:
        """Apply a merge patch (RFC 7386) and return the object as stored.

        A ``metadata.uid`` or ``metadata.resourceVersion`` in the patch is a precondition.

        Raises:
            NotFoundError: it does not exist.
            ConflictError: a precondition does not hold.
            RejectedError: the result is not valid.
            UnavailableError: retry later.
        """
        ...

    async def apply_status(self, manifest: Manifest) -> Manifest:
        """Server-side apply the status of an RLJob as :data:`FIELD_MANAGER` and return the object as stored.

        Fields of an earlier apply that this one lacks are removed; those of other managers stay. A ``metadata.uid`` or
        ``metadata.resourceVersion`` is a precondition.

        Raises:
            NotFoundError: it does not exist.
            ConflictError: a precondition does not hold.
            RejectedError: the status is not valid.
            UnavailableError: retry later.
        """
        ...

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> Manifest | None:
        """Delete the object with this UID, dependents in the background. Returns the object if a finalizer keeps it, None if it is gone.

        Raises:
            NotFoundError: it does not exist.
            ConflictError: the UID does not match.
            UnavailableError: retry later.
        """
        ...

    async def schema_version(self) -> str:
        """Identify the schema of RLJobs that is served now; another text after each change.

        Raises:
            NotFoundError: none is published.
            UnavailableError: retry later.
        """
        ...

    async def schema(self, version: str) -> Manifest:
        """Read the structural schemas of ``spec`` and ``status`` of RLJobs; ``version`` is an answer of :meth:`schema_version`.

        Raises:
            NotFoundError: it is not published, or no longer.
            UnavailableError: retry later.
        """
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...
