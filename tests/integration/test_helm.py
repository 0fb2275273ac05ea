"""The chart through the real helm binary: lint, what it renders for each configuration, and what it rejects.

`python -m e2e.cluster build` makes the binary; RLJOB_E2E_HELM or a helm 4 on the PATH serves as well.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from e2e.cluster.build import binary
from rljob_operator.settings import Settings
from rljob_operator.webhook import PATH
from tests.layout.tree import ROOT
from tests.support.chart import CHART
from tests.support.golden import Golden
from tests.support.pace import HANG_S
from tests.support.shell_lines import ShellLine, shell_lines

GOLDEN = ROOT / "tests" / "golden" / "helm"
KUBE_VERSION = "1.36.3"
DIGEST = "sha256:" + "0123456789abcdef" * 4
CASES = ("default", "namespaced", "everything")
HELM_LINES = shell_lines("helm")
MESH = ("sidecar.istio.io/inject", "istio.io/dataplane-mode")
OWN_CHART = str(CHART.relative_to(ROOT))
Manifest = dict[str, Any]


@pytest.fixture(scope="session")
def helm() -> Path:
    candidates = (os.environ.get("RLJOB_E2E_HELM"), shutil.which("helm"), binary("helm"))
    found = next((Path(c) for c in candidates if c and Path(c).exists()), None)
    if found is None:
        pytest.fail("helm is missing. Remedy: python -m e2e.cluster build (needs Go), or RLJOB_E2E_HELM=/path/to/helm")
    return found


def run(helm: Path, *args: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([helm, *args], capture_output=True, text=True, timeout=HANG_S, check=False)


def render(helm: Path, *args: str | Path) -> str:
    done = run(helm, "template", "rljob", CHART, "--namespace=rljob-system", f"--kube-version={KUBE_VERSION}", *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(text: str) -> dict[tuple[str, str, str], Manifest]:
    """Kind, namespace and name -> manifest."""
    found = {}
    for document in yaml.safe_load_all(text):
        if document:
            metadata = document["metadata"]
            key = (document["kind"], metadata.get("namespace", ""), metadata["name"])
            assert key not in found, f"{key} is rendered twice"
            found[key] = document
    return found


def test_lint(helm: Path):
    for case in CASES:
        done = run(helm, "lint", "--strict", f"--kube-version={KUBE_VERSION}", CHART, "--values", GOLDEN / f"{case}.values.yaml")
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("case", CASES)
def test_what_is_rendered(helm: Path, case: str, golden: Golden):
    rendered = objects(render(helm, "--values", GOLDEN / f"{case}.values.yaml"))
    # The policy is generated and compared elsewhere.
    own = [m for m in rendered.values() if not m["kind"].startswith("ValidatingAdmissionPolicy")]
    assert len(rendered) - len(own) == 2
    text = yaml.safe_dump_all(map(without_files, own), sort_keys=False, width=140)
    assert golden.differences(GOLDEN / f"{case}.yaml", text) == ""


def without_files(manifest: Manifest) -> Manifest:
    """The manifest without files of the chart, which :func:`test_files_of_the_chart_are_rendered_as_they_are` compares once."""
    if manifest["kind"] == "ConfigMap":
        return manifest | {"data": {name: f"<files/dashboards/{name}>" for name in manifest["data"]}}
    if manifest["kind"] == "PrometheusRule":
        return manifest | {"spec": {"groups": "<files/alerts.yaml>"}}
    if manifest["kind"] != "Pod":
        return manifest
    (container,) = manifest["spec"]["containers"]
    return manifest | {"spec": manifest["spec"] | {"containers": [container | {"args": ["<files/check_install.py>"]}]}}


def test_files_of_the_chart_are_rendered_as_they_are(helm: Path):
    rendered = objects(render(helm, "--values", GOLDEN / "everything.values.yaml"))
    by_kind = {m["kind"]: m for m in rendered.values()}
    files = {path.name: path.read_text() for path in (CHART / "files" / "dashboards").glob("*.json")}
    assert by_kind["ConfigMap"]["data"] == files
    groups = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())["groups"]
    assert by_kind["PrometheusRule"]["spec"]["groups"][: len(groups)] == groups
    pod = by_kind["Pod"]
    (container,) = pod["spec"]["containers"]
    assert container["args"] == [(CHART / "files" / "check_install.py").read_text()]


@pytest.mark.parametrize("release", ["rljob", "team-a"])
def test_an_absent_operator_is_reported_where_the_chart_has_it_scraped_and_nowhere_else(helm: Path, release: str):
    def rendered(*options: str) -> dict[tuple[str, str, str], Manifest]:
        return objects(run(helm, "template", release, CHART, "--namespace=rl", "--set=prometheusRule.enabled=true", *options).stdout)

    def alerts(found: dict[tuple[str, str, str], Manifest]) -> dict[str, str]:
        (rule,) = [m for m in found.values() if m["kind"] == "PrometheusRule"]
        return {alert["alert"]: alert["expr"] for group in rule["spec"]["groups"] for alert in group["rules"]}

    assert "RLJobOperatorAbsent" not in alerts(rendered()), "without a scrape it would always fire"
    scraped = rendered("--set=serviceMonitor.enabled=true")
    (monitor,) = [m for m in scraped.values() if m["kind"] == "ServiceMonitor"]
    wanted = monitor["spec"]["selector"]["matchLabels"].items()
    port = monitor["spec"]["endpoints"][0]["port"]
    services = [m["metadata"] for m in scraped.values() if m["kind"] == "Service" and wanted <= m["metadata"]["labels"].items()]
    (service,) = [s for s in services if port in {p["name"] for p in scraped["Service", "rl", s["name"]]["spec"]["ports"]}]
    # The labels that the Prometheus operator gives every series of a ServiceMonitor.
    expected = f'absent(rljob_operator_leader{{namespace="{service["namespace"]}", service="{service["name"]}"}})'
    assert alerts(scraped)["RLJobOperatorAbsent"] == expected


@pytest.mark.parametrize("case", CASES)
def test_labels_and_references_hold_together(helm: Path, case: str):
    rendered = objects(render(helm, "--values", GOLDEN / f"{case}.values.yaml"))
    pod = rendered["Deployment", "rljob-system", "rljob-operator"]["spec"]["template"]
    labels = pod["metadata"]["labels"].items()
    assert rendered["Deployment", "rljob-system", "rljob-operator"]["spec"]["selector"]["matchLabels"].items() <= labels
    service = rendered["Service", "rljob-system", "rljob-operator-metrics"]
    assert service["spec"]["selector"].items() <= labels
    assert service["spec"]["ports"][0]["targetPort"] in {p["name"] for p in pod["spec"]["containers"][0]["ports"]}
    accounts = {key[2] for key in rendered if key[0] == "ServiceAccount"}
    assert pod["spec"]["serviceAccountName"] in accounts
    for (kind, namespace, _), manifest in rendered.items():
        if kind.endswith("RoleBinding"):
            assert (manifest["roleRef"]["kind"], namespace, manifest["roleRef"]["name"]) in rendered
            assert {s["name"] for s in manifest["subjects"]} <= accounts


@pytest.mark.parametrize("case", CASES)
def test_every_pod_is_restricted_and_read_only(helm: Path, case: str):
    rendered = objects(render(helm, "--values", GOLDEN / f"{case}.values.yaml"))
    pods = [m["spec"]["template"]["spec"] for m in rendered.values() if m["kind"] == "Deployment"]
    pods += [m["spec"] for m in rendered.values() if m["kind"] == "Pod"]
    assert len(pods) == 2
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            security = container["securityContext"]
            assert (security["allowPrivilegeEscalation"], security["capabilities"]["drop"]) == (False, ["ALL"])
            assert security["readOnlyRootFilesystem"] is True
            assert container["resources"]["requests"]
            assert container["resources"]["limits"]["memory"]


def test_the_webhook_is_called_what_the_operator_calls_it(helm: Path):
    """The operator derives Secret, certificate name and configuration from one setting."""
    rendered = objects(render(helm, "--set=webhook.enabled=true"))
    container = rendered["Deployment", "rljob-system", "rljob-operator"]["spec"]["template"]["spec"]["containers"][0]
    env = {entry["name"]: entry["value"] for entry in container["env"]}
    namespace, _, name = env["RLJOB_OPERATOR_WEBHOOK"].partition("/")
    service = rendered["Service", namespace, name]
    (hook,) = rendered["ValidatingWebhookConfiguration", "", f"{namespace}-{name}"]["webhooks"]
    assert (hook["clientConfig"]["service"]["namespace"], hook["clientConfig"]["service"]["name"]) == (namespace, name)
    assert hook["clientConfig"]["service"]["path"] == PATH
    assert hook["failurePolicy"] == "Ignore"
    assert service["spec"]["ports"][0]["targetPort"] in {port["name"] for port in container["ports"]}
    assert {"name": "webhook", "containerPort": int(env["RLJOB_OPERATOR_WEBHOOK_PORT"])} in container["ports"]
    secrets = [rule for rule in rendered["Role", namespace, name]["rules"] if rule.get("resourceNames")]
    assert secrets == [{"apiGroups": [""], "resources": ["secrets"], "resourceNames": [name], "verbs": ["get", "patch"]}]
    (rule,) = rendered["ClusterRole", "", f"{namespace}-{name}"]["rules"]
    assert (rule["resourceNames"], rule["verbs"]) == ([f"{namespace}-{name}"], ["get", "patch"])


def test_the_lease_is_called_what_the_operator_calls_it(helm: Path):
    rendered = objects(render(helm))
    container = rendered["Deployment", "rljob-system", "rljob-operator"]["spec"]["template"]["spec"]["containers"][0]
    namespace, _, name = next(entry["value"] for entry in container["env"] if entry["name"] == "RLJOB_OPERATOR_LEASE").partition("/")
    named = [rule for rule in rendered["Role", namespace, f"{name}-lease"]["rules"] if rule.get("resourceNames")]
    assert [(rule["resourceNames"], rule["verbs"]) for rule in named] == [([name], ["get", "patch"])]


@pytest.mark.parametrize(("replicas", "budgets"), [(1, 0), (2, 1)])
def test_replicas_are_replaced_one_by_one_and_spread(helm: Path, replicas: int, budgets: int):
    rendered = objects(render(helm, f"--set=replicas={replicas}"))
    spec = rendered["Deployment", "rljob-system", "rljob-operator"]["spec"]
    assert spec["replicas"] == replicas
    # All fields are written and their set is the same for any number: server-side apply cannot remove what the API server filled in.
    assert spec["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    assert len([key for key in rendered if key[0] == "PodDisruptionBudget"]) == budgets
    assert ("podAntiAffinity" in spec["template"]["spec"].get("affinity", {})) is (replicas > 1)


def test_namespaced_means_no_cluster_wide_right_for_the_operator(helm: Path):
    rendered = objects(render(helm, "--values", GOLDEN / "namespaced.values.yaml"))
    users = {f"rljob-system-rljob-operator-{name}" for name in ("view", "edit")}
    assert {key[2] for key in rendered if key[0].startswith("ClusterRole")} == {"rljob-system-rljob-operator-test", *users}
    assert {key[1] for key in rendered if key[0] == "Role" and key[2] == "rljob-operator"} == {"team-a", "team-b"}


def test_users_roles_read_jobs_or_change_them_but_never_their_status(helm: Path):
    rendered = objects(render(helm))
    view, edit = (rendered["ClusterRole", "", f"rljob-system-rljob-operator-{name}"] for name in ("view", "edit"))
    for role, name in ((view, "view"), (edit, "edit")):
        assert role["metadata"]["labels"][f"rbac.authorization.k8s.io/aggregate-to-{name}"] == "true"
    assert [set(rule["verbs"]) for rule in view["rules"]] == [{"get", "list", "watch"}]
    rights = {resource: set(rule["verbs"]) for rule in edit["rules"] for resource in rule["resources"]}
    assert {"get", "list", "watch", "create", "patch"} <= rights["rljobs"], "kubectl apply reads first, also without the rules for view"
    assert rights["rljobs/status"] == {"get", "list", "watch"}
    without = objects(render(helm, "--set=rbac.aggregateToView=false,rbac.aggregateToEdit=false"))
    assert set(rendered) - set(without) == {("ClusterRole", "", role["metadata"]["name"]) for role in (view, edit)}


def test_names_of_a_release_of_any_length_fit(helm: Path):
    name = "r" * 53  # the longest that Helm takes
    done = run(helm, "template", name, CHART, f"--kube-version={KUBE_VERSION}", "--values", GOLDEN / "everything.values.yaml")
    assert done.returncode == 0, done.stderr
    names = [name for kind, _, name in objects(done.stdout) if kind == "Service"]
    assert len(names) == 2
    assert max(map(len, names)) <= 63


def test_the_default_label_of_the_dashboards_can_be_removed(helm: Path):
    rendered = objects(render(helm, "--set=dashboards.enabled=true,dashboards.labels.grafana_dashboard=null"))
    (labels,) = [found["metadata"]["labels"] for (kind, _, name), found in rendered.items() if name.endswith("-dashboards")]
    assert "grafana_dashboard" not in labels


@pytest.mark.parametrize("field", ["extraLabels", "podLabels"])
def test_labels_of_the_charts_own_are_refused(helm: Path, field: str):
    done = run(helm, "template", "rljob", CHART, f"--kube-version={KUBE_VERSION}", f"--set={field}.app\\.kubernetes\\.io/name=mine")
    assert done.returncode != 0
    assert "invalid propertyName 'app.kubernetes.io/name'" in done.stderr
    render(helm, f"--set={field}.team=mine")


@pytest.mark.parametrize("enabled", [True, False])
def test_a_parent_chart_may_switch_it_by_a_condition(helm: Path, tmp_path: Path, enabled: bool):
    shutil.copytree(CHART, tmp_path / "charts" / "rljob")
    dependency = {"name": "rljob", "version": "0.1.0", "condition": "rljob.enabled"}
    parent = {"apiVersion": "v2", "name": "platform", "version": "1.0.0", "dependencies": [dependency]}
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump(parent))
    (tmp_path / "values.yaml").write_text(yaml.safe_dump({"rljob": {"enabled": enabled}}))
    done = run(helm, "template", "platform", tmp_path, f"--kube-version={KUBE_VERSION}")
    assert done.returncode == 0, done.stderr
    assert any(kind == "Deployment" for kind, *_ in objects(done.stdout)) is enabled


def test_pods_stay_out_of_a_mesh_unless_their_labels_are_given(helm: Path):
    def mesh(*options: str) -> list[tuple[str, ...]]:
        rendered = objects(render(helm, *options))
        pods = [rendered["Deployment", "rljob-system", "rljob-operator"]["spec"]["template"]]
        pods += [m for m in rendered.values() if m["kind"] == "Pod"]
        return [tuple(pod["metadata"]["labels"][key] for key in MESH) for pod in pods]

    assert mesh() == [("false", "none")] * 2
    assert mesh("--set-string=podLabels.sidecar\\.istio\\.io/inject=true") == [("true", "none"), ("false", "none")]


def test_no_page_upgrades_with_the_old_charts_defaults():
    """With --reuse-values Helm takes the defaults of the old chart, without what the new one has added."""
    pages = [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    assert [page.name for page in pages if " --reuse-values -" in page.read_text() or " --reuse-values\n" in page.read_text()] == []


@pytest.mark.parametrize("line", [line for line in HELM_LINES if OWN_CHART in line.words], ids=str)
def test_the_chart_renders_with_the_options_of_the_pages(helm: Path, line: ShellLine):
    program, verb, *words = line.words
    assert (program, verb in ("install", "upgrade")) == ("helm", True), line
    words = [word for word in words if word != "--reset-then-reuse-values"]  # about a release that exists; there is none
    command = [helm, "template", *words, f"--kube-version={KUBE_VERSION}"]
    done = subprocess.run(command, cwd=ROOT, input=line.stdin, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr
    assert objects(done.stdout)


def test_options_of_helm_on_the_pages_exist(helm: Path):
    """Also of other charts, which cannot be rendered without their repositories."""
    verbs: dict[tuple[str, ...], set[str]] = {}
    for line in HELM_LINES:
        verb = line.words[1:3] if line.words[1] == "repo" else line.words[1:2]
        verbs.setdefault(verb, set()).update(word.partition("=")[0] for word in line.words if word.startswith("-") and word != "-")
    assert {("install",), ("upgrade",), ("uninstall",), ("test",), ("repo", "add")} <= verbs.keys()
    for verb, used in verbs.items():
        done = run(helm, *verb, "--help")
        known = set(re.findall(r"(?<![\w-])--?[\w-]+", done.stdout))
        assert f"helm {' '.join(verb)} " in done.stdout, f"helm has no command {' '.join(verb)}"
        assert used <= known, f"helm {' '.join(verb)} has no {sorted(used - known)}"


def test_egress_of_jobs_is_dns_the_api_server_and_what_is_allowed(helm: Path):
    rendered = objects(render(helm, "--values", GOLDEN / "everything.values.yaml"))
    env = rendered["Deployment", "rljob-system", "rljob-operator"]["spec"]["template"]["spec"]["containers"][0]["env"]
    settings = {variable["name"]: variable["value"] for variable in env}
    rules = Settings.from_environment(settings).egress_rules
    assert rules == [
        {"ports": [{"port": port, "protocol": protocol} for port in (53, 8053) for protocol in ("UDP", "TCP")]},
        {"to": [{"ipBlock": {"cidr": "198.18.0.1/32"}}], "ports": [{"port": 6443, "protocol": "TCP"}]},
        {"to": [{"ipBlock": {"cidr": "198.18.7.0/24"}}], "ports": [{"port": 443, "protocol": "TCP"}]},
    ]


def test_dns_is_reached_where_openshifts_pods_listen(helm: Path):
    """A network plug-in that resolves the Service first compares the port of the pod, 5353 on OpenShift."""
    rendered = objects(render(helm, "--set=jobs.egress.restrict=true", "--set=networkPolicy.apiServerCIDRs={198.18.0.1/32}"))
    env = rendered["Deployment", "rljob-system", "rljob-operator"]["spec"]["template"]["spec"]["containers"][0]["env"]
    egress = json.loads(next(variable["value"] for variable in env if variable["name"] == "RLJOB_OPERATOR_EGRESS"))
    own = rendered["NetworkPolicy", "rljob-system", "rljob-operator"]["spec"]["egress"]
    expected = {(port, protocol) for port in (53, 5353) for protocol in ("UDP", "TCP")}
    assert [{(item["port"], item["protocol"]) for item in rules[0]["ports"]} for rules in (egress, own)] == [expected, expected]


def test_no_rule_is_without_ports_even_where_the_schema_is_not_checked(helm: Path):
    """Such a rule allows all ports."""
    without = "--set=networkPolicy.dnsPorts=null,networkPolicy.apiServerPorts=null"
    restricted = ("--set=jobs.egress.restrict=true", "--set=networkPolicy.apiServerCIDRs={198.18.0.1/32}")
    assert render(helm, without, "--skip-schema-validation", *restricted) == render(helm, *restricted)


def test_names_that_yaml_takes_for_another_type_stay_text(helm: Path):
    """Namespaces may consist of digits, and releases may be called like a boolean."""
    done = run(
        helm, "template", "true", CHART, "--namespace=123", f"--kube-version={KUBE_VERSION}", "--set=webhook.enabled=true,replicas=2"
    )
    assert done.returncode == 0, done.stderr
    for (_, namespace, _), manifest in objects(done.stdout).items():
        assert namespace in ("", "123")
        assert all(isinstance(value, str) for value in manifest["metadata"].get("labels", {}).values())
        assert all(subject["namespace"] == "123" for subject in manifest.get("subjects", ()))
    one = run(helm, "template", "rljob", CHART, f"--kube-version={KUBE_VERSION}", '--set-json=watch.namespaces=["77"]').stdout
    assert {key[1] for key in objects(one) if key[0] == "Role" and key[2] == "rljob-operator"} == {"77"}


def test_a_label_that_is_set_twice_is_written_once(helm: Path):
    """Kustomize, and Flux with it, rejects a manifest in which a key occurs twice."""

    class Strict(yaml.SafeLoader):
        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value]
            assert len(keys) == len(set(keys)), f"a key occurs twice: {keys}"
            return super().construct_mapping(node, deep)

    own = ("serviceMonitor.labels", "podMonitor.labels", "prometheusRule.labels", "dashboards.labels", "podLabels")
    text = render(
        helm,
        "--values",
        GOLDEN / "everything.values.yaml",
        "--set=extraLabels.release=all",
        f"--set={','.join(f'{field}.release=own' for field in own)}",
    )
    found = [document for document in yaml.load_all(text, Loader=Strict) if document]
    labels = {
        document["kind"]: document["metadata"]["labels"]["release"]
        for document in found
        if "release" in document["metadata"].get("labels", {})
    }
    assert {kind for kind, value in labels.items() if value == "own"} == {"ServiceMonitor", "PodMonitor", "PrometheusRule", "ConfigMap"}
    (deployment,) = [document for document in found if document["kind"] == "Deployment"]
    assert deployment["spec"]["template"]["metadata"]["labels"]["release"] == "own"


def test_two_releases_in_one_cluster_share_only_the_policy_that_protects_the_status(helm: Path):
    def cluster_wide(namespace: str) -> set[str]:
        done = run(helm, "template", "rljob", CHART, f"--namespace={namespace}", f"--kube-version={KUBE_VERSION}")
        return {kind for kind, place, name in objects(done.stdout) if not place and namespace not in name}

    assert cluster_wide("one-system") == cluster_wide("two-system") == {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("watch.namespace=a", "at '/watch': additional properties 'namespace' not allowed"),
        ("operator.workers=0", "at '/operator/workers': minimum: got 0, want 1"),
        ("operator.logLevel=LOUD", "at '/operator/logLevel': value must be one of 'DEBUG', 'INFO', 'WARNING', 'ERROR'"),
        ("image.digest=latest", "at '/image/digest': 'latest' does not match pattern"),
        ("image.repository=registry.example/rljob-operator:1", "at '/image/repository'"),
        ("replicas=0", "at '/replicas': minimum: got 0, want 1"),
        ("networkPolicy.dnsPorts=null", "at '/networkPolicy': missing property 'dnsPorts'"),
        ("networkPolicy.apiServerPorts=null", "at '/networkPolicy': missing property 'apiServerPorts'"),
        ("jobs.egress.restrict=true", "set networkPolicy.apiServerCIDRs, or port 443 of any address would stay open"),
        ("jobs.egress.restrict=true,jobs.networkPolicy=false", "needs jobs.networkPolicy: true"),
        ("podMonitor.enabled=true", "set jobs.metricsFrom, or jobs.networkPolicy: false"),
        ("serviceAccount.create=false", "serviceAccount.name: name an existing account, or set serviceAccount.create to true"),
    ],
)
def test_what_is_rejected(helm: Path, setting: str, message: str):
    done = run(helm, "template", "rljob", CHART, f"--kube-version={KUBE_VERSION}", "--set", setting)
    assert done.returncode != 0
    assert message in done.stderr


def test_an_old_cluster_is_rejected(helm: Path):
    done = run(helm, "template", "rljob", CHART, "--kube-version=1.29.0")
    assert done.returncode != 0
    assert "requires kubeVersion: >=1.30.0-0" in done.stderr


def test_a_digest_wins_over_a_tag(helm: Path):
    deployment = objects(render(helm, f"--set=image.digest={DIGEST},image.tag=v1"))["Deployment", "rljob-system", "rljob-operator"]
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"] == f"rljob-operator@{DIGEST}"


def test_the_runtimes_digest_wins_over_its_tag(helm: Path):
    deployment = objects(render(helm, f"--set=runtime.image.digest={DIGEST},runtime.image.tag=v1"))[
        "Deployment", "rljob-system", "rljob-operator"
    ]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert f"rljob-runtime@{DIGEST}" in {variable.get("value") for variable in container["env"]}


@pytest.mark.parametrize(
    ("settings", "kinds"),
    [
        ("rbac.create=false,webhook.enabled=true", {"ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"}),
        ("networkPolicy.enabled=false", {"NetworkPolicy"}),
        ("serviceAccount.create=false,serviceAccount.name=mine", {"ServiceAccount"}),
    ],
)
def test_what_somebody_else_makes_is_left_out_and_nothing_more(helm: Path, settings: str, kinds: set[str]):
    """But for `helm test`, which has an account and permissions of its own."""
    enabled = [f"--set={setting}" for setting in settings.split(",") if setting == "webhook.enabled=true"]
    whole, less = objects(render(helm, *enabled)), objects(render(helm, f"--set={settings}"))
    left_out = {key for key in set(whole) - set(less) if "test" not in key[2]}
    assert {key[0] for key in left_out} == kinds
    assert set(less) <= set(whole)


def test_the_notes_show_the_next_steps(helm: Path, tmp_path: Path):
    # Only install shows the notes, and it asks a cluster for its version; a copy of the chart without that requirement does not.
    chart = tmp_path / "rljob"
    shutil.copytree(CHART, chart)
    text = (chart / "Chart.yaml").read_text()
    (chart / "Chart.yaml").write_text("".join(line for line in text.splitlines(keepends=True) if not line.startswith("kubeVersion")))
    done = run(helm, "install", "rljob", chart, "--dry-run=client", "--namespace=rljob-system", "--set=watch.namespaces={a,b}")
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    assert "helm test rljob --namespace rljob-system" in notes
    assert "It watches the namespaces a, b; jobs run rljob-runtime:0.1.0" in notes
