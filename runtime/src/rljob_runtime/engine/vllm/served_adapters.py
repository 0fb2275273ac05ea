"""Adapters in vLLM 0.32: one set of them, which every request is computed with. Functions here run inside a worker of the engine.

They come by the weight transfer as any weights do and are handed to vLLM's adapter manager as tensors: no file is written, and the
``LoRARequest`` of the requests names an adapter that is there already, so that its path is never read. An engine that has got none yet
computes with an empty one, which changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights
from vllm.lora.request import LoRARequest

from rljob_runtime.engine.vllm.packed_weights import repack_shared_weights
from rljob_runtime.errors import WeightSyncError
from rljob_runtime.weightsync.adapters import LORA_A, LORA_B, layer_of
from rljob_runtime.weightsync.assembly import shorten

ADAPTER = LoRARequest(lora_name="policy", lora_int_id=1, lora_path="comes by weight transfer")


def install(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Compute with these adapters from now on, and with no others.

    Args:
        model: vLLM's, started with ``enable_lora``.
        tensors: by name as in :mod:`rljob_runtime.weightsync.adapters`, full, on the host; at least one layer's.

    Raises:
        WeightSyncError: vLLM has no place for some; nothing was changed.
    """
    manager: Any = model.lora_manager
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    dtype = manager.lora_config.lora_dtype
    layers: dict[str, LoRALayerWeights] = {}
    for layer in dict.fromkeys(layer_of(name) for name in tensors):
        assert layer is not None
        name = layer if mapper is None else mapper.get_rename_mapper()._map_name(layer)
        lora_a, lora_b = tensors[layer + LORA_A].to(dtype), tensors[layer + LORA_B].to(dtype)
        layers[name] = LoRALayerWeights(name, lora_a.shape[0], lora_a.shape[0], lora_a, lora_b, scaling=1.0)
    places = {part for name in manager.modules for part in manager.packed_modules.get(name, [name])}
    if unknown := sorted(layers.keys() - places):
        raise WeightSyncError(
            f"vLLM has no place for adapters of {shorten(unknown)}: leave these layers out of model.lora.targetModules, "
            "or write weightSync.adapters: Merged"
        )
    _replace(manager, LoRAModel(ADAPTER.lora_int_id, max(weights.rank for weights in layers.values()), layers))


def install_received(worker: Any) -> None:
    """Compute with what an update has brought; after its end, with which vLLM removes all adapters.

    Raises:
        WeightSyncError: vLLM has no place for some.
    """
    install(worker.model_runner.get_model(), worker.weight_transfer_engine.take_adapters())


def install_empty(worker: Any) -> None:
    """Compute as the model does without adapters: with zeros."""
    manager: Any = worker.model_runner.get_model().lora_manager
    _replace(manager, manager.create_dummy_lora(ADAPTER.lora_int_id, 1, {}))


def reload_model(worker: Any) -> None:
    """Read the model's own weights from its folder again, after they were discarded; the adapters are gone then."""
    worker.reload_weights()  # the worker's, in whose configuration layers are prepared
    repack_shared_weights(worker.model_runner.get_model())
    install_empty(worker)


def _replace(manager: Any, adapter: LoRAModel) -> None:
    manager.remove_adapter(adapter.id)
    manager.add_adapter(adapter)
    manager.activate_adapter(adapter.id)
