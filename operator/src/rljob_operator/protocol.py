"""What the operator asks of the Kubernetes API. :mod:`rljob_operator.kube` answers for real, an in-memory fake in the tests.

Every method raises the errors of :mod:`rljob_operator.errors` and nothing else; none of them tries again, which is the queue's part.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from enum import StrEnum
from typing import Protocol

from rljob_operator.model import Manifest

FIELD_MANAGER = "rljob-operator"
"""Under this name the operator owns the fields of a status that it applies."""


class Kind(StrEnum):
    """Kinds that the operator reads or writes."""

    RLJOB = "RLJob"
    """The resource this operator is for."""
    RAYJOB = "RayJob"
    """KubeRay's job: one per attempt."""
    RAYCLUSTER = "RayCluster"
    """KubeRay's cluster: made by KubeRay, only read."""
    POD = "Pod"
    """Made by KubeRay, only read."""
    CONFIG_MAP = "ConfigMap"
    """Holds the resolved spec of one attempt."""
    SERVICE_ACCOUNT = "ServiceAccount"
    """Identity of the head pod."""
    ROLE = "Role"
    """What the head pod may do."""
    ROLE_BINDING = "RoleBinding"
    """Gives the role to the account."""
    NETWORK_POLICY = "NetworkPolicy"
    """Who may reach the job's pods."""
    EVENT = "Event"
    """News about an RLJob for people."""

    @property
    def api_version(self) -> str:
        """Group and version, for example ``ray.io/v1``."""
        return _RESOURCES[self][0]

    @property
    def plural(self) -> str:
        """Name in paths, for example ``rayjobs``."""
        return _RESOURCES[self][1]


_RESOURCES = {
    Kind.RLJOB: ("rljob.dev/v1alpha1", "rljobs"),
    Kind.RAYJOB: ("ray.io/v1", "rayjobs"),
    Kind.RAYCLUSTER: ("ray.io/v1", "rayclusters"),
    Kind.POD: ("v1", "pods"),
    Kind.CONFIG_MAP: ("v1", "configmaps"),
    Kind.SERVICE_ACCOUNT: ("v1", "serviceaccounts"),
    Kind.ROLE: ("rbac.authorization.k8s.io/v1", "roles"),
    Kind.ROLE_BINDING: ("rbac.authorization.k8s.io/v1", "rolebindings"),
    Kind.NETWORK_POLICY: ("networking.k8s.io/v1", "networkpolicies"),
    Kind.EVENT: ("v1", "events"),
}
WATCHED = (Kind.RLJOB, Kind.RAYJOB, Kind.RAYCLUSTER, Kind.POD)
"""Kinds that the operator watches and caches."""


class KubeClient(Protocol):
    """The Kubernetes API as plain JSON, for namespaced kinds."""

    async def create(self, manifest: Manifest) -> Manifest:
        """Create what the manifest says (its kind must be a :class:`Kind`); the stored object.

        Raises:
            AlreadyExistsError: the name is in use.
            RejectedError: the API server or an admission refuses it.
            UnavailableError: try again later.
        """
        ...

    async def get(self, kind: Kind, namespace: str, name: str) -> Manifest:
        """Read one object, as it is now.

        Raises:
            NotFoundError: there is none.
            UnavailableError: try again later.
        """
        ...

    def pages(self, kind: Kind, namespace: str | None, label_selector: str = "") -> AsyncIterator[Manifest]:
        """All objects of a kind in a namespace (None: in all), as lists of bounded length; all carry the same resourceVersion.

        Raises:
            NotFoundError: the kind is not installed.
            UnavailableError: try again later, from the first page.
        """
        ...

    async def patch_merge(self, kind: Kind, namespace: str, name: str, patch: Manifest) -> Manifest:
        """Merge a patch (RFC 7386) into an object; a ``metadata.uid`` in it must be the object's. The stored object.

        Raises:
            NotFoundError: there is none.
            ConflictError: the uid is another one.
            RejectedError: the result is not valid.
            UnavailableError: try again later.
        """
        ...

    async def apply_status(self, manifest: Manifest) -> Manifest:
        """Server-side apply of the status of an RLJob, as :data:`FIELD_MANAGER`; a ``metadata.uid`` in it must be the object's.

        Fields that an earlier apply held and this one lacks are removed; those of other managers stay. The stored object.

        Raises:
            NotFoundError: there is no such RLJob.
            ConflictError: the uid is another one.
            RejectedError: the status is not valid.
            UnavailableError: try again later.
        """
        ...

    async def delete(self, kind: Kind, namespace: str, name: str, uid: str) -> Manifest | None:
        """Delete the object with this uid, its dependents in the background. None when it is gone, else what a finalizer still holds.

        Raises:
            NotFoundError: there is none.
            ConflictError: the uid is another one.
            UnavailableError: try again later.
        """
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...
