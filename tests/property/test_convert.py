"""CONVERT-COMPLETE and robustness: any configuration converts, or is refused with SpecInvalidError; nothing of it is lost."""

from __future__ import annotations

import contextlib
import copy
import functools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rljob_api.errors import SpecInvalidError
from rljob_convert import conversion
from rljob_convert.rlinf import keys as rlinf_keys
from rljob_convert.roll import keys as roll_keys
from rljob_convert.source import leaves
from tests.support.cost import within
from tests.support.pace import HANG_S
from tests.unit.convert import cases

TABLES = {"roll": roll_keys.TABLE, "rlinf": rlinf_keys.TABLE}
CONFIGURATIONS = {
    framework: [yaml.load(path.read_text(), yaml.CSafeLoader) for path in cases.configurations(framework)] for framework in TABLES
}
frameworks = st.sampled_from(sorted(TABLES))
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from([10**6, 10**12, 0.5, -1.0, 1e300]),
    st.sampled_from(
        [
            "",
            "all",
            "0-3",
            "0-3:0-7",
            "8-4",
            "1:0",
            "list(range(0,4))",
            "[3, 1]",
            "list(range(10**9))",
            "${seed}",
            "${a.b}",
            "${.x}",
            "${",
            "x" * 2000,
        ]
    ),
    st.text(max_size=8),
)
values = st.recursive(
    scalars, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)), max_leaves=6
)


@st.composite
def known_keys(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Configurations of known keys with any values."""
    framework = draw(frameworks)
    table = TABLES[framework]
    data: dict[str, Any] = {}
    for pattern in draw(st.lists(st.sampled_from(sorted([*table.mapped, *table.dropped])), min_size=1, max_size=25)):
        node = data
        *sections, last = pattern.replace("*", draw(st.sampled_from(["a", "math_rule", "actor"]))).split(".")
        for section in sections:
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                break
        else:
            node[last] = draw(values)
    return framework, data


@st.composite
def mutated(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Real configurations with some values replaced, keys renamed and parts removed."""
    framework = draw(frameworks)
    data = copy.deepcopy(draw(st.sampled_from(CONFIGURATIONS[framework])))
    for _ in range(draw(st.integers(1, 5))):
        places = [parts for parts, _ in leaves(data) if parts]
        if not places:
            break
        parts = draw(st.sampled_from(places))
        parts = parts[: draw(st.integers(1, len(parts)))]
        node: Any = data
        for part in parts[:-1]:
            node = node[part]
        action = draw(st.sampled_from(["replace", "remove", "rename"]))
        if action == "replace":
            node[parts[-1]] = draw(values)
        else:
            value = node.pop(parts[-1])
            if action == "rename" and isinstance(node, dict):
                node[draw(st.text("abc_*.", min_size=1, max_size=4))] = value
    return framework, data


def check(framework: str, text: str) -> None:
    try:
        result = conversion.convert(framework, text)
    except SpecInvalidError:
        return
    assert cases.lost(framework, text) == []
    conversion.problems(result)
    assert yaml.load(conversion.render(result), yaml.CSafeLoader) == result.manifest
    assert all(note.why for note in result.notes)


@given(st.one_of(known_keys(), mutated()))
@settings(max_examples=150, deadline=None)
def test_configurations(case: tuple[str, dict[str, Any]]) -> None:
    framework, data = case
    check(framework, cases.text_of(data))


@given(frameworks, st.text(st.sampled_from("ab:{}[]$&*!-,'\"\n 01\t#|>?\u00e9\U0001f600"), max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_text(framework: str, text: str) -> None:
    check(framework, text)


@given(frameworks, values)
@settings(max_examples=50, deadline=None)
def test_the_same_text_gives_the_same_result(framework: str, value: Any) -> None:
    text = cases.text_of({"seed": value, "cluster": value, "rewards": value})
    try:
        first = conversion.convert(framework, text)
    except SpecInvalidError:
        return
    assert conversion.render(first) == conversion.render(conversion.convert(framework, text))


@functools.cache
def bombs() -> dict[str, str]:
    """Texts that would take long or much memory if something were not bounded."""
    wide = "cluster: {num_nodes: 1}, exp_name: a, " + ", ".join(f"k{index}: {index}" for index in range(40_000))
    aliases = "a0: &a0 [1, 1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
    references = (
        "exp_name: a\nactor: {}\nmax_steps: ${r0}\n" + "".join(f'r{n}: "${{r{n + 1}}}${{r{n + 1}}}"\n' for n in range(15)) + "r15: x\n"
    )
    groups = ", ".join(f"{{label: g{n}, node_ranks: '{','.join(str(node) for node in range(n % 2, 8000, 2))[:4000]}'}}" for n in range(64))
    devices = "\n".join(f"  r{n}: {{device_mapping: 'list(range(0,131072))'}}" for n in range(500))
    return {
        "wide": f"{{{wide}}}",
        "aliases": aliases,
        "references": references,
        "deep": "a: " + "[" * 5000,
        "groups": f"cluster: {{num_nodes: 8192, component_placement: {{actor: all, rollout: all}}, node_groups: [{groups}]}}",
        "devices": f"rewards:\n{devices}\n",
        "ranks": "cluster: {num_nodes: 8000, component_placement: {actor: '0-999999:0-999999', env: '0:0-999999', reward: '0:0-9999999'}}",
        "unicode": "max_steps: ١٢٣\ncluster: {component_placement: {actor: '０-３'}}",
    }


@pytest.mark.parametrize("framework", sorted(TABLES))
@pytest.mark.parametrize("bomb", sorted(bombs()))
def test_bombs(framework: str, bomb: str) -> None:
    """At most 2 s of processor time (``within`` asserts it), also for what is worst; memory: :func:`test_memory`."""
    text = bombs()[bomb]
    with within(2.0), contextlib.suppress(SpecInvalidError):
        conversion.render(conversion.convert(framework, text))


LIMITED = """
import contextlib, resource, sys
from pathlib import Path
from rljob_api.errors import SpecInvalidError
from rljob_convert import conversion

framework, text = sys.argv[1], Path(sys.argv[2]).read_text()
with contextlib.suppress(SpecInvalidError):
    conversion.convert(framework, "a: 1")  # everything is imported
held = int(next(line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (held + 200_000_000, resource.RLIM_INFINITY))
conversion.convert(framework, text)
"""


@pytest.mark.parametrize("bomb", ["wide", "groups", "devices"])
def test_memory(bomb: str, tmp_path: Path) -> None:
    """At most 200 MB more than before, in a process that may have no more."""
    (tmp_path / "bomb.yaml").write_text(bombs()[bomb])
    words = [sys.executable, "-c", LIMITED, "roll" if bomb == "devices" else "rlinf", str(tmp_path / "bomb.yaml")]
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr


def test_the_cases_are_there() -> None:
    assert [path.name for path in sorted(Path(cases.FOLDER).glob("*.yaml"))] == [
        path.name for framework in ("rlinf", "roll") for path in cases.configurations(framework)
    ]
