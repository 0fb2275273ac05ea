"""The engine of the recipe: its adapter, and the engine, which computes nothing real."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rljob_api.errors import FieldError, field_error
from rljob_api.v1alpha1 import RLJobSpec
from rljob_api.v1alpha1.components import Component
from rljob_runtime.engine.adapter import JudgeServer, missing_package
from rljob_runtime.engine.fake import FakeEngine
from rljob_runtime.offload.states import StateKind


@dataclass(frozen=True, kw_only=True)
class ParrotConfig:
    """Settings of one engine."""

    max_num_seqs: int
    letters: int


class ParrotEngine(FakeEngine):
    """Answers with letters by rule."""

    def __init__(self, config: ParrotConfig) -> None:
        super().__init__(vocab_size=config.letters, max_num_seqs=config.max_num_seqs)


@dataclass(frozen=True, kw_only=True)
class ParrotAdapter:
    """What the driver knows of the engine."""

    factory: str = f"{__name__}:ParrotEngine"
    package: str = "json"
    concurrency: int = 2
    releases: frozenset[StateKind] = frozenset()
    leaves_alone: bool = False
    spares_lost: bool = False
    judge_server: JudgeServer | None = None

    def lacking(self) -> str | None:
        """The package, if it is not here."""
        return missing_package(self.package, "install it")

    def config(self, spec: RLJobSpec, component: Component, *, on_cpu: bool, num_threads: int, releases_devices: bool) -> ParrotConfig:
        """From the spec to the settings."""
        assert component.engine is not None
        return ParrotConfig(max_num_seqs=component.engine.max_running_requests, letters=component.engine.extra_args.get("letters", 26))

    def environment(self, config: ParrotConfig) -> Mapping[str, str]:
        """Variables of the worker."""
        return {"PARROT_LETTERS": str(config.letters), "OMP_NUM_THREADS": "99"}

    def argument_problems(self, path: str, arguments: Mapping[str, Any]) -> Sequence[FieldError]:
        """Arguments other than ``letters``."""
        return [field_error(f"{path}.{name}", value, "is unknown", "remove it") for name, value in arguments.items() if name != "letters"]


ADAPTER = ParrotAdapter()
