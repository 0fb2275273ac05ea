"""The HTTP endpoint at which Prometheus reads a run's metrics: a thread of the driver, which training never waits for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, start_http_server

from rljob_runtime.report.prometheus import TrainingMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsEndpoint:
    """A running endpoint."""

    port: int
    close: Callable[[], None]
    """Ends it; waits at most half a second for its thread."""


def serve(metrics: TrainingMetrics, address: str, port: int) -> MetricsEndpoint | str:
    """Answer ``GET /metrics`` on ``address`` and ``port``, or say why that cannot be: a run does not end for want of it."""
    registry = CollectorRegistry()
    registry.register(metrics)
    try:
        server, _ = start_http_server(port, addr=address, registry=registry)
    except OSError as error:
        return f"metrics are not served: port {port} of {address}: {error.strerror}; end what uses it, or choose another port"

    def close() -> None:
        server.shutdown()
        server.server_close()

    return MetricsEndpoint(port=port, close=close)
