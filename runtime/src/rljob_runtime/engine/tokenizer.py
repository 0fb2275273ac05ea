"""The tokenizer that an engine needs: for the end-of-sequence token and for stop strings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rljob_runtime.engine.protocol import EngineConfig
from rljob_runtime.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(config: EngineConfig) -> PreTrainedTokenizerBase | None:
    """The tokenizer, whose end-of-sequence token ends responses; None where the model's folder has none.

    Raises:
        ModelError: none is there, and requests may have stop strings.
    """
    folder = config.tokenizer_path or config.model_path
    if config.tokenizer_path is None and not (Path(folder) / "tokenizer_config.json").exists():
        if config.finds_texts:
            raise ModelError(f"{folder} has no tokenizer, which rollout.stopStrings need; set model.tokenizerPath")
        return None
    from transformers import AutoTokenizer

    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
        folder, trust_remote_code=config.trust_remote_code, local_files_only=True
    )
    return found
