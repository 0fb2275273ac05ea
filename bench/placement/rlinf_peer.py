"""RLinf 0.3.0's own planner on conformance cases (docs/placement.md), for comparison and for the placement bench.

Runs the placement, cluster and hardware modules of the published wheel, unchanged, on simulated machines; Ray and PyTorch are
replaced by stand-ins, because planning needs neither. Only for development: nothing of the product imports it.

    python bench/placement/rlinf_peer.py --jsonl CASES            one JSON result per case on standard output
    python bench/placement/rlinf_peer.py --jsonl CASES --repeat 5 a JSON object with seconds per case instead

The first run downloads the wheel and OmegaConf with pip into ``~/.cache/rljob-bench``.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.machinery
import importlib.util
import io
import json
import logging
import os
import subprocess
import sys
import time
import types
import venv
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

RLINF = "rlinf==0.3.0"
LIBRARIES = ("omegaconf", "PyYAML", "packaging")
_STAND_INS = (
    "ray",
    "ray.actor",
    "ray.util",
    "ray.util.state",
    "ray.util.scheduling_strategies",
    "ray._private",
    "ray._private.accelerators",
    *(f"ray._private.accelerators.{make}" for make in ("amd_gpu", "intel_gpu", "npu", "nvidia_gpu")),
    "torch",
    "torch.distributed",
    "rlinf.data",
    "rlinf.data.io_struct",
    "rlinf.scheduler.worker",
    "rlinf.scheduler.worker.worker",
)
"""Modules that RLinf imports and planning does not use."""
_ENVIRONMENT_VARIABLE = "RLINF_NODE_RANK"


def prepare(cache: Path | None = None) -> Path:
    """The folder with RLinf's code and the libraries it plans with; filled once.

    Raises:
        subprocess.CalledProcessError: pip cannot download.
    """
    root = cache or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "rljob-bench"
    code = root / "rlinf-0.3.0"
    if not code.exists():
        wheels = root / "wheels"
        _pip(root, "download", "--no-deps", "--dest", str(wheels), RLINF)
        _pip(root, "install", "--target", str(root / "libraries"), *LIBRARIES)
        with zipfile.ZipFile(next(wheels.glob("rlinf-0.3.0*.whl"))) as wheel:
            wheel.extractall(root / "unpacking")
        (root / "unpacking").rename(code)
    return root


def _pip(root: Path, *arguments: str) -> None:
    """Run pip in an environment of its own: this one may be without."""
    tools = root / "tools"
    if not tools.exists():
        venv.create(tools, with_pip=True)
    subprocess.run([str(tools / "bin" / "python"), "-m", "pip", *arguments, "--quiet"], check=True, stdout=sys.stderr)


class Peer:
    """RLinf's planner in this process. There can be one; it replaces ``ray`` and ``torch`` for the whole process."""

    def __init__(self, root: Path) -> None:
        """Import RLinf's modules from ``root``, as :func:`prepare` made it."""
        sys.path[:0] = [str(root / "rlinf-0.3.0"), str(root / "libraries")]
        logging.disable(logging.CRITICAL)
        warnings.simplefilter("ignore")
        self.placement_s = 0.0
        """Seconds that the last case took in RLinf's placement classes and strategies alone, without configuration and cluster."""
        self._simulated: list[dict[str, Any]] = []
        self._driver = 0
        self._install_stand_ins()
        package = Path(root / "rlinf-0.3.0" / "rlinf")
        for name in ("rlinf", "rlinf.scheduler", "rlinf.utils", "rlinf.workers", "rlinf.workers.rollout"):
            module = types.ModuleType(name)
            module.__path__ = [str(package.parent.joinpath(*name.split(".")))]
            sys.modules[name] = module
        self.omegaconf = importlib.import_module("omegaconf")
        self.cluster = importlib.import_module("rlinf.scheduler.cluster")
        self.node = importlib.import_module("rlinf.scheduler.cluster.node")
        self.hardware = importlib.import_module("rlinf.scheduler.hardware")
        self.placement = importlib.import_module("rlinf.scheduler.placement")
        scheduler: Any = sys.modules["rlinf.scheduler"]
        scheduler.Cluster = self.cluster.Cluster
        for name in ("ComponentPlacement", "FlexiblePlacementStrategy", "NodePlacementStrategy", "PackedPlacementStrategy"):
            setattr(scheduler, name, getattr(self.placement, name))
        self.classes = importlib.import_module("rlinf.utils.placement")
        self.sync = importlib.import_module("rlinf.workers.rollout.utils")
        self._simulate_hardware()

    def _install_stand_ins(self) -> None:
        for name in _STAND_INS:
            module: Any = MagicMock(name=name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            module.__path__ = []
            module.__version__ = "2.50.0"
            sys.modules[name] = module
        ray: Any = sys.modules["ray"]
        ray.remote = self._actor_class
        ray.get = lambda values: values
        ray.is_initialized = lambda: True
        ray.nodes = lambda: [
            {"Alive": True, "NodeID": str(index), "NodeManagerAddress": node["ip"], "Resources": {}}
            for index, node in enumerate(self._simulated)
        ]
        ray.get_runtime_context = lambda: types.SimpleNamespace(get_node_id=lambda: str(self._driver))
        torch: Any = sys.modules["torch"]
        torch.distributed = sys.modules["torch.distributed"]
        torch.distributed.is_initialized = lambda: False
        torch.cuda.device_count = lambda: self._simulated[self._driver]["accelerators"]
        metadata: Any = importlib.import_module("importlib.metadata")
        version = metadata.version
        metadata.version = lambda name: "2.50.0" if name == "ray" else version(name)

    def _actor_class(self, cls: type) -> type:
        def create(node: Mapping[str, Any], *arguments: object) -> object:
            return types.SimpleNamespace(get_node_info=types.SimpleNamespace(remote=lambda: probe(node, *arguments)))

        def probe(node: Mapping[str, Any], *arguments: object) -> object:
            simulated = self._simulated[int(node["NodeID"])]
            self._probed = simulated
            before = dict(os.environ)
            try:
                os.environ.update({key: str(value) for key, value in simulated["env"].items()})
                if simulated["node_rank"] is not None:
                    os.environ[_ENVIRONMENT_VARIABLE] = str(simulated["node_rank"])
                return cls(node, *arguments).get_node_info()
            finally:
                os.environ.clear()
                os.environ.update(before)

        cls.options = staticmethod(lambda **_: types.SimpleNamespace(remote=create))  # type: ignore[attr-defined]
        return cls

    def _simulate_hardware(self) -> None:
        accelerators = importlib.import_module("rlinf.scheduler.hardware.accelerators.accelerator")

        def enumerate_accelerators(cls: Any, node_rank: int = 0, configs: object = None) -> object:
            node = self._probed
            model = f"{node['accel_type']}:{node['model']}"
            infos = [self.hardware.HardwareInfo(type=cls.HW_TYPE, model=model) for _ in range(node["accelerators"])]
            return self.hardware.HardwareResource(type=cls.HW_TYPE, infos=infos) if infos else None

        accelerators.Accelerator.enumerate = classmethod(enumerate_accelerators)
        franka = importlib.import_module("rlinf.scheduler.hardware.robots.franka").FrankaRobot
        franka.enumerate_cameras = classmethod(lambda cls, camera_type="realsense": set())
        resolver = importlib.import_module("rlinf.scheduler.hardware.robots.auto_config").RobotAutoConfig
        resolver.resolve = classmethod(_without_validation(resolver.resolve.__func__))
        node: Any = self.node
        node.os = types.SimpleNamespace(environ=os.environ, path=types.SimpleNamespace(exists=lambda path: True))

    def result(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """RLinf's outcome of a case."""
        self._stage = "parse_rank"
        self.placement_s = 0.0
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                return self._run(case)
        except Exception as error:  # noqa: BLE001  whatever RLinf raises is its answer
            return {"ok": False, "stage": self._stage, "error": _error(error)}

    def _run(self, case: Mapping[str, Any]) -> dict[str, Any]:
        kind = case["kind"]
        if kind == "parse_rank":
            with self._placing():
                ranks = self.cluster.parse_rank_config(case["rank_config"], case["available_ranks"], case["rank_type"])
            return {"ok": True, "ranks": ranks}
        self._stage = "config_load"
        config = self._config(case)
        self._simulated, self._driver = _machines(case["cluster"])
        cluster = self._cluster(config)
        result: dict[str, Any] = {"ok": True, **_described(cluster)}
        isolate = case.get("isolate_accelerator", True)
        if kind in ("packed", "flexible", "node"):
            self._stage = "strategy_init"
            cls = getattr(self.placement, f"{kind.capitalize()}PlacementStrategy")
            arguments = json.loads(json.dumps(case["strategy_args"]))
            with self._placing():
                strategy = cls(**arguments)
            self._stage = "get_placement"
            result["components"] = {"_": self._placed(strategy, cluster, isolate)}
            return result
        self._stage = "component_placement"
        with self._placing():
            placement = self._class(kind)(config, cluster)
        mode, sync = placement.placement_mode, getattr(placement, "_rollout_sync_mode", None)
        result |= {"mode": mode and mode.name, "rollout_sync_mode": sync and sync.name}
        if kind in ("model_parallel", "multi_agent"):
            result["weight_sync_map"] = self._sync_map(placement)
        result["components"] = {name: self._component(placement, name, cluster, isolate) for name in placement._placements}
        return result

    @contextlib.contextmanager
    def _placing(self) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        self.placement_s += time.perf_counter() - start_s

    def _config(self, case: Mapping[str, Any]) -> Any:
        if "config_yaml" in case:
            return self.omegaconf.OmegaConf.create(case["config_yaml"])
        config = json.loads(json.dumps(case.get("config")))
        if config and isinstance(config.get("cluster"), dict):
            simulated = case["cluster"]
            config["cluster"].setdefault("num_nodes", len(simulated["nodes"]) if "nodes" in simulated else simulated["num_nodes"])
        return self.omegaconf.OmegaConf.create(config) if config is not None else None

    def _cluster(self, config: Any) -> Any:
        self._stage = "cluster_config"
        cluster = object.__new__(self.cluster.Cluster)
        parsed = None if config is None else self.cluster.ClusterConfig.from_dict_cfg(config.cluster)
        cluster._cluster_cfg = parsed
        cluster._num_nodes = len(self._simulated) if parsed is None else parsed.num_nodes
        self._stage = "cluster_init"
        if cluster._num_nodes > len(self._simulated):
            raise _InfiniteWaitError(
                f"Waiting for {cluster._num_nodes} nodes to be ready, currently {len(self._simulated)} nodes available."
            )
        self._stage = "node_probe"
        probe = self.node.NodeProbe(cluster._num_nodes, parsed)
        cluster._nodes, cluster._node_groups = probe.nodes, probe.node_groups
        return cluster

    def _class(self, kind: str) -> Any:
        names = {
            "component": "ComponentPlacement",
            "hybrid": "HybridComponentPlacement",
            "model_parallel": "ModelParallelComponentPlacement",
            "model_parallel_eval": "ModelParallelEvalComponentPlacement",
            "multi_agent": "MultiAgentModelParallelComponentPlacement",
            "multi_agent_eval": "MultiAgentModelParallelEvalComponentPlacement",
        }
        return getattr(self.classes, names[kind])

    def _sync_map(self, placement: Any) -> dict[str, Any]:
        try:
            mapping = self.sync.RankMapper.get_actor_rank_to_rollout_rank_map(placement)
        except Exception as error:  # noqa: BLE001  whatever RLinf raises is its answer
            return {"error": _error(error)}
        return json.loads(json.dumps({str(rank): shards for rank, shards in mapping.items()}))  # type: ignore[no-any-return]

    def _component(self, placement: Any, name: str, cluster: Any, isolate: bool) -> dict[str, Any]:
        try:
            placed = self._placed(placement.get_strategy(name), cluster, isolate)
        except Exception as error:  # noqa: BLE001  whatever RLinf raises is its answer
            placed = {"error": _error(error)}
        if name in placement._component_rank_map:
            placed |= {"world_size": placement.get_world_size(name), "hardware_ranks": placement.get_hardware_ranks(name)}
        return placed

    def _placed(self, strategy: Any, cluster: Any, isolate: bool) -> dict[str, Any]:
        with self._placing():
            placements = strategy.get_placement(cluster, isolate)
        placed: dict[str, Any] = {"strategy": strategy._placement_strategy, "placements": [dict(vars(each)) for each in placements]}
        anomalies = list(_anomalies(placements, cluster))
        return placed | ({"anomalies": anomalies} if anomalies else {})


class _InfiniteWaitError(Exception):
    """RLinf waits here without end."""


def _error(error: Exception) -> dict[str, str]:
    return {"type": "InfiniteWait" if isinstance(error, _InfiniteWaitError) else type(error).__name__, "message": str(error)}


def _without_validation(resolve: Callable[..., Any]) -> Callable[..., Any]:
    def wrapped(*arguments: object, **options: object) -> Any:
        configs = resolve(*arguments, **options)
        for config in configs:
            config.disable_validate = True
        return configs

    return wrapped


def _machines(simulated: Mapping[str, Any]) -> tuple[list[dict[str, Any]], int]:
    defaults = {"accel_type": "NV_GPU", "model": "H100", "env": {}}
    if "nodes" in simulated:
        nodes = [defaults | {"accelerators": 0, "node_rank": index} | node for index, node in enumerate(simulated["nodes"])]
    else:
        counts = simulated.get("accelerators_per_node", 8)
        counts = counts if isinstance(counts, list) else [counts] * simulated["num_nodes"]
        given = {key: simulated[key] for key in ("accel_type", "model") if key in simulated}
        nodes = [defaults | given | {"accelerators": count, "node_rank": index} for index, count in enumerate(counts)]
    return [{"ip": f"10.0.{(index + 1) // 256}.{(index + 1) % 256}"} | node for index, node in enumerate(nodes)], simulated.get("head", 0)


def _described(cluster: Any) -> dict[str, Any]:
    nodes = [
        {
            "rank": node.node_rank,
            "ip": node.node_ip,
            "accelerators": node.num_accelerators,
            "accelerator_type": str(getattr(node.accelerator_type, "value", node.accelerator_type)),
            "labels": node.node_labels,
            "hardware": {resource.type: resource.count for resource in node.hardware_resources},
        }
        for node in cluster._nodes
    ]
    groups = {
        group.label: {
            "node_ranks": group.node_ranks,
            "hardware_type": group.hardware_type,
            "hardware_resource_count": group.hardware_resource_count,
        }
        for group in cluster._node_groups
    }
    return {"nodes": nodes, "node_groups": groups}


def _anomalies(placements: list[Any], cluster: Any) -> Iterator[str]:
    """Placements that cannot exist."""
    previous = -1
    for placement in placements:
        kind = cluster.get_node_group(placement.node_group_label).hardware_type
        count = cluster.get_node_info(placement.cluster_node_rank).get_hw_resource_count(kind)
        ranks = placement.local_hardware_ranks
        if any(rank is None or rank >= count for rank in ranks):
            yield f"rank {placement.rank}: hardware {ranks} does not exist on node {placement.cluster_node_rank} ({count} there)"
        if len(set(ranks)) < len(ranks):
            yield f"rank {placement.rank}: hardware {ranks} repeats"
        if placement.cluster_node_rank < previous:
            yield "node ranks are not in ascending order"
        previous = placement.cluster_node_rank


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--jsonl", type=Path, required=True, help="cases, one JSON object a line")
    parser.add_argument("--repeat", type=int, default=0, help="measure: best of so many runs of every case")
    parser.add_argument("--cache", type=Path, help="folder of downloads")
    arguments = parser.parse_args()
    peer = Peer(prepare(arguments.cache))
    cases = [json.loads(line) for line in arguments.jsonl.read_text().splitlines() if line.strip()]
    if not arguments.repeat:
        for case in cases:
            sys.stdout.write(json.dumps(peer.result(case), default=str) + "\n")
        return
    seconds: dict[str, float] = {}
    for index, case in enumerate(cases):
        runs: list[float] = []
        for _ in range(arguments.repeat):
            start_s = time.perf_counter()
            peer.result(case)
            runs.append(time.perf_counter() - start_s)
        seconds[str(case.get("name", index))] = min(runs)
    sys.stdout.write(json.dumps({"rlinf": "0.3.0", "seconds": seconds}) + "\n")


if __name__ == "__main__":
    main()
