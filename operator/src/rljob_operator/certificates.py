"""A certificate authority and a serving certificate for the webhook, made by the operator itself. No I/O.

Every renewal makes a new authority, whose key signs one certificate and is then forgotten: nobody can sign another. The bundle that the API
server trusts has the previous authority too, so that a replica that still serves the previous certificate is trusted.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALIDITY: Final = timedelta(days=365)
RENEW_BEFORE: Final = timedelta(days=120)
CLOCK_SKEW: Final = timedelta(minutes=10)
"""Certificates are valid from before now, because the API server's clock may be behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificates:
    """Three PEM texts."""

    authorities: bytes
    """What the API server trusts: the authority of ``certificate`` first, then the previous one."""
    certificate: bytes
    key: bytes


def make(hosts: Sequence[str], now: datetime, previous: Certificates | None = None) -> Certificates:
    """Make a new authority and a certificate for these DNS names and addresses; ``now`` has a time zone."""
    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"rljob-operator webhook authority {now:%Y-%m-%d %H:%M:%S}")])
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, hosts[0][:64])])
    authority = (
        _builder(issuer, issuer, authority_key.public_key(), now)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(authority_key, hashes.SHA256())
    )
    certificate = (
        _builder(subject, issuer, key.public_key(), now)
        .add_extension(x509.SubjectAlternativeName([_name(host) for host in hosts]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    former = b"" if previous is None else _first(previous.authorities)
    return Certificates(
        authorities=authority.public_bytes(pem) + former,
        certificate=certificate.public_bytes(pem),
        key=key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()),
    )


def is_due(certificates: Certificates, hosts: Sequence[str], now: datetime) -> bool:
    """Whether they have to be renewed: soon to expire, for other names, not belonging together, or not readable."""
    try:
        certificate = x509.load_pem_x509_certificate(certificates.certificate)
        authority = x509.load_pem_x509_certificates(certificates.authorities)[0]
        certificate.verify_directly_issued_by(authority)
        key = serialization.load_pem_private_key(certificates.key, password=None)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, TypeError, x509.ExtensionNotFound, InvalidSignature):
        return True
    if key.public_key() != certificate.public_key() or set(names) != {_name(host) for host in hosts}:
        return True
    return min(certificate.not_valid_after_utc, authority.not_valid_after_utc) - now < RENEW_BEFORE


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, now: datetime) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + VALIDITY)
    )


def _name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _first(bundle: bytes) -> bytes:
    """The first certificate of a bundle; nothing if there is none to read."""
    try:
        return x509.load_pem_x509_certificates(bundle)[0].public_bytes(serialization.Encoding.PEM)
    except ValueError:
        return b""
