"""Tests touch a cluster only if its context says that it is for tests."""

from pathlib import Path

import pytest
import yaml

from e2e.cluster.errors import ContextRefusedError
from e2e.cluster.guard import require_allowed_context


def kubeconfig(folder: Path, current: object) -> Path:
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", "current-context": current}))
    return path


@pytest.mark.parametrize("name", ["rljob-e2e", "kind-ci", "k3d-x", "minikube"])
def test_allowed(tmp_path: Path, name: str):
    assert require_allowed_context(kubeconfig(tmp_path, name), environment={}) == name


@pytest.mark.parametrize("name", ["prod", "minikube-2", "xkind-a", "Kind-a", "rljob-e2e2", "kind"])
def test_refused_with_the_way_out(tmp_path: Path, name: str):
    with pytest.raises(ContextRefusedError, match=f"'{name}'.*RLJOB_E2E_CONTEXTS={name}"):
        require_allowed_context(kubeconfig(tmp_path, name), environment={})


def test_the_variable_adds_exact_names(tmp_path: Path):
    environment = {"RLJOB_E2E_CONTEXTS": "one, two"}
    assert require_allowed_context(kubeconfig(tmp_path, "two"), environment=environment) == "two"
    with pytest.raises(ContextRefusedError, match="one, two"):
        require_allowed_context(kubeconfig(tmp_path, "three"), environment=environment)


def test_a_star_in_the_variable_lets_nothing_in(tmp_path: Path):
    with pytest.raises(ContextRefusedError):
        require_allowed_context(kubeconfig(tmp_path, "prod"), environment={"RLJOB_E2E_CONTEXTS": "*"})


@pytest.mark.parametrize("current", [None, "", 7])
def test_no_current_context(tmp_path: Path, current: object):
    with pytest.raises(ContextRefusedError, match="no current-context"):
        require_allowed_context(kubeconfig(tmp_path, current), environment={})


@pytest.mark.parametrize("text", [None, "a: [", "- a"])
def test_no_kubeconfig(tmp_path: Path, text: str | None):
    path = tmp_path / "kubeconfig"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ContextRefusedError, match=str(path)):
        require_allowed_context(path, environment={})
