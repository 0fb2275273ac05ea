"""Manifests of the scenarios: the examples with minimal changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
CLAIM = "work"
DEVICE = "example.com/virtual-gpu"
HEAD_CPU = "50m"
"""What the operator requests for a head by default, a quarter of a core, lets pods of a fourth job wait on a node with two cores."""

Manifest = dict[str, Any]

ENDLESS = 100_000
"""Steps of a job that ends when its scenario is over."""

SLOW_VERIFIER: Manifest = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "slow-verifier"},
    "data": {
        "slow_verifier.py": """
import time


def score(prompt, response, answer, metadata):
    time.sleep(0.05)
    return sum(c.isdigit() for c in response) / 8
"""
    },
}


def quickstart(name: str, steps: int) -> Manifest:
    """examples/quickstart.yaml under another name, with fewer steps and a checkpoint volume."""
    return example("quickstart", name, steps)


def collocated(name: str, steps: int) -> Manifest:
    """examples/quickstart-collocated.yaml, likewise: trainer and engine share one device of one pod."""
    return example("quickstart-collocated", name, steps)


def example(file: str, name: str, steps: int) -> Manifest:
    """An example under another name, with fewer steps and a checkpoint volume."""
    job: Manifest = yaml.safe_load((ROOT / "examples" / f"{file}.yaml").read_text())
    job["metadata"]["name"] = name
    spec = job["spec"]
    spec["training"]["steps"] = steps
    spec["training"]["warmupSteps"] = min(spec["training"]["warmupSteps"], steps // 2)
    spec["storage"] = {"claimName": CLAIM}
    spec["head"] = {"resources": {"cpu": HEAD_CPU}}
    return job


def two_groups(name: str, steps: int, checkpoint_every: int = 5) -> Manifest:
    """Trainer and engine on separate pods, each with one device of an opaque extended resource."""
    job = quickstart(name, steps)
    spec = job["spec"]
    spec["nodeGroups"] = groups_of_one_device()
    spec["components"][0]["placement"] = {"nodeGroups": ["train"], "ranks": "0"}
    spec["components"][1]["placement"] = {"nodeGroups": ["infer"], "ranks": "0"}
    spec["checkpoint"] = {"everySteps": checkpoint_every}
    return job


def unhurried(name: str, *, checkpoint_every: int = 5) -> tuple[Manifest, Manifest]:
    """A job of two groups that a scenario interrupts or ends while it trains, and the ConfigMap it needs.

    A step takes a second, most of which its verifier sleeps, as one does that asks a service: the cores are left to other scenarios' jobs.
    """
    job = with_code(two_groups(name, steps=ENDLESS, checkpoint_every=checkpoint_every), SLOW_VERIFIER["metadata"]["name"])
    job["spec"]["rewards"] = [{"name": "digits", "type": "Function", "function": "slow_verifier:score"}]
    job["spec"]["rollout"] |= {"promptsPerStep": 4, "samplesPerPrompt": 4}
    return SLOW_VERIFIER, job


def lake(name: str, *, steps: int, turns: int) -> Manifest:
    """examples/frozen-lake.yaml with few short episodes, the image's model, and a node group for each device."""
    job = example("frozen-lake", name, steps)
    spec = job["spec"]
    spec["nodeGroups"] = groups_of_one_device()
    spec["components"][0]["placement"] = {"nodeGroups": ["train"], "ranks": "0"}
    spec["components"][1]["placement"] = {"nodeGroups": ["infer"], "ranks": "0"}
    spec["model"]["path"] = "models/tiny"  # it has never seen a lake
    spec["environments"][0] |= {"maxTurns": turns}
    spec["environments"][0]["parameters"].pop("grid_lookup")
    spec["rollout"] |= {"promptsPerStep": 4, "samplesPerPrompt": 4}
    spec["validation"] |= {"everySteps": steps, "maxPrompts": 8}
    spec["report"] = {"trajectoriesEverySteps": 1}
    return job


def groups_of_one_device() -> list[Manifest]:
    """A node group for the trainer and one for the engine."""
    return [{"name": group, "nodes": 1, "devicesPerNode": 1, "deviceResource": DEVICE, "deviceType": "CPU"} for group in ("train", "infer")]


def with_code(job: Manifest, config_map: str) -> Manifest:
    """Mount Python modules from a ConfigMap on the import path of every pod."""
    job["spec"]["podTemplate"] = {
        "spec": {
            "volumes": [{"name": "code", "configMap": {"name": config_map}}],
            "containers": [
                {
                    "name": "ray",
                    "volumeMounts": [{"name": "code", "mountPath": "/code"}],
                    "env": [{"name": "PYTHONPATH", "value": "/code"}],
                }
            ],
        }
    }
    return job
