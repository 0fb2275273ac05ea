"""Where a job's models and tokenizer come from: folders that the spec names, or a Hub, from which each node downloads its own once.

::

    spec ── locate (driver, before anything starts) ──> ModelSources ── download (a worker per node) ──> folders by node
                                                                └── spec with local folders: for the driver, for the workers of a node

No other worker asks the Hub, and engines could not: they run with HF_HUB_OFFLINE.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from rljob_api.planning.plan import Plan
from rljob_api.v1alpha1 import RLJobSpec
from rljob_api.v1alpha1.components import Component, Role, ServedModel
from rljob_api.v1alpha1.data import Model
from rljob_runtime.cluster.protocol import Cluster, Pending, Worker, WorkerSpec
from rljob_runtime.errors import DownloadError, ModelError, StartupDeadlineError
from rljob_runtime.hub.resolve import resolve
from rljob_runtime.hub.source import HubModel, is_hub_id
from rljob_runtime.job import worker_settings
from rljob_runtime.job.roles import ROLES
from rljob_runtime.report.disk import replace_text
from rljob_runtime.report.text import format_bytes

SAY_EVERY_S = 10.0
"""How often a download reports how far it is."""
ANSWER_S = 10.0
"""For a worker to say how far it is; one that does not is left out of that line."""
RECORD = "models.json"
"""In the run folder: which commit of a Hub model the run uses, so that a resumed run uses the same."""

AnyModel = TypeVar("AnyModel", bound=Model | ServedModel)
Folders = Mapping[str, str]
"""Local folder by what the spec names, for what the spec names on a Hub."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSources:
    """What to download, and what the driver has already."""

    models: tuple[HubModel, ...] = ()
    """Empty where the spec names folders only."""
    here: Folders = field(default_factory=dict)
    """Folders on the driver's machine, without weights."""

    @property
    def commits(self) -> dict[str, str]:
        """Commit by repository."""
        return {model.repo: model.commit for model in self.models}


LOCAL = ModelSources()
"""Folders only."""


def locate(spec: RLJobSpec, earlier: Mapping[str, str], *, retries: bool = True) -> ModelSources:
    """Find model and tokenizer: folders on this machine, or on the Hub.

    Args:
        spec: of the job.
        earlier: commits that an earlier attempt of the run used, from :func:`recorded`.
        retries: of a Hub that cannot be reached, see :func:`~rljob_runtime.hub.resolve.resolve`.

    Raises:
        ModelError: one of them is not to be had.
    """
    models: list[HubModel] = []
    here: dict[str, str] = {}
    for named in _named(spec):
        if not is_hub_id(named.path):
            _check_folder(named)
            continue
        model, folder = resolve(
            named.path,
            earlier.get(named.path) or named.revision,
            field=named.field,
            revision_field=named.revision_field,
            weights=named.is_model,
            code=named.code,
            retries=retries,
        )
        models.append(model)
        here[named.path] = str(folder)
    return ModelSources(models=tuple(models), here=here)


def with_folders(spec: RLJobSpec, folders: Folders) -> RLJobSpec:
    """The spec as a machine sees it on which what it names on the Hub lies in ``folders``."""
    if not folders:
        return spec
    tokenizer = spec.model.tokenizer_path
    changes = {
        "path": folders.get(spec.model.path, spec.model.path),
        "tokenizer_path": None if tokenizer is None else folders.get(tokenizer, tokenizer),
    }
    components = [_with_folder(component, folders) for component in spec.components]
    return spec.model_copy(update={"model": spec.model.model_copy(update=changes), "components": tuple(components)})


def _with_folder(component: Component, folders: Folders) -> Component:
    """A Teacher's model; the engines of a Judge download theirs."""
    if component.role is not Role.TEACHER or component.model is None:
        return component
    model = at_folder(component.model, folders)
    return component.model_copy(update={"model": model})


def at_folder(model: AnyModel, folders: Folders) -> AnyModel:
    """A model as a machine sees it on which what lies on the Hub is in ``folders``."""
    folder = folders.get(model.path)
    return model if folder is None else cast(AnyModel, model.model_copy(update={"path": folder, "revision": None}))


def record(folder: Path, spec: RLJobSpec, sources: ModelSources) -> None:
    """Keep in the run folder which commits are used.

    Raises:
        RuntimeFault: it cannot be written.
    """
    if sources.models:
        kept = {"revisions": _revisions(spec), "commits": sources.commits}
        replace_text(folder / RECORD, json.dumps(kept, indent=2) + "\n", "the commits of the models")


def recorded(folder: Path, spec: RLJobSpec) -> dict[str, str]:
    """Commits by repository that the run in ``folder`` used, of those whose revision it asked for too; none where there is no such run."""
    try:
        kept = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        asked: dict[str, str | None] = kept["revisions"]
        return {repo: commit for repo, commit in kept["commits"].items() if _revisions(spec).get(repo) == asked[repo]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


async def download(
    sources: ModelSources, spec: RLJobSpec, plan: Plan, cluster: Cluster, timeout_s: float, notify: Callable[[str], None]
) -> dict[int, Folders]:
    """Download everything on each node that loads a model; returns the folders by rank of the node.

    Raises:
        ModelError: a node may not read it, or has too small a disk; names the node.
        DownloadError: the connection of a node failed.
        StartupDeadlineError: it took too long; says which nodes are how far.
        ClusterError, WorkerLostError, WorkerFailedError.
    """
    if not sources.models:
        return {}
    deadline = time.monotonic() + timeout_s
    here = _models_of_nodes(spec, plan, sources)
    ranks = sorted(here)
    workers = await cluster.start_workers([_worker(here[rank], spec, plan, rank) for rank in ranks], timeout_s)
    try:
        fetching = {rank: worker.start("fetch") for rank, worker in zip(ranks, workers, strict=True)}
        tasks = {asyncio.ensure_future(_named_result(plan, rank, call, timeout_s)): rank for rank, call in fetching.items()}
        try:
            while waiting := [task for task in tasks if not task.done()]:
                left_s = deadline - time.monotonic()
                await asyncio.wait(waiting, timeout=max(0.0, min(SAY_EVERY_S, left_s)), return_when=asyncio.FIRST_EXCEPTION)
                _raise_first(tasks)
                slow = [(tasks[t], workers[ranks.index(tasks[t])]) for t in tasks if not t.done()]
                if slow:
                    text = f"downloading {_in_words(sources)}: {await _progress(here, plan, slow)}"
                    if time.monotonic() >= deadline:
                        raise StartupDeadlineError(f"{text} after {timeout_s:.0f} s (spec.startupDeadlineSeconds)")
                    notify(text)
            return {rank: task.result() for task, rank in tasks.items()}
        finally:
            for task in tasks:
                task.cancel()
    finally:
        cluster.end_workers(workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Named:
    """A folder or repository that the spec names."""

    path: str
    revision: str | None
    field: str
    """That names it."""
    revision_field: str
    code: bool
    """Whether its Python files are used."""
    is_model: bool = False
    """Whether its weights are used."""
    component: str | None = None
    """Whose model it is; None: the policy's, of all others."""


def _named(spec: RLJobSpec) -> list[_Named]:
    """The model, the tokenizer where it lies elsewhere, and a teacher's model."""
    model = spec.model
    named = [_place("spec.model", model.path, model.revision, code=model.trust_remote_code, is_model=True)]
    path, revision = model.tokenizer_path, model.tokenizer_revision
    if path is not None and path != model.path:
        named.append(
            _Named(
                path=path,
                revision=revision,
                field="spec.model.tokenizerPath",
                revision_field="spec.model.tokenizerRevision",
                code=model.trust_remote_code,
            )
        )
    for index, component in spec.with_role(Role.TEACHER):
        if (own := component.model) is not None:
            at = f"spec.components[{index}].model"
            named.append(_place(at, own.path, own.revision, code=own.trust_remote_code, is_model=True, component=component.name))
    return named


def _place(at: str, path: str, revision: str | None, **more: Any) -> _Named:
    return _Named(path=path, revision=revision, field=f"{at}.path", revision_field=f"{at}.revision", **more)


def _revisions(spec: RLJobSpec) -> dict[str, str | None]:
    """What is asked for, by repository."""
    return {named.path: named.revision for named in _named(spec)}


def _check_folder(named: _Named) -> None:
    folder = Path(named.path)
    if not folder.exists():
        raise ModelError(
            f"{named.field} {named.path!r}: no such folder in {Path.cwd()}, and not a Hub id (owner/name); mount the volume that "
            "holds it, or correct the path"
        )
    if not (folder / "config.json").is_file() and named.is_model:
        raise ModelError(f"{folder} is a folder without config.json; {named.field} must name a Hugging Face model folder or a Hub id")
    if named.revision is not None:
        raise ModelError(
            f"{named.revision_field} {named.revision!r}: {named.field} {folder} is a folder here, which has no revisions; remove the "
            "field, or write a Hub id as the path"
        )


def _models_of_nodes(spec: RLJobSpec, plan: Plan, sources: ModelSources) -> dict[int, tuple[HubModel, ...]]:
    """What each node downloads: what a process there loads, because its state takes memory of a device, or of which it reads files."""
    own = {named.component: named.path for named in _named(spec) if named.component is not None}
    shared = {named.path for named in _named(spec) if named.component is None}
    wanted: dict[int, set[str]] = {}
    for component in plan.components:
        role = ROLES[component.role]
        if (role.state_kinds and not role.serves) or role.reads_model:
            paths = {own[component.name]} if component.name in own else shared
            for process in component.processes:
                wanted.setdefault(process.node_rank, set()).update(paths)
    found = {rank: tuple(model for model in sources.models if model.repo in paths) for rank, paths in wanted.items()}
    return {rank: models for rank, models in found.items() if models}


def _worker(models: tuple[HubModel, ...], spec: RLJobSpec, plan: Plan, rank: int) -> WorkerSpec:
    return WorkerSpec(
        name=f"download-{rank}",
        factory="rljob_runtime.hub.download:Downloader",
        kwargs={"models": models},
        node_rank=rank,
        env=worker_settings.download_env(spec, plan, rank),
        concurrency=2,
    )


async def _named_result(plan: Plan, rank: int, call: Pending, timeout_s: float) -> Folders:
    try:
        folders: Folders = await call.result(timeout_s)
    except (ModelError, DownloadError) as error:
        raise type(error)(f"{_node(plan, rank)}: {error}") from error
    return folders


def _raise_first(tasks: Mapping[asyncio.Task[Folders], int]) -> None:
    for task in tasks:
        if task.done():
            task.result()


async def _progress(here: Mapping[int, tuple[HubModel, ...]], plan: Plan, slow: Sequence[tuple[int, Worker]]) -> str:
    """How far each node is that is not done."""

    def of(rank: int) -> str:
        total = [model.size_bytes for model in here[rank]]
        return "" if None in total else f" of {format_bytes(sum(size or 0 for size in total))}"

    answers = await asyncio.gather(*(w.call("received_bytes", timeout_s=ANSWER_S) for _, w in slow), return_exceptions=True)
    return ", ".join(
        f"{_node(plan, rank)} {format_bytes(answer)}{of(rank)}" if isinstance(answer, int) else f"{_node(plan, rank)} does not say"
        for (rank, _), answer in zip(slow, answers, strict=True)
    )


def _in_words(sources: ModelSources) -> str:
    return " and ".join(f"{model.repo} ({model.commit[:12]})" for model in sources.models)


def _node(plan: Plan, rank: int) -> str:
    return f"node {rank} ({plan.nodes[rank].group})"
