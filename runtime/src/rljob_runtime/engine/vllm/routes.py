"""Which experts vLLM chose, read where it does not return them itself.

On accelerators vLLM 0.32 returns them (``enable_return_routed_experts``, ``EngineCoreOutput.routed_experts``), from its model runner V2,
which CPU does not have. On CPU its routers call a function with the experts of a whole step; they are divided over requests here. Routes of
cached prefixes are not kept there, so that prefixes must not be cached.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import numpy as np
import torch
from vllm.model_executor.layers.fused_moe.layer import MoERunner
from vllm.platforms import current_platform
from vllm.v1.engine import EngineCoreOutput

from rljob_runtime.engine.vllm.response import Response
from rljob_runtime.errors import ModelError
from rljob_runtime.routes import RouteArray, route_dtype


class Routes(Protocol):
    """Where the routes of a step come from."""

    def hand_out(self, outputs: Sequence[EngineCoreOutput], responses: Mapping[str, Response]) -> None:
        """Give the routes of the step that was computed last to the responses in progress, by request id."""


def routes_of(config: Any, core: Any) -> Routes:
    """What fits the platform.

    Args:
        config: vLLM's of the model.
        core: vLLM's engine core.

    Raises:
        ModelError: the model has no routers.
    """
    if not current_platform.is_cpu():
        return ReturnedRoutes(route_dtype(config.get_num_experts()))
    (found,) = core.collective_rpc(StepRoutes)
    return cast(Routes, found)


class ReturnedRoutes:
    """Those that vLLM returns: of each request from where they are wanted, piece by piece."""

    def __init__(self, dtype: type[np.signedinteger]) -> None:
        """``dtype`` is what they travel in; vLLM's is unsigned."""
        self._dtype = dtype

    def hand_out(self, outputs: Sequence[EngineCoreOutput], responses: Mapping[str, Response]) -> None:
        """See :class:`Routes`."""
        for output in outputs:
            response = responses.get(output.request_id)
            if response is not None and output.routed_experts is not None:
                response.take_routes(output.routed_experts.astype(self._dtype))


class StepRoutes:
    """Those that the routers of the engine's own process say."""

    def __init__(self, worker: Any) -> None:
        """Have every router of the worker's model say what it chooses.

        Args:
            worker: vLLM's, on CPU.

        Raises:
            ModelError: the model has no routers.
        """
        self._runner = worker.model_runner
        config = self._runner.model_config
        self._dtype = route_dtype(config.get_num_experts())
        self._shape = (config.get_total_num_hidden_layers(), config.get_num_experts_per_tok())
        self._chosen: dict[int, RouteArray] = {}
        """By layer, shape (tokens of the step or more, K)."""
        routers = [module for module in self._runner.get_model().modules() if isinstance(module, MoERunner)]
        if not routers:
            raise ModelError("routes are asked for, but the model has no routers; remove training.routerReplay, or use a mixture")
        for layer in routers:
            layer.router.set_capture_fn(self._taker(layer.layer_id))

    def hand_out(self, outputs: Sequence[EngineCoreOutput], responses: Mapping[str, Response]) -> None:
        """See :class:`Routes`; the order of requests is that of the runner's batch, which stays until the next step."""
        chosen, self._chosen = self._chosen, {}
        if not chosen:
            return
        batch = self._runner.input_batch
        count = len(batch.req_ids)
        bounds = self._runner.query_start_loc.np[: count + 1].tolist()
        routes = np.zeros((bounds[-1], *self._shape), dtype=self._dtype)
        for layer, experts in chosen.items():
            routes[:, layer] = experts[: bounds[-1]]
        places = batch.num_computed_tokens_cpu[:count].tolist()
        for request_id, place, begin, end in zip(batch.req_ids, places, bounds[:-1], bounds[1:], strict=True):
            if (response := responses.get(request_id)) is not None:
                response.take_routes(routes[begin:end], place)

    def _taker(self, layer: int) -> Any:
        def take(experts: torch.Tensor) -> None:
            self._chosen[layer] = experts.numpy().astype(self._dtype)

        return take
