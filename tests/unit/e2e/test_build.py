"""What is built, under which key, and what is said when it cannot be."""

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from e2e.cluster import build, versions
from e2e.cluster.errors import ClusterError
from e2e.cluster.paths import TOOLS
from e2e.cluster.versions import Mode

PARTS = st.lists(st.binary(max_size=8), max_size=5)


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RLJOB_E2E_CACHE", str(tmp_path / "cache"))
    build.binary.cache_clear()
    yield
    build.binary.cache_clear()


@given(PARTS, PARTS)
def test_keys_are_equal_exactly_for_equal_parts(one: list[bytes], other: list[bytes]):
    assert (build.content_key(one) == build.content_key(other)) == (one == other)


def test_the_versions():
    found = {program.name: versions.version(program.name) for program in versions.PROGRAMS if program.module}
    kubernetes = dict.fromkeys(
        ("kube-apiserver", "kube-controller-manager", "kubectl", "kube-scheduler", "kubelet", "kube-proxy"), "v1.36.3"
    )
    assert found == {**kubernetes, "etcd": "v3.6.8", "coredns": "v1.12.4", "ray-operator": "v1.6.2", "helm": "v4.2.4", "kueue": "v0.15.2"}


def test_the_api_mode_needs_what_tests_without_a_node_use_and_the_cluster_all():
    assert [p.name for p in versions.programs(Mode.API)] == ["etcd", "kube-apiserver", "kube-controller-manager", "kubectl", "helm"]
    assert versions.programs(Mode.CLUSTER) == versions.PROGRAMS


def test_every_module_has_its_checksums_and_asks_for_one_go():
    asked = set()
    for program in versions.PROGRAMS:
        folder = TOOLS / program.folder
        asked.add((folder / "go.mod").read_text().split("\ngo ", 1)[1].split()[0])
        assert program.module is None or (folder / "go.sum").stat().st_size > 0
    assert len(asked) == 1


def test_staging_modules_of_kubernetes_have_one_version():
    text = (TOOLS / "kubernetes" / "go.mod").read_text()
    replaced = [line.split() for line in text.splitlines() if "=>" in line]
    assert len(replaced) == 31
    assert {(words[0] == words[2], words[3]) for words in replaced} == {(True, "v0.36.3")}


@pytest.mark.parametrize(
    "text", ["require example.com/a v1.2.3", "require (\n\texample.com/a v1.2.3\n)", "require (\n\texample.com/a v1.2.3 // indirect\n)"]
)
def test_required_version(text: str):
    assert versions.required_version(f"module m\n\ntool example.com/a/cmd\n\n{text}\n", "example.com/a") == "v1.2.3"


def test_a_module_that_is_not_required():
    with pytest.raises(ClusterError, match=r"does not require example\.com/b"):
        versions.required_version("require example.com/bb v1.0.0", "example.com/b")


def test_kubernetes_programs_know_their_version():
    flags = versions.linker_flags("kubernetes")
    assert "gitVersion=v1.36.3 " in flags
    assert "gitMajor=1 " in flags
    assert "gitVersion" not in versions.linker_flags("ray-operator")


def test_programs_have_the_file_names_that_go_gives_them():
    found = {program.name: versions.output_name(program) for program in versions.PROGRAMS}
    assert {name: output for name, output in found.items() if name != output} == {"etcd": "server"}
    assert len(set(found.values())) == len(found)


def test_the_path_names_program_version_and_key(tmp_path: Path):
    path = build.binary("etcd")
    assert path.name == "etcd"
    assert path.parent.name.startswith("etcd-v3.6.8-")
    assert path.is_relative_to(tmp_path / "cache")
    assert build.binary("kubelet").parent.name.rpartition("-")[2] == build.binary("kube-proxy").parent.name.rpartition("-")[2]


def test_unknown_program():
    with pytest.raises(ClusterError, match="no program called 'kubeless'"):
        build.binary("kubeless")


def test_what_is_missing_is_named_with_the_command_to_run():
    with pytest.raises(ClusterError, match=r"not built: etcd, kube-apiserver, .*build --mode api"):
        build.require_built(Mode.API)


def test_without_go_the_message_says_which_one_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ClusterError, match=r"no go command on the PATH.*\n.*install Go 1\.26 or newer"):
        build.build(Mode.API)


def test_a_go_that_is_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    go = tmp_path / "go"
    go.write_text("#!/bin/sh\necho 'go: go.mod requires go >= 1.26.0 (running go 1.22.0; GOTOOLCHAIN=local)' >&2\nexit 1\n")
    go.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(ClusterError, match=r"need Go 1\.26\.0(?s:.*)running go 1\.22\.0(?s:.*)Remedy: install Go 1\.26"):
        build.require_go()
