"""Which programs there are, and where their versions are written: the ``go.mod`` of each folder under ``tools/``, and nowhere else.

Programs that can have the same libraries are in one module, so that these are compiled once: etcd and Helm in the versions that belong to
this Kubernetes, and a CoreDNS with the plugins that the node uses. KubeRay and Kueue have their own, because they are what the tests are
about: each with exactly the libraries that it was released with.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from enum import StrEnum

from e2e.cluster.errors import ClusterError
from e2e.cluster.paths import TOOLS

KUBERAY_MODULE = "github.com/ray-project/kuberay/ray-operator"
KUEUE_MODULE = "sigs.k8s.io/kueue"


class Mode(StrEnum):
    """How much of a cluster is wanted."""

    API = "api"
    """etcd, kube-apiserver and kube-controller-manager; no containers, no root."""
    CLUSTER = "cluster"
    """Everything, with one node, KubeRay and Kueue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One binary built from a Go module."""

    name: str
    """File name of the binary."""
    folder: str
    """Folder under ``tools/`` that holds its go.mod and go.sum."""
    module: str | None
    """Module whose version is the program's; None for a program whose source lies in the folder itself."""
    package: str
    """Main package."""
    modes: frozenset[Mode] = frozenset({Mode.CLUSTER})
    """Where it is needed."""


_ALL = frozenset(Mode)
_KUBERNETES = "k8s.io/kubernetes"


def _kubernetes(name: str, modes: frozenset[Mode] = frozenset({Mode.CLUSTER})) -> Program:
    return Program(name=name, folder="kubernetes", module=_KUBERNETES, package=f"{_KUBERNETES}/cmd/{name}", modes=modes)


_ETCD = "go.etcd.io/etcd/server/v3"
_COREDNS = "github.com/coredns/coredns"
_HELM = "helm.sh/helm/v4"

PROGRAMS: tuple[Program, ...] = (
    Program(name="etcd", folder="kubernetes", module=_ETCD, package=_ETCD, modes=_ALL),
    _kubernetes("kube-apiserver", _ALL),
    _kubernetes("kube-controller-manager", _ALL),
    _kubernetes("kubectl", _ALL),
    _kubernetes("kube-scheduler"),
    _kubernetes("kubelet"),
    _kubernetes("kube-proxy"),
    Program(name="coredns", folder="kubernetes", module=_COREDNS, package="./coredns"),
    Program(name="ray-operator", folder="ray-operator", module=KUBERAY_MODULE, package=KUBERAY_MODULE),
    Program(name="kueue", folder="kueue", module=KUEUE_MODULE, package=f"{KUEUE_MODULE}/cmd/kueue"),
    Program(name="helm", folder="kubernetes", module=_HELM, package=f"{_HELM}/cmd/helm", modes=_ALL),
    Program(name="pause", folder="pause", module=None, package="."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleFiles:
    """Files of a program's module that a cluster needs besides the program: its CRDs and webhooks."""

    program: str
    """Name of the program."""
    files: tuple[str, ...]
    """Paths inside the module; their last parts differ."""
    modes: frozenset[Mode] = frozenset({Mode.CLUSTER})
    """Where they are needed."""


_KUEUE_CRDS = (
    "admissionchecks", "clusterqueues", "cohorts", "localqueues", "multikueueclusters", "multikueueconfigs", "provisioningrequestconfigs",
    "resourceflavors", "topologies", "workloadpriorityclasses", "workloads",
)  # fmt: skip
KUBERAY_CRDS = ModuleFiles(
    program="ray-operator",
    files=tuple(f"config/crd/bases/ray.io_{plural}.yaml" for plural in ("rayclusters", "rayjobs", "rayservices", "raycronjobs")),
    modes=_ALL,
)
KUEUE_CRDS = ModuleFiles(
    program="kueue", files=tuple(f"config/components/crd/bases/kueue.x-k8s.io_{plural}.yaml" for plural in _KUEUE_CRDS)
)
KUEUE_WEBHOOKS = ModuleFiles(program="kueue", files=("config/components/webhook/manifests.yaml",))
MODULE_FILES = (KUBERAY_CRDS, KUEUE_CRDS, KUEUE_WEBHOOKS)


def output_name(item: Program) -> str:
    """File name that ``go build -o FOLDER/`` gives the program: the last part of its package's path that is not a version."""
    path = item.folder if item.package == "." else item.package
    return [part for part in path.split("/") if not re.fullmatch(r"v\d+", part)][-1]


def programs(mode: Mode) -> tuple[Program, ...]:
    """The programs a mode needs."""
    return tuple(program for program in PROGRAMS if mode in program.modes)


def program(name: str) -> Program:
    """The program called ``name``.

    Raises:
        ClusterError: there is none.
    """
    for candidate in PROGRAMS:
        if candidate.name == name:
            return candidate
    raise ClusterError(f"no program called {name!r}; there are {', '.join(p.name for p in PROGRAMS)}")


def required_version(go_mod: str, module: str) -> str:
    """The version of ``module`` in the text of a go.mod, for example ``v1.36.3``.

    Raises:
        ClusterError: the module is not required there.
    """
    found = re.search(rf"^\s*(?:require\s+)?{re.escape(module)}\s+(v\S+)", go_mod, re.MULTILINE)
    if found is None:
        raise ClusterError(f"go.mod does not require {module}; add it with go get -tool")
    return found.group(1)


@functools.cache
def version(name: str) -> str:
    """Version of a program: its module's, or ``v0`` for one of our own.

    Raises:
        ClusterError: unknown program, or its go.mod does not name its module.
    """
    item = program(name)
    if item.module is None:
        return "v0"
    return required_version((TOOLS / item.folder / "go.mod").read_text(), item.module)


def linker_flags(folder: str) -> str:
    """Flags for ``-ldflags`` of all programs of a module; Kubernetes programs report v0.0.0 by default, and clients then complain."""
    flags = "-s -w"
    if folder == "kubernetes":
        full = version("kube-apiserver")
        major, minor, _ = full.removeprefix("v").split(".", 2)
        values = {"gitVersion": full, "gitMajor": major, "gitMinor": minor, "gitTreeState": "clean"}
        flags += "".join(f" -X k8s.io/component-base/version.{key}={value}" for key, value in values.items())
    return flags
