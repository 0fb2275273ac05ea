"""What a job's pods are made with, in the words of Kubernetes' core API: variables, resources, account, caches, metadata."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rljob_api.v1alpha1.base import (
    ABSOLUTE_PATH_PATTERN,
    ENV_NAME_PATTERN,
    SECRET_KEY_PATTERN,
    SECRET_NAME_PATTERN,
    AnnotationValue,
    LabelKey,
    LabelValue,
    Quantity,
    SpecModel,
    Text,
)

ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=SECRET_NAME_PATTERN)]
"""Name of a Kubernetes object in the job's namespace."""
ObjectKey = Annotated[str, Field(min_length=1, max_length=253, pattern=SECRET_KEY_PATTERN)]
"""Key inside a Secret or ConfigMap."""
AbsolutePath = Annotated[str, Field(min_length=2, max_length=1024, pattern=ABSOLUTE_PATH_PATTERN)]


class KeyRef(SpecModel):
    """One key of a Secret or ConfigMap."""

    name: ObjectName
    """Name of the object, in the job's namespace."""
    key: ObjectKey
    """Key inside it."""
    optional: bool = False
    """Start the pod without the variable if the object or key does not exist."""


class FieldRef(SpecModel):
    """A field of the pod."""

    field_path: Annotated[str, Field(min_length=1, max_length=512)]
    """Its path, for example spec.nodeName or metadata.labels['team']."""


class ResourceFieldRef(SpecModel):
    """A resource of a container of the pod."""

    resource: Annotated[str, Field(min_length=1, max_length=256)]
    """Which, for example limits.memory."""
    container_name: Annotated[str, Field(min_length=1, max_length=63)] = "ray"
    """Container whose resource it is."""
    divisor: Quantity | None = None
    """Unit of the value, for example 1Mi; 1 when not set."""


class EnvVarSource(SpecModel):
    """Where a variable's value comes from when the container starts; exactly one."""

    secret_key_ref: KeyRef | None = None
    """Key of a Secret."""
    config_map_key_ref: KeyRef | None = None
    """Key of a ConfigMap."""
    field_ref: FieldRef | None = None
    """Field of the pod."""
    resource_field_ref: ResourceFieldRef | None = None
    """Resource of the pod's container."""


class EnvVar(SpecModel):
    """An environment variable: either a literal value or a source."""

    name: Annotated[str, Field(min_length=1, max_length=128, pattern=ENV_NAME_PATTERN)]
    """Name of the variable."""
    value: Text | None = None
    """Its value."""
    value_from: EnvVarSource | None = None
    """Secret, ConfigMap or field of the pod that holds the value; a local run takes it from its own environment variable of the same
    name."""


class ObjectRef(SpecModel):
    """A Secret or ConfigMap as a whole."""

    name: ObjectName
    """Name of the object, in the job's namespace."""
    optional: bool = False
    """Start the pod even if it does not exist."""


class EnvFromSource(SpecModel):
    """A Secret or ConfigMap whose keys all become variables; exactly one of the two."""

    prefix: Annotated[str, Field(max_length=128)] = ""
    """Prefix of every variable."""
    secret_ref: ObjectRef | None = None
    """The Secret."""
    config_map_ref: ObjectRef | None = None
    """The ConfigMap."""


class NodeResources(SpecModel):
    """Resources of one node, in addition to its devices.

    cpu, memory and sharedMemory are enough for most jobs; requests and limits are Kubernetes' own and override them by name.
    """

    cpu: Quantity | None = None
    """CPU cores of one node, as a request without a limit; a local run uses the cores of this machine when it is not set."""
    memory: Quantity | None = None
    """Memory of one node, as request and limit."""
    shared_memory: Quantity | None = None
    """Size of /dev/shm, which counts against memory."""
    requests: dict[LabelKey, Quantity] = Field(default={}, max_length=32)
    """Requests of the container by resource, for example ephemeral-storage: 200Gi."""
    limits: dict[LabelKey, Quantity] = Field(default={}, max_length=32)
    """Limits of the container by resource, for example rdma/ib: 1; devices are in devicesPerNode."""

    @property
    def all_requests(self) -> dict[str, str]:
        """Requests of the container."""
        short = {"cpu": self.cpu, "memory": self.memory}
        return {name: value for name, value in short.items() if value is not None} | self.requests

    @property
    def all_limits(self) -> dict[str, str]:
        """Limits of the container, without devices."""
        return ({} if self.memory is None else {"memory": self.memory}) | self.limits

    @property
    def cpu_request(self) -> str | None:
        """CPU cores that the job can count on."""
        return self.all_requests.get("cpu") or self.limits.get("cpu")

    @property
    def memory_limit(self) -> str | None:
        """Memory from which on the container is killed."""
        return self.all_limits.get("memory")


class ServiceAccount(SpecModel):
    """Account of all pods of the job, for workload identity (GKE) and roles for service accounts (EKS).

    Only the head gets its token. RLJob gives it the right to write the progress of this job.
    """

    name: ObjectName | None = None
    """An existing account in the job's namespace; by default RLJob creates one for the job."""
    annotations: dict[LabelKey, AnnotationValue] = Field(default={}, max_length=32)
    """Annotations of the account that RLJob creates, for example eks.amazonaws.com/role-arn."""


class PullSecret(SpecModel):
    """A Secret for pulling images."""

    name: ObjectName
    """Name of the Secret, in the job's namespace."""


class ModelCache(SpecModel):
    """A volume for models and data sets from a Hub: HF_HOME of every pod. Without claimName and hostPath it is lost with the pod."""

    claim_name: ObjectName | None = None
    """PersistentVolumeClaim; with several nodes its access mode must be ReadWriteMany unless all pods share one machine."""
    host_path: AbsolutePath | None = None
    """Folder of each machine. It must exist and be writable for user 1000; the Pod Security levels baseline and restricted forbid it."""
    size_limit: Quantity | None = None
    """Without claimName and hostPath: size at which the kubelet evicts the pod."""
    mount_path: AbsolutePath = "/cache"
    """Where it is mounted in every pod."""


class ChildMetadata(SpecModel):
    """Labels and annotations for queues, schedulers and cost reports."""

    labels: dict[LabelKey, LabelValue] = Field(default={}, max_length=32)
    """Labels; those that start with ray.io/ are set only on the RayJob, from which KubeRay copies them to the RayCluster."""
    annotations: dict[LabelKey, AnnotationValue] = Field(default={}, max_length=32)
    """Annotations, likewise."""
