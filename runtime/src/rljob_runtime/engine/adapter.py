"""What the job knows of an inference engine: how its workers start, what they need, what they can give back.

An engine is a class behind :class:`~rljob_runtime.engine.protocol.Engine`, which the worker's process constructs, and an adapter, which
the driver uses. :mod:`.registry` finds the adapter by ``engine.type``. Adapters are imported by the CLI, so neither they nor what they
import at module level may import the engine.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rljob_api.errors import FieldError
from rljob_api.v1alpha1 import RLJobSpec
from rljob_api.v1alpha1.components import Component
from rljob_runtime.offload.states import StateKind


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWorker:
    """How to start the worker of one engine."""

    factory: str
    """``module:Class``, constructed with ``kwargs``."""
    kwargs: Mapping[str, Any]
    env: Mapping[str, str]
    """Set before the engine is imported; the user's variables go over them."""
    concurrency: int
    """Calls that it takes at the same time."""


class JudgeServer(Protocol):
    """Makes the worker of one engine of a Judge, which serves the component's own model over HTTP."""

    def __call__(
        self, spec: RLJobSpec, component: Component, *, on_cpu: bool, num_threads: int, log_file: Path, releases_devices: bool
    ) -> EngineWorker:
        """Arguments as those of :meth:`EngineAdapter.config`; ``log_file`` receives what the server prints."""


class EngineAdapter(Protocol):
    """One type of engine."""

    @property
    def factory(self) -> str:
        """``module:Class`` of the engine; constructed in the worker's process with what :meth:`config` returns as ``config``.

        Where the class has a class method ``prepare(config)``, it does what a start needs besides devices, and leaves these alone, as the
        import of its module does: a standby process calls it while it waits to become such an engine, an engine's own process while others
        set up on its devices.
        """

    def lacking(self) -> str | None:
        """What this installation has not that a worker needs, with the remedy; None where nothing is missing."""

    @property
    def concurrency(self) -> int:
        """Calls that one worker takes at the same time."""

    @property
    def releases(self) -> frozenset[StateKind]:
        """What an engine can take off its devices between two phases; an engine that shares devices needs weights and cache here."""

    @property
    def leaves_alone(self) -> bool:
        """Whether nothing else may be allocated on its accelerators while it gives memory back, because it measures what is free there."""

    @property
    def spares_lost(self) -> bool:
        """Restart policy: whether the job goes on when one is lost, replaced or without it; else its loss ends the attempt."""

    @property
    def judge_server(self) -> JudgeServer | None:
        """How it serves a Judge; None where it serves none."""

    def config(self, spec: RLJobSpec, component: Component, *, on_cpu: bool, num_threads: int, releases_devices: bool) -> Any:
        """How to start one engine of a component.

        Args:
            spec: of the job.
            component: with role Rollout.
            on_cpu: whether CPU cores compute.
            num_threads: for numerics on the CPU.
            releases_devices: whether it has to release its devices to other components.
        """

    def environment(self, config: Any) -> Mapping[str, str]:
        """Variables of the worker's process, set before the engine is imported; the user's own go over them."""

    def argument_problems(self, path: str, arguments: Mapping[str, Any]) -> Sequence[FieldError]:
        """What of ``engine.extraArgs`` the engine's own parser refuses; nothing where the engine is not installed here.

        Args:
            path: of ``extraArgs`` in the spec.
            arguments: by the engine's own names.
        """


def missing_package(module: str, remedy: str) -> str | None:
    """For :meth:`EngineAdapter.lacking`: a module that is not installed here."""
    return None if importlib.util.find_spec(module) else f"the Python package {module} is not installed here; {remedy}"
