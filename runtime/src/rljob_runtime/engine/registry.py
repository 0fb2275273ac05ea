"""Engines by their type in the spec, and what can be checked of them before anything starts."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path

from rljob_api.errors import FieldError, SpecInvalidError
from rljob_api.v1alpha1 import RLJobSpec
from rljob_api.v1alpha1.components import Component, Engine, EngineType, Role
from rljob_runtime.engine.adapter import EngineAdapter, EngineWorker
from rljob_runtime.engine.residence import ENGINE_KINDS
from rljob_runtime.errors import SetupError

ENGINES: dict[EngineType, str] = {
    EngineType.VLLM: "rljob_runtime.engine.vllm.adapter:ADAPTER",
    EngineType.SGLANG: "rljob_runtime.engine.sglang.adapter:ADAPTER",
}
"""``module:name`` of each engine's adapter; imported when a job asks for it."""


def engine_adapter(kind: EngineType) -> EngineAdapter:
    """The adapter of an engine.

    Raises:
        SetupError: there is none.
    """
    if kind not in ENGINES:
        raise SetupError(f"engine.type {kind} has no adapter; this runtime has {', '.join(ENGINES)}")
    module, _, name = ENGINES[kind].partition(":")
    adapter: EngineAdapter = getattr(importlib.import_module(module), name)
    return adapter


def engine_worker(spec: RLJobSpec, component: Component, *, on_cpu: bool, num_threads: int, releases_devices: bool) -> EngineWorker:
    """The worker of one engine of a rollout component; arguments as :meth:`EngineAdapter.config` takes them.

    Raises:
        SetupError: there is no such engine, or it has to leave its devices and cannot.
    """
    kind = (component.engine or Engine()).type
    adapter = engine_adapter(kind)
    if releases_devices and not adapter.releases >= ENGINE_KINDS:
        raise SetupError(
            f"{component.name} shares devices with other components, and engine {kind} cannot take its weights and cache off them; "
            "place it on devices of its own"
        )
    config = adapter.config(spec, component, on_cpu=on_cpu, num_threads=num_threads, releases_devices=releases_devices)
    return EngineWorker(
        factory=adapter.factory, kwargs={"config": config}, env=adapter.environment(config), concurrency=adapter.concurrency
    )


def judge_worker(
    spec: RLJobSpec, component: Component, *, on_cpu: bool, num_threads: int, log_file: Path, releases_devices: bool
) -> EngineWorker:
    """The worker of one engine of a judge; arguments as :class:`~rljob_runtime.engine.adapter.JudgeServer` takes them.

    Raises:
        SetupError: there is no such engine, or it serves no judges.
    """
    kind = (component.engine or Engine()).type
    server = engine_adapter(kind).judge_server
    if server is None:
        raise SetupError(f"{component.name} has the role Judge, and engine {kind} serves no judges; use engine.type: VLLM")
    return server(spec, component, on_cpu=on_cpu, num_threads=num_threads, log_file=log_file, releases_devices=releases_devices)


def check_engines(spec: RLJobSpec, *, on_this_python: bool) -> None:
    """Find out whether the engines of a job are installed and take their arguments.

    A component with an interpreter of its own is left out: what that has is not known here.

    Args:
        spec: of the job.
        on_this_python: whether workers run on this installation; else a package that is missing here says nothing.

    Raises:
        SetupError: an engine's package is not installed.
        SpecInvalidError: arguments in ``engine.extraArgs`` that the engine does not take.
    """
    problems: list[FieldError] = []
    for path, engine in _engines(spec):
        adapter = engine_adapter(engine.type)
        if on_this_python and (lacking := adapter.lacking()) is not None:
            raise SetupError(f"{path}.type {engine.type}: {lacking}")
        if engine.extra_args:
            problems += adapter.argument_problems(f"{path}.extraArgs", engine.extra_args)
    if problems:
        raise SpecInvalidError(problems)


def _engines(spec: RLJobSpec) -> Iterator[tuple[str, Engine]]:
    for index, component in spec.with_role(Role.ROLLOUT):
        if component.python_interpreter is None:
            yield f"spec.components[{index}].engine", component.engine or Engine()
