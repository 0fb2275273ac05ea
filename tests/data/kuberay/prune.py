"""Writes rayjob.schema.json from KubeRay's CRD: ``python tests/data/kuberay/prune.py <kuberay>/config/crd/bases/ray.io_rayjobs.yaml``.

Kept: the schema of RayJob v1's metadata and spec with its Kubernetes extensions. Left out: descriptions, defaults, v1alpha1, the status
and options that RLJob never writes. Schemas of pod templates are the same for head and workers, so they stand once, in ``$defs``.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

LEFT_OUT = {"submitterPodTemplate", "autoscalerOptions", "gcsFaultToleranceOptions", "deletionStrategy", "headService"}
WORDS = {"description", "default"}


def pruned(node: Any, *, is_schema: bool = True) -> Any:
    """A copy without the words and properties that are left out."""
    if isinstance(node, list):
        return [pruned(item) for item in node]
    if not isinstance(node, dict):
        return node
    if not is_schema:
        return {key: pruned(child) for key, child in node.items() if key not in LEFT_OUT}
    return {key: pruned(child, is_schema=key != "properties") for key, child in node.items() if key not in WORDS}


def main(source: Path) -> None:
    crd = yaml.load(source.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader)
    (version,) = [version for version in crd["spec"]["versions"] if version["name"] == "v1"]
    spec = pruned(version["schema"]["openAPIV3Schema"]["properties"]["spec"])
    cluster = spec["properties"]["rayClusterSpec"]["properties"]
    head, worker = cluster["headGroupSpec"]["properties"], cluster["workerGroupSpecs"]["items"]["properties"]
    if head["template"] != worker["template"]:
        raise SystemExit("the pod templates of head and workers differ: keep both")
    template, head["template"], worker["template"] = head["template"], {"$ref": "#/$defs/template"}, {"$ref": "#/$defs/template"}
    schema = {
        "$comment": "From ray.io_rayjobs.yaml of KubeRay 1.6.2, Apache-2.0; see NOTICE. Written by prune.py.",
        "type": "object",
        "required": ["spec"],
        "properties": {"apiVersion": {"type": "string"}, "kind": {"type": "string"}, "metadata": {"type": "object"}, "spec": spec},
        "$defs": {"template": template},
    }
    target = Path(__file__).with_name("rayjob.schema.json")
    target.write_text(json.dumps(schema, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
