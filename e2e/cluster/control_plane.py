"""etcd, kube-apiserver, kube-controller-manager, kube-scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import kubeconfig, pki, probe
from e2e.cluster.build import binary
from e2e.cluster.network import GATEWAY, PODS, SERVICE_IP, SERVICES
from e2e.cluster.pki import Pki
from e2e.cluster.process import start, wait_ready
from e2e.cluster.state import StateFolder

API_PORTS = ("etcd", "etcd-peer", "kube-apiserver", "kube-controller-manager")
"""Ports that the API server mode needs."""
ISSUER = "https://kubernetes.default.svc.cluster.local"
LOOPBACK = "127.0.0.1"

_START_DEADLINE_S = 300.0
_AUDIT_POLICY = """\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- {level: Metadata, userGroups: ["system:serviceaccounts"], omitManagedFields: true}
- {level: None}
"""
"""Who asked for what, service accounts only: shows which rights a program really uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where the API server listens."""

    bind: str
    """Address to listen on."""
    advertise: str | None
    """Address that pods reach it by, behind the service ``kubernetes``; None where there are no pods."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses the server's certificate has to hold."""
        return (LOOPBACK, SERVICE_IP) if self.advertise is None else (LOOPBACK, SERVICE_IP, self.advertise)


LOOPBACK_ONLY = Endpoint(bind=LOOPBACK, advertise=None)
# On all addresses, because it takes one only and is wanted on two: the bridge's by pods, loopback by people, whose clients may have a
# proxy in their environment that knows no other exception. Every request still needs a certificate or a token.
FOR_PODS = Endpoint(bind="0.0.0.0", advertise=GATEWAY)


def pki_of(folder: StateFolder) -> Pki:
    """The cluster's certificates."""
    return Pki(folder=folder.path / "pki")


def server_url(folder: StateFolder) -> str:
    """URL of the API server on this machine."""
    return f"https://{LOOPBACK}:{folder.require().ports['kube-apiserver']}"


def audit_log(folder: StateFolder) -> Path:
    """JSON lines: every request of a service account."""
    return folder.path / "audit.jsonl"


def write_kubeconfig(folder: StateFolder, identity: pki.Identity) -> Path:
    """A kubeconfig for one of the cluster's programs; returns its path."""
    path = folder.folder("kubeconfigs") / identity.name
    kubeconfig.write(path, server=server_url(folder), pki=pki_of(folder), identity=identity)
    return path


def start_api(folder: StateFolder, endpoint: Endpoint) -> None:
    """Start etcd, API server and controller manager, and write the administrator's kubeconfig.

    Raises:
        ClusterError: one of them did not become ready; with the end of its log.
    """
    ports, certificates = folder.require().ports, pki_of(folder)
    server = pki.api_server_identity(endpoint.addresses)
    certificates.make([server, pki.ADMIN, pki.KUBELET_CLIENT, pki.CONTROLLER_MANAGER])
    kubeconfig.write(folder.kubeconfig, server=server_url(folder), pki=certificates, identity=pki.ADMIN)
    etcd = start(folder, "etcd", etcd_arguments(folder), first=True)
    wait_ready("etcd", probe.http_ok(f"http://{LOOPBACK}:{ports['etcd']}/health"), deadline_s=_START_DEADLINE_S, folder=folder, record=etcd)
    (folder.path / "audit-policy.yaml").write_text(_AUDIT_POLICY)
    api_server = start(folder, "kube-apiserver", api_server_arguments(folder, endpoint), first=True)
    wait_ready(
        "the API server", probe.http_ok(f"{server_url(folder)}/readyz?verbose", pki=certificates, identity=pki.ADMIN),
        deadline_s=_START_DEADLINE_S, folder=folder, record=api_server,
    )  # fmt: skip
    manager = start(folder, "kube-controller-manager", controller_manager_arguments(folder), first=True)
    wait_ready(
        "the default service account (made by kube-controller-manager)",
        probe.http_ok(f"{server_url(folder)}/api/v1/namespaces/default/serviceaccounts/default", pki=certificates, identity=pki.ADMIN),
        deadline_s=_START_DEADLINE_S, folder=folder, record=manager,
    )  # fmt: skip


def start_scheduler(folder: StateFolder) -> None:
    """Start the scheduler.

    Raises:
        ClusterError: it did not become ready.
    """
    pki_of(folder).sign(pki.SCHEDULER)
    port = folder.require().ports["kube-scheduler"]
    scheduler = start(
        folder, "kube-scheduler",
        [
            binary("kube-scheduler"), f"--kubeconfig={write_kubeconfig(folder, pki.SCHEDULER)}", "--leader-elect=false",
            f"--bind-address={LOOPBACK}", f"--secure-port={port}", f"--cert-dir={folder.folder('scheduler')}",
        ],
    )  # fmt: skip
    wait_ready(
        "the scheduler", probe.http_ok(f"https://{LOOPBACK}:{port}/readyz"), deadline_s=_START_DEADLINE_S, folder=folder, record=scheduler
    )


def etcd_arguments(folder: StateFolder) -> list[str]:
    """Command line of etcd: one member, loopback, and no fsync, because a test cluster's data is worth nothing after a crash."""
    ports = folder.require().ports
    client, peer = f"http://{LOOPBACK}:{ports['etcd']}", f"http://{LOOPBACK}:{ports['etcd-peer']}"
    return [
        str(binary("etcd")), "--name=e2e", f"--data-dir={folder.path / 'etcd'}", f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}", f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=e2e={peer}", "--unsafe-no-fsync", "--log-level=warn", "--quota-backend-bytes=8589934592",
    ]  # fmt: skip


def api_server_arguments(folder: StateFolder, endpoint: Endpoint) -> list[str]:
    """Command line of kube-apiserver."""
    ports, certificates = folder.require().ports, pki_of(folder)
    server = pki.api_server_identity(endpoint.addresses)
    # Without pods nobody uses the service's endpoint, and a loopback address is not allowed in one.
    reconciler = "none" if endpoint.advertise is None else "lease"
    return [
        str(binary("kube-apiserver")), f"--etcd-servers=http://{LOOPBACK}:{ports['etcd']}", f"--secure-port={ports['kube-apiserver']}",
        f"--bind-address={endpoint.bind}", f"--advertise-address={endpoint.advertise or LOOPBACK}",
        f"--endpoint-reconciler-type={reconciler}", f"--cert-dir={folder.folder('kube-apiserver')}",
        f"--tls-cert-file={certificates.certificate(server)}", f"--tls-private-key-file={certificates.key(server)}",
        f"--client-ca-file={certificates.ca}", f"--service-account-key-file={certificates.service_account_key}",
        f"--service-account-signing-key-file={certificates.service_account_key}", f"--service-account-issuer={ISSUER}",
        f"--service-cluster-ip-range={SERVICES}", "--authorization-mode=Node,RBAC", "--allow-privileged",
        f"--kubelet-client-certificate={certificates.certificate(pki.KUBELET_CLIENT)}",
        f"--kubelet-client-key={certificates.key(pki.KUBELET_CLIENT)}",
        "--kubelet-preferred-address-types=InternalIP",  # the node's name is known to no DNS
        "--enable-admission-plugins=OwnerReferencesPermissionEnforcement",  # as OpenShift has it: shows that owner references need a right
        f"--audit-policy-file={folder.path / 'audit-policy.yaml'}", f"--audit-log-path={audit_log(folder)}", "--audit-log-maxsize=200",
    ]  # fmt: skip


def controller_manager_arguments(folder: StateFolder) -> list[str]:
    """Command line of kube-controller-manager."""
    certificates = pki_of(folder)
    return [
        str(binary("kube-controller-manager")), f"--kubeconfig={write_kubeconfig(folder, pki.CONTROLLER_MANAGER)}",
        f"--bind-address={LOOPBACK}", f"--secure-port={folder.require().ports['kube-controller-manager']}",
        f"--cert-dir={folder.folder('kube-controller-manager')}", f"--root-ca-file={certificates.ca}",
        f"--service-account-private-key-file={certificates.service_account_key}", "--use-service-account-credentials",
        f"--cluster-cidr={PODS}", "--leader-elect=false", f"--flex-volume-plugin-dir={folder.path / 'volume-plugins'}",
    ]  # fmt: skip
