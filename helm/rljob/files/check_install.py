"""Run by `helm test` inside the cluster, with the operator's image: checks everything an RLJob needs and shows all results.

Environment: RLJOB_CHECK_API (default: the cluster's own), RLJOB_CHECK_RULES (the operator's rules as JSON: for each namespace it
watches), RLJOB_CHECK_OWN_RULES (for the release's own), RLJOB_CHECK_GLOBAL_RULES (for objects in no namespace), RLJOB_CHECK_ACCOUNT
(namespace:name of its ServiceAccount), RLJOB_CHECK_NAMESPACES (comma-separated; empty: all), RLJOB_CHECK_NAMESPACE (the release's,
where an RLJob is created with dryRun), RLJOB_CHECK_METRICS (host:port of the operator's metrics service; absent if this pod may not
reach it). Standard library only.
"""

from __future__ import annotations

import itertools
import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ACCOUNT_FOLDER = Path("/var/run/secrets/kubernetes.io/serviceaccount")
TIMEOUT_S = 10.0
CRD = "rljobs.rljob.dev"
KUBERAY_CRD = "rayjobs.ray.io"
KUBERAY_REMEDY = (
    "helm installs the CRDs of KubeRay and never upgrades them: "
    "kubectl replace -k 'github.com/ray-project/kuberay/ray-operator/config/crd?ref=v1.6.2'"
)
SAMPLE = {
    "apiVersion": "rljob.dev/v1alpha1",
    "kind": "RLJob",
    "metadata": {"name": "rljob-helm-test"},
    "spec": {
        "suspend": True,
        "nodeGroups": [{"name": "local", "devicesPerNode": 2, "deviceResource": "cpu"}],
        "components": [
            {"name": "actor_train", "role": "Trainer", "placement": {"ranks": "0"}},
            {"name": "actor_infer", "role": "Rollout", "placement": {"ranks": "1"}},
            {"name": "reward", "role": "Reward", "placement": {"workers": 1}},
        ],
        "model": {"path": "models/tiny"},
        "data": {"train": [{"name": "sums", "type": "ReasoningGym", "reasoningGym": {"task": "basic_arithmetic"}}]},
        "rewards": [{"name": "answer", "type": "Task"}],
        "training": {"steps": 1},
    },
}


class CheckError(Exception):
    """Raised when a check fails; the message ends with the remedy."""


class Api:
    """Client of the API server with the service account of this pod."""

    def __init__(self, base: str) -> None:
        self.base = base
        self.token = ""
        self.context: ssl.SSLContext | None = None
        if base.startswith("https:"):
            self.token = (ACCOUNT_FOLDER / "token").read_text()
            self.context = ssl.create_default_context(cafile=str(ACCOUNT_FOLDER / "ca.crt"))

    def __call__(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Send one request and return its answer as JSON.

        Raises:
            CheckError: no answer within ten seconds, or an error.
        """
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self.token}"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=self.context) as response:
                answer: dict[str, Any] = json.load(response)
                return answer
        except urllib.error.HTTPError as error:
            raise CheckError(f"{method} {path}: {error.code} {error.read().decode(errors='replace')[:2000]}") from error
        except (OSError, ValueError) as error:
            raise CheckError(f"{method} {path}: {error}") from error


def established(api: Api, name: str, remedy: str) -> dict[str, Any]:
    """Check that a CRD exists and is served. Returns its spec."""
    try:
        crd = api("GET", f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}")
    except CheckError as error:
        raise CheckError(f"{error}; {remedy}") from error
    if not any(c["type"] == "Established" and c["status"] == "True" for c in crd.get("status", {}).get("conditions", [])):
        raise CheckError(f"{name} is not established: {crd.get('status')}; {remedy}")
    spec: dict[str, Any] = crd["spec"]
    return spec


def rljob_crd(api: Api) -> str:
    """Check the CRD of RLJobs."""
    return _versions(established(api, CRD, "kubectl apply --server-side -f helm/rljob/crds/"))


def kuberay_crd(api: Api) -> str:
    """Check that the CRD of RayJobs has the newest field that RLJob writes; the API server would reject every job otherwise."""
    spec = established(api, KUBERAY_CRD, "install KubeRay 1.6.2")
    schema: dict[str, Any] = next((v["schema"]["openAPIV3Schema"] for v in spec["versions"] if v["name"] == "v1"), {})
    for name in ("spec", "rayClusterSpec", "authOptions"):
        if name not in schema.get("properties", {}):
            problem = f"{KUBERAY_CRD} is older than KubeRay 1.6.2: version v1 has no spec.rayClusterSpec.authOptions"
            raise CheckError(f"{problem}; {KUBERAY_REMEDY}")
        schema = schema["properties"][name]
    return _versions(spec)


def _versions(spec: Mapping[str, Any]) -> str:
    return f"versions {', '.join(v['name'] for v in spec['versions'])}"


def expanded(rules: str) -> list[tuple[str, str, str, str]]:
    """Expand rules in JSON to API group, resource, name (empty: any) and verb of every permission."""
    return [
        right
        for rule in json.loads(rules)
        for right in itertools.product(rule["apiGroups"], rule["resources"], rule.get("resourceNames", [""]), rule["verbs"])
    ]


def operator_rights(api: Api, environment: Mapping[str, str]) -> str:
    """Check that the operator has all permissions of the chart, each where it needs them."""
    namespaces = [n for n in environment["RLJOB_CHECK_NAMESPACES"].split(",") if n] or [""]
    wanted = list(itertools.product(namespaces, expanded(environment["RLJOB_CHECK_RULES"])))
    wanted += [(environment["RLJOB_CHECK_NAMESPACE"], right) for right in expanded(environment.get("RLJOB_CHECK_OWN_RULES", "[]"))]
    wanted += [("", right) for right in expanded(environment.get("RLJOB_CHECK_GLOBAL_RULES", "[]"))]
    missing = []
    for namespace, (group, resource, name, verb) in wanted:
        plural, _, subresource = resource.partition("/")
        attributes = {"namespace": namespace, "group": group, "resource": plural, "subresource": subresource, "name": name, "verb": verb}
        review = api(
            "POST",
            "/apis/authorization.k8s.io/v1/subjectaccessreviews",
            {
                "apiVersion": "authorization.k8s.io/v1",
                "kind": "SubjectAccessReview",
                "spec": {"user": f"system:serviceaccount:{environment['RLJOB_CHECK_ACCOUNT']}", "resourceAttributes": attributes},
            },
        )
        if not review["status"]["allowed"]:
            missing.append(f"{verb} {group}/{resource}{name and f' {name}'} in {namespace or 'all namespaces'}")
    if missing:
        raise CheckError(
            f"the operator lacks permissions: {'; '.join(missing)}; set rbac.create to true or grant them to its service account"
        )
    return f"{len(wanted)} permissions, jobs in {', '.join(namespaces).strip() or 'all namespaces'}"


def sample_is_accepted(api: Api, namespace: str) -> str:
    """Check that the API server accepts an RLJob and fills in defaults."""
    job = api("POST", f"/apis/rljob.dev/v1alpha1/namespaces/{namespace}/rljobs?dryRun=All&fieldValidation=Strict", SAMPLE)
    if "startupDeadlineSeconds" not in job["spec"]:
        raise CheckError("the API server did not fill in defaults: the CRD is older than the chart; apply its crds folder again")
    return "dry run"


def answers(address: str) -> str:
    """Check that the operator serves metrics through its service."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=TIMEOUT_S) as response:
            return f"{len(response.read())} bytes"
    except OSError as error:
        raise CheckError(f"http://{address}/metrics: {error}; check the operator's pod and networkPolicy.metricsFrom") from error


def main(environment: Mapping[str, str] = os.environ) -> int:
    """Run all checks. Returns the exit code: 0 if all pass, else 1."""
    api = Api(environment.get("RLJOB_CHECK_API", "https://kubernetes.default.svc"))
    namespace = environment["RLJOB_CHECK_NAMESPACE"]
    checks: list[tuple[str, Callable[[], str]]] = [
        ("API server", lambda: str(api("GET", "/version")["gitVersion"])),
        ("RLJob CRD", lambda: rljob_crd(api)),
        ("KubeRay CRD", lambda: kuberay_crd(api)),
        ("operator's permissions", lambda: operator_rights(api, environment)),
        ("sample RLJob", lambda: sample_is_accepted(api, namespace)),
    ]
    if "RLJOB_CHECK_METRICS" in environment:
        checks.append(("operator's metrics", lambda: answers(environment["RLJOB_CHECK_METRICS"])))
    failed = 0
    for title, check in checks:
        try:
            print(f"ok      {title}: {check()}", flush=True)
        except CheckError as error:
            failed += 1
            print(f"FAILED  {title}: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
