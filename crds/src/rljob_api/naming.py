"""Derived names and labels with their length budgets, so that nothing is refused after devices are taken.

KubeRay refuses RayJob names over 47 characters. A child is called ``<job>-a<attempt>``; with two digits for the attempt
that leaves 43 for the job, which the schema enforces.
"""

from __future__ import annotations

MAX_JOB_NAME = 43
"""Characters of ``metadata.name``."""
MAX_RAYJOB_NAME = 47
"""Characters KubeRay allows for a RayJob."""
JOB_LABEL = "rljob.dev/job"
"""Label of every child object and pod: name of the RLJob."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Kueue's: LocalQueue of an object."""
QUEUE_PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
"""Kueue's: WorkloadPriorityClass of an object."""
ATTEMPT_LABEL = "rljob.dev/attempt"
"""Label of every child of one attempt: its number."""
NODE_RANK_LABEL = "rljob.dev/node-rank"
"""Ray node label that carries the planned rank of the node."""
PROGRESS_FIELD_MANAGER = "rljob-runtime"
"""Field manager under which the driver applies ``.status.progress``."""
RAY_CONTAINER = "ray"
"""Name of the first container of every pod, which podTemplate refers to."""
SPEC_FILE = "/etc/rljob/rljob.yaml"
"""Where the head finds the resolved RLJob of its attempt: :data:`SPEC_ANNOTATION` of its pod, as a file."""
SPEC_ANNOTATION = "rljob.dev/spec"
ENV_NAMESPACE, ENV_JOB, ENV_ATTEMPT = "RLJOB_NAMESPACE", "RLJOB_NAME", "RLJOB_ATTEMPT"
"""Environment of the head: which RLJob and attempt this is."""
ENV_HAS_STARTED = "RLJOB_HAS_STARTED"
"""Environment of the head: "1" if a driver has trained with this spec before and thus accepted it; absent otherwise."""
ENV_RUN_FOLDER = "RLJOB_RUN_FOLDER"
"""Environment of every pod: the run folder; on the shared volume when the job has one."""
ENV_STORAGE_SHARED = "RLJOB_STORAGE_SHARED"
"""Environment of every pod: "1" when the run folder is shared by all pods, else "0"."""
ENV_NODE_RANK = "RLJOB_NODE_RANK"
"""Environment of every worker pod: the planned rank of the node."""
HARDWARE_RESOURCE = "rljob_hardware"
"""Ray resource, one on each node of a group with hardware: whoever reserves it has the node's robots to itself."""
HOME_FOLDER, TEMPORARY_FOLDER, SHARED_MEMORY_FOLDER = "/home/rljob", "/tmp", "/dev/shm"
"""Writable folders of every pod; the root file system is not."""
RESERVED_ENV_PREFIX = "RLJOB_"
"""Environment variables that start so are set by the system."""
RESERVED_ENV = frozenset(
    {
        "FQ_RAY_IP",
        "KUBERAY_GEN_RAY_START_CMD",
        "RAY_ADDRESS",
        "RAY_AUTH_MODE",
        "RAY_AUTH_TOKEN",
        "RAY_CLOUD_INSTANCE_ID",
        "RAY_CLUSTER_NAME",
        "RAY_CLUSTER_NAMESPACE",
        "RAY_ENABLE_K8S_TOKEN_AUTH",
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",
        "RAY_IP",
        "RAY_NODE_TYPE_NAME",
        "RAY_OVERRIDE_LABELS",
        "RAY_OVERRIDE_RESOURCES",
        "RAY_PORT",
        "RAY_REDIS_ADDRESS",
        "RAY_USAGE_STATS_KUBERAY_IN_USE",
        "RAY_enable_autoscaler_v2",
        "REDIS_PASSWORD",
        "REDIS_USERNAME",
    }
)
"""Environment variables that KubeRay, Ray or the operator set, or that KubeRay refuses."""
METRICS_PORT, METRICS_PORT_NAME = 9464, "rljob-metrics"
"""Where the head serves a job's metrics to Prometheus."""
ENV_MODEL_CACHE = "HF_HOME"
"""Where huggingface_hub and datasets keep what they download."""
SCHEDULER_LABELS = ("ray.io/gang-scheduling-enabled", "ray.io/priority-class-name")
"""KubeRay's labels of a RayJob that are settings of batch schedulers (KubeRay 1.6.2, controllers/ray/batchscheduler)."""
OWN_LABELS = ("app.kubernetes.io/name", "app.kubernetes.io/created-by", "app.kubernetes.io/managed-by")
"""Labels of children that are the operator's and KubeRay's."""
DISRUPTION_ANNOTATIONS = {"karpenter.sh/do-not-disrupt": "true", "cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}
"""Annotations of a pod that node autoscalers leave alone."""
NODE_GROUP_LABEL = "ray.io/node-group"
"""Ray node label (and pod label) that carries the name of the node group."""
RESERVED_LABELS = ("app.kubernetes.io/name", "app.kubernetes.io/created-by")
"""Pod labels by which KubeRay's services find the head."""
RESERVED_GROUP_NAMES = ("head", "headgroup", "cluster", "node")
"""Names no node group can have: KubeRay and Kueue call the head so; Ray and RLinf labels use the others."""
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


def standby_name(component: str, node_rank: int) -> str:
    """Name and log file of a process that waits on a node to become an engine: ``<component>-standby-<node rank>``."""
    return f"{component}-standby-{node_rank}"


def access_name(job: str) -> str:
    """Name of a job's ServiceAccount, Role, RoleBinding and NetworkPolicy: ``<job>-rljob``."""
    return f"{job}-rljob"


def ray_resource(device_resource: str) -> str:
    """Ray's name for a Kubernetes device resource: GPU for ``*/gpu``, else a custom resource."""
    if device_resource == "cpu":
        return "rljob_cpu_device"
    return "GPU" if device_resource.endswith("/gpu") else device_resource.replace("/", "_").replace(".", "_")
