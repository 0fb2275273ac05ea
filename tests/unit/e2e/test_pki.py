"""Certificates name who they are for, and the server's holds every address it is called by."""

from pathlib import Path

import pytest
import yaml

from e2e.cluster import control_plane, kubeconfig, pki


def test_alternative_names_tell_addresses_from_names_and_repeat_nothing():
    assert pki.alternative_names(["localhost", "127.0.0.1", "::1", "localhost"]) == "DNS:localhost,IP:127.0.0.1,IP:::1"


def test_the_api_server_answers_to_loopback_service_and_bridge():
    for_pods = pki.alternative_names(pki.api_server_identity(control_plane.FOR_PODS.addresses).names)
    assert for_pods == (
        "DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,"
        "DNS:kubernetes.default.svc.cluster.local,IP:127.0.0.1,IP:198.19.0.1,IP:198.18.0.1"
    )
    assert "198.18.0.1" not in pki.alternative_names(pki.api_server_identity(control_plane.LOOPBACK_ONLY.addresses).names)


@pytest.mark.parametrize(
    ("identity", "subject"),
    [
        (pki.ADMIN, "/O=system:masters/CN=rljob-e2e-admin"),
        (pki.node_identity("node-0"), "/O=system:nodes/CN=system:node:node-0"),
        (pki.SCHEDULER, "/CN=system:kube-scheduler"),
    ],
)
def test_subjects(identity: pki.Identity, subject: str):
    assert pki.subject(identity) == subject


def test_servers_serve_and_clients_are_clients():
    server = pki.extensions(pki.api_server_identity(["127.0.0.1"]))
    client = pki.extensions(pki.ADMIN)
    assert "extendedKeyUsage=serverAuth" in server
    assert "subjectAltName=DNS:localhost" in server
    assert "extendedKeyUsage=clientAuth" in client
    assert "subjectAltName" not in client


def test_the_kubeconfig_has_the_fixed_context_and_is_private(tmp_path: Path):
    certificates = pki.Pki(folder=tmp_path)
    for path in (certificates.ca, certificates.certificate(pki.ADMIN), certificates.key(pki.ADMIN)):
        path.write_text(path.name)
    path = tmp_path / "kubeconfig"
    kubeconfig.write(path, server="https://127.0.0.1:1", pki=certificates, identity=pki.ADMIN)
    document = yaml.safe_load(path.read_text())
    assert document["current-context"] == "rljob-e2e"
    assert document["clusters"][0]["cluster"]["server"] == "https://127.0.0.1:1"
    assert path.stat().st_mode & 0o077 == 0
