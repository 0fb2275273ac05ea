"""Configuration of the operator: environment variables, set by the Helm chart and read once at startup."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from rljob_operator.errors import SettingsError


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Each field is read from ``RLJOB_OPERATOR_<FIELD NAME IN UPPER CASE>``."""

    runtime_image: str
    """Image for jobs that do not set spec.image."""
    runtime_ray_version: str
    """Ray version in that image."""
    runtime_image_pull_secrets: str = ""
    """Comma-separated names of Secrets for pulling it, for jobs that do not set spec.imagePullSecrets."""
    namespaces: str = ""
    """Comma-separated namespaces to watch; empty: all."""
    kuberay_namespace: str = ""
    """Namespace of the KubeRay operator, the only external client that may reach the dashboards of jobs; empty: any namespace."""
    network_policy: bool = True
    """Create a NetworkPolicy for every job."""
    egress: str = ""
    """Egress rules of the jobs' NetworkPolicies as a JSON list, besides their own pods; empty: egress is not restricted."""
    metrics_from: str = ""
    """Peers that may read the metrics of jobs, as a JSON list like "from" of a NetworkPolicy; empty: nobody but the job's own pods."""
    workers: int = 8
    """Maximum number of concurrent reconciles, besides up to 16 that take longer than 2 s."""
    requests: int = 16
    """Maximum number of concurrent requests to the API server, besides writes that have not been answered for 2 s."""
    lease: str = ""
    """Lease "namespace/name" that operators take turns by; empty: this process is the only operator."""
    webhook: str = ""
    """Validating webhook: "namespace/name" of its Service and Secret; empty: none."""
    webhook_port: int = 9443
    """Port of the validating webhook."""
    health_port: int = 8080
    """Port of /healthz."""
    metrics_port: int = 8081
    """Port of /metrics."""
    listen_address: str = "0.0.0.0"
    """Where /healthz, /metrics and the dashboards of jobs listen: "0.0.0.0" (IPv4), or "::" (IPv6), the default where the API server's
    address is of IPv6."""
    log_level: str = "INFO"
    """Minimum log level: DEBUG, INFO, WARNING or ERROR."""
    log_format: str = "json"
    """One JSON object per line ("json") or plain text ("text")."""

    @property
    def pull_secrets(self) -> tuple[str, ...]:
        """Names of the Secrets for pulling the image."""
        return tuple(n.strip() for n in self.runtime_image_pull_secrets.split(",") if n.strip())

    @property
    def egress_rules(self) -> list[dict[str, object]] | None:
        """Egress rules of jobs; None: not restricted."""
        return json.loads(self.egress) if self.egress else None

    @property
    def metrics_peers(self) -> list[dict[str, object]]:
        """Peers that may read the metrics of jobs."""
        return json.loads(self.metrics_from) if self.metrics_from else []

    @property
    def namespace_list(self) -> tuple[str, ...]:
        """The namespaces to watch; empty: all."""
        return tuple(n.strip() for n in self.namespaces.split(",") if n.strip())

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Read and check all settings.

        Raises:
            SettingsError: with every variable that is missing, unknown or malformed.
        """
        prefix = "RLJOB_OPERATOR_"
        known = {f"{prefix}{f.name.upper()}": f for f in fields(cls)}
        problems = [f"{name} is not a known setting" for name in environment if name.startswith(prefix) and name not in known]
        values: dict[str, object] = {}
        for name, field in known.items():
            text = environment.get(name)
            if text is None:
                if field.name in ("runtime_image", "runtime_ray_version"):
                    problems.append(f"{name} is not set")
                continue
            try:
                values[field.name] = _PARSERS[str(field.type)](text)
            except ValueError:
                problems.append(f"{name}={text!r} is not of type {field.type}")
        if not values.get("listen_address"):
            values["listen_address"] = "::" if ":" in environment.get("KUBERNETES_SERVICE_HOST", "") else "0.0.0.0"
        problems += _out_of_range(values) + _bad_egress(str(values.get("egress", "")))
        problems += _bad_peers(str(values.get("metrics_from", "")))
        if problems:
            raise SettingsError("; ".join(problems) + "; known settings: " + ", ".join(known))
        return cls(**values)  # type: ignore[arg-type]


def _out_of_range(values: Mapping[str, object]) -> list[str]:
    """Values of the right type that are out of range."""
    problems = []
    for name, choices in (
        ("listen_address", ("0.0.0.0", "::")),
        ("log_level", ("DEBUG", "INFO", "WARNING", "ERROR")),
        ("log_format", ("json", "text")),
    ):
        if values.get(name, choices[0]) not in choices:
            problems.append(f"RLJOB_OPERATOR_{name.upper()}={values[name]!r} is not one of {', '.join(choices)}")
    for name in ("lease", "webhook"):
        place = str(values.get(name, ""))
        if place and not re.fullmatch(r"[a-z0-9-]+/[a-z0-9.-]+", place):
            problems.append(f"RLJOB_OPERATOR_{name.upper()}={place!r} is not of the form namespace/name")
    for name, most in (("workers", 256), ("requests", 256), ("webhook_port", 65535), ("health_port", 65535), ("metrics_port", 65535)):
        value = values.get(name, 1)
        if isinstance(value, int) and not 1 <= value <= most:
            problems.append(f"RLJOB_OPERATOR_{name.upper()}={value} is not between 1 and {most}")
    return problems


def _bad_egress(text: str) -> list[str]:
    """Egress rules that are no list of rules: a policy made of them would be rejected with every job."""
    if not text:
        return []
    try:
        rules = json.loads(text)
    except ValueError as error:
        return [f"RLJOB_OPERATOR_EGRESS is not JSON: {error}"]
    if not isinstance(rules, list) or not all(isinstance(rule, dict) and rule.keys() <= {"to", "ports"} for rule in rules):
        return [f"RLJOB_OPERATOR_EGRESS={text!r} is not a list of rules with to and ports, as in spec.egress of a NetworkPolicy"]
    return []


def _bad_peers(text: str) -> list[str]:
    """Peers that are none; an empty one would be refused by the API server with every job's policy."""
    if not text:
        return []
    try:
        peers = json.loads(text)
    except ValueError as error:
        return [f"RLJOB_OPERATOR_METRICS_FROM is not JSON: {error}"]
    known = {"namespaceSelector", "podSelector", "ipBlock"}
    if not isinstance(peers, list) or not all(isinstance(peer, dict) and peer and peer.keys() <= known for peer in peers):
        return [
            f"RLJOB_OPERATOR_METRICS_FROM={text!r} is not a list of peers with {', '.join(sorted(known))}, as in from of a NetworkPolicy"
        ]
    return []


def _boolean(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise ValueError(text)
    return text.lower() == "true"


_PARSERS: Mapping[str, Callable[[str], object]] = {"str": str, "int": int, "bool": _boolean}
