"""The generated CRD on a real API server: accepted, its rules fire with their own words, and it fills in what the models fill in."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from e2e.cluster.errors import CommandError
from e2e.objects import KubectlError, Objects
from rljob_api.crd import schema
from rljob_api.naming import MAX_JOB_NAME, RESERVED_GROUP_NAMES
from rljob_api.reading import manifest as manifests
from rljob_api.v1alpha1.rljob import RLJobSpec
from tests.integration.kube_api import ApiServer
from tests.layout.tree import ROOT
from tests.support import invalid_manifests
from tests.unit.api.manifests import manifest
from tests.unit.api.structural import RESOLVED, beyond

Manifest = dict[str, Any]
CRD = f"crd/rljobs.{schema.GROUP}"
# The golden ones are well-formed for the schema; what is wrong with them only the planner can tell.
PLANNER_ONLY = ("batch-one-sample", "mapping-beyond", "placement-no-devices", "placement-not-divisible")
ACCEPTED = {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / "examples").rglob("*.yaml"))} | {
    name: invalid_manifests.named(name).manifest() for name in PLANNER_ONLY
}


def create(api: ApiServer, namespace: str, document: Manifest) -> Manifest:
    """The object as the server would store it."""
    return Objects(api.kubeconfig).create(document, namespace, dry_run=True)


def refusal(api: ApiServer, namespace: str, document: Manifest) -> str:
    with pytest.raises(KubectlError) as caught:
        create(api, namespace, document)
    return str(caught.value)


def changed(change: Callable[[Manifest], Any]) -> Manifest:
    document = manifest()
    change(document)
    return document


def component(index: int, **values: Any) -> Manifest:
    return changed(lambda m: m["spec"]["components"][index].update(values))


def placed(**placement: Any) -> Manifest:
    return changed(lambda m: m["spec"]["components"][1].update(placement=placement))


def source(field: str, **values: Any) -> Manifest:
    return changed(lambda m: m["spec"]["data"].update({field: [{"name": "a", **values}]}))


def judged(**judge: Any) -> Manifest:
    """The base with a judge as its reward."""
    reward = {"name": "a", "type": "LLMJudge", "judge": {"template": "{response}", **judge}}
    return changed(lambda m: m["spec"].update(rewards=[reward]))


NO_VALUE = [{"name": "EMPTY"}]
SUMS = {"task": "basic_arithmetic"}
VIOLATIONS: dict[tuple[str, str], Manifest] = {
    ("", f"metadata.name must have at most {MAX_JOB_NAME} characters"): changed(
        lambda m: m["metadata"].update(name="x" * (MAX_JOB_NAME + 1))
    ),
    ("spec.head.env[]", "give exactly one of value and valueFrom"): changed(lambda m: m["spec"].update(head={"env": NO_VALUE})),
    ("spec.nodeGroups[].env[]", "give exactly one of value and valueFrom"): changed(
        lambda m: m["spec"]["nodeGroups"][0].update(env=NO_VALUE)
    ),
    ("spec.components[].env[]", "give exactly one of value and valueFrom"): component(0, env=NO_VALUE),
    ("spec.nodeGroups[]", "deviceType CUDA contradicts deviceResource cpu"): changed(
        lambda m: m["spec"]["nodeGroups"][0].update(deviceType="CUDA")
    ),
    ("spec.nodeGroups[]", f"{', '.join(RESERVED_GROUP_NAMES)} are names of the system"): changed(
        lambda m: m["spec"]["nodeGroups"][0].update(name="head")
    ),
    ("spec.components", "a component must have role Rollout"): component(1, role="Reference"),
    ("spec.components[]", "only a Rollout or Judge has an engine"): component(0, engine={}),
    **{
        ("spec.components[]", f"only a Reference, Critic or Teacher has {size} of its own"): component(0, **{size: 2})
        for size in ("tensorParallelSize", "contextParallelSize", "expertParallelSize")
    },
    ("spec.components[]", "only a Teacher has teaches"): component(0, teaches={}),
    ("spec.components[]", "give model exactly when role is Teacher or Judge"): component(0, model={"path": "m"}),
    ("spec.components[].placement", "give exactly one of ranks, deviceMapping and workers, or mode: Auto alone"): placed(
        ranks="1", workers=1
    ),
    ("spec.components[].placement", "devicesPerWorker needs deviceMapping"): placed(ranks="1", devicesPerWorker=1),
    **{
        (f"spec.data.{field}[]", message): source(field, **values)
        for field in ("train", "validation")
        for message, values in (
            ("give reasoningGym exactly when type is ReasoningGym", {"type": "ReasoningGym"}),
            ("give jsonl exactly when type is JSONL", {"type": "ReasoningGym", "reasoningGym": SUMS, "jsonl": {"path": "a"}}),
            ("give parquet exactly when type is Parquet", {"type": "ReasoningGym", "reasoningGym": SUMS, "parquet": {"path": "a"}}),
        )
    },
    ("spec.rewards[]", "give function exactly when type is Function"): changed(
        lambda m: m["spec"].update(rewards=[{"name": "a", "type": "Function"}])
    ),
    ("spec.rewards[]", "give judge exactly when type is LLMJudge"): changed(
        lambda m: m["spec"].update(rewards=[{"name": "a", "type": "LLMJudge"}])
    ),
    ("spec.rewards[]", "give rewardModel exactly when type is RewardModel"): changed(
        lambda m: m["spec"].update(rewards=[{"name": "a", "type": "RewardModel"}])
    ),
    ("spec.rewards[].rewardModel", "give exactly one of endpoint and component"): changed(
        lambda m: m["spec"].update(rewards=[{"name": "a", "type": "RewardModel", "rewardModel": {"label": 0}}])
    ),
    ("spec.rewards[].judge", "give exactly one of endpoint and component"): judged(parser={"pattern": "x"}),
    ("spec.rewards[].judge.parser", "give exactly one of pattern, field and function"): judged(
        component="grader", parser={"pattern": "x", "field": "y"}
    ),
    ("spec", "training.miniBatches must divide rollout.promptsPerStep"): changed(
        lambda m: m["spec"].update(training={"miniBatches": 3}, rollout={"promptsPerStep": 32})
    ),
    ("spec", "training.warmupSteps must not exceed training.steps"): changed(
        lambda m: m["spec"].update(training={"steps": 5, "warmupSteps": 6})
    ),
    ("spec", "exactly one component must have role Trainer, unless training.steps is 0"): component(1, role="Trainer"),
    ("spec", "components must have role Rollout, Reward, Environment or Judge where training.steps is 0"): changed(
        lambda m: m["spec"].update(training={"steps": 0})
    ),
    ("spec", "give data.train, or training.steps: 0 and data.validation alone, or environments of an agentic job"): changed(
        lambda m: m["spec"].update(data={})
    ),
    ("spec", "give environments exactly when pipeline is Agentic"): changed(lambda m: m["spec"].update(pipeline="Agentic")),
}  # fmt: skip


def test_the_crd_is_established_and_structural(api_server: ApiServer):
    crd = json.loads(api_server.kubectl("get", CRD, "-o", "json"))
    conditions = {condition["type"]: condition["status"] for condition in crd["status"]["conditions"]}
    assert (conditions["Established"], conditions["NamesAccepted"]) == ("True", "True")
    assert conditions.get("NonStructuralSchema", "False") == "False"


def test_the_server_serves_the_generated_schema_unchanged(api_server: ApiServer):
    served = json.loads(api_server.kubectl("get", CRD, "-o", "json"))["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert served == json.loads(json.dumps(schema.job_schema()))


def test_the_smallest_job_is_accepted(api_server: ApiServer, namespace: str):
    assert create(api_server, namespace, manifest())["metadata"]["namespace"] == namespace


def test_every_rule_has_a_violation():
    assert {(path, message) for path, rules in schema.CEL_RULES.items() for _, message in rules} == set(VIOLATIONS)


@pytest.mark.parametrize(("path", "message"), VIOLATIONS, ids=lambda value: value[:40] or "root")
def test_a_rule_fires_with_its_message(api_server: ApiServer, namespace: str, path: str, message: str):
    assert message in refusal(api_server, namespace, VIOLATIONS[path, message])


def test_an_unknown_field_is_refused_by_name(api_server: ApiServer, namespace: str):
    text = refusal(api_server, namespace, changed(lambda m: m["spec"].update(nodegroups=[])))
    assert 'unknown field "spec.nodegroups"' in text


OTHER_VALUES: dict[str, Any] = {
    "head": {"resources": {"cpu": "3", "memory": "3Gi"}},
    "imagePullSecrets": [{"name": "other"}],
    "metadata": {"labels": {"a": "b"}},
    "doNotDisrupt": True,
    "refuseEvictions": True,
    "nodeGroups": [{"name": "other", "devicesPerNode": 2, "deviceResource": "cpu"}],
    "components": [{**component, "threadsPerWorker": 3} for component in manifest()["spec"]["components"]],
    "pipeline": "Agentic",
    "model": {"path": "models/other"},
    "data": {"prompt": {"system": "other"}},
    "rewards": [{"name": "other", "type": "Task"}],
    "environments": [{"name": "lake", "type": "FrozenLake"}],
    "algorithm": {"policyLoss": {"clipLow": 0.11}},
    "rollout": {"samplesPerPrompt": 3},
    "validation": {"everySteps": 7},
    "overlap": {"asyncGenerationRatio": 3},
    "offload": {"hostMemoryBytes": 77},
    "weightSync": {"timeoutSeconds": 77},
    "report": {"trajectoriesEverySteps": 77},
    "seed": 7,
}
"""For each field that always has a value: another one."""
ADDED_VALUES: dict[str, Any] = {
    "serviceAccount": {"name": "other"}, "modelCache": {"claimName": "other"},
    "priorityClassName": "other", "schedulerName": "other",
    "measured": {"rolloutDevices": 1, "trainerDevices": 1, "generateSeconds": 7, "trainSeconds": 7},
    "managedBy": "example.com/other", "queue": {"name": "other"}, "image": "other:1", "rayVersion": "2.0.0",
    "storage": {"claimName": "other"}, "podTemplate": {"metadata": {"labels": {"a": "b"}}},
}  # fmt: skip
"""For each field that may be absent: a value."""
MUTABLE_VALUES: dict[str, Any] = {
    "suspend": True, "activeDeadlineSeconds": 77, "ttlSecondsAfterFinished": 77, "failurePolicy": {"maxRestarts": 7},
    "startupDeadlineSeconds": 77, "schedulingDeadlineSeconds": 77,
}  # fmt: skip
MUTABLE_BELOW = {"training": {"steps": 77}, "checkpoint": {"everySteps": 77, "keep": 7, "asynchronous": False, "journal": False}}
FIXED_BELOW = {"training.learningRate cannot be changed", "checkpoint.path cannot be added or removed"}
"""Of sections of which a part may change."""


def test_every_field_of_the_spec_is_tried():
    fields = {info.alias or name for name, info in RLJobSpec.model_fields.items()}
    assert fields == {*OTHER_VALUES, *ADDED_VALUES, *MUTABLE_VALUES, *MUTABLE_BELOW}
    assert set(MUTABLE_VALUES) == schema.MUTABLE_SPEC_FIELDS
    assert {section: frozenset(values) for section, values in MUTABLE_BELOW.items()} == schema.MUTABLE_BELOW


@pytest.fixture
def stored(api_server: ApiServer, namespace: str) -> Callable[[Manifest], str]:
    """Stores the smallest job and patches its spec; returns what kubectl says."""
    api_server.kubectl("-n", namespace, "create", "-f", "-", input=json.dumps(manifest()))

    def patch(spec: Manifest) -> str:
        return api_server.kubectl("-n", namespace, "patch", "rljob", "case", "--type=merge", "-p", json.dumps({"spec": spec}))

    return patch


def test_no_field_but_the_mutable_ones_can_be_changed(stored: Callable[[Manifest], str]):
    with pytest.raises(CommandError) as caught:
        stored({**OTHER_VALUES, **ADDED_VALUES, "training": {"learningRate": 0.011}, "checkpoint": {"path": "/other"}})
    text = str(caught.value)
    expected = [f"{field} cannot be changed; make a new RLJob" for field in OTHER_VALUES]
    expected += [f"{field} cannot be added or removed; make a new RLJob" for field in ADDED_VALUES]
    expected += [f"{sentence}; make a new RLJob" for sentence in FIXED_BELOW]
    assert [sentence for sentence in expected if sentence not in text] == []


def test_suspend_and_time_limits_can_be_changed_and_taken_back(stored: Callable[[Manifest], str]):
    assert "patched" in stored(MUTABLE_VALUES)
    assert "patched" in stored(MUTABLE_BELOW)
    assert "patched" in stored({"suspend": False, "activeDeadlineSeconds": None, "ttlSecondsAfterFinished": None})


def missing(ours: Manifest, servers: Manifest) -> list[str]:
    """Fields that the server lacks, but for defaults that depend on other fields; whatever both have is equal."""
    return [f"{section}.{f}" for section, fields in beyond(ours, servers, "spec") for f in fields - RESOLVED.get(section, set())]


def filled_in(document: Manifest) -> Manifest:
    """The spec as the models complete it."""
    job = manifests.to_job(manifests.Document(data=copy.deepcopy(document)))
    return job.model_dump(mode="json", by_alias=True, exclude_none=True)["spec"]


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_server_fills_in_what_the_models_fill_in(api_server: ApiServer, namespace: str, name: str):
    document = dict(manifests.read(ACCEPTED[name]).data)
    assert missing(filled_in(document), create(api_server, namespace, document)["spec"]) == []


def test_kubectl_reads_the_numbers_of_a_file_as_we_do(api_server: ApiServer, namespace: str):
    text = (ROOT / "examples" / "quickstart.yaml").read_text(encoding="utf-8")
    answer = json.loads(api_server.kubectl("-n", namespace, "create", "--dry-run=server", "-o", "json", "-f", "-", input=text))
    assert missing(filled_in(dict(manifests.read(text).data)), answer["spec"]) == []


def test_every_section_is_filled_in_alike(api_server: ApiServer, namespace: str):
    document = manifest()
    document["spec"]["components"][1]["engine"] = {}
    document["spec"].update(
        queue={"name": "q"}, storage={"claimName": "c"},
        pipeline="Agentic", environments=[{"name": "lake", "type": "FrozenLake"}],
        serviceAccount={}, modelCache={}, metadata={}, imagePullSecrets=[{"name": "s"}],
        head={"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}]},
    )  # fmt: skip
    document["spec"]["model"]["lora"] = {}
    document["spec"]["nodeGroups"][0]["hardware"] = {"type": "Franka", "configs": [{"nodeRank": 0}]}
    document["spec"]["data"]["validation"] = [{"name": "file", "type": "JSONL", "jsonl": {"path": "a"}}]
    assert missing(filled_in(document), create(api_server, namespace, document)["spec"]) == []
