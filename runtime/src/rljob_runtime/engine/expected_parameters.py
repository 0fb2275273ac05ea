"""Which parameters a model folder promises: the names and shapes an update must bring.

Read from the safetensors headers where the folder has weights, else from the architecture built without memory (``meta`` device).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from rljob_runtime.errors import ModelError
from rljob_runtime.records import WeightManifest
from rljob_runtime.weightsync.checkpoint_names import checkpoint_parts

_DECODER_LAYER = re.compile(r"model\.layers\.(\d+)\.")
TIED_HEAD = "lm_head.weight"
"""With tied embeddings it is the embedding itself: checkpoints may or may not write it, engines load it once."""


def expected_parameters(model_path: str, trust_remote_code: bool = False) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> full shape of every parameter of the model.

    A tied head is left out, as are rotary tables that old checkpoints carry and no model loads, and layers behind the last one, which
    checkpoints of DeepSeek-V3 and GLM-4-MoE have for multi-token prediction.

    Raises:
        ModelError: the folder has no readable configuration or weights.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError) as exc:
        raise ModelError(f"model folder {model_path}: config.json is not readable: {exc}") from exc
    files = sorted(Path(model_path).glob("*.safetensors"))
    shapes = _from_headers(files) if files else _from_architecture(config, trust_remote_code)
    text_config = config.get_text_config()
    if getattr(text_config, "tie_word_embeddings", False):
        shapes.pop(TIED_HEAD, None)
    num_layers = getattr(text_config, "num_hidden_layers", None)
    return {name: shape for name, shape in shapes.items() if not name.endswith("rotary_emb.inv_freq") and not _is_behind(name, num_layers)}


def _is_behind(name: str, num_layers: int | None) -> bool:
    """Whether it belongs to a decoder layer that the model does not have."""
    found = _DECODER_LAYER.match(name)
    return found is not None and num_layers is not None and int(found[1]) >= num_layers


def is_tied(expected: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether the head is the embedding, going by what ``expected_parameters`` found."""
    return TIED_HEAD not in expected


def with_tied_head(expected: Mapping[str, tuple[int, ...]], manifest: WeightManifest) -> dict[str, tuple[int, ...]]:
    """Accept a tied head in a manifest: trainers that walk every module send it, others do not; vLLM skips it."""
    head = next((slot for bucket in manifest.buckets for slot in bucket.slots if slot.name == TIED_HEAD), None)
    if head is None or not is_tied(expected):
        return dict(expected)
    return {**expected, TIED_HEAD: head.shape}


def _from_headers(files: list[Path]) -> dict[str, tuple[int, ...]]:
    """Names and shapes from safetensors headers; reads no weights."""
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        try:
            with safe_open(file, framework="numpy") as weights:
                shapes.update({name: tuple(weights.get_slice(name).get_shape()) for name in weights.keys()})
        except SafetensorError as exc:
            raise ModelError(f"weights file {file} is not readable: {exc}; fetch it again") from exc
    return shapes


def _from_architecture(config: object, trust_remote_code: bool) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the architecture, built on the meta device."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return {name: part.shape for name, part in checkpoint_parts(model).items()}
