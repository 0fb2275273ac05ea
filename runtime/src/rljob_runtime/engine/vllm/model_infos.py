"""What vLLM knows of model classes, kept in the image.

vLLM inspects the class of a model in a process of its own, 8 s of processor time at every start of an engine, and remembers the answer
below ``VLLM_CACHE_ROOT``. That folder is empty in a new pod. The image is built with the answers for common classes (``python
model_infos.py FOLDER``), and :func:`seed` puts them where vLLM looks. vLLM compares a hash of the class's source with each, so that an
answer of another version is not used.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

FOLDER_VARIABLE = "RLJOB_VLLM_MODEL_INFOS"
"""Set by the image."""
ARCHITECTURES = (
    "Gemma3ForCausalLM",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "MixtralForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "TransformersForSequenceClassification",
)
"""The last one is looked at before the class of any reward model."""
_FOLDER = "modelinfos"


def seed(environment: Mapping[str, str] = os.environ) -> None:
    """Copy what the image knows and vLLM's cache lacks.

    Without the image's folder nothing happens. A cache that cannot be written is logged: vLLM does without it, too.
    """
    known = environment.get(FOLDER_VARIABLE)
    if known is None:
        return
    caches = environment.get("XDG_CACHE_HOME", "~/.cache")
    cache = Path(environment.get("VLLM_CACHE_ROOT", f"{caches}/vllm")).expanduser() / _FOLDER
    try:
        cache.mkdir(parents=True, exist_ok=True)
        for source in Path(known).glob("*.json"):
            _copy(source, cache / source.name)
    except OSError as error:
        logger.warning("vLLM inspects the model's class again, which takes seconds: %s cannot be written: %s", cache, error)


def _copy(source: Path, target: Path) -> None:
    if not target.exists():
        partial = target.with_name(f"{target.name}.{os.getpid()}")
        shutil.copyfile(source, partial)
        partial.replace(target)  # engines that start side by side see whole files


def write(folder: Path) -> None:
    """Inspect :data:`ARCHITECTURES` and write the answers to ``folder``; in the runtime image, while it is built."""
    cache = folder.parent / f".{folder.name}"
    os.environ["VLLM_CACHE_ROOT"] = str(cache)
    from vllm.model_executor.models import registry

    # A process each keeps CUDA out of vLLM's own, which matters to engines only; one for each would take a minute.
    registry._run_in_subprocess = lambda inspect: inspect()  # type: ignore[assignment]
    for name in ARCHITECTURES:
        registry.ModelRegistry.models[name].inspect_model_cls()
    (cache / _FOLDER).rename(folder)
    shutil.rmtree(cache)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
