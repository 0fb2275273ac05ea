"""What an update must bring, going by the files of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import DeepseekV3Config

from rljob_runtime.engine.expected_parameters import expected_parameters


def test_layers_for_multi_token_prediction_are_not_expected(tmp_path: Path) -> None:
    DeepseekV3Config(num_hidden_layers=2, num_mtp_layers=1).save_pretrained(tmp_path)
    names = ["model.embed_tokens.weight", "model.layers.1.mlp.gate.e_score_correction_bias"]
    behind = ["model.layers.2.eh_proj.weight", "model.layers.2.mlp.experts.0.up_proj.weight", "model.layers.10.enorm.weight"]
    save_file({name: torch.ones(2) for name in names + behind}, tmp_path / "model.safetensors")
    assert expected_parameters(str(tmp_path)) == dict.fromkeys(names, (2,))
