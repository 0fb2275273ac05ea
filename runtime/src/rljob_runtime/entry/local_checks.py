"""What a manifest means on this machine: fields that only Kubernetes has a use for, secrets, folders on volumes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rljob_api.v1alpha1 import RLJob, RLJobSpec
from rljob_api.v1alpha1.base import SpecModel
from rljob_api.v1alpha1.pods import EnvVarSource
from rljob_runtime.errors import SetupError

WITHOUT_EFFECT = (
    "managed_by",
    "queue",
    "image",
    "image_pull_secrets",
    "service_account",
    "metadata",
    "priority_class_name",
    "scheduler_name",
    "do_not_disrupt",
    "head",
    "storage",
    "model_cache",
    "pod_template",
    "failure_policy",
    "ttl_seconds_after_finished",
)
GROUP_WITHOUT_EFFECT = ("node_selector", "tolerations", "affinity", "env_from", "image", "runtime_class_name", "pod_template")
RESOURCES_WITHOUT_EFFECT = ("memory", "shared_memory", "requests", "limits")


def fields_without_effect(spec: RLJobSpec) -> list[str]:
    """Fields that are set to something and do nothing in a local run, by path, each once."""
    found = [f"spec.{_alias(spec, name)}" for name in WITHOUT_EFFECT if _is_set(spec, name)]
    found += ["spec.report.metricsEndpoint"] if _is_set(spec.report, "metrics_endpoint") else []
    for group in spec.node_groups:
        found += [f"spec.nodeGroups[].{_alias(group, name)}" for name in GROUP_WITHOUT_EFFECT if _is_set(group, name)]
        sizes = group.resources
        found += [f"spec.nodeGroups[].resources.{_alias(sizes, name)}" for name in RESOURCES_WITHOUT_EFFECT if _is_set(sizes, name)]
    return list(dict.fromkeys(found))


def notes(spec: RLJobSpec) -> tuple[str, ...]:
    """What the user should know at the start of a local run."""
    without = fields_without_effect(spec)
    notes = [f"without effect on this machine: {', '.join(without)}"] if without else []
    if _is_on_volume(spec):
        notes.append(f"spec.checkpoint.path {spec.checkpoint.path} lies on the volume of spec.storage: checkpoints go into the run folder")
    return tuple(notes)


def check(spec: RLJobSpec, environment: Mapping[str, str], *, resume: bool = False) -> None:
    """Refuse what cannot be run here as it is meant.

    Args:
        spec: of the job.
        environment: of this process.
        resume: whether an earlier run is to go on.

    Raises:
        SetupError: the job is suspended, or has nothing to resume, or a variable that a Secret would give is not in ``environment``.
    """
    if spec.suspend:
        raise SetupError("spec.suspend is true: the job is suspended; write false to run it")
    if resume and spec.validates_only:
        raise SetupError(
            "--resume: there is nothing to resume, spec.training.steps is 0 and a validation keeps no checkpoint; "
            "run it again with --overwrite, or in another run folder"
        )
    sources = [(f"nodeGroups[{i}]", g.env) for i, g in enumerate(spec.node_groups)]
    sources += [(f"components[{i}]", c.env) for i, c in enumerate(spec.components)]
    missing = [
        f"spec.{path}.env[{i}] takes {variable.name} from {_source(variable.value_from)}"
        for path, variables in sources
        for i, variable in enumerate(variables)
        if variable.value_from is not None and not _is_optional(variable.value_from) and variable.name not in environment
    ]
    if missing:
        raise SetupError(f"{'; '.join(missing)}; a local run takes it from its own environment, where it is not set: export it first")


def _source(source: EnvVarSource) -> str:
    """Where a variable comes from, in words."""
    if source.secret_key_ref is not None:
        return f"Secret {source.secret_key_ref.name}"
    if source.config_map_key_ref is not None:
        return f"ConfigMap {source.config_map_key_ref.name}"
    return "its pod"


def _is_optional(source: EnvVarSource) -> bool:
    return any(ref is not None and ref.optional for ref in (source.secret_key_ref, source.config_map_key_ref))


def checkpoint_folder(job: RLJob, default: Path) -> Path:
    """Where a local run keeps checkpoints: ``default`` too when the spec names a place on a volume that is not mounted here."""
    path = job.spec.checkpoint.path
    return Path(path) / job.metadata.name if path is not None and not _is_on_volume(job.spec) else default


def _is_on_volume(spec: RLJobSpec) -> bool:
    path, storage = spec.checkpoint.path, spec.storage
    return path is not None and storage is not None and Path(path).is_relative_to(storage.mount_path)


def _is_set(model: SpecModel, name: str) -> bool:
    """Whether a field differs from its default."""
    return bool(getattr(model, name) != type(model).model_fields[name].default)


def _alias(model: SpecModel, name: str) -> str:
    return type(model).model_fields[name].alias or name
