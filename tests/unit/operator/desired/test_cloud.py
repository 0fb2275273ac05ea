"""What users of managed clusters ask for: identity, pull secrets, caches, head requests, labels of schedulers."""

from pathlib import Path
from typing import Any

import pytest

from rljob_api import naming
from rljob_api.validation import check
from tests.unit.api.manifests import manifest
from tests.unit.operator.desired import builders, kuberay
from tests.unit.operator.desired.builders import ROOT, container, environment, groups, objects, one, ray_job, spec_text


def with_spec(**fields: Any) -> dict[str, Any]:
    document = manifest()
    document["spec"].update(fields)
    return document


def test_an_account_that_exists_is_bound_and_none_is_made() -> None:
    found = objects(with_spec(serviceAccount={"name": "trainer"}))
    assert "ServiceAccount" not in {item["kind"] for item in found}
    assert one(found, "RoleBinding")["subjects"] == [{"kind": "ServiceAccount", "name": "trainer", "namespace": "team-rl"}]
    assert one(found, "RoleBinding")["roleRef"]["name"] == one(found, "Role")["metadata"]["name"] == "case-rljob"
    head, worker = (group["template"]["spec"] for group in groups(one(found, "RayJob")))
    assert (head["serviceAccountName"], head["automountServiceAccountToken"]) == ("trainer", True)
    assert (worker["serviceAccountName"], worker["automountServiceAccountToken"]) == ("trainer", False)


def test_a_node_group_may_have_an_account_of_its_own() -> None:
    document = with_spec(serviceAccount={"annotations": {"iam.gke.io/gcp-service-account": "a@b.iam.gserviceaccount.com"}})
    document["spec"]["nodeGroups"][0]["podTemplate"] = {"spec": {"serviceAccountName": "reader"}}
    head, worker = (group["template"]["spec"] for group in groups(ray_job(document)))
    assert (head["serviceAccountName"], worker["serviceAccountName"]) == ("case-rljob", "reader")
    account = one(objects(document), "ServiceAccount")
    assert account["metadata"]["annotations"] == {"iam.gke.io/gcp-service-account": "a@b.iam.gserviceaccount.com"}


def test_pull_secrets_of_the_operator_are_for_jobs_that_name_none() -> None:
    settings = builders.settings(runtime_image_pull_secrets="one, two")
    for document, expected in ((manifest(), ["one", "two"]), (with_spec(imagePullSecrets=[{"name": "own"}]), ["own"])):
        found = objects(document, settings=settings)
        for group in groups(one(found, "RayJob")):
            assert [secret["name"] for secret in group["template"]["spec"]["imagePullSecrets"]] == expected
    assert all("imagePullSecrets" not in group["template"]["spec"] for group in groups(ray_job(manifest())))


@pytest.mark.parametrize(
    ("cache", "volume"),
    [
        ({"claimName": "models"}, {"persistentVolumeClaim": {"claimName": "models"}}),
        ({"hostPath": "/mnt/models"}, {"hostPath": {"path": "/mnt/models", "type": "Directory"}}),
        ({"sizeLimit": "200Gi"}, {"emptyDir": {"sizeLimit": "200Gi"}}),
        ({}, {"emptyDir": {}}),
    ],
)
def test_the_model_cache_is_hf_home_of_every_pod(cache: dict[str, str], volume: dict[str, Any]) -> None:
    for group in groups(ray_job(with_spec(modelCache=cache))):
        assert {"name": "model-cache", **volume} in group["template"]["spec"]["volumes"]
        assert {"name": "model-cache", "mountPath": "/cache"} in container(group)["volumeMounts"]
        assert environment(group)["HF_HOME"] == "/cache"


def mounts(group: dict[str, Any]) -> set[str]:
    return {mount["mountPath"] for mount in container(group)["volumeMounts"]}


def test_the_head_requests_something_and_its_shared_memory_does_not_shrink_to_it() -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any], bool]] = [
        ({}, {"requests": {"cpu": "250m", "memory": "1Gi"}}, True),
        ({"cpu": "2"}, {"requests": {"cpu": "2", "memory": "1Gi"}}, True),
        ({"memory": "8Gi"}, {"requests": {"cpu": "250m", "memory": "8Gi"}, "limits": {"memory": "8Gi"}}, False),
        ({"limits": {"cpu": "1", "memory": "4Gi"}}, {"limits": {"cpu": "1", "memory": "4Gi"}}, False),
        ({"sharedMemory": "3Gi"}, {"requests": {"cpu": "250m", "memory": "1Gi"}}, True),
    ]
    for resources, expected, is_mounted in cases:
        head, worker = groups(ray_job(with_spec(head={"resources": resources})))
        assert container(head)["resources"] == expected
        assert ("/dev/shm" in mounts(head)) is is_mounted
        assert container(worker)["resources"] == {}


def test_cores_that_a_limit_alone_gives_count_for_ray() -> None:
    document = manifest()
    document["spec"]["nodeGroups"][0]["resources"] = {"limits": {"cpu": "3500m"}}
    _, worker = groups(ray_job(document))
    assert worker["rayStartParams"]["num-cpus"] == "4"


def test_labels_and_annotations_reach_rayjob_and_pods_and_never_replace_ours() -> None:
    metadata = {"labels": {"volcano.sh/queue-name": "q", "ray.io/priority-class-name": "high"}, "annotations": {"ray.io/x": "1", "y": "2"}}
    job = ray_job(with_spec(metadata=metadata, doNotDisrupt=True))
    assert job["metadata"]["labels"] | metadata["labels"] == job["metadata"]["labels"]
    assert job["metadata"]["annotations"] == metadata["annotations"]
    for group in groups(job):
        pod = group["template"]["metadata"]
        assert pod["labels"] == {"volcano.sh/queue-name": "q", "rljob.dev/job": "case", "rljob.dev/attempt": "1"}
        pod["annotations"].pop(naming.SPEC_ANNOTATION, None)
        assert pod["annotations"] == {
            "y": "2",
            "karpenter.sh/do-not-disrupt": "true",
            "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
        }


def test_a_budget_that_needs_all_pods_refuses_every_eviction() -> None:
    (budget,) = [item for item in objects(with_spec(refuseEvictions=True)) if item["kind"] == "PodDisruptionBudget"]
    assert budget["spec"]["minAvailable"] == 2, "the head and one node"
    assert budget["spec"]["selector"] == {"matchLabels": {"rljob.dev/job": "case"}}


def test_openshift_may_choose_the_user() -> None:
    """As docs/kubernetes.md says: null removes the IDs, and the rest of the restricted level stays."""
    ids = {"runAsUser": None, "runAsGroup": None, "fsGroup": None}
    for group in groups(ray_job(with_spec(podTemplate={"spec": {"securityContext": ids}}))):
        pod = group["template"]["spec"]["securityContext"]
        assert not set(pod) & set(ids)
        assert pod["runAsNonRoot"] is True
        assert list(kuberay.pod_security_problems(group["template"])) == []


def test_a_label_keeps_the_sidecars_of_a_mesh_out_of_every_pod() -> None:
    for group in groups(ray_job(with_spec(metadata={"labels": {"sidecar.istio.io/inject": "false"}}))):
        assert group["template"]["metadata"]["labels"]["sidecar.istio.io/inject"] == "false"


EXAMPLES = sorted((ROOT / "examples" / "kubernetes").glob("*.yaml"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_run_in_a_restricted_namespace_on_tainted_machines(example: Path) -> None:
    for group in groups(ray_job(example.read_text())):
        assert list(kuberay.pod_security_problems(group["template"])) == []
        if "nvidia.com/gpu" in container(group)["resources"].get("limits", {}):
            taint = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
            assert taint in group["template"]["spec"].get("tolerations", ()), "clouds and GPU operators taint machines with GPUs"


def test_multi_kueue_runs_the_rayjob_elsewhere_under_an_account_of_there() -> None:
    document = with_spec(queue={"name": "q", "multiKueue": True}, serviceAccount={"name": "trainer"})
    job = ray_job(document)
    assert (job["spec"]["managedBy"], job["spec"]["suspend"]) == ("kueue.x-k8s.io/multikueue", True)
    head = groups(job)[0]["template"]["spec"]
    assert head["serviceAccountName"] == "trainer"
    volumes = {name for volume in head["volumes"] for name in volume}
    assert volumes == {"name", "emptyDir", "downwardAPI"}, "nothing that this cluster alone has"


def test_text_that_yaml_takes_for_a_number_stays_text() -> None:
    document = with_spec(head={"resources": {"limits": {"ephemeral-storage": "1e12"}}}, image="1.5")
    stored = spec_text(objects(document))
    assert check(stored).job.spec.head.resources.limits == {"ephemeral-storage": "1e12"}
    assert check(stored).job.spec.image == "1.5"
