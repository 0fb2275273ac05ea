"""Which files of a checkout are examples, what kind each is, and what Hydra makes of them.

Nothing of the checkouts is kept: files are read where they lie, or from a temporary copy of what a bare repository holds.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

NOT_RL = "no RL: SFT, DPO, distillation of given texts, reward models, offline"
NO_JOB = "no job: parts of configurations, other programs' files"
TEXT, MIXTURE, AGENTIC = "RL on text", "RL on text, mixture of experts", "RL with agents"
VISION, EMBODIED, DIFFUSION = "RL on images or sound", "RL of robots", "RL of image or video generators"
KINDS = (TEXT, MIXTURE, AGENTIC, VISION, EMBODIED, DIFFUSION, NOT_RL, NO_JOB)
OUT_OF_SCOPE = (VISION, EMBODIED, DIFFUSION)
REFUSED = (EMBODIED, DIFFUSION, NOT_RL, NO_JOB)
"""What the converter must not take: no RL, or no language model."""
_PATTERNS = {"roll": r"examples/.*\.ya?ml", "rlinf": r"examples/.*config/((math|vqa)/)?[^/]*\.ya?ml"}
"""RLinf's other folders below config/ hold parts that examples take in."""
_MIXTURE = re.compile(r"[0-9]B?-?A[0-9]+B?\b|[_-]moe\b|moonlight|mixtral|deepseek-v[23]|qwen3-30b|-next-", re.IGNORECASE)
_VISION = re.compile(r"(?<![a-z])vl(?![a-z])|vlm|omni|video|multimodal|deepeyes|vqa", re.IGNORECASE)
_LATER_ROLL = re.compile(r"qwen3\.5", re.IGNORECASE)
"""Its checkpoints are vision-language models, whatever the configuration uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One file."""

    framework: str
    root: Path
    path: Path
    kind: str

    @property
    def name(self) -> str:
        """Inside the checkout."""
        return str(self.path.relative_to(self.root))


def checkout(source: Path, into: Path) -> Path:
    """A folder with the examples: ``source`` itself, or what the newest commit of a bare repository holds, below ``into``.

    Raises:
        FileNotFoundError: there are no examples.
    """
    if (source / "examples").is_dir():
        return source
    command = ["git", "--git-dir", str(source), "archive", "HEAD", "examples"]
    into.mkdir(parents=True)
    archived = subprocess.run(command, check=False, capture_output=True)
    if archived.returncode:
        raise FileNotFoundError(f"{source}: neither a folder with examples nor a bare repository of one: {archived.stderr.decode()[-200:]}")
    subprocess.run(["tar", "-x", "-C", str(into)], check=True, input=archived.stdout)
    return into


def is_mixture(model: str) -> bool:
    """Whether a model or a folder of examples is named as a mixture of experts is."""
    return _MIXTURE.search(model) is not None


def variables(root: Path) -> dict[str, str]:
    """What RLinf's start scripts export before they call Hydra."""
    parts = {"EMBODIED_PATH": "embodiment", "DIFFUSION_PATH": "diffusion", "REWARD_PATH": "reward"}
    return {"REPO_PATH": str(root), "LIBERO_TYPE": "standard", **{name: str(root / "examples" / part) for name, part in parts.items()}}


def examples(framework: str, root: Path) -> Iterator[Example]:
    """Every example by path."""
    pattern = re.compile(_PATTERNS[framework])
    for path in sorted((root / "examples").rglob("*")):
        name = str(path.relative_to(root))
        if pattern.fullmatch(name):
            text = path.read_text(encoding="utf-8")
            kind = _roll_kind(name, text) if framework == "roll" else _rlinf_kind(name, path)
            yield Example(framework=framework, root=root, path=path, kind=kind)


def _keys(text: str) -> dict[str, object]:
    data = yaml.safe_load(text)
    return data if isinstance(data, dict) else {}


def _roll_kind(name: str, text: str) -> str:
    keys = _keys(text)
    if keys.keys() & {"sft_train", "student", "chosen_key"}:
        return NOT_RL
    if not keys.keys() & {"actor_train", "actor_infer", "student_train"}:
        return NO_JOB
    models = f"{name} {keys.get('pretrain')}"
    if keys.keys() & {"custom_envs", "train_env_manager"}:
        return AGENTIC
    if _VISION.search(models) or _LATER_ROLL.search(models):
        return VISION
    return MIXTURE if is_mixture(models) else TEXT


def _rlinf_kind(name: str, path: Path) -> str:
    keys = _chain(path)
    task = str(_inner(keys, "runner").get("task_type"))
    if not keys.keys() & {"cluster", "runner"}:
        return NO_JOB
    if task in ("sft", "offline"):
        return NOT_RL
    if "/diffusion/" in name:
        return DIFFUSION
    if task.startswith("embodied"):
        return EMBODIED
    if keys.keys() & {"agentloop", "tools", "agentlightning", "rollout_server"}:
        return AGENTIC
    models = f"{name} {_inner(_inner(keys, 'rollout'), 'model').get('model_path')}"
    if _VISION.search(models):
        return VISION
    return MIXTURE if is_mixture(models) else TEXT


def _chain(path: Path) -> dict[str, object]:
    """Keys of a file and of the whole files it starts from, the nearest first."""
    keys = _keys(path.read_text(encoding="utf-8"))
    listed = keys.get("defaults")
    for item in listed if isinstance(listed, list) else []:
        base = path.parent / f"{item}.yaml"
        if isinstance(item, str) and re.fullmatch(r"[\w.-]+", item) and base.is_file():
            keys = {**_chain(base), **keys, "runner": {**_inner(_chain(base), "runner"), **_inner(keys, "runner")}}
    return keys


def _inner(keys: Mapping[str, object], name: str) -> dict[str, object]:
    value = keys.get(name)
    return value if isinstance(value, dict) else {}
