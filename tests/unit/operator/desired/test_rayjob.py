"""The objects of an attempt: golden files, KubeRay's schema and rules, Pod Security."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray._private.services import determine_plasma_store_config
from ray._private.utils import resolve_object_store_memory

from rljob_api import naming
from rljob_api.generate import to_yaml
from rljob_api.quantities import parse
from rljob_api.validation import check
from rljob_operator.desired import attempt_objects
from rljob_operator.model import Manifest
from tests.support.golden import Golden
from tests.unit.api.manifests import manifest
from tests.unit.operator.desired import builders, kuberay
from tests.unit.operator.desired.builders import GOLDEN, SETTINGS, SOURCES, container, environment, groups, objects, one, ray_job, spec_text

CASES = pytest.mark.parametrize("source", list(SOURCES.values()), ids=list(SOURCES))


@pytest.mark.parametrize("name", SOURCES)
def test_objects_are_the_golden_ones(name: str, golden: Golden) -> None:
    text = "---\n".join(to_yaml(without_spec(item)) for item in objects(SOURCES[name].read_text()))
    assert golden.differences(GOLDEN / f"{name}.yaml", text) == ""


def without_spec(manifest: Manifest) -> Manifest:
    """The manifest without the resolved spec, which :func:`test_the_head_gets_the_resolved_job` compares for every source."""
    if manifest["kind"] == "RayJob":
        groups(manifest)[0]["template"]["metadata"]["annotations"][naming.SPEC_ANNOTATION] = "<resolved spec>"
    return manifest


def test_no_golden_file_without_a_source() -> None:
    assert {path.stem for path in GOLDEN.glob("*.yaml") if not path.name.endswith(".job.yaml")} == set(SOURCES)


@CASES
def test_kuberay_accepts_it(source: Path) -> None:
    job = ray_job(source.read_text())
    assert kuberay.schema_problems(job) == []
    assert kuberay.rule_problems(job) == []


def test_the_checks_of_kuberay_see_what_is_wrong() -> None:
    job = ray_job(SOURCES["gpus"].read_text())
    job["metadata"]["name"] = "x" * 48
    cluster = job["spec"]["rayClusterSpec"]
    cluster |= {"rayVersion": "2.51.0", "networkPolicy": {}}
    cluster["workerGroupSpecs"][0]["rayStartParams"]["labels"] = "a=b"
    cluster["workerGroupSpecs"][0]["maxReplicas"] = 1
    container(cluster["workerGroupSpecs"][1])["enviroment"] = []
    container(cluster["headGroupSpec"])["env"].append({"name": "HOME", "value": "/"})
    assert {problem.split(":")[0] for problem in kuberay.schema_problems(job)} == {
        "$.spec.rayClusterSpec",
        "$.spec.rayClusterSpec.workerGroupSpecs[1].template.spec.containers[0]",
        "$.spec.rayClusterSpec.headGroupSpec.template.spec.containers[0].env",
    }
    assert kuberay.rule_problems(job) == ["name", "token needs Ray 2.52", "train: labels in rayStartParams", "train: replicas 2 2 1"]


@CASES
def test_pods_satisfy_the_restricted_level(source: Path) -> None:
    for group in groups(ray_job(source.read_text())):
        assert list(kuberay.pod_security_problems(group["template"])) == []


def test_the_check_of_pod_security_sees_what_is_wrong() -> None:
    document = manifest()
    document["spec"]["podTemplate"] = {
        "spec": {
            "hostIPC": True,
            "securityContext": {"runAsUser": 0, "seccompProfile": None},
            "volumes": [{"name": "tmp", "hostPath": {"path": "/tmp"}}],
            "containers": [{"name": "ray", "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}, "readOnlyRootFilesystem": False}}],
        }
    }
    (head, _) = groups(ray_job(document))
    assert list(kuberay.pod_security_problems(head["template"])) == [
        "runs as root",
        "seccompProfile",
        "hostIPC",
        "volume tmp",
        "ray: capabilities",
        "ray: readOnlyRootFilesystem",
    ]


@CASES
def test_order_owner_and_labels(source: Path) -> None:
    found = objects(source.read_text(), attempt=3)
    budget = ["PodDisruptionBudget"] if check(source.read_text()).job.spec.refuse_evictions else []
    kinds = ["ServiceAccount", "Role", "RoleBinding", "NetworkPolicy", *budget, "RayJob"]
    assert [item["kind"] for item in found] == kinds
    for item in found:
        (owner,) = item["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["controller"], owner["blockOwnerDeletion"]) == ("RLJob", True, True)
        assert item["metadata"]["namespace"] == "team-rl"
        labels = item["metadata"]["labels"]
        assert labels[naming.JOB_LABEL] == owner["name"]
        assert labels.get(naming.ATTEMPT_LABEL) == ("3" if item["kind"] == "RayJob" else None)
    for group in groups(found[-1]):
        labels = group["template"]["metadata"]["labels"]
        assert (labels[naming.JOB_LABEL], labels[naming.ATTEMPT_LABEL]) == (owner["name"], "3")
        assert not set(labels) & set(naming.RESERVED_LABELS)


def test_what_is_the_same_for_every_attempt_is_equal() -> None:
    first, second = (objects(SOURCES["gpus"].read_text(), attempt) for attempt in (1, 2))
    assert first[:4] == second[:4]
    assert [item["metadata"]["name"] for item in second[4:]] == ["math-grpo-a2"]


def test_the_account_may_patch_the_status_of_its_job_and_nothing_else() -> None:
    found = objects(manifest())
    rule = {"apiGroups": ["rljob.dev"], "resources": ["rljobs/status"], "resourceNames": ["case"], "verbs": ["patch"]}
    assert one(found, "Role")["rules"] == [rule]
    binding = one(found, "RoleBinding")
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "case-rljob", "namespace": "team-rl"}]
    assert binding["roleRef"]["name"] == one(found, "Role")["metadata"]["name"] == "case-rljob"
    head, worker = (group["template"]["spec"] for group in groups(one(found, "RayJob")))
    assert (head["serviceAccountName"], head["automountServiceAccountToken"]) == ("case-rljob", True)
    assert ("serviceAccountName" in worker, worker["automountServiceAccountToken"]) == (False, False)


def test_network_policy() -> None:
    policy = one(objects(manifest()), "NetworkPolicy")
    own, kuberay_rule = policy["spec"]["ingress"]
    assert own == {"from": [{"podSelector": policy["spec"]["podSelector"]}]}
    assert policy["spec"]["podSelector"] == {"matchLabels": {naming.JOB_LABEL: "case"}}
    assert kuberay_rule["from"][0]["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "kuberay"}}
    anywhere = one(objects(manifest(), settings=builders.settings(kuberay_namespace="")), "NetworkPolicy")
    assert anywhere["spec"]["ingress"][1]["from"][0]["namespaceSelector"] == {}
    assert "NetworkPolicy" not in {item["kind"] for item in objects(manifest(), settings=builders.settings(network_policy=False))}


def test_metrics_are_read_by_whom_the_operator_is_configured_to_let_in() -> None:
    peers = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    policy = one(objects(manifest(), settings=builders.settings(metrics_from=json.dumps(peers))), "NetworkPolicy")["spec"]
    assert policy["ingress"][2:] == [{"from": peers, "ports": [{"protocol": "TCP", "port": 9464}]}]


def with_report(report: dict[str, Any]) -> str:
    source = manifest()
    source["spec"]["report"] = report
    return yaml.safe_dump(source)


def test_the_head_names_the_port_of_its_metrics_beside_those_of_ray() -> None:
    # KubeRay 1.6 copies the head container's ports into the head's Service and adds its defaults only where there are none.
    ray = {"gcs-server": 6379, "dashboard": 8265, "client": 10001, "metrics": 8080, "serve": 8000}
    for enabled, own in ((True, {"rljob-metrics": 9464}), (False, {})):
        head, worker = groups(ray_job(with_report({"metricsEndpoint": enabled})))
        assert {port["name"]: port["containerPort"] for port in container(head)["ports"]} == ray | own
        assert "ports" not in container(worker)


def test_egress_is_what_the_operator_is_configured_with_and_the_own_pods() -> None:
    rules = [{"ports": [{"port": 53, "protocol": "UDP"}]}, {"to": [{"ipBlock": {"cidr": "198.18.0.1/32"}}]}]
    policy = one(objects(manifest(), settings=builders.settings(egress=json.dumps(rules))), "NetworkPolicy")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["egress"] == [{"to": [{"podSelector": policy["podSelector"]}]}, *rules]
    nothing_else = one(objects(manifest(), settings=builders.settings(egress="[]")), "NetworkPolicy")["spec"]
    assert nothing_else["egress"] == [{"to": [{"podSelector": policy["podSelector"]}]}]


@CASES
def test_the_head_gets_the_resolved_job(source: Path) -> None:
    found = objects(source.read_text())
    job = check(spec_text(found)).job
    original = check(source.read_text()).job
    assert (job.spec.image, job.spec.ray_version) == (original.spec.image or SETTINGS.runtime_image, original.spec.ray_version or "2.60.0")
    update: dict[str, Any] = {"image": job.spec.image, "ray_version": job.spec.ray_version, "active_deadline_seconds": None}
    assert job.spec == original.spec.model_copy(update=update)
    (head, *workers) = (group["template"] for group in groups(one(found, "RayJob")))
    (file,) = next(volume for volume in head["spec"]["volumes"] if volume["name"] == "rljob-spec")["downwardAPI"]["items"]
    assert file == {"path": "rljob.yaml", "fieldRef": {"fieldPath": "metadata.annotations['rljob.dev/spec']"}}
    assert all(naming.SPEC_ANNOTATION not in worker["metadata"].get("annotations", {}) for worker in workers), "only the head reads it"


def test_no_pod_template_takes_the_spec_from_the_head() -> None:
    document = manifest()
    mine = {"metadata": {"annotations": {naming.SPEC_ANNOTATION: "mine"}}}
    document["spec"]["head"] = {"podTemplate": mine}
    assert check(spec_text(objects(document))).job.spec.head.pod_template == mine


def test_an_upgraded_operator_goes_on_with_the_image_of_the_first_attempt() -> None:
    job = builders.checked(manifest())
    begun = dataclasses.replace(
        builders.view(job), status={"attempt": 1, "image": "registry.example/rljob-runtime:0.0.9", "rayVersion": "2.59.0"}
    )
    found = attempt_objects(begun, job, 2, SETTINGS)
    spec = check(spec_text(found)).job.spec
    assert (spec.image, spec.ray_version) == ("registry.example/rljob-runtime:0.0.9", "2.59.0")
    assert one(found, "RayJob")["spec"]["rayClusterSpec"]["rayVersion"] == "2.59.0"
    assert {container(group)["image"] for group in groups(one(found, "RayJob"))} == {"registry.example/rljob-runtime:0.0.9"}


def test_an_older_image_can_read_the_spec_of_a_newer_operator() -> None:
    stored = yaml.safe_load(spec_text(objects(manifest())))
    given = manifest()["spec"]
    assert set(stored["spec"]) <= {*given, "image", "rayVersion"}, "no default is written, so no field that the image does not know"


def test_a_suspended_job_is_stored_as_running_and_only_a_queue_suspends_the_rayjob() -> None:
    document = manifest()
    document["spec"]["suspend"] = True
    found = objects(document)
    assert check(spec_text(found)).job.spec.suspend is False
    assert "suspend" not in one(found, "RayJob")["spec"]
    document["spec"]["queue"] = {"name": "q"}
    queued = ray_job(document)
    assert queued["spec"]["suspend"] is True
    assert queued["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "q"
    assert "kueue.x-k8s.io/priority-class" not in queued["metadata"]["labels"]


def test_environment() -> None:
    head, train, rollout = groups(ray_job(SOURCES["gpus"].read_text(), attempt=4))
    assert environment(head) | {"WANDB_API_KEY": None} == {
        "HOME": "/home/rljob",
        "USER": "rljob",
        "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1",
        "RLJOB_RUN_FOLDER": "/mnt/jobs/team-rl/math-grpo",
        "RLJOB_STORAGE_SHARED": "1",
        "RLJOB_NAMESPACE": "team-rl",
        "RLJOB_NAME": "math-grpo",
        "RLJOB_ATTEMPT": "4",
        "RAY_JOB_STOP_WAIT_TIME_S": "110",
        "WANDB_API_KEY": None,
    }
    assert environment(train)["HF_TOKEN"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert environment(train)["NCCL_DEBUG"] == "INFO"
    assert kuberay.expand(environment(rollout)["PROMPT"], {"HOME": "x"}) == "costs $5, $(HOME) stays"
    (alone, _) = groups(ray_job(manifest()))
    assert (environment(alone)["RLJOB_RUN_FOLDER"], environment(alone)["RLJOB_STORAGE_SHARED"]) == ("/tmp/rljob/team-rl/case", "0")


def test_what_nodes_offer_to_ray_and_ask_of_kubernetes() -> None:
    head, train, rollout = groups(ray_job(SOURCES["gpus"].read_text()))
    quiet = {"include-log-monitor": "no"}
    assert head["rayStartParams"] == {"num-cpus": "0", "num-gpus": "0", "dashboard-host": "0.0.0.0", "no-monitor": "true", **quiet}
    assert {"--include-log-monitor=no", "--no-monitor"} <= set(kuberay.start_line(head, is_head=True).split())
    assert train["rayStartParams"] == {"num-gpus": "8", "num-cpus": "64", **quiet}
    assert rollout["rayStartParams"] == {"num-gpus": "4", "num-cpus": "16", **quiet}
    assert container(train)["resources"] == {
        "requests": {"cpu": "64", "memory": "512Gi"},
        "limits": {"memory": "512Gi", "nvidia.com/gpu": "8", "rdma/hca": "1"},
    }
    _, trainers, engines, scorers = groups(ray_job(SOURCES["virtual"].read_text()))
    assert json.loads(trainers["rayStartParams"]["resources"].strip("'")) == {"example_com_virtual-gpu": 2}
    assert (trainers["rayStartParams"]["num-gpus"], trainers["rayStartParams"]["num-cpus"]) == ("0", "1")
    assert container(engines)["resources"]["limits"] == {"memory": "3Gi", "example.com/virtual-gpu": "1"}
    assert (scorers["rayStartParams"], container(scorers)["resources"]) == ({"num-gpus": "0", **quiet}, {})
    _, _, arms = groups(ray_job(SOURCES["robots"].read_text()))
    assert arms["rayStartParams"] == {"num-gpus": "0", "num-cpus": "4", "resources": "'{\"rljob_hardware\": 1}'", **quiet}
    assert container(arms)["resources"]["limits"] == {"devices.example/camera": "1"}, "only what the pod template adds"
    (_, local) = groups(ray_job(SOURCES["quickstart"].read_text()))
    assert (json.loads(local["rayStartParams"]["resources"].strip("'")), container(local)["resources"]) == ({"rljob_cpu_device": 2}, {})


def test_images() -> None:
    assert [container(group)["image"] for group in groups(ray_job(SOURCES["gpus"].read_text()))] == [
        "registry.example/team/rljob:7",
        "registry.example/team/rljob:7",
        "registry.example/team/rljob-rollout:7",
    ]
    assert {container(group)["image"] for group in groups(ray_job(manifest()))} == {SETTINGS.runtime_image}


def test_pod_templates_apply_from_the_general_to_the_particular() -> None:
    document = manifest()
    document["spec"]["podTemplate"] = {"spec": {"priorityClassName": "all", "schedulerName": "all", "tolerations": [{"key": "a"}]}}
    document["spec"]["head"] = {"podTemplate": {"spec": {"priorityClassName": "head"}}}
    document["spec"]["nodeGroups"][0]["tolerations"] = [{"key": "b"}]
    document["spec"]["nodeGroups"][0]["podTemplate"] = {"spec": {"schedulerName": None, "tolerations": [{"key": "c"}]}}
    head, worker = (group["template"]["spec"] for group in groups(ray_job(document)))
    assert (head["priorityClassName"], head["schedulerName"]) == ("head", "all")
    assert (worker["priorityClassName"], "schedulerName" in worker) == ("all", False)
    assert worker["tolerations"] == [{"key": "b"}, {"key": "a"}, {"key": "c"}]
    assert head["containers"][0]["name"] == worker["containers"][0]["name"] == "ray"


def test_kuberay_reaches_the_dashboard_where_pods_have_ipv6_addresses() -> None:
    (head, _) = groups(one(objects(manifest(), settings=dataclasses.replace(SETTINGS, listen_address="::")), "RayJob"))
    assert head["rayStartParams"]["dashboard-host"] == "::"


def test_ray_is_asked_at_once_whether_it_is_ready_unless_a_pod_template_asks_otherwise() -> None:
    document = manifest()
    asks = {"exec": {"command": ["true"]}, "periodSeconds": 9}
    document["spec"]["nodeGroups"][0]["podTemplate"] = {"spec": {"containers": [{"name": "ray", "readinessProbe": asks}]}}
    head, worker = (container(group)["readinessProbe"] for group in groups(ray_job(document)))
    assert head["initialDelaySeconds"] + head["periodSeconds"] < 5, "KubeRay's own begins after 10 s"
    assert head["httpGet"] == {"path": "/api/healthz", "port": 52365}
    assert head["periodSeconds"] <= head["timeoutSeconds"], "the next question follows each timeout at once"
    assert head["timeoutSeconds"] * head["failureThreshold"] == 50, "as long as KubeRay's own asks a pod that does not answer"
    assert not any("livenessProbe" in container(group) for group in groups(ray_job(document))), "KubeRay's own is used"
    assert worker == asks
    document["spec"]["nodeGroups"][0]["podTemplate"]["spec"]["containers"][0]["readinessProbe"] = {"timeoutSeconds": 9}
    head, worker = (container(group)["readinessProbe"] for group in groups(ray_job(document)))
    assert worker == head | {"timeoutSeconds": 9}


def test_the_longest_names_fit() -> None:
    document = manifest()
    document["metadata"]["name"] = "x" * naming.MAX_JOB_NAME
    found = objects(document, attempt=99)
    assert kuberay.rule_problems(one(found, "RayJob")) == []
    assert max(len(item["metadata"]["name"]) for item in found) <= 63
    with pytest.raises(ValueError, match="cannot name a RayJob"):
        objects(document, attempt=100)


@CASES
def test_pure(source: Path) -> None:
    """Same input, same output; the result shares nothing with the spec or with another result."""
    job = builders.checked(source.read_text())
    view, before = builders.view(job), job.job.model_dump()
    first = attempt_objects(view, job, 1, SETTINGS)
    kept = copy.deepcopy(first)
    for group in groups(one(first, "RayJob")):
        for part in (group["template"]["spec"].get("tolerations", []), group["template"]["spec"].get("affinity", {}).values()):
            for item in part:
                item["changed"] = True
        group["template"]["metadata"]["labels"].clear()
    assert job.job.model_dump() == before
    assert attempt_objects(view, job, 1, SETTINGS) == kept


@pytest.mark.parametrize(
    ("memory", "shared"), [("8Gi", "2Gi"), ("64Gi", "8Gi"), ("512Gi", "64Gi"), ("16Gi", "16Gi"), ("2Gi", "1Gi"), (None, "4Gi")]
)
def test_rays_object_store_stays_in_shared_memory(monkeypatch: pytest.MonkeyPatch, memory: str | None, shared: str) -> None:
    """As Ray itself decides: it would put a store that is larger than a small /dev/shm on the disk of the pod."""
    available = parse(memory or "512Gi")
    monkeypatch.setattr("ray._private.utils.get_shared_memory_bytes", lambda: int(parse(shared)))
    monkeypatch.setattr("ray._common.utils.get_system_memory", lambda: int(available))
    document = yaml.safe_load(SOURCES["gpus"].read_text())
    document["spec"]["head"] = {"resources": {"memory": memory, "sharedMemory": shared}}
    document["spec"]["nodeGroups"][0]["resources"] = {"memory": memory, "sharedMemory": shared}
    cluster = ray_job(yaml.safe_dump(document))["spec"]["rayClusterSpec"]
    for place in (cluster["headGroupSpec"], cluster["workerGroupSpecs"][0]):
        given = place["rayStartParams"].get("object-store-memory")
        size = resolve_object_store_memory(int(available), None if given is None else int(given))
        folder, _, size = determine_plasma_store_config(size, "/tmp/ray")
        assert folder == "/dev/shm"
        assert size <= 0.3 * available
