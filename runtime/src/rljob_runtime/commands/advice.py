"""What to do about the reason that an attempt ended for, in one sentence; docs/troubleshooting.md says more."""

from __future__ import annotations

from collections.abc import Mapping

ADVICE: Mapping[str, str] = {
    "SpecInvalid": "correct what the message lists and apply again; rljob validate finds the same problems beforehand",
    "SpecChanged": "change the field back, or create a new RLJob",
    "ChildRejected": "see the message of the API server or admission policy; the operator retries every minute",
    "ChildNameTaken": "delete the object of that name, or rename the RLJob",
    "Unschedulable": "compare what the pod requests with the nodes: kubectl describe nodes; tolerations, nodeSelector, devicesPerNode",
    "ImageUnavailable": "correct image, or name the registry's Secret in imagePullSecrets",
    "PodFailed": "kubectl describe pod says why the container does not start",
    "NodesNotReady": "look at the node: kubectl get nodes; a lost one is replaced by the next attempt",
    "ApiUnavailable": "check whether the webhook that the message names is up; the operator retries",
    "StartupDeadlineExceeded": "fix what the message names, or raise startupDeadlineSeconds",
    "ActiveDeadlineExceeded": "set a larger activeDeadlineSeconds; the checkpoints are kept",
    "DeadlineExceeded": "see the log of the worker that the message names: rljob logs NAME --worker WORKER",
    "NodesMismatch": "compare the device plug-in and devicesPerNode with what the message lists",
    "ModelInvalid": "model.path must be a Hub id or a folder inside every pod; a gated model needs HF_TOKEN",
    "DataInvalid": "paths are inside the pods; put the data on the volume",
    "RewardInvalid": "the module must be in every pod and on PYTHONPATH; the message is the Python error",
    "CheckpointFailed": "look at free space and the owner of the files (user 1000) on the volume",
    "WeightSyncFailed": "the message has the differences, weightSync.probe the limits; the engines' logs show what they loaded",
    "OffloadFailed": "raise resources.memory of its group, or lower offload.hostMemoryBytes; the message names worker and cause",
    "WorkerFailed": "the message is the worker's error; its log: rljob logs NAME --worker WORKER",
    "WorkerLost": "look for how the process ended in its log and in the node's: out of memory, a device driver error",
    "HeadLost": "look at the head's node; with storage the next attempt resumes from the newest checkpoint",
    "Evicted": "nothing: the next attempt continues from the checkpoint; doNotDisrupt: true asks autoscalers for fewer of these",
    "OutOfMemory": "raise resources.memory of the group that the message names, or lower batch and cache sizes",
    "DriverFailed": "the message ends with the driver's last lines; rljob logs NAME has the rest",
    "SubmissionFailed": "see KubeRay's log: mostly a network policy between KubeRay and port 8265",
    "Stopped": "the Ray job was stopped externally; apply the RLJob again, with storage it resumes",
    "ChildDeleted": "the RayJob was deleted externally; another attempt follows if restarts are left",
}
