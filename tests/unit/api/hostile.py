"""Runs hostile inputs through the entry points in a process of its own and prints what each one cost, one JSON object a line.

python -m tests.unit.api.hostile
"""

import functools
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rljob_api import validation
from rljob_api.errors import SpecInvalidError
from rljob_convert import conversion
from rljob_convert.conformance import answers
from tests.unit.api.manifests import manifest


def main() -> None:
    """Every input of every entry point; peak memory only grows."""
    for entry, (run, inputs) in ENTRIES.items():
        for name, text in inputs():
            before_s = time.process_time()
            outcome = run(text)
            row = {"entry": entry, "input": name, "outcome": outcome[:200], "cpu_s": time.process_time() - before_s}
            print(json.dumps(row | {"peak_bytes": peak_bytes()}))


def peak_bytes() -> int:
    """Peak resident memory; getrusage would also count the process that started this one."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def _validated(text: str) -> str:
    """Planning is part of it."""
    try:
        checked = validation.check(text)
    except SpecInvalidError as error:
        return f"{len(error.errors)} problems, first: {error.errors[0]}"
    return f"{sum(component.world_size for component in checked.plan.components)} processes"


def _converted(source: str, text: str) -> str:
    try:
        converted = conversion.convert(source, text)
    except SpecInvalidError as error:
        return str(error.errors[0])
    return f"{len(converted.notes)} notes, {len(conversion.render(converted))} characters"


def _conformed(text: str) -> str:
    return "".join(answers.run_lines([text]))


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{chr(ord('a') + i)}: &{chr(ord('a') + i)} [{', '.join(['*' + chr(ord('a') + i - 1)] * 9)}]\n" for i in range(1, 12)
)
TEXTS = {
    "nothing": "",
    "a scalar": "42",
    "binary": "\x00\x01\ufffe",
    "unclosed": "{" * 3000,
    "deep lists": "[" * 20_000 + "]" * 20_000,
    "deep maps": "".join(f"{' ' * i}a:\n" for i in range(2000)),
    "a YAML bomb": BOMB,
    "an endless alias": "&a [*a]",
    "many documents": "---\na: 1\n" * 30_000,
    "a long line": "a: " + "x" * 900_000,
    "many keys": "".join(f"k{i}: {i}\n" for i in range(48_000)),
    "too many keys": "".join(f"k{i}: {i}\n" for i in range(90_000)),
    "too large": "a: " + "x" * 5_000_000,
    "a merge": "a: &a {b: 1}\nc: {<<: *a}\n",
    "a tag": "!!python/object/apply:os.system ['true']",
}


def manifests() -> Iterator[tuple[str, str]]:
    """Texts, and jobs with huge or odd placements."""
    yield from TEXTS.items()
    for text in PLACEMENTS:
        yield f"ranks {text[:40]}", with_placement({"ranks": text})
        yield f"deviceMapping {text[:40]}", with_placement({"deviceMapping": text})
    yield "many workers", with_placement({"workers": 1_000_000}, role="Environment")
    yield "many robots", json.dumps(robots(1024))
    yield "a hundred thousand devices", json.dumps(large(12_500, 8, "0-49999", "50000-99999"))
    yield "a million devices", json.dumps(large(4096, 256, "0-9", "10-19"))
    yield "many nodes", json.dumps(large(4096, 0, "0-9", "10-19", groups=16))
    yield "all components everywhere", json.dumps(everywhere())


PLACEMENTS = [
    "0-999999999",
    "0-999999999:0-999999999",
    "0:0-999999999",
    "all:0-200000",
    "٠-٣",
    "0-0٣",
    "²",
    ",".join(map(str, range(1000))),
    "0:" * 2000,
    "-" * 4000,
    "list(range(0,999999999))",
    "list(range(0,1000000))",
    "[0]*1000000",
    "[0]*999999999*999999999",
    "[0,1]+" * 600 + "[2]",
    "(" * 4000,
    "[" * 60 + "]" * 60,
    "__import__('os').system('true')",
    "list(range(10**9))",
    "-" * 200 + "1",
    "9" * 4000,
]


def with_placement(placement: dict[str, object], role: str = "Rollout") -> str:
    """The smallest job, with the placement of one component replaced."""
    document = manifest()
    document["spec"]["components"][1] = {"name": "x", "role": role, "placement": placement}
    return json.dumps(document)


def large(nodes: int, devices: int, trainer: str, rollout: str, groups: int = 1) -> dict:
    """A job of many nodes."""
    document = manifest()
    document["spec"]["nodeGroups"] = [
        {"name": f"g{i}", "nodes": min(nodes // -(-nodes // 4096), 4096), "devicesPerNode": devices}
        for i in range(max(groups, -(-nodes // 4096)))
    ]
    document["spec"]["components"][0]["placement"] = {"ranks": trainer}
    document["spec"]["components"][1]["placement"] = {"ranks": rollout}
    return document


def everywhere() -> dict:
    """As many components as there may be, each on every device of the largest job."""
    document = large(12_500, 8, "all", "all")
    document["spec"]["components"] = [{"name": f"c{i}", "role": "Rollout", "placement": {"ranks": "all"}} for i in range(64)]
    return document


def robots(count: int) -> dict:
    """A group with many robots."""
    document = manifest()
    configs = [{"nodeRank": 0, "parameters": {"ip": str(i)}} for i in range(count)]
    document["spec"]["nodeGroups"].append({"name": "arms", "hardware": {"type": "Franka", "configs": configs}})
    return document


def sources() -> Iterator[tuple[str, str]]:
    """Texts, and ROLL and RLinf configs with huge or odd values."""
    yield from TEXTS.items()
    yield "interpolation without end", "a: ${b}\nb: ${a}\n"
    yield "interpolation that doubles", "a0: xxxxxxxxxx\n" + "".join(f"a{i}: '${{a{i - 1}}}${{a{i - 1}}}'\n" for i in range(1, 60))
    for text in PLACEMENTS:
        quoted = json.dumps(text)
        yield f"roll mapping {text[:40]}", f"actor_train: {{device_mapping: {quoted}}}\nactor_infer: {{device_mapping: {quoted}}}\n"
        yield f"rlinf ranks {text[:40]}", f"cluster: {{num_nodes: 2, component_placement: {{actor: {quoted}, rollout: {quoted}}}}}\n"
    yield "many nodes", "cluster: {num_nodes: 999999999, component_placement: {actor: all}}\n"
    groups = [{"label": f"g{i}", "node_ranks": i} for i in range(4096)]
    yield "many groups", json.dumps({"cluster": {"num_nodes": 4096, "node_groups": groups, "component_placement": {}}})


def cases() -> Iterator[tuple[str, str]]:
    """Lines for the conformance tool."""
    yield from ((name, text.replace("\n", " ")) for name, text in TEXTS.items())
    for text in PLACEMENTS:
        config = {"cluster": {"component_placement": {"actor": text, "rollout,reward": text}}}
        for kind in ("hybrid", "model_parallel", "multi_agent"):
            yield f"{kind} {text[:40]}", json.dumps({"name": "x", "kind": kind, "cluster": {"num_nodes": 2}, "config": config})
    every = {"cluster": {"component_placement": {"a": "all"}}}
    for cluster in (
        {"num_nodes": 10**9},
        {"num_nodes": 10**6, "accelerators_per_node": 10**6},
        {"nodes": [{"accelerators": 8}] * 100_000},
        {"num_nodes": 2, "accelerators_per_node": [10**12, -1]},
        {"num_nodes": -1},
        {"num_nodes": "x"},
        [],
    ):
        yield f"cluster {str(cluster)[:60]}", json.dumps({"name": "x", "kind": "hybrid", "cluster": cluster, "config": every})
    yield "packed", json.dumps({"name": "x", "kind": "packed", "cluster": {"num_nodes": 2}, "strategy_args": [0, 10**12, 10**9, 10**9]})
    yield "parse_rank", json.dumps({"name": "x", "kind": "parse_rank", "rank_config": "0-999999999999", "available_ranks": [0, 10**12]})
    yield "no kind", json.dumps({"name": "x", "kind": {"a": []}})


ENTRIES: dict[str, tuple[Callable[[str], str], Callable[[], Iterator[tuple[str, str]]]]] = {
    "conformance": (_conformed, cases),
    "convert from roll": (functools.partial(_converted, "roll"), sources),
    "convert from rlinf": (functools.partial(_converted, "rlinf"), sources),
    "validate": (_validated, manifests),
}


if __name__ == "__main__":
    main()
