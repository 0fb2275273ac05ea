"""Which connections a job's NetworkPolicy lets through, from whom to whom, evaluated by the published semantics."""

import json

import pytest

from rljob_operator.model import Manifest
from rljob_runtime.cluster.ports import GROUP_PORTS
from tests.support.network_policy import Endpoint, allows
from tests.unit.api.manifests import manifest
from tests.unit.operator.desired import builders
from tests.unit.operator.desired.builders import groups, objects, one

HERE = "team-rl"
GCS, DASHBOARD, WORKER, RAY_METRICS, HTTPS, DNS = 6379, 8265, 10_002, 8080, 443, 53
METADATA = Endpoint(address="169.254.169.254")
INTERNET = Endpoint(address="203.0.113.7")
API_SERVER = Endpoint(address="198.18.0.1")
RESTRICTED = json.dumps(
    [
        {"ports": [{"port": DNS, "protocol": "UDP"}, {"port": DNS, "protocol": "TCP"}]},
        {"to": [{"ipBlock": {"cidr": "198.18.0.1/32"}}], "ports": [{"port": HTTPS, "protocol": "TCP"}]},
    ]
)
"""As the chart renders jobs.egress.restrict with networkPolicy.apiServerCIDRs: [198.18.0.1/32]."""


def pods(name: str) -> tuple[Endpoint, Endpoint]:
    """Head and node of a job, with the labels that their pods get."""
    found = objects(manifest() | {"metadata": {"name": name}})
    (head, node) = (group["template"]["metadata"]["labels"] for group in groups(one(found, "RayJob")))
    return Endpoint(address="10.0.0.1", namespace=HERE, labels=head), Endpoint(address="10.0.0.2", namespace=HERE, labels=node)


HEAD, NODE = pods("case")
OTHER_HEAD, OTHER_NODE = pods("other")
STRANGER = Endpoint(address="10.0.1.1", namespace="elsewhere", labels={})
NAMESAKE = Endpoint(address="10.0.1.2", namespace="elsewhere", labels=NODE.labels)
NEIGHBOR = Endpoint(address="10.0.0.9", namespace=HERE, labels={"app": "web"})
KUBERAY = {"app.kubernetes.io/name": "kuberay", "app.kubernetes.io/component": "kuberay-operator"}
"""Of pods made by its kustomization; those of its chart have another name and the same component."""
OPERATOR = Endpoint(address="10.0.2.1", namespace="kuberay", labels=KUBERAY)
FALSE_OPERATOR = Endpoint(address="10.0.2.2", namespace=HERE, labels=KUBERAY)


def policies(**settings: str) -> list[Manifest]:
    """Of both jobs in the namespace."""
    documents = [manifest() | {"metadata": {"name": name}} for name in ("case", "other")]
    return [one(objects(document, settings=builders.settings(**settings)), "NetworkPolicy") for document in documents]


@pytest.mark.parametrize("port", [GCS, DASHBOARD, WORKER, RAY_METRICS])
def test_only_the_own_pods_reach_ray(port: int) -> None:
    for source, target in ((NODE, HEAD), (HEAD, NODE), (NODE, NODE)):
        assert allows(policies(), source, target, port)
    for source in (OTHER_HEAD, OTHER_NODE, STRANGER, NAMESAKE, NEIGHBOR, INTERNET, FALSE_OPERATOR):
        assert not allows(policies(), source, HEAD, port), source
        assert not allows(policies(), source, NODE, port), source


def test_kuberay_reaches_the_dashboard_alone() -> None:
    assert allows(policies(), OPERATOR, HEAD, DASHBOARD)
    assert not allows(policies(), OPERATOR, HEAD, GCS)
    assert not allows(policies(), OPERATOR, HEAD, DASHBOARD, "UDP")


def test_without_a_namespace_its_label_is_enough() -> None:
    assert allows(policies(kuberay_namespace=""), FALSE_OPERATOR, HEAD, DASHBOARD)
    assert not allows(policies(kuberay_namespace=""), STRANGER, HEAD, DASHBOARD)
    assert not allows(policies(kuberay_namespace=""), FALSE_OPERATOR, HEAD, GCS)


def test_egress_is_open_by_default_but_not_to_other_jobs() -> None:
    for target, port in ((INTERNET, HTTPS), (METADATA, 80), (API_SERVER, HTTPS), (NEIGHBOR, 5432)):
        assert allows(policies(), NODE, target, port)
    assert not allows(policies(), NODE, OTHER_HEAD, GCS)


def test_restricted_egress_leaves_the_job_dns_and_the_api_server() -> None:
    restricted = policies(egress=RESTRICTED)
    for target, port, protocol in (
        (HEAD, GCS, "TCP"),
        (NODE, WORKER, "TCP"),
        (NODE, WORKER, "UDP"),
        (API_SERVER, HTTPS, "TCP"),
        (NEIGHBOR, DNS, "UDP"),
        (INTERNET, DNS, "TCP"),
    ):
        assert allows(restricted, NODE, target, port, protocol), (target, port)
    for target, port in ((METADATA, 80), (INTERNET, HTTPS), (API_SERVER, 22), (NEIGHBOR, 5432), (STRANGER, HTTPS), (NAMESAKE, GCS)):
        assert not allows(restricted, NODE, target, port), (target, port)
    assert allows(restricted, OPERATOR, HEAD, DASHBOARD), "what comes in is not changed by it"


@pytest.mark.parametrize("settings", [{}, {"egress": RESTRICTED}], ids=["open", "restricted"])
def test_weights_may_take_any_way_between_the_pods_of_a_job(settings: dict[str, str]) -> None:
    """Auto selects TCP: the driver and all engines reach the trainer, each engine the next one."""
    for port in (GROUP_PORTS[0], GROUP_PORTS[-1]):
        for source, target in ((HEAD, NODE), (NODE, HEAD), (NODE, NODE)):
            assert allows(policies(**settings), source, target, port)
        assert not allows(policies(**settings), OTHER_NODE, NODE, port)


def test_what_is_allowed_besides_is_allowed_and_no_more() -> None:
    mirror = {"to": [{"ipBlock": {"cidr": "203.0.113.0/24", "except": ["203.0.113.7/32"]}}], "ports": [{"port": HTTPS, "protocol": "TCP"}]}
    allowed = policies(egress=json.dumps([*json.loads(RESTRICTED), mirror]))
    assert allows(allowed, NODE, Endpoint(address="203.0.113.8"), HTTPS)
    assert not allows(allowed, NODE, INTERNET, HTTPS), "excepted"
    assert not allows(allowed, NODE, Endpoint(address="203.0.113.8"), 80)


def test_the_evaluator_refuses_what_it_does_not_know() -> None:
    broken = [{"metadata": {"namespace": HERE}, "spec": {"podSelector": {}, "ingress": [{"from": [{"serviceSelector": {}}]}]}}]
    with pytest.raises(ValueError, match="serviceSelector"):
        allows(broken, STRANGER, HEAD, GCS)
