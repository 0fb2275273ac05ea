"""The cluster's own certificate authority and its certificates, made by the openssl command (no crypto library needed here)."""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from e2e.cluster import shell

_VALID_DAYS = 30
_TIMEOUT_S = 30.0
_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
_API_SERVER_NAMES = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local")


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who a certificate is for."""

    name: str
    """File name without ending."""
    common_name: str
    """User name towards the API server."""
    organization: str | None = None
    """Group towards the API server."""
    names: tuple[str, ...] = ()
    """DNS names and IP addresses of a server; empty for a client."""


ADMIN = Identity(name="admin", common_name="rljob-e2e-admin", organization="system:masters")
CONTROLLER_MANAGER = Identity(name="kube-controller-manager", common_name="system:kube-controller-manager")
SCHEDULER = Identity(name="kube-scheduler", common_name="system:kube-scheduler")
PROXY = Identity(name="kube-proxy", common_name="system:kube-proxy")
KUBELET_CLIENT = Identity(name="kubelet-client", common_name="kube-apiserver-kubelet-client", organization="system:masters")


def node_identity(node: str) -> Identity:
    """The kubelet of a node."""
    return Identity(name="kubelet", common_name=f"system:node:{node}", organization="system:nodes")


def api_server_identity(addresses: Sequence[str]) -> Identity:
    """The API server, reachable under its usual names and these addresses."""
    return Identity(name="kube-apiserver", common_name="kube-apiserver", names=(*_API_SERVER_NAMES, *addresses))


def subject(identity: Identity) -> str:
    """The identity as openssl's ``-subj`` wants it."""
    organization = f"/O={identity.organization}" if identity.organization else ""
    return f"{organization}/CN={identity.common_name}"


def alternative_names(names: Sequence[str]) -> str:
    """Names as a ``subjectAltName``: addresses as IP, the rest as DNS, each once, in order."""
    return ",".join(dict.fromkeys(f"{'IP' if _is_address(name) else 'DNS'}:{name}" for name in names))


def extensions(identity: Identity) -> str:
    """The certificate's extensions in openssl's file format."""
    lines = [
        "basicConstraints=critical,CA:FALSE",
        "keyUsage=critical,digitalSignature",
        f"extendedKeyUsage={'serverAuth' if identity.names else 'clientAuth'}",
        "subjectKeyIdentifier=hash",
        "authorityKeyIdentifier=keyid",
    ]
    if identity.names:
        lines.append(f"subjectAltName={alternative_names(identity.names)}")
    return "\n".join(lines) + "\n"


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Pki:
    """A folder of keys and certificates."""

    folder: Path

    @property
    def ca(self) -> Path:
        """Certificate of the authority."""
        return self.folder / "ca.crt"

    @property
    def service_account_key(self) -> Path:
        """Key that signs service account tokens."""
        return self.folder / "sa.key"

    def certificate(self, identity: Identity) -> Path:
        """Certificate of an identity."""
        return self.folder / f"{identity.name}.crt"

    def key(self, identity: Identity) -> Path:
        """Key of an identity."""
        return self.folder / f"{identity.name}.key"

    def make(self, identities: Sequence[Identity]) -> None:
        """Make the authority, the service account key, and a certificate for each identity.

        Raises:
            ClusterError: openssl is missing or failed.
        """
        self.folder.mkdir(mode=0o700, exist_ok=True)
        _openssl(
            "req", "-x509", *_NEW_KEY, "-keyout", self.folder / "ca.key", "-out", self.ca, "-subj", "/CN=rljob-e2e-ca",
            "-days", str(_VALID_DAYS), "-addext", "keyUsage=critical,keyCertSign,cRLSign",
        )  # fmt: skip
        _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", self.service_account_key)
        for identity in identities:
            self.sign(identity)

    def sign(self, identity: Identity) -> None:
        """Make a key and a certificate; :meth:`make` came before.

        Raises:
            ClusterError: openssl failed.
        """
        request, wanted = self.folder / f"{identity.name}.csr", self.folder / f"{identity.name}.ext"
        wanted.write_text(extensions(identity))
        _openssl("req", "-new", *_NEW_KEY, "-keyout", self.key(identity), "-out", request, "-subj", subject(identity))
        _openssl(
            "x509", "-req", "-in", request, "-CA", self.ca, "-CAkey", self.folder / "ca.key", "-set_serial", f"0x{secrets.token_hex(15)}",
            "-days", str(_VALID_DAYS), "-extfile", wanted, "-out", self.certificate(identity),
        )  # fmt: skip


def _openssl(*arguments: str | Path) -> None:
    shell.run(["openssl", *arguments], timeout_s=_TIMEOUT_S)
