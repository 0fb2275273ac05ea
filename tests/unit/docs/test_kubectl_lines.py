"""kubectl commands on the pages name verbs and resources that exist; those of helm are checked by tests/integration/test_helm.py."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from rljob_runtime.commands import cli_jobs
from tests.layout.tree import ROOT
from tests.support.shell_lines import ShellLine, commands, shell_lines

BY_RESOURCE = {"annotate", "delete", "describe", "edit", "get", "label", "patch", "wait"}
"""Verbs followed by TYPE NAME or TYPE/NAME."""
BY_POD = {"exec", "logs", "port-forward"}
"""Verbs followed by the name of a pod or TYPE/NAME."""
BY_FILE = {"apply", "replace"}
SUBCOMMANDS = {
    "config": {"set-context", "current-context", "use-context"},
    "create": {"configmap", "namespace", "secret", "serviceaccount"},
    "rlj": {(command.name or command.callback.__name__) for command in cli_jobs.plugin().registered_commands if command.callback},
}
OTHERS = {"drain", "run"}
WITH_VALUE = {"-c", "-f", "-k", "-l", "-n", "-o", "-p", "--context", "--namespace"}
"""Options whose value is the next word."""
KUBERNETES = {
    *("crd", "deploy", "job", "lease", "node", "nodes", "pod", "pods", "pvc", "svc"),
    *("serviceaccounts", "validatingwebhookconfigurations"),
}
OTHER_CRDS = {"rayjob", "rayjobs", "raycluster", "rayclusters", "workloads", "workloadpriorityclass"}
"""Of KubeRay and Kueue."""

LINES = shell_lines("kubectl")


def own() -> set[str]:
    """All names by which kubectl finds RLJobs."""
    spec: dict[str, Any] = yaml.load((ROOT / "crds" / "rljobs.rljob.dev.yaml").read_text(), yaml.CSafeLoader)["spec"]
    names = spec["names"]
    plain = {names["plural"], names["singular"], *names.get("shortNames", ()), *names.get("categories", ())}
    return plain | {f"{names[form]}.{spec['group']}" for form in ("plural", "singular")}


KNOWN = own() | KUBERNETES | OTHER_CRDS


def positional(words: tuple[str, ...]) -> list[str]:
    """The words that are neither options nor their values."""
    found, is_value = [], False
    for word in words:
        if not is_value and not word.startswith("-"):
            found.append(word)
        follows = word == "-f" and found[:1] == ["logs"]
        is_value = not is_value and word in WITH_VALUE and not follows
    return found


def problems(words: tuple[str, ...]) -> Iterator[str]:
    """What is wrong with the words after ``kubectl``."""
    verb, *rest = positional(words)
    if verb not in BY_RESOURCE | BY_POD | BY_FILE | SUBCOMMANDS.keys() | OTHERS:
        yield f"no such verb: {verb}"
    if verb in SUBCOMMANDS and rest[:1] and rest[0] not in SUBCOMMANDS[verb]:
        yield f"{verb} has no subcommand {rest[0]}"
    if verb in BY_FILE and len(words) > 1 and not {"-f", "-k"} & set(words):
        yield f"{verb} has neither -f nor -k"
    named = rest[:1] if verb in BY_RESOURCE else [word for word in rest[:1] if "/" in word] if verb in BY_POD else []
    for kinds in named:
        unknown = [kind for kind in kinds.partition("/")[0].split(",") if kind not in KNOWN]
        yield from (f"no such resource: {kind}" for kind in unknown)


@pytest.mark.parametrize("line", LINES, ids=str)
def test_verbs_and_resources_exist(line: ShellLine) -> None:
    assert list(problems(line.words[1:])) == []


def test_a_resource_of_ours_is_named_as_the_crd_names_it() -> None:
    assert {"rlj", "rljob", "rljobs", "rljobs.rljob.dev"} <= own()
    used = {word.partition("/")[0] for line in LINES for word in positional(line.words[1:])[1:2]}
    assert {word for word in used if re.match(r"rlj", word)} <= own()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("kubectl gett rlj", "no such verb: gett"),
        ("kubectl get rlsj math", "no such resource: rlsj"),
        ("kubectl -n rl wait --for=condition=Succeeded rjl/math", "no such resource: rjl"),
        ("kubectl get rayjobs,raycluster,rayjbos", "no such resource: rayjbos"),
        ("kubectl create namespaces rl", "create has no subcommand namespaces"),
        ("kubectl rlj tail math", "rlj has no subcommand tail"),
        ("kubectl apply examples/quickstart.yaml", "apply has neither -f nor -k"),
    ],
)
def test_a_wrong_line_would_be_noticed(text: str, problem: str) -> None:
    ((_, *words),) = commands(text)
    assert list(problems(tuple(words))) == [problem]
